"""A Debian base made from the distribution's packages, for where no registry can be reached."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import files, owned
from launcher.base.errors import EngineError, nearest
from launcher.base.settings import settings
from launcher.images.engine.private import packages
from launcher.images.engine.private.packages import Say

if TYPE_CHECKING:
    from docker import DockerClient

STANDIN = "megatron-launchpad.standin"
STANDIN_EPOCH = 1735689600  # 2025-01-01, given to every file of a stand-in base
SUITES = {"3.9": "bullseye", "3.11": "bookworm", "3.13": "trixie"}
GO_NAMES = {"amd64": "amd64", "arm64": "arm64", "armhf": "arm", "i386": "386", "ppc64el": "ppc64le"}
# Enough to compile an extension and to run `python3 -m pip`; usr-is-merged spares us perl.
PACKAGES = ["usr-is-merged", "python3", "libpython3-dev", "python3-pip", "g++", "ca-certificates"]
# A third of the size: texts, link-time optimisation, sanitizers, profilers, static Python.
EXCLUDED = [
    *(f"/usr/share/{texts}/*" for texts in ("man", "doc", "locale", "info", "lintian")),
    *(f"/usr/lib/gcc/*/{part}" for part in ("lto1", "lib*san*.a")),
    *(f"/usr/lib/*-linux-*/{part}" for part in ("lib*san.so*", "libgprofng*")),
    *(f"/usr/bin/*{program}*" for program in ("-lto-dump-", "gp-", "-dwp", "-ld.gold")),
    "/usr/lib/python3*/config-*/*.a",
]
# What comes from this host doesn't belong in the image, and would change its ID.
FORGOTTEN = ["apt/sources.list", "apt/sources.list.d/*", "hostname", "resolv.conf"]
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PERL5LIB", "no_proxy", "NO_PROXY")
STEP = re.compile(r"I: ((?:running apt-get update|downloading|extracting|installing|creating).*)")
"""How mmdebstrap begins the line of a step that takes a while."""


@dataclass(frozen=True)
class BaseRecipe:
    """All that decides what is in a stand-in base."""

    suite: str
    architecture: str
    epoch: int
    packages: tuple[str, ...]
    excluded: tuple[str, ...]
    forgotten: tuple[str, ...]

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file(self) -> str:
        return f"debian-{self.suite}-{self.key[:16]}.tar"

    @property
    def labels(self) -> dict[str, str]:
        return {STANDIN: f"debian-{self.suite}", f"{STANDIN}.recipe": self.key}


def debian_base(
    client: DockerClient | None,
    name: str,
    epoch: int,
    python: str = "3.11",
    *,
    more: Sequence[str] = (),
    architecture: str | None = None,
    cache: Path | None = None,
    say: Say = lambda _: None,
) -> str:
    """The ID of the engine's image `name`, a Debian with `python`, pip and a C++ compiler.

    more: packages of Debian's beside them, such as python3-torch; architecture: Debian's name of
    another one than this machine's, which is emulated. The engine's own is taken if it was made by
    the same recipe, then the archive in `cache`, which is a folder of the launcher's cache unless
    another is given. Without a client only the archive is made: "". Raises EngineError.
    """
    from docker.errors import ImageNotFound

    from launcher.images.oci.archive import load_archive
    from launcher.images.oci.blocks import blocks_of
    from launcher.images.oci.inspection import find_image

    recipe = _recipe(epoch, python, more, architecture)
    found = (client and find_image(client, name)) or {"Config": {}}
    if recipe.labels.items() <= (found["Config"].get("Labels") or {}).items():
        return str(found["Id"])
    made = (cache or settings().cache / "bases") / recipe.file
    if not made.exists():
        _make(made, recipe, say)
    if not client:
        return ""
    try:
        with made.open("rb") as file:
            id = load_archive(client, blocks_of(file))
        client.api.tag(id, *name.rsplit(":", 1))  # podman takes no whole name
    except (EngineError, ImageNotFound, tarfile.TarError) as error:
        raise EngineError(
            f"{made}: the engine doesn't take it: {error}",
            "Remove it to have it made again, unless the engine's disk is full.",
        ) from error
    return id


def make_layer(cache: Path, say: Say) -> None:
    """Make the layer of the usual base in `cache`, for `debian_base`. Raises EngineError."""
    recipe = _recipe(STANDIN_EPOCH)
    cache.mkdir(parents=True, exist_ok=True)
    with files.folder_lock(cache):
        if not (cache / recipe.file).exists():
            _layer(cache, recipe, say)


def _recipe(
    epoch: int, python: str = "3.11", more: Sequence[str] = (), architecture: str | None = None
) -> BaseRecipe:
    """What a base is made of. Raises EngineError where no Debian has that Python."""
    if python not in SUITES:
        raise EngineError(f"no Debian release has Python {python}", nearest(python, list(SUITES)))
    made_of = ((*PACKAGES, *more), tuple(EXCLUDED), tuple(FORGOTTEN))
    return BaseRecipe(SUITES[python], architecture or _architecture(), epoch, *made_of)


def _architecture() -> str:
    """Debian's name for this machine's architecture."""
    if not shutil.which("dpkg"):
        raise EngineError(
            "a Debian base can't be made here: this system has no dpkg",
            "Make the base image available to the engine: docker pull, or docker load of an "
            "archive that `docker save` wrote elsewhere.",
        )
    argv = ["dpkg", "--print-architecture"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def _make(made: Path, recipe: BaseRecipe, say: Say) -> None:
    """Write the archive `made`; nothing half-made is left under that name."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with files.folder_lock(made.parent):
        if made.exists():
            return
        from launcher.images.oci.settle import write_image

        layer = _layer(made.parent, recipe, say)
        architecture = GO_NAMES.get(recipe.architecture, recipe.architecture)
        with owned.scratch(made.parent) as scratch:
            whole = Path(scratch, "image.tar")
            write_image(whole, layer, recipe.epoch, recipe.labels, architecture)
            files.sync(whole)
            files.rename(whole, made)
        layer.unlink()


def _layer(cache: Path, recipe: BaseRecipe, say: Say) -> Path:
    """The layer of a base, made where it isn't there; whole under that name. Raises EngineError."""
    layer = cache / f"{recipe.file}.layer"
    if layer.exists():
        return layer
    if os.geteuid() != 0:
        raise EngineError(
            "a Debian base can be made by root only",
            "Run as root, or make the base image available to the engine (docker pull or load).",
        )
    say(f"making a Debian base ({recipe.suite}) from the distribution's packages")
    with owned.scratch(cache) as scratch:
        part = Path(scratch, "layer.tar")
        _bootstrap(part, recipe, cache, say)
        files.rename(part, layer)
    return layer


def _bootstrap(layer: Path, recipe: BaseRecipe, cache: Path, say: Say) -> None:
    """Run mmdebstrap, which writes `layer`, and report each of its steps."""
    if not shutil.which("perl"):
        raise EngineError("mmdebstrap needs perl, which isn't installed", "Install perl.")
    root = Path("/")
    if not shutil.which("mmdebstrap"):
        root = packages.unpack(cache / "mmdebstrap", ["mmdebstrap"])
    hooks = root / "usr/share/mmdebstrap/hooks/merged-usr"
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.excluded]
    options += ["--variant=apt", f"--architectures={recipe.architecture}"]
    forget = f'cd "$1/etc" && rm -rf {" ".join(recipe.forgotten)}'
    options += [f"--hook-dir={hooks}", f"--customize-hook={forget}"]
    options += [f"--include={','.join(recipe.packages)}"]
    options += ["--skip=check/qemu"]  # it takes arch-test; what can't be run fails in plain words
    able = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    alone = ["unshare", "--mount"] if able else []  # what it mounts goes with it, however it ends
    argv = [*alone, "mmdebstrap", *options, *_keyring(cache), recipe.suite, str(layer)]
    env = _environment(root, recipe.epoch)
    code, last = _told([*argv, *_sources(recipe.suite)], env, say)
    if code:
        said = "\n".join(f"  | {line}" for line in last)
        raise EngineError(
            f"mmdebstrap failed with exit code {code}:\n{said}",
            "Check that the distribution's package mirror can be reached (apt-get update).",
        )


def _told(argv: Sequence[str], env: Mapping[str, str], say: Say) -> tuple[int, list[str]]:
    """Run mmdebstrap and report the steps that it begins; its exit code and its last lines."""
    last = deque[str](maxlen=12)
    with subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr
        for line in map(str.strip, process.stderr):
            last.append(line)
            if step := STEP.fullmatch(line):
                say(f"  {step[1]}")
    return process.returncode, [*last]


def _environment(root: Path, epoch: int) -> dict[str, str]:
    """The environment of mmdebstrap and of every package's scripts: none of it may show."""
    inherited = packages.environment(root)
    return {
        **{name: inherited[name] for name in KEPT_VARIABLES if name in inherited},
        **_proxies(),
        "LC_ALL": "C.UTF-8",
        "SOURCE_DATE_EPOCH": str(epoch),
        # Else what is compiled depends on what happened to be imported first.
        "PYTHONDONTWRITEBYTECODE": "1",
        # dpkg's own defaults, and no flush of each file: what is cut off here is made again.
        "DPKG_FORCE": "security-mac,downgrade,unsafe-io",
    }


def _keyring(cache: Path) -> list[str]:
    """Options that name Debian's keys where this system (an Ubuntu, say) hasn't got them."""
    of_system = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if of_system.exists() or any(Path("/etc/apt/trusted.gpg.d").glob("debian-archive-*")):
        return []
    root = packages.unpack(cache / "debian-archive-keyring", ["debian-archive-keyring"])
    return [f"--keyring={root / 'usr/share/keyrings'}"]


def _sources(suite: str) -> list[str]:
    """This host's own sources of `suite` (a site's mirror), or none: mmdebstrap's default."""
    show = "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    argv = ["apt-get", "indextargets", "--format", show, "Created-By: Packages"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    ours = re.compile(rf"deb \S+ {suite}(-updates|-security)? main")
    return sorted({line for line in done.stdout.splitlines() if ours.fullmatch(line)})


def _proxies() -> dict[str, str]:
    """The proxies that this host's apt uses, as variables: as options they'd stay in the image."""
    found = {}
    for scheme in ("http", "https"):
        variable = f"{scheme}_proxy"
        if os.environ.get(variable):
            found[variable] = os.environ[variable]
        argv = ["apt-config", "shell", "proxy", f"Acquire::{scheme}::Proxy"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        match = re.fullmatch(r"proxy='(.+)'", done.stdout.strip())
        if match:
            found[variable] = match[1]
    return found
