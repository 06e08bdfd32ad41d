"""Finds or starts an engine; pulls the base image of a row, or makes a stand-in for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.engine import connect
from launcher.images.engine.private import debian, private
from launcher.images.oci import pull
from launcher.images.oci.inspection import find_image

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.matrix.schema import Matrix

STANDIN_NAME = "megatron-standin-base"


@contextmanager
def any_engine(folder: Path, progress: Progress) -> Iterator[DockerClient]:
    """The engine that answers, else a private one below `folder` that lives as long as the block.

    Raises EngineError where neither is to be had or the chosen one doesn't answer.
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


@dataclass(frozen=True)
class BaseNames:
    """The names of a row's base and builder, or of the stand-in that takes both places."""

    base: str
    builder: str


def bases(
    client: DockerClient, matrix: Matrix, tag: str, site: Settings, progress: Progress
) -> BaseNames:
    """The row's own base and builder where they are there or can be pulled, else a stand-in.

    Raises EngineError where no registry can be reached and no stand-in can be made here.
    """
    row = matrix.rows[tag]
    own = BaseNames(row.base, matrix.builders[row.abi])
    unpullable = refused(client, own.base, site) or refused(client, own.builder, site)
    if unpullable is None:
        return own
    progress.note(f"{unpullable.problem.splitlines()[0]}: a Debian made here stands in for it")
    name = f"{STANDIN_NAME}:{row.abi}"
    wanted = client, name, debian.STANDIN_EPOCH, row.python
    debian.debian_base(*wanted, cache=site.cache / "bases", say=progress.note)
    return BaseNames(name, name)


def refused(client: DockerClient, image: str, site: Settings) -> EngineError | None:
    """Why `image` is neither in the engine nor to be pulled, or None where it is."""
    if find_image(client, image):
        return None
    return pull.unpullable(client, site.mirrored(image))
