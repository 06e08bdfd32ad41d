"""A run's own OCI bundle over that of an image: the same files by mounts, with the run's beside.

Slurm takes a bundle's `rootfs` for the container's root, and of mounts it knows those of its
config.json alone (slurm 22.05, src/slurmd/slurmstepd/container.c).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import UsageError
from launcher.plan.mounts import Mount

ENVIRONMENT = "environment"
"""The image's variables as lines of shell: Slurm puts the submitting machine's behind them."""


def lay(bundle: Path, image: Path, mounts: Sequence[Mount], cwd: str | None) -> None:
    """Make `bundle`, with the files of the bundle `image`.

    The user's own rights are enough, by a namespace in which they are root. Raises UsageError where
    `image` is no bundle.
    """
    try:
        told = json.loads((image / "config.json").read_bytes())
        variables, system = told["process"]["env"], told["mounts"]
        inside = {mount.target for mount in mounts}
        taken = inside | {mount["destination"] for mount in system}
        root = files.make_folder(bundle) / "rootfs"
        root.mkdir()
        binds = [*_layer(image / "rootfs", root, "/", taken)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"slurm.image: {image} is no OCI bundle: {error}",
            "Make one: launcher image export TAG --to FOLDER --format oci",
        ) from None
    for mount in mounts:
        _point(root, mount)
        binds.append((mount.source, mount.target, mount.read_only))
    first = [_bind(*one) for one in binds if one[1] not in inside]
    told["mounts"] = [*first, *system, *(_bind(*one) for one in binds if one[1] in inside)]
    told["process"]["cwd"] = cwd or told["process"]["cwd"]
    if os.getuid():
        _as_user(told)
    files.write(bundle / "config.json", json.dumps(told))
    pairs = (one.partition("=")[::2] for one in variables)
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in pairs)
    files.write(bundle / ENVIRONMENT, "".join(lines))


def _layer(
    source: Path, root: Path, inside: str, taken: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """What of the image's files is mounted, as whole as it can be: other mounts lie between."""
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        at, target = root / entry.name, inside + entry.name
        if entry.is_symlink():
            at.symlink_to(os.readlink(entry.path))
            continue
        at.mkdir() if entry.is_dir() else at.touch()
        if any(one.startswith(f"{target}/") for one in taken) and entry.is_dir():
            yield from _layer(Path(entry.path), at, f"{target}/", taken)
        elif target not in taken:
            yield entry.path, target, True


def _point(root: Path, mount: Mount) -> None:
    """Make what is mounted over: the runtime may not write there, as several nodes share it."""
    at = root / mount.target.lstrip("/")
    if not at.exists():
        at.parent.mkdir(parents=True, exist_ok=True)
        at.mkdir() if os.path.isdir(mount.source) else at.touch()


def _bind(source: str, target: str, read_only: bool) -> Mapping[str, Any]:
    options = ["rbind", "nosuid", "nodev", "ro" if read_only else "rw"]
    return {"destination": target, "type": "bind", "source": source, "options": options}


def _as_user(told: dict[str, Any]) -> None:
    """Let the container's root be the calling user, who may mount no new /sys."""
    linux = told["linux"]
    linux["namespaces"].append({"type": "user"})
    for kind, own in (("uid", os.getuid()), ("gid", os.getgid())):
        linux[f"{kind}Mappings"] = [{"containerID": 0, "hostID": own, "size": 1}]
    for mount in told["mounts"]:
        if mount["destination"] == "/sys":
            mount.update(type="bind", source="/sys", options=["rbind", "nosuid", "nodev", "ro"])
