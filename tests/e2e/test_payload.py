"""What a run brings along: into images of others, and to engines that see no files here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.images.engine.connect import engine_host
from launcher.runs.backends.docker import docker, docker_job, docker_request
from tests.e2e.command import launcher, refused

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

THEIRS = """\
FROM {image} AS ours
FROM {base}
COPY --from=ours /opt/packages/lib /opt/megatron/lib /usr/lib/site/
ENV PYTHONPATH=/usr/lib/site
"""
"""An image with torch and Megatron that has neither our folders nor our labels."""

OLDER = """\
FROM {image}
LABEL megatron-launchpad.version=0.0.9
RUN mkdir /opt/megatron/lib/launcher && echo 'raise SystemExit("the image has run its own")' \
    > /opt/megatron/lib/launcher/__init__.py
"""
"""Stands in for an image of an older launcher, which has a runner of its own."""


@pytest.fixture(scope="module")
def built(engine: DockerClient, cpu_images: CpuImages) -> dict[str, str]:
    """Images by what they are."""
    image, base = cpu_images.build(), "megatron-standin-base:cp311"
    texts = {
        "theirs": THEIRS,
        "older": OLDER,
        "deaf": 'FROM launchpad-test-theirs\nENTRYPOINT ["/bin/echo"]\n',
        "bare": "FROM {base}\nLABEL a=b\n",
    }
    for name, text in texts.items():
        file = io.BytesIO(text.format(image=image, base=base).encode())
        engine.images.build(fileobj=file, tag=f"launchpad-test-{name}", rm=True)
    return {name: f"launchpad-test-{name}" for name in texts}


def short(image: str) -> list[str]:
    """What is set of gpt2-tiny: the image, one process, and few steps."""
    alone = ["processes=1", "parallel.tensor_model_parallel_size=1"]
    alone.append("env.OMP_NUM_THREADS=1")
    return [f"image={{name: '{image}:latest'}}", "training.train_iters=5", *alone]


def command(image: str) -> list[str]:
    return ["run", "gpt2-tiny", *(word for one in short(image) for word in ("--set", one))]


def trains(image: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return launcher(*command(image), *more, LAUNCHER_RUNS=str(folder / "runs"))


def loss(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"lm loss value: (\S+)", done.stdout)[-1]


def test_any_image_with_torch_and_megatron_trains_and_says_what_it_lacks(
    built: dict[str, str], tmp_path: Path
) -> None:
    found = loss(trains(built["theirs"], tmp_path))
    older = trains(built["older"], tmp_path)
    assert loss(older) == found
    assert "has the runner of launcher 0.0.9 in it, which isn't used" in older.stderr
    refused(trains(built["deaf"], tmp_path), 121, "ENTRYPOINT ['/bin/echo'] doesn't run python3")
    bare = trains(built["bare"], tmp_path)
    assert bare.returncode == 121
    assert bare.stderr.count("has no torch: take another image, or another Python") == 1
    python = f"image={{name: '{built['theirs']}:latest', python: /opt/other/python}}"
    nowhere = trains(built["theirs"], tmp_path, "--set", python)
    assert "this points to: the image doesn't have the program that is started" in nowhere.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace is root's to make")
def test_an_engine_that_does_not_see_the_folder_gets_a_copy(
    engine: DockerClient, built: dict[str, str], tmp_path: Path
) -> None:
    """The launcher's records lie where its own mount namespace alone has something."""
    (tmp_path / "runs").mkdir()
    script = 'mount -t tmpfs -o mode=700 none "$LAUNCHER_RUNS" && exec "$@"'
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", script),
            *("sh", sys.executable, "-m", "launcher", *command(built["theirs"])),
        ],
        env={
            **os.environ,
            "LAUNCHER_RUNS": str(tmp_path / "runs"),
            "DOCKER_HOST": engine_host(engine),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert loss(done)


def test_another_machines_engine_gets_a_copy_and_the_shown_lines_do_the_same(
    engine: DockerClient, built: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine here stands in for one elsewhere: nothing of ours is mounted."""
    monkeypatch.setattr(docker_job, "LOCAL", "another machine's")
    from launcher.runs.follow.assemble import assemble, new_stamp
    from launcher.runs.runfile import origins
    from launcher.runs.runfile.origins import RunRequest

    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    sets = [origins.parse_set(one) for one in short(built["theirs"])]
    config, origin = origins.load("gpt2-tiny", sets)
    chosen = docker.DockerBackend(lambda: engine)
    plan = assemble(RunRequest(config, origin, str(tmp_path)), chosen, new_stamp()).plan
    job = docker_job.start(engine.api, plan, attach=True)
    try:
        out = b"".join(piece.data for piece in job.output())
        assert job.wait().code == 0, out
        seen = engine.api.inspect_container(job.container)
        assert not [
            one for one in seen["Mounts"] if one["Destination"].startswith("/opt/launchpad")
        ]
    finally:
        job.remove()
    shown = docker_request.show(plan, shares_files=False)
    words = [line.split()[1] for line in shown.splitlines()]
    assert words == ["create", "cp", "start"]
    done = subprocess.run(
        ["bash", "-ec", shown],
        env={"PATH": os.environ["PATH"], "DOCKER_HOST": engine_host(engine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loss(done)
