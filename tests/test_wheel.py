"""What `pip install` gives: the whole product, which works from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher import __version__
from tools import release

ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; from launcher.cli import program; sys.exit(program())"
KEY = """
from launcher.images.builder import context
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.dockerfile import dockerfile
from launcher.base.settings import settings
matrix, beside = load_matrix(), settings().matrix.parent
print(context.own_digest(), len(load_lock().packages))
print(dockerfile(matrix, "24.10", (beside / "Dockerfile.template").read_text()))
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this checkout has in it, as pip unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    before = status()
    built = subprocess.run(
        [*argv, "--wheel-dir", folder, ROOT], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert status() == before  # building leaves nothing in the checkout
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def status() -> str:
    argv = ["git", "status", "--porcelain", "--ignored", "--", ".", ":!*/__pycache__"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(installed: Path, cwd: Path, *argv: str, code: str = PROGRAM) -> str:
    """What the installed program says, called in a folder where there is nothing of ours."""
    env = {name: value for name, value in os.environ.items() if name != "LAUNCHER_MATRIX"}
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", code, *argv],
        cwd=cwd,
        env=env | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_launcher_is_whole(installed: Path, tmp_path: Path) -> None:
    """It had no matrix, presets, template, patches or list of arguments, and no program."""
    assert "launcher = launcher.cli:program" in next(
        installed.glob("*.dist-info/entry_points.txt")
    ).read_text("utf-8")
    assert "\n24.10 " in run(installed, tmp_path, "matrix", "list").replace("| ", "")
    assert '"properties"' in run(installed, tmp_path, "schema")
    said = run(installed, tmp_path, "run", "gpt2-tiny.yaml", "--dry-run")
    assert "docker run" in said
    patches = {path.relative_to(ROOT / "patches") for path in (ROOT / "patches").rglob("*.patch")}
    share = installed / "launcher/share/patches"
    assert {path.relative_to(share) for path in share.rglob("*.patch")} == patches
    assert [*tmp_path.iterdir()] == []


def test_it_builds_the_images_that_the_checkout_builds(installed: Path, tmp_path: Path) -> None:
    """An image's identity would depend on how the launcher came onto the machine."""
    assert run(installed, tmp_path, code=KEY) == run(ROOT, tmp_path, code=KEY)


def test_what_it_writes_goes_below_the_folder_that_is_named(
    installed: Path, tmp_path: Path
) -> None:
    """`matrix render` and `lock` would write into site-packages."""

    def files() -> dict[Path, int]:
        """Each file's time, but for what Python has compiled."""
        found = (path for path in installed.rglob("*") if "__pycache__" not in path.parts)
        return {path: path.stat().st_mtime_ns for path in found if path.is_file()}

    before = files()
    run(installed, tmp_path, "matrix", "render")
    run(installed, tmp_path, "matrix", "render", "--root", "there")
    for root in (tmp_path, tmp_path / "there"):
        for name in ("images/24.10/Dockerfile", "compose/one-node.yaml"):
            assert (root / name).read_bytes() == (ROOT / name).read_bytes()
    run(installed, tmp_path, "matrix", "lock", "--offline", "--root", "there")
    assert (tmp_path / "there/matrix.lock").read_bytes() == (ROOT / "matrix.lock").read_bytes()
    assert files() == before


def test_a_release_is_of_its_tag_and_stands_in_the_changelog() -> None:
    """PyPI keeps a wrong version for ever."""
    release.check_name(f"v{__version__}")
    with pytest.raises(release.ReleaseError, match=r"the tag is v9\.9"):
        release.check_name("v9.9.9")
