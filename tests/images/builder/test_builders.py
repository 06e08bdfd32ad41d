"""What an engine prints while it builds, and what is given to it."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.images.builder import builders
from launcher.images.engine import connect
from tests.e2e.site import program
from tests.tables import table

BUILDKIT = """\
#1 [internal] load build definition from Dockerfile
#1 DONE 0.0s
#7 [wheel 5/11] RUN ["python3.11", "stage.py", "tools"]
#7 CACHED
#8 [wheel 8/11] RUN ["python3.11", "stage.py", "wheel"]
#8 0.213 stage: compiling megatron_core
#9 [packages 7/7] RUN ["python3.11", "stage.py", "packages"]
#9 0.300 Installing collected packages: torch
#8 4.100 helpers.cpp:1:1: error: expected unqualified-id
#9 DONE 8.3s
#8 ERROR: process "python3.11 stage.py wheel" did not complete successfully: exit code: 1
ERROR: failed to solve: exit code: 1
"""


def test_buildkit_s_steps_side_by_side() -> None:
    out = io.StringIO()
    steps = builders.BuildkitSteps(Progress(out))
    for line in BUILDKIT.splitlines():
        steps.read(line)
    assert out.getvalue().splitlines() == [
        'build [wheel 5/11] RUN ["python3.11", "stage.py", "tools"] · cached',
        'build [packages 7/7] RUN ["python3.11", "stage.py", "packages"] (8.3 s)',
        'build [wheel 8/11] RUN ["python3.11", "stage.py", "wheel"]: failed',
    ]
    error = builders.failure(steps.error, steps.lines_of_failed())
    assert "failed to solve: exit code: 1" in str(error)
    assert "expected unqualified-id" in str(error)
    assert "torch" not in str(error)


def test_what_the_build_cache_has_lost_is_built_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "The engine gave no reason", at each build of what images once removed had been of."""
    steps = builders.BuildkitSteps(Progress(io.StringIO()))
    for line in ("#22 exporting to image", "#22 ERROR: layer does not exist", "------"):
        steps.read(line)
    made, wanted = [], builders.ImageBuild(io.BytesIO(b"tar"), {}, {})

    def buildkit(command: Any, env: Any, build: builders.ImageBuild, progress: Any) -> list[str]:
        made.append((build.no_cache, build.context.read()))
        if not build.no_cache:
            raise builders.failure(steps.error, [])
        return []

    for name, given in (("podman", ""), ("buildkit", "docker"), ("cli_environment", {})):
        monkeypatch.setattr(connect, name, lambda client, given=given: given)
    monkeypatch.setattr(builders, "buildkit", buildkit)
    with pytest.raises(BuildError, match="doesn't have what it built"):
        builders.build(cast("Any", None), wanted, Progress(io.StringIO()))
    assert made == [(False, b"tar"), (True, b"tar")]


@table("text", "said")
def test_steps_one_after_another(text: str, said: list[str]) -> None:
    out = io.StringIO()
    progress = Progress(out)
    for line in text.splitlines():
        builders.read_line(line, progress)
    error = builders.failure("no space left on device", progress.fail())
    assert [re.sub(r" \([\d.]+ s\)$", "", line) for line in out.getvalue().splitlines()] == said
    assert "expected unqualified-id" in str(error)
    assert "0123456789ab" not in str(error)
    assert "docker system prune" in error.remedy
    foreign = builders.failure("exec /opt/python/bin/python3: exec format error", [])
    assert "qemu-user-static" in foreign.remedy
    assert error.exit_code == 122


def stand_in(folder: Path, text: str) -> list[str]:
    """A program that stands in for podman or docker: a shell script."""
    program(folder / "program", f"#!/bin/sh\n{text}\n")
    return [str(folder / "program")]


def drive(command: list[str], progress: Progress, no_cache: bool = True) -> str:
    with tempfile.TemporaryFile() as context:
        context.write(b"the context")
        context.seek(0)
        args = {"BASE_IMAGE": "base", "SOURCE_DATE_EPOCH": "1700000000"}
        wanted = builders.ImageBuild(context, args, {"a": "b c"}, no_cache)
        return builders.podman(command, {}, wanted, progress)


def test_podman_is_given_context_time_and_no_network(tmp_path: Path) -> None:
    command = stand_in(
        tmp_path,
        f"""printf '%s\\n' "$@" > {tmp_path}/argv
        /bin/cat > {tmp_path}/stdin
        for word; do
          case $word in --iidfile=*) printf sha256:abc > "${{word#--iidfile=}}";; esac
        done""",
    )
    assert drive(command, Progress(io.StringIO())) == "sha256:abc"
    assert (tmp_path / "stdin").read_text() == "the context"
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[0] == "build"
    assert argv[-1] == "-"
    assert {"--timestamp=1700000000", "--network=none", "--no-cache"} <= set(argv)
    assert {"--label=a=b c", "--build-arg=SOURCE_DATE_EPOCH=1700000000"} <= set(argv)
    drive(command, Progress(io.StringIO()), no_cache=False)
    assert "--no-cache" not in (tmp_path / "argv").read_text()


def test_a_failed_step_of_podman_s_is_told_with_its_lines(tmp_path: Path) -> None:
    command = stand_in(
        tmp_path,
        """echo '[1/4] STEP 9/12: RUN ["python3.11", "stage.py", "wheel"]'
        echo 'helpers.cpp:1:1: error: expected unqualified-id'
        echo 'Error: building at STEP "RUN": while running runtime: exit status 1' >&2
        exit 125""",
    )
    with pytest.raises(BuildError) as caught:
        drive(command, Progress(io.StringIO()))
    assert "the build failed: building at STEP" in str(caught.value)
    assert "  | helpers.cpp:1:1: error: expected unqualified-id" in str(caught.value)


def test_a_build_is_ended_where_its_reader_is_interrupted(tmp_path: Path) -> None:
    command = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; echo started; exec /bin/sleep 600")

    class Interrupted(Progress):
        def output(self, line: str) -> None:
            raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt, match="started"):
        drive(command, Interrupted(io.StringIO()))
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({"sha256:config"}, "sha256:config"),
        ({"sha256:manifest"}, "sha256:manifest"),  # containerd's store
        (set(), None),
    ],
)
def test_an_image_is_what_the_engine_knows_it_by(
    known: set[str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "buildx").mkdir()
    command = stand_in(
        tmp_path / "buildx",
        """for word; do case $word in
          --iidfile=*) printf sha256:config > "${word#--iidfile=}";;
          --metadata-file=*)
            echo '{"containerimage.digest": "sha256:manifest"}' > "${word#--metadata-file=}";;
        esac; done""",
    )
    monkeypatch.setattr(connect, "cli_environment", lambda client: {})
    monkeypatch.setattr(connect, "podman", lambda client: None)
    monkeypatch.setattr(connect, "buildkit", lambda client: command)
    monkeypatch.setattr(builders, "find_image", lambda client, image: image in known)
    monkeypatch.setattr(builders, "settle", lambda client, image, base, epoch: image)
    args = {"BASE_IMAGE": "base", "SOURCE_DATE_EPOCH": "1700000000"}
    with tempfile.TemporaryFile() as context:
        wanted = builders.ImageBuild(context, args, {})
        if found:
            assert builders.build(cast(Any, None), wanted, Progress(io.StringIO())) == found
        else:
            with pytest.raises(BuildError, match="sha256:config or sha256:manifest"):
                builders.build(cast(Any, None), wanted, Progress(io.StringIO()))
