"""Makes the folder .venv from hash-locked requirements, on a system with nothing but Python.

Run by the system's own interpreter: standard library only. A second call with nothing changed
does nothing. Which index pip asks is the user's own configuration.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
# What would put packages elsewhere, or contradict the lock.
MISLEADING = (
    "PIP_CONSTRAINT",
    "PIP_PREFIX",
    "PIP_REQUIREMENT",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
)

PROGRAM = """#!/bin/sh
exec {python} -I -m launcher "$@"
"""


class SetupError(Exception):
    """What went wrong and how to mend it, for the user."""


def main(argv: list[str]) -> int:
    """Parse, set up, report; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("requirements", nargs="*", type=Path, default=[ROOT / "requirements.txt"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    args = parser.parse_args(argv)
    try:
        if sys.version_info < OLDEST:
            raise SetupError(f"Python {OLDEST[0]}.{OLDEST[1]} or later is needed: {sys.version}")
        set_up(args.venv.absolute(), [path.resolve() for path in args.requirements])
    except SetupError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    return 0


def set_up(venv: Path, requirements: list[Path]) -> None:
    """Bring `venv` to what `requirements` say: nothing, an addition, or all of it anew."""
    wanted = {str(path): digest(path) for path in requirements}
    if is_done(read_stamp(venv), wanted):
        return
    with locked(venv.parent):
        stamp = read_stamp(venv)
        if is_done(stamp, wanted):
            return
        have = stamp.get("files", {}) if is_sound(stamp) else {}
        if not have or any(wanted.get(path, known) != known for path, known in have.items()):
            have, stamp = {}, {"python": python_name()}
            create(venv)
        for path in requirements:
            if str(path) not in have:
                install(venv, path)
                have[str(path)] = wanted[str(path)]
        add_program(venv)
        write_stamp(venv, {"python": stamp["python"], "files": have})


def digest(path: Path) -> str:
    """The sha256 of a requirements file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SetupError(f"{path}: can't be read: {error.strerror}") from error


def python_name() -> str:
    """The interpreter on which a virtual environment depends."""
    return f"{os.path.realpath(sys.executable)} {sys.version}"


def is_sound(stamp: dict[str, Any]) -> bool:
    """True when the interpreter that the environment depends on is still the same.

    Another interpreter that calls this program doesn't change that.
    """
    known = str(stamp.get("python", ""))
    path = known.partition(" ")[0]
    other = path and path != os.path.realpath(sys.executable)
    return known == python_name() or bool(other and Path(path).exists())


def is_done(stamp: dict[str, Any], wanted: dict[str, str]) -> bool:
    """True when the environment was finished, of these very files."""
    return is_sound(stamp) and wanted.items() <= stamp.get("files", {}).items()


def read_stamp(venv: Path) -> dict[str, Any]:
    """What the environment was made of, or nothing for one that was interrupted."""
    try:
        stamp = json.loads((venv / ".bootstrap").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and python_in(venv).exists() else {}


def write_stamp(venv: Path, stamp: dict[str, Any]) -> None:
    """Replace the stamp in one step."""
    part = venv / ".bootstrap.part"
    part.write_text(json.dumps(stamp), encoding="utf-8")
    part.replace(venv / ".bootstrap")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make an environment in `folder`, where the system has flock."""
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    sys.path.insert(0, str(ROOT))
    from launcher.base import files  # of the standard library alone

    with files.folder_lock(folder):
        yield


def python_in(venv: Path) -> Path:
    """The environment's interpreter."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create(venv: Path) -> None:
    """Make the environment, with pip in it, in place of an older or interrupted one."""
    if venv.exists():
        if not (venv / ".bootstrap").exists():
            raise SetupError(
                f"{venv} wasn't made by this program, so it is left alone.\n"
                "  Remove it, or name another folder: --venv FOLDER"
            )
        remove(venv)
    venv.mkdir()
    write_stamp(venv, {})  # now it is ours, and unfinished
    print(f"creating {venv} with Python {sys.version.split()[0]}", flush=True)
    if importlib.util.find_spec("venv") is None:
        raise SetupError(f"this Python has no module venv.\n  {packages_hint()}")
    with_pip = importlib.util.find_spec("ensurepip") is not None
    option = [] if with_pip and not bundled_pip() else ["--without-pip"]
    run([sys.executable, "-m", "venv", *option, str(venv)], "the virtual environment")
    if not with_pip:
        add_pip(venv)


def bundled_pip() -> Path | None:
    """The wheel that ensurepip would install; pip runs from it, and installs the locked pip alone.

    Three of 17 s of CPU less: pip isn't installed twice.
    """
    found = importlib.util.find_spec("ensurepip")
    own = Path(found.origin).parent / "_bundled" if found and found.origin else Path()
    folders = (sysconfig.get_config_var("WHEEL_PKG_DIR") or own, own)
    wheels = (path for folder in folders for path in sorted(Path(folder).glob("pip-*.whl")))
    return next(wheels, None) if found else None


def add_program(venv: Path) -> None:
    """Give the environment this checkout: its packages, in any folder, and `launcher`."""
    for site in venv.glob("lib/python3*/site-packages"):
        (site / "launchpad.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    path = python_in(venv).with_name("launcher")
    part = path.with_name("launcher.part")
    part.write_text(PROGRAM.format(python=shlex.quote(str(python_in(venv)))), encoding="utf-8")
    part.chmod(0o755)
    part.replace(path)


def remove(venv: Path) -> None:
    """Remove an environment of ours, as the launcher removes: following no link, nothing else."""
    sys.path.insert(0, str(ROOT))
    from launcher.base import owned

    try:
        owned.remove_folder(venv, venv.parent, proof=".bootstrap")
    except OSError as error:
        raise SetupError(f"{error.filename}: {error.strerror}") from error


def add_pip(venv: Path) -> None:
    """Install pip from a wheel of the distribution: this Python can't (it lacks ensurepip)."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = pip_wheel(Path(scratch))
        program = [str(python_in(venv)), str(wheel / "pip")]
        run([*program, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], "pip")


def pip_wheel(scratch: Path) -> Path:
    """The distribution's pip wheel: installed, or downloaded and unpacked in `scratch`."""
    for root in (Path("/"), scratch / "root"):
        if root != Path("/"):
            print("fetching pip from the distribution (unpacked privately)", flush=True)
            download_pip(root)
        found = sorted(root.glob("usr/share/python-wheels/pip-*.whl"))
        if found:
            return found[-1]
    raise SetupError(f"the distribution's package of pip holds no wheel.\n  {packages_hint()}")


def download_pip(root: Path) -> None:
    """Unpack the distribution's pip under `root`; no privilege is needed."""
    sys.path.insert(0, str(ROOT))
    from launcher.base.errors import LauncherError
    from launcher.images.engine.private import packages

    try:
        packages.unpack(root, ["python3-pip-whl"])
    except LauncherError as error:
        raise SetupError(f"this Python has no pip, and {error}\n  {packages_hint()}") from error


def packages_hint() -> str:
    """How to get what is missing from the system's own packages."""
    known = {
        "apt-get": "sudo apt-get install python3-venv",
        "dnf": "sudo dnf install python3 python3-pip",
        "zypper": "sudo zypper install python3 python3-pip",
        "apk": "apk add python3 py3-pip",
    }
    command = next((line for tool, line in known.items() if shutil.which(tool)), "")
    return f"Install it: {command}" if command else "Install Python with venv and pip."


def install(venv: Path, requirements: Path) -> None:
    """Install exactly what a requirements file locks, each file checked against its hash."""
    count = sum("==" in line for line in requirements.read_text(encoding="utf-8").splitlines())
    print(f"installing {count} packages of {requirements.name}", flush=True)
    wheel = None if [*venv.glob("lib/python3*/site-packages/pip")] else bundled_pip()
    pip = [str(wheel / "pip")] if wheel else ["-m", "pip"]
    argv = [str(python_in(venv)), *pip, "install", "--quiet", "--no-deps"]
    options = ["--require-hashes", "--disable-pip-version-check"]
    run([*argv, *options, "--requirement", str(requirements)], f"installing {requirements.name}")


def run(argv: list[str], what: str) -> None:
    """Run a step; its last lines are the reason where it fails."""
    env = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-8:]
        lines = "\n".join(f"  | {line}" for line in said)
        raise SetupError(
            f"{what} failed with exit code {done.returncode}:\n{lines}\n"
            "  Behind a mirror or a proxy, say so to pip: `pip config set global.index-url URL`, "
            "or HTTPS_PROXY."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
