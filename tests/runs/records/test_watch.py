"""What is kept of a run's output: every byte of it, and each metric once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.agent import words
from launcher.runs.backends import local
from launcher.runs.follow.listen import listening
from launcher.runs.follow.supervise import supervise
from launcher.runs.records import record, watch
from launcher.runs.records.ending import Outcome
from launcher.runs.records.metrics import TrainingStep
from launcher.runs.records.record import Record
from launcher.runs.records.watch import RecordWatch, Speed
from tests.disks import limited, mounted
from tests.runs.backends.conftest import BARE

PLAN: dict[str, Any] = {
    "program": "gpt",
    "options": {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
        "micro_batch_size": 4, "global_batch_size": 8, "vocab_size": 100,
    },
    "nodes": 1,
    "processes_per_node": 2,
}  # fmt: skip


def step(iteration: int, loss: float = 2.5, batch: int = 8) -> bytes:
    """A line of training, which takes 100 ms."""
    return (
        f" [2026-01-02 03:04:05] iteration {iteration:8d}/     100 | consumed samples: 80 | "
        f"elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-03 | "
        f"global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 |\n"
    ).encode()


def kept(folder: Path) -> list[dict[str, Any]]:
    """The metrics in a run's folder."""
    return [json.loads(line) for line in (folder / watch.METRICS).read_text().splitlines()]


LINES = [step(10), step(20), b"saved\n", b"\xff\xfe iteration \xff\n", b"\n", b"no newline, e"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(LINES)), max_size=8), st.data())
def test_whatever_the_pieces_the_log_is_whole_and_each_metric_is_kept_once(
    tmp_path: Path, lines: list[tuple[bool, bytes]], data: st.DataObject
) -> None:
    for name in (record.LOG, watch.METRICS):
        (tmp_path / name).unlink(missing_ok=True)
    with RecordWatch(tmp_path, 0) as watching:
        for is_error, line in lines:
            cut = data.draw(st.integers(0, len(line)))
            for piece in (line[:cut], line[cut:]):
                watching.add(piece, is_error)
    assert (tmp_path / record.LOG).read_bytes() == b"".join(line for _, line in lines)
    found = [record["iteration"] for record in kept(tmp_path)]
    # A line that nothing ended goes on in the next one of its stream, which is then no step's.
    streams = [b"".join(line for error, line in lines if error is e) for e in (False, True)]
    assert len(found) == sum(stream.count(b" | loss scale: 1.0 |") for stream in streams)


def test_rates_of_links_are_facts_of_the_run(tmp_path: Path) -> None:
    """Of a newer attempt the newer ones, and no more than a few of a program that prints them."""
    facts = tmp_path / record.FACTS
    facts.write_text('{"image": {"name": "a"}}')
    for attempt, rate in enumerate((38.25, 12.5)):
        with RecordWatch(tmp_path, attempt) as watching:
            watching.add(f"runner: {words.link(2, 1, 'H100', 40)}\n".encode(), is_error=True)
            for nodes in (1, 2, 1, 7, 7):
                watching.add(f"{words.link(nodes, 4, 'H100', rate)}\n".encode(), is_error=False)
        link = {"ranks": 4, "gpu": "H100", "gb_s": rate}
        assert json.loads(facts.read_text()) == {
            "image": {"name": "a"},
            "links": {"within": {"nodes": 1, **link}, "between": {"nodes": 2, **link}},
        }


def test_a_step_has_its_speed_by_the_plan_and_the_batch_of_its_own_line(tmp_path: Path) -> None:
    with RecordWatch(tmp_path, 0, speed=Speed(PLAN, None)) as watching:
        watching.add(step(10) + step(20, batch=16), is_error=False)
    slow, fast = kept(tmp_path)
    assert slow["tokens_per_s"] == 8 * 32 / 0.1
    assert fast["tokens_per_s"] == 2 * slow["tokens_per_s"]
    assert "mfu" not in slow  # which needs a GPU that is known
    with RecordWatch(tmp_path, 0):  # as where the engine's log driver gives none back
        pass
    assert (tmp_path / record.LOG).read_bytes() == step(10) + step(20, batch=16)
    assert kept(tmp_path) == [slow, fast]
    speed, step_of = Speed(PLAN, None), TrainingStep(10, 100, 100.0, global_batch_size=8)
    before = speed.rates_of(step_of)
    speed.read_vocabulary(" > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)")
    after = speed.rates_of(step_of)
    assert before
    assert after
    assert after.tflops_per_gpu > before.tflops_per_gpu


@pytest.mark.parametrize(
    ("names", "found"),
    [(["H100", "H100"], "H100"), (["H100", "A100"], None), ([], None)],
)
def test_the_share_of_the_peak_is_of_gpus_that_are_all_the_same(
    names: list[str], found: str | None
) -> None:
    machine = {"machine": {"gpus": [{"name": name} for name in names]}}
    assert Speed(PLAN, machine).gpu == found
    assert Speed(PLAN, {"machine": None}).gpu is None


def test_what_is_seen_again_from_its_beginning_replaces_what_was_kept(tmp_path: Path) -> None:
    with RecordWatch(tmp_path, 0) as first:
        first.add(step(10, loss=9.0), is_error=False)
    with RecordWatch(tmp_path, 1) as second:
        second.add(step(20), is_error=False)
    with (tmp_path / watch.METRICS).open("a") as file:
        file.write("[]\n\ufffd\n" + '{"kind": "step", "att')  # a launcher was killed as it wrote
    with RecordWatch(tmp_path, 1) as again:
        again.add(step(20) + step(30), is_error=False)
    found = [(record["attempt"], record["iteration"]) for record in kept(tmp_path)]
    assert found == [(0, 10), (1, 20), (1, 30)]
    assert [path.name for path in record.logs(tmp_path)] == ["log", "log.1"]
    assert (tmp_path / "log.1").read_bytes() == step(20) + step(30)


def test_a_folder_that_takes_nothing_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / record.LOG).mkdir()
    told, seen = list[str](), list[object]()
    with RecordWatch(tmp_path, 0, tell=told.append, seen=lambda f, r: seen.append(f)) as watching:
        watching.add(step(10), is_error=False)
        watching.add(step(20), is_error=False)
    assert len(told) == 1
    assert "log" in told[0]
    assert len(seen) == 2


def test_a_full_disk_is_said_once_and_what_comes_when_there_is_room_again_is_kept(
    tmp_path: Path,
) -> None:
    """The log and the metrics ended for good with the first line that didn't fit."""
    told = list[str]()
    with RecordWatch(tmp_path, 0, tell=told.append) as watching:
        watching.add(step(10), is_error=False)
        with limited(len(step(10)) + 9):
            for iteration in (20, 30):
                watching.add(step(iteration), is_error=False)
        watching.add(step(40), is_error=False)
    log = tmp_path / record.LOG
    assert told == [f"the log can't be written: {log}: File too large; the run goes on"]
    gap = f"launcher: {2 * len(step(20)) - 9} bytes are missing here, which couldn't be written"
    assert log.read_bytes() == step(10) + step(20)[:9] + f"\n{gap}\n".encode() + step(40)
    found = [one["iteration"] for one in record.read_lines(tmp_path / watch.METRICS)]
    assert (found[0], found[-1], 30 in found) == (10, 40, False)


def test_nobody_listens_where_the_record_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    (tmp_path / "0a1b2c3d").mkdir()  # where a local run's own files are
    job: Any = SimpleNamespace(run="0a1b2c3d", labels={}, files=lambda path: {})
    with listening(job) as listeners:
        assert not listeners


def test_a_line_without_an_end_does_not_grow_in_memory(tmp_path: Path) -> None:
    with RecordWatch(tmp_path, 0) as watching:
        for _ in range(40):
            watching.add(b"x" * (1 << 14), is_error=False)
        assert len(watching.begun[False]) == watch.LONGEST_LINE
    assert (tmp_path / record.LOG).stat().st_size == 40 << 14


MANY = 20_000
LINE = "iteration {:8}/ 20000 | elapsed time per iteration (ms): 1.0 | lm loss: 2.5E+00 |\\n"
SPEAKS = f"import os\nfor n in range({MANY}): os.write(1, {LINE!r}.format(n).encode())\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records on a disk of 128 KiB."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    with mounted(tmp_path, 1 << 17):
        yield tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_of_records_is_said_and_the_end_is_recorded(
    small: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run died, was told as killed from outside, and its end wasn't recorded."""
    argv = ("python3", "-c", f"{SPEAKS}os._exit(0)")
    plan = replace(BARE, argv=argv)
    config = {"name": "test", "image": {"tag": "cpu"}}
    record.write(Record(plan.run, "test", "", "local", str(small), "a.yaml", config, (), 1))
    backend, remove = local.backend(), local.LocalJob.remove

    def remove_and_fill(job: local.LocalJob) -> None:
        remove(job)
        with suppress(OSError), (small / "others").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass

    monkeypatch.setattr(local.LocalJob, "remove", remove_and_fill)
    ending = supervise(backend, lambda _: backend.start(plan, attach=True), listening=listening)
    assert (ending.code, ending.outcome) == (0, Outcome.FINISHED)
    assert "No space left on device; the run goes on" in capfd.readouterr().err
    kept = [*record.read_lines(record.folder(plan.run) / record.ENDINGS)]
    assert [(each["code"], each["outcome"]) for each in kept] == [(0, Outcome.FINISHED.value)]
