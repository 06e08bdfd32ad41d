"""Patches: each applies in full or fails by name, wherever the tree lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.build import context
from launcher.errors import BuildError

from .conftest import commit_all

PATCH = """\
Says what for.

--- a/setup.py
+++ b/setup.py
@@ -1,3 +1,3 @@
 first
-second
+changed
 third
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    (path / "setup.py").write_text("first\nsecond\nthird\n")
    return path


@pytest.fixture
def patches(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "0.9.0"
    folder.mkdir()
    (folder / "01-change.patch").write_text(PATCH)
    return [folder / "01-change.patch"]


def test_it_applies_wherever_it_lies_and_once(tree: Path, patches: list[Path]) -> None:
    commit_all(tree.parent)  # within another repository
    for _ in range(2):
        context.apply_patches(patches, tree)
        assert (tree / "setup.py").read_text() == "first\nchanged\nthird\n"


@pytest.mark.parametrize("there", ["first\nelse\nthird\n", None])
def test_one_that_does_not_match_fails_by_name(
    tree: Path, patches: list[Path], there: str | None
) -> None:
    file = tree / "setup.py"
    file.write_text(there) if there else file.unlink()
    with pytest.raises(BuildError, match=r"0\.9\.0/01-change\.patch doesn't apply"):
        context.apply_patches(patches, tree)
    assert (file.read_text() if there else None) == there


@pytest.mark.parametrize(
    "setting", ["core.autocrlf=true", "apply.whitespace=fix", "apply.whitespace=error"]
)
def test_a_user_s_git_settings_do_not_change_what_a_patch_makes(
    setting: str, tree: Path, patches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    patches[0].write_text(PATCH.replace("+changed", "+changed  "))
    key, _, value = setting.partition("=")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", key)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
    context.apply_patches(patches, tree)
    assert (tree / "setup.py").read_bytes() == b"first\nchanged  \nthird\n"
