"""What the launcher adds to `docker run` of the same container, and what `--help` costs."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from bench.measure import ROOT, Figure, interleaved
from launcher.images.engine.connect import docker_cli

if TYPE_CHECKING:
    from docker import DockerClient

IMAGE = "launchpad-bench:true"
LAUNCHER = [sys.executable, "-m", "launcher"]
RUN = ["run", "gpt2-tiny.yaml", "--set", f"image={IMAGE}"]


def image_of_nothing(client: DockerClient, base: str) -> None:
    """An image in which python3 does nothing, so that only the launch is measured."""
    nothing = 'RUN ["ln", "-sf", "/bin/true", "/usr/local/bin/python3"]'
    text = f"FROM {base}\nLABEL megatron-launchpad.megatron=0.16.1\n{nothing}\n"
    file = io.BytesIO(text.encode())
    client.images.build(fileobj=file, tag=IMAGE, network_mode="none", rm=True)


def figures(client: DockerClient, base: str) -> list[Figure]:
    """The launcher's overhead in seconds, and --help as a multiple of a bare interpreter."""
    image_of_nothing(client, base)
    launch = [*LAUNCHER, *RUN]
    shown = subprocess.run([*launch, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    line = shlex.split(shown.stdout.decode().splitlines()[-1])
    name = line.index("--name")
    direct = [str(docker_cli(client)), "run", "--rm", *line[2:name], *line[name + 2 :]]
    run = interleaved({"launcher": launch, "docker": direct})
    start = interleaved(
        {"help": [*LAUNCHER, "--help"], "bare": [sys.executable, "-c", "pass"]}, runs=15
    )
    client.images.remove(IMAGE, force=True)
    added = run["launcher"] - run["docker"]
    return [
        Figure("launcher run, beyond docker run of the same container", added, 0.2, "s"),
        Figure("--help, of `python -c pass`", start["help"] / start["bare"], 4, "x"),
    ]
