"""The same image from two clones, by two users; the same wheel by each builder there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import EngineError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder import beside
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine import acquire
from launcher.images.engine.private import packages, private
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from launcher.images.matrix.recipe import sha256_of_pin
from launcher.images.sources.fetch import cached
from tests.conftest import NAMES
from tests.e2e.command import BUILD, in_image, layers, matrix_folder

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]

UID, GID = 12345, 23456
# One line: podman 4.3 cuts what a container printed when it is asked right after the end.
ADDED = "cd /opt/megatron; find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"


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
        env |= {"TZ": "Asia/Tokyo"} if self.uid else {}
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
    engine: DockerClient, site: Settings, bases: BaseNames, common: Path
) -> None:
    host = os.environ["DOCKER_HOST"]
    if os.geteuid() != 0 or not host.startswith("unix://") or not shutil.which("setpriv"):
        pytest.skip("it needs root, setpriv, and the engine's socket on this machine")
    inputs = Builds(engine, site, Progress()).inputs(BuildRequest("cpu", None, None, *both(bases)))
    pins = [pin for group in inputs.recipe.pins.values() for pin in group]
    builds = Builds(engine, site, Progress(), NAMES)
    builds.build(BuildRequest("cpu", None, None, *both(bases)))  # fetches what isn't cached yet
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
    documents = [
        one.home / "cache/images" / made[0].removeprefix("sha256:") for one in (root, other)
    ]
    for name in (beside.PROVENANCE, beside.SBOM):
        assert (documents[0] / name).read_bytes() == (documents[1] / name).read_bytes()


def both(bases: BaseNames) -> tuple[str, str]:
    return bases.base, bases.builder


def wheel(client: DockerClient, image: str) -> dict[str, str]:
    """Name and sha256 of the wheel in an image."""
    record = json.loads(in_image(client, image, "cat", "/opt/megatron/build.json"))
    found: dict[str, str] = record["wheel"]
    return found


@pytest.fixture(scope="module")
def podman(site: Settings) -> Iterator[DockerClient]:
    """Debian's podman, unpacked and not installed, with its docker-compatible interface."""
    if reason := private.unsupported():
        pytest.skip(f"no podman can be started: {reason}")
    try:
        root = packages.unpack(site.cache / "podman", ["podman", "runc"])
    except EngineError as error:
        pytest.skip(f"no podman: {error.problem}")
    with tempfile.TemporaryDirectory(dir="/tmp") as short, pytest.MonkeyPatch.context() as patch:
        folder = Path(short)
        for name, value in _settings(root, folder).items():
            patch.setenv(name, value)
        host = f"unix://{folder / 'podman.sock'}"
        with (folder / "log").open("wb") as log:
            service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", host], stdout=log, stderr=log
            )
        try:
            yield _answering(host, folder / "log")
        finally:
            service.terminate()
            service.wait()
            for mounted in (folder / "data/overlay", folder / "data"):
                subprocess.run(["umount", "--quiet", "--lazy", str(mounted)], check=False)


def _settings(root: Path, folder: Path) -> dict[str, str]:
    """Variables with which podman keeps all in `folder`, and finds its parts under `root`."""
    trust = folder / ".config/containers"
    trust.mkdir(parents=True)
    (trust / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/data"\n'
    )
    runc = next(path for path in (root / "usr/sbin/runc", root / "usr/bin/runc") if path.exists())
    (folder / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'conmon_path = ["{root}/usr/bin/conmon"]\n'
        f'helper_binaries_dir = ["{root}/usr/lib/podman"]\n'
        f'[engine.runtimes]\nrunc = ["{runc}"]\n'
        f'[containers]\nseccomp_profile = "{root}/usr/share/containers/seccomp.json"\n'
        # podman's own are above what root may set in a container without CAP_SYS_RESOURCE
        'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
    )
    found = packages.environment(root)
    return {
        "HOME": str(folder),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        **{name: found[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in found},
    }


def _answering(host: str, log: Path) -> DockerClient:
    """A client of the service at `host`, once it answers."""
    from docker.errors import DockerException

    from launcher.images.engine.client import Client

    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(host, timeout=600)
        except DockerException:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def test_podman_gives_one_image_and_docker_s_wheel(
    engine: DockerClient, podman: DockerClient, site: Settings, tmp_path: Path
) -> None:
    row = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    own = replace(site, matrix=matrix_folder(tmp_path, {"24.10": row}))
    name = f"{acquire.STANDIN_NAME}:cp311"
    made = {}
    for client in (podman, engine):
        debian_base(client, name, STANDIN_EPOCH, cache=site.cache / "bases")
        builds = Builds(client, own, Progress(), "launchpad-test-podman")
        request = BuildRequest("24.10", base=name, builder=name, no_cache=True)
        made[client] = [builds.build(request).id for _ in range(2)]
    for ids in made.values():
        assert ids[0] == ids[1]
    assert wheel(podman, made[podman][0]) == wheel(engine, made[engine][0])
    files = [in_image(client, ids[0], "sh", "-c", ADDED) for client, ids in made.items()]
    assert files[0] == files[1]
    assert len(files[0].split()[0]) == 64
    for one in set(made[engine]):
        engine.images.remove(one, force=True)
