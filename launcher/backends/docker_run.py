"""Runs a plan's container: create, attach, start, stream, pass on the exit code, remove."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from docker.api import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types.daemon import CancellableStream
from docker.utils.socket import STDERR, frames_iter
from requests.exceptions import RequestException

from launcher.backends.docker import request
from launcher.errors import EngineError
from launcher.run.plan import AFTER_GRACE, Plan, without_memlock

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ATTACH = {"stdout": 1, "stderr": 1, "stream": 1}


class MemlockRefused(Exception):
    """The engine may not raise the limit of locked memory."""


def launch(api: APIClient, plan: Plan, *, detach: bool) -> int:
    """Run the container of `plan`; its exit code, or 0 once it is detached.

    Until the container has started, SIGINT and SIGTERM wait, so that none is left half-made.
    """
    with _signals_held():
        container, stream = _start(api, plan, detach=detach)
        if stream is None:
            print(container)
            return 0
        stopper = Stopper(api, container, plan.stop_grace)
        previous = {signum: signal.signal(signum, stopper) for signum in SIGNALS}
    try:
        return _follow(api, container, stream, plan)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _start(api: APIClient, plan: Plan, *, detach: bool) -> tuple[str, Any]:
    """The id of the started container, and what it writes; without the memlock limit if need be."""
    try:
        return _try_start(api, plan, detach=detach)
    except MemlockRefused:
        _tell("the engine may not raise the limit of locked memory (memlock); going on without it")
        return _try_start(api, without_memlock(plan), detach=detach)


def _try_start(api: APIClient, plan: Plan, *, detach: bool) -> tuple[str, Any]:
    container = _create(api, plan)
    try:
        # Attached before it starts: no output is lost, and none is waited for.
        stream = None if detach else api.attach_socket(container, params=ATTACH)
        api.start(container)
    except (DockerException, RequestException) as error:
        _remove(api, container)
        raise _start_error(error, plan) from error
    except BaseException:
        _remove(api, container)
        raise
    return container, stream


def _create(api: APIClient, plan: Plan) -> str:
    wanted = request(plan)
    body = wanted.body | {"Env": _environment(wanted.body["Env"])}
    try:
        created: str = api.create_container_from_config(body, wanted.name)["Id"]
    except ImageNotFound as error:
        raise EngineError(f"no image {plan.image}") from error
    except (DockerException, RequestException) as error:
        raise EngineError(f"the engine made no container: {_reason(error)}") from error
    return created


def _environment(variables: list[str]) -> list[str]:
    """The variables; one without a value takes the launcher's own, or is left out with it."""
    named = [(variable.partition("="), variable) for variable in variables]
    return [
        whole if equals else f"{name}={os.environ[name]}"
        for (name, equals, _), whole in named
        if equals or name in os.environ
    ]


def _start_error(error: Exception, plan: Plan) -> Exception:
    """What to say of a container that didn't start."""
    reason = _reason(error)
    if "error setting rlimit" in reason and "memlock" in dict(plan.ulimits):
        return MemlockRefused()
    if "could not select device driver" in reason:
        return EngineError(
            "the engine can't give GPUs to a container",
            "Install the NVIDIA Container Toolkit on its machine, run `nvidia-ctk runtime "
            "configure --runtime=docker`, and restart the engine; or use --gpus 0.",
        )
    return EngineError(f"the container didn't start: {reason}")


def _reason(error: Exception) -> str:
    """The engine's own words where it gave any."""
    told = error.explanation if isinstance(error, APIError) else None
    return str(told or error).strip()


def _follow(api: APIClient, container: str, stream: Any, plan: Plan) -> int:
    """Pass on what the container writes until it ends; its exit code. It is removed in the end."""
    try:
        for kind, data in frames_iter(stream, tty=False):
            out = sys.stderr.buffer if kind == STDERR else sys.stdout.buffer
            out.write(data)
            out.flush()
        code: int = api.wait(container)["StatusCode"]
    except BrokenPipeError:  # nobody reads what the run says: it ends, as in any pipe
        _hang_up(stream)
        _remove(api, container)
        raise
    except NotFound as error:
        raise EngineError(f"container {plan.name}-{plan.run} was removed from outside") from error
    except (DockerException, RequestException, OSError) as error:
        name = f"{plan.name}-{plan.run}"
        raise EngineError(
            f"the engine was lost: {_reason(error)}",
            f"See what became of the run: docker ps -a {name}",
        ) from error
    except BaseException:
        _hang_up(stream)
        _remove(api, container)
        raise
    _remove(api, container)
    return code


def _hang_up(stream: Any) -> None:
    """Close the connection for output: an engine that waits for a reader can't end a container."""
    response = getattr(stream, "_response", None)
    with suppress(DockerException, OSError):  # over ssh, or hung up already
        if response is not None:
            CancellableStream(stream, response).close()


def _remove(api: APIClient, container: str) -> None:
    try:
        api.remove_container(container, v=True, force=True)
    except NotFound:
        return
    except (DockerException, RequestException) as error:
        _tell(f"the container is still there: {_reason(error)}; docker rm -f {container[:12]}")


class Stopper:
    """A signal handler: the first asks the container to end, the second ends it at once.

    The engine is asked from a thread, as the signal may interrupt another call to it.
    """

    def __init__(self, api: APIClient, container: str, grace: int) -> None:
        self.api = api
        self.container = container
        self.grace = grace
        self.asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            self._send(lambda: self.api.kill(self.container))
            return
        self.asked = True
        _tell(
            f"asked the run to stop; it has {self.grace - AFTER_GRACE} s. "
            "Once more ends it at once."
        )
        self._send(lambda: self.api.stop(self.container, timeout=self.grace))

    def _send(self, call: Callable[[], object]) -> None:
        def quietly() -> None:
            with suppress(DockerException, RequestException):  # it may have ended by itself
                call()

        threading.Thread(target=quietly, daemon=True).start()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)
