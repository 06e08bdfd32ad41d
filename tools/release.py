"""Builds wheel and sdist, and checks them as a user would: `python3 -m tools.release`.

The sdist has to give the same wheel. The wheel is installed alone, with the locked requirements,
and called in an empty folder. The workflow `release` publishes both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from launcher import __version__

ROOT = Path(__file__).parents[1]
CALLS = (
    ["--help"],
    ["matrix", "list"],
    ["schema"],
    ["run", "gpt2-tiny.yaml", "--dry-run"],
    ["run", "gpt2.yaml", "--gpus", "2", "--dry-run"],
)


class ReleaseError(Exception):
    """What is wrong with a release."""


def build(folder: Path) -> list[Path]:
    """Wheel and sdist of this checkout. Raises CalledProcessError."""
    for kind in ("wheel", "sdist"):
        run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)], ROOT)
    return [next(folder.glob(f"*-{__version__}{end}")) for end in ("-py3-none-any.whl", ".tar.gz")]


def check_name(tag: str) -> None:
    """Raises ReleaseError where a tag isn't that of the version, or the changelog lacks it."""
    if tag not in ("", f"v{__version__}"):
        raise ReleaseError(f"the tag is {tag}, and the version {__version__}")
    if f"\n## {__version__}\n" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ReleaseError(f"CHANGELOG.md has no part for {__version__}")


def check_alike(wheel: Path, sdist: Path, folder: Path) -> None:
    """Raises ReleaseError where the sdist gives another wheel: it lacks a file, or has one more."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(sdist)], folder)
    names = [{*zipfile.ZipFile(one).namelist()} for one in (wheel, next(folder.glob("*.whl")))]
    if names[0] != names[1]:
        raise ReleaseError(f"{sdist.name} gives another wheel: {sorted(names[0] ^ names[1])[:9]}")


def check_installed(wheel: Path, folder: Path) -> None:
    """Install a wheel and call it where nothing of ours is. Raises CalledProcessError."""
    run([sys.executable, "-m", "venv", "venv"], folder)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    run([*pip, "--require-hashes", "-r", str(ROOT / "requirements.txt")], folder)
    run([*pip, "--no-deps", str(wheel)], folder)
    empty = folder / "empty"
    empty.mkdir()
    for words in CALLS:
        run([str(folder / "venv/bin/launcher"), *words], empty)
    if left := [*empty.iterdir()]:
        raise ReleaseError(f"a dry run left files: {left}")


def run(argv: list[str], folder: Path) -> None:
    """A command without its output; PYTHONPATH would show it the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(argv, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)


def main(argv: list[str]) -> int:
    """Build, check and say which files there are; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", "-o", type=Path, default=ROOT / "dist", help="dist")
    parser.add_argument("--tag", default="", help="the tag that is released: v0.2.0")
    args = parser.parse_args(argv)
    try:
        check_name(args.tag)
        wheel, sdist = build(args.output.absolute())
        with tempfile.TemporaryDirectory() as scratch:
            check_alike(wheel, sdist, Path(scratch))
        with tempfile.TemporaryDirectory() as scratch:
            check_installed(wheel, Path(scratch))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(wheel, sdist, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
