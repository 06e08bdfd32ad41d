"""Collects facts about the machine, its engine and the files of a run."""

from __future__ import annotations

import csv
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.runs.backends.docker.docker_request import LOCAL, is_rootless
from launcher.runs.checks import checks
from launcher.runs.checks.machine import (
    UNLIMITED,
    Dataset,
    Engine,
    Folder,
    Gpu,
    Machine,
    SavedCheckpoints,
    Use,
    find_gpu,
)

if TYPE_CHECKING:
    from docker.api import APIClient

    from launcher.runs.plan.job import Backend
    from launcher.runs.plan.mounts import Mount
    from launcher.runs.plan.plan import Plan
    from launcher.runs.runfile.config import RunConfig
    from launcher.runs.runfile.values import Gpus

TOOLKIT = ("nvidia-container-runtime-hook", "nvidia-container-runtime", "nvidia-ctk")
"""Executables of the NVIDIA Container Toolkit; docker finds the hook on its daemon's PATH."""

CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
SYSTEM = "/usr/bin"
SHM = "/dev/shm"  # noqa: S108 - the place itself
NVIDIA_DEVICE = "nvidia.com/gpu"
GPU_FIELDS = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One is there wherever a GPU can be used: NVIDIA's driver, that of Windows' Linux, and AMD's."""

USE_FIELDS = "gpu_uuid,pid,used_memory"


def engine_of(chosen: Backend) -> APIClient | None:
    """The engine of a backend that has one. Raises EngineError where none answers."""
    return chosen.engine


def machine(api: APIClient | None, *, gpus: bool = True) -> Machine:
    """The machine alone; `api` is that of the engine which runs are for, None without one.

    Of an engine elsewhere, or in a virtual machine, only what it reports itself. The driver, which
    may take a second for each answer, is asked while the engine is.
    """
    here = gpus and (api is None or str(api.base_url) == LOCAL)
    listed = uses = None
    if here:
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor()
        listed, uses = pool.submit(nvidia_gpus), pool.submit(nvidia_uses)
    found = engine(api) if api else None
    if found and not found.local:
        return Machine(engine=found)
    there = listed.result() if listed else None
    if there is None and here and not (api or any(map(os.path.exists, DRIVERS))):
        there = ()
    return Machine(
        gpus=there,
        uses=uses.result() if uses and there else (),
        engine=found,
        shm=free(SHM) if os.path.isdir(SHM) else None,
        memlock=_memlock(found),
    )


def nvidia_gpus() -> tuple[Gpu, ...] | None:
    """The driver's GPUs; empty where it has none, None where there is no driver to ask."""
    rows = _nvidia_smi(f"--query-gpu={GPU_FIELDS}")
    if rows is None:  # older drivers know no compute_cap
        rows = _nvidia_smi(f"--query-gpu={GPU_FIELDS.replace('compute_cap,', '')}")
        rows = None if rows is None else [[*row[:5], "", *row[5:]] for row in rows]
    if rows is None:
        return None
    return tuple(_gpu(row) for row in rows if len(row) == 7 and row[0].isdecimal())


def visible(asked: Gpus, chosen: Backend) -> tuple[Gpu, ...]:
    """The GPUs that a run on `chosen` would see; none where they aren't this machine's."""
    if asked.count == 0 or chosen.scheduled:
        return ()
    api = engine_of(chosen)
    there = nvidia_gpus() if api is None or engine(api).local else None
    shown = there if api or asked.devices else _visible(there)
    return tuple(checks.chosen(asked, shown or ()))


def nvidia_uses() -> tuple[Use, ...]:
    """The processes that compute on them, as far as the driver lists them."""
    rows = _nvidia_smi(f"--query-compute-apps={USE_FIELDS}") or []
    return tuple(
        Use(row[0], int(row[1]), _of_mib(row[2]))
        for row in rows
        if len(row) == 3 and row[1].isdecimal()
    )


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, total, used, capability, driver = row
    able = re.fullmatch(r"(\d+)\.(\d+)", capability)
    found = (int(able[1]), int(able[2])) if able else None
    return Gpu(int(index), uuid, name, _of_mib(total) or 0, _of_mib(used) or 0, found, driver)


def _of_mib(mebibytes: str) -> int | None:
    """Bytes of nvidia-smi's MiB; None for its '[N/A]'."""
    return int(mebibytes) << 20 if mebibytes.isdecimal() else None


def _nvidia_smi(query: str) -> list[list[str]] | None:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return [] if "No devices were found" in done.stdout + done.stderr else None
    lines = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [[field.strip() for field in row] for row in lines]


def gather(config: RunConfig, plan: Plan, api: APIClient | None) -> Machine:
    """The machine as far as `plan` needs it, and the plan's files."""
    found = machine(api, gpus=bool(plan.gpus.count))
    if found.engine and not found.engine.local:
        return found
    if found.engine is None and not plan.gpus.devices:
        found = replace(found, gpus=_visible(found.gpus))
    who = _identity(plan, found.engine)
    root = _root(_socket_path(api)) if api else None
    nodes = config.nodes
    return replace(
        found,
        port=_is_free(nodes.master_port) if nodes.count > 1 and nodes.rank == 0 else None,
        resolves=_resolves(nodes.master_addr) if nodes.rank > 0 and nodes.master_addr else None,
        datasets=tuple(_dataset(prefix, who) for prefix in prefixes(plan.mounts)),
        unseen=tuple(_unseen(plan, root)) if root else (),
        folders=tuple(
            Folder(mount.source, mount.key, _unwritable(mount.source, who), free(mount.source))
            for mount in plan.mounts
            if not mount.read_only
        ),
        load=_saved(_source(plan, "checkpoint.load", config.checkpoint.load)),
        save=_saved(_source(plan, "checkpoint.save", config.checkpoint.save)),
    )


def _visible(there: tuple[Gpu, ...] | None) -> tuple[Gpu, ...] | None:
    """Those that CUDA_VISIBLE_DEVICES shows, in its order, where it is set."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if there is None or shown is None:
        return there
    found = [find_gpu(one.strip(), there) for one in shown.split(",")]
    return tuple(gpu for gpu in found if gpu)


def engine(api: APIClient) -> Engine:
    """What the engine reports about itself."""
    info: dict[str, Any] = api.info()
    unix, path = str(api.base_url) == LOCAL, _socket_path(api)
    options = info.get("SecurityOptions") or []
    devices = [str(one.get("ID", "")) for one in info.get("DiscoveredDevices") or []]
    local = unix and info.get("Name") == socket.gethostname()
    return Engine(
        version=str(info.get("ServerVersion", "")),
        host=f"unix://{path}" if path else str(api.base_url),
        local=local,
        rootless=is_rootless(info) or any("userns" in option for option in options),
        cgroup=f"v{info.get('CgroupVersion', '1')} ({info.get('CgroupDriver', '')})",
        gpus=_gives_gpus(info, devices, path if local else None),
        devices=tuple(one for one in devices if one.startswith(NVIDIA_DEVICE)),
    )


def _socket_path(api: APIClient) -> str | None:
    scheme, _, path = str(getattr(api, "host", "")).partition("://")
    return path if scheme == "unix" else None


def _gives_gpus(info: Mapping[str, Any], devices: list[str], local: str | None) -> bool | None:
    """Whether containers can be given GPUs; False only for an engine here, without the toolkit."""
    if "nvidia" in (info.get("Runtimes") or {}):
        return True
    if any(one.startswith(NVIDIA_DEVICE) for one in devices):
        return True
    if local is None:
        return None
    folders = info.get("CDISpecDirs") or CDI_FOLDERS
    if any(next(Path(folder).glob("nvidia*"), None) for folder in folders):
        return True
    paths = os.pathsep.join(filter(None, [os.environ.get("PATH"), SYSTEM, _path_of(local)]))
    return any(shutil.which(name, path=paths) for name in TOOLKIT)


def _path_of(listener: str) -> str:
    """PATH of the process that listens at a socket; "" where that isn't known."""
    with suppress(OSError):
        variables = (_process(listener) / "environ").read_bytes().split(b"\0")
        return next((os.fsdecode(one[5:]) for one in variables if one.startswith(b"PATH=")), "")
    return ""


def _process(listener: str) -> Path:
    """The kernel's view of the process that listens at a socket. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        probe.connect(listener)
        told = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Path("/proc", str(struct.unpack("3i", told)[0]))


def _root(listener: str | None) -> Path | None:
    """Where the files are as an engine sees them that has mounts of its own; None for ours."""
    try:
        process = _process(listener) if listener else None
        if process is None or os.readlink(process / "ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            return None
    except OSError:  # none of this machine's, or not for us to look at
        return None
    return process / "root"


def _unseen(plan: Plan, root: Path) -> Iterator[tuple[str, str]]:
    """The keys and paths of mounts of which the engine, whose files are at `root`, has others.

    What isn't there yet is made in the nearest folder that is.
    """
    for mount in plan.without_payload().mounts:  # that is copied where it isn't seen
        at = Path(os.path.realpath(mount.source))
        while not os.path.exists(at):
            at = at.parent
        try:
            same = os.path.samestat(at.stat(), (root / at.relative_to("/")).stat())
        except OSError as error:
            same = not isinstance(error, FileNotFoundError)  # else it isn't for us to look at
        if not same:
            yield mount.key, mount.source


def _memlock(found: Engine | None) -> int | None:
    """Bytes that a run may lock: this process's limit without an engine, its user's where that is
    the engine's own; a rootful engine isn't known before it is asked to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if found and not found.rootless:
        return None
    limit = hard if found else soft
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def free(path: str | Path) -> int | None:
    """Bytes that may be written at `path`, or at its nearest folder that is there."""
    at = Path(path)
    while not os.path.exists(at) and at != at.parent:
        at = at.parent
    try:
        told = os.statvfs(at)
    except OSError:
        return None
    return (told.f_bavail if os.getuid() else told.f_bfree) * told.f_frsize


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


def _resolves(name: str) -> bool:
    with suppress(OSError):
        return bool(socket.getaddrinfo(name, None))
    return False


@dataclass(frozen=True)
class RunUser:
    """The user as whom the run reads and writes files."""

    uid: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"user {self.uid}:{self.groups[0]}"


def _identity(plan: Plan, found: Engine | None) -> RunUser | None:
    """The plan's user; None where it is the image's, or where the engine maps users."""
    if found is None:
        return RunUser(os.getuid(), (os.getgid(), *os.getgroups()))
    if found.rootless or plan.user is None:
        return None
    uid, _, gid = plan.user.partition(":")
    return RunUser(int(uid), (int(gid or 0), *plan.groups))


def may(path: str, who: RunUser | None, access: int) -> bool:
    """Whether `who` has `access` (os.R_OK, W_OK, X_OK) to a file; None is not looked into.

    Where an access control list rules, only its owner is checked; others pass.
    """
    if who is None or who.uid == 0:
        return True
    told = os.stat(path)
    if told.st_uid == who.uid:
        return (told.st_mode >> 6) & access == access
    with suppress(OSError, AttributeError):  # a file system, or a system, without such attributes
        if "system.posix_acl_access" in os.listxattr(path):
            return True
    shift = 3 if told.st_gid in who.groups else 0
    return (told.st_mode >> shift) & access == access


def documents(mounts: Iterable[Mount]) -> list[int]:
    """How many documents each data file of a run has, of those that can be read here."""
    found = list[int]()
    for prefix in prefixes(mounts):
        from launcher.runs.datasets import indexed

        with suppress(OSError, indexed.DamagedDataset):
            found.append(indexed.read_index(Path(prefix)).sequences)
    return found


def prefixes(mounts: Iterable[Mount]) -> list[str]:
    """The prefixes of the run's data files."""
    return [
        mount.source.removesuffix(".idx")
        for mount in mounts
        if mount.key == "data.path" and mount.source.endswith(".idx")
    ]


def _dataset(prefix: str, who: RunUser | None) -> Dataset:
    from launcher.runs.datasets import indexed

    try:
        for end in (".idx", ".bin"):
            if not may(prefix + end, who, os.R_OK):
                return Dataset(prefix, f"{prefix}{end}: {who} may not read it")
        index = indexed.read_filled_index(Path(prefix))
        greatest = indexed.greatest(Path(prefix), index)
        return Dataset(prefix, "", index.tokens, greatest, index.sequences)
    except indexed.DamagedDataset as error:
        return Dataset(prefix, str(error))
    except (FileNotFoundError, PermissionError):  # runs/follow/run_files reports it, if need be
        return Dataset(prefix, "")
    except OSError as error:
        return Dataset(prefix, f"{error.filename}: {error.strerror}")


def _unwritable(path: str, who: RunUser | None) -> str:
    """Why nothing can be written to `path`, or "": one that isn't there is made later."""
    try:
        if not os.path.exists(path):
            return ""
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return "its file system is read-only"
        needed = os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK
        if may(path, who, needed):
            return ""
    except OSError as error:
        return str(error.strerror)
    told = os.stat(path)
    return f"{who} may not write to it, which is {told.st_uid}:{told.st_gid}'s"


def _source(plan: Plan, key: str, asked: str | None) -> Path | None:
    """The folder of the host for a key of the checkpoint section; one mount may serve both."""
    if not asked:
        return None
    keys = (key, "checkpoint.save")
    found = [mount.source for one in keys for mount in plan.mounts if mount.key == one]
    return Path(found[0]) if found else None


def _saved(folder: Path | None) -> SavedCheckpoints | None:
    """The checkpoints in a folder."""
    if folder is None or not os.path.isdir(folder):
        return None
    from launcher.agent.checkpoints import folders, lineage
    from launcher.runs.records import record

    try:
        found = folders.since_complete(folder)
    except OSError:  # another user's
        return None
    complete = [one for one in found if not one.problem]
    newest = complete[-1].iteration if complete else None
    line = lineage.said(complete[-1].folder) if complete else ""
    began = (record.read(line, record.PLAN) if line else None) or {}
    broken = [
        (str(one.folder), one.problem)
        for one in found
        if one.problem and (newest is None or one.iteration > newest)
    ]
    return SavedCheckpoints(newest, tuple(broken), began.get("options", {}))
