"""The build context of an image: every input in one tar, and the key that names them all."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from launcher.base.errors import BuildError
from launcher.images.matrix.recipe import Recipe
from launcher.images.sources.extensions import ExtensionSource
from launcher.images.sources.megatron_source import (
    AS_COMMITTED,
    MegatronSource,
    git_environment,
    run_git,
)
from launcher.images.sources.pins import StartImage

OWN = ("stage.py", "compilers.py", "megatron_core_training_example.py")
AS_WRITTEN = [*AS_COMMITTED, "-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no"]
"""Options that keep a user's settings from changing what a patch makes."""


@dataclass(frozen=True)
class Inputs:
    """A recipe with all that was found for it; two equal Inputs give the same image.

    patches: in the order in which they apply; interpreter: the archive of the Python for a base
    that has none; extensions: compiled on the base, in this order, for the GPUs of architectures
    (80 90); labels: the image's, but for the key's
    """

    recipe: Recipe
    dockerfile: str
    base: StartImage
    builder: StartImage
    source: MegatronSource
    patches: tuple[Path, ...]
    interpreter: Path | None = None
    extensions: tuple[ExtensionSource, ...] = ()
    architectures: str = ""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The wheel's: what the source says of itself."""
        own = self.source.release
        return own if self.source.kind == "path" else self.recipe.named.version or own

    def record(self) -> dict[str, Any]:
        """source.json: what the wheel was made of, for the build stage and for build.json."""
        return {
            "release": self.source.release,
            **({"rules": self.source.rules} if self.source.rules else {}),
            "version": self.version,
            "source": self.source.kind,
            "revision": self.source.revision,
            "identity": self.source.identity,
            "whole": self.source.whole,
            "extension": self.recipe.named.extension,
            "patches": {path.name: _sha256(path.read_bytes()) for path in self.patches},
        }

    def key(self) -> str:
        """A sha256 over every input; an image that carries it needn't be built again."""
        parts = {
            "dockerfile": self.dockerfile,
            "base": self.base.digest,
            "builder": self.builder.digest,
            "record": self.record(),
            "epoch": self.source.epoch,
            "pins": dict(self.recipe.pins),
            "labels": self.labels,
            "own": own_digest(),
            "platform": self.recipe.platform,
            "interpreter": self.interpreter and self.interpreter.parent.name,  # its sha256
            "extensions": [
                (one.record(), one.locked.model_dump(mode="json")) for one in self.extensions
            ],
            "architectures": self.architectures,
        }
        return _sha256(json.dumps(parts, sort_keys=True).encode())


def own_files() -> dict[str, Path]:
    """The launcher's own files that an image is made with, by their path in the context."""
    return {name: Path(__file__).with_name(name) for name in OWN}


@cache
def own_digest() -> str:
    """A sha256 over those files."""
    files = {name: _sha256(path.read_bytes()) for name, path in own_files().items()}
    return _sha256(json.dumps(files, sort_keys=True).encode())


def write(inputs: Inputs, wheels: dict[str, list[Path]], scratch: Path, file: IO[bytes]) -> None:
    """Unpack and patch the source, write the context's tar to `file`. BuildError: a patch."""
    tree = scratch / "source"
    inputs.source.unpack(tree)
    apply_patches(inputs.patches, tree)
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add_text(tar, "Dockerfile", inputs.dockerfile)
        _add_text(tar, "source.json", json.dumps(inputs.record(), indent=2, sort_keys=True))
        for name, path in own_files().items():
            _add_text(tar, name, path.read_text(encoding="utf-8"))
        for group, pins in inputs.recipe.pins.items():
            _add_text(tar, f"wheels/{group}/requirements.txt", "\n".join(sorted(pins)) + "\n")
            for wheel in wheels[group]:
                tar.add(wheel, f"wheels/{group}/{wheel.name}", filter=_plain)
        tar.add(tree, "source", filter=_plain)
        if inputs.interpreter:
            tar.add(inputs.interpreter, "python.tar.gz", filter=_plain)
        for one in inputs.extensions:
            at = f"extensions/{one.name}"
            one.unpack(scratch / at)
            _add_text(tar, f"{at}/extension.json", json.dumps(one.record(), sort_keys=True))
            tar.add(scratch / at, f"{at}/source", filter=_plain)


def apply_patches(patches: Iterable[Path], tree: Path) -> None:
    """Apply `patches` to `tree`, in order; one that is there already is left.

    Raises BuildError with the name of the first that doesn't apply: a patch that matches nothing
    would give a wheel that lacks what it was for.
    """
    for path in patches:
        if _git_apply(tree, path, "--check", "--reverse").returncode == 0:
            continue
        done = _git_apply(tree, path)
        if done.returncode:
            raise BuildError(
                f"{path.parent.name}/{path.name} doesn't apply:\n  {done.stderr.strip()}",
                "The source isn't the release this patch was made for, or it has been edited "
                "at the same lines.",
            )
        if _git_apply(tree, path, "--check", "--reverse").returncode:
            raise BuildError(f"{path.parent.name}/{path.name} changed nothing")


def _git_apply(tree: Path, patch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `git apply` as outside any repository, where it takes paths from the tree's top."""
    env = git_environment() | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    return run_git(*AS_WRITTEN, "apply", *options, "--", str(patch.resolve()), at=tree, env=env)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same member whoever packs it, with whatever umask, whenever."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
