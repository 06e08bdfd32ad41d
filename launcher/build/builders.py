"""Has an engine build a context: by BuildKit where it has it, else by its classic builder.

Either way: no network, and the steps as they come, for a progress line.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.errors import BuildError
from launcher.progress import Progress

if TYPE_CHECKING:
    from docker import DockerClient

STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
BUILDKIT_STEP = re.compile(r"#\d+ \[(?:(\S+) +)?(\d+)/(\d+)\] (.*)")
BUILDKIT_OUTPUT = re.compile(r"#\d+ [\d.]+ (.*)")


def classic(
    client: DockerClient,
    context: IO[bytes],
    args: dict[str, str],
    labels: dict[str, str],
    progress: Progress,
    no_cache: bool,
) -> str:
    """Build with the engine's own API and return the image ID. Raises BuildError."""
    from docker.errors import APIError

    image_id = ""
    try:
        stream = client.api.build(
            fileobj=context,
            custom_context=True,
            buildargs=args,
            labels=labels,
            network_mode="none",
            nocache=no_cache,
            rm=True,
            forcerm=True,
            decode=True,
        )
        for event in stream:
            image_id = event.get("aux", {}).get("ID", image_id)
            if "error" in event:
                raise failure(event["error"], progress)
            for line in event.get("stream", "").splitlines():
                _classic_line(COLOUR.sub("", line), progress)
    except APIError as error:
        raise failure(error.explanation or str(error), progress) from error
    progress.close()
    return image_id


def buildkit(
    command: list[str],
    env: dict[str, str],
    context: IO[bytes],
    args: dict[str, str],
    labels: dict[str, str],
    progress: Progress,
    no_cache: bool,
) -> str:
    """Build with `command` (docker buildx build, or an older docker build) in `env`.

    Returns the image ID. Raises BuildError.
    """
    with tempfile.TemporaryDirectory() as folder:
        id_file = Path(folder) / "id"
        argv = [*command, "--network=none", "--progress=plain", f"--iidfile={id_file}"]
        if any("buildx" in part for part in command):
            argv += ["--load", "--provenance=false"]
        argv += ["--no-cache"] if no_cache else []
        argv += [f"--build-arg={name}={value}" for name, value in args.items()]
        argv += [f"--label={name}={value}" for name, value in labels.items()]
        process = subprocess.Popen(
            [*argv, "-"],
            stdin=context,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        assert process.stdout is not None
        for line in process.stdout:
            _buildkit_line(line.rstrip(), progress)
        if process.wait():
            raise failure("see the last lines", progress)
        progress.close()
        return id_file.read_text().strip()


def failure(reason: str, progress: Progress) -> BuildError:
    """The error of a failed build, with the last lines of the failing step."""
    lines = progress.fail()
    text = f"the build failed: {reason.strip()}" + (f"\n{lines}" if lines else "")
    full = "no space left on device" in text.lower()
    return BuildError(
        text,
        "The engine's disk is full: free some with `docker system prune`." if full else "",
    )


def _classic_line(line: str, progress: Progress) -> None:
    step = STEP.match(line)
    if step:
        progress.step(f"build {step[1]}/{step[2]} {step[3]}")
    elif line.strip() == "---> Using cache":
        progress.cached()
    elif not line.startswith((" --->", "Removing intermediate", "Successfully built")):
        progress.output(line)


def _buildkit_line(line: str, progress: Progress) -> None:
    step, output = BUILDKIT_STEP.match(line), BUILDKIT_OUTPUT.match(line)
    if step:
        stage = f"{step[1]} " if step[1] else ""
        progress.step(f"build {stage}{step[2]}/{step[3]} {step[4]}")
    elif line.endswith(" CACHED"):
        progress.cached()
    elif output:
        progress.output(output[1])
    elif "ERROR" in line:
        progress.output(line)
