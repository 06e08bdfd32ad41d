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

from launcher.agent.ranks import alike
from launcher.base.errors import EngineError, PreflightError, UsageError
from launcher.base.names import LABEL
from launcher.runs.backends import shown
from launcher.runs.backends.docker import docker_request
from launcher.runs.backends.group import SETTLE_SECONDS
from launcher.runs.backends.slurm import slurm_queue
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.secrets import is_secret
from launcher.runs.runfile.values import Gpus

SCRIPT, OUTPUT = "job.sh", "slurm.out"
ENGINES = ("docker", "podman")
INSIDE = ("pyxis", "apptainer")
"""With those a node's shell is in the container: srun starts it there."""

SAME = ("time", "partition", "account", "qos", "constraint", "reservation", "dependency")
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
    """A job to submit: its script, and where that is written.

    `requeue` is whether Slurm may start it again by itself.
    """

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
    """The job of `plan`, whose files lie in `folder` on a disk that all nodes see.

    sizes: of the nodes, where Slurm says them
    """
    goes_on = asked.requeue or asked.is_chain
    again, restart = CHAIN if asked.is_chain else REQUEUE
    node = _apptainer(plan, asked) if asked.container == "apptainer" else "node"
    words = {
        "options": "".join(f"#SBATCH {one}\n" for one in _options(plan, asked, folder, sizes)),
        "secrets": shown.wanted(shown.secrets(plan)),
        "folder": shlex.quote(str(folder)),
        "restart": restart,
        "paths": shlex.join(_paths(plan, asked)),
        "unable": str(PreflightError.exit_code),
        "setup": "".join(f"  {line}\n" for line in _setup(plan, asked)),
        "settle": str(round(2 * SETTLE_SECONDS)),
        **_node(plan, asked),
        "start": f"{_srun(plan, asked)} bash -c {shlex.quote(node)}",
        "again": again,
    }
    parts = ["head", "node", "start", *["again"] * goes_on, *["others"] * asked.is_chain, "end"]
    return SlurmRequest(_filled(parts, words), str(folder / SCRIPT), goes_on)


def array(
    plans: Mapping[int, Plan], asked: Slurm, runs: Path, sizes: Iterable[NodeSize] = ()
) -> str:
    """The script of an array, whose tasks are runs: each has its own script in its own folder."""
    first = next(iter(plans.values()))
    own = {"job-name": first.name, "output": os.devnull, "array": asked.array}
    tasks = ""
    for number, plan in plans.items():
        script, output = (shlex.quote(str(runs / plan.run / name)) for name in (SCRIPT, OUTPUT))
        tasks += f"{number}) exec {script} >> {output} 2>&1;;\n"
    options = "".join(f"#SBATCH {one}\n" for one in _options(first, asked, runs, sizes, **own))
    return _filled(["array"], {"options": options, "tasks": tasks})


def _filled(parts: Iterable[str], words: Mapping[str, str]) -> str:
    """Those parts of slurm.sh, with `words` for its names."""
    text = Path(__file__).with_name("slurm.sh").read_text("utf-8")
    _, *found = re.split(r"^### (\w+)\n", re.sub(r"^## .*\n", "", text, flags=re.M), flags=re.M)
    known = dict(zip(found[::2], found[1::2], strict=True))
    script = "".join(known[name] for name in parts)
    return re.sub(r"^@(\w+)\n|@(\w+)", lambda m: words[m[1] or m[2]], script, flags=re.M)


def _paths(plan: Plan, asked: Slurm) -> list[str]:
    """What has to be there on a node: what is mounted, or without a container is run."""
    if asked.container in INSIDE:
        return []
    paths = [mount.source for mount in plan.mounts]
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
    told: dict[str, object] = {
        "job-name": docker_request.container_name(plan),
        "nodes": _nodes(plan),
        "ntasks-per-node": None if plan.fewer else 1,  # of a range it would take the fewest
        "gpus-per-node": plan.gpus.count or None,
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


def _nodes(plan: Plan) -> str:
    """How many; Slurm gives any number of a range. Raises UsageError where not all will do."""
    if not plan.fewer:
        return str(plan.nodes)
    least = plan.fewer[0]
    if without := {*range(least, plan.nodes)} - {*plan.fewer}:
        raise UsageError(
            f"nodes.min: Slurm may give {min(without)} nodes, which this file doesn't fit",
            f"Set it to {max(without) + 1}, or another training.global_batch_size.",
        )
    return f"{least}-{plan.nodes}"


def _setup(plan: Plan, asked: Slurm) -> Iterator[str]:
    """What a node does before the command: the site's own lines, and the variables."""
    if asked.container == "apptainer":  # what comes before it, it is started by
        yield "export PYTHONNOUSERSITE=1"
    else:
        yield from (asked.setup or "").splitlines()
    if asked.container in ENGINES:
        if plan.payload:  # root, as whom an engine may read, sees nothing of a user's disk by NFS
            yield 'local payload; payload=$(mktemp -d) && chmod 755 "$payload" &&'
            copy = shlex.join(["cp", "-R", "--", plan.payload.source])
            yield f'  {copy} "$payload/" || code={PreflightError.exit_code}'
        if plan.nodes > 1:
            show = [asked.container, "image", "inspect", "--format={{.RootFS.Layers}}"]
            show += [asked.image or plan.image]
            yield f'export {alike.IMAGE}="$({shlex.join(show)} 2>/dev/null)"'
        return
    for name, value in plan.env:
        if value is not None and not is_secret(name, value):
            yield f"export {name}={shlex.quote(value)}"
    if asked.container == "none":
        yield from (f'export {name}="$(cat -- {shlex.quote(at)})"' for name, at in plan.secrets)
        if plan.workdir:
            yield f"cd -- {shlex.quote(plan.workdir)} || code={PreflightError.exit_code}"


def _node(plan: Plan, asked: Slurm) -> dict[str, str]:
    """What runs on a node, what ends its ranks, and what writes where they are, as a tar.

    As a shell has it. A container outlives the program that started it.
    """
    again, kill, report = (
        _again(plan, asked),
        'kill -KILL "$pid"',
        shlex.join([*plan.argv[:2], "stall.stall"]),
    )
    if asked.container not in ENGINES:
        words = shown.joined(shown.by_name(plan.argv))
        told = {"command": words + again, "kill": kill, "report": f'{report} "$pid"'}
        return told | {"tidy": ""}
    name = shlex.quote(f"{docker_request.container_name(plan)}-node-") + '"$SLURM_NODEID"'
    return {
        "command": _engine(plan, asked, name) + again,
        "tidy": '  [ -z "$payload" ] || rm -r -- "$payload"\n',
        "kill": f"{asked.container} rm --force {name}; {kill}",
        "report": f"{asked.container} exec {name} {report}",
    }


def _again(plan: Plan, asked: Slurm) -> str:
    """Words by which a job that starts again goes on from what it saved. Raises UsageError."""
    if asked.is_chain and not plan.options.get("save"):
        raise UsageError(
            "slurm.array: with %1 each job goes on from what the one before saved",
            "Set checkpoint.save; or without %1 each is a run of its own.",
        )
    key = "slurm.array" if asked.is_chain else "slurm.requeue"
    return shown.going_on(plan, key, "restart") if asked.requeue or asked.is_chain else ""


def _engine(plan: Plan, asked: Slurm, name: str) -> str:
    """`docker run` or `podman run`, with the GPUs and the place that Slurm gave to the task."""
    told = [f"PET_{one}" for one in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")]
    told += [alike.IMAGE] if plan.nodes > 1 else []
    env = (*plan.env, *((name, None) for name in told))  # by name: their values are the node's
    labels = tuple(one for one in plan.labels if one[0] != f"{LABEL}run")  # it is no run itself
    known = replace(plan.without_payload(), image=asked.image or plan.image, labels=labels)
    argv = docker_request.command(replace(known, gpus=Gpus(0), env=env))
    words = [asked.container, *argv[1:]]
    words[argv.index("--name") + 1] = shown.Variable(name)
    if plan.payload:
        target = plan.payload.target
        mount = f'--mount "type=bind,source=$payload/launcher,target={target},readonly"'
        words.insert(2, shown.Variable(mount))
    if plan.gpus.count:
        words.insert(2, shown.Variable(r'''--gpus "\"device=$CUDA_VISIBLE_DEVICES\""'''))
    return shown.joined(words)


def _apptainer(plan: Plan, asked: Slurm) -> str:
    """What a node does to have its shell in the image; the user's home and /tmp are there too.

    Of the node's own variables those that lead Python to other packages stay outside.
    """
    argv = ["apptainer", "exec", *(["--nv"] if plan.gpus.count else [])]
    argv += [f"--pwd={plan.workdir or '/'}"]
    argv += [f"--mount={docker_request.mount_option(mount)}" for mount in plan.mounts]
    image = shlex.quote(asked.image or f"docker://{plan.image}")
    lines = ["trap : TERM", *(asked.setup or "").splitlines(), "unset PYTHONPATH PYTHONHOME"]
    lines += [f'{shlex.join(argv)} --bind="$folder" {image} bash -c node || over "$?"']
    return "\n".join(lines)


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
    """Starts the nodes; of their output each has its own files."""
    words = ["srun", "--kill-on-bad-exit=0", "--open-mode=append"]
    words += ["--ntasks-per-node=1"] if plan.fewer else []
    line = shlex.join(words)
    if asked.container == "pyxis":
        binds = [f"{m.source}:{m.target}{':ro' * m.read_only}" for m in plan.mounts]
        words = [f"--container-image={asked.image or plan.image}", "--no-container-mount-home"]
        words += [f"--container-workdir={plan.workdir}"] if plan.workdir else []
        words += ["--container-mounts=" + ",".join([*binds, ""])]
        line += f' {shlex.join(words)}"$folder:$folder"'
    return f'{line} --output="$folder/node-%n.out" --error="$folder/node-%n.err"'
