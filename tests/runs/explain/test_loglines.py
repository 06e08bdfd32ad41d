"""How lines of a log are read: their words without prefixes, and who says them."""

from __future__ import annotations

import pytest

from launcher.runs.explain.loglines import MOST_PREFIXES, by_source, parse


@pytest.mark.parametrize(
    ("line", "words", "source"),
    [
        ("ValueError: no", "ValueError: no", ""),
        ("[rank3]: ValueError: no", "ValueError: no", "[rank3]:"),
        ("[rank3]:     raise ValueError", "    raise ValueError", "[rank3]:"),
        ("node-1 | [rank3]: ValueError: no", "ValueError: no", "node-1 |[rank3]:"),
        ("12: ValueError: no", "ValueError: no", "12:"),
        ("worker-2: ValueError: no", "ValueError: no", "worker-2:"),
        ("10.0.0.7: bash: line 0: cd: /x: no", "bash: line 0: cd: /x: no", "10.0.0.7:"),
        ("slurmstepd-n1: error: no", "slurmstepd-n1: error: no", ""),
        ("collect2: error: ld", "collect2: error: ld", ""),
        ("libx.so.1: cannot open", "libx.so.1: cannot open", ""),
        ("[1,5]<stderr>: ValueError: no", "ValueError: no", "[1,5]<stderr>:"),
        ("(WorkerDict pid=99, ip=10.0.0.2) ValueError: no", "ValueError: no",
         "(WorkerDict pid=99, ip=10.0.0.2)"),
        ("2026-01-02 03:04:05,678 ERROR [n1] down", "[n1] down", ""),
        ("[2026-01-02T03:04:05.5Z] ValueError: no", "ValueError: no", ""),
        ("E0102 03:04:05.5 77 torch/x/api.py:9] failed", "failed", ""),
        ("E0102 03:04:05.5 77 torch/x.py:9] [0/0] failed", "failed", ""),
        ("(Worker pid=9) ERROR 06-01 13:29:39 [x.py:9] failed", "failed", "(Worker pid=9)"),
        ("i.train/0   File \"/x.py\", line 7", "  File \"/x.py\", line 7", "i.train/0"),
        ("Jan  2 03:04:05 n1 kernel: NVRM: Xid", "kernel: NVRM: Xid", ""),
        ("#6 13.74       ValueError: no", "ValueError: no", ""),
        ("13.74 seconds, no error", "13.74 seconds, no error", ""),
        ("[2026-01-02T03:04:05.5] [15.0] error: container_p_join failed: 15",
         "error: container_p_join failed: 15", ""),
        ("n1:88:99 [3] NCCL WARN Timeout", "NCCL WARN Timeout", ""),
        ("n1:88:99 [3] a/socket.h:3 WARN Call failed", "a/socket.h:3 NCCL WARN Call failed", ""),
        ("[1767323045.123] [n1:77 :0] mm_ep.c:9 UCX ERROR no", "mm_ep.c:9 UCX ERROR no", ""),
        ("\x1b[31mValueError: no", "ValueError: no", ""),
    ],
)  # fmt: skip
def test_a_line_is_read_without_what_stands_before_its_words(
    line: str, words: str, source: str
) -> None:
    """An anchored expression fitted no line of a rank, a node or a log with times."""
    found = parse(1, line)
    assert (found.text, found.source) == (words, source)


def test_a_line_of_prefixes_alone_ends() -> None:
    """What is all prefixes is prose, and costs no more than a few looks."""
    assert parse(1, "[rank1]: " * 99).text.startswith("[rank1]: ")
    assert parse(1, "[rank1]: " * MOST_PREFIXES).text == ""


@pytest.mark.parametrize(
    ("line", "speaker"),
    [
        ("runner: rank 1 exited with code 3", "runner"),
        ("n1:8:9 [0] misc/socket.cc:9 NCCL WARN no", "nccl"),
        ("[n1:9:0:9] Caught signal 7 (Bus error: x)", "ucx"),
        ("slurmstepd-n1: error: Detected 1 oom_kill event", "scheduler"),
        ("srun: error: n1: task 0: Out Of Memory", "scheduler"),
        ("  Warning  Evicted  3m  kubelet  The node was low", "scheduler"),
        ("docker: Error response from daemon: no", "engine"),
        ("pyxis: couldn't start container", "engine"),
        ("[  99.5] Out of memory: Killed process 9", "kernel"),
        ("run.sh: line 6: 77 Killed python", "shell"),
        ("Killed", "shell"),
        ("Killed 3 old workers", "program"),
        ("OSError: [Errno 28] No space left on device", "program"),
    ],
)
def test_who_says_a_line(line: str, speaker: str) -> None:
    assert parse(1, line).speaker == speaker


def test_the_lines_of_each_rank_come_together() -> None:
    """Tracebacks that ranks wrote at once, line by line, made one of nobody's."""
    lines = ["[rank0]: a", "[rank1]: x", "[rank0]: b", "[rank1]: y"]
    read = by_source([parse(number, line) for number, line in enumerate(lines, start=1)])
    assert [(line.number, line.text) for line in read] == [(1, "a"), (3, "b"), (2, "x"), (4, "y")]


def test_an_ignored_exception_of_a_rank_empties_no_line_of_another() -> None:
    """The only error of rank 1 was gone."""
    lines = [
        "[rank0]: Exception ignored in: <f>",
        "[rank1]: ValueError: no",
        "[rank0]: KeyError: 1",
    ]
    read = by_source([parse(number, line) for number, line in enumerate(lines, start=1)])
    assert [line.text for line in read] == ["Exception ignored in: <f>", "", "ValueError: no"]
    alone = by_source([parse(number, line) for number, line in enumerate(lines[:2], start=1)])
    assert alone[-1].text == "ValueError: no"
