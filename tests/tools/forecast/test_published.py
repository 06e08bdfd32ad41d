"""Forecasts beside the runs of others: bench/gpu/published.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from launcher.runs.plan import layout
from launcher.runs.plan.render import values_of
from launcher.runs.runfile.config import RunConfig
from launcher.tools.forecast import site, timing
from launcher.tools.forecast.work import Work

*TABLES, OF_EXPERTS = yaml.safe_load(
    (Path(__file__).parents[3] / "bench/gpu/published.yaml").read_text("utf-8")
)
RECOMPUTED = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
OVERLAPPED = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"), True)

ROOM = 72e9
"""Bytes of an 80 GB card that a run may need."""


def fitting(table: dict[str, Any], row: list[Any]) -> Work:
    """With the largest micro-batch that fits where there is no pipeline, else of one sequence."""
    sizes = [8, 4, 2, 1] if row[4] == 1 else [1]
    replicas = row[5] // row[3] // row[4]
    for size in (size for size in sizes if row[6] // replicas % size == 0):
        done = work(table, row, size)
        needed = done.memory((9, 0))
        if needed and needed.total < ROOM:
            break
    return done


def work(table: dict[str, Any], row: list[Any], micro: int) -> Work:
    hidden, heads, layers, tensor, pipeline, gpus, batch, _ = row
    model = {"hidden_size": hidden, "num_attention_heads": heads, "num_layers": layers}
    parallel = {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "sequence_parallel": (tensor > 1 and not table["recomputed"]) or None,
        "use_distributed_optimizer": None if table["recomputed"] else True,
    }  # fmt: skip
    more = RECOMPUTED if table["recomputed"] else OVERLAPPED
    done = upstreams(table, gpus, (micro, batch), model, parallel, more)
    assert (done.where.world, done.where.tensor, done.where.pipeline) == (gpus, tensor, pipeline)
    return done


def upstreams(
    table: dict[str, Any],
    gpus: int,
    batches: tuple[int, int],
    model: dict[str, Any],
    parallel: dict[str, Any],
    more: dict[str, Any],
) -> Work:
    """A run of upstream's program with a table's sequences, of micro-batches and global batches."""
    each, length = min(8, gpus), table["sequence"]
    config = RunConfig.model_validate({
        "name": "a", "image": {"name": "x"}, "program": "pretrain_gpt.py", "gpus": each,
        "nodes": {"count": gpus // each},
        "model": {**model, "seq_length": length, "max_position_embeddings": length},
        "parallel": parallel,
        "megatron_args": more,
        "training": {
            "micro_batch_size": batches[0], "global_batch_size": batches[1], "bf16": True,
            "train_iters": 1, "lr": 1e-3,
        },
        "data": {"mock": True, "vocab_size": table["vocabulary"]},
    })  # fmt: skip
    where = layout.layout(config, each)
    return Work(config.program, values_of(config, where), where, gpus // each, False, True)


def steps() -> Iterator[tuple[str, site.StepTime, float]]:
    """Each forecast, and the ms that the run took."""
    for table in TABLES:
        for row in table["rows"]:
            done = fitting(table, row)
            rates = timing.published(table["card"], done.precision)
            found = site.step(done, rates, [])
            assert found
            assert done.shape
            operations = done.shape.operations(done.batch) * (4 / 3 if table["recomputed"] else 1)
            name = f"{table['card']} {row[0]}"
            yield name, found, operations / row[5] / row[7] / 1e9


STEPS = [*steps()]


@pytest.mark.parametrize(("found", "ms"), [step[1:] for step in STEPS], ids=[s[0] for s in STEPS])
def test_a_published_run_is_in_the_forecasts_range(found: site.StepTime, ms: float) -> None:
    """On up to 6144 GPUs, of which no run of ours is."""
    assert found.least <= ms <= found.most
    assert found.most / found.least < 4  # wider ones say nothing


@pytest.mark.parametrize(
    ("card", "wider"), [("h100-80gb", False), ("a100-80gb", False), ("h200", True), ("b200", True)]
)
def test_a_card_that_nobody_published_runs_of_has_a_wider_range(card: str, wider: bool) -> None:
    """Any card's was as narrow as an H100's, where the host keeps up."""
    done = fitting(TABLES[1], TABLES[1]["rows"][0])
    rates = timing.published(card, done.precision)
    found = site.step(done, rates, [])
    assert found
    assert found.cost
    assert timing.kind(done, found.cost) == timing.BUSY
    assert ("a prediction" in found.source) is wider


def test_most_published_runs_are_within_a_fifth() -> None:
    ratios = sorted(found.ms / ms for _, found, ms in STEPS)
    assert 0.8 < median(ratios) < 1.2
    assert sum(abs(ratio - 1) <= 0.2 for ratio in ratios) >= 0.8 * len(ratios), ratios


def of_experts(row: list[Any]) -> tuple[site.StepTime, float]:
    """GPT OSS 120B's forecast, and the ms that it took."""
    card, gpus, pipeline, over, micro, batch, rate = row
    model = {
        "hidden_size": 2880, "num_attention_heads": 64, "kv_channels": 64, "num_query_groups": 8,
        "num_layers": 36, "ffn_hidden_size": 2880, "swiglu": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    parallel = {
        "pipeline_model_parallel_size": pipeline, "expert_model_parallel_size": over,
        "use_distributed_optimizer": True,
    }  # fmt: skip
    more = {"num_experts": 128, "moe_router_topk": 4, "moe_grouped_gemm": True, **OVERLAPPED}
    done = upstreams(OF_EXPERTS, gpus, (micro, batch), model, parallel, more)
    found = site.step(done, timing.published(card, done.precision), [])
    assert found
    return found, 1000 * batch * OF_EXPERTS["sequence"] / gpus / rate


@pytest.mark.parametrize("row", OF_EXPERTS["experts"], ids=lambda row: f"{row[0]} {row[4:6]}")
def test_published_experts_are_in_the_forecasts_range(row: list[Any]) -> None:
    """Their routing is even, so they are within the range without what an uneven one adds; that was
    another's, which they took up to twice as long as."""
    found, ms = of_experts(row)
    assert found.cost
    assert found.least <= ms <= found.most - found.cost.worst
    least, most = timing.OFF[timing.BUSY_EXPERTS]
    assert least <= found.ms / ms <= most
    assert "a prediction" not in found.source
