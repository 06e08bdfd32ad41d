"""Several nodes as one job: whose end it is, what they say together, and what was said before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.group import (
    LONGEST_LINE,
    Group,
    Lines,
    Passed,
    State,
    failing_since,
    merged,
    seconds,
)
from launcher.plan.job import Cause, Ended, Job
from launcher.train.words import CONCLUSION, REPORT

PIECES = st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\r", b"\n")))


@given(PIECES)
def test_lines_are_whole_and_complete(pieces: list[bytes]) -> None:
    lines = Lines(b"node-1 | ")
    told = b"".join(lines.add(piece, False) for piece in pieces)
    assert told == b"" or told.endswith(b"\n")
    told += b"".join(rest for _, rest in lines.rest())
    whole = b"".join(pieces)
    ended = whole if whole.endswith(b"\n") or not whole else whole + b"\n"
    assert told == b"".join(b"node-1 | " + line for line in ended.splitlines(keepends=True))


def test_streams_dont_mix_within_a_line() -> None:
    lines = Lines(b"")
    assert lines.add(b"out", False) == b""
    assert lines.add(b"err\n", True) == b"err\n"
    assert lines.add(b"put\n", False) == b"output\n"


def test_a_line_without_an_end_is_passed_on_in_parts() -> None:
    lines = Lines(b"")
    assert lines.add(b"x" * (LONGEST_LINE + 1), False).count(b"\n") == 1


def test_times_of_the_engine() -> None:
    assert seconds("1970-01-01T00:01:00Z") == 60
    assert seconds("2025-01-02T03:04:05.25Z") < seconds("2025-01-02T03:04:05.250000001Z") + 1e-6
    assert seconds("2025-01-02T03:04:05.5Z") > seconds("2025-01-02T03:04:05.123456789Z")


def log(second: int, *lines: str) -> str:
    """Lines as the engine keeps them, all of one second."""
    return "".join(f"2025-01-02T03:04:{second:02}.000000001Z {line}\n" for line in lines)


E0, E3 = "runner: rank 0 exited with code 1", "runner: rank 3 exited with code 1"
K0 = "runner: rank 0 was killed by signal 9 (SIGKILL), exit code 137"
AT = seconds("2025-01-02T03:04:00Z")


@pytest.mark.parametrize(
    ("logs", "first"),
    [
        # Two nodes: what each wrote, and when the engine saw it end.
        ([(log(9, E0), 12), (log(8, "a", E3), 13)], 1),
        ([(log(8, "gpt: rank 0 has lost another rank", E0), 9), ("", 9)], 1),
        ([(log(8, "gpt: rank 0 has lost another rank", E0), 9), (log(9, E3), 9)], 1),
        ([(log(8, "[pair.cc] Connection closed by peer", E0), 9), (log(9, E3), 9)], 1),
        (
            [
                (log(9, "rank 1 has lost another rank", E0), 9),
                (log(8, "rank 3 has lost another rank", E3), 9),
            ],
            0,
        ),
        (
            [
                (log(9, "Connection reset by peer", K0), 9),
                (log(8, "rank 3 has lost another rank", E3), 9),
            ],
            0,
        ),
        ([("iteration 1\n", 8), ("", 30)], 0),
        ([(log(8, E0), 9), ("", 20)], 0),
    ],
)
def test_the_first_to_fail_is_found(logs: list[tuple[str, int]], first: int) -> None:
    since = [failing_since(text, AT + ended) for text, ended in logs]
    assert since.index(min(since)) == first


class Silent(Group):
    """Nodes that nobody can be asked about."""

    def log(self, node: Job) -> str:
        return ""


def job(count: int) -> Group:
    return Silent(cast("tuple[Job, ...]", (SimpleNamespace(),) * count), {})


def test_a_paused_node_holds_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were listed as running."""
    states = [RUNS, replace(RUNS, paused=True)]
    monkeypatch.setattr(Group, "_states", lambda self: states)
    assert job(2).state() == "paused"
    states.pop()
    assert job(1).state() == "running"


RUNS, WAITS = State(True, None), State(False, None)
DONE, FAILED = State(True, Ended(0), AT), State(True, Ended(3), AT)


@pytest.mark.parametrize(
    ("states", "code", "why"),
    [
        ([RUNS, WAITS], None, ""),
        ([RUNS, RUNS], None, ""),
        ([DONE, RUNS], None, ""),
        ([FAILED, RUNS], None, ""),
        ([DONE, DONE], 0, ""),
        ([FAILED, DONE], 3, "on node-0"),
        ([DONE, FAILED], 3, "on node-1"),
        ([FAILED, WAITS], 3, "on node-0"),
        ([DONE, WAITS], 125, "node-1 didn't start: node-0 ended before its port was open"),
        ([RUNS, State(False, None, refused="no GPU")], None, ""),
        (
            [State(True, Ended(0)), State(False, None, refused="no GPU")],
            125,
            "node-1 didn't start: no GPU",
        ),
        (
            [State(True, Ended(137, Cause.REMOVED), AT), DONE],
            137,
            "node-0: it was removed from outside",
        ),
        ([DONE], 0, ""),
        ([FAILED], 3, ""),
    ],
)
def test_how_a_run_ended(states: list[State], code: int | None, why: str) -> None:
    ended = job(len(states))._decided(states)
    assert (ended.code if ended else None, ended.why if ended else "") == (code, why)


def test_a_refused_start_is_the_cause_of_what_it_ends() -> None:
    states = [State(True, Ended(137), AT), State(False, None, refused="no GPU")]
    assert job(2)._decided(states) == Ended(125, why="node-1 didn't start: no GPU")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=12), st.integers(0, 12))
def test_each_byte_is_passed_on_once_though_the_engine_was_lost(
    written: list[tuple[str, bool]], lost_after: int
) -> None:
    """Who follows counts the bytes of each stream, and leaves out as many the second time."""
    lines = [(*one, f"{number}\n".encode()) for number, one in enumerate(written)]
    passed = Passed()
    passed.begin_again()
    first = [told for line in lines[:lost_after] for told in passed.of(*line)]
    passed.begin_again()
    again = sorted(lines, key=lambda line: line[0], reverse=True)  # another order of the nodes
    second = [told for line in again for told in passed.of(*line)] + [*passed.held()]
    for stream in (False, True):
        before = b"".join(data for is_error, data in first if is_error is stream)
        after = b"".join(data for is_error, data in second if is_error is stream)
        total = before + after[len(before) :]
        assert sorted(total.splitlines()) == sorted(
            line[2].strip() for line in lines if line[1] is stream
        )


def test_reports_of_several_nodes_become_one() -> None:
    one = {REPORT: f"stacks\n{CONCLUSION}rank 1 is late\n".encode(), "rank-0.txt": b"a"}
    two = {REPORT: f"{CONCLUSION}all wait\n".encode(), "rank-0.txt": b"b"}
    found = merged([one, two])
    assert found["node-0.rank-0.txt"] == b"a"
    assert found["node-1.rank-0.txt"] == b"b"
    last = found[REPORT].decode().splitlines()[-1]
    assert last == f"{CONCLUSION}node-0: rank 1 is late; node-1: all wait"
    assert merged([{}, {}]) == {}
