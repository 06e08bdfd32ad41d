"""A run in TensorBoard's and in W&B's folders, whose key nothing holds that can be read of it."""

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

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KEY = "0123456789abcdef-w-and-b"

# Stands in for the package, which needs a server: tells which key it has, and waits to be seen.
WANDB = """
import hashlib, json, os, pathlib, time
def init(dir, project, name, config):
    global folder
    folder = pathlib.Path(dir)
    key = hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest()
    (folder / "ready").write_text(json.dumps([project, name, key]))
    while not (folder / "go").exists():
        time.sleep(0.1)
def log(values, step):
    with (folder / "log").open("a") as file:
        file.write(json.dumps([step, values]) + chr(10))
def finish():
    (folder / "finished").touch()
"""
RUN_FILE = """\
name: wandb-test
image: {{name: '{image}'}}
gpus: 0
model: {{num_layers: 1, hidden_size: 32, num_attention_heads: 4, seq_length: 16}}
training: {{micro_batch_size: 2, train_iters: 4, lr: 1.0e-2}}
data: {{mock: true, vocab_size: 64}}
logging:
  {{log_interval: 2, eval_iters: 1, tensorboard_dir: tb, wandb_project: p, wandb_save_dir: wb}}
env: {{{env}PYTHONPATH: '/opt/megatron/lib:/opt/packages/lib:/standin'}}
{secrets}
mounts: [{{source: standin, target: /standin}}]
resources: {{network: none}}
"""


@pytest.mark.parametrize("by", ["file", "name"])
def test_the_key_is_nowhere_but_in_the_program(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path, by: str
) -> None:
    env = {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(tmp_path / "runs")}
    if by == "name":
        env["WANDB_API_KEY"] = KEY
    launched = partial(launcher, cwd=tmp_path, **env)
    (tmp_path / "standin").mkdir()
    (tmp_path / "standin/wandb.py").write_text(WANDB)
    (tmp_path / "key").write_text(KEY + "\n")
    own = {"file": ("", "secrets: {WANDB_API_KEY: key}"), "name": ("WANDB_API_KEY: null, ", "")}
    text = RUN_FILE.format(image=cpu_images.build(), env=own[by][0], secrets=own[by][1])
    (tmp_path / "run.yaml").write_text(text)
    dry = launched("run", "run.yaml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "--wandb-exp-name wandb-test" in dry.stdout

    run = launched("run", "run.yaml", "--detach").stdout.strip()
    until = time.monotonic() + 120
    while not (tmp_path / "wb/ready").exists() and time.monotonic() < until:
        time.sleep(0.1)
    (container,) = engine.containers.list(filters={"label": f"megatron-launchpad.run={run}"})
    inspected = engine.api.inspect_container(container.id)
    commands = json.dumps(container.top()["Processes"])
    (tmp_path / "wb/go").touch()
    ended = launched("attach", run)

    assert ended.returncode == 0, ended.stderr
    key = hashlib.sha256(KEY.encode()).hexdigest()
    assert json.loads((tmp_path / "wb/ready").read_text()) == ["p", "wandb-test", key]
    logged = [json.loads(line) for line in (tmp_path / "wb/log").read_text().splitlines()]
    assert [step for step, values in logged if "lm loss" in values] == [1, 2, 3, 4]
    assert (tmp_path / "wb/finished").exists()
    assert len(list((tmp_path / "tb").glob("events.out.tfevents.*"))) == 1

    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(written) >= 1
    told = [dry.stdout, dry.stderr, ended.stdout, ended.stderr, commands]
    told += [path.read_text(errors="replace") for path in written]
    told += [json.dumps(inspected["Args"]), json.dumps(inspected["Config"]["Cmd"])]
    if by == "file":  # what is passed by name, the engine shows to those who may use it
        told.append(json.dumps(inspected))
    assert not [text for text in told if KEY in text]
