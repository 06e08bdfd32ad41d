"""What a process that writes a checkpoint reports to training."""

from __future__ import annotations

import multiprocessing
import queue

import pytest

from launcher.agent.compat import WriteResults


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
