"""A secret reaches the program, and nothing that can be read of the run holds it."""

from __future__ import annotations

import hashlib
import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.settings import ROOT
from tests.e2e.command import launcher

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

BY_FILE, LITERAL, BY_NAME = "of-a-file-7f3a", "literal-91bc", "by-name-55de"
PROGRAM = """\
import hashlib, os, pathlib, time
for name in ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
pathlib.Path("ready").touch()
while not pathlib.Path("done").exists():
    time.sleep(0.1)
"""
RUN_FILE = f"""\
name: secrets-test
image: {{{{name: '{{image}}'}}}}
program: ./program.py
gpus: 0
env: {{{{HF_TOKEN: {LITERAL}, DB_PASSWORD: null}}}}
secrets: {{{{WANDB_API_KEY: key}}}}
resources: {{{{network: none, workdir: work}}}}
"""


def test_a_secret_is_nowhere_but_in_the_program(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(tmp_path / "runs"), "DB_PASSWORD": BY_NAME}
    launched = partial(launcher, cwd=tmp_path, **env)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "key").write_text(BY_FILE + "\n")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "run.yaml").write_text(RUN_FILE.format(image=cpu_images.build()))
    dry = launched("run", "run.yaml", "--dry-run")
    assert dry.returncode == 0, dry.stderr

    run = launched("run", "run.yaml", "--detach").stdout.strip()
    until = time.monotonic() + 60
    while not (tmp_path / "work/ready").exists() and time.monotonic() < until:
        time.sleep(0.1)
    (container,) = engine.containers.list(filters={"label": f"megatron-launchpad.run={run}"})
    inspected = json.dumps(engine.api.inspect_container(container.id))
    listed = launched("ps")
    (tmp_path / "work/done").touch()
    ended = launched("attach", run)

    hashes = [hashlib.sha256(v.encode()).hexdigest() for v in (BY_FILE, LITERAL, BY_NAME)]
    names = ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD")
    expected = [f"{name} {found}" for name, found in zip(names, hashes, strict=True)]
    assert (ended.returncode, ended.stdout.splitlines()) == (0, expected), ended.stderr
    records = [path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(records) >= 1
    told = [dry.stdout, dry.stderr, listed.stdout, ended.stdout, ended.stderr, *records]
    for secret in (BY_FILE, LITERAL, BY_NAME):
        assert not [text for text in told if secret in text]
    assert BY_FILE not in inspected
    assert '"/run/secrets/WANDB_API_KEY"' in inspected
