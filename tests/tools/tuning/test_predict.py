"""Predictions against what was measured on H100s and H200s."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.tools.tuning import predict
from launcher.tools.tuning.candidates import MICRO, Setting
from tests.tools.tuning.test_candidates import space

H100 = predict.published("NVIDIA H100 80GB HBM3", "bf16")


def ms(*sets: str, processes: int = 1, **changes: object) -> float:
    assert H100
    one = space(*sets, processes=processes)
    found = predict.predict(one, one.changed(Setting(), changes), H100)
    assert found
    return found.ms


@pytest.mark.parametrize("program", ["gpt", "pretrain_gpt.py"])
def test_larger_micro_batches_are_no_slower(program: str) -> None:
    sizes = [ms(f"program={program}", **{MICRO: size}) for size in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)


def test_two_replicas_of_gpt2_are_faster_than_a_split_one() -> None:
    """16.85 ms for twice the batch, and 16.3 for the batch: it was predicted the other way."""
    split: dict[str, Any] = {"parallel.tensor_model_parallel_size": 2}
    split |= {"parallel.sequence_parallel": True, MICRO: 16}
    assert ms(processes=2, **{MICRO: 8}) < ms(processes=2, **split)


def test_the_host_bounds_what_is_not_compiled() -> None:
    assert H100
    one = space("megatron_args.no_fast=true")
    found = predict.predict(one, Setting(), H100)
    assert found
    assert found.bound == "the host"


def test_a_pipeline_waits_for_its_first_micro_batches() -> None:
    assert H100
    two = space(processes=2)
    setting = two.changed(Setting(), {"parallel.pipeline_model_parallel_size": 2, MICRO: 2})
    found = predict.predict(two, setting, H100)
    assert found
    assert found.bubble == pytest.approx(1 / 8)


def test_a_card_that_nothing_is_published_of_has_no_prediction() -> None:
    assert predict.published("NVIDIA H20", "bf16") is None
