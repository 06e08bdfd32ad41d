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
#8 4.100 helpers.cpp:1:1: error: expected unqualified-id
"""


def test_the_classic_builder_s_steps() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for line in CLASSIC.splitlines():
        builders._classic_line(line, progress)
    error = builders.failure("returned a non-zero code: 1", progress)
    assert "build 2/3" in out.getvalue()
    assert "cached" in out.getvalue()
    assert "expected unqualified-id" in str(error)
    assert "0123456789ab" not in str(error)
    assert error.exit_code == 122


def test_buildkit_s_steps() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for line in BUILDKIT.splitlines():
        builders._buildkit_line(line, progress)
    error = builders.failure("failed", progress)
    assert 'build wheel 5/11 RUN ["python3.11", "stage.py", "tools"] · cached' in out.getvalue()
    assert "expected unqualified-id" in str(error)


def test_a_full_disk_says_how_to_free_some() -> None:
    error = builders.failure("write /x: no space left on device", Progress(io.StringIO()))
    assert "docker system prune" in error.remedy
