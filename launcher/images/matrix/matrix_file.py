"""Reads matrix.yaml and matrix.lock, and finds a row or a release in them."""

from __future__ import annotations

from pathlib import Path

from launcher.base import yamlfile
from launcher.base.errors import UsageError, nearest
from launcher.base.settings import settings
from launcher.images.matrix.locked import Lock
from launcher.images.matrix.schema import Matrix, MegatronRelease, Row, misfit


def load_matrix(path: Path | None = None) -> Matrix:
    """The matrix at `path`, or the configured one. Raises UsageError with file, line and key."""
    return yamlfile.load(path or settings().matrix, Matrix)


def load_lock(path: Path | None = None) -> Lock:
    """The lock beside the matrix."""
    return yamlfile.load(path or lock_path(), Lock)


def lock_path() -> Path:
    """Where the lock of the configured matrix lies."""
    return settings().matrix.with_suffix(".lock")


def patch_files(root: Path, release: MegatronRelease) -> list[Path]:
    """The patches of a release, of the matrix in `root`, in the order in which they apply."""
    return sorted((root / "patches" / release.patches).glob("*.patch"))


def find_row(matrix: Matrix, tag: str) -> Row:
    """The row `tag`. Raises UsageError that names the nearest where there is none."""
    if tag not in matrix.rows:
        raise UsageError(f"no tag {tag!r} in the matrix", nearest(tag, list(matrix.rows)))
    return matrix.rows[tag]


def find_release(matrix: Matrix, row: Row, version: str) -> MegatronRelease:
    """The release `version`, which must fit `row`. Raises UsageError where it doesn't."""
    if version not in matrix.releases:
        raise UsageError(
            f"no Megatron release {version!r} in the matrix",
            nearest(version, list(matrix.releases)),
        )
    release = matrix.releases[version]
    problem = misfit(row, version, release)
    if problem:
        fits = [v for v, r in matrix.releases.items() if misfit(row, v, r) is None]
        raise UsageError(problem, f"Releases for this base: {', '.join(fits)}")
    return release
