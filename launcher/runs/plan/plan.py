"""The plan of a run: all that a backend needs, and nothing about any one backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.agent import start
from launcher.agent.checkpoints import lineage
from launcher.agent.words import ASK, NEEDS
from launcher.base.errors import Faults, UsageError
from launcher.base.names import LABEL
from launcher.runs.payload import KEY, PYTHON
from launcher.runs.plan import layout, mounts, needs, program, render, rules
from launcher.runs.plan.image_facts import reference
from launcher.runs.plan.mounts import Host, Mount, path_of
from launcher.runs.plan.program import ProgramKind
from launcher.runs.plan.program_options import Value
from launcher.runs.plan.resolved import Resolved, scripts
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import Gpus

HERE = "none: this environment"
BANNER_ULIMITS = {"memlock": -1, "stack": 67108864}
INFINIBAND = "/dev/infiniband"
FIRST_NODE = "node-0"
"""What the first node is called where all nodes are on one machine."""

PRIVATE_SHM = "8g"
"""The default of a container's own /dev/shm: a bound, of which what is used counts."""

AFTER_GRACE = 10
"""Seconds the engine waits longer than the runner, so that it is the runner that ends the ranks."""


@dataclass(frozen=True)
class Stamp:
    """What makes one run different from the next: its id and when it was asked for (ISO 8601)."""

    run: str
    created: str


@dataclass(frozen=True)
class Plan:
    """What a backend starts: a run, or one node of a run that is started by hand on each.

    `env` maps a name to None to pass on the launcher's own value. Of several nodes the variables
    alone say which one it is, so `argv` is the same on all. `options` are what the `program` of the
    run file is given, by their plain names, with what the user laid over; the same as words stand
    in `argv`. `secrets` maps variables to the files of the host that hold their values.
    `checkpoints` is the folder of the host that is saved to. A run with `tie` stops when its
    standard input is closed. `fewer`: smaller node counts that the run may start with; `spare`:
    more nodes, of which the fittest take part. With `own_devices` a node looks itself whether it
    has InfiniBand's devices: nobody knows which machine it will be.
    """

    run: str
    name: str
    image: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str | None], ...]
    mounts: tuple[Mount, ...]
    gpus: Gpus
    nodes: int
    processes_per_node: int
    ipc: str
    shm_size: str | None
    memory: str | None
    ulimits: tuple[tuple[str, int], ...]
    network: str | None
    user: str | None
    workdir: str | None
    init: bool
    stop_grace: int
    labels: tuple[tuple[str, str], ...]
    program: str = ""
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    secrets: tuple[tuple[str, str], ...] = ()
    checkpoints: str | None = None
    tie: bool = False
    groups: tuple[int, ...] = ()
    no_new_privileges: bool = True
    fewer: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    own_devices: bool = False
    cap_add: tuple[str, ...] = ()
    spare: int = 0

    @property
    def payload_mount(self) -> Mount | None:
        """The mount of the payload's package, where a container is to have it."""
        return next((mount for mount in self.mounts if mount.key == KEY), None)

    def without_payload(self) -> Plan:
        """The plan without that mount, for an engine that gets the payload another way."""
        return replace(self, mounts=tuple(mount for mount in self.mounts if mount.key != KEY))

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments: what the runner starts."""
        return self.argv[self.argv.index("--") + 1 :] if "--" in self.argv else ()


def _check_processes(config: RunConfig, origin: Origin, gpus: Gpus) -> None:
    """Refuse another number of processes than GPUs that was given for these GPUs.

    One for the CPU stands in a file whose `gpus` the command line has set since.
    """
    given = "processes" in origin.overrides or (
        "gpus" not in origin.overrides and _stands_with_gpus(origin)
    )
    if gpus.count and given and config.processes != gpus.count:
        raise UsageError(
            f"{origin.place('processes')}: {config.processes} on {gpus.count} GPUs of a node, and "
            "each GPU takes one process",
            f"Leave processes out, or ask for --gpus {config.processes}.",
        )


def _stands_with_gpus(origin: Origin | None) -> bool:
    """Whether `processes` is set where `gpus` is, and not in a file that is extended on GPUs."""
    while origin:
        if "processes" in origin.lines:
            return origin.has("gpus")
        if "gpus" in origin.lines:
            return False
        origin = origin.base
    return False


def make_plan(resolved: Resolved, host: Host, stamp: Stamp, *, tie: bool = False) -> Plan:
    """The plan of a run. Raises UsageError for one that can't work on any machine, PreflightError
    where the image is known to lack a Python package that it imports.

    With `tie` the run ends with the launcher.
    """
    config, origin, gpus, release = (
        resolved.seen,
        resolved.origin,
        resolved.gpus,
        resolved.facts.release,
    )
    started, ours, faults = resolved.program, resolved.program.kind is ProgramKind.OURS, Faults()
    with faults.collected():
        program.check_program(
            started, resolved.config, resolved.facts, origin, resolved.layout.world
        )
    with faults.collected():
        _check_processes(config, origin, gpus)
    with faults.collected():
        layout.refuse(resolved.faults, origin)
    fewer = tuple[int, ...]()
    with faults.collected():
        fewer = _fewer(resolved.config, origin, host, resolved.processes, release)
    saved_to = resolved.config.checkpoint.save
    save = path_of(saved_to, host) if saved_to else None
    image = reference(config.image) if host.contained else HERE
    compiles = ours and gpus.count != 0 and resolved.layout.model == 1
    compiled = mounts.compiled(host, image) if compiles else ()
    mounted = (*resolved.mounts, *compiled, *mounts.payload_mounts(host))
    with faults.collected():
        mounts.check_mounts(mounted, origin)
    ipc, shm_size = _shared_memory(config, gpus, resolved.processes)
    with faults.collected():
        told = rule_input(resolved, gpus)
        render.check_options(
            [*resolved.options], resolved.rest, started, resolved.facts, origin, told
        )
        if ours and not faults.found:
            render.check_fits(
                render.placed([*resolved.options], resolved.rest, origin), told, release
            )
    faults.refuse()
    wanted = needs.needed(resolved, contained=host.contained)
    needs.check_needs(wanted, resolved, image if host.contained else "this environment")
    return Plan(
        run=stamp.run,
        name=config.name,
        image=image,
        argv=(
            *_runner(config, host, resolved.processes, fewer, cpu=gpus.count == 0),
            *(["--checkout", scripts(config, host)] if config.source else []),
            *(["--tie"] if tie else []),
            *("--", *started.argv, *render.words(resolved.options), *resolved.rest),
        ),
        env=_env(resolved, host, stamp, compiled, needs.for_runner(wanted)),
        mounts=mounted,
        gpus=gpus,
        nodes=config.nodes.count,
        processes_per_node=resolved.processes,
        ipc=ipc,
        shm_size=shm_size,
        memory=config.resources.memory,
        ulimits=_ulimits(config, gpus),
        network=config.resources.network or _network(config, host),
        user=_user(config, host),
        workdir=_workdir(config, host),
        program=config.program,
        options=resolved.values,
        init=True,
        stop_grace=config.resources.stop_grace + AFTER_GRACE,
        labels=_labels(config, host, image, stamp, resolved.processes, save),
        secrets=tuple((name, path_of(text, host)) for name, text in sorted(config.secrets.items())),
        checkpoints=save,
        tie=tie,
        fewer=fewer,
        groups=host.groups if _is_caller(config, host) else (),
        no_new_privileges=config.resources.no_new_privileges,
        devices=_devices(config, host),
        own_devices=config.resources.devices is None and config.nodes.count > 1 and host.scheduled,
        cap_add=tuple(config.resources.cap_add),
        spare=config.nodes.spare,
    )


def rule_input(resolved: Resolved, gpus: Gpus) -> rules.RuleInput:
    """What Megatron's rules go by: the options, upstream's own defaults, and what is around."""
    upstreams_gpt = resolved.config.program == "pretrain_gpt.py"
    usual = {"tokenizer_type": "GPT2BPETokenizer"} if upstreams_gpt else {}
    values, on_cpu = {**usual, **resolved.values}, upstreams_gpt and gpus.count == 0
    return rules.RuleInput(values, resolved.layout, resolved.config.env, on_cpu)


def _workdir(config: RunConfig, host: Host) -> str | None:
    if not host.contained:
        return path_of(config.resources.workdir, host) if config.resources.workdir else host.cwd
    return "/work" if config.resources.workdir else "/tmp"  # noqa: S108 - the container's


def _fewer(
    config: RunConfig, origin: Origin, host: Host, processes: int, release: str | None
) -> tuple[int, ...]:
    """The numbers of nodes that will do as well. Raises UsageError."""
    if config.nodes.spare and not host.scheduled:
        raise UsageError(
            f"{origin.place('nodes.spare')}: only a scheduler can give more nodes", "Leave it out."
        )
    if config.nodes.min and host.every_node:
        raise UsageError(
            f"{origin.place('nodes.min')}: all nodes are on this machine, so none can be missing",
            "Leave it out.",
        )
    return layout.fewer(config, origin, processes, release)


def _runner(
    config: RunConfig, host: Host, processes: int, fewer: Sequence[int], *, cpu: bool
) -> list[str]:
    """The runner's own part of the command line."""
    argv = [config.image.python, host.entry, "runner", "--processes-per-node", str(processes)]
    argv += ["--fewer", ",".join(map(str, fewer))] if fewer else []
    argv += ["--wanted", str(config.nodes.count)] if config.nodes.spare else []
    argv += ["--grace", str(config.resources.stop_grace)]
    if config.checkpoint.keep and config.checkpoint.save:
        argv += ["--checkpoints", config.checkpoint.save, "--keep", str(config.checkpoint.keep)]
    if config.profile:
        argv += ["--profile", str(config.profile.folder)]
        if config.profile.tool == "nsys":
            argv += ["--nsys", *map(str, config.profile.ranks)]
    return [*argv, "--cpu"] if cpu else argv


def _user(config: RunConfig, host: Host) -> str | None:
    """The calling user, so that what the run writes is theirs; root and `image` leave it be.

    So does an engine without root of its own, for which the container's root is the caller.
    """
    if not host.contained:
        return None
    if config.resources.user != "auto":
        return None if config.resources.user == "image" else config.resources.user
    return f"{host.uid}:{host.gid}" if _is_caller(config, host) else None


def _is_caller(config: RunConfig, host: Host) -> bool:
    """Whether a container runs as the calling user."""
    named = config.resources.user != "auto"
    return host.contained and bool(host.uid) and not (named or host.rootless)


def _shared_memory(config: RunConfig, gpus: Gpus, processes: int) -> tuple[str, str | None]:
    """The container's IPC namespace, and the size of its own /dev/shm.

    NCCL and CUDA pass data between processes through the host's, as NVIDIA's images ask for.
    """
    asked = config.resources
    if asked.ipc:
        return asked.ipc, asked.shm_size
    if gpus.count and processes * config.nodes.count > 1:
        return "host", None
    return "private", PRIVATE_SHM


def _devices(config: RunConfig, host: Host) -> tuple[str, ...]:
    """Those asked for, or InfiniBand's for nodes of several machines, where this one has them."""
    if config.resources.devices is not None:
        return tuple(config.resources.devices)
    return (INFINIBAND,) if config.nodes.count > 1 and host.infiniband and host.contained else ()


def _network(config: RunConfig, host: Host) -> str | None:
    """The host's for nodes on several machines: the engine's own one ends with its machine."""
    return "host" if config.nodes.count > 1 and not host.every_node else None


def _rendezvous(config: RunConfig, origin: Origin, host: Host) -> dict[str, str]:
    """The variables of a node: which of how many it is, and where the first one listens.

    They are torchrun's own (`PET_` and an option's name; torch/distributed/argparse_util.py), and
    what Kubeflow sets (kubeflow/trainer, pkg/constants). Raises UsageError.
    """
    nodes = config.nodes
    if nodes.count == 1:
        return {}
    if (host.every_node or host.scheduled) and nodes.rank:
        raise UsageError(
            f"{origin.place('nodes.rank')}: the launcher starts all nodes, and numbers them",
            "Leave nodes.rank out.",
        )
    if host.scheduled:  # each node gets them as it starts
        return {}
    address = FIRST_NODE if host.every_node else nodes.master_addr
    if address is None:
        raise UsageError(
            f"{origin.place('nodes')}: several nodes need master_addr, the first one's address",
            "--master-addr ADDRESS; for all nodes on this machine, --backend compose.",
        )
    return {
        "PET_NNODES": str(nodes.count),
        "PET_NODE_RANK": str(nodes.rank),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(nodes.master_port),
    }


def _env(
    resolved: Resolved,
    host: Host,
    stamp: Stamp,
    compiled: tuple[mounts.Mount, ...],
    wanted: Mapping[str, str],
) -> tuple[tuple[str, str | None], ...]:
    """The variables of the container, sorted; the run file's come last and so win."""
    config, where = resolved.seen, resolved.layout
    env: dict[str, str | None] = {"PYTHONUNBUFFERED": "1"}
    if host.payload.digest:
        env[start.DIGEST] = host.payload.digest
    for mount in compiled:
        env["TORCHINDUCTOR_CACHE_DIR"] = mount.target
    if saved := save_request_of(config, stamp.run):
        env[lineage.VARIABLE] = str(saved)
    if host.scheduled and resolved.program.kind is ProgramKind.UPSTREAM:
        env[ASK] = "1"
    if wanted:
        env[NEEDS] = json.dumps(wanted)
    env |= _rendezvous(config, resolved.origin, host)
    if resolved.gpus.count and where.tensor * where.context > 1:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron refuses to start without it
    if _user(config, host):
        # A uid that the image doesn't know has no home, and torch asks for a user's name.
        env |= {"HOME": "/tmp", "USER": "launcher"}  # noqa: S108 - the container's
    for name, value in config.env.items():
        env[name] = value if value is None else str(value)
        if isinstance(value, bool):
            env[name] = str(value).lower()
    return tuple(sorted(env.items()))


def save_request_of(config: RunConfig, run: str) -> lineage.SaveRequest | None:
    """What a run wants of the folder that it saves to; finetuning begins at iteration 0 again."""
    checkpoint = config.checkpoint
    if not checkpoint.save:
        return None
    on = checkpoint.load == checkpoint.save and not checkpoint.finetune
    return lineage.SaveRequest(run, checkpoint.save, on, bool(checkpoint.save_overwrite))


def _ulimits(config: RunConfig, gpus: Gpus) -> tuple[tuple[str, int], ...]:
    """What NVIDIA's images ask for; locked memory is of use to GPUs alone."""
    limits = config.resources.ulimits
    if limits is None:
        limits = {k: v for k, v in BANNER_ULIMITS.items() if gpus.count or k != "memlock"}
    return tuple(sorted(limits.items()))


def _labels(
    config: RunConfig, host: Host, image: str, stamp: Stamp, processes: int, save: str | None
) -> tuple[tuple[str, str], ...]:
    labels = {
        "run": stamp.run,
        "name": config.name,
        "image": image,
        "created": stamp.created,
        "nodes": str(config.nodes.count + config.nodes.spare),
        "processes": str(processes),
        "gpus": config.gpus,
        "stop_grace": str(config.resources.stop_grace + AFTER_GRACE),
        KEY: host.payload.digest,
    }
    if config.nodes.count > 1:
        labels["node"] = str(config.nodes.rank)
    if config.image.python != PYTHON:
        labels["python"] = config.image.python
    if save:
        labels["checkpoints"] = save
    return tuple(sorted((LABEL + key, value) for key, value in labels.items()))


def without_memlock(plan: Plan) -> Plan:
    """The plan for an engine that may not raise the limit of locked memory."""
    return replace(plan, ulimits=tuple(limit for limit in plan.ulimits if limit[0] != "memlock"))
