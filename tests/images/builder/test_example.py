"""The example script's command line: what follows from it, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.images.builder import megatron_core_training_example as example
from launcher.images.builder.megatron_core_training_example import UsageError
from tests.tables import table

TORCHRUN = {
    **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
}


def checked(text: str, world: int) -> Any:
    """The options, once they are settled for `world` ranks."""
    options = example.parse(text.split())
    example.check(options, world)
    return options


def test_the_guides_hybrid_example() -> None:
    options = checked(
        "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --batch-size=16 "
        "--epochs=3 --train-steps=1000 --sequence-parallel --fp16",
        8,
    )
    found = (options.replicas, options.micro_batches, options.steps, options.warmup_steps)
    assert found == (2, 8, 3000, 300)
    assert example.rate(options, 300) == options.lr
    assert example.rate(options, 3000) == pytest.approx(options.lr / 2700)


@given(
    batch=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 9),
)
def test_any_batch_on_any_number_of_replicas(
    batch: int, tensor: int, pipeline: int, replicas: int
) -> None:
    text = f"--batch-size={batch} --tensor-model-parallel-size={tensor}"
    text += f" --pipeline-model-parallel-size={pipeline}"
    options = checked(text, tensor * pipeline * replicas)
    assert options.replicas == replicas
    assert options.micro_batch_size * options.micro_batches == batch
    assert options.micro_batches == 1 or options.micro_batches <= 4 * pipeline


@table("text", "reason")
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        checked(text, 4)


def environment(text: str, environ: dict[str, str]) -> dict[str, str]:
    return example.environment(example.parse(text.split()), environ)


@table("text", "address")
def test_ranks_are_those_of_the_environment(text: str, address: str) -> None:
    made = environment(text, {**TORCHRUN, "MASTER_ADDR": address})
    assert made.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert bool(made) == (address == "localhost")  # gloo's variables


def test_one_process_alone_is_rank_0() -> None:
    made = environment("--world-size=1", {})
    assert int(made.pop("MASTER_PORT")) > 0
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert made.items() >= (ranks | {"MASTER_ADDR": "127.0.0.1"}).items()


def test_gloo_stays_on_the_machine_and_what_is_set_stays() -> None:
    one = {**TORCHRUN, "WORLD_SIZE": "4"}
    assert environment("", one)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment("", {**one, "GLOO_SOCKET_IFNAME": "eth0"})


@pytest.mark.parametrize(
    ("text", "environ", "reason"),
    [
        ("--world-size=4", TORCHRUN, "--world-size 4, and 8 processes were started"),
        ("--world-size=8", {}, "--world-size 8, and 1 process was started"),
        ("--init-method=tcp://10.0.0.1:29501", TORCHRUN, "the processes meet at 10.0.0.1:29500"),
        ("--init-method=tcp://127.0.0.1:29500", TORCHRUN, "the processes meet at 10.0.0.1:29500"),
        ("--init-method=10.0.0.1:29500", TORCHRUN, "doesn't look like tcp://HOST:PORT"),
    ],
)
def test_contradictions(text: str, environ: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        environment(text, environ)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir: can't make .*file/out: Not a directory"):
        example._make(str(tmp_path / "file/out"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root may write anywhere
    with pytest.raises(UsageError, match=f"{tmp_path} can't be written: give --output-dir"):
        example._make(str(tmp_path))
