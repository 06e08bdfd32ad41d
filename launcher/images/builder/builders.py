"""Builds a context with an engine: by BuildKit, podman or the classic builder.

In all of them: no network, and the steps as they come, for a progress line. What is the same at
every build by each of them is in docs/reproducible.md.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.base import owned
from launcher.base.errors import BuildError
from launcher.base.screen import KEPT, Progress
from launcher.base.settings import settings
from launcher.images.oci.inspection import find_image, remedy_if_foreign
from launcher.images.oci.settle import settle

if TYPE_CHECKING:
    from docker import DockerClient

STEP = re.compile(r"(?:\[(\d+/\d+)\] )?(?:STEP|Step) (\d+/\d+) ?: (.*)")
CACHED = re.compile(r"( -)?--> Using cache")
OF_BUILDERS = (" --->", "--> ", "Removing intermediate", "Successfully built")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
BUILDKIT_LINE = re.compile(r"#(\d+) (.*)")
BUILDKIT_STEP = re.compile(r"\[(?:\S+ +)?\d+/\d+\] .*")
BUILDKIT_OUTPUT = re.compile(r"[\d.]+ (.*)")
LOST = "layer does not exist"


@dataclass(frozen=True)
class ImageBuild:
    """What is to be built.

    context: a tar archive; args: of the Dockerfile, BASE_IMAGE and SOURCE_DATE_EPOCH among them;
    platform: where it isn't the engine's own
    """

    context: IO[bytes]
    args: dict[str, str]
    labels: dict[str, str]
    no_cache: bool = False
    platform: str | None = None

    @property
    def options(self) -> list[str]:
        """Those that docker's and podman's `build` have in common."""
        return [
            *(["--no-cache"] if self.no_cache else []),
            *([f"--platform={self.platform}"] if self.platform else []),
            *(f"--build-arg={name}={value}" for name, value in self.args.items()),
            *(f"--label={name}={value}" for name, value in self.labels.items()),
        ]


def build(client: DockerClient, wanted: ImageBuild, progress: Progress) -> str:
    """The image ID, built by the engine's best builder. Raises BuildError, and docker's errors."""
    from launcher.images.engine import connect

    env = connect.cli_environment(client)
    if command := connect.podman(client):
        return podman(command, env, wanted, progress)
    if command := connect.buildkit(client):
        try:
            known_by = buildkit(command, env, wanted, progress)
        except BuildError as error:
            if wanted.no_cache or LOST not in error.problem:
                raise
            progress.note("the engine's build cache has lost a layer: building without it")
            wanted.context.seek(0)
            known_by = buildkit(command, env, replace(wanted, no_cache=True), progress)
        image = next((one for one in known_by if find_image(client, one)), None)
        if image is None:
            raise BuildError(f"the engine doesn't have what it built: {' or '.join(known_by)}")
        args = wanted.args
        return settle(client, image, args["BASE_IMAGE"], int(args["SOURCE_DATE_EPOCH"]))
    _tell_limits(progress, connect.is_podman(client))
    return classic(client, wanted, progress)


@cache
def _tell_limits(progress: Progress, without_podman: bool) -> None:
    """Say, once for a command, what a builder without a clock of ours leaves open."""
    builder = "the engine's classic builder"
    if without_podman:
        builder = "podman's build API, as there is no podman program here"
    progress.note(
        f"{builder}: wheel and added files are the same at every build, "
        "the image's layers and ID may not be"
    )


def podman(command: list[str], env: dict[str, str], wanted: ImageBuild, progress: Progress) -> str:
    """The ID of the image that `command` (podman --url …) builds. Raises BuildError."""
    with owned.scratch(settings().cache) as folder:
        id_file = Path(folder) / "id"
        argv = [*command, "build", "--network=none", f"--iidfile={id_file}"]
        argv += [f"--timestamp={wanted.args['SOURCE_DATE_EPOCH']}"]
        argv += wanted.options
        error = "podman gave no reason"
        try:
            with _lines(argv, env, wanted.context) as lines:
                for line in lines:
                    if line.startswith("Error: "):
                        error = line.removeprefix("Error: ")
                    else:
                        read_line(line, progress)
        except subprocess.CalledProcessError as ended:
            raise failure(error, progress.fail()) from ended
        progress.close()
        return id_file.read_text().strip()


def classic(client: DockerClient, wanted: ImageBuild, progress: Progress) -> str:
    """Build with the engine's own API and return the image ID. Raises BuildError."""
    from docker.errors import APIError

    image_id = ""
    try:
        stream = client.api.build(
            fileobj=wanted.context,
            custom_context=True,
            buildargs=wanted.args,
            labels=wanted.labels,
            network_mode="none",
            nocache=wanted.no_cache,
            platform=wanted.platform,
            rm=True,
            forcerm=True,
            decode=True,
        )
        for event in stream:
            image_id = event.get("aux", {}).get("ID", image_id)
            if "error" in event:
                raise failure(event["error"], progress.fail())
            for line in event.get("stream", "").splitlines():
                read_line(COLOUR.sub("", line), progress)
    except APIError as error:
        raise failure(error.explanation or str(error), progress.fail()) from error
    progress.close()
    return image_id


def buildkit(
    command: list[str], env: dict[str, str], wanted: ImageBuild, progress: Progress
) -> list[str]:
    """Build with `command` (docker buildx build, or an older docker build) in `env`.

    Returns what the engine may know the image by: its configuration's digest or, in containerd's
    store, its manifest's. Raises BuildError.
    """
    with owned.scratch(settings().cache) as folder:
        id_file, metadata = Path(folder) / "id", Path(folder) / "metadata.json"
        argv = [*command, "--network=none", "--progress=plain", f"--iidfile={id_file}"]
        if any("buildx" in part for part in command):
            # The engine's own builder: another one wouldn't see the engine's images.
            argv += ["--builder=default", "--load", "--provenance=false"]
            argv += [f"--metadata-file={metadata}"]
        argv += wanted.options
        steps = BuildkitSteps(progress)
        try:
            with _lines(argv, env, wanted.context) as lines:
                for line in lines:
                    steps.read(line)
        except subprocess.CalledProcessError as ended:
            raise failure(steps.error, steps.lines_of_failed()) from ended
        told = json.loads(metadata.read_text()) if metadata.exists() else {}
        found = [id_file.read_text().strip(), told.get("containerimage.digest")]
        return list(dict.fromkeys(filter(None, found)))


@contextmanager
def _lines(argv: list[str], env: dict[str, str], context: IO[bytes]) -> Iterator[Iterator[str]]:
    """What a build command prints, with the context on its standard input.

    Raises CalledProcessError, after the block, where it ends with another code than 0.
    """
    with subprocess.Popen(
        [*argv, "-"],
        stdin=context,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    ) as process:
        assert process.stdout is not None
        try:
            yield (line.rstrip() for line in process.stdout)
        except BaseException:
            process.terminate()  # which has the engine give the build up
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


class BuildkitSteps:
    """Reads BuildKit's plain progress, in which steps run side by side, each with a number."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.error = "the engine gave no reason"
        self._texts: dict[str, str] = {}
        self._lines: dict[str, deque[str]] = {}
        self._failed = ""

    def read(self, line: str) -> None:
        """Take one line: a step's beginning, output or end, or the build's error."""
        match = BUILDKIT_LINE.match(line)
        if not match:
            self.error = line.removeprefix("ERROR: ") if line.startswith("ERROR: ") else self.error
            return
        number, rest = match.groups()
        if BUILDKIT_STEP.match(rest):
            self._texts.setdefault(number, f"build {rest}")
            self._lines.setdefault(number, deque(maxlen=KEPT))
        elif number in self._texts:
            self._read_step(number, rest)
        elif rest.startswith("ERROR: "):  # of the export, whose step has no text
            self.error = rest.removeprefix("ERROR: ")

    def lines_of_failed(self) -> list[str]:
        """The last lines of the step that failed."""
        return list(self._lines.get(self._failed, []))

    def _read_step(self, number: str, rest: str) -> None:
        text = self._texts[number]
        if rest == "CACHED":
            self.progress.note(f"{text} · cached")
        elif rest.startswith("DONE "):
            self.progress.note(f"{text} ({rest.removeprefix('DONE ').removesuffix('s')} s)")
        elif rest.startswith("ERROR"):
            self._failed = number
            self.progress.note(f"{text}: failed")
        elif output := BUILDKIT_OUTPUT.match(rest):
            self._lines[number].append(output[1])
            self.progress.show(f"{text} · {output[1].strip()}")


def failure(reason: str, lines: list[str]) -> BuildError:
    """The error of a failed build, with the last lines of the failing step."""
    text = "\n".join([f"the build failed: {reason.strip()}", *(f"  | {line}" for line in lines)])
    if "no space left on device" in text.lower():
        return BuildError(text, "The engine's disk is full: free some with `docker system prune`.")
    return BuildError(text, remedy_if_foreign(text))


def read_line(line: str, progress: Progress) -> None:
    """Take a line of podman's, or of the classic builder's: a step, its cache, or its output."""
    step = STEP.match(line)
    if step:
        progress.step(" ".join(["build", *filter(None, step.groups())]))
    elif CACHED.match(line):
        progress.cached()
    elif not line.startswith(OF_BUILDERS):
        progress.output(line)
