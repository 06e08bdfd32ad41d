"""An engine and a base from what there is: the user's engine or a private one, pulled or made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.engine import base, connect, private, pull
from launcher.errors import EngineError
from launcher.progress import Progress

if TYPE_CHECKING:
    from docker import DockerClient

STANDIN_NAME = "megatron-standin-base"
STANDIN_EPOCH = 1735689600  # 2025-01-01, given to every file of a stand-in base


@dataclass(frozen=True)
class Bases:
    """The base and the builder of a row where they aren't the row's own; None where they are."""

    base: str | None = None
    builder: str | None = None


@contextmanager
def any_engine(folder: Path, progress: Progress) -> Iterator[DockerClient]:
    """The engine that answers, else a private one that lives as long as the block.

    `folder` keeps a private engine's packages and images. Raises EngineError, with what to do,
    where none answers and none can be started, or where the one the user chose doesn't answer.
    """
    try:
        client = connect.connect(timeout=600)
    except EngineError as none:
        reason = private.unsupported()
        if reason or next(connect.endpoints(os.environ)).chosen:
            why = f"\n  A private engine can't be started either: {reason}" if reason else ""
            raise EngineError(none.problem + why, none.remedy) from none
        with private.private_engine(folder, say=progress.note) as client:
            yield client
    else:
        yield client


def bases(
    client: DockerClient, wanted: list[str], python: str, cache: Path, progress: Progress
) -> Bases:
    """The row's own base and builder where they are there or can be pulled, else a stand-in.

    `wanted` are their names. Raises EngineError where no registry can be reached and no stand-in
    can be made here.
    """
    refused = next((r for r in (_refused(client, image) for image in wanted) if r), None)
    if refused is None:
        return Bases()
    progress.note(f"{refused.problem.splitlines()[0]}: a Debian made here stands in for it")
    name = f"{STANDIN_NAME}:cp{python.replace('.', '')}"
    base.debian_base(client, name, STANDIN_EPOCH, python, cache=cache, say=progress.note)
    return Bases(base=name, builder=name)


def _refused(client: DockerClient, image: str) -> EngineError | None:
    """Why `image` is neither in the engine nor to be pulled, or None where it is."""
    from docker.errors import ImageNotFound

    try:
        client.api.inspect_image(image)
    except ImageNotFound:
        return pull.unpullable(client, image)
    return None
