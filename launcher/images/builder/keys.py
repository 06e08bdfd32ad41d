"""Computes the keys of images from the matrix and its lock: without an engine, without fetching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from launcher.images.builder.context import Inputs
from launcher.images.builder.image import labels_of
from launcher.images.matrix.dockerfile import dockerfile
from launcher.images.matrix.locked import Lock
from launcher.images.matrix.matrix_file import patch_files
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.schema import Matrix, misfit
from launcher.images.sources import megatron_source
from launcher.images.sources.extensions import ExtensionSource
from launcher.images.sources.pins import StartImage

NOWHERE = Path()


def keys(matrix: Matrix, lock: Lock, root: Path) -> Iterator[tuple[str, str, str]]:
    """Row, release and key of each image of the matrix, on the row's first platform.

    root: the folder of Dockerfile.template and patches/. The lock has no digest of an image that no
    registry was asked for: the key is then that of a base or builder without one, and is another
    once it is built.
    """
    template = (root / "Dockerfile.template").read_text(encoding="utf-8")
    for tag, row in matrix.rows.items():
        for release, named in matrix.releases.items():
            if not misfit(row, release, named):
                made = recipe(matrix, lock, tag, release)
                yield tag, release, key(made, lock, root, dockerfile(matrix, tag, template))


def key(made: Recipe, lock: Lock, root: Path, text: str) -> str:
    """The key of a recipe's image, by the text of its Dockerfile."""

    def image(reference: str) -> StartImage:
        locked = lock.images.get(reference)
        digest = locked.digest if locked else ""
        return StartImage(reference, "", reference, digest, bool(locked), made.platform)

    wanted = made.interpreter
    inputs = Inputs(
        recipe=made,
        dockerfile=text,
        base=image(made.row.base),
        builder=image(made.builder),
        source=megatron_source.by_lock(made.kind, made.release, made.locked, NOWHERE),
        patches=tuple(patch_files(root, made.named)),
        interpreter=NOWHERE / wanted.sha256 / wanted.url.rpartition("/")[2] if wanted else None,
        extensions=tuple(
            ExtensionSource(name, *both, {}) for name, both in made.extensions.items()
        ),
        architectures=" ".join(made.row.architectures),
    )
    return replace(inputs, labels=labels_of(inputs)).key()
