"""`launcher bisect` for real: a regression planted in a commit, in a package, in a key."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.base.settings import ROOT
from launcher.tools.bisect import built
from tests.e2e.command import built as own_base
from tests.e2e.command import launched, matrix_folder, megatron_of
from tests.e2e.site import Site, standin
from tests.images.builder.conftest import wheel

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

RUN_FILE: dict[str, Any] = {
    "name": "planted",
    "gpus": 0,
    "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    | {"max_position_embeddings": 16, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "training": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 50, "lr": 1e-3},
    "data": {"mock": True, "vocab_size": 100},
}
COMMITS, PLANTED = 40, 23
BROKEN = """
_post_init = TransformerConfig.__post_init__
def _planted(self):
    raise ValueError("planted")
TransformerConfig.__post_init__ = _planted
"""


def bisected(good: str, bad: str, *options: str, cwd: Path, **env: str) -> dict[str, Any]:
    """What the command found, as JSON."""
    own = {"LAUNCHER_RUNS": str(cwd / "runs"), "PYTHONPATH": str(ROOT)}
    done = launched("bisect", good, bad, "--json", *options, cwd=cwd, **(own | env))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def within_bound(found: dict[str, Any]) -> bool:
    """Whether it took as few trials as the command promises."""
    return int(found["trials"]) <= ceil(log2(found["differences"])) + 2


@pytest.fixture
def checkout(engine: DockerClient, image: str, tmp_path: Path) -> Path:
    """The image's Megatron as a checkout of 41 commits, of which one breaks it."""
    folder = megatron_of(engine, image, tmp_path / "checkout")
    name = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "gc.auto=0")

    def git(*words: str) -> None:
        subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    for number in range(COMMITS + 1):
        (folder / "NEWS").write_text(f"{number}\n")
        if number == PLANTED:
            with (folder / "megatron/core/transformer/transformer_config.py").open("a") as file:
                file.write(BROKEN)
        git("add", "--all")
        git("commit", "--quiet", "-m", f"change {number}")
    return folder


def test_a_commit_of_forty_is_found_and_the_next_time_is_free(
    image: str, checkout: Path, tmp_path: Path
) -> None:
    config = RUN_FILE | {"image": {"name": image}, "source": str(checkout)}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    asked = (f"run.yaml@HEAD~{COMMITS}", "run.yaml", "--steps", "1")
    found = bisected(*asked, cwd=tmp_path)
    (cause,) = found["causes"]
    assert cause["kind"] == "commit"
    assert [line.rpartition(": ")[2] for line in cause["between"]] == [f"change {PLANTED}"]
    assert within_bound(found), found
    tried = [*(tmp_path / "runs").glob("bisect-*/*.log")]
    assert bisected(*asked, cwd=tmp_path) == found
    assert [*(tmp_path / "runs").glob("bisect-*/*.log")] == tried


def test_a_key_of_ten_is_found(image: str, tmp_path: Path) -> None:
    """No Python starts with such a seed of its hashes."""
    model = {"num_layers": 2, "num_attention_heads": 8, "swiglu": True, "normalization": "RMSNorm"}
    training = {"weight_decay": 0.0, "clip_grad": 0.5, "seed": 7}
    config = RUN_FILE | {"image": {"name": image}}
    other = {
        **config,
        "model": {**config["model"], **model},
        "training": {**config["training"], **training},
        "data": {**config["data"], "vocab_size": 90},
        "env": {"PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "planted"},
    }
    (tmp_path / "good.yaml").write_text(json.dumps(config))
    (tmp_path / "bad.yaml").write_text(json.dumps(other))
    found = bisected("good.yaml", "bad.yaml", "--steps", "1", cwd=tmp_path)
    assert [cause["name"] for cause in found["causes"]] == ["env.PYTHONHASHSEED"]
    assert found["enough"] is True
    assert found["differences"] == 10
    assert within_bound(found), found


def matrix_of(folder: Path, bases: BaseNames, rows: Mapping[str, str]) -> Path:
    """A matrix whose rows have these bases without torch, and the smallest release."""
    own = {"python": "3.11", "torch": "2.8.0", "megatron": "0.10.0", "source": "sdist"}
    matrix = matrix_folder(folder, {tag: {"base": base, **own} for tag, base in rows.items()})
    data = yaml.safe_load(matrix.read_text())
    data["builders"]["cp311"] = bases.builder
    matrix.write_text(yaml.safe_dump(data, sort_keys=False))
    return matrix


def ends(here: Site, *images: Mapping[str, Any]) -> None:
    """good.yaml and bad.yaml, which run program.py in these images."""
    for name, image in zip(("good", "bad"), images, strict=True):
        config = standin("none") | {"name": here.name}
        config["image"] = {"python": "/standin/python3", **image}
        (here.folder / f"{name}.yaml").write_text(json.dumps(config))


def remove_built(engine: DockerClient) -> None:
    """Remove what trials had built."""
    for image in engine.images.list(built.REPOSITORY):
        engine.images.remove(image.id, force=True)


PACKAGES = [f"lptest{name}" for name in ("alder", "birch", "cedar", "elm", "hazel", "maple")]
"""Names that no index has."""

BROKEN_ONE = "lptestelm"


def test_a_package_of_an_extras_set_is_found(
    engine: DockerClient, here: Site, bases: BaseNames, tmp_path: Path
) -> None:
    """Each trial has an image of its own, with exactly these versions."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in PACKAGES:
        wheel(wheels, name, "1.0")
        broken = name == BROKEN_ONE
        wheel(wheels, name, "2.0", text="raise RuntimeError('planted')" if broken else "")
    matrix = matrix_of(tmp_path, bases, {"24.10": bases.base})

    (here.folder / "program.py").write_text(f"import {', '.join(PACKAGES)}\n")
    old = [f"{one}==1.0" for one in PACKAGES]
    ends(here, {"tag": "24.10", "extras": old}, {"tag": "24.10", "extras": PACKAGES})
    env = here.environment | {
        "LAUNCHER_MATRIX": str(matrix),
        "LAUNCHER_EXTRAS": str(tmp_path / "extras"),
        "PIP_FIND_LINKS": str(wheels),
    }
    found = bisected("good.yaml", "bad.yaml", cwd=here.folder, **env)
    (cause,) = found["causes"]
    assert (cause["kind"], cause["name"]) == ("package", BROKEN_ONE)
    assert (cause["last_good"], cause["first_bad"]) == ("1.0", "2.0")
    assert found["enough"] is True
    assert within_bound(found), found
    remove_built(engine)


BASES = ("24.07", "24.08", "24.09", "24.10")


def test_a_base_tag_of_four_is_found(
    engine: DockerClient, here: Site, bases: BaseNames, tmp_path: Path
) -> None:
    """From the third on they have a variable that the program can't bear."""
    names = {tag: f"launchpad-test:bisect-{tag}" for tag in BASES}
    for tag, name in names.items():
        broken = "yes" if tag >= BASES[2] else "no"
        own_base(
            engine, f"FROM {bases.base}\nENV PLANTED={broken}\nENV OWN={here.name}-{tag}\n", name
        )
    matrix = matrix_of(tmp_path, bases, names)
    (here.folder / "program.py").write_text("import os\nassert os.environ['PLANTED'] == 'no'\n")
    ends(here, {"tag": BASES[0]}, {"tag": BASES[-1]})
    env = here.environment | {"LAUNCHER_MATRIX": str(matrix)}
    found = bisected("good.yaml", "bad.yaml", cwd=here.folder, **env)
    (cause,) = found["causes"]
    assert (cause["kind"], cause["last_good"], cause["first_bad"]) == ("base", *BASES[1:3])
    assert found["differences"] == len(BASES) - 1
    assert within_bound(found), found
    remove_built(engine)
    for name in names.values():
        engine.images.remove(name)


RELEASES = """
from importlib.metadata import version
assert tuple(map(int, version("megatron-core").split("."))) < (0, 14), "planted"
"""


def test_a_release_of_seven_is_found(
    engine: DockerClient, here: Site, bases: BaseNames, tmp_path: Path
) -> None:
    """Each trial has an image of its own, with that release compiled in it."""
    matrix = matrix_of(tmp_path, bases, {"24.10": bases.base})
    (here.folder / "program.py").write_text(RELEASES)
    ends(here, *({"tag": "24.10", "megatron": release} for release in ("0.10.0", "0.16.1")))
    env = here.environment | {"LAUNCHER_MATRIX": str(matrix)}
    found = bisected("good.yaml", "bad.yaml", cwd=here.folder, **env)
    (cause,) = found["causes"]
    assert (cause["kind"], cause["last_good"], cause["first_bad"]) == (
        "release",
        "0.13.1",
        "0.14.0",
    )
    assert found["differences"] == 6
    assert within_bound(found), found
    remove_built(engine)
