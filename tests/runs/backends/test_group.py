"""Several nodes as one job: their ends, the first that failed, and their output."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.words import CONCLUSION, REPORT
from launcher.runs.backends import group
from launcher.runs.plan.job import ConnectionLost, EndCause, ExitStatus, OutputPiece

PIECES = st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\r", b"\n")))


@given(PIECES)
def test_lines_are_whole_and_complete(pieces: list[bytes]) -> None:
    lines = group.NodeLines(b"node-1 | ")
    told = b"".join(lines.add(piece, False) for piece in pieces)
    assert told == b"" or told.endswith(b"\n")
    told += b"".join(rest for _, rest in lines.rest())
    whole = b"".join(pieces)
    ended = whole if whole.endswith(b"\n") or not whole else whole + b"\n"
    assert told == b"".join(b"node-1 | " + line for line in ended.splitlines(keepends=True))


def test_streams_dont_mix_within_a_line() -> None:
    lines = group.NodeLines(b"")
    assert lines.add(b"out", False) == b""
    assert lines.add(b"err\n", True) == b"err\n"
    assert lines.add(b"put\n", False) == b"output\n"


def test_a_line_without_an_end_is_passed_on_in_parts() -> None:
    lines = group.NodeLines(b"")
    assert lines.add(b"x" * (group.LONGEST_LINE + 1), False).count(b"\n") == 1


def test_times_of_the_engine() -> None:
    assert group.seconds_since_1970("1970-01-01T00:01:00Z") == 60
    assert (
        group.seconds_since_1970("2025-01-02T03:04:05.25Z")
        < group.seconds_since_1970("2025-01-02T03:04:05.250000001Z") + 1e-6
    )
    assert group.seconds_since_1970("2025-01-02T03:04:05.5Z") > group.seconds_since_1970(
        "2025-01-02T03:04:05.123456789Z"
    )


def log(second: int, *lines: str) -> str:
    """Lines as the engine keeps them, all of one second."""
    return "".join(f"2025-01-02T03:04:{second:02}.000000001Z {line}\n" for line in lines)


E0, E3 = "runner: rank 0 exited with code 1", "runner: rank 3 exited with code 1"
K0 = "runner: rank 0 was killed by signal 9 (SIGKILL), exit code 137"
AT = group.seconds_since_1970("2025-01-02T03:04:00Z")


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
        ([(log(7, "runner: node 1 (b): rank 3 exited with code 1"), 8), (log(8, E3), 9)], 1),
        ([("iteration 1\n", 8), ("", 30)], 0),
        ([(log(8, E0), 9), ("", 20)], 0),
    ],
)
def test_the_first_to_fail_is_found(logs: list[tuple[str, int]], first: int) -> None:
    since = [group.failing_since(text, AT + ended) for text, ended in logs]
    assert since.index(min(since)) == first


RUNS, WAITS = group.NodeState(True, None), group.NodeState(False, None)
DONE, FAILED = group.NodeState(True, ExitStatus(0), AT), group.NodeState(True, ExitStatus(3), AT)
KILLED, NO_GPU = (
    group.NodeState(True, ExitStatus(137), AT),
    group.NodeState(False, refused="no GPU"),
)


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
        ([RUNS, NO_GPU], None, ""),
        ([DONE, NO_GPU], 125, "node-1 didn't start: no GPU"),
        (
            [group.NodeState(True, ExitStatus(137, EndCause.REMOVED), AT), DONE],
            137,
            "node-0: it was removed from outside",
        ),
        ([KILLED, NO_GPU], 125, "node-1 didn't start: no GPU"),
        ([DONE], 0, ""),
        ([FAILED], 3, ""),
    ],
)
def test_how_a_run_ended(states: list[group.NodeState], code: int | None, why: str) -> None:
    ended = group.group_ended(states, lambda rank: "")
    assert (ended.code if ended else None, ended.why if ended else "") == (code, why)


def test_reports_of_several_nodes_become_one() -> None:
    one = {REPORT: f"stacks\n{CONCLUSION}rank 1 is late\n".encode(), "rank-0.txt": b"a"}
    two = {REPORT: f"{CONCLUSION}all wait\n".encode(), "rank-0.txt": b"b"}
    found = group.joined_reports([one, two])
    assert found["node-0.rank-0.txt"] == b"a"
    assert found["node-1.rank-0.txt"] == b"b"
    last = found[REPORT].decode().splitlines()[-1]
    assert last == f"{CONCLUSION}node-0: rank 1 is late; node-1: all wait"
    assert group.joined_reports([{}, {}]) == {}


def test_survivors_are_ended_once_they_had_time_to_fail_too() -> None:
    survivors = group.Survivors()
    assert not survivors.are_due([RUNS, RUNS], 0.0)
    assert not survivors.are_due([RUNS, FAILED], 5.0)
    assert not survivors.are_due([RUNS, FAILED], 5.0 + group.SETTLE_SECONDS - 0.1)
    assert survivors.are_due([RUNS, FAILED], 5.0 + group.SETTLE_SECONDS)
    assert group.Survivors(failed_at=0.0).are_due([RUNS, NO_GPU], group.SETTLE_SECONDS)


def test_nodes_are_read_together_and_a_lost_engine_is_told() -> None:
    """All nodes are read at once, each line with its node; one that is lost ends it."""

    def written(rank: int) -> Iterator[OutputPiece]:
        yield from (OutputPiece(False, b"a\nb"), OutputPiece(True, b"e\n"))
        if rank == 2:
            raise ConnectionLost("away")

    outputs = [group.labelled(rank, written(rank)) for rank in range(2)]
    looks: list[int] = []
    told = sorted(group.joined(outputs, lambda: looks.append(1)), key=lambda piece: piece.node)
    lines = [(False, b"node-0 | a\n", 0), (True, b"node-0 | e\n", 0), (False, b"node-0 | b\n", 0)]
    assert told[:3] == lines
    assert [piece.node for piece in told] == [0, 0, 0, 1, 1, 1]
    assert looks
    with pytest.raises(ConnectionLost):
        list(group.joined([group.labelled(2, written(2))], lambda: None))


def test_a_paused_node_holds_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were listed as running."""
    job, states = group.Group((), {}), [RUNS, replace(RUNS, paused=True)]
    monkeypatch.setattr(job, "look", lambda: states)
    assert job.state() == "paused"
    states.pop()
    assert job.state() == "running"


def test_a_report_that_is_compressed_isnt_unpacked() -> None:
    """A few kB from a container became gigabytes of the launcher's memory."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("a/rank-0.txt")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    assert group.unpacked(packed.getvalue()) == {"rank-0.txt": b"abc"}
    assert group.unpacked(gzip.compress(packed.getvalue())) == {}
