"""The Debian base: what decides it, where it is taken from, and what stops it."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.engine.private import base
from launcher.errors import EngineError
from tests.images.conftest import Engine

EPOCH = 1_730_000_000


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine without images, on a machine where mmdebstrap's part is stood in for."""
    monkeypatch.setattr(base, "_architecture", lambda: "amd64")
    monkeypatch.setattr(base.os, "geteuid", lambda: 0)
    monkeypatch.setattr(base, "_bootstrap", write_layer)
    return Engine()


def write_layer(layer: Path, recipe: base.Recipe, cache: Path) -> None:
    with tarfile.open(layer, "w") as tar:
        tar.addfile(tarfile.TarInfo(f"./{recipe.suite}"))


def test_made_once_then_taken_from_the_engine_then_from_the_cache(
    client: Engine, tmp_path: Path
) -> None:
    said: list[str] = []
    first = base.debian_base(client, "base:x", EPOCH, cache=tmp_path, say=said.append)
    assert base.debian_base(client, "base:x", EPOCH, cache=tmp_path) == first
    assert (client.loads, len(said)) == (1, 1)
    client.images.clear()
    assert base.debian_base(client, "other:y", EPOCH, cache=tmp_path, say=said.append) == first
    assert (client.loads, len(said)) == (2, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tar"]


def test_the_engine_s_own_id_of_it_is_taken(client: Engine, tmp_path: Path) -> None:
    """In containerd's store that isn't the one of the image's configuration."""
    other = client.add("other:1", [b"other"])
    told = [{"stream": f"Loaded image ID: {other.id}"}]
    client.api.load_image = lambda chunks, quiet: iter(told)
    assert base.debian_base(client, "base:x", EPOCH, cache=tmp_path) == other.id
    assert "base:x" in other.names


def test_a_damaged_one_in_the_cache_is_told(client: Engine, tmp_path: Path) -> None:
    base.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    client.images.clear()
    (made,) = tmp_path.iterdir()
    whole = made.read_bytes()
    for damaged in (b"", whole[:700], whole.replace(b".json", b".jsom", 1)):
        made.write_bytes(damaged)
        with pytest.raises(EngineError, match="the engine doesn't take it") as caught:
            base.debian_base(client, "base:x", EPOCH, cache=tmp_path)
        assert str(made) in caught.value.problem
        assert "Remove it" in caught.value.remedy


def test_an_image_of_another_recipe_is_not_taken(client: Engine, tmp_path: Path) -> None:
    foreign = client.add("base:x", [b"other"], **{base.STANDIN: "debian-bookworm"})
    made = base.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    assert made != foreign.id
    assert client.find("base:x").id == made


def test_nothing_half_made_is_left(
    client: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layer: Path, *_: object) -> None:
        layer.write_bytes(b"half")
        raise EngineError("mmdebstrap failed")

    monkeypatch.setattr(base, "_bootstrap", fail)
    with pytest.raises(EngineError, match="mmdebstrap failed"):
        base.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_is_all_that_decides() -> None:
    recipe = base.Recipe("bookworm", "amd64", 1, ("python3",), (), ())
    assert recipe.key == replace(recipe).key
    others = [replace(recipe, epoch=2), replace(recipe, suite="trixie")]
    others += [replace(recipe, packages=("g++",)), replace(recipe, excluded=("/x",))]
    assert len({recipe.key, *(other.key for other in others)}) == 5
    assert recipe.labels[base.STANDIN] == "debian-bookworm"


def test_a_python_that_no_debian_has_and_another_user_than_root_are_refused(
    client: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"no Debian release has Python 3\.12") as caught:
        base.debian_base(client, "base:x", EPOCH, "3.12", cache=tmp_path)
    assert "3.11" in caught.value.remedy
    monkeypatch.setattr(base.os, "geteuid", lambda: 1000)
    with pytest.raises(EngineError, match="root only"):
        base.debian_base(client, "base:x", EPOCH, cache=tmp_path)


def stand_in_for(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stdout=answer, stderr="", returncode=0)
    monkeypatch.setattr(base.subprocess, "run", lambda *_, **__: done)


def test_this_suites_own_sources_are_used_and_apts_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        "deb http://mirror.site/debian/ bookworm main",
        "deb http://mirror.site/debian/ bookworm-updates main",
        "deb http://mirror.site/debian-security/ bookworm-security main",
        "deb http://mirror.site/debian/ bookworm contrib",
        "deb https://somewhere.else/linux bookworm stable",
        "deb https://somewhere.else/apt cloud-sdk-bookworm main",
        "deb http://mirror.site/debian/ trixie main",
    ]
    stand_in_for("\n".join(lines), monkeypatch)
    assert base._sources("bookworm") == sorted(lines[:3])
    assert base._sources("bullseye") == []
    stand_in_for("proxy='http://proxy.site:3128'\n", monkeypatch)
    assert base._proxies()["http_proxy"] == "http://proxy.site:3128"
    stand_in_for("", monkeypatch)
    assert base._proxies() == {}
