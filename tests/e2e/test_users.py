"""A user that nobody knows, uid 12345, runs the launcher: all that a run leaves is theirs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher import demo
from launcher.data import indexed
from launcher.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UID, GID = 12345, 23456
FEW = (
    *("model.hidden_size=64", "model.seq_length=64", "training.global_batch_size=4"),
    *("training.micro_batch_size=2", "training.train_iters=2", "training.lr_warmup_iters=1"),
    *("logging.eval_interval=100", "data.path=data/text", "data.cache=null"),
)
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


class User:
    """Runs the launcher as uid 12345, in a container that shares a folder and the engine."""

    def __init__(self, client: DockerClient, image: str, folder: Path) -> None:
        self.client = client
        self.image = image
        self.folder = folder
        self.socket = os.environ["DOCKER_HOST"].removeprefix("unix://")

    def __call__(self, *args: str) -> tuple[int, str]:
        """The exit code and what was printed."""
        container = self.client.containers.create(
            self.image,
            ["python3", "-m", "launcher", *args],
            user=f"{UID}:{GID}",
            group_add=[os.stat(self.socket).st_gid],
            init=True,
            network_mode="none",
            working_dir=str(self.folder),
            environment={
                "HOME": f"{self.folder}/home",
                "DOCKER_HOST": "unix:///engine.sock",
                "PYTHONPATH": "/repo:/opt/megatron/lib:/opt/packages/lib:/testing",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            volumes={
                str(ROOT): {"bind": "/repo", "mode": "ro"},
                str(Path(pytest.__file__).parents[1]): {"bind": "/testing", "mode": "ro"},
                self.socket: {"bind": "/engine.sock", "mode": "rw"},
                str(self.folder): {"bind": str(self.folder), "mode": "rw"},
            },
        )
        try:
            container.start()
            return container.wait()["StatusCode"], container.logs().decode()
        finally:
            container.remove(force=True)


@pytest.fixture
def user(engine: DockerClient, cpu_images: CpuImages, tmp_path: Path) -> Iterator[User]:
    """The user, with a folder and data of their own; afterwards no run may be left."""
    if not os.environ["DOCKER_HOST"].startswith("unix://"):
        pytest.skip("the engine's socket is on another machine")
    folder = tmp_path / "mine"
    (folder / "home").mkdir(parents=True)
    (folder / "data").mkdir()
    indexed.write(folder / "data/text", demo.text(), demo.VOCABULARY)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, GID)
    (folder / "data").chmod(0o555)
    yield User(engine, cpu_images.build(), folder)
    left = engine.containers.list(
        all=True, filters={"label": ["megatron-launchpad.run", "megatron-launchpad.name=users"]}
    )
    for container in left:
        container.remove(force=True)
    assert left == []


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def owners(folder: Path) -> set[tuple[int, int]]:
    """Who owns what lies in a folder, and the folder."""
    return {(path.stat().st_uid, path.stat().st_gid) for path in [folder, *folder.rglob("*")]}


def test_what_training_leaves_belongs_to_them(user: User) -> None:
    code, printed = user("run", "demo.yaml", *sets("name=users", f"image={user.image}", *FEW))
    if "No module named 'pydantic_core" in printed:
        pytest.skip("this environment's Python isn't the image's")
    assert code == 0, printed
    assert "finished after iteration 2" in printed
    assert sorted(path.name for path in (user.folder / "checkpoints").iterdir()) == [
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]
    index = user.folder / "home/.cache/megatron-launchpad/data-index"
    assert list(index.rglob("*.npy"))
    assert sorted(path.name for path in (user.folder / "data").iterdir()) == [
        "text.bin",
        "text.idx",
    ]
    assert owners(user.folder) == {(UID, GID)}

    run = re.search(
        r"(\w{8})", next((user.folder / "home/.local/state").rglob("run.json")).parent.name
    )
    assert run
    code, printed = user("resume", run[1], "--processes", "1", *sets("training.train_iters=3"))
    assert code == 0, printed
    assert "TP=2 PP=1 DP=1 -> TP=1 PP=1 DP=1" in printed
    assert "finished after iteration 3" in printed
    assert owners(user.folder) == {(UID, GID)}


def test_every_cache_folder_is_writable(user: User) -> None:
    (user.folder / "caches.py").write_text(CACHES)
    (user.folder / "run.yaml").write_text(
        f"name: users\nimage: {{name: '{user.image}'}}\nprogram: ./caches.py\ngpus: 0\n"
        "resources: {network: none, workdir: out}\n"
    )
    code, printed = user("run", "run.yaml")
    assert code == 0, printed
    assert f"{UID} {GID} launcher" in printed
    assert owners(user.folder / "out") == {(UID, GID)}


def test_root_stays_who_the_image_says(user: User, tmp_path: Path) -> None:
    from tests.e2e.command import launcher

    (tmp_path / "who.py").write_text(
        "import os, pathlib\nprint(os.getuid(), pathlib.Path.home())\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"name: users\nimage: {{name: '{user.image}'}}\nprogram: {tmp_path}/who.py\ngpus: 0\n"
    )
    done = launcher("run", str(tmp_path / "run.yaml"))
    expected = "0 /root\n" if os.getuid() == 0 else f"{os.getuid()} /tmp\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
