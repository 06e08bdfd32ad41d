"""The mounts of a run, and its paths inside the container."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import join, normpath
from typing import Any
from urllib.parse import quote

from launcher.base.errors import Faults, UsageError
from launcher.base.yamlfile import printable
from launcher.runs.payload import KEY, NONE, TARGET, Payload, entry
from launcher.runs.plan import program
from launcher.runs.plan.program import Program
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin

SECRETS = "/run/secrets"
PROFILE = "profile"


@dataclass(frozen=True)
class Host:
    """What a plan takes from the machine and the user that start it, with `groups` beside `gid`.

    `contained` is False where the run sees this machine's own files under their own names;
    `rootless` is True where a container's root is the calling user outside; `every_node` where
    all nodes of a run are started here, on one machine; `scheduled` where a scheduler starts them.
    `runs` has the runs' own folders, by their ids. `payload` is what is carried into the run.
    `infiniband`: whether the machine has such devices.
    """

    uid: int
    gid: int
    home: str
    cwd: str
    cache: str
    contained: bool = True
    rootless: bool = False
    every_node: bool = False
    scheduled: bool = False
    groups: tuple[int, ...] = ()
    runs: str = ""
    payload: Payload = NONE
    infiniband: bool = False

    @property
    def entry(self) -> str:
        """The payload's first file, as the run sees it."""
        return entry() if self.contained else entry(self.payload.folder)


@dataclass(frozen=True)
class Mount:
    """A file or folder of the host, seen at `target`; `key` is what in the run file asked for it.

    A folder that is written to is made where it is missing; the rest must be there.
    """

    source: str
    target: str
    read_only: bool
    key: str


def mounted(
    config: RunConfig, started: Program, host: Host, run: str
) -> tuple[RunConfig, tuple[Mount, ...]]:
    """The configuration with its paths as in the container, and the mounts, of a run by its id."""
    data, mounts = _data(config, host)
    checkpoint, folders = _folders(config, host)
    mounts += folders
    logging: dict[str, Any] = {}
    for field, target in (("tensorboard_dir", "/tensorboard"), ("wandb_save_dir", "/wandb")):
        if folder := getattr(config.logging, field):
            mounts.append(_mount(folder, target, f"logging.{field}", host, writable=True))
            logging[field] = mounts[-1].target
    if config.resources.workdir:
        folder = config.resources.workdir
        mounts.append(_mount(folder, "/work", "resources.workdir", host, writable=True))
    profile = config.profile
    if profile:
        folder = profile.folder or join(host.runs, run, PROFILE)
        mounts.append(_mount(folder, f"/{PROFILE}", PROFILE, host, writable=True))
        profile = profile.model_copy(update={"folder": mounts[-1].target})
    if started.host:
        mounts.append(_mount(started.host, started.argv[0], "program", host))
    if config.source:
        mounts.append(_mount(config.source, program.CHECKOUT, "source", host))
    for name, text in sorted(config.secrets.items()):
        mounts.append(_mount(text, f"{SECRETS}/{name}", f"secrets.{name}", host))
    for spec in config.mounts:
        mounts.append(Mount(path_of(spec.source, host), spec.target, spec.read_only, "mounts"))
    inside = config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
            "logging": config.logging.model_copy(update=logging),
            "profile": profile,
        }
    )
    distinct = dict[tuple[str, str], Mount]()
    for mount in mounts:
        distinct.setdefault((mount.target, mount.source), mount)
    return inside, tuple(distinct.values())


def compiled(host: Host, image: str) -> tuple[Mount, ...]:
    """Where torch keeps what it compiles, for the next run's start, of an image by its name.

    No other image's runs load what one has put there. None where a scheduler chooses the node, in a
    Compose file, which is for other machines too, and outside a container, where torch has a place.
    """
    if not host.contained or host.scheduled or host.every_node:
        return ()
    folder = join(host.cache, "compiled", quote(image, safe=""))
    return (_mount(folder, "/compiled", "the compiler's cache", host, writable=True),)


def payload_mounts(host: Host) -> tuple[Mount, ...]:
    """The payload's package, in a container."""
    if not host.contained or host.payload == NONE:
        return ()
    return (Mount(f"{host.payload.folder}/launcher", f"{TARGET}/launcher", True, KEY),)


def check_mounts(mounts: tuple[Mount, ...], origin: Origin) -> None:
    """Raise UsageError where two sources want the same place."""
    faults, by_target = Faults(), dict[str, Mount]()
    for mount in mounts:
        other = by_target.setdefault(mount.target, mount)
        if other.source != mount.source:
            faults.add(
                f"{origin.place(mount.key)}: {printable(mount.target)} is taken by {other.source} "
                f"({other.key})",
                "Give the mount another target.",
            )
    faults.refuse()


def _mount(text: str, target: str, key: str, host: Host, *, writable: bool = False) -> Mount:
    """A mount at `target`, or at its own name where the run sees this machine's files."""
    source = path_of(text, host)
    return Mount(source, target if host.contained else source, not writable, key)


def _data(config: RunConfig, host: Host) -> tuple[dict[str, Any], list[Mount]]:
    """The data section's paths in the container, and the mounts that put them there.

    Files are mounted one by one: a folder would show more than is asked for, and a link in it
    would lead nowhere.
    """
    data, mounts = config.data, list[Mount]()
    inside: dict[str, Any] = {}
    if data.path is not None:
        parts = data.path if isinstance(data.path, list) else [data.path]
        seen: list[str | int | float] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                prefix, files = _prefix(part, f"/data/{index}", host)
                mounts += files
                part = prefix
            seen.append(part)
        inside["path"] = seen
        cache = data.cache or join(host.cache, "data-index")
        mounts.append(_mount(cache, "/data-cache", "data.cache", host, writable=True))
        inside["cache"] = mounts[-1].target
    for field in ("vocab_file", "merge_file", "tokenizer_model"):
        text = getattr(data, field)
        if text and (field != "tokenizer_model" or text.startswith((".", "/", "~"))):
            target = f"/data/{field}/{path_of(text, host).rpartition('/')[2]}"
            mounts.append(_mount(text, target, f"data.{field}", host))
            inside[field] = mounts[-1].target
    return inside, mounts


def _prefix(text: str, folder: str, host: Host) -> tuple[str, list[Mount]]:
    """The prefix in the container of a .bin and .idx, and the mounts of the two."""
    source = path_of(text, host).removesuffix(".bin").removesuffix(".idx")
    target = f"{folder}/{source.rpartition('/')[2]}" if host.contained else source
    files = [Mount(source + end, target + end, True, "data.path") for end in (".bin", ".idx")]
    return target, files


def _folders(config: RunConfig, host: Host) -> tuple[dict[str, Any], list[Mount]]:
    """The checkpoint section's folders in the container, and their mounts."""
    checkpoint, mounts = config.checkpoint, list[Mount]()
    inside: dict[str, Any] = {}
    save = path_of(checkpoint.save, host) if checkpoint.save else None
    if checkpoint.save:
        folder = checkpoint.save
        mounts.append(_mount(folder, "/checkpoints", "checkpoint.save", host, writable=True))
        inside["save"] = mounts[-1].target
    if checkpoint.load:
        if path_of(checkpoint.load, host) != save:
            mounts.append(_mount(checkpoint.load, "/checkpoints-from", "checkpoint.load", host))
        inside["load"] = mounts[-1].target
    return inside, mounts


def path_of(text: str, host: Host) -> str:
    """An absolute path of the host; a relative one starts where the launcher was started."""
    user, slash, rest = text.partition("/")
    if user == "~":
        text = host.home + slash + rest
    elif user.startswith("~"):
        raise UsageError(f"{text}: only your own ~ is known", "Write the folder out.")
    return normpath(join(host.cwd, text))
