"""Renders the matrix as `strategy.matrix` of a GitHub workflow: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.base.errors import UsageError
from launcher.images.matrix.schema import Matrix

HOSTED = {"linux/amd64": "ubuntu-24.04", "linux/arm64": "ubuntu-24.04-arm"}
"""GitHub's own runners: with 14 GB of disk, less than an image of NVIDIA's takes, and no GPU."""

MOST_JOBS = 256
"""Jobs that a matrix may make in one run: GitHub's workflow syntax, `jobs.<job_id>.strategy`."""


def jobs(
    matrix: Matrix, cells: Iterable[tuple[str, str]], cuda_runners: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """A job for each row with a release, on each of the row's platforms, in their order.

    cells: tag and Megatron release of each
    cuda_runners: of a platform, the labels of the runner that takes rows with CUDA

    A job has `tag`, `megatron`, `platform`, `cuda` (whether the row has it) and `runner` (labels),
    which are none where no runner takes it.
    """
    return [
        {
            "tag": tag,
            "megatron": megatron,
            "platform": platform,
            "cuda": row.cuda is not None,
            "runner": [*cuda_runners.get(platform, ())] if row.cuda else [HOSTED[platform]],
        }
        for tag, megatron in cells
        for row in [matrix.rows[tag]]
        for platform in row.platforms
    ]


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
