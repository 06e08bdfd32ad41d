"""The image of a run, and what is known about it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError, UsageError, nearest
from launcher.base.names import LABEL
from launcher.images.matrix.extras import suffix
from launcher.runs.runfile.config import ImageRequest

if TYPE_CHECKING:
    from launcher.images.matrix.schema import Matrix


@dataclass(frozen=True)
class ImageFacts:
    """What an image holds: its Megatron release, and upstream's scripts or not; None is unknown.

    runner: the version of the launcher whose runner and trainer an older image has
    instead_of: the release that `release` is taken for, where the run file says so
    packages: the Python packages in it, as far as needs.yaml asks, by normalised names
    """

    release: str | None = None
    scripts: bool | None = None
    runner: str = ""
    instead_of: str | None = None
    packages: frozenset[str] | None = None


def reference(image: ImageRequest) -> str:
    """The name the engine knows the image by."""
    if image.name:
        return image.name
    release = f"-{image.megatron}" if image.megatron else ""
    return f"megatron:{image.tag}{release}{suffix(image.extras)}"


def labelled(labels: Mapping[str, str]) -> ImageFacts:
    """The facts in an image's labels."""
    whole = {"true": True, "false": False}.get(labels.get(f"{LABEL}whole", ""))
    return ImageFacts(labels.get(f"{LABEL}megatron"), whole, labels.get(f"{LABEL}version", ""))


def planned(image: ImageRequest, matrix: Matrix, place: Callable[[str], str]) -> ImageFacts:
    """The facts the matrix has of an image that isn't there yet; `place` says where a key stands.

    Raises UsageError, naming the nearest, for a tag or a release that isn't in the matrix.
    """
    if image.name:
        return ImageFacts(image.megatron)
    tag = image.tag or ""
    if tag not in matrix.rows:
        remedy = nearest(tag, list(matrix.rows))
        raise UsageError(f"{place('image.tag')}: no tag {tag!r} in the matrix", remedy)
    release = image.megatron or matrix.rows[tag].megatron
    if release not in matrix.releases:
        where, remedy = place("image.megatron"), nearest(release, list(matrix.releases))
        raise UsageError(f"{where}: no Megatron release {release!r} in the matrix", remedy)
    return ImageFacts(release, matrix.rows[tag].source == "git")


def absent(image: ImageRequest) -> EngineError:
    """What to say where the engine has no such image."""
    if image.name:
        return EngineError(f"no image {image.name}", f"docker pull {image.name}")
    return EngineError(f"no image {reference(image)}", build_command(image, image.extras))


def build_command(image: ImageRequest, extras: Sequence[str]) -> str:
    """The command that builds the image of a row with these extras."""
    release = f" MEGATRON={image.megatron}" if image.megatron else ""
    added = f' EXTRAS="{" ".join(extras)}"' if extras else ""
    return f"make image TAG={image.tag}{release}{added}"
