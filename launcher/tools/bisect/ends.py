"""The two ends, GOOD and BAD: a run, a run file, a row of the matrix or an image."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.base.settings import expanded, settings
from launcher.images.matrix.matrix_file import find_row, load_matrix
from launcher.images.matrix.schema import Matrix
from launcher.runs.records import record
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import ImageRequest, RunConfig
from launcher.runs.runfile.origins import Override
from launcher.tools.bisect import checkouts
from launcher.tools.bisect.checkouts import EDITED, Checkout

PRESET = "gpt2-tiny.yaml"
"""What is run in a row or an image, where no run file is named."""

KINDS = "a run file, a run, a row of the matrix, an image, or RUN_FILE@COMMIT"


@dataclass(frozen=True)
class RowBuild:
    """What an image of ours is built of: a row, a release of Megatron, and extras as asked for."""

    tag: str
    release: str
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """GOOD or BAD, as `text` names it.

    build: None of an image that isn't ours, or whose parts aren't known. checkout: what runs in
    place of the image's Megatron. facts: those of a run on record.
    """

    text: str
    config: RunConfig
    cwd: str
    rest: tuple[str, ...] = ()
    backend: str = ""
    build: RowBuild | None = None
    checkout: Checkout | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def find(text: str, run_file: str, sets: list[Override]) -> End:
    """What GOOD or BAD names, with `sets` laid over it.

    run_file: what is run in a row or an image. Raises UsageError where there is no such thing, or
    no such commit.
    """
    matrix = load_matrix(settings().matrix)
    head, at, revision = text.rpartition("@")
    found = _find(text, run_file, sets, matrix)
    if found is None and at and not revision.startswith("sha256:"):
        found = _find(head, run_file, sets, matrix)
        if found and not found.config.source:
            raise UsageError(f"{text}: {head} has no `source`, of which {revision} is a commit")
    else:
        revision = ""
    if found is None:
        raise UsageError(f"{text}: no run, no file, no row and no image", f"It takes {KINDS}.")
    return _with_checkout(replace(found, text=text), revision)


def _find(text: str, run_file: str, sets: list[Override], matrix: Matrix) -> End | None:
    if Path(text).is_file():
        return _of_file(text, sets, matrix)
    if text in matrix.rows:
        return _of_image({"tag": text}, run_file, sets, matrix)
    kept = _record(text)
    if kept:
        return _of_run(kept, sets, matrix)
    if (origins.PRESETS / f"{text.removesuffix('.yaml')}.yaml").is_file() and "/" not in text:
        return _of_file(text, sets, matrix)
    if ":" in text.rpartition("/")[2]:
        return _of_image({"name": text}, run_file, sets, matrix)
    return None


def _record(text: str) -> record.Record | None:
    try:
        return record.find(text)
    except UsageError:
        return None


def _of_file(text: str, sets: list[Override], matrix: Matrix) -> End:
    config, _ = origins.load(text, sets)
    return End(text, config, os.getcwd(), build=_build(config.image, matrix))


def _of_image(
    image: dict[str, str], run_file: str, sets: list[Override], matrix: Matrix
) -> End | None:
    config, _ = origins.load(run_file or PRESET, [Override("the image", {"image": image}), *sets])
    return End("", config, os.getcwd(), build=_build(config.image, matrix))


def _of_run(kept: record.Record, sets: list[Override], matrix: Matrix) -> End:
    asked = kept.asked()
    record.check_secrets(kept, asked.config, os.environ)
    config = origins.overridden(asked.config, sets)
    facts = record.read(kept.run, record.FACTS) or {}
    labels = facts.get("image", {}).get("labels") or {}
    build = _labelled(labels) if labels else _build(config.image, matrix)
    return End("", config, kept.cwd, asked.rest, kept.backend, build, facts=facts)


def _build(image: ImageRequest, matrix: Matrix) -> RowBuild | None:
    """What a run file's image is built of: by its tag, or by the labels that the engine has."""
    if image.tag:
        release = image.megatron or find_row(matrix, image.tag).megatron
        return RowBuild(image.tag, release, tuple(image.extras))
    from launcher.base.errors import EngineError
    from launcher.images.engine.connect import connect
    from launcher.images.oci.inspection import find_image

    try:
        held = find_image(connect(), image.name or "") or {}
    except EngineError:  # --backend local needs none
        return None
    return _labelled((held.get("Config") or {}).get("Labels") or {})


def _labelled(labels: Mapping[str, str]) -> RowBuild | None:
    """What an image of ours was built of; None of others, and of one from a checkout."""
    if f"{LABEL}row" not in labels or labels.get(f"{LABEL}source") == "path":
        return None
    extras = tuple(labels.get(f"{LABEL}extras", "").split())
    return RowBuild(labels[f"{LABEL}row"], labels[f"{LABEL}megatron"], extras)


def _with_checkout(end: End, revision: str) -> End:
    """The end with the checkout that its `source` names: at a commit named, that of then, or now.

    Raises UsageError where there is no such commit.
    """
    if not end.config.source:
        return end
    folder = Path(end.cwd, expanded(end.config.source)).resolve()
    then = str(end.facts.get("source") or "").removesuffix(EDITED)
    commit = revision or ("" if then == "unversioned" else then)
    return replace(end, checkout=checkouts.checkout(folder, commit))
