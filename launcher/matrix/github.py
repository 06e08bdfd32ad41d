"""The matrix as a GitHub workflow takes it, the jobs of `strategy.matrix`: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launcher.errors import UsageError
from launcher.matrix.schema import Matrix

HOSTED = "ubuntu-24.04"
"""GitHub's own runner. It has 14 GB of disk, which is less than an image of NVIDIA's takes."""

MOST_JOBS = 256
"""Jobs that a matrix may make in one run: GitHub's workflow syntax, `jobs.<job_id>.strategy`."""


def jobs(
    matrix: Matrix, cells: Iterable[tuple[str, str]], cuda_runner: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A job for each row with a release, in their order.

    cells: tag and Megatron release of each
    cuda_runner: labels of the runner that takes rows with CUDA; with none, those are left out

    A job has `tag`, `megatron`, `cuda` (whether the row has it) and `runner` (labels).
    """
    found = []
    for tag, megatron in cells:
        cuda = matrix.rows[tag].cuda is not None
        runner = [*cuda_runner] if cuda else [HOSTED]
        if runner:
            found.append({"tag": tag, "megatron": megatron, "cuda": cuda, "runner": runner})
    return found


def strategy(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The value of `strategy.matrix`. Raises UsageError where GitHub would refuse it."""
    if not found:
        raise UsageError(
            "no job is left, and GitHub takes no empty matrix",
            "Name a row without CUDA, or with --cuda-runner the runner that takes the others.",
        )
    if len(found) > MOST_JOBS:
        raise UsageError(
            f"{len(found)} jobs, and GitHub makes at most {MOST_JOBS} of one matrix",
            "Name fewer rows, or fewer releases with --megatron.",
        )
    return {"include": [*found]}
