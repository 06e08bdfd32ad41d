"""The same wheel and the same image from two clones, by two users."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.build.fetch import cached, sha256_of_pin
from launcher.build.image import Builds, Request
from launcher.progress import Progress
from launcher.settings import ROOT, Settings
from tests.conftest import NAMES
from tests.e2e.test_image import in_image, layers

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.engine.acquire import Bases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

UID, GID = 12345, 23456
BUILD = """
import sys
from pathlib import Path
import launcher
from launcher.build.image import Builds, Request
from launcher.engine.connect import connect
from launcher.progress import Progress
from launcher.settings import settings
assert Path(launcher.__file__).is_relative_to(Path.cwd()), launcher.__file__
base, builder, names = sys.argv[1:]
request = Request("cpu", base=base, builder=builder, no_cache=True)
print(Builds(connect(600), settings(), Progress(), names).build(request).id)
"""
ADDED = "cd /opt/megatron && find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum"


@dataclass(frozen=True)
class Clone:
    """A clone of this repository, of a user who has a home, a cache and a umask of their own."""

    folder: Path
    home: Path
    uid: int
    gid: int
    umask: str
    host: str

    def python(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the clone as its user."""
        kept = ("PATH", "LANG", "PIP_INDEX_URL", "SSL_CERT_FILE")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"HOME": str(self.home), "DOCKER_HOST": self.host, "TMPDIR": str(self.home)}
        env |= {"LAUNCHER_CACHE": str(self.home / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        group = os.stat(self.host.removeprefix("unix://")).st_gid
        user = [f"--reuid={self.uid}", f"--regid={self.gid}", f"--groups={group}"]
        # Python may lie where only root may read, and so may a private engine's programs.
        user += [f"--{which}-caps=-all,+dac_read_search" for which in ("inh", "ambient")]
        shell = ["sh", "-c", f'umask {self.umask}; exec "$@"', "sh", sys.executable, *args]
        return subprocess.run(
            ["setpriv", *(user if self.uid else []), *shell],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def clone(at: Path, home: Path, site: Settings, digests: list[str], user: tuple[int, int]) -> None:
    """Clone this repository, changes included, with a warm cache; all of it is the user's alone."""
    umask = os.umask(0o077 if user[0] else 0o022)
    try:
        git = ["git", "-c", "safe.directory=*"]
        subprocess.run([*git, "clone", "-q", "--no-hardlinks", str(ROOT), str(at)], check=True)
        listed = ["-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run([*git, *listed], check=True, capture_output=True, text=True)
        for name in filter(None, done.stdout.split("\0")):
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copyfile(ROOT / name, at / name)
        for digest in digests:
            found = cached(digest, site)
            assert found is not None
            target = home / "cache/sha256" / digest / found.name
            target.parent.mkdir(parents=True)
            shutil.copyfile(found, target)
    finally:
        os.umask(umask)
    for path in [at, *at.rglob("*"), home, *home.rglob("*")]:
        os.chown(path, *user, follow_symlinks=False)


def test_two_clones_of_two_users_give_the_same_wheel_and_image(
    engine: DockerClient, site: Settings, bases: Bases, common: Path
) -> None:
    host = os.environ["DOCKER_HOST"]
    if os.geteuid() != 0 or not host.startswith("unix://") or not shutil.which("setpriv"):
        pytest.skip("it needs root, setpriv, and the engine's socket on this machine")
    inputs = Builds(engine, site, Progress())._inputs(Request("cpu", None, None, *both(bases)))
    pins = [pin for group in inputs.pins.values() for pin in group]
    builds = Builds(engine, site, Progress(), NAMES)
    builds.build(Request("cpu", None, None, *both(bases)))  # fetches what isn't cached yet
    digests = sorted({inputs.source.identity, *map(sha256_of_pin, pins)})
    root = Clone(common / "one", common / "home-of-root", 0, 0, "022", host)
    other = Clone(common / "another name", common / "home", UID, GID, "077", host)
    made = []
    for one in (root, other):
        one.home.mkdir(mode=0o700)
        clone(one.folder, one.home, site, digests, (one.uid, one.gid))
        done = one.python("-c", BUILD, *both(bases), NAMES)
        assert done.returncode == 0, done.stderr
        made.append(done.stdout.split()[-1])
    wheels = [wheel(engine, image) for image in made]
    assert wheels[0] == wheels[1]
    assert layers(engine, made[0]) == layers(engine, made[1])
    assert made[0] == made[1]
    assert (other.folder / "Makefile").stat().st_mode & 0o777 == 0o600


def both(bases: Bases) -> tuple[str, str]:
    return bases.base, bases.builder


def wheel(client: DockerClient, image: str) -> dict[str, str]:
    """Name and sha256 of the wheel in an image."""
    record = json.loads(in_image(client, image, "cat", "/opt/megatron/build.json"))
    found: dict[str, str] = record["wheel"]
    return found
