"""Exporting: what a cluster starts has the image's files, and nothing that reaches out of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.errors import EngineError, UsageError
from launcher.files import Refused
from launcher.images.export import export
from launcher.images.images import Image
from launcher.screen import Progress

CONFIG = {"Env": ["A=b c"], "Entrypoint": ["/init", "a b"], "Cmd": ["run"], "WorkingDir": "/work"}
Member = tuple[str, bytes, str, int]
"""A name, a type of tarfile's, a link's target or a file's content, and a mode."""

FILES: list[Member] = [
    ("etc", tarfile.DIRTYPE, "", 0o755),
    ("etc/environment", tarfile.REGTYPE, "OLD=1", 0o644),
    ("bin", tarfile.DIRTYPE, "", 0o555),
    ("bin/su", tarfile.REGTYPE, "su", 0o4755),
    ("bin/also", tarfile.LNKTYPE, "bin/su", 0o4755),
    ("bin/out", tarfile.SYMTYPE, "/etc/passwd", 0o777),
    (".dockerenv", tarfile.REGTYPE, "", 0o755),
]


def stream(members: list[Member]) -> bytes:
    """A tar of these."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, told, mode in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kind, mode, 1_000_000
            member.uid, member.gid = os.getuid(), os.getgid()
            content = told.encode() if kind == tarfile.REGTYPE else b""
            member.linkname, member.size = "" if content else told, len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


class Engine:
    """A stand-in for docker's client with one image."""

    def __init__(self, content: bytes) -> None:
        def chunks(**_: int) -> Iterator[bytes]:
            yield from (content[at : at + 1000] for at in range(0, len(content), 1000))

        container = SimpleNamespace(export=chunks, remove=lambda **_: None)
        self.containers = SimpleNamespace(create=lambda *_, **__: container)
        self.api = SimpleNamespace(
            inspect_image=lambda _: {"Config": CONFIG},
            get_image=lambda _, chunk_size: chunks(),
            containers=lambda **_: [],
        )


def exported(target: Path, form: str, members: list[Member] = FILES, cut: int | None = None) -> Any:
    image = Image("sha256:0", ("megatron:24.10",), (), (), {})
    engine: Any = Engine(stream(members)[:cut])
    export(engine, image, target, form, Progress(io.StringIO()))
    return target


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program of this name that is no real one."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_bundle_gives_nobody_on_the_host_more_rights(tmp_path: Path) -> None:
    """Its su would have been the machine's own root's, for all who see the shared disk."""
    root = exported(tmp_path / "new", "oci") / "rootfs"
    su = (root / "bin/su").stat()
    assert (su.st_mode & 0o7777, su.st_nlink) == (0o755, 2)
    assert (root / "bin/out").readlink() == Path("/etc/passwd")
    assert (root / "bin").stat().st_mtime == 1_000_000
    assert not (root / ".dockerenv").exists()
    told = json.loads((tmp_path / "new/config.json").read_text())
    assert told["process"]["args"] == ["/init", "a b", "run"]
    assert told["process"]["cwd"] == "/work"


def test_a_device_is_not_made(tmp_path: Path) -> None:
    members = [*FILES, ("disk", tarfile.BLKTYPE, "", 0o666)]
    assert not (exported(tmp_path / "new", "oci", members) / "rootfs/disk").exists()


@pytest.mark.parametrize(
    "members",
    [
        [("a/../../../victim", tarfile.REGTYPE, "x", 0o644)],
        [("a", tarfile.SYMTYPE, "{}", 0o777), ("a/victim", tarfile.REGTYPE, "x", 0o644)],
        [("a", tarfile.SYMTYPE, "{}/victim", 0o777), ("a", tarfile.REGTYPE, "x", 0o644)],
        [("a", tarfile.SYMTYPE, "{}", 0o777), ("b", tarfile.LNKTYPE, "a/victim", 0o644)],
        [("b", tarfile.LNKTYPE, "../../victim", 0o644)],
    ],
    ids=["dots", "through-a-link", "over-a-link", "hard-link-through-a-link", "hard-link-out"],
)
def test_nothing_outside_is_written_or_linked(tmp_path: Path, members: list[Member]) -> None:
    """As root, /etc/shadow would have been in the bundle, or have been another."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    filled = [(name, kind, told.format(tmp_path), mode) for name, kind, told, mode in members]
    with pytest.raises(Refused):
        exported(tmp_path / "new", "oci", filled)
    assert (victim.read_text(), victim.stat().st_nlink) == ("mine", 1)
    assert [*tmp_path.iterdir()] == [victim]


def test_a_hard_link_to_a_link_changes_nothing_outside(tmp_path: Path) -> None:
    """Its owner, mode and time would have been given to the file that the link names."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    before = victim.stat()
    members = [("a", tarfile.SYMTYPE, str(victim), 0o777), ("b", tarfile.LNKTYPE, "a", 0o666)]
    root = exported(tmp_path / "new", "oci", members) / "rootfs"
    assert (root / "b").readlink() == victim
    assert victim.stat() == before


def test_an_absolute_name_lies_inside(tmp_path: Path) -> None:
    members: list[Member] = [("/a", tarfile.REGTYPE, "x", 0o644), ("b", tarfile.LNKTYPE, "/a", 0)]
    root = exported(tmp_path / "new", "oci", members) / "rootfs"
    assert [path.stat().st_ino for path in sorted(root.iterdir())] == [
        (root / "a").stat().st_ino
    ] * 2


@pytest.mark.parametrize("form", ["oci", "sqsh"])
def test_a_stream_that_is_cut_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    stand_in(tmp_path / "bin", monkeypatch, "sqfstar", 'cat > "${@: -1}"')
    with pytest.raises(EngineError, match="early"):
        exported(tmp_path / "new", form, cut=2000)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_tool_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo half > "${@: -1}"; echo no room >&2; exit 3'
    stand_in(tmp_path / "bin", monkeypatch, "sqfstar", script)
    with pytest.raises(EngineError, match="exit code 3: no room"):
        exported(tmp_path / "new", "sqsh")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(("form", "tool"), [("sqsh", "sqfstar"), ("sif", "apptainer")])
def test_a_missing_tool_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, tool: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=f"no {tool} here"):
        exported(tmp_path / "new", form)


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        exported(tmp_path / "new", "oci")
    assert (tmp_path / "new").read_text() == "mine"


def test_apptainer_is_given_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "bin", monkeypatch, "apptainer", 'cp "${4#docker-archive:}" "$3"')
    assert exported(tmp_path / "new", "sif").read_bytes() == stream(FILES)


def test_enroot_finds_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a container of the .sqsh has another PATH than the image's."""
    stand_in(tmp_path / "bin", monkeypatch, "sqfstar", 'cat > "${@: -1}"')
    with tarfile.open(exported(tmp_path / "new", "sqsh")) as tar:
        names = tar.getnames()
        assert (names.count("etc/environment"), names.count("bin/also")) == (1, 1)
        assert tar.getmember("bin/su").mode == 0o4755
        told: Any = [tar.extractfile(f"etc/{name}") for name in ("environment", "rc")]
        variables, script = (file.read().decode() for file in told)
    assert variables == "A=b c\n"
    script = script.replace("cd -- /work", "cd -- /").replace("exec /init", "printf '<%s>' /init")
    ran = [subprocess.check_output(["sh", "-c", script, "rc", *more]) for more in ((), ("x y",))]
    assert ran == [b"</init><a b><run>", b"</init><a b><x y>"]


@pytest.mark.skipif(
    not (shutil.which("sqfstar") and shutil.which("unsquashfs")),
    reason="squashfs-tools 4.5 isn't here",
)
def test_a_real_squashfs_has_the_modes_and_links(tmp_path: Path) -> None:
    made = exported(tmp_path / "new", "sqsh")
    listed = subprocess.check_output(["unsquashfs", "-lln", str(made)], text=True)
    lines = {line.split()[5]: line for line in listed.splitlines() if "squashfs-root" in line}
    assert lines["squashfs-root"].startswith("drwxr-xr-x ")  # anybody could write, by default
    assert lines["squashfs-root/bin/su"].startswith(f"-rwsr-xr-x {os.getuid()}/{os.getgid()}")
    assert "-> /etc/passwd" in lines["squashfs-root/bin/out"]
    assert subprocess.check_output(["unsquashfs", "-cat", str(made), "bin/also"]) == b"su"
