"""Receives signals in a thread of its own, so that a blocked main thread can't delay them."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

END = 0
"""No signal has this number."""


def catch(signums: Sequence[signal.Signals]) -> set[int | signal.Signals]:
    """Block the signals, also where they were ignored. Returns the mask of before."""
    for signum in signums:
        signal.signal(signum, _nothing)
    return signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """For the main thread there is nothing to do."""


class SignalListener:
    """Calls `hear` with the number of each signal that is caught, one after the other.

    A handler in Python is run by the main thread between two steps of its own: where a signal
    comes just before that begins to wait, only when the wait is over, which may be never. Here the
    handler in C wakes a thread (`signal.set_wakeup_fd`). Only the main thread can make one.
    """

    def __init__(self, signums: Sequence[signal.Signals], hear: Callable[[int], object]) -> None:
        self.hear = hear
        self.source, self.sink = os.pipe()
        os.set_blocking(self.sink, False)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        self.wakeup_before = signal.set_wakeup_fd(self.sink, warn_on_full_buffer=False)
        self.handlers_before = {signum: signal.getsignal(signum) for signum in signums}
        self.mask_before = catch(signums)

    def _listen(self) -> None:
        while True:
            for signum in os.read(self.source, 1 << 10):
                if signum == END:
                    return
                try:
                    self.hear(signum)
                except Exception:  # the next one is to be heard all the same
                    traceback.print_exc()

    def close(self) -> None:
        """Hear what came until now to its end; then the signals do what they did before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask_before)
        for signum, handler in self.handlers_before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self.wakeup_before)
        os.write(self.sink, bytes([END]))  # not closed for it: a fork may hold it open
        self.thread.join()
        os.close(self.sink)
        os.close(self.source)
