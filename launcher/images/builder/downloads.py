"""Finds or fetches the inputs of rows before a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import verify
from launcher.images.builder.image import BuildRequest, ground
from launcher.images.matrix.recipe import Recipe
from launcher.images.matrix.schema import Matrix
from launcher.images.sources import extensions, extras_lock, fetch, megatron_source
from launcher.images.sources.pins import StartImage, StartImages


@dataclass(frozen=True)
class Commit:
    """A locked commit in a repository of the cache; `url` is the publisher's."""

    url: str
    commit: str
    repository: Path


@dataclass(frozen=True)
class RowDownloads:
    """What a row downloads: files and commits in the cache, and IDs of images by their names."""

    recipe: Recipe
    files: tuple[Path, ...]
    commits: tuple[Commit, ...]
    images: Mapping[str, str]


Wanted = tuple[Recipe, BuildRequest]
"""What a row reads, and the images that are asked for in place of its own."""


def fetch_all(
    rows: Sequence[Wanted],
    matrix: Matrix,
    images: StartImages | None,
    site: Settings,
    progress: Progress,
) -> tuple[list[RowDownloads], list[tuple[Recipe, LauncherError]]]:
    """Fetch every row's inputs, images where they are given; a row that fails stops no other."""
    fetched: list[RowDownloads] = []
    failed: list[tuple[Recipe, LauncherError]] = []
    for recipe, request in rows:
        try:
            fetched.append(_fetch(recipe, request, matrix, images, site, progress))
        except LauncherError as error:
            progress.fail()
            failed.append((recipe, error))
    return fetched, failed


def _fetch(
    recipe: Recipe,
    request: BuildRequest,
    matrix: Matrix,
    images: StartImages | None,
    site: Settings,
    progress: Progress,
) -> RowDownloads:
    """One row's inputs, from the cache or from outside.

    Raises BuildError for what can't be fetched or isn't what is locked, EngineError for an image
    that can't be had.
    """
    chosen = {recipe.row.base: request.base, recipe.builder: request.builder}
    found = {}
    if images:
        found = {name: images.find(name, own, recipe.platform) for name, own in chosen.items()}
    base = found.get(recipe.row.base)
    look = partial(_ground, images, base, recipe) if images and base else None
    recipe = extras_lock.settled(recipe, matrix, look, site, progress)
    progress.step(f"{recipe.tag}: {len(recipe.wheels)} Python packages")
    files = [extras_lock.cached(recipe.extras_lock, recipe, site)] if recipe.extras_lock else []
    where = recipe.row.python, site, recipe.platform, recipe.glibc
    files += fetch.wheels(recipe.wheels, *where)
    progress.step(f"{recipe.tag}: Megatron {recipe.release} from {recipe.kind}")
    megatron = megatron_source.locked(recipe, site)
    commits = []
    if recipe.kind == "git":
        commits.append(Commit(recipe.named.git.url, megatron.revision, megatron.at))
    else:
        files.append(megatron.at)
    progress.close()
    if python := fetch.interpreter(recipe, site, progress):
        files.append(python)
    commits += [
        Commit(one.urls[path], git.commit, one.repositories[path])
        for one in extensions.sources(recipe, site, progress)
        for path, git in one.commits.items()
    ]
    ids = {chosen[name] or name: image.id for name, image in found.items()}
    return RowDownloads(recipe, tuple(files), tuple(commits), ids)


def _ground(images: StartImages, base: StartImage, recipe: Recipe) -> extras_lock.Ground:
    """What a recipe's extras are put on, by a look into its base."""
    return ground(verify.look(images.client, base.id, base.name), base, recipe)
