"""What repeats a run, in folders of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.plan.config import RunConfig
from launcher.plan.image import Facts
from launcher.records import repeat


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "a", "image": "cpu", **sections})


def test_it_saves_elsewhere_and_finds_nothing_where_nothing_was(tmp_path: Path) -> None:
    (tmp_path / "ck-rerun").mkdir()
    asked = config(checkpoint={"save": "ck/", "load": f"{tmp_path}/ck"})
    found, notes = repeat.aside(asked, str(tmp_path), began=False)
    assert found.checkpoint.save == found.checkpoint.load == "ck-rerun2"
    assert notes == ["it saves to ck-rerun2"]
    assert repeat.aside(config(), str(tmp_path), began=False) == (config(), [])  # writes nothing


def test_it_goes_on_from_where_that_run_went_on(tmp_path: Path) -> None:
    asked = config(checkpoint={"save": "ck", "load": "ck"})
    found, _ = repeat.aside(asked, str(tmp_path), began=True)
    assert (found.checkpoint.save, found.checkpoint.load) == ("ck-rerun", "ck")
    asked = config(checkpoint={"save": "ck", "load": "other"}, logging={"tensorboard_dir": "tb"})
    found, _ = repeat.aside(asked, str(tmp_path), began=False)
    assert (found.checkpoint.load, found.logging.tensorboard_dir) == ("other", "tb-rerun")


def test_all_nodes_find_the_same_folder(tmp_path: Path) -> None:
    asked = config(checkpoint={"save": "ck"}, nodes={"count": 2, "master_addr": "a"})
    for name in ("ck-rerun", "ck-rerun"):
        found, _ = repeat.aside(asked, str(tmp_path), began=False)
        assert found.checkpoint.save == name
        (tmp_path / name).mkdir(exist_ok=True)  # by the first node, which waits for the others
    (tmp_path / "ck-rerun/iter_0000010").mkdir()
    found, _ = repeat.aside(asked, str(tmp_path), began=False)
    assert found.checkpoint.save == "ck-rerun2"


def test_a_task_of_an_array_learns_from_another_seed_in_folders_of_its_own() -> None:
    keys = {"checkpoint": {"save": "/ck/", "load": "/ck/"}, "slurm": {"array": "1-3"}}
    found = repeat.as_task(config(**keys, training={"seed": 7}), 3, "/")
    assert (found.training.seed, found.slurm.array) == (10, None)
    assert found.checkpoint.save == found.checkpoint.load == "/ck/3"
    assert found.env == {"SLURM_ARRAY_TASK_ID": "3"}
    assert repeat.as_task(config(), 3, "/").training.seed == 1237
    assert repeat.as_task(config(program="./own.py"), 3, "/").training.seed is None


def test_where_it_writes_over_what_that_run_wrote_is_told(tmp_path: Path) -> None:
    mounts = [
        {"source": "in", "target": "/in"},
        {"source": "out", "target": "/out", "read_only": False},
    ]
    _, notes = repeat.aside(
        config(mounts=mounts, resources={"workdir": "work"}), str(tmp_path), began=False
    )
    assert notes == [f"it writes to {folder}, as that run did" for folder in ("out", "work")]


def engine(now: str, *there: str, contained: bool = True) -> Any:
    """A backend whose image of any name has the id `now`, and that has the images `there`."""
    return SimpleNamespace(
        contained=contained,
        identity=lambda image: {"name": image, "id": {"megatron:cpu": now}[image]},
        facts=lambda image: Facts() if image in there else None,
    )


def test_the_very_image_is_taken_while_it_is_there() -> None:
    asked, image = config(), {"name": "megatron:cpu", "id": "sha256:then"}
    then, name = "sha256:then", "megatron:cpu"
    assert repeat.pinned(asked, image, engine(then, name, then)) is asked
    assert repeat.pinned(asked, image, engine("sha256:now", name)) is asked  # and that is told of
    assert repeat.pinned(asked, image, engine("python 3", contained=False)) is asked
    assert repeat.pinned(asked, image, engine("sha256:now")) is asked  # nothing is left
    assert repeat.pinned(asked, image, engine("sha256:now", then)) != asked  # but for its name
    found = repeat.pinned(asked, image, engine("sha256:now", name, then))
    assert (found.image.name, found.image.tag) == ("sha256:then", None)
    kept = found.model_dump(mode="json", exclude_unset=True)
    assert RunConfig.model_validate(kept).image.name == "sha256:then"
    foreign = config(image={"name": "megatron:cpu", "megatron": "0.9.0"})
    found = repeat.pinned(foreign, image, engine("sha256:now", name, then))
    assert found.image.megatron == "0.9.0"  # which such an image doesn't say itself


def test_another_command_is_told() -> None:
    then = {"run": "0a1b", "argv": ["a", "--lr", "1", "/runs/0a1b"], "ulimits": [["stack", 1]]}
    same = {"run": "2c3d", "argv": ("a", "--lr", "1", "/runs/2c3d"), "ulimits": (("stack", 1),)}
    assert list(repeat.differences(then, same)) == []
    other = same | {"argv": ("a", "--lr", "2")}
    (line,) = repeat.differences(then, other)
    assert "--lr" in line
