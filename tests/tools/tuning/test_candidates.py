"""What may be changed of a run, and what can't work of it, with the global batch as it is."""

from __future__ import annotations

from launcher.runs.plan import layout
from launcher.runs.plan.model_size import shape
from launcher.runs.plan.render import values_of
from launcher.runs.runfile import origins
from launcher.tools.tuning.candidates import MICRO, Setting, Space, combinations

GB = 10**9
AXES = ("micro-batch", "layout")


def space(*sets: str, processes: int = 1, total: int = 80 * GB, **more: bool) -> Space:
    """gpt2.yaml on so many H100s, with --set arguments."""
    laid = [origins.parse_set(each) for each in (f"gpus={processes}", *sets)]
    config = layout.with_precision(origins.load("gpt2", laid)[0], bf16=True)
    fixed = {MICRO: layout.micro_batch(config, layout.layout(config, processes))}
    config = origins.overridden(config, [origins.Override("", fixed)])
    return Space(config, processes, (9, 0), total, more.get("any_precision", False))


def test_a_setting_says_what_is_not_as_given() -> None:
    given = space()
    assert given.changed(Setting(), {MICRO: 16, "parallel.sequence_parallel": None}) == Setting()
    told = str(given.changed(Setting(), {MICRO: 8, "megatron_args.no_fast": True}))
    assert told == "no_fast, micro_batch_size 8"


def test_all_have_the_same_batch_and_vocabulary() -> None:
    """A vocabulary padded to 128 × TP would be another model's."""
    four = space(processes=4)
    found = combinations(four, Setting(), [four.axes()[name] for name in AXES])
    wheres = {(where.tensor, where.pipeline, where.data) for where in map(four.where, found)}
    assert {(1, 1, 4), (2, 2, 1), (4, 1, 1), (1, 4, 1)} <= wheres
    for one in found:
        config, where = four.of(one), four.where(one)
        assert config.training.global_batch_size == 16
        assert 16 % (config.training.micro_batch_size * where.data) == 0
        size = shape("gpt", values_of(config, where))
        assert size
        assert size.vocabulary == 50304


def test_the_way_back_leads_to_what_is_given() -> None:
    """Else the padding of another TP would stay, and make another vocabulary."""
    four = space("parallel.tensor_model_parallel_size=2", processes=4)
    layouts = four.axes()["layout"]
    away = [four.changed(Setting(), changes) for changes in layouts]
    assert len(set(away)) == len(layouts)
    assert all(Setting() in [four.changed(one, back) for back in layouts] for one in away)


def test_what_does_not_fit_is_left_out() -> None:
    small = space(total=7 * GB)
    sizes = {small.of(one).training.micro_batch_size
             for one in combinations(small, Setting(), [small.axes()["micro-batch"]])}  # fmt: skip
    assert sizes == {1, 2, 4, 8}
    assert small.why_not(Setting()) == "needs about 8.1 GB of 7.0"


def test_a_larger_micro_batch_than_are_tried_is_among_them_where_it_is_given() -> None:
    """Else the setting that everything is compared with would be none of its own axis."""
    given = space("training.micro_batch_size=128", "training.global_batch_size=128", total=0)
    sizes = [changes[MICRO] for changes in given.axes()["micro-batch"]]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]


def test_what_cannot_divide_is_left_out() -> None:
    """Three replicas share no batch of 16, and 3 parts no vocabulary padded to 128."""
    three = space(processes=3)
    start = three.changed(Setting(), {MICRO: 16})
    found = combinations(three, start, [three.axes()["layout"]])
    assert [(three.where(one).tensor, three.where(one).pipeline) for one in found] == [(1, 3)]


def test_precision_is_changed_only_where_that_is_allowed() -> None:
    assert "precision" not in space().axes()
    values = space(any_precision=True).axes()["precision"]
    assert {"training.fp16": True, "training.bf16": None} in values
    assert "precision" not in space("training.precision=fp32", any_precision=True).axes()


def test_recomputing_is_for_what_does_not_fit_without() -> None:
    theirs = ("program=pretrain_gpt.py", "model.seq_length=8192")
    theirs = (*theirs, "model.max_position_embeddings=8192", "training.global_batch_size=1")
    assert "recomputing" not in space(*theirs).axes()
    assert "recomputing" in space(*theirs, total=8 * GB).axes()


def test_our_kernels_are_left_out_where_a_model_has_some() -> None:
    """What was made on one card may lose to torch's compiler on another."""
    given = space()
    told = [str(given.changed(Setting(), changes)) for changes in given.axes()["kernels"]]
    assert told == ["as given", "LAUNCHER_KERNELS 0"]
    assert given.of(given.changed(Setting(), given.axes()["kernels"][1])).env
    assert "kernels" not in space("model.swiglu=true").axes()
    assert "kernels" not in space("program=pretrain_gpt.py").axes()


def test_the_cpu_has_no_fast_path_and_no_loader_to_tune() -> None:
    axes = space("gpus=0", "processes=2", processes=2).axes()
    assert set(axes) == {"micro-batch", "layout", "data parallelism"}
    assert not any("use_distributed_optimizer" in key and value
                   for changes in axes["data parallelism"]
                   for key, value in changes.items())  # fmt: skip
