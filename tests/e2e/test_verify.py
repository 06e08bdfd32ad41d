"""Images built again and compared with a real engine: the same ones, and ones that were changed."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from docker.errors import ImageNotFound

from launcher.base.screen import Progress
from launcher.images.builder import beside
from launcher.images.carry.rebuild import REPOSITORY, Departures, Verification
from launcher.images.engine.acquire import STANDIN_NAME
from tests.conftest import NAMES
from tests.e2e.command import built, launcher
from tests.e2e.conftest import Small

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

CHANGED = f"{NAMES}-changed:1"
UTILS = "/opt/megatron/lib/megatron/core/utils.py"


def verify(small: Small, name: str, *options: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code, the report's lines and what stderr says of `image verify`."""
    done = launcher("image", "verify", name, *options, **small.env, **env)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr


def left(engine: DockerClient) -> list[str]:
    """The names of what was built for a comparison and is still there."""
    names = [name for image in engine.images.list() for name in image.tags]
    return [name for name in names if name.startswith(REPOSITORY)]


def changed(engine: DockerClient, image: str, path: str, name: str) -> int:
    """Commit `image` as `name` with one bit of a file flipped; the place of that byte."""
    container = engine.containers.create(image, ["true"])
    try:
        stream, _ = container.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            member = tar.next()
            assert member is not None
            file = tar.extractfile(member)
            assert file is not None
            content = bytearray(file.read())
        place = content.index(b"import")
        content[place] ^= 1
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as tar:
            tar.addfile(member, io.BytesIO(bytes(content)))
        container.put_archive(path.rpartition("/")[0], written.getvalue())
        container.commit(*name.split(":"))
    finally:
        container.remove()
    return place


def test_an_image_of_the_lock_is_identical_and_nothing_is_left(
    engine: DockerClient, small: Small
) -> None:
    stands_in = small.bases.base.startswith(STANDIN_NAME)  # which the image says by itself
    code, lines, said = verify(small, small.name, *([] if stands_in else small.instead))
    assert code == 0, (lines, said)
    assert lines[0].endswith("row 24.10, Megatron 0.10.0 from sdist")
    assert lines[-1] == "identical: wheel, added layers and image"
    for what in ("inputs", "wheel", "layer 1 above the base", "image"):
        at = lines.index(f"{what}: same")
        assert lines[at + 1].split()[1:] == lines[at + 2].split()[1:]
    assert small.id in lines[lines.index("image: same") + 1]
    assert not left(engine)
    assert engine.images.get(small.name).id == small.id
    assert beside.is_kept(small.id, small.site)


@pytest.mark.long
def test_one_changed_byte_is_named_by_file_and_shown_by_diffoscope(
    engine: DockerClient, small: Small, tmp_path: Path
) -> None:
    """With a diffoscope that stands in for the real one: it lists what it is given."""
    program = tmp_path / "bin/diffoscope"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\nLC_ALL=C cmp image/* rebuilt/*\nexit 1\n')
    program.chmod(0o755)
    with suppress(ImageNotFound):  # of a test that was killed: it has the labels of the right one
        engine.api.remove_image(CHANGED)
    place = changed(engine, small.name, UTILS, CHANGED)
    kept = []
    try:
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        code, lines, said = verify(small, CHANGED, *small.instead, "--keep", PATH=path)
        kept = left(engine)
        report = "\n".join(lines)
        assert code == 1, (report, said)
        assert f"{UTILS}\n  sha256: " in report
        assert "first difference, of " in report
        assert "wheel: same" in lines
        assert "image: differs" in lines
        assert "--text - image rebuilt" in report
        assert f"rebuilt/opt%megatron%lib%megatron%core%utils.py differ: char {place + 1}" in report
        assert lines[-2].startswith("differs from what the lock gives")
        assert lines[-1].removeprefix("kept: ") in kept
        assert engine.images.get(kept[0]).id == small.id
    finally:
        for image in (CHANGED, *kept):
            engine.api.remove_image(image)
    assert engine.images.get(small.name).id == small.id


@pytest.mark.long
def test_with_the_classic_builder_wheel_and_files_are_claimed_and_no_more(
    engine: DockerClient, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.images.engine.connect.buildkit", lambda client: None)
    lines: list[str] = []
    departures = Departures(base=small.bases.base, builder=small.bases.builder)
    verification = Verification(engine, small.site, Progress(), lines.append)
    assert verification.verify(small.name, departures), lines
    assert lines[-1].startswith("identical: wheel and added files (content, modes, owners); ")
    assert "different builders" in lines[-1]
    assert not left(engine)


@pytest.mark.long
def test_an_image_on_another_base_says_so_first(
    engine: DockerClient, small: Small, python_image: str
) -> None:
    """Another base: the same one with a file more in it."""
    text = f"FROM {python_image}\nLABEL megatron-launchpad.standin=test\nCOPY Dockerfile /other\n"
    other = f"{NAMES}-other:1"
    built(engine, text, other)
    try:
        code, lines, said = verify(small, small.name, *small.instead, "--base", other)
    finally:
        engine.api.remove_image(other)
    assert code == 1, (lines, said)
    assert lines[1].startswith(f"note: it lies on another base than {other} sha256:")
    assert lines[-1].startswith("differs from what the lock gives")
    assert "layer 1 above the base: same" in lines
    assert not left(engine)
