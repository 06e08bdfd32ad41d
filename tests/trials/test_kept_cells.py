"""Cells that other machines have tried, as jobs of a workflow do, put together into one report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.matrix.load import load_lock, load_matrix
from launcher.settings import Settings
from launcher.trials.result import Cell, Result
from launcher.trials.series import Options, Series

if TYPE_CHECKING:
    from docker import DockerClient

CELLS = [Cell("24.09", "0.9.0"), Cell("24.10", "0.9.0"), Cell("cpu", "0.16.1")]


def no_engine() -> DockerClient:
    raise AssertionError("what is kept needs no engine")


def series(folder: Path, site: Settings, options: Options) -> Series:
    """One that may look at what is kept, and try nothing."""
    return Series(no_engine, site, load_matrix(), load_lock(), options, folder, lambda line: None)


def test_what_was_tried_with_the_same_is_taken_and_nothing_else_is(
    tmp_path: Path, site: Settings
) -> None:
    elsewhere = series(tmp_path, replace(site, cache=tmp_path / "another"), Options())
    found = [Result(cell.tag, cell.megatron, elsewhere.key(cell), "runs") for cell in CELLS[1:]]
    for one in found:
        (tmp_path / f"{one.tag}-{one.megatron}.json").write_text(json.dumps(asdict(one)))
    (tmp_path / "24.09-0.9.0.json").write_text(json.dumps(asdict(replace(found[0], key="old"))))
    assert [*series(tmp_path, site, Options()).kept(CELLS)] == found
    assert [*series(tmp_path, site, Options(gpus="all")).kept(CELLS)] == []
