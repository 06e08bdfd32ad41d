"""Experts as grouped products against Megatron's own, one after the other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.agent.conftest import start
from tests.trainer.test_models import MIXTRAL, QWEN3

pytestmark = pytest.mark.megatron

BESIDE_MEGATRONS = """
import json, os, sys
from launcher.agent import compat
compat.prepare()
sys.path.append(sys.argv[1])
import stand_ins, torch
stand_ins.install()
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import model, training
from launcher.trainer.fast import compiled
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

traced = lambda function, **_: torch._dynamo.optimize("aot_eager")(function)
shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
shape += "--micro-batch-size 3 --train-iters 1 --lr 1 --mock-data --hidden-dropout 0 "
shape += "--attention-dropout 0"
begun = False
for words in json.loads(sys.argv[2]):
    given = command_line.parse([*shape.split(), *words.split()])
    given.on_cpu = True
    try:
        compat.check_model(given)
    except Exception as error:
        print("told", json.dumps({"words": words, "refused": str(error)}))
        continue
    if not begun:
        training.initialise(given, command_line.layout(given, 1))
    plain, ours = model.build(given, 128), model.build(given, 128, 0, compiled.KIND)
    for name, each in plain.named_parameters():
        torch.manual_seed(len(name))
        each.data += torch.randn(each.shape) * 0.3
    flat = torch.empty(sum(each.numel() for each in plain.parameters()))
    start = len(flat)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        start -= theirs.numel()  # as Megatron's buffers have them, the last first
        mine.data = flat[start:][:theirs.numel()].view(theirs.shape).copy_(theirs)
    torch.compile = (lambda function, **_: function) if begun else traced  # one is enough
    ours.compile_training("layers")
    begun = True
    torch.manual_seed(7)
    tokens, told = torch.randint(100, (3, 16)), {"words": words}
    places = torch.arange(16).expand(3, 16)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(0.37)
    losses = [gpt(tokens, places, None, labels=tokens.roll(-1, 1)) for gpt in (plain, ours)]
    for each in losses:
        each.mean().backward()
    told["losses"] = float((losses[0] - losses[1]).abs().max())
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        told[name] = float((a.grad - b.grad).norm() / (a.grad.norm() + 1e-8))
    router = dict(plain.named_parameters())["decoder.layers.0.mlp.router.weight"].grad
    with torch.no_grad():
        pairs = [gpt.eval()(tokens, places, None, labels=tokens) for gpt in (plain, ours)]
    told["evaluated"] = float((pairs[0] - pairs[1]).abs().max())
    told["router"] = float(router.norm())
    from launcher.trainer.fast import experts
    layer = ours.decoder.layers[0].mlp.experts.local_experts
    whole, backwards = experts.stacked(tuple(each.linear_fc1.weight for each in layer))
    assert backwards and whole.data_ptr() == layer[-1].linear_fc1.weight.data_ptr()
    print("told", json.dumps(told), flush=True)
"""

WAYS = (
    "--num-experts 16 --moe-router-topk 8 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    "--moe-router-topk 1 --moe-router-pre-softmax --moe-z-loss-coeff 0.1",
    "",
    "--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 24",
    "--moe-router-pre-softmax",
    "--moe-router-score-function sigmoid --moe-router-topk 1 --moe-z-loss-coeff 0.1",
    "--moe-router-load-balancing-type none",
)
"""What presets and models of others ask of a router, and what our layer computes by itself."""


MODELS = [
    *(f"{MIXTRAL} --moe-aux-loss-coeff 0.1 {way}" for way in WAYS),
    f"{QWEN3} --num-experts 4",
]


@pytest.mark.parametrize(
    "words", [MODELS[:2], pytest.param(MODELS[2:], marks=pytest.mark.long)], ids=["two", "others"]
)
def test_grouped_experts_equal_megatrons(words: list[str], tmp_path: Path) -> None:
    """Another choice or weight of an expert, a loss of the router's that is missing or doubled, a
    gradient that comes to the wrong expert where the last lies first."""
    (script := tmp_path / "beside.py").write_text(BESIDE_MEGATRONS)
    done = start(1, str(script), str(Path(__file__).parent), json.dumps(words))
    found = [json.loads(x) for x in re.findall(r"^told (.*)$", done.output, re.MULTILINE)]
    assert [one["words"] for one in found] == words, done.output
    for one in found:
        asked, router = one.pop("words"), one.pop("router", 1.0)
        if "refused" in one:
            assert "needs Megatron-Core" in one["refused"]
            continue
        assert router > 1e-3, asked
        assert max(one.values()) < 1e-5, (asked, one)
