"""How fast a run's output passes through the launcher, beside `docker run > file`, and how late."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import ROOT, Figure
from launcher.images.engine.connect import docker_cli
from launcher.runs.records.record import LOG

if TYPE_CHECKING:
    from docker import DockerClient

IMAGE = "launchpad-bench:logs"
LINES = 3_000_000
LINE = "a line of a training log, as long as most of them are: 0123456789 0123456789"
STAMPS, PAUSE = 200, 0.02
TURNS = 3

FLOOD = f"yes '{LINE}' | head -n {LINES}"
TICK = f"import time\nfor _ in range({STAMPS}): print(time.time(), flush=True); time.sleep({PAUSE})"
"""The container's clock is the host's."""


def figures(client: DockerClient, base: str) -> list[Figure]:
    """The time of a flood of lines as a multiple of docker's own, what was lost, and the lag."""
    with _printing(client, base, FLOOD):
        times, lost = _flood(client)
    with _printing(client, base, f"PATH=${{PATH#/bench:}} exec python3 -c {shlex.quote(TICK)}"):
        lags = _lags()
    slower = statistics.median(ours / docker for ours, docker in times)
    rate = LINES / statistics.median(docker for _, docker in times)
    latest = statistics.quantiles(lags, n=100)[-1] * 1000
    return [
        Figure("3M lines, 100,000 a second of docker run's own rate", 100_000 / rate, 1, "x"),
        Figure("3M lines, of docker run > file", slower, 1 / 0.9, "x"),
        Figure("3M lines, bytes that didn't arrive or weren't kept", lost, 0, ""),
        Figure(f"log lag, 99th percentile of {STAMPS} lines", latest, 50, "ms"),
    ]


@contextmanager
def _printing(client: DockerClient, base: str, script: str) -> Iterator[None]:
    """An image in which python3 is a shell script, so that a run does nothing but print."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "python3").write_text(f"#!/bin/sh\n{script}\n")
        Path(folder, "python3").chmod(0o755)
        lines = [f"FROM {base}", "LABEL megatron-launchpad.megatron=0.16.1"]
        lines += ["COPY python3 /bench/", "ENV PATH=/bench:$PATH"]
        Path(folder, "Dockerfile").write_text("\n".join(lines))
        client.images.build(path=folder, tag=IMAGE, network_mode="none", rm=True)
    try:
        yield
    finally:
        client.images.remove(IMAGE, force=True)


def _launch(runs: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "launcher", "run", "gpt2-tiny.yaml"]
    options = ["--set", f"image={IMAGE}", "--no-preflight"]
    return [*command, *options], os.environ | {"LAUNCHER_RUNS": str(runs)}


def _flood(client: DockerClient) -> tuple[list[tuple[float, float]], int]:
    """Pairs of seconds, the launcher's and docker's, in turn; the bytes that were lost in all."""
    times, lost = list[tuple[float, float]](), 0
    whole = LINES * (len(LINE) + 1)
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        out = Path(folder, "out")
        for turn in range(TURNS + 1):
            launch, env = _launch(Path(folder, f"runs{turn}"))
            shown = subprocess.run([*launch, "--dry-run"], cwd=ROOT, env=env, capture_output=True)
            line = shlex.split(shown.stdout.decode().splitlines()[-1])
            name = line.index("--name")
            direct = [str(docker_cli(client)), "run", "--rm", *line[2:name], *line[name + 2 :]]
            ours = _timed(launch, env, out)
            (log,) = Path(folder, f"runs{turn}").glob(f"*/{LOG}")
            lost += abs(whole - out.stat().st_size) + abs(whole - log.stat().st_size)
            if turn:
                times.append((ours, _timed(direct, env, out)))
    return times, lost


def _timed(command: list[str], env: dict[str, str], out: Path) -> float:
    started = time.perf_counter()
    with out.open("wb") as file:
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=file)
    return time.perf_counter() - started


def _lags() -> list[float]:
    """Seconds between the printing of each line and its arrival from the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        launch, env = _launch(Path(folder))
        with subprocess.Popen(launch, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout
            return [time.time() - float(line) for line in process.stdout]
