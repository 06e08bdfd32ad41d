"""What a process that writes a checkpoint reports to training."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
from types import SimpleNamespace

import pytest

from launcher.agent.compat import WriteResults, report_by_memory


def test_a_forked_writers_results_are_read_once() -> None:
    """As from Megatron's queue: a pipe of 64 kB would hold a writer up whom nobody reads yet."""
    results, written = WriteResults(), {0: ["place"] * 50_000}
    with pytest.raises(queue.Empty):
        results.get_nowait()
    for each in (written, {0: ["less"]}):
        writer = multiprocessing.get_context("fork").Process(target=results.put, args=(each,))
        writer.start()
        writer.join(10)
        assert writer.exitcode == 0
        assert results.get_nowait() == each
        with pytest.raises(queue.Empty):
            results.get_nowait()


def test_where_memory_has_no_files_megatron_keeps_its_own_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the system refuses them (vm.memfd_noexec=2), a run ended at its first save."""

    def refuse(name: str) -> int:
        raise PermissionError(errno.EACCES, name)

    writing = SimpleNamespace(_results_queue=None)
    monkeypatch.setattr(os, "memfd_create", refuse)
    report_by_memory(writing)
    assert writing._results_queue is None
    monkeypatch.undo()
    report_by_memory(writing)
    first = writing._results_queue
    assert isinstance(first, WriteResults)
    report_by_memory(writing)
    assert writing._results_queue is first
