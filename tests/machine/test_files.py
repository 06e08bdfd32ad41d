"""Data that is damaged, folders that can't be written to, checkpoints, and room for them."""

from __future__ import annotations

import pytest

from launcher.machine import files
from launcher.machine.machine import Dataset, Folder, Machine, Saved
from tests.machine.conftest import GB, Asker

EACH = 14 * 124_082_688


def room(gigabytes: float, **more: Saved) -> Machine:
    """A machine with so much free for the preset's checkpoints."""
    folder = Folder("/home/user/work/checkpoints/gpt2", "checkpoint.save", free=int(gigabytes * GB))
    return Machine(folders=(folder,), **more)


def test_damaged_data_is_refused_with_its_line(asked: Asker) -> None:
    run = asked("gpt2", "data.path=/data/corpus")
    (finding,) = run.on(Machine(datasets=(Dataset("/data/corpus", "cut short"), Dataset("b", ""))))
    assert finding.what == "--set data.path=/data/corpus: data.path: cut short"
    assert finding.refuse


def test_a_folder_that_cant_be_written_to_is_refused(asked: Asker) -> None:
    folder = Folder("/mnt/x", "checkpoint.save", problem="its file system is read-only", free=0)
    (finding,) = asked("gpt2").on(Machine(folders=(folder,)))
    assert finding.what.endswith(": checkpoint.save: /mnt/x: its file system is read-only")
    assert finding.refuse


def test_a_folder_that_the_engine_does_not_see_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(Machine(unseen=(("checkpoint.save", "/mnt/later"),)))
    assert finding.what.endswith(
        ": checkpoint.save: /mnt/later: the engine sees something else there"
    )
    assert finding.refuse


def test_no_room_for_one_checkpoint_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(room(1.7))
    assert "1.7 GB free for /home/user/work/checkpoints/gpt2" in finding.what
    assert finding.refuse


@pytest.mark.parametrize(
    ("sets", "gigabytes", "full"),
    [
        ((), 3.4, "at iteration 1000"),
        ((), 3.5, None),
        (("checkpoint.save_interval=300",), 5.3, "at iteration 1000"),
        (("checkpoint.save_interval=300",), 3.5, "at iteration 900"),
        (("checkpoint.save_interval=10", "checkpoint.keep=2"), 5.3, None),
        (("checkpoint.save_interval=10", "checkpoint.keep=2"), 5.1, "at iteration 30"),
        (("checkpoint.save_interval=null",), 1.8, None),
    ],
)
def test_the_forecast(
    asked: Asker, sets: tuple[str, ...], gigabytes: float, full: str | None
) -> None:
    findings = asked("gpt2", *sets).on(room(gigabytes))
    assert [finding.refuse for finding in findings] == ([False] if full else [])
    assert all(f"it is full {full}" in finding.why for finding in findings)


def test_a_run_that_goes_on_writes_what_is_left(asked: Asker) -> None:
    assert len(asked("gpt2").on(room(2))) == 1
    assert asked("gpt2").on(room(2, load=Saved(500))) == []


def test_a_length_in_samples(asked: Asker) -> None:
    run = asked("gpt3-175b")
    assert files.iterations(run.config) == -(-146484375 // 1536)


@pytest.mark.parametrize(
    ("done", "total", "step", "at"),
    [
        (0, 10, 5, [5, 10]),
        (0, 11, 5, [5, 10, 11]),
        (5, 11, 5, [10, 11]),
        (7, 10, 5, [10]),
        (10, 10, 5, []),
        (0, 10, None, [10]),
        (10, 10, None, []),
        (0, 3, 5, [3]),
        (11, 11, 5, []),
    ],
)
def test_when_checkpoints_are_saved(
    asked: Asker, done: int, total: int, step: int | None, at: list[int]
) -> None:
    config = asked("gpt2", f"checkpoint.save_interval={step or 'null'}").config
    assert list(files.saves(config, done, total)) == at


def test_an_unknown_program_has_no_forecast(asked: Asker) -> None:
    assert asked("simple", "resources.workdir=x").on(Machine(folders=(Folder("/x", "y"),))) == []


def test_a_broken_newest_checkpoint_is_a_warning(asked: Asker) -> None:
    broken = (("/c/iter_0000900", "no .metadata"),)
    (finding,) = asked("gpt2").on(Machine(load=Saved(500, broken)))
    assert "/c/iter_0000900: no .metadata" in finding.what
    assert "iteration 500" in finding.why
    assert not finding.refuse


def test_a_folder_with_broken_ones_alone_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(Machine(load=Saved(None, (("/c/iter_1", "empty"),))))
    assert finding.refuse
    assert asked("gpt2").on(Machine(load=Saved(None))) == []
    assert asked("gpt2").on(Machine(load=Saved(10))) == []


def test_small_sizes_are_told_in_megabytes(asked: Asker) -> None:
    folder = Folder("/x", "checkpoint.save", free=10**6)
    (finding,) = asked("gpt2-tiny", "checkpoint.save=/x", "model.hidden_size=128").on(
        Machine(folders=(folder,))
    )
    assert finding.what.endswith("checkpoint.save: 1 MB free for /x")
    assert finding.why == "One checkpoint takes about 6 MB: weights and optimizer."
