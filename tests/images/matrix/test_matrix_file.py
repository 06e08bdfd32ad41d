"""matrix.yaml: what is right loads, and what is wrong gives file, line, key and reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.images.matrix.matrix_file import find_release, find_row, load_lock, load_matrix
from launcher.images.matrix.schema import caution, misfit
from tests.tables import table

ROOT = Path(__file__).resolve().parents[3]
NGC = [f"24.{month:02}" for month in range(2, 11)]


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """matrix.yaml with the first `old` replaced."""
    text = (ROOT / "matrix.yaml").read_text()
    assert old in text
    path = tmp_path / "matrix.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def line_of(path: Path, text: str) -> int:
    """The number of the first line that holds `text`."""
    lines = path.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


def test_the_nine_tags_and_the_cpu_row_are_there() -> None:
    matrix = load_matrix()
    assert matrix.usual == NGC
    assert set(NGC) | {"cpu"} <= set(matrix.rows)
    assert {matrix.rows[tag].megatron for tag in NGC} == {"0.9.0"}
    assert matrix.rows["cpu"].source == "sdist"
    untried = [tag for tag, row in matrix.rows.items() if row.untried]
    assert {"25.12", "26.06"} <= set(untried)
    assert not set(untried) & set(matrix.usual)  # built only where they are named
    assert all(matrix.rows[tag].expected is None for tag in untried)


def test_every_release_has_a_full_commit_and_patches_that_exist() -> None:
    folders = set()
    for release in load_matrix().releases.values():
        assert len(release.git.commit or "") == 40 or release.sdist
        patches = list((ROOT / "patches" / release.patches).glob("*.patch"))
        assert bool(patches) == bool(release.patches)
        names = {path.name for path in patches}  # without the first a wheel lacked megatron.rl
        assert "01-package-all-of-megatron.patch" in names
        folders |= {path.parent.name for path in patches}
    assert folders == {path.name for path in (ROOT / "patches").iterdir()}


@table("old", "new", "key", "reason")
def test_a_wrong_matrix_names_file_line_key_and_reason(
    tmp_path: Path, old: str, new: str, key: str, reason: str
) -> None:
    path = edited(tmp_path, old, new)
    with pytest.raises(UsageError) as caught:
        load_matrix(path)
    message = str(caught.value).splitlines()[0]
    assert message.startswith(f"{path}:{line_of(path, new) if 'repeated' not in reason else ''}")
    assert key in message
    assert reason in message


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("- einops==", "- --einops==", "needs.cp310.runtime.0"),
        ("images: {}", "images: {--x: {digest: x, platforms: {}}}", "images.--x"),
        ("sha256: ", "sha256: ../", "releases.0.10.0.sdist.sha256"),
    ],
)
def test_a_wrong_lock_names_file_line_and_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    """A pin goes into a file for pip, where --index-url== would be an option."""
    path = tmp_path / "matrix.lock"
    path.write_text((ROOT / "matrix.lock").read_text().replace(old, new, 1))
    where = re.escape(f"{path}:{line_of(path, new)}: {key}")
    with pytest.raises(UsageError, match=f"^{where}.* doesn't look like"):
        load_lock(path)


def test_an_untried_row_s_status_and_a_tag_read_as_a_number_are_told(
    tmp_path: Path,
) -> None:
    first = next(tag for tag, row in load_matrix().rows.items() if row.untried)
    path = edited(tmp_path, "untried: true", "untried: true\n    expected: runs")
    where = re.escape(f"rows.{first}: untried, and yet a status is expected")
    with pytest.raises(UsageError, match=where):
        load_matrix(path)
    path = edited(tmp_path, '"24.10":', "24.10:")
    with pytest.raises(UsageError, match=r"YAML reads a bare 24\.1 as a number"):
        load_matrix(path)


NO_MATRIX = [
    *("", "rows: [", "\ta: 1", "- 1"),
    *("a: 2024-13-45", "? [a, b]\n: c", "a: !foo 1", "&a [*a]", "&a {b: *a}"),
]


@pytest.mark.parametrize("text", NO_MATRIX)
def test_what_is_no_matrix_at_all_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="matrix"):
        load_matrix(path)


def test_a_release_that_does_not_fit_names_those_that_do() -> None:
    matrix = load_matrix()
    with pytest.raises(UsageError, match=r"Did you mean '24\.10'"):
        find_row(matrix, "24.1")
    with pytest.raises(UsageError) as caught:
        find_release(matrix, matrix.rows["24.10"], "0.16.1")
    assert "requires torch >=2.6.0" in str(caught.value)
    assert "0.9.0" in caught.value.remedy
    assert "0.16.1" not in caught.value.remedy
    row = matrix.rows["24.10"].model_copy(update={"torch": "2.6.0a0+abc"})
    assert misfit(row, "0.15.3", matrix.releases["0.15.3"]) is not None  # a prerelease is none


def test_a_known_defect_is_told_where_the_torch_has_it() -> None:
    matrix = load_matrix()
    old = matrix.releases["0.9.0"]
    assert caution(matrix.rows["24.10"], old) is None
    assert "checkpoint" in str(caution(matrix.rows["cpu"], old))
    assert caution(matrix.rows["cpu"], matrix.releases["0.16.1"]) is None
