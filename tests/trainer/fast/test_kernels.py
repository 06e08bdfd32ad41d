"""Triton's kernels, interpreted on the CPU, against torch; run where there is a Triton."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agent.conftest import python

pytestmark = pytest.mark.megatron

SHAPES = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(sys.argv[1])
import stand_ins, torch
from launcher.trainer.fast.kernels import layer_kernels as kernels
from launcher.trainer.fast.kernels import expert_kernels as experts, products, tokens
tokens.PIECE, tokens.LOGITS = 32, 4
torch.manual_seed(0)
n, width, seed = 12, 96, torch.tensor([7])

def like(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

def parts(k, wide=width):
    return torch.full((5, k, wide), float("nan"))

def summed(parts):
    into = torch.empty(2, *parts.shape[1:])
    kernels.column_sums(torch.stack((parts, parts)), into)
    assert torch.equal(*into)
    return into[0]

x, residual, of_normed, of_hidden = (torch.randn(n, width) for _ in range(4))
bias, gain, shift = (torch.randn(width) for _ in range(3))
for p in (0.0, 0.5):
    ones, none = torch.ones(n, width), torch.zeros(width)
    factor = kernels.add_norm(ones, none, ones * 0, gain, shift, 1e-5, p, seed)[0]
    assert set(factor.unique().tolist()) <= {0.0, 1 / (1 - p)}
    assert abs(float(factor.mean()) - 1) < 0.1
    stand_ins.keeps = lambda *_: factor
    for before in (None, residual):
        given = (x, bias, before, gain, shift, 1e-5, p, seed)
        hidden, normed, known = kernels.add_norm(*given)
        like((hidden, normed), stand_ins.add_norm(*given)[:2])
    for added in (None, of_hidden):
        rest, ours, whole = (of_normed, added, gain, p, seed, hidden), parts(3), parts(3)
        found = kernels.add_norm_back(*rest, known, ours)
        expected = stand_ins.add_norm_back(*rest, torch.tensor(1e-5), whole)
        like((*found, summed(ours)), (*expected, whole.sum(0)))
for tanh in (False, True):
    like([kernels.gelu(x, bias, tanh)], [stand_ins.gelu(x, bias, tanh)])
    given, ours, whole = (x, bias, of_normed, tanh), parts(1), parts(1)
    found, expected = kernels.gelu_back(*given, ours), stand_ins.gelu_back(*given, whole)
    like((found, summed(ours)), (expected, whole.sum(0)))
given, ours, whole = (x, residual, of_normed, 8), parts(1, 3 * width), parts(1, 3 * width)
found, expected = kernels.pack(*given, ours), stand_ins.pack(*given, whole)
like((found, summed(ours)), (expected, whole.sum(0)))
logits, wanted = torch.randn(6, 100), torch.randint(100, (6,))
ours, theirs = logits.clone(), logits.clone()
like((tokens.cross_entropy(ours, wanted), ours), (stand_ins.cross_entropy(theirs, wanted), theirs))
by = torch.randn(n)
like([tokens.weigh(x, by)], [stand_ins.weigh(x, by)])
named, last = torch.tensor([3, 1, 3, 3, 0, 1, 4, 4, 2, 3, 3, 6]), torch.ones(9, dtype=torch.int32)
sums = torch.zeros(9, width)
for _ in range(2):  # the second time after what the first left
    ours = torch.randn(9, width)
    theirs = ours.clone()
    stand_ins.add_rows(x, named, theirs, sums, last)
    tokens.add_rows(x, named, ours, sums, last)
    like((ours, sums), (theirs, 0 * sums))

ends, k = torch.tensor([5, 5, 21, 22], dtype=torch.int32), 3  # one has none, and some are others'
x, factors = torch.randn(8, width), torch.rand(30)
whose, places = (torch.randint(n, (m,), dtype=torch.int32) for n, m in ((8, 30), (30, 24)))
known, places = slice(0, 22), places.view(8, k)
like([experts.spread(x, whose, ends)[known]], [stand_ins.spread(x, whose, ends)[known]])
rows, slopes = torch.randn(30, width), torch.randn(30, width // 2)
like([experts.collect(rows, places, ends)], [stand_ins.collect(rows, places, ends)])
for wide in (32, 1024):  # in several pieces, and in one
    experts.WIDE = experts.PIECE = wide
    like([experts.swiglu(rows, factors, ends)[known]],
         [stand_ins.swiglu(rows, factors, ends)[known]])
    found = experts.swiglu_back(rows, factors, slopes, ends)
    expected = stand_ins.swiglu_back(rows, factors, slopes, ends)
    like([x[known] for x in found], [x[known] for x in expected])
    for adds in (False, True):
        made, lies = torch.randn(4, 6, 7), torch.randn(4, 50)
        ours, theirs = (x.as_strided((4, 6, 7), (50, 7, 1)) for x in (lies, lies.clone()))
        stand_ins.put(made, theirs, 0.5, adds), experts.put(made, ours, 0.5, adds)
        like([ours], [theirs])
products.HIGH = products.WIDE = products.DEEP = 16
products.SHAPE, products.TOGETHER = dict(HIGH=16, WIDE=16, DEEP=16), 2
weights = torch.randn(4, 40, width)
rows[22:] = slopes[22:] = float("nan")
like([products.of_rows(rows, weights.mT, ends)[known]],
     [stand_ins.of_rows(rows, weights.mT, ends)])
like([products.of_rows(rows, weights.transpose(1, 2).contiguous(), ends)[known]],
     [stand_ins.of_rows(rows, weights.mT, ends)])
like([products.of_experts(slopes, rows, ends)], [stand_ins.of_experts(slopes, rows, ends)])
print("as torch has it")
"""


@pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")
def test_each_kernel_is_as_torch_has_it(tmp_path: Path) -> None:
    """A row that isn't a power of two, fewer programs than rows, and rows left over."""
    (script := tmp_path / "kernels.py").write_text(SHAPES)
    done = python(str(script), str(Path(__file__).parent))
    assert done.stdout.endswith("as torch has it\n"), done.stderr
