"""A run that is followed where its records are on a disk that fills up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.runs.backends import local
from launcher.runs.follow.listen import listening
from launcher.runs.follow.supervise import supervise
from launcher.runs.records import record
from launcher.runs.records.ending import Outcome
from launcher.runs.records.record import Record
from tests.disks import mounted
from tests.runs.backends.conftest import BARE

LINES = 20_000
LINE = "iteration {:8}/ 20000 | elapsed time per iteration (ms): 1.0 | lm loss: 2.5E+00 |\\n"
SPEAKS = f"import os\nfor n in range({LINES}): os.write(1, {LINE!r}.format(n).encode())\n"


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
