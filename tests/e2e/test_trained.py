"""One run of a user whom nobody knows, with secrets, W&B and TensorBoard: what it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.base.settings import ROOT
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.datasets import indexed
from launcher.tools import demo
from tests.e2e.command import contained, launcher, refused
from tests.e2e.site import Site, until

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UID, GID = 12345, 23456
NAMES = ("WANDB_API_KEY", "DB_PASSWORD")
BY_FILE, BY_NAME, LITERAL = SECRETS = ("of-a-file-7f3a-w-and-b", "by-name-55de", "literal-91bc")
# Stands in for the package, which needs a server: tells which secrets it has, and waits to be seen.
WANDB = f"""
import hashlib, json, os, pathlib, time
def init(dir, project, name, config):
    global folder
    folder = pathlib.Path(dir)
    digests = [hashlib.sha256(os.environ[name].encode()).hexdigest() for name in {NAMES}]
    (folder / "ready").write_text(json.dumps([project, name, *digests]))
    while not (folder / "go").exists():
        time.sleep(0.05)
def log(values, step):
    with (folder / "log").open("a") as file:
        file.write(json.dumps([step, values]) + chr(10))
def finish():
    (folder / "finished").touch()
"""
RUN_FILE = f"""\
name: trained
image: {{{{name: '{{image}}'}}}}
gpus: 0
processes: 2
model: {{{{num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 32,
  make_vocab_size_divisible_by: 64}}}}
training: {{{{micro_batch_size: 2, global_batch_size: 4, train_iters: 8, lr: 0.01}}}}
parallel: {{{{tensor_model_parallel_size: 2}}}}
data: {{{{path: data/text, split: '90,10,0', vocab_size: {demo.VOCABULARY}}}}}
checkpoint: {{{{save: ck, load: ck, save_interval: 4}}}}
logging: {{{{log_interval: 1, eval_interval: 100, eval_iters: 1, tensorboard_dir: tb,
  wandb_project: p, wandb_save_dir: wb}}}}
env: {{{{DB_PASSWORD: null, PYTHONPATH: '/opt/megatron/lib:/opt/packages/lib:/standin'}}}}
secrets: {{{{WANDB_API_KEY: key}}}}
mounts: [{{{{source: standin, target: /standin}}}}]
resources: {{{{network: none}}}}
"""
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class User:
    """Uid 12345, who runs the launcher in a container that shares a folder and the engine.

    It is we, where that can't be: the engine is elsewhere, or this Python isn't the image's.
    """

    client: DockerClient
    image: str
    folder: Path
    is_other: bool

    @property
    def ids(self) -> tuple[int, int]:
        return (UID, GID) if self.is_other else (os.getuid(), os.getgid())

    def __call__(self, *args: str) -> Done:
        own = {"HOME": f"{self.folder}/home", "LAUNCHER_RUNS": f"{self.folder}/runs"}
        own |= {"LAUNCHER_CACHE": f"{self.folder}/cache", "DB_PASSWORD": BY_NAME}
        if not self.is_other:
            return launcher(*args, cwd=self.folder, PYTHONPATH=str(ROOT), **own)
        socket = os.environ["DOCKER_HOST"].removeprefix("unix://")
        packages = str(Path(pytest.__file__).parents[1])
        return contained(
            self.client,
            self.image,
            ["python3", "-m", "launcher", *args],
            user=f"{UID}:{GID}",
            group_add=[os.stat(socket).st_gid],
            working_dir=str(self.folder),
            environment={
                **own,
                "DOCKER_HOST": "unix:///engine.sock",
                "PYTHONPATH": "/repo:/opt/megatron/lib:/opt/packages/lib:/testing",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            volumes=[
                f"{ROOT}:/repo:ro",
                f"{packages}:/testing:ro",
                f"{socket}:/engine.sock",
                f"{self.folder}:{self.folder}",
            ],
        )


@pytest.fixture(scope="module")
def user(
    engine: DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[User]:
    """The user, with data that they can't change; afterwards no run may be left."""
    folder = tmp_path_factory.mktemp("trained") / "mine"
    for part in ("home", "data", "standin", "wb"):
        (folder / part).mkdir(parents=True)
    indexed.write(folder / "data/text", demo.text(), demo.VOCABULARY)
    (folder / "standin/wandb.py").write_text(WANDB)
    (folder / "key").write_text(BY_FILE + "\n")
    (folder / "key").chmod(0o600)
    (folder / "run.yaml").write_text(RUN_FILE.format(image=image))
    python = ".".join(map(str, sys.version_info[:2]))
    near = os.environ["DOCKER_HOST"].startswith("unix://") and os.geteuid() == 0
    yours = User(engine, image, folder, near and python == load_matrix().rows["cpu"].python)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, *yours.ids)
    (folder / "data").chmod(0o555)
    yield yours
    wanted = {"label": ["megatron-launchpad.run", "megatron-launchpad.name=trained"]}
    left = engine.containers.list(all=True, filters=wanted)
    for container in left:
        container.remove(force=True)
    assert left == []


@dataclass(frozen=True)
class Trained:
    """What was said of the run, and seen of it while it went on."""

    dry: Done
    listed: Done
    ended: Done
    commands: str
    inspected: dict[str, Any]
    record: Path


@pytest.fixture(scope="module")
def trained(engine: DockerClient, user: User) -> Trained:
    """The run, once it has ended."""
    dry = user("run", "run.yaml", "--dry-run", "--set", f"env.HF_TOKEN={LITERAL}")
    assert dry.returncode == 0, dry.stderr
    run = user("run", "run.yaml", "--detach").stdout.strip()
    until((user.folder / "wb/ready").exists, run)
    (container,) = engine.containers.list(filters={"label": f"megatron-launchpad.run={run}"})
    inspected = engine.api.inspect_container(container.id)
    commands, listed = json.dumps(container.top()["Processes"]), user("ps")
    (user.folder / "wb/go").touch()
    os.chown(user.folder / "wb/go", *user.ids)
    ended = user("attach", run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = (user.folder / "runs").glob("[!.]*/")
    return Trained(dry, listed, ended, commands, inspected, record)


def losses(folder: Path) -> dict[int, float]:
    """The losses by iteration of a run's metrics, of the last attempt that had each."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {step["iteration"]: step["loss"] for step in lines if step["kind"] == "step"}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def owners(folder: Path) -> set[tuple[int, int]]:
    """Who owns what lies in a folder, and the folder."""
    return {(path.stat().st_uid, path.stat().st_gid) for path in [folder, *folder.rglob("*")]}


def test_it_learns_and_its_record_has_what_it_was_made_of(
    engine: DockerClient, trained: Trained
) -> None:
    found = losses(trained.record)
    assert list(found) == [*range(1, 9)]
    assert found[8] < found[1]
    log = (trained.record / "log").read_bytes()
    assert log.startswith(trained.ended.stdout.encode()[:2000])
    (ending,) = map(json.loads, (trained.record / "endings.jsonl").read_text().splitlines())
    assert (ending["outcome"], ending["by"], ending["iteration"]) == ("finished", "itself", 8)
    facts, build = read(trained.record / "facts.json"), read(trained.record / "build.json")
    used = engine.images.get(read(trained.record / "plan.json")["image"])
    assert facts["image"]["id"] == used.id
    assert facts["machine"]["engine"]["version"] == engine.version()["Version"]
    assert len(build["wheel"]["sha256"]) == 64
    assert build["patches"]
    assert build["release"] == facts["image"]["labels"]["megatron-launchpad.megatron"]


def test_what_it_leaves_is_its_user_s(user: User, trained: Trained) -> None:
    assert owners(user.folder) == {user.ids}
    assert sorted(os.listdir(user.folder / "data")) == ["text.bin", "text.idx"]
    assert list((user.folder / "cache/data-index").rglob("*.npy"))
    kept = {"iter_0000004", "iter_0000008", "latest_checkpointed_iteration.txt"}
    assert kept <= set(os.listdir(user.folder / "ck"))


def test_wandb_and_tensorboard_have_its_steps(user: User, trained: Trained) -> None:
    assert "--wandb-exp-name trained" in trained.dry.stdout
    hashes = [hashlib.sha256(one.encode()).hexdigest() for one in (BY_FILE, BY_NAME)]
    told = json.loads((user.folder / "wb/ready").read_text())
    assert told == ["p", "trained", *hashes]
    logged = [json.loads(line) for line in (user.folder / "wb/log").read_text().splitlines()]
    assert [step for step, values in logged if "lm loss" in values] == [*range(1, 9)]
    assert (user.folder / "wb/finished").exists()
    assert len(list((user.folder / "tb").glob("events.out.tfevents.*"))) == 1


def test_its_secrets_are_nowhere_but_in_the_program(trained: Trained) -> None:
    written = [path for path in trained.record.rglob("*") if path.is_file()]
    assert len(written) >= 5
    told = [part for done in (trained.dry, trained.listed, trained.ended) for part in done_of(done)]
    told += [path.read_text(errors="replace") for path in written]
    seen = trained.inspected
    told += [trained.commands, json.dumps(seen["Args"]), json.dumps(seen["Config"]["Cmd"])]
    assert not [text for text in told for secret in SECRETS if secret in text]
    # What is passed by name, the engine shows to those who may use it.
    assert BY_FILE not in json.dumps(seen)
    assert '"/run/secrets/WANDB_API_KEY"' in json.dumps(seen)


def done_of(done: Done) -> tuple[str, str]:
    return done.stdout, done.stderr


def test_it_is_repeated_to_every_digit_and_not_where_something_has_changed(
    user: User, trained: Trained
) -> None:
    for name in ("ready", "log", "finished"):
        (user.folder / "wb" / name).unlink()
    again = user("rerun", "trained")
    assert again.returncode == 0, again.stdout + again.stderr
    (other,) = (path for path in trained.record.parent.glob("[!.]*/") if path != trained.record)
    assert losses(other) == losses(trained.record)
    for iteration in ("iter_0000004", "iter_0000008"):
        files = list((user.folder / "ck" / iteration).glob("*.distcp"))
        assert files
        for path in files:
            twin = user.folder / "ck-rerun" / iteration / path.name
            assert path.read_bytes() == twin.read_bytes()
    drawn = user("plot", trained.record.name, other.name, "-o", "plot.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (user.folder / "plot.png").read_bytes().startswith(b"\x89PNG")

    facts, text = trained.record / "facts.json", (trained.record / "facts.json").read_text()
    facts.write_text(json.dumps(json.loads(text) | {"launcher": "0.0.1"}))
    refused(user("rerun", trained.record.name), 121, "0.0.1", "--force")
    facts.write_text(text)
    assert len([*trained.record.parent.glob("[!.]*/")]) == 2


def test_it_goes_on_in_another_layout(user: User, trained: Trained) -> None:
    more = ("--set", "training.train_iters=10", "--set", "training.lr_decay_iters=10")
    done = user("resume", trained.record.name, "--processes", "1", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TP=2 PP=1 DP=1 -> TP=1 PP=1 DP=1" in done.stderr
    assert re.findall(r" iteration +(\d+)/", done.stdout) == ["9", "10"]
    assert owners(user.folder / "ck") == {user.ids}


CACHES = """\
import getpass, os, pathlib, tempfile
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.cpp_extension import get_default_build_root
home = pathlib.Path.home()
variables = ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
             "MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR")
folders = [home / ".cache", home / ".triton/cache", home / ".config/matplotlib", cache_dir(),
           get_default_build_root(), tempfile.gettempdir(), "/dev/shm", "."]
for folder in [*folders, *filter(None, map(os.environ.get, variables))]:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
print(os.getuid(), os.getgid(), getpass.getuser())
"""


def test_every_cache_folder_is_writable(user: User) -> None:
    (user.folder / "caches.py").write_text(CACHES)
    (user.folder / "caches.yaml").write_text(
        f"name: trained\nimage: {{name: '{user.image}'}}\nprogram: ./caches.py\ngpus: 0\n"
        "resources: {network: none, workdir: out}\n"
    )
    done = user("run", "caches.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    if user.is_other:
        assert f"{UID} {GID} launcher" in done.stdout
    assert owners(user.folder / "out") == {user.ids}


def test_root_stays_who_the_image_says(here: Site, image: str) -> None:
    program = "import os, pathlib\nprint(os.getuid(), pathlib.Path.home())\n"
    config = {"image": {"name": image}, "program": "./program.py", "gpus": 0}
    done = here.launch(config, program)
    assert done.ends() == 0, done
    assert done.out == ("0 /root\n" if os.getuid() == 0 else f"{os.getuid()} /tmp\n")
