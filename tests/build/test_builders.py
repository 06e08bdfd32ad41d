"""What an engine prints while it builds, as progress, and what is told of a failed build."""

from __future__ import annotations

import io

from launcher.build import builders
from launcher.progress import Progress

CLASSIC = """\
Step 1/3 : FROM scratch AS wheel
 ---> 0123456789ab
Step 2/3 : RUN ["python3.10", "stage.py", "tools"]
 ---> Using cache
Step 3/3 : RUN ["python3.10", "stage.py", "wheel"]
stage: compiling megatron_core
helpers.cpp:1:1: error: expected unqualified-id
"""
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


def test_the_classic_builder_s_steps() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for line in CLASSIC.splitlines():
        builders._classic_line(line, progress)
    error = builders.failure("returned a non-zero code: 1", progress.fail())
    assert "build 2/3" in out.getvalue()
    assert "cached" in out.getvalue()
    assert "expected unqualified-id" in str(error)
    assert "0123456789ab" not in str(error)
    assert error.exit_code == 122


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


def test_a_full_disk_says_how_to_free_some() -> None:
    error = builders.failure("write /x: no space left on device", [])
    assert "docker system prune" in error.remedy


def test_a_terminal_gets_one_live_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(out)
    progress.step("build 1/2")
    progress.output("compiling")
    progress.close()
    assert out.getvalue().count("\n") == 1
    assert "build 1/2 · compiling" in out.getvalue()
