"""Inspects a base and the image made from it: the base's own packages must be unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from launcher.base.errors import BuildError
from launcher.images.matrix.extras import PROTECTED
from launcher.images.matrix.schema import MegatronRelease, Row, unmet
from launcher.images.oci.inspection import container_of, remedy_if_foreign

if TYPE_CHECKING:
    from docker import DockerClient

ADDED = re.compile(r"\bCOPY (/stage/|dir:[0-9a-f]+ in) /(\s|$)")
"""How BuildKit, the classic builder and podman write in a history what we add to a base."""
ABOVE = re.compile(r"\b(ENV PYTHONPATH=|LABEL )")
"""What stands in a history above that: the Dockerfile's last line, and labels."""

SECONDS = 300
"""How long the imports may take: a loaded machine needs a minute."""
NO_GPU = re.compile(
    r"\blibcuda\b|\blibnvidia-|NVIDIA driver|CUDA (driver|initialization|error)|cuInit"
    r"|[Nn]o CUDA|active drivers|device count"
)
"""What an import says where only the GPU or its driver is missing, as at each build."""
SURE = re.compile(r"(AssertionError|ImportError|ModuleNotFoundError)\b")
"""Begins what it says where no GPU would mend that."""
ABSENT = re.compile(r"ModuleNotFoundError: No module named '(\w+)")

# Prints the module that can't be imported, with the error; nothing runs after that, nor at its end.
IMPORT = """
import json, os, sys
out, sys.stdout, answer = sys.stdout, sys.stderr, []
for name in sys.argv[1:]:
    try:
        __import__(name)
    except BaseException as error:
        answer = [name, type(error).__name__ + ": " + " ".join(str(error).split())[:2000]]
        break
print(flush=True, file=out)
print(json.dumps(answer), flush=True, file=out)
os._exit(0)
"""

# Runs in the image; prints its Python, its packages, and whether what we added works.
LOOK = """
import importlib.util, json, platform, re, subprocess, sys, tempfile
from importlib.metadata import distributions
found = {}
for d in distributions():
    name = re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower()
    found.setdefault(name, d.version)
facts = {"python": "%d.%d" % sys.version_info[:2], "packages": found, "limits": []}
facts["glibc"] = platform.libc_ver()[1]
try:
    with open("/etc/pip/constraint.txt", encoding="utf-8", errors="replace") as file:
        facts["limits"] = file.read(1 << 20).splitlines()
except OSError:
    pass
program, seconds, *extensions = sys.argv[1:]
for extension in extensions:
    name = extension.rpartition(".")[2]
    folder = "/opt/megatron/lib/" + extension.rpartition(".")[0].replace(".", "/")
    from importlib.machinery import FileFinder, ExtensionFileLoader, EXTENSION_SUFFIXES
    spec = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec(name)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        facts["extension_error"] = "%s: %s" % (type(error).__name__, error)
    facts["training"] = importlib.util.find_spec("megatron.training") is not None
    if importlib.util.find_spec("torch"):
        names = ["megatron.core", "megatron.training"][:1 + facts["training"]]
        with tempfile.TemporaryFile() as file:
            command = [sys.executable, "-W", "ignore", "-c", program, *names]
            try:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file,
                               stderr=subprocess.DEVNULL, timeout=int(seconds))
            except subprocess.TimeoutExpired:
                pass
            file.seek(0)
            answer = file.read()[-10000:].decode(errors="replace").strip().rpartition("\\n")[2]
        try:
            facts["unimported"] = list(json.loads(answer))
        except ValueError:
            facts["unimported"] = [names[0], "no answer"]
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class BuildFacts:
    """What was seen in an image: Python (3.10), packages' versions by normalised name.

    limits: lines of its /etc/pip/constraint.txt; glibc: 2.35; unimported: the module of Megatron
    that can't be imported, and the error
    """

    python: str
    packages: dict[str, str]
    extension_error: str | None = None
    training: bool = False
    limits: list[str] = field(default_factory=list)
    glibc: str = ""
    unimported: list[str] = field(default_factory=list)


def look(client: DockerClient, image: str, name: str, *extension: str) -> BuildFacts:
    """Run LOOK in `image`, without its entrypoint and without network; `name` is for messages.

    Raises BuildError where there is no python3 in it.
    """
    from docker.errors import APIError

    command = ("-c", LOOK, IMPORT, str(SECONDS), *extension)
    with container_of(client, image, *command, entrypoint=["python3"]) as container:
        try:
            container.start()
            failed = container.wait(timeout=2 * SECONDS)["StatusCode"] != 0
            printed = container.logs(stdout=not failed, stderr=failed).decode(errors="replace")
        except APIError as error:
            reason = str(error.explanation or error)
            text = f"{name}: python3 doesn't run in it: {reason}"
            raise BuildError(text, remedy_if_foreign(reason)) from error
    if failed:
        text = f"{name}: python3 can't look into it:\n{printed.strip()}"
        raise BuildError(text, remedy_if_foreign(printed))
    return BuildFacts(**json.loads(printed))


def is_ours(history: Sequence[dict[str, Any]]) -> bool:
    """Whether what we add is the last that was done to an image; `history` as from an engine.

    An image that somebody made from one of ours has its labels, and isn't ours.
    """
    lines = (entry["CreatedBy"] or "" for entry in history)
    last = next((line for line in lines if not ABOVE.search(line)), "")
    return bool(ADDED.search(last))


def check_platform(platform: str, row: Row, name: str) -> None:
    """Raise BuildError unless a base is for a platform that the row is for."""
    if platform not in row.platforms:
        own = row.platforms[0]
        raise BuildError(
            f"{name}: is for {platform}, and the row is for {', '.join(row.platforms)}",
            f"Where the engine can run that: image build --platform {own}, or, for all "
            f"commands: docker pull --platform {own} {name}",
        )


def check_layers(base: Sequence[str], image: Sequence[str]) -> None:
    """Raise BuildError unless the image lies on the base that was looked into, layer by layer."""
    if image[: len(base)] != base:
        raise BuildError(
            "the image lies on another base than the one that was looked into: its name was "
            "given to another image meanwhile",
            "Build it again.",
        )


def check_base(base: BuildFacts, row: Row, name: str, standin: bool) -> None:
    """Raise BuildError unless the base has the row's Python and, but for a stand-in, its torch."""
    if base.python != row.python:
        raise BuildError(
            f"{name}: has Python {base.python}, and the row needs {row.python}",
            "Choose a base with that Python, or change `python` in the row of matrix.yaml.",
        )
    if not standin and not row.packages:
        _check_torch(base, row, f"{name}:", "It isn't the image this row describes.")


def check_torch(image: BuildFacts, row: Row, standin: bool) -> None:
    """Raise BuildError unless a row with packages gives its torch; a stand-in base may have none.

    The other rows' torch is that of their base, which `check_base` compares.
    """
    if row.packages and not (standin and "torch" not in image.packages):
        mend = "Correct `torch` or `packages` of the row in matrix.yaml, then run `make lock`."
        _check_torch(image, row, "the image", mend)


def _check_torch(found: BuildFacts, row: Row, name: str, mend: str) -> None:
    torch = found.packages.get("torch", "missing")
    if not torch.startswith(row.torch):
        raise BuildError(f"{name} has torch {torch}, and the row says {row.torch}", mend)


def check_needs(found: BuildFacts, release: MegatronRelease, name: str) -> None:
    """Raise BuildError where a package of a base or an image is one that the release refuses."""
    if wrong := unmet(found.packages, release):
        raise BuildError(
            f"{name}: has {'; '.join(wrong)}",
            "Take a base with that version or without the package, or another release: MEGATRON=…",
        )


def check_imports(image: BuildFacts, row: Row) -> str | None:
    """A note where Megatron can't be imported for want of a GPU, or of Triton on a CPU row.

    Raises BuildError where a version is asserted or a module is missing.
    """
    if not image.unimported:
        return None
    module, error = image.unimported
    absent = ABSENT.match(error)
    note = f"import {module} in the image: {error}"
    if absent and absent[1] == "triton" and not row.cuda:
        return f"{note} (CPU torch has none)"
    if NO_GPU.search(error) or not SURE.match(error):
        return f"{note} (there is no GPU at a build)"
    mend = "Take a base whose packages this release takes, or another release: MEGATRON=…"
    if absent:
        mend = f'Add it to the image: EXTRAS="{absent[1]}". Or take a base that has it.'
    raise BuildError(f"{module} can't be imported in the image: {error}", mend)


def check_extensions(image: BuildFacts, packages: Sequence[str]) -> None:
    """Raise BuildError where the image's Python doesn't find what was compiled for it."""
    if missing := [name for name in packages if canonicalize_name(name) not in image.packages]:
        raise BuildError(f"the image's python3 finds no {', '.join(missing)}")


def check_image(base: BuildFacts, image: BuildFacts, added: set[str], whole: bool) -> None:
    """Raise BuildError where what we added doesn't load, or changed a package of the base.

    `added` are the normalised names of what we install; these may stand in front of the base's.
    """
    if image.extension_error:
        raise BuildError(f"the compiled helpers don't load in the image: {image.extension_error}")
    if whole and not image.training:
        raise BuildError("megatron.training can't be found in the image")
    changed = [
        f"{name} {version} -> {image.packages.get(name, 'missing')}"
        for name, version in sorted(base.packages.items())
        if image.packages.get(name) != version and (name not in added or name in PROTECTED)
    ]
    if changed:
        raise BuildError(f"the image changes the base's packages: {', '.join(changed)}")
