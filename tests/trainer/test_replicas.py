"""Copies of parameters that have parted are found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.conftest import TINY, start

pytestmark = pytest.mark.megatron

PERTURB = """
import sys
import torch
from launcher.agent import compat
from launcher.trainer.gpt import arguments, training
from launcher.agent.ranks import exit_codes


def check() -> None:
    parsed = arguments.parse(sys.argv[1:])
    parsed.on_cpu = True
    layout = arguments.layout(parsed, 2)
    trainer = training.begin(parsed, layout)
    trainer._check_replicas()
    print("agreed", flush=True)
    if torch.distributed.get_rank() == 1:
        norm = dict(trainer.gpt.named_parameters())["decoder.final_layernorm.weight"]
        norm.data[5] += 1e-7
    trainer._check_replicas()


compat.prepare()
exit_codes.leave(exit_codes.code(check))
"""


@pytest.mark.parametrize("layout", [["--tensor-model-parallel-size", "2"], []], ids=["TP", "DP"])
def test_smallest_change_is_found(tmp_path: Path, layout: list[str]) -> None:
    script = tmp_path / "perturb.py"
    script.write_text(PERTURB)
    run = start(2, str(script), *TINY, "--mock-data", *layout)
    assert run.output.count("agreed") == 2, run.output
    found = "decoder.final_layernorm.weight on rank 1 is not what it is on rank 0"
    assert run.output.count(found) == 1
    assert run.code == 1


def test_checksum_tells_order_and_sign() -> None:
    import torch

    from launcher.trainer.gpt.replicas import checksum

    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(tensor[[1, 0, 2]])
    assert checksum(tensor) != checksum(-tensor)
    assert checksum(tensor.bfloat16()) != checksum(tensor.bfloat16() * 1.01)
