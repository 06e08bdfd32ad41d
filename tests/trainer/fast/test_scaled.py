"""Products in FP8 against float64, and training by them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.ranks.exit_codes import OptionError
from tests.agent.conftest import TINY, start
from tests.trainer.fast.test_fast import LLAMA, SPLIT, compiled_program

pytestmark = pytest.mark.megatron

CASTS = """
import json, torch
from launcher.trainer.fast import scaled

def rounded(x, bits, least, most):
    '''x in float64 as the nearest number of so many bits of fraction, ties to even.'''
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=least)
    step = torch.exp2(exponent - bits)
    return (torch.round(x / step) * step).clamp(-most, most)

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
torch.manual_seed(1)
wide = torch.exp(4 * torch.randn(48, 64))
told = {}
for name, x in {"normal": torch.randn(48, 64), "wide": wide, "zeros": torch.zeros(48, 64),
                "tiny": 1e-30 * torch.randn(48, 64), "large": 1e30 * torch.randn(48, 64)}.items():
    x = x.bfloat16()
    for kind, shape in ((torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)):
        made, scale = scaled.cast(x, kind)
        inside = (x.float() * scale.reciprocal()).double()
        told[f"{name} {kind}"] = [
            torch.equal(made.double(), rounded(inside, *shape)),
            bool(made.double().isfinite().all()),
            float((scale.double() * shape[2] / x.double().abs().max().clamp(min=1e-12) - 1).abs()),
        ]

def near(x, of, kind):
    made, scale = scaled.cast(x, kind)
    return made.double() * scale.double()

x, w, g = (torch.randn(*shape).bfloat16() for shape in ((32, 64), (48, 64), (32, 48)))
for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = scaled.linear(a.view(8, 4, 64), b, of_gradient=kind)
    y.backward(g.view(8, 4, 48))
    e4m3 = torch.float8_e4m3fn
    x8, w8, g8 = near(x, a, e4m3), near(w, b, e4m3), near(g, y, kind)
    pairs = {"y": (y.view(32, 48), x8 @ w8.t(), x.double() @ w.double().t()),
             "x": (a.grad, g8 @ w8, g.double() @ w.double()),
             "w": (b.grad, g8.t() @ x8, g.double().t() @ x.double())}
    for name, (made, wanted, exact) in pairs.items():
        told[f"{name} {kind}"] = [float((made.double() - of).norm() / of.norm())
                                  for of in (wanted, exact)]
print(json.dumps(told))
"""


def test_casts_and_products_equal_float64s(tmp_path: Path) -> None:
    """A scale that overflows or divides by nothing; a gradient by the wrong scale, or turned."""
    (script := tmp_path / "casts.py").write_text(CASTS)
    told = json.loads(start(1, str(script)).output.splitlines()[-1])
    casts = {name: each for name, each in told.items() if len(each) == 3}
    assert len(casts) == 10
    for name, (equal, finite, scale) in casts.items():
        assert (equal, finite) == (True, True), name
        assert scale < 1e-6 or "zeros" in name or "tiny" in name, name
    products = {name: each for name, each in told.items() if len(each) == 2}
    assert len(products) == 6
    for name, (emulated, exact) in products.items():
        assert emulated < 4e-3, name  # bf16's own rounding of the result
        assert 5e-3 < exact < 0.1, name  # what 3 and 2 bits of fraction leave


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, LLAMA), (2, (*SPLIT, "--sequence-parallel")), (2, (*SPLIT, *LLAMA))],
    ids=["one", "sequence", "tensor"],
)
def test_training_in_fp8_stays_by_bf16(
    ranks: int, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights' gradients that miss a part of the sequence, or a scale of one rank for both's."""
    script = compiled_program(tmp_path, monkeypatch)
    given = (*TINY, "--mock-data", "--bf16", "--train-iters", "12", "--global-batch-size", "2")
    given += ("--lr", "2e-3")
    runs = [
        start(ranks, script, "layers" if ranks > 1 else "whole", *given, *options, *fp8)
        for fp8 in ((), ("--fp8-format", "hybrid"))
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].output + runs[1].output
    bf16, fp8 = runs
    assert "products in FP8" in fp8.output
    assert "products in FP8" not in bf16.output
    assert fp8.losses == pytest.approx(bf16.losses, abs=0.03)
    assert fp8.losses != bf16.losses


@pytest.mark.parametrize(("hidden", "offered"), [(768, False), (1024, False), (2048, True)])
@pytest.mark.parametrize("asked", ["auto", "transformer_engine"])
def test_transformer_engines_fp8_is_offered_where_it_was_a_gain(
    hidden: int, offered: bool, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for GPT-2, and slower than bf16."""
    from launcher.trainer.gpt import model

    class Offered(Exception):
        pass

    def layers(**_: Any) -> None:
        raise Offered

    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", layers)
    given = {"hidden_size": hidden, "transformer_impl": asked, "fp8": "hybrid", "on_cpu": False}
    arguments = Namespace(**given, moe_grouped_gemm=False, num_experts=None)
    with pytest.raises(Offered if offered else OptionError) as refused:
        model._layers(arguments, None, Namespace(compiled=False))
    assert offered or "98 ms" in str(refused.value)


OLDER = """
import torch
from launcher.trainer.fast import fast
from launcher.trainer.gpt import arguments
given = arguments.parse({!r}.split())
given.on_cpu = False
for version in ("2.5.0a0+e000cf0ad9.nv24.10", "2.7.0a0+7c8ec84dab"):
    torch.__version__ = torch.torch_version.TorchVersion(version)
    for there in (True, False):
        fast.find_spec = lambda name: there
        print(fast.choose(given, arguments.layout(given, 1)).compiled or "theirs")
"""


def test_transformer_engine_has_fp8_where_torch_has_not(tmp_path: Path) -> None:
    """Rows up to 24.10 were refused for their torch, though they have Transformer Engine."""
    fp8 = " ".join((*TINY, "--mock-data", "--bf16", "--fp8-format", "hybrid"))
    (script := tmp_path / "older.py").write_text(OLDER.format(fp8))
    done = start(1, str(script))
    assert done.output.split() == ["theirs", "whole", "whole", "whole"], done.output


def test_fp8_is_refused_where_nothing_has_it(tmp_path: Path) -> None:
    """It trained in bf16 instead, and nothing said so."""
    fp8 = ("--mock-data", "--bf16", "--fp8-format", "hybrid")
    refused = start(1, "-m", "launcher.trainer.gpt", *TINY, *fp8)
    assert refused.code == 2, refused.output
    assert "--fp8-format needs Transformer Engine, or layers compiled on GPUs" in refused.output


REFUSED = """
import argparse, torch
from launcher.trainer.fast import scaled
given = argparse.Namespace(fp8_recipe="delayed")
def tried(capability, recipe="delayed"):
    torch.cuda.get_device_capability = lambda: capability
    torch.cuda.get_device_name = lambda: "NVIDIA A100"
    try:
        scaled.check_support(argparse.Namespace(fp8_recipe=recipe))
    except scaled.OptionError as error:
        return str(error)
print(tried((8, 0)), tried((8, 9)), tried((9, 0), "mxfp8"), sep="; ")
del torch._scaled_mm
print(tried((9, 0)))
"""


def test_a_card_or_torch_without_it_is_named(tmp_path: Path) -> None:
    """cuBLAS's error behind it, after minutes of compiling, names neither."""
    (script := tmp_path / "refused.py").write_text(REFUSED)
    lines = start(1, str(script)).output.splitlines()
    assert lines[0] == (
        "--fp8-format needs a GPU of compute capability 8.9 or newer, and the NVIDIA A100 has 8.0"
        "; None; --fp8-recipe mxfp8 needs Transformer Engine"
    )
    assert "needs torch 2.5 or newer" in lines[1]
