"""A Slurm cluster of a few nodes on this machine, of Debian's packages, without installing them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from launcher.images.engine.private import packages
from tests.e2e.site import killed_with, until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
CONFIG = """\
ClusterName=launchpad
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
FirstJobId={first_job}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
SlurmUser=root
StateSaveLocation={folder}/control
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=autobind=threads
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SwitchType=switch/none
MailProg=/bin/true
KillWait=5
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=1
GresTypes=gpu
NodeName=DEFAULT Gres=gpu:2 CPUs={cpus} RealMemory=4000
{lines}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


GPUS = "NodeName=n[0-{last}] Name=gpu File=/dev/null,/dev/zero\n"
"""Stand-ins for two GPUs of each node: Slurm gives out any device files."""


def _ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in found]


JOBS = 100
"""The most of one cluster."""


def _first_job(held: ExitStack) -> int:
    """The number of a cluster's first job. By these numbers jobs choose the port to meet on.

    Two clusters on one machine, each with a job 1, met on one port. The port before the first job's
    is taken until `held` ends: no other cluster here has these numbers.
    """
    for before in range(10000 - JOBS, 0, -JOBS):
        with suppress(OSError):
            held.enter_context(socket.create_server(("127.0.0.1", 20000 + before)))
            return before + 1
    raise RuntimeError("too many clusters on one machine")


@contextmanager
def cluster(cache: Path, folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's programs are found, and this cluster by them."""
    root = packages.unpack(cache / "slurm", PACKAGES)
    plugins = next(root.glob("usr/lib/*-linux-*/slurm-wlm"))
    env = packages.environment(root)
    env["LD_LIBRARY_PATH"] += f":{plugins}"
    env["SLURM_CONF"] = str(folder / "slurm.conf")
    names = [f"n{number}" for number in range(nodes)]
    control, *ports = _ports(1 + nodes)
    for name in ("control", *names):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    lines = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        for name, port in zip(names, ports, strict=True)
    )
    more = {"control": control, "lines": lines, "cpus": os.cpu_count()}
    (folder / "gres.conf").write_text(GPUS.format(last=nodes - 1))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for name in ("slurmctld", "slurmd", "slurmstepd"):  # which know what they are by their names
        (folder / name).symlink_to(root / f"usr/sbin/{name}-wlm")
    daemons = [[str(folder / "slurmctld"), "-D", "-i"]]
    slurmd = [str(folder / "slurmd"), "-D", "-d", str(folder / "slurmstepd"), "-N"]
    daemons += [[*slurmd, node] for node in names]
    with ExitStack() as running:
        more["first_job"] = _first_job(running)
        text = CONFIG.format(host=host, folder=folder, plugins=plugins, **more)
        (folder / "slurm.conf").write_text(text)
        # What a test that ran out of its time has left goes on under a slurmstepd of its own.
        running.callback(killed_with, f"SLURM_CONF={env['SLURM_CONF']}")
        for number, argv in enumerate(daemons):
            log = running.enter_context((folder / f"daemon-{number}.log").open("wb"))
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
            running.callback(process.wait, 60)
            running.callback(process.terminate)

        def idle() -> bool:
            argv = ["sinfo", "--noheader", "--format=%D %t"]
            return (
                subprocess.run(argv, env=env, capture_output=True).stdout
                == f"{nodes} idle\n".encode()
            )

        until(idle, "the cluster isn't up")
        names = ("PATH", "LD_LIBRARY_PATH", "SLURM_CONF")
        yield {name: env[name] for name in names if name in env or name in os.environ}
        subprocess.run(["scancel", "--me"], env=env, check=False, timeout=60)
