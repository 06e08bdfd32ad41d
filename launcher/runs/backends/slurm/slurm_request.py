"""A plan as a Slurm job: one task a node, by a batch script and files on a shared disk.

Nothing of ours stays on the cluster (https://slurm.schedmd.com/sbatch.html).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.words import IMAGE
from launcher.base.errors import EngineError, PreflightError, UsageError
from launcher.base.names import LABEL
from launcher.runs.backends import shown
from launcher.runs.backends.docker import docker_request
from launcher.runs.backends.slurm import slurm_queue
from launcher.runs.plan.plan import INFINIBAND, Plan
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.secrets import is_secret
from launcher.runs.runfile.values import Gpus

TEMPLATE = Path(__file__).with_name("slurm.sh.template")
SCRIPT, OUTPUT = "job.sh", "slurm.out"
WIDTH = 90
ENGINES = ("docker", "podman")
INSIDE = ("pyxis", "apptainer")
"""With those a node's shell is in the container: srun starts it there."""

SAME = ("exclude", "time", "partition", "account", "qos", "constraint", "reservation", "dependency")
"""Keys that are sbatch's options of the same names."""

SIZES = ("sinfo", "--noheader", "--exact", "--format=%P|%c|%m|%G")
"""Prints a partition, CPUs, MB of memory and what else there is, a line for each kind of node."""

REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"', "${SLURM_RESTART_COUNT:-0}"
CHAIN = (
    '[ "$SLURM_ARRAY_TASK_ID" -lt "$SLURM_ARRAY_TASK_MAX" ]',
    "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))",
)
"""What has a job start again, or the next one of its array; and a number of the start, 0 first."""


@dataclass(frozen=True)
class SlurmRequest:
    """A job to submit: its script and path. requeue: whether Slurm may start it again."""

    script: str
    path: str
    requeue: bool = False


@dataclass(frozen=True)
class NodeSize:
    """What a node has: GPUs, CPUs, and memory in MB."""

    gpus: int
    cpus: int
    memory: int


def node_sizes(told: str, partition: str | None) -> list[NodeSize]:
    """The kinds of nodes of a partition, or of the usual one, by what `SIZES` prints of all."""
    found = []
    for line in told.splitlines():
        name, cpus, memory, gres, *_ = *line.split("|"), "", "", ""
        numbers = [re.match(r"\d+", each) for each in (cpus, memory)]
        wanted = name.rstrip("*") in partition.split(",") if partition else name.endswith("*")
        if wanted and numbers[0] and numbers[1]:
            gpus = sum(int(each) for each in re.findall(r"\bgpu(?::[^:,(]+)??:(\d+)", gres))
            found.append(NodeSize(gpus, int(numbers[0][0]), int(numbers[1][0])))
    return found


def share(plan: Plan, sizes: Iterable[NodeSize]) -> dict[str, object]:
    """The options that give a node's ranks their CPUs and memory: Slurm would give all one CPU.

    The whole node where all its GPUs are asked for, else as much as belongs to these GPUs; where
    nobody says how large a node is, a CPU for each rank.
    """
    sizes = [*sizes]
    count = plan.gpus.count or 0
    fitting = [size for size in sizes if 0 < count <= size.gpus]
    if sizes and count and not fitting:
        return {}  # Slurm says it better
    if fitting and all(size.gpus == count for size in fitting):
        return {"exclusive": True, "mem": 0}
    cpus = [size.cpus * count // size.gpus for size in fitting]
    memory = [size.memory * count // size.gpus for size in fitting]
    most = max((size.cpus for size in fitting or sizes), default=plan.processes_per_node)
    return {
        "cpus-per-task": max(min(cpus, default=0), min(plan.processes_per_node, most)),
        "mem": f"{min(memory)}M" if memory else None,
    }


def request(plan: Plan, asked: Slurm, folder: Path, sizes: Iterable[NodeSize] = ()) -> SlurmRequest:
    """The job of `plan`, with its files in `folder`. sizes: of the nodes, where Slurm has them"""
    if plan.cap_add and asked.container in INSIDE:
        raise UsageError(
            f"resources.cap_add: {asked.container} can't add capabilities",
            "Leave it out. For locked memory, the nodes' own limit applies.",
        )
    again, restart = CHAIN if asked.is_chain else REQUEUE
    goes_on, saved = asked.requeue or asked.is_chain, _saved(plan, asked)
    script = _rendered(
        plan=plan,
        container=asked.container,
        engine=asked.container if asked.container in ENGINES else "",
        options=_options(plan, asked, folder, sizes),
        has_limit=bool(asked.time),
        secrets=shown.wanted(shown.secrets(plan)),
        folder=shlex.quote(str(folder)),
        restart=restart,
        again=again if goes_on else "",
        is_chain=asked.is_chain,
        setup=asked.setup_lines,
        goes_on_from=shlex.quote(saved) if saved else "",
        unable=PreflightError.exit_code,
        srun=_srun(plan, asked),
        **_of_node(plan, asked),
    )
    return SlurmRequest(script, str(folder / SCRIPT), goes_on)


def _rendered(**words: object) -> str:
    """The script, by the template beside this module."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a shell's words are quoted already
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(words)


def array(
    plans: Mapping[int, Plan], asked: Slurm, runs: Path, sizes: Iterable[NodeSize] = ()
) -> str:
    """The script of an array, whose tasks are runs: each has its own script in its own folder."""
    first = next(iter(plans.values()))
    own = {"job-name": first.name, "output": os.devnull, "array": asked.array}
    lines = [f"#SBATCH {one}" for one in _options(first, asked, runs, sizes, **own)]
    lines += ["", "# Each task is a run with a script of its own.", "case $SLURM_ARRAY_TASK_ID in"]
    for number, plan in plans.items():
        script, output = (shlex.quote(str(runs / plan.run / name)) for name in (SCRIPT, OUTPUT))
        lines.append(f"  {number}) exec {script} >> {output} 2>&1 ;;")
    return "\n".join(["#!/bin/bash", *lines, "esac", ""])


def _paths(plan: Plan, asked: Slurm) -> list[str]:
    """What has to be there on a node: what is mounted, or without a container is run."""
    if asked.container in INSIDE:
        return []
    paths = [mount.source for mount in plan.without_payload().mounts]
    if asked.container == "none":
        program = plan.argv[plan.argv.index("--") + 1 :] if "--" in plan.argv else ()
        paths += [plan.argv[1], *(word for word in program[:1] if os.path.isabs(word))]
    return [*dict.fromkeys(paths)]


def _options(
    plan: Plan, asked: Slurm, folder: Path, sizes: Iterable[NodeSize] = (), **more: object
) -> Iterator[str]:
    """The options of sbatch, in their long form; `more` count more."""
    own = share(plan, sizes)
    if asked.options.keys() & {"exclusive", "cpus-per-task", "cpus-per-gpu", "mem-per-gpu"}:
        own = {}
    if asked.options.keys() & {"mem-per-cpu", "mem-per-gpu"}:
        own.pop("mem", None)
    if plan.memory:
        own["mem"] = plan.memory.upper().removesuffix("B")
    several = plan.fewer or plan.spare
    told: dict[str, object] = {
        "job-name": docker_request.container_name(plan),
        "nodes": _nodes(plan),
        "ntasks-per-node": None if several else 1,  # of a range it would take the fewest
        "gpus-per-node": _gpus(plan, asked),
        **{name: getattr(asked, name) for name in SAME},
        "array": asked.array if asked.is_chain else None,
        **own,
        "output": folder / OUTPUT,
        "open-mode": "append",
        "requeue" if asked.requeue else "no-requeue": True,
        "signal": f"B:TERM@{asked.signal}" if asked.signal else None,
        **asked.options,
        **more,
    }
    for name, value in told.items():
        if value is not None and value is not False:
            yield f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _gpus(plan: Plan, asked: Slurm) -> str | None:
    """The GPUs of a node, with their type where one is asked for."""
    if not plan.gpus.count:
        return None
    return f"{asked.gpu_type}:{plan.gpus.count}" if asked.gpu_type else str(plan.gpus.count)


def _nodes(plan: Plan) -> str:
    """How many; Slurm gives any number of a range. Raises UsageError where not all will do."""
    if plan.spare:
        return f"{plan.nodes}-{plan.nodes + plan.spare}"
    if not plan.fewer:
        return str(plan.nodes)
    least = plan.fewer[0]
    if without := {*range(least, plan.nodes)} - {*plan.fewer}:
        raise UsageError(
            f"nodes.min: Slurm may give {min(without)} nodes, which this file doesn't fit",
            f"Set it to {max(without) + 1}, or another training.global_batch_size.",
        )
    return f"{least}-{plan.nodes}"


def _of_node(plan: Plan, asked: Slurm) -> dict[str, object]:
    """What the template needs for a node, by the kind of its container."""
    in_engine, bare = asked.container in ENGINES, asked.container == "none"
    image = asked.image or plan.image
    layers = [asked.container, "image", "inspect", "--format={{.RootFS.Layers}}", image]
    start, paths = shlex.join(plan.argv[:2]), _paths(plan, asked)
    return {
        "variables": [
            (name, shlex.quote(value))
            for name, value in ([] if in_engine else plan.env)
            if value is not None and not is_secret(name, value)
        ],
        "secret_files": [(name, shlex.quote(at)) for name, at in plan.secrets] if bare else [],
        "workdir": shlex.quote(plan.workdir) if bare and plan.workdir else "",
        "needs": _wrapped([*(["--needs", *paths] if paths else []), "--"]),
        "start": start,
        "command": _wrapped(_engine(plan, asked) if in_engine else shown.by_name(plan.argv)),
        "report": shlex.quote(f"{start} stall.stall"),
        "name": shlex.quote(f"{docker_request.container_name(plan)}-node-"),
        "payload": shlex.quote(plan.payload_mount.source) if plan.payload_mount else "",
        "image_variable": IMAGE,
        "layers": shlex.join(layers) if plan.nodes > 1 else "",
        "infiniband": INFINIBAND,
        "apptainer": _wrapped(_apptainer(plan, asked)),
    }


def _wrapped(words: list[str]) -> str:
    """A command as a shell has it, in lines that people read: an option begins with its value."""
    lines = [""]
    for option in _options_of(words):
        told = shown.joined(option)
        if lines[-1] and len(lines[-1]) + len(told) > WIDTH:
            lines.append("")
        lines[-1] += f" {told}" if lines[-1] else told
    return " \\\n    ".join(lines)


def _options_of(words: list[str]) -> Iterator[list[str]]:
    """The words in groups, of which each begins with an option."""
    group = list[str]()
    for word in words:
        if group and word.startswith("-"):
            yield group
            group = []
        group.append(word)
    yield group


def _saved(plan: Plan, asked: Slurm) -> str:
    """The folder that a job which starts again goes on from. Raises UsageError."""
    if asked.is_chain and not plan.options.get("save"):
        raise UsageError(
            "slurm.array: with %1, each job continues from the previous job's checkpoint",
            "Set checkpoint.save, or leave out %1 for separate runs.",
        )
    key = "slurm.array" if asked.is_chain else "slurm.requeue"
    return shown.goes_on_from(plan, key) if asked.requeue or asked.is_chain else ""


def _engine(plan: Plan, asked: Slurm) -> list[str]:
    """`docker run` or `podman run`, with the GPUs and the place that Slurm gave to the task."""
    told = [f"PET_{one}" for one in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")]
    told += [IMAGE] if plan.nodes > 1 else []
    env = (*plan.env, *((name, None) for name in told))  # by name: their values are the node's
    labels = tuple(one for one in plan.labels if one[0] != f"{LABEL}run")  # it is no run itself
    known = replace(plan.without_payload(), image=asked.image or plan.image, labels=labels)
    argv = docker_request.command(replace(known, gpus=Gpus(0), env=env))
    words = [asked.container, *argv[1:]]
    words[argv.index("--name") + 1] = shown.Variable('"$name"')
    if plan.payload_mount:
        target = plan.payload_mount.target
        mount = f'--mount "type=bind,source=$payload/launcher,target={target},readonly"'
        words.insert(2, shown.Variable(mount))
    if plan.own_devices:
        words.insert(2, shown.Variable('"${devices[@]}"'))
    if plan.gpus.count:
        words.insert(2, shown.Variable(r'''--gpus "\"device=$CUDA_VISIBLE_DEVICES\""'''))
    return words


def _apptainer(plan: Plan, asked: Slurm) -> list[str]:
    """What has a node's shell in the image; the user's home and /tmp are there too."""
    argv = ["apptainer", "exec", *(["--nv"] if plan.gpus.count else [])]
    argv += [f"--pwd={plan.workdir or '/'}"]
    argv += [f"--mount={docker_request.mount_option(mount)}" for mount in plan.mounts]
    folder = shown.Variable('--bind="$folder"')
    return [*argv, folder, asked.image or f"docker://{plan.image}", "bash", "-c", "node"]


def _container_here() -> str:
    """What the image can be run in on this cluster. Raises UsageError."""
    with suppress(EngineError):
        if "--container-image" in slurm_queue.ask("srun", "--help"):
            return "pyxis"
    if shutil.which("apptainer"):
        return "apptainer"
    raise UsageError(
        "slurm.container isn't set, and neither pyxis nor Apptainer is here to run the image",
        "Set it. `slurm: {container: none}` runs with the nodes' own python3, torch and Megatron.",
    )


def _srun(plan: Plan, asked: Slurm) -> str:
    """What starts the nodes; of their output each has its own files."""
    words = ["srun", "--kill-on-bad-exit=0", "--open-mode=append"]
    words += ["--ntasks-per-node=1"] if plan.fewer or plan.spare else []
    words += ["--wait=0"] if plan.spare else []  # a spare one's end is no reason to end others
    if asked.container == "pyxis":
        binds = [f"{m.source}:{m.target}{':ro' * m.read_only}" for m in plan.mounts]
        binds += [one if ":" in one else f"{one}:{one}" for one in plan.devices]
        words += [f"--container-image={asked.image or plan.image}", "--no-container-mount-home"]
        words += [f"--container-workdir={plan.workdir}"] if plan.workdir else []
        mounts = shlex.quote("--container-mounts=" + ",".join([*binds, ""]))
        words.append(shown.Variable(f'{mounts}"$folder:$folder"'))
    return _wrapped(words)
