"""Carries a plan out as a Slurm job: one task a node, by a batch script and files on a shared disk.

Nothing of ours stays on the cluster: `sbatch`, `squeue`, `scontrol` and `scancel` are all that is
asked, so sites without accounting will do (https://slurm.schedmd.com/sbatch.html).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.backends import docker, host, shown
from launcher.backends.group import SETTLE_SECONDS
from launcher.backends.oci_bundle import ENVIRONMENT
from launcher.errors import PreflightError, UsageError
from launcher.plan.config import Slurm
from launcher.plan.image import Facts
from launcher.plan.mounts import Mount
from launcher.plan.plan import Plan
from launcher.plan.secrets import is_secret, redacted
from launcher.settings import ROOT, settings
from launcher.train.ranks import alike

if TYPE_CHECKING:
    from launcher.plan.config import RunConfig
    from launcher.plan.job import Job

SCRIPT, OUTPUT, BUNDLE = "job.sh", "slurm.out", "bundle"
ENGINES = ("docker", "podman")
INSIDE = ("pyxis", "oci")
"""With those a node's shell is in the container: srun starts it there."""

PORTS = (20000, 10000)
"""The first and the number of those from which a job takes one by its id, below the ephemeral."""

HEAD = r"""
set -u
folder={folder}
restart=${{SLURM_RESTART_COUNT:-0}}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export folder restart PET_NNODES="$SLURM_JOB_NUM_NODES" PET_MASTER_ADDR="${{address:-$first}}"
export PET_MASTER_PORT={port}
for path in "$folder/code" "$folder"/node-*.end; do
  [ ! -e "$path" ] || : > "$path"
done
"""

NODE = r"""
node() {{
  local rank="${{LAUNCHER_NODE:-$SLURM_NODEID}}"
  local me="$folder/node-$rank" pid asked= question= answered= failed=0 code=0 path
  : > "$me.end"
  for path in {paths}; do
    [ -e "$path" ] && continue
    echo "launcher: there is no $path on $SLURMD_NODENAME: let it be on a disk that all see" >&2
    code={unable}
  done
  export PET_NODE_RANK="$rank"
{setup}  if [ "$code" -eq 0 ]; then
    {command} &
  else
    (exit "$code") &
  fi
  pid=$!
  trap : TERM
  while kill -0 "$pid" 2>/dev/null; do
    if [ -z "$asked" ] && {{ [ -e "$folder/stop" ] || [ -e "$folder/limit-$restart" ]; }}; then
      asked=1
      kill -TERM "$pid"
    elif [ -e "$folder/failed-$restart" ] && [ $((failed += 1)) -ge {settle} ]; then
      {kill}
    elif [ -e "$folder/ask" ] && read -r question < "$folder/ask" &&
      [ "$question" != "$answered" ]; then
      answered=$question
      {{ {report} > "$me.part"; mv -f "$me.part" "$me.$question.tar"; }} &
    fi
    sleep 0.5
  done
  {{ wait "$pid"; }} 2>/dev/null
  code=$?
  [ "$code" -eq 0 ] || : > "$folder/failed-$restart"
  echo "$code $(date +%s.%N)" > "$me.end"
  return "$code"
}}
export -f node
"""
"""What a node does. It asks the program alone to stop: scancel's signals reach all processes, those
that load the data too, without which nothing is saved. Once a node has failed, the others have time
to fail by themselves before they are killed."""

STEPS = r"""
nodes() {{
  local number=0 host pids= pid code=0
  for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    export LAUNCHER_NODE=$number
    {srun} --nodes=1 --ntasks=1 --nodelist="$host" bash -c node &
    pids="$pids $!" number=$((number + 1))
  done
  for pid in $pids; do
    wait "$pid" || code=$?
  done
  return "$code"
}}
"""
"""A step for each node: Slurm 22.05 tells a task in an OCI container nothing of its own, not even
which one it is (src/slurmd/slurmstepd/slurmstepd.c makes the container's before)."""

TAIL = r"""
limit=
trap 'limit=1; : > "$folder/limit-$restart"' TERM
{start} &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done
{after}echo "$code" > "$folder/code"
exit "$code"
"""

REQUEUE = r"""if [ -n "$limit" ] && [ "$code" -eq 0 ] && [ ! -e "$folder/stop" ]; then
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
"""


@dataclass(frozen=True)
class Request:
    """A job to submit: its script, and where that is written; an OCI bundle that it is to have.

    `requeue` is whether Slurm may start it again by itself.
    """

    script: str
    path: str
    bundle: str | None = None
    requeue: bool = False


def request(plan: Plan, asked: Slurm, folder: Path) -> Request:
    """The job of `plan`, whose files lie in `folder` on a disk that all nodes see."""
    script = "#!/bin/bash\n" + "".join(f"#SBATCH {one}\n" for one in _options(plan, asked, folder))
    script += shown.wanted(plan.env)
    base, many = PORTS
    port = f'"$(({base} + SLURM_JOB_ID % {many}))"'
    script += HEAD.format(folder=shlex.quote(str(folder)), port=port)
    setup = "".join(f"  {line}\n" for line in _setup(plan, asked))
    script += NODE.format(
        paths=" ".join(shlex.quote(mount.source) for mount in _checked(plan, asked)),
        unable=PreflightError.exit_code,
        setup=setup,
        command=_command(plan, asked),
        settle=round(2 * SETTLE_SECONDS),
        kill=_kill(plan, asked),
        report=_report(plan, asked),
    )
    after = REQUEUE if asked.requeue else ""
    start = f"{_srun(plan, asked)} bash -c node"
    if asked.container == "oci":
        script += STEPS.format(srun=_srun(plan, asked))
        start = "nodes"
    script += TAIL.format(start=start, after=after)
    bundle = asked.image if asked.container == "oci" else None
    return Request(script, str(folder / SCRIPT), bundle, asked.requeue)


def _checked(plan: Plan, asked: Slurm) -> tuple[Mount, ...]:
    """The mounts that a node can look for."""
    return () if asked.container in INSIDE else plan.mounts


def _options(plan: Plan, asked: Slurm, folder: Path) -> Iterator[str]:
    """The options of sbatch, in their long form."""
    told: dict[str, object] = {
        "job-name": docker.container_name(plan),
        "nodes": _nodes(plan),
        "ntasks-per-node": None if plan.fewer else 1,  # of a range it would take the fewest
        "gpus-per-node": plan.gpus.count or None,
        "time": asked.time,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "reservation": asked.reservation,
        "dependency": asked.dependency,
        "mem": plan.memory.upper().removesuffix("B") if plan.memory else None,
        "output": folder / OUTPUT,
        "open-mode": "append",
        "requeue" if asked.requeue else "no-requeue": True,
        "signal": f"B:TERM@{asked.signal}" if asked.signal else None,
        **asked.options,
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
    if asked.container == "oci":
        yield f'. "$folder/{BUNDLE}/{ENVIRONMENT}"'
    yield from (asked.setup or "").splitlines()
    if asked.container in ENGINES:
        if plan.nodes > 1:
            show = [asked.container, "image", "inspect", "--format={{.RootFS.Layers}}"]
            show += [asked.image or plan.image]
            yield f'export {alike.IMAGE}="$({shlex.join(show)} 2>/dev/null)"'
        return
    for name, value in plan.env:
        if value is not None and not is_secret(name, value):
            yield f"export {name}={shlex.quote(value)}"
    if asked.container == "none":
        yield f'export PYTHONPATH={shlex.quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        yield from (f'export {name}="$(cat -- {shlex.quote(at)})"' for name, at in plan.secrets)
        if plan.workdir:
            yield f"cd -- {shlex.quote(plan.workdir)}"


def _command(plan: Plan, asked: Slurm) -> str:
    """What runs on a node, as a shell has it."""
    words = shlex.join(redacted(plan.argv)) + _again(plan, asked)
    if asked.container in ENGINES:
        return _engine(plan, asked) + _again(plan, asked)
    if asked.container == "apptainer":
        binds = [f"--bind={m.source}:{m.target}{':ro' * m.read_only}" for m in plan.mounts]
        gpus = ["--nv"] if plan.gpus.count else []
        where = ["--pwd", plan.workdir] if plan.workdir else []
        argv = ["apptainer", "exec", *gpus, *where, *binds, asked.image or f"docker://{plan.image}"]
        return f"{shlex.join(argv)} {words}"
    return words


def _again(plan: Plan, asked: Slurm) -> str:
    """Words by which a job that was requeued goes on from what it saved. Raises UsageError."""
    return shown.going_on(plan, "slurm.requeue", "restart") if asked.requeue else ""


def _kill(plan: Plan, asked: Slurm) -> str:
    """Ends a node's ranks; a container outlives the program that started it."""
    kill = 'kill -KILL "$pid"'
    if asked.container not in ENGINES:
        return kill
    return f"{asked.container} rm --force {_container(plan)}; {kill}"


def _report(plan: Plan, asked: Slurm) -> str:
    """Asks a node's runner where its ranks are, and writes that as a tar."""
    report = "python3 -m launcher.train.stall.stall"
    if asked.container in ENGINES:
        return f"{asked.container} exec {_container(plan)} {report}"
    return "true" if asked.container == "apptainer" else f'{report} "$pid"'


def _container(plan: Plan) -> str:
    """A node's container, as a shell has it."""
    return shlex.quote(f"{docker.container_name(plan)}-node-") + '"$SLURM_NODEID"'


def _engine(plan: Plan, asked: Slurm) -> str:
    """`docker run` or `podman run`, with the GPUs and the place that Slurm gave to the task."""
    image = asked.image or plan.image
    argv = docker.command(replace(plan, image=image, gpus=replace(plan.gpus, count=0, devices=())))
    argv[0], name = asked.container, argv.index("--name") + 1
    argv[name] += "-node-"
    passed = [f"--env=PET_{one}" for one in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")]
    passed += [f"--env={alike.IMAGE}"] if plan.nodes > 1 else []
    words = [*map(shlex.quote, [*argv[:2], *passed, *argv[2:]])]
    words[name + len(passed)] += '"$SLURM_NODEID"'
    if plan.gpus.count:
        words.insert(2, """--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\"" """.strip())
    return " ".join(words)


def _srun(plan: Plan, asked: Slurm) -> str:
    """Starts the nodes; of their output each has its own files."""
    words = ["srun", "--kill-on-bad-exit=0", "--open-mode=append"]
    words += ["--ntasks-per-node=1"] if plan.fewer else []
    if asked.container == "pyxis":
        binds = [f"{m.source}:{m.target}{':ro' * m.read_only}" for m in plan.mounts]
        words += [f"--container-image={asked.image or plan.image}", "--no-container-mount-home"]
        words += [f"--container-workdir={plan.workdir}"] if plan.workdir else []
        line = shlex.join(words) + " --container-mounts=" + shlex.quote(",".join(binds))
        line += ',"$folder:$folder"' if binds else '"$folder:$folder"'
    elif asked.container == "oci":
        line = f'{shlex.join(words)} --container="$folder/{BUNDLE}"'
    else:
        line = shlex.join(words)
    number = "$number" if asked.container == "oci" else "%n"
    return f'{line} --output="$folder/node-{number}.out" --error="$folder/node-{number}.err"'


def ask(*argv: str, env: Mapping[str, str] | None = None) -> str:
    """What a program of Slurm prints. Raises EngineError where it isn't there or refuses."""
    return host.ask(argv, "Start runs where Slurm is: on a login node.", env=env)


@dataclass(frozen=True)
class SlurmBackend:
    """Submits to the cluster whose programs are on PATH."""

    asked: Slurm = field(default_factory=Slurm)
    name = "slurm"
    every_node = False
    scheduled = True
    shares_files = True

    @property
    def contained(self) -> bool:
        """Whether a run has files and packages of its own, or the nodes' own."""
        return self.asked.container != "none"

    def configured(self, config: RunConfig) -> SlurmBackend:
        """The backend as a run file asks for it."""
        return SlurmBackend(config.slurm)

    def request(self, plan: Plan) -> Request:
        return request(plan, self.asked, settings().runs / plan.run)

    def show(self, plan: Plan) -> str:
        """The script, which `sbatch` takes where its folder has been made."""
        asked = self.request(plan)
        lines = [f"# mkdir -p {shlex.quote(str(Path(asked.path).parent))}; sbatch\n"]
        if asked.bundle:
            lines.append(f"# its {BUNDLE}: {asked.bundle}, with the mounts in its config.json\n")
        return "".join([*lines, asked.script])

    def facts(self, image: str) -> Facts | None:
        """None: what is on the nodes isn't known here. The run file's release counts."""
        return None

    def identity(self, image: str) -> Mapping[str, object]:
        return {"name": self.asked.image or image, "id": f"on the nodes, by {self.asked.container}"}

    def rootless(self) -> bool:
        return self.asked.container in ("podman", "apptainer", "pyxis", "oci")

    def count_gpus(self) -> int | None:
        return None

    def start(self, plan: Plan, *, attach: bool) -> Job:
        from launcher.backends import slurm_job

        if plan.tie:
            raise UsageError("--tie: a Slurm job outlives its launcher", "Set slurm.time instead.")
        return slurm_job.submit(plan, self.request(plan))

    def jobs(self) -> list[Job]:
        from launcher.backends import slurm_job

        return [*slurm_job.jobs()]

    def shell(self, plan: Plan) -> list[str]:
        raise UsageError("a shell on a cluster is Slurm's own", "srun --pty bash")

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        on_a_node = ["srun", f"--jobid={job.handle}", "--overlap", "--nodes=1", "--ntasks=1"]
        return [*on_a_node, *(["--pty"] if terminal else []), *argv]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def backend() -> SlurmBackend:
    """The backend of the cluster that this machine submits to."""
    return SlurmBackend()
