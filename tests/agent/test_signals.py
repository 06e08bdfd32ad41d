import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from launcher.agent.ranks import signals

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def main_thread_spared() -> Iterator[None]:
    """Signals to this process go to another thread, so that they interrupt no wait of this one.

    Just so is one late that comes before the wait begins.
    """
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        over.set()
        other.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_what_the_main_thread_waits_for_delays_none() -> None:
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with closing(signals.SignalListener(SIGNALS, heard.put)), main_thread_spared():
        for signum in (*SIGNALS, *SIGNALS):
            os.kill(os.getpid(), signum)
            assert heard.get(timeout=300) == signum


def test_those_that_were_held_are_heard_and_afterwards_all_is_as_before() -> None:
    heard = list[int]()
    handler = signal.getsignal(signal.SIGUSR1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # others would end of it
        with closing(signals.SignalListener(SIGNALS, heard.append)):
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        assert heard == [signal.SIGUSR1]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | set(SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.set_wakeup_fd(-1) == -1


def test_what_came_before_its_end_is_heard_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails is told, and the next is heard."""
    heard = list[int]()

    def hear(signum: int) -> None:
        time.sleep(0.2)
        heard.append(signum)
        if signum == signal.SIGUSR1:
            raise LookupError("nobody to ask")

    ear = signals.SignalListener(SIGNALS, hear)
    for signum in SIGNALS:
        os.kill(os.getpid(), signum)
    ear.close()
    assert sorted(heard) == sorted(SIGNALS)
    assert not ear.thread.is_alive()
    assert "LookupError: nobody to ask" in capsys.readouterr().err


def test_what_is_caught_anew_is_heard_as_well() -> None:
    """As where torch has installed handlers of its own, and one signal more is wanted."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = signal.getsignal(signal.SIGUSR2)
    with closing(signals.SignalListener(SIGNALS[:1], heard.put)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signals.catch(SIGNALS)
        for signum in SIGNALS:
            os.kill(os.getpid(), signum)
        assert {heard.get(timeout=300) for _ in SIGNALS} == set(SIGNALS)
    signal.signal(signal.SIGUSR2, before)
