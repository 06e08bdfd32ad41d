"""Runs a script with stand-ins where it can change nothing, within bounds."""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base import files
from launcher.base.errors import LauncherError, UsageError
from launcher.tools.importing import seccomp

STANDIN = Path(__file__).parent / "standin"
FILES = ("driver", "standin", "prelude.sh")
SECONDS, START_SECONDS = 10, 5
"""For a script, and for all that is around it."""
MEMORY = 1_000_000_000
PROCESSES = 300
OUTPUT = 40_000_000
MOST_IMAGES = 12
DISK = 64 * 2**20
SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
INSIDE = "/run/standin"
"""Where the stand-ins lie in a sandbox."""


STANDINS = (
    "srun sbatch salloc mpirun mpiexec torchrun deepspeed accelerate docker podman nerdctl "
    "apptainer singularity enroot ssh pdsh clush nsys ncu numactl ray python python2 python3 "
    "python3.8 python3.9 python3.10 python3.11 python3.12 timeout taskset sudo jsrun flux aprun "
    "nvidia-smi rocm-smi scontrol squeue scancel sacct hostname nproc whoami logname date module "
    "conda mamba source-env pip pip3 uv poetry wget curl git apt apt-get yum dnf rm rmdir mv cp ln "
    "chmod chown dd tar unzip gzip rsync scp make cmake nvcc gcc kill pkill killall sleep mkdir "
    "touch tee wandb huggingface-cli hf aws gsutil s3cmd kubectl systemctl service mount umount "
    "ip ifconfig ibstat modprobe sysctl tmux screen ls find cat jq head tail wc stat grep awk sed "
    "sort cut realpath readlink nc reboot shutdown crontab at"
).split()
"""What has a stand-in: all that starts, copies, removes, or reports on the machine."""


@dataclass(frozen=True)
class ScriptCall:
    """A script with its text, called in `cwd`. `folder` is what it may read beside itself.

    `called` is the text of the scripts beside it that it names.
    """

    text: str
    path: Path
    cwd: Path
    folder: Path
    arguments: tuple[str, ...] = ()
    called: str = ""


@dataclass(frozen=True)
class SandboxOutput:
    """The files that the stand-ins wrote by their names, and why the script was stopped, if so."""

    files: dict[str, bytes]
    stopped: str = ""


class Bubblewrap:
    """Runs scripts by `bwrap`: no network, the host's /usr and the script's folder read-only."""

    def __init__(self, program: str = "bwrap") -> None:
        self.program = program

    def unsupported(self) -> str:
        """Why it can't be used here, "" where it can."""
        if not shutil.which(self.program):
            return "bubblewrap isn't installed"
        if os.uname().machine not in seccomp.NUMBERS:
            return f"no seccomp filter for {os.uname().machine}"
        with _open_bytes(seccomp.program()) as rules:
            done = subprocess.run(
                [*self._walls(), "--seccomp", str(rules), "/bin/bash", "-c", "type timeout tar"],
                env={"PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=False,
                pass_fds=(rules,),
            )
        return done.stderr.strip()[:200] if done.returncode else ""

    def run(self, call: ScriptCall, env: Mapping[str, str]) -> SandboxOutput:
        """The outcome of the call; nothing outside the sandbox is changed."""
        with _open_bytes(seccomp.program()) as rules:
            argv = [*self._walls(), "--ro-bind", str(call.folder), "/run/beside"]
            argv += ["--seccomp", str(rules), "/bin/bash", *_driven(INSIDE, call)]
            places = {"STANDIN_BESIDE": str(call.folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}
            return _bounded(argv, {**env, **_places(INSIDE), **places}, call.text, (rules,))

    def _walls(self) -> list[str]:
        argv = [self.program, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
        argv += ["--cap-drop", "ALL", "--die-with-parent", "--new-session"]
        asked = [self.program, "--version"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        version = [int(part) for part in re.findall(r"\d+", told.stdout)[:2]]
        if version >= [0, 8]:
            argv += ["--disable-userns", "--size", str(DISK)]
        argv += ["--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
        for path in filter(os.path.lexists, SYSTEM):
            linked = os.path.islink(path)
            argv += ["--symlink", os.readlink(path), path] if linked else ["--ro-bind", path, path]
        argv += ["--dir", "/tmp"]  # noqa: S108 - the sandbox's own
        # To the kernel root is root here, too: all of /proc/sys would be its to write.
        argv += ["--proc", "/proc", "--remount-ro", "/proc"]
        return [*argv, "--dev", "/dev", "--remount-ro", "/dev"]


class NoSandbox:
    """Runs scripts on this machine with the stand-ins alone: what has none is run as it stands."""

    def run(self, call: ScriptCall, env: Mapping[str, str]) -> SandboxOutput:
        """The outcome of the call."""
        with tempfile.TemporaryDirectory(prefix="launcher-import-") as folder:
            if call.path.read_text(encoding="utf-8") != call.text:
                call = replace(call, path=Path(folder, "script"))
            places = {
                **_places(folder),
                "STANDIN_RECORDS": f"{folder}/records",
                "STANDIN_TRUST": "1",
                "HOME": f"{folder}/home",
                "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            }
            places |= dict.fromkeys(("STANDIN_PROGRAMS", "STANDIN_WRITTEN"), "")
            argv = ["/bin/bash", *_driven(folder, call)]
            return _bounded(argv, {**env, **places}, call.text)


def _places(folder: str) -> dict[str, str]:
    """The variables by which the stand-ins in a folder find what is theirs."""
    return {"STANDIN_FOLDER": folder, "STANDIN_RECORDS": "/run/records"}


def _driven(folder: str, call: ScriptCall) -> list[str]:
    """bash's words that unpack the stand-ins from stdin into a folder, and run the script."""
    start = 'mkdir -p "$0" && cd "$0" && tar xf - && exec ./driver "$@"'
    return ["-pc", start, folder, str(SECONDS), str(call.cwd), str(call.path), *call.arguments]


def find_sandbox(*, trust: bool = False) -> Bubblewrap | NoSandbox | Container:
    """The sandbox that works here; with `trust`, none. Raises UsageError where there is none."""
    if trust:
        return NoSandbox()
    reasons = []
    for make in (Bubblewrap, _fetched, Container):
        try:
            box = make()
            why = box.unsupported()
        except LauncherError as error:
            why = error.problem
        if not why:
            return box
        reasons.append(why)
    raise UsageError(
        f"a script is run in a sandbox, and there is none: {'; '.join(dict.fromkeys(reasons))}",
        "Install bubblewrap, or read the script and use --trust: what has no stand-in is then run.",
    )


def _fetched() -> Bubblewrap:
    """bubblewrap from the distribution's package, in the cache: nothing is installed."""
    from launcher.base.settings import settings
    from launcher.images.engine.private import packages

    folder = packages.unpack(settings().cache / "bubblewrap", ["bubblewrap"])
    return Bubblewrap(str(folder / "usr/bin/bwrap"))


class Container:
    """Runs scripts in a container of the engine: an image of this machine that has bash."""

    def __init__(self) -> None:
        self.image = ""

    def unsupported(self) -> str:
        """Why it can't be used here, "" where it can."""
        if not shutil.which("docker"):
            return "no docker"
        listed = subprocess.run(
            ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode:
            return "no container engine answers"
        having = re.compile(r"pytorch|megatron|debian|ubuntu|python|launchpad")
        for image in [one for one in listed.stdout.split() if having.search(one)][:MOST_IMAGES]:
            tried = ["docker", "run", "--rm", "--network", "none", "--pull", "never"]
            tried += ["--entrypoint", "/bin/bash", image, "-pc", "type tar timeout find"]
            if not subprocess.run(tried, capture_output=True, check=False).returncode:
                self.image = image
                return ""
        return "no image with bash is here"

    def run(self, call: ScriptCall, env: Mapping[str, str]) -> SandboxOutput:
        """The outcome of the call; what lies beside the script is seen where the engine sees it."""
        places = {**_places(INSIDE), "STANDIN_PROGRAMS": "", "STANDIN_BESIDE": str(call.folder)}
        roots = {f"/{Path(path).parts[1]}" for path in (call.cwd, call.folder) if path != Path("/")}
        writable = {"/run", "/tmp", "/home", *roots}  # noqa: S108 - the container's own
        name = f"launcher-import-{uuid.uuid4().hex}"
        argv = "docker run --rm --interactive --network none --log-driver none --read-only".split()
        argv += ["--name", name]
        user = f"{os.getuid()}:{os.getgid()}" if os.getuid() else "65534:65534"
        argv += ["--user", user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--memory", str(MEMORY), "--pids-limit", str(PROCESSES), "--pull", "never"]
        owner = "uid={},gid={}".format(*user.split(":"))
        for place in sorted(writable):
            argv += ["--tmpfs", f"{place}:exec,{owner},mode=755,size={DISK}"]
        argv += ["--volume", f"{call.folder}:/run/beside:ro", "--entrypoint", "/bin/bash"]
        for key, value in {**env, **places}.items():
            argv += ["--env", f"{key}={value}"]
        argv += [self.image, *_driven(INSIDE, call)]
        outer = {one: os.environ.get(one, "") for one in ("PATH", "HOME", "DOCKER_HOST")}
        try:
            return _bounded(argv, outer, call.text)
        finally:  # the client's end isn't the container's
            removed = ["docker", "rm", "--force", name]
            subprocess.run(removed, env=outer, capture_output=True, check=False)


def _packed(text: str) -> bytes:
    """The stand-ins and a script as a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:

        def add(name: str, data: bytes = b"", mode: int = 0o755, link: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.linkname = len(data), mode, link
            member.type = tarfile.SYMTYPE if link else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(data))

        for name in FILES:
            add(name, (STANDIN / name).read_bytes())
        for name in STANDINS:
            add(f"bin/{name}", link="../standin")
        add("script", text.encode(), 0o644)
    return packed.getvalue()


@contextmanager
def _open_bytes(data: bytes) -> Iterator[int]:
    """A file descriptor to read the data from."""
    with files.named(tempfile.gettempdir()), tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


def _bounded(
    argv: list[str], env: Mapping[str, str], text: str, keep: tuple[int, ...] = ()
) -> SandboxOutput:
    """What the command that runs the script `text` prints as a tar archive, within all bounds."""
    with _open_bytes(_packed(text)) as archive, subprocess.Popen(
        argv, env=dict(env), stdin=archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        pass_fds=keep, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout
        got, stopped = bytearray(), ""
        end = time.monotonic() + SECONDS + START_SECONDS
        try:
            while not (stopped := _over(process.pid, end, len(got))):
                if select.select([process.stdout], [], [], 0.05)[0]:
                    part = os.read(process.stdout.fileno(), 2**16)
                    if not part:
                        break
                    got += part
        finally:
            _end(process)
    written = _files(bytes(got)) if not stopped else {}
    if written.get("code", b"").strip() in (b"124", b"137"):
        stopped = f"it didn't end in {SECONDS} seconds"
    return SandboxOutput(written, stopped)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all below it; a sandbox has gone with the first process in it."""
    for child in _children(process.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _over(pid: int, end: float, output: int) -> str:
    """The bound that is passed, "" for none."""
    family = _family(pid)
    if time.monotonic() > end:
        return f"it didn't end in {SECONDS} seconds"
    if output > OUTPUT:
        return f"it printed more than {OUTPUT} bytes"
    if len(family) > PROCESSES:
        return f"it started more than {PROCESSES} processes"
    if sum(map(_resident, family)) + _written(family[-1]) > MEMORY:
        return f"it took more than {MEMORY} bytes of memory"
    return ""


def _family(pid: int) -> list[int]:
    """The process and all below it, as far as counts."""
    found = [pid]
    for one in found:
        found += _children(one)
        if len(found) > PROCESSES:
            break
    return found


def _children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _written(pid: int) -> int:
    """Bytes in a process's root folder where that is its own, in memory: an older bwrap's is as
    large as half of the machine's."""
    try:
        if os.stat(f"/proc/{pid}/root/").st_dev == os.stat("/").st_dev:
            return 0
        disk = os.statvfs(f"/proc/{pid}/root/")
    except OSError:
        return 0
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _files(archive: bytes) -> dict[str, bytes]:
    """The regular files of a tar archive by name; {} of what is none."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            members = [one for one in opened if one.isfile() and not one.issparse()]
            read = {one.name.removeprefix("./"): opened.extractfile(one) for one in members}
            return {name: file.read() for name, file in read.items() if file}
    except tarfile.TarError:
        return {}
