"""`image ls` and `image prune` with a real engine: what goes, what stays, and what that frees."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from docker import DockerClient
from docker.errors import ImageNotFound

from launcher.base import owned
from launcher.base.settings import ROOT, Settings
from launcher.images.carry import prune
from launcher.images.engine.acquire import BaseNames
from launcher.images.engine.connect import engine_host
from tests.e2e.command import built, launched, launcher, refused, tarred

pytestmark = pytest.mark.engine


def base(client: DockerClient) -> None:
    """An image of one file, for others to stand on; it isn't ours."""
    content = tarred({"base": b"b" * 5000})
    client.api.import_image_from_data(content, repository="a-base", tag="1")


def made(
    client: DockerClient, content: bytes, *names: str, labels: bool = True, on: str = ""
) -> str:
    """An image as the classic builder makes ours, of one file, under names; its ID."""
    ours = {"key": content.hex()[:64], "row": "cpu", "megatron": "0.16.1"} if labels else {}
    dockerfile = f"FROM {on or 'a-base:1'}\nCOPY stage/ /{'own/' if on else ''}\n"
    named = {f"megatron-launchpad.{key}": value for key, value in ours.items()}
    id = built(client, dockerfile, files={"stage/file": content}, labels=named)
    for name in names:
        client.api.tag(id, *name.split(":"))
    return id


def exists(client: DockerClient, id: str) -> bool:
    try:
        client.api.inspect_image(id)
    except ImageNotFound:
        return False
    return True


def stored(client: DockerClient) -> int:
    """The bytes of all layers, as the engine counts them."""
    return int(client.api.df()["LayersSize"])


def asked(answer: str, client: DockerClient) -> tuple[int, str]:
    """Prune on a terminal, where a person answers; the exit code and all that was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "image", "prune"],
        cwd=ROOT,
        env=os.environ | {"DOCKER_HOST": engine_host(client)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    shown, _ = process.communicate(timeout=120)
    os.close(ours)
    return process.returncode, shown


def test_builds_that_no_tag_names_go_and_all_else_stays(
    elsewhere: DockerClient, tmp_path: Path
) -> None:
    client = elsewhere
    env = {"DOCKER_HOST": engine_host(client), "LAUNCHER_CACHE": str(tmp_path / "cache")}
    base(client)
    old = made(client, b"1" * 3000, "megatron:cpu", "megatron:cpu-0.16.1")
    used = made(client, b"2" * 3000, "megatron:cpu", "megatron:cpu-0.16.1")
    now = made(client, b"3" * 3000, "megatron:cpu", "megatron:cpu-0.16.1")
    named = made(client, b"4" * 3000, "mine:1")
    foreign = made(client, b"5" * 3000, labels=False)
    derived = made(client, b"6" * 3000, labels=False, on=named)
    container = client.containers.create(used, ["/file"])
    beside = tmp_path / "cache/images" / old.removeprefix("sha256:")
    beside.mkdir(parents=True)
    owned.mark(beside)
    (beside / "provenance.json").write_text("{}")

    listed = launched("image", "ls", **env)
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert {one.removeprefix("sha256:")[:12] for one in (old, used, now, named)} == set(lines) - {
        "ID"
    }
    assert listed.stdout.count(now.removeprefix("sha256:")[:12]) == 2  # it has two names
    assert "0.0 MB" in lines[old.removeprefix("sha256:")[:12]]
    assert "unpinned" in lines[old.removeprefix("sha256:")[:12]]
    ids = launched("image", "ls", "--quiet", **env).stdout.split()
    assert ids == [image.id for image in prune.ours(client)]

    told = launched("image", "prune", "--dry-run", **env)
    assert old.removeprefix("sha256:")[:12] in told.stdout
    assert told.stdout.endswith("1 images, 0.0 MB\nnothing was removed\n")
    refused(launcher("image", "prune", **env), 2, "nothing was removed", "--yes")
    assert exists(client, old)

    before = stored(client)
    (chosen,) = prune.to_prune(prune.ours(client), False, 0)
    expected = prune.freed([chosen], prune.rest(client, [chosen]))
    launched("image", "prune", "--yes", **env)
    assert not exists(client, old)
    assert not beside.exists()
    assert all(exists(client, one) for one in (used, now, named, derived, foreign, "a-base:1"))
    assert before - stored(client) == expected == 3000

    container.remove()
    launched("image", "prune", "--all", "--keep", "2", "--yes", **env)
    assert [exists(client, one) for one in (used, now, named)] == [False, True, True]
    before = stored(client)
    chosen_all = prune.to_prune(prune.ours(client), True, 0)
    expected = prune.freed(chosen_all, prune.rest(client, chosen_all))
    launcher("image", "prune", "--all", "--yes", **env)
    assert [exists(client, one) for one in (now, derived, foreign, "a-base:1")] == [
        *(False, True, True, True)
    ]
    assert before - stored(client) == expected == 3000
    assert "mine:1" not in launcher("image", "ls", **env).stdout
    again = launcher("image", "prune", "--all", "--yes", **env)
    assert again.stdout == "0 images, 0.0 MB\nnothing was removed\n"


def test_a_person_is_asked(elsewhere: DockerClient) -> None:
    base(elsewhere)
    old = made(elsewhere, b"1" * 3000)
    code, shown = asked("n\n", elsewhere)
    assert code == 0
    assert "Remove them? [y/N]" in shown
    assert shown.endswith("nothing was removed\n")
    assert exists(elsewhere, old)
    code, shown = asked("y\n", elsewhere)
    assert code == 0
    assert not exists(elsewhere, old)


def test_a_container_made_meanwhile_keeps_its_image(
    elsewhere: DockerClient, site: Settings
) -> None:
    base(elsewhere)
    old = made(elsewhere, b"1" * 3000)
    (chosen,) = prune.to_prune(prune.ours(elsewhere), False, 0)
    container = elsewhere.containers.create(old, ["/file"])
    assert "container" in prune.remove(elsewhere, chosen, site)
    assert exists(elsewhere, old)
    container.remove()
    assert prune.remove(elsewhere, chosen, site) == ""
    assert prune.remove(elsewhere, chosen, site) == ""  # and where somebody else was quicker


def test_what_a_real_image_adds_is_more_than_its_base(
    engine: DockerClient, bases: BaseNames, image: str
) -> None:
    (listed,) = (one for one in prune.ours(engine) if image in one.names)
    inspected = [engine.api.inspect_image(one) for one in (image, bases.base)]
    layers = [one["RootFS"]["Layers"] for one in inspected]
    assert len(listed.added) == len(layers[0]) - len(layers[1]) == 2
    assert sum(listed.added) == inspected[0]["Size"] - inspected[1]["Size"]
    assert (listed.row, listed.release) == ("cpu", "0.16.1")


def test_downloads_that_no_lock_names_are_told_and_removed(tmp_path: Path) -> None:
    from launcher.images.matrix.matrix_file import load_lock
    from launcher.images.matrix.recipe import locked_hashes

    wanted = min(locked_hashes(load_lock()))
    for digest in (wanted, "0" * 64):
        folder = tmp_path / "sha256" / digest
        folder.mkdir(parents=True)
        owned.mark(folder)
        (folder / "some-1.whl").write_bytes(b"x" * 1000)
    env = {"LAUNCHER_CACHE": str(tmp_path), "DOCKER_HOST": "unix:///nowhere"}
    told = launcher("image", "prune", "--cache", "--dry-run", **env)
    assert told.stdout == "some-1.whl\n1 downloads, 0.0 MB\nnothing was removed\n"
    launched("image", "prune", "--cache", "--yes", **env)
    assert [folder.name for folder in (tmp_path / "sha256").iterdir()] == [wanted]
    refused(launcher("image", "prune", "--cache", "--all", **env), 2, "--cache takes neither")
    refused(launcher("image", "prune", "--keep", "-1", **env), 2, "--keep -1")
