"""What a row reads by the lock, and what of it is refused before anything is asked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import check_packages, locked_hashes, recipe, sha256_of_pin
from tests.tables import table

MATRIX, LOCK = load_matrix(), load_lock()
CPU = recipe(MATRIX, LOCK, "cpu")


def test_a_row_reads_its_wheels_its_source_and_two_images() -> None:
    assert (CPU.release, CPU.row.python, CPU.kind) == ("0.16.1", "3.11", "sdist")
    needs = LOCK.needs["cp311"]
    assert {*CPU.wheels} == {*needs.build, *needs.runtime, *LOCK.packages["cpu"]}
    assert len(CPU.wheels) == len({*CPU.wheels})
    assert {*CPU.added} == {*needs.runtime, *LOCK.packages["cpu"]}
    assert [*CPU.images] == [MATRIX.rows["cpu"].base, MATRIX.builders["cp311"]]
    assert recipe(MATRIX, LOCK, "cpu", "0.9.0").kind == "git"  # which has no sdist
    assert recipe(MATRIX, LOCK, "24.10").kind == "git"


def test_what_the_lock_lacks_is_told_at_once() -> None:
    empty = LOCK.model_copy(update={"needs": {}, "packages": {}, "releases": {}})
    with pytest.raises(UsageError) as caught:
        recipe(MATRIX, empty, "cpu")
    assert caught.value.problem == (
        "matrix.lock has no needs of cp311, no packages of cpu, no releases of 0.16.1"
    )
    assert "make lock" in caught.value.remedy
    with pytest.raises(UsageError, match="no tag 'cpux'"):
        recipe(MATRIX, LOCK, "cpux")
    with pytest.raises(UsageError, match=r"no Megatron release '0\.9\.9' in the matrix"):
        recipe(MATRIX, LOCK, "cpu", "0.9.9")


@table("change", "said", "remedy")
def test_packages_that_were_changed_and_not_locked_are_refused(
    change: dict[str, Any], said: str, remedy: str
) -> None:
    row = MATRIX.rows["cpu"].model_copy(update=change)
    changed = MATRIX.model_copy(update={"rows": {**MATRIX.rows, "cpu": row}})
    with pytest.raises(UsageError) as caught:
        recipe(changed, LOCK, "cpu")
    assert (caught.value.problem, caught.value.remedy) == (said, remedy)
    needs = MATRIX.needs.model_copy(update={"runtime": [*MATRIX.needs.runtime, "NumPy>=2"]})
    said = r"matrix\.lock is older than the matrix's runtime needs: NumPy>=2 \(not locked\)\n"
    with pytest.raises(UsageError, match=said):
        recipe(MATRIX.model_copy(update={"needs": needs}), LOCK, "cpu")


@pytest.mark.parametrize("tag", [tag for tag, row in MATRIX.rows.items() if row.packages])
def test_what_is_locked_is_taken_however_its_name_is_written(tag: str) -> None:
    row = MATRIX.rows[tag]
    check_packages(tag, row, LOCK.packages[tag])
    other = [one.upper().replace("-", "_") for one in row.packages]
    check_packages(tag, row.model_copy(update={"packages": other}), LOCK.packages[tag])


def hashes(pins: Collection[str]) -> set[str]:
    return {sha256_of_pin(pin) for pin in pins}


def test_what_a_bundle_lacks_is_named() -> None:
    files = hashes(CPU.wheels)
    assert CPU.locked.sdist is not None
    assert CPU.lacks(files, []) == ["Megatron 0.16.1"]
    files.add(CPU.locked.sdist.sha256)
    assert CPU.lacks(files, []) == []
    first = CPU.wheels[0]
    assert CPU.lacks(files - hashes([first]), []) == [first.split()[0]]
    row = recipe(MATRIX, LOCK, "24.10")
    assert row.lacks(hashes(row.wheels), ["a" * 40]) == ["Megatron 0.9.0"]
    assert row.locked.git is not None
    assert row.lacks(hashes(row.wheels), [row.locked.git.commit]) == []
    locked = locked_hashes(LOCK)  # what prune keeps
    for tag in MATRIX.rows:
        assert hashes(recipe(MATRIX, LOCK, tag).wheels) <= locked
    assert {one.sdist.sha256 for one in LOCK.releases.values() if one.sdist} <= locked


def test_a_row_of_two_platforms_has_wheels_and_a_builder_of_the_one_that_is_named() -> None:
    amd64, arm64 = recipe(MATRIX, LOCK, "26.06"), recipe(MATRIX, LOCK, "26.06", None, "linux/arm64")
    assert (amd64.platform, arm64.platform) == ("linux/amd64", "linux/arm64")
    assert {*LOCK.needs["cp312-arm64"].runtime} <= {*arm64.wheels}
    assert {*LOCK.needs["cp312"].runtime} <= {*amd64.wheels}
    assert [*arm64.images] == [MATRIX.rows["26.06"].base, MATRIX.builders["cp312-arm64"]]
    with pytest.raises(UsageError, match=r"24\.10: is not for linux/arm64") as caught:
        recipe(MATRIX, LOCK, "24.10", platform="linux/arm64")
    assert caught.value.remedy == "The row is for linux/amd64."


def test_a_set_that_is_compiled_brings_its_commits_and_needs_a_row_with_cuda() -> None:
    """It ended hours later, or on the cpu row in a traceback of setup.py that no nvcc was there."""
    made = recipe(MATRIX, LOCK, "24.10", extras=["mamba"])
    assert [*made.extensions] == ["causal-conv1d-1.5.4", "mamba-ssm-2.2.6"]
    assert made.extras.architectures == ("80", "90")
    assert {*LOCK.needs["cp310"].extensions} <= {*made.wheels}
    with pytest.raises(UsageError, match=r"causal-conv1d-1\.5\.4 is compiled for GPUs"):
        recipe(MATRIX, LOCK, "cpu", extras=["mamba"])
