"""An end to a question over HTTP: an answer that is late, or never whole, is none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises; requests' ReadTimeout where it isn't done in `seconds`.

    A time-out of requests is for each read alone, and for no name server and no ssh. So it asks in
    a thread, which is left to itself where it is late.
    """
    from requests.exceptions import ReadTimeout

    answer: Future[T] = Future()

    def wait() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    thread = Thread(target=wait, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer.done():
        raise ReadTimeout(f"no answer within {seconds:g} s")
    return answer.result()
