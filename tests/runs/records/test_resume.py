"""What goes on with a run on other processes: the layout follows, batch and vocabulary stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.runs.plan import layout
from launcher.runs.plan.layout import Layout
from launcher.runs.records import resume
from launcher.runs.runfile.config import RunConfig, Training
from launcher.trainer.gpt.arguments import padded_vocabulary

GIVEN: dict[str, Any] = {"name": "a", "image": "cpu", "gpus": "0"}
MODEL = {"num_layers": 12, "num_attention_heads": 12, "hidden_size": 768}


def config(**sections: Any) -> RunConfig:
    """A configuration of a model of 12 layers and 12 heads, and of what is given."""
    return RunConfig.model_validate(GIVEN | {"model": MODEL} | sections)


def sizes(tensor: int = 1, pipeline: int = 1, **others: Any) -> dict[str, Any]:
    """The section parallel."""
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        **others,
    }


def batches(micro: int | str = 1, whole: int = 48) -> dict[str, Any]:
    """The section training."""
    return {"micro_batch_size": micro, "global_batch_size": whole}


def told(found: RunConfig, processes: int) -> tuple[int, int, int]:
    """Its TP, PP and DP."""
    where = layout.layout(found, processes)
    return where.tensor, where.pipeline, where.data


BATCH = {"micro_batch_size": 1, "global_batch_size": 12}
COUNTS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def ran(draw: st.DrawFn) -> tuple[RunConfig, int]:
    """A configuration that works, and its number of processes."""
    tensor, pipeline, data = draw(SIZES), draw(SIZES), draw(SIZES)
    context = draw(st.sampled_from([1, 1, 2]))
    micro = draw(st.sampled_from(["auto", 1, 2, 3, 4, 5]))
    whole = data * (micro if isinstance(micro, int) else 1) * draw(st.integers(1, 12))
    model = {
        "num_attention_heads": tensor * draw(st.integers(1, 6)),
        "num_layers": pipeline * draw(st.integers(1, 6)),
        "make_vocab_size_divisible_by": draw(st.sampled_from([None, 1, 7, 8, 128])),
        "hidden_dropout": draw(st.sampled_from([None, 0.0, 0.1])),
        "attention_dropout": 0.0,
    }
    training: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": whole}
    if draw(st.booleans()) and isinstance(micro, int):
        training["global_batch_size"] = draw(st.sampled_from([whole, None]))
    parallel = sizes(tensor, pipeline, sequence_parallel=tensor > 1 and draw(st.booleans()))
    parallel["context_parallel_size"] = context
    vocabulary = draw(st.sampled_from([None, 100, 257, 50257]))
    found = config(
        model=model, training=training, parallel=parallel, data={"vocab_size": vocabulary}
    )
    processes = tensor * pipeline * context * data
    assert not layout.faults(found, layout.layout(found, processes))
    return found, processes


def global_batch(was: RunConfig, where: Layout) -> int:
    """What is given, or Megatron's default."""
    return was.training.global_batch_size or (layout.micro_batch(was, where) or 1) * where.data


def vocabulary(found: RunConfig, size: int, processes: int) -> int:
    """The vocabulary with its padding, by the training program's own arithmetic."""
    divisible_by = found.model.make_vocab_size_divisible_by or 128
    return padded_vocabulary(size, divisible_by, layout.layout(found, processes).tensor)


@given(ran(), COUNTS)
@example((config(training=BATCH, parallel=sizes(4), data={"vocab_size": 50257}), 4), 3)
@example((config(training=BATCH, parallel=sizes(4)), 4), 3)
def test_batch_and_vocabulary_stay_and_the_layout_works(
    before: tuple[RunConfig, int], after: int
) -> None:
    was, processes = before
    old = layout.layout(was, processes)
    whole = global_batch(was, old)
    try:
        found = resume.on_processes(was, processes, after).config
    except UsageError:
        # Else as many replicas of the whole model would do.
        assert whole % after
        return
    new = layout.layout(found, after)
    assert new.world == after
    assert not layout.faults(found, layout.layout(found, after))
    assert (found.training.global_batch_size or whole) == whole
    micro = layout.micro_batch(found, new)
    assert micro
    assert whole % (micro * new.data) == 0
    if isinstance(was.training.micro_batch_size, int):
        assert micro <= was.training.micro_batch_size
    else:
        assert found.training.micro_batch_size == "auto"
    for size in [was.data.vocab_size] if was.data.vocab_size else [100, 257, 50257]:
        assert vocabulary(found, size, after) == vocabulary(was, size, processes)


GROWING = {"micro_batch_size": 4, "global_batch_size": 24, "rampup_batch_size": [8, 8, 100]}
STAGES = {"decoder-first-pipeline-num-layers": 4}
OLD = {"--ckpt-format": "torch"}


@pytest.mark.parametrize(
    ("sections", "before", "after", "expected"),
    [
        # replicas, then pipeline, then tensor parallelism, and context parallelism last
        ({"parallel": sizes(2)}, 4, 2, (2, 1, 1)),
        ({"parallel": sizes(2)}, 2, 8, (2, 1, 4)),
        ({"parallel": sizes(2, 2)}, 4, 2, (2, 1, 1)),
        ({"parallel": sizes(2, 4)}, 8, 4, (2, 2, 1)),
        ({"parallel": sizes(2)}, 2, 1, (1, 1, 1)),
        ({"parallel": sizes(4)}, 4, 2, (2, 1, 1)),
        ({"parallel": sizes(2)}, 2, 3, (1, 1, 3)),
        ({}, 2, 5, None),
        ({"parallel": sizes(2, context_parallel_size=2)}, 4, 2, (1, 1, 1)),
        ({"parallel": sizes(2, context_parallel_size=2)}, 4, 1, (1, 1, 1)),
        # what the file says of its stages holds for their number alone
        ({"parallel": sizes(2, 2), "megatron_args": STAGES}, 4, 2, (1, 2, 1)),
        # a checkpoint of the old format can't be divided anew
        ({"parallel": sizes(2), "megatron_args": OLD}, 2, 4, (2, 1, 2)),
        ({"parallel": sizes(2), "megatron_args": OLD}, 2, 1, None),
        # an expert has replicas to lie on
        ({"parallel": sizes(2, expert_model_parallel_size=2)}, 4, 2, (1, 1, 2)),
    ],
)
def test_the_nearest_layout_is_taken(
    sections: dict[str, Any], before: int, after: int, expected: tuple[int, int, int] | None
) -> None:
    was = config(training=batches(), **sections)
    if expected is None:
        with pytest.raises(UsageError, match=f"no layout fits {after} process"):
            resume.on_processes(was, before, after)
        return
    assert told(resume.on_processes(was, before, after).config, after) == expected


def test_a_refusal_names_numbers_that_work() -> None:
    was = config(parallel=sizes(2), training=batches(whole=4), model={"num_layers": 1})
    with pytest.raises(UsageError) as caught:
        resume.on_processes(was, 4, 7)
    assert caught.value.remedy == "Nearest that keep TP=2 PP=1: 4 or 8 processes in all."
    for after in (4, 8):
        assert told(resume.on_processes(was, 2, after).config, after)[:2] == (2, 1)


@pytest.mark.parametrize(
    ("training", "before", "after", "expected"),
    [
        (batches(micro=4, whole=24), 2, 3, (4, 24)),
        (batches(micro=4, whole=24), 2, 4, (3, 24)),  # smaller where it must be
        (GROWING, 2, 4, (2, 24)),  # and divided at every size of a batch that grows
        ({"micro_batch_size": 4}, 4, 2, (4, 16)),  # as it came out where it wasn't given
    ],
)
def test_the_micro_batch_shrinks_only_where_it_must(
    training: dict[str, Any], before: int, after: int, expected: tuple[int, int]
) -> None:
    found = resume.on_processes(config(training=training), before, after).config.training
    assert (found.micro_batch_size, found.global_batch_size) == expected


def test_sizes_that_were_set_are_kept_or_refused() -> None:
    was = config(parallel=sizes(2), training=batches())
    asked = config(parallel=sizes(1, 2), training=batches())
    found = resume.on_processes(asked, 2, 2, was)
    assert told(found.config, 2) == (1, 2, 1)
    assert found.config.model.make_vocab_size_divisible_by == 256
    assert found.notes[0] == "layout: TP=2 PP=1 DP=1 -> TP=1 PP=2 DP=1; the global batch stays 48"
    with pytest.raises(UsageError, match="no layout fits 3 processes"):
        resume.on_processes(asked, 2, 3, was)
    (first, _) = resume.on_processes(config(training=batches(whole=96)), 1, 2, config()).notes
    assert first == "layout: TP=1 PP=1 DP=1 -> TP=1 PP=1 DP=2"  # another batch doesn't stay
    parts = sizes(1, 2, num_layers_per_virtual_pipeline_stage=3)
    found = resume.on_processes(config(parallel=parts, training=batches()), 2, 1)
    assert found.config.parallel.num_layers_per_virtual_pipeline_stage is None
    was = RunConfig.model_validate(GIVEN | {"program": "./own.py"})  # which is told nothing
    assert resume.on_processes(was, 1, 4).config == was
    assert resume.on_processes(was, 2, 2) == resume.Resumption(was, ())


SPLIT = "weights and optimizer are divided again; random states aren't carried over"
OTHERS = "dropout draws other numbers, as the number of replicas is another"
NO_SP = "sequence parallelism is off, as there is no tensor parallelism"


@pytest.mark.parametrize(
    ("before", "after", "dropout", "notes"),
    [
        (2, 4, 0.0, []),
        (2, 4, 0.1, [OTHERS]),
        (2, 4, None, [OTHERS]),
        (2, 1, 0.0, [SPLIT, NO_SP]),
        (2, 1, 0.1, [f"{SPLIT}, so dropout draws other numbers", NO_SP]),
    ],
)
def test_notes(before: int, after: int, dropout: float | None, notes: list[str]) -> None:
    model = {**MODEL, "hidden_dropout": 0.0, "attention_dropout": dropout}
    was = config(model=model, parallel=sizes(2, sequence_parallel=True), training=batches())
    first, *others = resume.on_processes(was, before, after).notes
    assert first.startswith("layout: TP=2 PP=1 DP=1 -> ")
    assert first.endswith("; the global batch stays 48")
    assert others == notes


def test_it_loads_what_it_saved_and_all_of_it() -> None:
    checkpoint = {"save": "out", "load": "pretrained", "finetune": True, "no_load_rng": True}
    args = {"ckpt-step": 100, "weight-decay-incr-style": "constant"}
    found = resume.from_newest(config(checkpoint=checkpoint, megatron_args=args))
    assert found.checkpoint.model_dump(exclude_none=True) == {"save": "out", "load": "out"}
    assert found.megatron_args == {"weight-decay-incr-style": "constant"}
    with pytest.raises(UsageError, match="saved no checkpoints"):
        resume.from_newest(config())


LONGER = {"training": {"train_iters": 20}}
CHECKPOINTS = {"megatron_args": {"use_checkpoint_opt_param_scheduler": True}}


@pytest.mark.parametrize(
    ("program", "changed", "overrides", "left_out"),
    [
        ("pretrain_gpt.py", LONGER, True, None),
        ("pretrain_gpt.py", {"training": {"train_iters": 10, "seed": 2}}, None, None),
        ("pretrain_gpt.py", LONGER | CHECKPOINTS, None, None),
        ("pretrain_gpt.py", {"parallel": sizes()}, None, True),
        ("gpt", LONGER | {"parallel": sizes()}, None, None),
    ],
)
def test_upstreams_programs_are_told_of_another_schedule_and_another_layouts_random_states(
    program: str, changed: dict[str, Any], overrides: bool | None, left_out: bool | None
) -> None:
    then = {"program": program, "training": {"train_iters": 10}, "parallel": sizes(2)}
    then["megatron_args"] = changed.get("megatron_args", {})
    found = resume.upstreams(config(**then | changed), config(**then))
    assert found.config.megatron_args.get(resume.OVERRIDE) is overrides
    assert bool(found.notes) is bool(overrides)
    checkpoint = found.config.checkpoint
    assert checkpoint.no_load_rng is left_out
    saving = {"checkpoint": checkpoint.model_copy(update={"save": "ck"})}
    newest = resume.from_newest(found.config.model_copy(update=saving))
    assert newest.checkpoint.no_load_rng is None


@pytest.mark.parametrize(
    ("given", "last"),
    [
        ({"train_iters": 9}, 9),
        ({"train_samples": 90, "global_batch_size": 8}, 12),
        ({"train_samples": 90}, None),
        ({"train_samples": 90, "global_batch_size": 8, "rampup_batch_size": [4, 4, 10]}, None),
    ],
)
def test_the_last_iteration_is_known_by_samples_too(given: dict[str, Any], last: int) -> None:
    """A run that was given samples was resumed for nothing once it had finished."""
    assert resume.last_iteration(Training(**given)) == last
