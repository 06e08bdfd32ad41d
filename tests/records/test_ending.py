"""Who ended a run, why, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan import source
from launcher.plan.job import Cause, Ended
from launcher.records import ending, record, resume
from launcher.records.ending import Ending, Outcome, describe
from launcher.train import runner
from launcher.train.checkpoints.folders import Checkpoint

RUN = "0a1b2c3d"
DONE = "step 8\nfinished after iteration 8\n"
LEFT = f"{runner.stopped(2)}\n"
ASKED = "runner: SIGTERM: asked 2 ranks to stop, waiting 600 s\n"
THREE = "runner: rank 1 exited with code 3\n"
ASKED_WHERE = "runner: rank 0 waits in barrier (a.py:1)\n"
"""What `stacks` had been told before, which was taken for why it ended."""
LIMIT = "out of memory (the container's limit, resources.memory)"
UNDER = "the engine was restarted under it"
RANK_KILLED = "runner: rank 1 was killed by signal 9 (SIGKILL), exit code 137"

FINISHED, STOPPED, FAILED = Outcome.FINISHED, Outcome.STOPPED, Outcome.FAILED


@pytest.mark.parametrize(
    ("ended", "asked", "tail", "outcome", "restart", "reason"),
    [
        (Ended(0), False, "", FINISHED, False, ""),
        (Ended(0), False, DONE, FINISHED, False, ""),
        (Ended(0), True, DONE, FINISHED, False, ""),  # it was done before it heard
        (Ended(0), True, "", STOPPED, False, ""),
        (Ended(0), False, LEFT, STOPPED, False, ""),  # docker stop
        (Ended(0), False, DONE + LEFT, FINISHED, False, ""),
        (Ended(7), False, "runner: the launcher has gone: asked 2 ranks to stop, waiting", STOPPED,
         False, ""),
        (Ended(7), True, "", STOPPED, False, ""),
        (Ended(7), False, ASKED + "runner: rank 0 exited with code 7\n", STOPPED, False,
         "rank 0 exited with code 7"),
        (Ended(2), False, "", FAILED, False, ""),
        (Ended(121), False, "", FAILED, False, ""),
        (Ended(3), False, "", FAILED, True, ""),
        (Ended(3), False, f"{ASKED_WHERE}{THREE}runner: rank 0 exited with code 1\n", FAILED, True,
         "rank 1 exited with code 3"),
        (Ended(1), False, f"OSError: [Errno 28] No space left on device\n{THREE}", FAILED, True,
         "a disk is full"),
        (Ended(137), True, "", STOPPED, False, ""),
        (Ended(137), False, "", FAILED, True, "killed from outside, by SIGKILL"),
        (Ended(137), False, f"step 3 of{RANK_KILLED}\n", FAILED, True,
         "rank 1 was killed by signal 9 (SIGKILL), exit code 137"),
        (Ended(137), False, ASKED + "runner: killing rank 0, 1: grace period over\n", STOPPED,
         False, "killing rank 0, 1: grace period over"),
        (Ended(137, Cause.MEMORY), False, "", FAILED, True, LIMIT),
        (Ended(137, Cause.MEMORY), False, f"{RANK_KILLED}\n", FAILED, True, LIMIT),
        (Ended(137, Cause.MEMORY), False, f"{RANK_KILLED}: out of memory (the machine's memory)\n",
         FAILED, True,
         f"{RANK_KILLED.removeprefix('runner: ')}: out of memory (the machine's memory)"),
        (Ended(137, Cause.REMOVED), False, "", FAILED, False, "it was removed from outside"),
        (Ended(137, Cause.REMOVED), True, "", STOPPED, False, "it was removed from outside"),
        (Ended(137, Cause.ENGINE), False, "", FAILED, True, UNDER),
        (Ended(0, Cause.ENGINE), False, ASKED + LEFT, FAILED, True, UNDER),
        (Ended(0, Cause.ENGINE), False, DONE, FINISHED, False, UNDER),
        (Ended(0, Cause.ENGINE), True, ASKED + LEFT, STOPPED, False, UNDER),
        (Ended(143, Cause.ENGINE), False, "", FAILED, True, UNDER),
    ],
)  # fmt: skip
def test_what_became_of_it(
    ended: Ended, asked: bool, tail: str, outcome: Outcome, restart: bool, reason: str
) -> None:
    found = Ending(ended, asked, tail)
    assert (found.outcome, found.may_restart) == (outcome, restart)
    assert found.reason == reason
    cut_short = ended.code == 0 and outcome is FAILED  # which would be a 0 for success
    assert found.code == (125 if cut_short else ended.code)


def test_the_newest_checkpoint_is_named_with_how_to_go_on() -> None:
    """After another schedule the command that was told failed in the same way again."""
    said = (
        "AssertionError: OptimizerParamScheduler: class input value 5e-05 and checkpointvalue "
        "0.0001 for learning rate do not match\nrunner: rank 0 exited with code 1\n"
    )
    saved = Checkpoint(40, Path("/saves/iter_0000040"))
    assert describe(Ending(Ended(0), True, ""), "0a1b", saved, "/save") == [
        "run 0a1b stopped, exit code 0",
        "newest complete checkpoint: /saves/iter_0000040 (iteration 40)",
        "to go on: python3 -m launcher resume 0a1b",
    ]
    *_, last = describe(Ending(Ended(1), False, said), "0a1b", saved, "/save")
    command, _, setting = last.partition(" --set ")
    assert command == "to go on: python3 -m launcher resume 0a1b"
    config, _ = source.load("gpt2", [source.parse_set(setting)])
    assert config.megatron_args[resume.OVERRIDE] is True


@pytest.mark.parametrize(
    ("code", "tail", "first"),
    [
        (3, THREE, "run 0a1b failed: rank 1 exited with code 3"),
        (1, THREE, "run 0a1b failed, exit code 1: rank 1 exited with code 3"),
        (3, "", "run 0a1b failed, exit code 3"),
        (30, THREE, "run 0a1b failed, exit code 30: rank 1 exited with code 3"),
    ],
)
def test_the_exit_code_is_told_once(code: int, tail: str, first: str) -> None:
    ending = Ending(Ended(code), False, tail)
    assert describe(ending, "0a1b", None, "") == [first]
    assert describe(ending, "0a1b", None, "/save") == [first, "it saved no complete checkpoint"]
    assert describe(Ending(Ended(0), False, DONE), "0a1b", None, "/save") == []


@pytest.fixture
def kept(runs: Path) -> Path:
    """The folder of a run's record."""
    (runs / RUN).mkdir(parents=True)
    return runs / RUN


@pytest.mark.parametrize(
    ("found", "signals", "by"),
    [
        (Ending(Ended(0), False, ""), [], "itself"),
        (Ending(Ended(3), False, ""), [], "itself"),
        (Ending(Ended(0), True, ""), ["SIGINT"], "the launcher, on SIGINT"),
        (Ending(Ended(137), True, ""), ["SIGINT", "SIGTERM"], "the launcher, on SIGINT, SIGTERM"),
        (Ending(Ended(0), True, ""), [], "launcher stop"),
        (Ending(Ended(0), False, ASKED), [], "somebody outside"),
        (Ending(Ended(137, Cause.REMOVED), False, ""), [], "removed from outside"),
        (Ending(Ended(137, Cause.MEMORY), False, ""), ["SIGINT"], "out of memory"),
    ],
)
def test_who_ended_it(kept: Path, found: Ending, signals: list[str], by: str) -> None:
    ending.keep(RUN, 0, found, signals, None)
    assert [told["by"] for told in record.read_lines(kept / record.ENDINGS)] == [by]


def test_endings_come_back_in_their_order_with_what_was_saved(kept: Path) -> None:
    saved = Checkpoint(20, Path("/ck/iter_0000020"))
    ending.keep(RUN, 0, Ending(Ended(1), False, "runner: rank 1 exited with code 1\n"), [], saved)
    ending.keep(RUN, 1, Ending(Ended(0), False, ""), [], None)
    with (kept / record.ENDINGS).open("a") as file:
        file.write('{"attempt": 2, "out')
    first, second = record.read_lines(kept / record.ENDINGS)
    assert (first["outcome"], first["code"], first["iteration"]) == ("failed", 1, 20)
    assert first["reason"] == "rank 1 exited with code 1"
    assert (second["attempt"], second["outcome"], second["checkpoint"]) == (1, "finished", None)
    ending.keep("ffffffff", 0, Ending(Ended(0), False, ""), [], None)  # it has no record
    assert not (kept.parent / "ffffffff").exists()
