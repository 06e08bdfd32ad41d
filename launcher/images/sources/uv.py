"""Resolves requirements with uv: wheels for another Python and machine, and what is there fixed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from launcher.base import owned
from launcher.base.errors import BuildError
from launcher.base.settings import Settings
from launcher.images.matrix.recipe import GLIBC
from launcher.images.matrix.requirements import pinned_versions
from launcher.images.matrix.schema import AMD64
from launcher.images.sources import fetch, index
from launcher.images.sources.clash import clash_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCAL = "+launcher.base"
"""The end of a stub's version that keeps uv from an index's file of that version."""
STUB = "{name}-{version}.dist-info/{file}"
GLIBCS = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv resolves for: https://docs.astral.sh/uv/reference/cli."""


@dataclass(frozen=True)
class RequirementSet:
    """Requirements to resolve, with their dependencies unless options of uv say otherwise.

    python: 3.10, which is taken for 3.10.0; before: pins that are kept where they fit; there: what
    is installed already, versions by normalised name, which stays as it is and is in no answer;
    limits: requirements that count where something else names their package; glibc: of version 2
    """

    requirements: Sequence[str]
    python: str
    before: Sequence[str] = ()
    options: Sequence[str] = ()
    platform: str = AMD64
    there: Mapping[str, str] = field(default_factory=dict)
    limits: Sequence[str] = ()
    glibc: int = GLIBC


@dataclass(frozen=True)
class ResolvedSet:
    """pins: sorted; rests_on: what of that which is there they need, versions by name.

    times: when a wheel was uploaded, by its package's name, where its index says so.
    """

    pins: list[str]
    rests_on: dict[str, str]
    times: dict[str, datetime] = field(default_factory=dict)


def resolve(wanted: RequirementSet, site: Settings, pip: index.Pip | None = None) -> ResolvedSet:
    """Have uv choose wheels that fit: those before, else the newest.

    It asks as `pip`, or the user's configuration, says, then PyTorch's index, unless something is
    there already. Raises BuildError, which names the two requirements that clash where uv does.
    """
    if not wanted.requirements:
        return ResolvedSet([], {})
    pip = pip or index.Pip.configured(site)
    with owned.scratch(site.cache) as folder:
        second = ("", LOCAL) if wanted.there else (site.torch_index, "")
        for more, local in dict.fromkeys((("", ""), second)):
            # Addresses stand in a file: all users of the machine see a command line.
            lines = [*pip.requirement_lines(more), *wanted.requirements]
            _write(folder / "requirements.in", lines)
            there = [f"{name}=={version}" for name, version in _stubs(wanted, local, folder)]
            _write(folder / "constraints.txt", [*there, *wanted.limits])
            found = folder / "pylock.toml"
            if wanted.before:
                lines = ['lock-version = "1.0"', 'created-by = "uv"']  # as uv writes one: PEP 751
                for name, version in pinned_versions(wanted.before).items():
                    lines += ["[[packages]]", f'name = "{name}"', f'version = "{version}"']
                _write(found, lines)
            done = _uv(wanted, folder, pip.uv_environment())
            if not done.returncode:
                return _read(found.read_text(encoding="utf-8"), wanted)
    said = fetch.without_login(done.stderr).replace(LOCAL, "")
    if clash := clash_in(said, {**wanted.there, "python": wanted.python}, wanted.limits):
        raise BuildError(clash)
    raise BuildError(f"uv can't resolve it:\n{fetch.last_errors(said)}")


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stubs(wanted: RequirementSet, local: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Write wheels with nothing in them for what is there; names and versions.

    A base's torch is on no index: uv is shown one here. At first an index's file of a version
    counts beside it, for the packages of its options. A base needn't meet what its packages need,
    and they stay: then `local` makes the stubs count alone, but for what is asked for with options.
    One whose version is none of PEP 440 gets no stub: uv may choose another, and `_read` refuses.
    """
    stubs = folder / "stubs"
    shutil.rmtree(stubs, ignore_errors=True)
    stubs.mkdir()
    optional = {one.partition("[")[0] for one in wanted.requirements if "[" in one}
    for name, text in wanted.there.items():
        try:
            version = str(Version(text))
        except InvalidVersion:
            continue
        if "+" not in version and name not in optional:
            version += local
        module = name.replace("-", "_")
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        path = stubs / f"{module}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, content in texts.items():
                archive.writestr(STUB.format(name=module, version=version, file=file), content)
        yield name, version


def _uv(
    wanted: RequirementSet, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `uv pip compile` in a folder; nothing is built to learn what it needs.

    Of uv's own configuration no more counts than where it caches: pip's says where to ask.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("uv", path=path)
    if program is None:
        raise BuildError("there is no uv here", "Install it: pip install uv.")
    machine = fetch.MACHINES[wanted.platform]
    glibc = max((one for one in GLIBCS if one <= wanted.glibc), default=GLIBCS[0])
    command = [program, "pip", "compile", "requirements.in", "--output-file=pylock.toml", "--quiet"]
    command += ["--constraints=constraints.txt", "--find-links=stubs"]
    command += [f"--python={sys.executable}", "--no-config", "--no-python-downloads"]
    command += ["--only-binary=:all:", "--index-strategy=unsafe-best-match"]  # as pip has it
    command += [f"--python-version={wanted.python}"]
    command += [f"--python-platform={machine}-manylinux_2_{glibc}", *wanted.options]
    own = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k == "UV_CACHE_DIR"}
    return subprocess.run(
        command, cwd=folder, env=own | environment, capture_output=True, text=True, check=False
    )


def _read(pylock: str, wanted: RequirementSet) -> ResolvedSet:
    """The pins in a pylock.toml for one platform, as they were spelt before."""
    spelt = {pin.lower().replace("_", "-"): pin for pin in wanted.before}
    pins, rests_on = [], {}
    times: dict[str, datetime] = {}
    for package in tomllib.loads(pylock).get("packages", []):
        name = canonicalize_name(package["name"])
        version = package["version"].removesuffix(LOCAL)
        if name in wanted.there:
            if not _same(version, wanted.there[name]):
                own = wanted.there[name]
                raise BuildError(f"{name} {version} is needed, and the base has {name} {own}")
            rests_on[name] = wanted.there[name]
            continue
        wheel = package["wheels"][0]
        if "upload-time" in wheel:
            times[name] = wheel["upload-time"]
        sha256 = wheel["hashes"].get("sha256")
        if sha256 is None:
            raise BuildError(
                f"the index has no sha256 of {name} {version}",
                "Name another in PIP_INDEX_URL: files of this one can't be pinned.",
            )
        pin = f"{package['name']}=={version} --hash=sha256:{sha256}"
        pins.append(spelt.get(pin, pin))
    return ResolvedSet(sorted(pins), dict(sorted(rests_on.items())), times)


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other
