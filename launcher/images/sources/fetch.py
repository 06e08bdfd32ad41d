"""Downloads Python packages into a content-addressed cache, checked by sha256.

A cached file lies at <cache>/sha256/<hash>/<its name>, so that its name and its hash are both at
hand; it is hashed again each time it is used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.base import files, owned
from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.matrix.recipe import GLIBC, Recipe, sha256_of_pin
from launcher.images.matrix.schema import AMD64, Interpreter
from launcher.images.oci.blocks import blocks_of, sha256_of

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""What wheels call the machine of a platform."""

# What would add requirements to the pinned ones, limit them, or put them elsewhere.
MISLEADING = {
    *("PIP_REQUIREMENT", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"),
    *("PIP_PLATFORM", "PIP_PYTHON_VERSION", "PIP_NO_BINARY", "PIP_ONLY_BINARY"),
}
HARMLESS = {"PIP_CONSTRAINT": os.devnull, "PIP_USER": "0"}
"""What else would, in a user's variables or in a pip.conf, which variables go before."""

ANSWER_WITHIN = 60  # seconds, for a server that sends a file


def target_options(python: str, platform: str = AMD64, glibc: int = GLIBC) -> list[str]:
    """pip's options for wheels of another Python (3.10) and machine than it runs on.

    glibc: the newest minor version of glibc 2 that wheels may need
    """
    machine = MACHINES[platform]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]  # the last of what a user compiled
    if platform == AMD64:
        tags += [f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    platforms = [f"--platform={tag}" for tag in tags]
    return ["--implementation=cp", f"--python-version={python}", *platforms]


def wheels(
    pins: Sequence[str], python: str, site: Settings, platform: str = AMD64, glibc: int = GLIBC
) -> list[Path]:
    """The wheels of `pins` for Python `python` (3.10), from the cache or from the user's index.

    glibc: see `target_options`. Raises BuildError for one that can't be fetched or whose hash is
    another.
    """
    missing = [pin for pin in pins if not cached(sha256_of_pin(pin), site)]
    if missing:
        _download(missing, ["--only-binary=:all:", *target_options(python, platform, glibc)], site)
    return [checked(sha256_of_pin(pin), pin, site) for pin in pins]


def interpreter(recipe: Recipe, site: Settings, progress: Progress) -> Path | None:
    """The archive of the Python that a recipe's base lacks, if any. Raises as `archive` does."""
    if recipe.interpreter is None:
        return None
    progress.step(f"fetch Python {recipe.row.interpreter}")
    found = archive(recipe.interpreter, site)
    progress.close()
    return found


def archive(wanted: Interpreter, site: Settings) -> Path:
    """An interpreter's archive, from the cache or the matrix's address. Raises BuildError."""
    if not cached(wanted.sha256, site):
        url = mirrored(wanted.url, site)
        with owned.scratch(site.cache) as folder:
            path = folder / url.rpartition("/")[2]
            try:
                save(url, path)
            except OSError as error:
                raise BuildError(
                    without_login(f"{url}: can't be fetched: {error}"),
                    "Where this machine has no access to it, name a mirror in LAUNCHER_GIT_MIRROR.",
                ) from error
            if (actual := sha256(path)) != wanted.sha256:
                raise BuildError(
                    f"{without_login(url)}: its sha256 is not the one in matrix.yaml\n"
                    f"  matrix: {wanted.sha256}\n  file:   {actual}",
                    "Somebody serves another file there: don't build with it.",
                )
            store(path, site)
    return checked(wanted.sha256, wanted.url, site)


def save(url: str, path: Path, **how: Any) -> str:
    """Write an address to `path`; its content type. how: requests' options. Raises OSError."""
    import requests

    with requests.get(url, stream=True, timeout=ANSWER_WITHIN, **how) as answer:
        answer.raise_for_status()
        with path.open("wb") as file:
            file.writelines(answer.iter_content(1 << 20))
    return str(answer.headers.get("Content-Type", ""))


def mirrored(url: str, site: Settings) -> str:
    """Where to fetch what GitHub has at `url`."""
    return url.replace("https://github.com/", site.git_mirror, 1)


def without_login(text: str) -> str:
    """Text in which no address has a user's name, password or token: a mirror's may have one."""
    return re.sub(r"(?<=://)[^/\s]+@", "", text)


def cached(digest: str, site: Settings) -> Path | None:
    """The cached file with this sha256, unverified, or None; an empty one is what a crash left."""
    found = (site.cache / "sha256" / digest).glob("[!.]*")
    return next((path for path in found if path.stat().st_size), None)


def checked(digest: str, what: str, site: Settings) -> Path:
    """The cached file with this sha256. Raises BuildError where its bytes have another."""
    path = cached(digest, site)
    if path is None:
        raise BuildError(f"{what}: not among what was downloaded", "Try again.")
    check_sha256(path, digest)
    return path


def check_sha256(path: Path, digest: str) -> None:
    """Raise BuildError where a cached file's bytes have another sha256."""
    actual = sha256(path)
    if actual != digest:
        raise BuildError(
            f"{path}: its sha256 is not the locked one\n  locked: {digest}\n  file:   {actual}",
            "Remove the file to have it fetched again; if the hash differs again, "
            "the index serves another file than the one that was locked.",
        )


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return sha256_of(blocks_of(file))


def store(path: Path, site: Settings) -> Path:
    """Move a file into the cache under the hash of its bytes."""
    target = site.cache / "sha256" / sha256(path) / path.name
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        owned.make_folder(target.parent)
    files.sync(path)
    return files.rename(path, target)


def _download(pins: list[str], options: list[str], site: Settings) -> None:
    """Have pip download `pins` into the cache: as the user configured it, then PyTorch's as well.

    They stand in a file, and so does that index: it may have a password, which all users of the
    machine would see on a command line.
    """
    with owned.scratch(site.cache) as folder:
        target, file = folder / "files", folder / "requirements.txt"
        command = ["download", "--no-deps", "--require-hashes", "--dest", str(target), *options]
        for index in dict.fromkeys(("", site.torch_index)):
            lines = [*([f"--extra-index-url {index}"] if index else []), *pins]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            done = pip([*command, "--requirement", str(file)], site)
            if not done.returncode:
                break
        else:
            said = last_errors(done.stderr)
            names = ", ".join(pin.partition(" ")[0] for pin in pins)
            raise BuildError(f"pip can't fetch {names}:\n{said}", remedy_if_full(said))
        for path in sorted(target.iterdir()):
            store(path, site)


def pip(args: list[str], site: Settings) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip, with the user's indexes and proxies but not what is MISLEADING."""
    env = {k: v for k, v in os.environ.items() if k not in MISLEADING} | HARMLESS
    if site.index_url:
        env["PIP_INDEX_URL"] = site.index_url
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def last_errors(text: str) -> str:
    """The last lines of what pip printed, without its warnings; of a traceback the last alone."""
    lines = [line for line in text.splitlines() if line.strip() and "WARNING" not in line]
    if any("Traceback (most recent call last)" in line for line in lines):
        lines = [lines[-1].strip()]
    return "\n".join(f"  {line}" for line in lines[-12:])


def remedy_if_full(said: str) -> str:
    """What to do where a program says that this machine's disk is full; else nothing."""
    full = any(words in said for words in ("No space left on device", "Disk quota exceeded"))
    return "Free some, or set TMPDIR and LAUNCHER_CACHE to folders with space." if full else ""
