"""The docker backend: runs a plan as one container of a Docker-compatible engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from launcher.base.errors import EngineError
from launcher.runs.backends import host
from launcher.runs.backends.docker.docker_request import (
    EVERY_GPU,
    LOCAL,
    ContainerRequest,
    is_rootless,
    request,
    shell_command,
    show,
)
from launcher.runs.plan.image_facts import ImageFacts, labelled
from launcher.runs.plan.job import Backend
from launcher.runs.plan.plan import Plan

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.api import APIClient

    from launcher.runs.plan.job import Job


def connect() -> DockerClient:
    """The engine. Raises EngineError where none answers."""
    from launcher.images.engine.connect import connected

    return connected()


@contextmanager
def _asking() -> Iterator[None]:
    """Raises EngineError where the engine doesn't answer, or refuses to."""
    from launcher.runs.backends.container import failures, words_of

    try:
        yield
    except failures() as error:
        raise EngineError(f"the engine: {words_of(error)}") from error


@dataclass(frozen=True)
class DockerBackend(Backend):
    """Runs on the engine that `connect` finds, asked for when it is first needed."""

    connect: Callable[[], DockerClient] = connect
    name = "docker"
    has_engine = True

    @cached_property
    def _client(self) -> DockerClient:
        return self.connect()

    @property
    def api(self) -> APIClient:
        return self._client.api

    @property
    def engine(self) -> APIClient:
        return self.api

    @property
    def shares_files(self) -> bool:
        return str(self.api.base_url) == LOCAL

    def request(self, plan: Plan) -> ContainerRequest:
        return request(plan)

    def show(self, plan: Plan, *, full: bool = False) -> str:
        try:
            return show(plan, shares_files=self.shares_files)
        except EngineError:  # there is none to ask
            return show(plan)

    def facts(self, image: str) -> ImageFacts | None:
        from launcher.base.settings import settings
        from launcher.images.builder import beside
        from launcher.runs.backends.container import missing

        with _asking():
            try:
                self._images.pop(image, None)
                told = self.inspected(image)
            except missing():
                return None
        known = beside.packages(str(told["Id"]), settings())
        packages = None if known is None else frozenset(known)
        return replace(labelled(told["Config"].get("Labels") or {}), packages=packages)

    @cached_property
    def _images(self) -> dict[str, dict[str, Any]]:
        return {}

    def inspected(self, image: str) -> dict[str, Any]:
        """What the engine says of an image; asked once for all that a start makes of it."""
        return self._images.get(image) or self._images.setdefault(
            image, self.api.inspect_image(image)
        )

    def identity(self, image: str) -> Mapping[str, Any]:
        told = self.inspected(image)
        labels = told["Config"].get("Labels") or {}
        digests = sorted(told.get("RepoDigests") or [])
        return {"name": image, "id": told["Id"], "digests": digests, "labels": labels}

    def count_gpus(self) -> int | None:
        local = self.api.base_url == LOCAL
        with _asking():
            return (host.count_gpus() if local else None) or _known_devices(self.api)

    def rootless(self) -> bool:
        with _asking():
            return is_rootless(self.api.info())

    def start(self, plan: Plan, *, attach: bool) -> Job:
        from launcher.runs.backends.docker import docker_job

        return docker_job.start(self.api, plan, attach=attach)

    def jobs(self) -> list[Job]:
        from launcher.runs.backends.docker import docker_job

        return [*docker_job.jobs(self.api)]

    def shell(self, plan: Plan) -> list[str]:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        return [self._program(), *shell_command(plan, terminal=terminal)[1:]]

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        attached = ["--interactive", *(["--tty"] if terminal else [])]
        return [self._program(), "exec", *attached, "--", job.handle, *argv]

    def environment(self) -> dict[str, str]:
        from launcher.images.engine.connect import cli_environment

        return cli_environment(self._client)

    def _program(self) -> str:
        from launcher.images.engine.connect import docker_cli

        found = docker_cli(self._client)
        if found is None:
            raise EngineError(
                "there is no docker program here, which a terminal in a container needs",
                "Install docker's command line: docker-cli or docker-ce-cli.",
            )
        return found


def backend() -> DockerBackend:
    """The backend with the engine that the environment points to."""
    return DockerBackend()


def _known_devices(api: APIClient) -> int | None:
    """The GPUs that the engine itself knows of (CDI, newer engines); None where it states none."""
    found = api.info().get("DiscoveredDevices") or []
    ids = {str(device.get("ID", "")) for device in found}
    return sum(1 for one in ids if one.startswith("nvidia.com/gpu=") and one != EVERY_GPU) or None
