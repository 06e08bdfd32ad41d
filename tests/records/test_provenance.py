"""What a run was made of, and what of it is no longer the same."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.machine.machine import Gpu, Machine
from launcher.plan.config import RunConfig
from launcher.plan.mounts import Mount
from launcher.plan.plan import Plan
from launcher.plan.source import Asked, Origin
from launcher.records import provenance

BACKEND: Any = SimpleNamespace(identity=lambda image: {"name": image, "id": "sha256:aa"})


@pytest.fixture
def made(tmp_path: Path, plan: Callable[..., Plan]) -> Callable[..., dict[str, Any]]:
    """The facts of a run that reads a file and a secret."""
    (tmp_path / "text.bin").write_bytes(b"tokens")
    (tmp_path / "key").write_text("se cret")

    def make(*gpus: str) -> dict[str, Any]:
        mounts = (
            Mount(str(tmp_path / "text.bin"), "/data/0/text.bin", True, "data.path"),
            Mount(str(tmp_path / "key"), "/run/secrets/KEY", True, "secrets.KEY"),
            Mount(str(tmp_path), "/work", False, "resources.workdir"),
        )
        started = replace(plan("gpt2-tiny.yaml"), mounts=mounts)
        values = {"name": "a", "image": "cpu", "gpus": 0, "env": {"API_KEY": "se cret"}}
        asked = Asked(RunConfig.model_validate(values), Origin("a", {}, {}), str(tmp_path))
        cards = tuple(Gpu(n, "", name, 0, 0, None, "550") for n, name in enumerate(gpus))
        return provenance.facts_of(started, asked, BACKEND, Machine(gpus=cards))

    return make


def test_facts_are_json_without_secrets_and_with_each_file(
    made: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    facts = json.loads(json.dumps(made("H100")))
    assert "se cret" not in json.dumps(facts)
    (path,) = facts["files"]
    assert path == str(tmp_path / "text.bin")
    assert facts["files"][path]["size"] == 6
    assert facts["config"]["training"]["seed"] is None  # resolved: what wasn't given is there too
    assert facts["machine"]["gpus"][0]["name"] == "H100"


@pytest.mark.parametrize(
    "rest",
    [
        ("--own-token", "hunter2"),
        ("--own", "x", "api_key=hunter2"),
        ("--proxy=http://u:hunter2@h",),
    ],
)
def test_a_kept_plan_has_its_options_without_secrets(
    plan: Callable[..., Plan], rest: tuple[str, ...]
) -> None:
    started = plan("gpt2-tiny.yaml", "program=./mine.py", rest=rest)
    assert "hunter2" in str(started.options)
    kept = json.loads(json.dumps(provenance.kept_plan(started)))
    assert "hunter2" not in json.dumps(kept)
    assert (kept["program"], kept["options"]["num_layers"]) == ("./mine.py", 2)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("launcher", "9.9", "the launcher was"),
        ("source", "abc", "the checkout was"),
        ("began", "/ck/iter_0000020", "it began from no checkpoint"),
        ("image", {"name": "cpu", "id": "sha256:bb"}, "sha256:aa, now sha256:bb"),
        ("files", {}, "text.bin is not the file that it was"),
        ("machine", {"gpus": [{"name": "A100"}]}, "the GPUs were H100, and are A100"),
    ],
)
def test_each_change_is_told(
    made: Callable[..., dict[str, Any]], key: str, value: object, told: str
) -> None:
    then = made("H100")
    now = copy.deepcopy(then) | {key: value}
    (line,) = provenance.changed(then, now)
    assert told in line
    assert provenance.changed(json.loads(json.dumps(then)), then) == []
    assert provenance.changed(then | {"machine": None}, then) == []  # it was not looked at
    for source in (f"{'a' * 40}+edited", "unversioned"):
        edited = then | {"source": source}
        unknown = [f"what was in the checkout isn't known: {source}"]
        assert provenance.changed(edited, edited) == unknown


def test_a_checkout_that_git_refuses_and_a_file_that_only_the_run_may_read_are_no_obstacle(
    made: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "text.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    (told,) = made()["files"].values()
    assert sorted(told) == ["modified", "size"]
    (tmp_path / "checkout/.git").mkdir(parents=True)  # a broken one
    values = {"name": "a", "image": "cpu", "source": "checkout"}
    asked = Asked(RunConfig.model_validate(values), Origin("a", {}, {}), str(tmp_path))
    assert provenance._revision(asked) == "unversioned"


def test_a_small_file_is_known_by_its_content_and_a_large_one_by_size_and_time(
    made: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = made()
    os.utime(tmp_path / "text.bin", (1, 1))
    assert provenance.changed(then, made()) == []
    (tmp_path / "text.bin").write_bytes(b"Tokens")
    assert len(provenance.changed(then, made())) == 1
    monkeypatch.setattr(provenance, "HASHED", 2)
    then = made()
    assert provenance.changed(then, made()) == []
    os.utime(tmp_path / "text.bin", (2, 2))
    assert len(provenance.changed(then, made())) == 1
