"""Context parallelism, as it is compiled, against one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.conftest import TINY, start
from tests.trainer.fast.test_fast import LLAMA, compiled_program
from tests.trainer.test_models import CONTEXT

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("way", "options"),
    [
        pytest.param("whole", LLAMA, id="exchanged"),
        pytest.param("whole,peer", ("--bf16", "--num-query-groups", "1"), id="one-group-peer",
                     marks=pytest.mark.long),
        pytest.param("whole", (*LLAMA, "--num-attention-heads", "3", "--kv-channels", "16",
                               "--num-query-groups", "3"), id="gathered", marks=pytest.mark.long),
        pytest.param("whole", ("--window-size", "6,0"), id="window", marks=pytest.mark.long),
        pytest.param("whole", (*LLAMA, "--global-batch-size", "4"), id="several",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_two_parts_of_a_sequence_equal_the_whole(
    way: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces in another order, angles of other tokens, gradients of one rank's part alone."""
    script = compiled_program(tmp_path, monkeypatch)
    short = ("--train-iters", "3", "--global-batch-size", "2", "--num-layers", "1")
    given = (*TINY, "--mock-data", *short, *options)
    one, two = start(1, script, "", *given), start(2, script, way, *given, *CONTEXT.split())
    assert one.code == two.code == 0, one.output + two.output
    assert "compiled" in two.output
    assert "not compiled" not in two.output, two.output
    assert (", symmetric memory" in two.output) == way.endswith("peer")
    step = 3e-3 if "--bf16" in options else 2e-5
    assert two.losses == pytest.approx(one.losses, abs=step)
    assert two.grad_norms == pytest.approx(one.grad_norms, abs=max(10 * step, 2e-3))
    assert two.validation_loss == pytest.approx(one.validation_loss, abs=step)
    graphs = [int(line.split()[1]) for line in two.output.splitlines() if "graphs " in line]
    assert graphs == [1, 1]


def test_angles_stay_in_fp32_where_the_model_is_in_16_bits() -> None:
    """In bf16, of 4096 tokens each 16 neighbours had the same angle."""
    import torch

    from launcher.trainer.fast import context_attention

    class Angles(torch.nn.Module):
        def forward(self, length: int) -> torch.Tensor:
            return torch.arange(length, dtype=torch.float32).view(-1, 1, 1, 1)

    gpt: Any = torch.nn.Module()
    gpt.rotary_pos_emb, gpt.position_embedding_type = Angles(), "rope"
    gpt.config = SimpleNamespace(context_parallel_size=2)
    context_attention.keep_positions(gpt, 4096)
    assert torch.equal(gpt.bfloat16().rotary_pos_emb(4096), Angles()(4096))
