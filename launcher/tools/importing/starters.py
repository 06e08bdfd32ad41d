"""What stands around a start: Slurm, PBS, MPI and containers, with their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from launcher.base.errors import UsageError
from launcher.base.yamlfile import printable
from launcher.runs.runfile.values import parse_gpus
from launcher.tools.importing.commands import Command, Unfollowed, Word

SHORT = {
    "slurm": "N=nodes n=ntasks c=cpus-per-task t=time p=partition A=account q=qos C=constraint "
    "d=dependency a=array J=job-name o=output e=error w=nodelist x=exclude G=gpus l=label D=chdir "
    "K=kill-on-bad-exit u=unbuffered W=wait m=distribution i=input",
    "docker": "v=volume e=env w=workdir u=user i=interactive t=tty d=detach h=hostname p=publish "
    "it=interactive ti=interactive itd=interactive",
    "mpirun": "n=np c=np H=host N=npernode x=x",
    "apptainer": "B=bind c=contain C=containall e=cleanenv",
}
FLAGS = {
    "slurm": "exclusive label unbuffered requeue no-requeue overlap exact overcommit hold verbose "
    "quiet kill-on-bad-exit no-kill contiguous interactive pty container-remap-root parsable wait "
    "no-container-entrypoint container-mount-home no-container-mount-home container-writable "
    "use-min-nodes container-readonly spread-job",
    "docker": "detach init interactive privileged rm tty read-only no-healthcheck P",
    "mpirun": "allow-run-as-root oversubscribe tag-output nooversubscribe report-bindings q v "
    "display-map use-hwthread-cpus prefix-output",
    "apptainer": "nv rocm contain containall cleanenv no-home fakeroot writable-tmpfs writable "
    "compat nvccli userns no-mount-home",
}
"""Options without a value; what isn't here takes the next word, where that is no option."""
ITSELF = {
    "slurm": "nodes ntasks ntasks-per-node gpus-per-node gres job-name output error open-mode "
    "label unbuffered jobid kill-on-bad-exit wait overlap exact pty verbose quiet gpus parsable "
    "container-image container-mounts container-name",
    "docker": "detach init interactive rm tty name ipc ulimit shm-size gpus runtime hostname",
    "mpirun": "np npernode host hostfile machinefile x allow-run-as-root tag-output map-by ppr "
    "oversubscribe report-bindings display-map prefix-output hosts ppn",
    "apptainer": "nv bind env",
}
"""What the launcher does itself, or what is carried over elsewhere."""
HOST_NETWORK = (("network", "host"), ("net", "host"))
VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NPROCS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "tasks",
    "SLURM_TASKS_PER_NODE": "tasks",
    "SLURM_CPUS_PER_TASK": "cpus",
    "SLURM_GPUS_PER_NODE": "gpus",
    "SLURM_GPUS_ON_NODE": "gpus",
}
"""What Slurm sets in a job (https://slurm.schedmd.com/sbatch.html, output variables)."""
FAMILIES = {
    "srun": "slurm",
    "sbatch": "slurm",
    "salloc": "slurm",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "docker": "docker",
    "podman": "docker",
    "apptainer": "apptainer",
    "singularity": "apptainer",
}


@dataclass(frozen=True)
class Mount:
    """A folder of the host in a container."""

    source: str
    target: str
    read_only: bool = False


@dataclass
class Around:
    """What the starters ask for: counts, Slurm's options, and the container."""

    counts: dict[str, Word] = field(default_factory=dict)
    slurm: dict[str, Word] = field(default_factory=dict)
    container: str = ""
    image: Word = field(default_factory=lambda: Word("", 0))
    gpus: str = ""
    mounts: list[Mount] = field(default_factory=list)
    env: dict[str, Word] = field(default_factory=dict)
    resources: dict[str, Word] = field(default_factory=dict)
    told: list[Unfollowed] = field(default_factory=list)

    def tell(self, line: int, what: str) -> None:
        self.told.append(Unfollowed(line, what))

    def outside(self, path: str) -> str:
        """The host's path of one in the container; one that isn't mounted stays as it is."""
        for mount in sorted(self.mounts, key=lambda mount: -len(mount.target)):
            if path == mount.target or path.startswith(f"{mount.target.rstrip('/')}/"):
                return mount.source + path[len(mount.target) :]
        return path


def batch_lines(text: str) -> Around:
    """What the #SBATCH and #PBS lines up to the first command ask for."""
    found = Around()
    for line, row in enumerate(text.splitlines(), 1):
        if row.strip() and not row.startswith("#"):
            break
        match = re.match(r"#(SBATCH|PBS|\$|BSUB)\s+(\S.*)", row)
        if not match:
            continue
        words = match[2].split()
        with suppress(ValueError):  # a quote that isn't closed
            words = shlex.split(match[2], comments=True)
        if match[1] == "SBATCH":
            _slurm(found, tuple(Word(word, line) for word in words), "#SBATCH")
        elif match[1] == "PBS":
            _pbs(found, match[2], line)
        else:
            found.tell(line, f"{printable(row.strip())}: not carried over")
    return found


def variables(counts: Mapping[str, int]) -> dict[str, str]:
    """What Slurm sets in a job that asks for these counts."""
    known, nodes = dict(counts), counts.get("nodes", 1)
    if "tasks" in known:
        known.setdefault("ntasks", nodes * known["tasks"])
    elif "ntasks" in known:
        known["tasks"] = -(-known["ntasks"] // nodes)
    return {name: str(known[key]) for name, key in VARIABLES.items() if key in known}


def parse_around(asked: Around, commands: Sequence[Command]) -> Around:
    """What the batch lines and the commands around a start ask for; `asked` is added to."""
    for command in commands:
        family = FAMILIES.get(command.name, "")
        words = command.words[1:]
        if family == "slurm":
            _slurm(asked, words, command.name)
        elif family == "mpirun":
            _mpirun(asked, words)
        elif family == "docker" and words and words[0].text in ("run", "exec"):
            _docker(asked, words[1:], command.name)
        elif family == "apptainer" and words and words[0].text in ("exec", "run", "shell"):
            _apptainer(asked, words[1:])
        elif command.name not in ("bash", "sh", "env", "sudo", "exec", "nohup", "time"):
            text = printable(" ".join(word.text for word in command.words[:2]))
            asked.tell(command.line, f"{text} …: how it starts the program isn't carried over")
    return asked


def options(family: str, words: Sequence[Word]) -> Iterator[tuple[str, Word]]:
    """Each option by its long name with its value; what follows them under the name "", once."""
    short = dict(one.split("=") for one in SHORT[family].split())
    flags = FLAGS[family].split()
    at = 0
    while at < len(words):
        word = words[at]
        text = word.text
        at += 1
        if not text.startswith("-") or text == "-":
            yield "", word
            return
        name, equals, value = text.lstrip("-").partition("=")
        if not text.startswith("--") and family == "slurm" and len(text) > 2:
            name, equals, value = text[1], "=", text[2:].removeprefix("=")
        name = short.get(name, name)
        if equals:
            yield name, Word(value, word.line, word.unknown)
        elif name in flags or at == len(words) or words[at].text.startswith("-"):
            yield name, Word("", word.line, word.unknown)
        else:
            yield name, words[at]
            at += 1


def _slurm(found: Around, words: Sequence[Word], named: str) -> None:
    """The options of sbatch or srun."""
    for name, word in options("slurm", words):
        number = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?(\d+)", word.text)
        if not name:
            return
        if name in ("gres", "gpus-per-node"):
            _gres(found, name, word, named)
        elif name in (
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "gpus",
            "cpus-per-task",
        ):
            key = {"ntasks-per-node": "tasks", "cpus-per-task": "cpus", "gpus": "all-gpus"}
            if number or word.unknown:
                text = number[1] if number else word.text
                found.counts[key.get(name, name)] = Word(text, word.line, word.unknown)
            else:
                found.tell(word.line, f"{named} --{name}={printable(word.text)}: not carried over")
            if name == "cpus-per-task":
                found.slurm[name] = word
        elif name == "container-image":
            found.container, found.image = "pyxis", word
        elif name == "container-mounts":
            _mounts(found, word.text.split(","), word, "pyxis's mounts")
        elif name == "gpus-per-task":
            found.tell(word.line, f"{named} --{name}={printable(word.text)}: not carried over")
        elif name == "mem" and (size := re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", word.text)):
            found.resources["memory"] = Word(f"{size[1]}{size[2] or 'M'}", word.line)
        elif name == "job-name":
            found.slurm["name"] = word
        elif name == "signal":
            seconds = re.search(r"@(\d+)$", word.text)
            found.slurm[name] = Word(seconds[1] if seconds else word.text, word.line)
        elif name not in ITSELF["slurm"].split():
            found.slurm[name] = word


def _gres(found: Around, name: str, word: Word, named: str) -> None:
    pattern = (
        r"gpu(?::([A-Za-z][\w.-]*))?(?::(\d+))?"
        if name == "gres"
        else r"(?:([A-Za-z][\w.-]*):)?(\d+)"
    )
    match = re.fullmatch(pattern, word.text)
    if word.unknown or not match:
        found.tell(word.line, f"{named} --{name}={printable(word.text)}: not carried over")
        return
    found.counts["gpus"] = Word(match[2] or "1", word.line)
    if match[1]:
        found.slurm["gpu_type"] = Word(match[1], word.line)


def _pbs(found: Around, text: str, line: int) -> None:
    """A #PBS line: select=32:ngpus=8, nodes=4:ppn=8:gpus=8, walltime=…, -N, -q, -A."""
    for name, key in (("-q", "partition"), ("-A", "account"), ("-P", "account"), ("-N", "name")):
        if match := re.match(rf"{name}\s+(\S+)", text):
            if name == "-N":
                found.slurm["name"] = Word(match[1], line)
            else:
                found.tell(line, f"#PBS {text}: with Slurm it is slurm.{key}")
            return
    known = re.sub(r"(?:rt_\w+|select|nodes)=(\d+)|ngpus=(\d+)|gpus=(\d+)|mpiprocs=(\d+)", "", text)
    for pattern, key in (
        (r"(?:select|nodes)=(\d+)", "nodes"),
        (r"gpus=(\d+)", "gpus"),
        (r"mpiprocs=(\d+)", "tasks"),
    ):
        if match := re.search(pattern, text):
            found.counts[key] = Word(match[1], line)
    if re.search(r"\w", known.removeprefix("-l").strip(" :,")):
        found.tell(line, f"#PBS {printable(text)}: not carried over but for its counts")


def _mpirun(found: Around, words: Sequence[Word]) -> None:
    for name, word in options("mpirun", words):
        if not name:
            return
        if name == "np":
            found.counts["ntasks"] = word
        elif name in ("npernode", "ppn", "perhost"):
            found.counts["tasks"] = word
        elif name == "map-by" and (per := re.match(r"ppr:(\d+):node", word.text)):
            found.counts["tasks"] = Word(per[1], word.line)
        elif name in ("host", "hosts"):
            hosts = word.text.split(",")
            found.counts.setdefault("nodes", Word(str(len(hosts)), word.line, word.unknown))
            found.tell(word.line, f"mpirun's hosts {printable(word.text)}: not carried over")
        elif name == "x":
            key, equals, text = word.text.partition("=")
            if equals:
                found.env[key] = Word(text, word.line, word.unknown)
        elif name not in ITSELF["mpirun"].split():
            found.tell(
                word.line, f"mpirun's {name} {printable(word.text)}".rstrip() + ": not carried over"
            )


def _docker(found: Around, words: Sequence[Word], named: str) -> None:
    """What stands behind `docker run`, up to the image."""
    found.container = named
    for name, word in options("docker", words):
        if not name:
            found.image = word
        elif (
            word.unknown and name not in ITSELF["docker"].split() and name not in ("volume", "env")
        ):
            found.tell(word.line, f"{word.unknown}: {named}'s {name} isn't carried over")
        elif name in ("volume", "v") and ":" in word.text:
            _mounts(found, [word.text], word, f"{named}'s v")
        elif name == "mount":
            parts = dict(part.partition("=")[::2] for part in word.text.split(","))
            source, target = (
                parts.get(a) or parts.get(b) for a, b in (("source", "src"), ("target", "dst"))
            )
            mounts = [f"{source}:{target}{':ro' if 'readonly' in parts else ''}"]
            _mounts(found, mounts if source and target else [], word, f"{named}'s mount")
        elif name == "env":
            key, equals, text = word.text.partition("=")
            if equals:
                found.env[key] = Word(text, word.line, word.unknown)
        elif name == "gpus" and _is_gpus(word.text.strip("\"'")):
            found.gpus = word.text.strip("\"'")
        elif name == "memory":
            found.resources["memory"] = word
        elif name in ("device", "cap-add"):
            found.resources.setdefault(
                {"device": "devices"}.get(name, "cap_add"), Word("", word.line)
            )
            key = {"device": "devices"}.get(name, "cap_add")
            before = found.resources[key].text
            found.resources[key] = Word(f"{before} {word.text}".strip(), word.line)
        elif name == "workdir":
            found.resources["workdir"] = word
        elif name == "gpus" or (
            name not in ITSELF["docker"].split() and (name, word.text) not in HOST_NETWORK
        ):
            asked = printable(f"{named}'s {name} {word.text}".rstrip())
            found.tell(word.line, f"{asked}: not carried over")


def _apptainer(found: Around, words: Sequence[Word]) -> None:
    """What stands behind `apptainer exec`, up to the image."""
    found.container = "apptainer"
    for name, word in options("apptainer", words):
        if not name:
            found.image = word
        elif name == "bind":
            _mounts(found, word.text.split(","), word, "apptainer's bind")
        elif name == "env":
            for part in word.text.split(","):
                key, _, text = part.partition("=")
                found.env[key] = Word(text, word.line, word.unknown)
        elif name == "pwd":
            found.resources["workdir"] = word
        elif name not in ITSELF["apptainer"].split():
            found.tell(
                word.line,
                f"apptainer's {name} {printable(word.text)}".rstrip() + ": not carried over",
            )


def _mounts(found: Around, texts: list[str], word: Word, what: str) -> None:
    """Mounts as outer:inner:mode; one that depends on what isn't given is told."""
    if word.unknown:
        found.tell(word.line, f"{word.unknown}: {what} isn't carried over")
        return
    for text in texts:
        outer, colon, rest = text.partition(":")
        inner, _, mode = rest.partition(":")
        inner = inner if colon else outer
        if not inner.startswith("/"):
            found.tell(word.line, f"{what} {printable(text)}: not carried over")
            continue
        found.mounts.append(Mount(outer.rstrip("/") or "/", inner.rstrip("/") or "/", mode == "ro"))


def _is_gpus(text: str) -> bool:
    try:
        parse_gpus(text)
    except UsageError:
        return False
    return True


def exported(command: Command, around: Sequence[Command]) -> Mapping[str, Word]:
    """The variables that the ranks have from the script: within a container, what is set inside."""
    for outer in around:
        if FAMILIES.get(outer.name) == "docker":
            return {n: w for n, w in command.env.items() if outer.env.get(n) != w}
    return command.env
