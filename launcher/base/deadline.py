"""A deadline for HTTP requests: an answer that is late or incomplete is an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Return or raise what `ask` does; raise requests' ReadTimeout if it takes over `seconds`.

    A time-out of requests limits each read alone, and no name lookup and no ssh. So `ask` runs in
    a thread, which is abandoned when it is late. A time-out that `ask` itself raises reads the
    same: which of the two comes first is chance.
    """
    from requests.exceptions import ReadTimeout, Timeout

    late = f"no answer within {seconds:g} s"

    answer: Future[T] = Future()

    def wait() -> None:
        try:
            answer.set_result(ask())
        except Timeout:
            answer.set_exception(ReadTimeout(late))
        except BaseException as error:
            answer.set_exception(error)

    thread = Thread(target=wait, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer.done():
        raise ReadTimeout(late)
    return answer.result()
