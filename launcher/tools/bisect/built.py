"""Images to be tried: built, or found built, by the builder of `launcher image build`."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base.errors import BuildError, EngineError
from launcher.base.screen import Progress
from launcher.base.settings import settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.connect import connect
from launcher.images.matrix.requirements import pinned_versions
from launcher.tools.bisect.ends import RowBuild

REPOSITORY = "megatron-bisect"
"""The name of the images that are made to be tried, beside the user's."""


def build(made: RowBuild, packages: Mapping[str, str] | None, progress: Progress) -> str:
    """The name of an image, which is built unless it was; with exact `packages` for its extras.

    Raises as `Builds.build`, but EngineError only where no engine answers any more.
    """
    extras = made.extras
    if packages is not None:
        extras = tuple(f"{name}=={version}" for name, version in sorted(packages.items()))
    request = BuildRequest(made.tag, made.release, extras=extras)
    try:
        return _builds(progress).build(request).names[0]
    except EngineError as error:
        connect()
        raise BuildError(error.problem, error.remedy) from error  # a base that can't be pulled


def package_versions(made: RowBuild, progress: Progress) -> dict[str, str]:
    """The versions of an image's extras and of what they need. Raises as `Builds.inputs`."""
    request = BuildRequest(made.tag, made.release, extras=made.extras)
    lock = _builds(progress).inputs(request).recipe.extras_lock
    return pinned_versions(lock.pins) if lock else {}


def _builds(progress: Progress) -> Builds:
    return Builds(connect(timeout=600), settings(), progress, REPOSITORY, standin=True)
