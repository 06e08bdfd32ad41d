"""The parallel arithmetic against brute force, and what is said where it doesn't work out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.plan import layout
from launcher.plan.config import Image, Model, Nodes, Parallel, RunConfig, Training
from launcher.plan.source import Origin

ORIGIN = Origin("run.yaml", {"model.num_attention_heads": 7}, {})
SMALL = st.integers(1, 12)


def config(
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    heads: int | None = None,
    layers: int | None = None,
    micro: int | str | None = None,
    whole: int | None = None,
    nodes: int = 1,
    **training: object,
) -> RunConfig:
    return RunConfig(
        name="a",
        image=Image(tag="cpu"),
        gpus="1",
        nodes=Nodes(count=nodes, master_addr="a"),
        model=Model(num_attention_heads=heads, num_layers=layers),
        training=Training(micro_batch_size=micro, global_batch_size=whole, **training),
        parallel=Parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
        ),
    )


def refusal(wrong: RunConfig, processes: int) -> str:
    with pytest.raises(UsageError) as caught:
        layout.check(wrong, ORIGIN, processes)
    return str(caught.value)


def works(right: RunConfig, processes: int) -> bool:
    try:
        layout.check(right, ORIGIN, processes)
    except UsageError:
        return False
    return True


def fills_the_grid(world: int, tp: int, pp: int, cp: int) -> bool:
    """Brute force: ranks dealt out over replicas, none left over and at least one replica."""
    ranks = list(range(world))
    replicas = 0
    while len(ranks) >= tp * pp * cp:
        ranks = ranks[tp * pp * cp :]
        replicas += 1
    return replicas > 0 and not ranks


@given(SMALL, st.integers(1, 3), SMALL, SMALL, st.integers(1, 3))
def test_the_world_is_a_whole_number_of_replicas(
    processes: int, nodes: int, tp: int, pp: int, cp: int
) -> None:
    expected = fills_the_grid(processes * nodes, tp, pp, cp)
    assert works(config(tp, pp, cp, nodes=nodes), processes) == expected


@given(st.integers(1, 40), st.integers(1, 40), SMALL, SMALL)
def test_heads_and_layers_are_dealt_out_evenly(heads: int, layers: int, tp: int, pp: int) -> None:
    even = len({len(range(r, heads, tp)) for r in range(tp)}) == 1
    even = even and len({len(range(s, layers, pp)) for s in range(pp)}) == 1
    assert works(config(tp, pp, heads=heads, layers=layers), tp * pp) == even


@given(st.integers(1, 64), SMALL, SMALL, st.integers(1, 3))
def test_a_global_batch_is_whole_micro_batches_on_each_replica(
    whole: int, micro: int, replicas: int, tp: int
) -> None:
    expected = whole in range(micro * replicas, 65, micro * replicas)
    assert works(config(tp, micro=micro, whole=whole), replicas * tp) == expected


@given(st.integers(1, 200), SMALL)
def test_auto_is_the_largest_micro_batch_up_to_16_that_works(share: int, replicas: int) -> None:
    chosen = config(micro="auto", whole=share * replicas)
    size = layout.micro_batch(chosen, layout.layout(chosen, replicas))
    fitting = [n for n in range(1, 17) if works(config(micro=n, whole=share * replicas), replicas)]
    assert size == max(fitting)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_divisors_offered_divide_and_are_next(whole: int, value: int) -> None:
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    expected = [n for n in divisors if n < value][-1:] + [n for n in divisors if n > value][:1]
    assert layout.divisors_near(whole, value) == expected


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_multiples_offered_are_next(value: int, step: int) -> None:
    offered = layout.neighbours(value, step)
    assert offered
    assert all(n > 0 and n % step == 0 and abs(n - value) <= step for n in offered)


@given(st.integers(1, 64), SMALL, SMALL)
def test_what_is_offered_for_a_batch_works(whole: int, micro: int, replicas: int) -> None:
    wrong = config(micro=micro, whole=whole)
    if works(wrong, replicas):
        return
    offered = refusal(wrong, replicas).rpartition("work: ")[2].rstrip(".").split("; or ")
    for size in offered[0].split(" or "):
        assert works(config(micro=micro, whole=int(size)), replicas)
    for more in offered[1:]:
        if more.startswith("micro-batch "):
            for size in more.removeprefix("micro-batch ").split(" or "):
                assert works(config(micro=int(size), whole=whole), replicas)
        else:
            for size in more.removesuffix(" processes in all").split(" or "):
                assert works(wrong, int(size))


def test_a_refusal_names_place_numbers_and_what_works() -> None:
    assert refusal(config(tp=8, heads=12), 8) == (
        "run.yaml: parallel.tensor_model_parallel_size: 12 heads aren't divisible by 8\n"
        "  Nearest that work: 6 or 12."
    )
    told = refusal(config(tp=5, pp=3, heads=12, layers=10), 4)
    assert told.count("Nearest that work") == 3  # every broken rule, at once


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"fp16": True, "bf16": True}, "training.bf16"),
        ({"train_iters": 1, "train_samples": 1}, "training.train_samples"),
        ({"train_samples": 1, "lr_decay_iters": 1}, "training.lr_decay_iters"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 1}, "training.lr_warmup_iters"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "training.min_lr"),
    ],
)
def test_settings_that_exclude_each_other(training: dict[str, object], key: str) -> None:
    assert f"{key}: " in refusal(config(**training), 1)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_a_ramp_reaches_the_global_batch(start: int, increment: int, whole: int) -> None:
    ramp = config(micro=1, whole=whole, rampup_batch_size=[start, increment, 100])
    reached = whole in {*range(start, 65, increment), *range(start, -65, -increment)}
    assert works(ramp, 1) == reached


def test_a_sequence_is_divided_by_context_first() -> None:
    """1000 at TP4 CP2 with sequence parallelism was refused: 1000 / 4, then 500 / 4.

    Without tensor parallelism Megatron turns it off, and upstream's own scripts say it.
    """
    alone = config().model_copy(update={"parallel": Parallel(sequence_parallel=True)})
    assert works(alone, 1)
    sizes = {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True}
    changes = {"parallel": Parallel(**sizes), "model": Model(seq_length=1000)}
    assert works(config().model_copy(update=changes), 8)
    changes["model"] = Model(seq_length=1004)
    assert not works(config().model_copy(update=changes), 8)


@pytest.mark.parametrize(
    ("groups", "release", "program", "taken"),
    [
        (2, "0.16.1", "pretrain_gpt.py", True),
        (3, "0.16.1", "pretrain_gpt.py", False),
        (2, "0.15.3", "pretrain_gpt.py", False),
        (2, None, "pretrain_gpt.py", False),
        (2, "0.16.1", "gpt", False),
    ],
)
def test_query_groups_below_tensor_parallel_are_shared_from_0_16_on(
    groups: int, release: str | None, program: str, taken: bool
) -> None:
    model = Model(num_attention_heads=12, num_query_groups=groups)
    few = config(4).model_copy(update={"model": model, "program": program})
    assert (not layout.faults(few, 4, release)) == taken


def test_layers_that_the_file_deals_out_itself_are_left_to_it() -> None:
    uneven = config(pp=2, layers=5)
    args = {"decoder_first_pipeline_num_layers": 3}
    assert not works(uneven, 2)
    assert works(uneven.model_copy(update={"megatron_args": args}), 2)
