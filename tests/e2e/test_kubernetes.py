"""Runs in a stand-in for a cluster, by a real kubectl."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.base.settings import ROOT, Settings
from tests.e2e.kubernetes import Cluster, cluster
from tests.e2e.site import RUNNER, Site, Started, leaves_to_others
from tests.e2e.test_compose import COUNTING, FAILING
from tests.e2e.test_slurm import MEETING


class InCluster(Site):
    """A folder from which runs are created, on a disk that the cluster's nodes see."""

    cluster: Cluster
    variables: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        own = {"LAUNCHER_RUNS": str(self.folder / "runs"), "DOCKER_HOST": "unix:///nowhere"}
        own |= {"LAUNCHER_ANSWER_WITHIN": "300"}  # on a machine that is busy with other things
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.variables, **own}

    def containers(self) -> list[Any]:
        return []

    def counts(self, program: str = MEETING + COUNTING, **keys: Any) -> None:
        """Two nodes of a program that needs no torch, with a stand-in for the runner."""
        (self.folder / "runner.py").write_text(RUNNER)
        python = self.folder / "bin/python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {self.folder}/runner.py "$@"\n')
        python.chmod(0o755)
        volumes = {str(self.folder): {"host_path": str(self.folder)}}
        config = {"image": "cpu", "gpus": 0, "program": "./program.py", "nodes": 2}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        self.write({**config, "env": {"PATH": path}, "kubernetes": {"volumes": volumes, **keys}})
        (self.folder / "program.py").write_text(program)

    def starts(self, *arguments: Any, **keys: Any) -> Started:
        """The launcher of such a run."""
        self.counts(*arguments, **keys)
        return self.start(*START)

    def found(self) -> list[str]:
        """The runs that are known to be there."""
        return [path.parent.name for path in (self.folder / "runs").glob("*/kubernetes.json")]


@pytest.fixture
def here(site: Settings, tmp_path: Path) -> Iterator[InCluster]:
    """A folder to start from; afterwards nothing may be left in the cluster."""
    for part in ("tmp", "runs"):
        (tmp_path / part).mkdir()
    with cluster(site.cache, tmp_path) as (standin, variables):
        found = InCluster(tmp_path, None, "counts")  # type: ignore[arg-type] - it needs no engine
        found.cluster, found.variables = standin, variables
        yield found
        left = found.end()
        if left:  # a kubectl whose answer a launcher that ended didn't wait for, on a busy machine
            time.sleep(5)
            left = found.end()
        assert left + standin.end() + found.found() == []


START = ("run", "run.yaml", "--backend", "kubernetes")


@pytest.mark.parametrize("kind", ["jobset", pytest.param("trainjob", marks=pytest.mark.long)])
def test_nodes_meet_and_stop_when_asked(here: InCluster, kind: str) -> None:
    """The program alone hears of it, and its own exit code is told."""
    started = here.starts(kind=kind)
    for rank in (0, 1):
        started.said(f"node-{rank} | line")
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 7, started
    assert re.fullmatch(r"run \w+ stopped, exit code 7: on node-[01]", started.told()[-1])
    assert re.fullmatch(r"(node-[01] \| (met as [01]|line|asked)\n)*", started.out)


@pytest.mark.long
def test_one_that_nobody_may_enter_stops_all_the_same(here: InCluster) -> None:
    """By its pods' deletion, after which there is no exit code of theirs."""
    here.cluster.closed = True
    started = here.starts()
    started.said("node-1 | line")
    started.process.send_signal(signal.SIGINT)
    assert started.ends() in (7, 137), started
    assert "| asked\n" in started.out


def test_a_killed_launcher_leaves_the_run_to_others(here: InCluster) -> None:
    """By its label in the cluster."""
    here.counts()
    leaves_to_others(here, *START[2:], run=lambda: here.found()[0], first="node-1 | line")


@pytest.mark.long
def test_the_first_node_to_fail_is_named_and_ends_the_others(here: InCluster) -> None:
    """The other one has ten seconds, and not the ten minutes that its pod would have."""
    started = here.starts(MEETING + FAILING)
    assert started.ends() == 3, started
    assert started.told()[-1].endswith("failed: node-1: rank 1 exited with code 3")


@pytest.mark.long
@pytest.mark.parametrize("whose", ["the launcher", "the cluster"])
def test_a_failed_run_is_started_again(here: InCluster, whose: str) -> None:
    tried = str(here.folder / "tried")
    program = (
        MEETING + f"tried = {tried!r}\n"
        "if rank == 1 and not os.path.exists(tried):\n"
        "    open(tried, 'w').close()\n"
        "    time.sleep(4)\n"  # else its pod has gone before it is asked for
        "    sys.exit(3)\n"
    )
    if whose == "the cluster":
        here.counts(program, restarts=1)
        started = here.done(*START)
    else:
        here.counts(program)
        started = here.done(*START, "--max-restarts", "1")
        assert "starting it again: 1 of 1 times" in started.err
    assert started.process.returncode == 0, started
    assert started.out.count("met as 1") == 2


def test_one_that_waits_is_told_why_and_goes_when_asked(here: InCluster) -> None:
    here.cluster.full = True
    started = here.starts()
    started.said("waits: Unschedulable: 0/3 nodes are available")
    (run,) = here.found()
    assert re.search(rf"^{run} +{here.name} +pending ", here.done("ps").out, re.M)
    started.process.send_signal(signal.SIGTERM)
    assert started.ends() == 137, started
    assert not here.cluster.objects


def test_what_is_removed_from_outside_has_ended(here: InCluster) -> None:
    started = here.starts()
    started.said("node-1 | line")
    (name,) = here.cluster.objects
    argv = ["kubectl", "delete", "jobset", name, "--wait=false"]
    subprocess.run(argv, env=here.environment, check=True, capture_output=True, timeout=60)
    assert started.ends() != 0
    assert "removed" in started.told()[-1]


def test_what_the_cluster_refuses_leaves_nothing(here: InCluster) -> None:
    here.counts(context="nowhere")
    started = here.done(*START)
    assert started.process.returncode == 125, started
    assert "nowhere" in started.err


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kubectl_takes_what_a_dry_run_shows(here: InCluster, kind: str) -> None:
    """kubectl looks kinds up at a server, even for --dry-run=client."""
    here.counts(kind=kind)
    shown = here.done(*START, "--dry-run").out
    text = shown[shown.index("\napiVersion:") : shown.rindex("YAML")]
    argv = ["kubectl", "apply", "--dry-run=client", "--filename=-", "--output=json"]
    options: dict[str, Any] = {"input": text, "text": True, "capture_output": True, "timeout": 60}
    done = subprocess.run(argv, env=here.environment, **options)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["spec"] == yaml.safe_load(text)["spec"]
