"""The documents beside an image: whole or not there, and about that image."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.build import beside
from launcher.errors import BuildError, UsageError
from launcher.settings import Settings
from tests.build.made import IMAGE, WHEEL, made

RECORD = {"wheel": {"name": "megatron_core.whl", "sha256": WHEEL}}


def test_documents_lie_beside_the_image_and_are_read_back(empty_site: Settings) -> None:
    assert not beside.is_kept(IMAGE, empty_site)
    nothing = beside.kept(IMAGE, empty_site)
    assert (nothing.provenance, nothing.sbom) == (None, None)
    beside.check(nothing, IMAGE, RECORD)
    beside.keep(made(), empty_site)
    assert beside.is_kept(IMAGE, empty_site)
    found = beside.kept(IMAGE, empty_site)
    assert found.folder == empty_site.cache / "images" / IMAGE.removeprefix("sha256:")
    beside.check(found, IMAGE, RECORD)
    assert {path.name for path in found.folder.glob("[!.]*")} == {beside.PROVENANCE, beside.SBOM}


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_that_was_cut_short_leaves_no_document_and_the_next_one_is_whole(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """As a process that is killed: the file that was being written is never in its place."""
    replace, done = os.replace, []

    def killed(*paths: Any) -> None:
        if len(done) == written:
            raise KeyboardInterrupt
        done.append(paths)
        replace(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            beside.keep(made(), empty_site)
    assert not beside.is_kept(IMAGE, empty_site)
    beside.keep(made(), empty_site)
    beside.check(beside.kept(IMAGE, empty_site), IMAGE, RECORD)


@pytest.mark.parametrize("name", [beside.PROVENANCE, beside.SBOM])
@pytest.mark.parametrize("text", ["", "{", "\xff", "[]", "{}", "null", '"text"'])
def test_a_document_that_is_none_is_refused_by_its_place(
    empty_site: Settings, name: str, text: str
) -> None:
    beside.keep(made(), empty_site)
    (beside.folder(IMAGE, empty_site) / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(BuildError, match=IMAGE.removeprefix("sha256:")) as caught:
        beside.check(beside.kept(IMAGE, empty_site), IMAGE, RECORD)
    assert "Remove it" in caught.value.remedy


@pytest.mark.parametrize(("image", "wheel"), [("sha256:" + "0" * 64, WHEEL), (IMAGE, "0" * 64)])
def test_documents_of_another_image_or_wheel_are_refused(
    empty_site: Settings, image: str, wheel: str
) -> None:
    beside.keep(made(), empty_site)
    found = beside.kept(IMAGE, empty_site)
    with pytest.raises(BuildError, match="another image or wheel"):
        beside.check(found, image, {"wheel": {"sha256": wheel}})


OTHER = {"metadata": {"component": {"bom-ref": "sha256:" + "0" * 64}}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (OTHER, " is about another image"),
        *(({"components": told}, ": components") for told in ([1], {"name": 1}, "x", None, [{}])),
        *(
            ({"components": [{"name": "x", "purl": "pkg:pypi/x", **version}]}, r": components\.0")
            for version in ({}, {"version": "none"}, {"version": 1})
        ),
    ],
)
def test_an_sbom_of_another_image_or_of_no_packages_is_refused(
    empty_site: Settings, changed: dict[str, object], said: str
) -> None:
    """`image scan` of a package without a version was a traceback."""
    beside.keep(made(), empty_site)
    path = beside.folder(IMAGE, empty_site) / beside.SBOM
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(BuildError, match=rf"sbom\.cdx\.json{said}"):
        beside.check(beside.kept(IMAGE, empty_site), IMAGE, RECORD)


class _Container:
    """Never started; gives a file as an engine does, in a tar."""

    def __init__(self, content: bytes, name: str = "build.json") -> None:
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        self.archive = tar.getvalue()
        self.containers = SimpleNamespace(create=lambda *_, **__: self)

    def get_archive(self, path: str) -> tuple[Iterator[bytes], None]:
        return (chunk for chunk in [self.archive]), None

    def remove(self, force: bool, v: bool) -> None:
        """Nothing is left of it."""


@pytest.mark.parametrize(
    "container",
    [
        *map(_Container, [b"", b"null", b"[", b"[" * 100_000, b'{"wheel": 1}', bytes(5 << 20)]),
        _Container(b"{}", "link.json"),
    ],
)
def test_the_record_of_an_image_is_read_where_it_is_ours(container: _Container) -> None:
    """Any image can have something there, of any size; it was a traceback."""
    record = {"wheel": {"name": "w.whl", "sha256": WHEEL}, "patches": {}, "release": "0.9.0"}
    assert beside.record(_Container(json.dumps(record).encode()), IMAGE) == record  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"megatron:x: its /opt/megatron/build\.json is none of"):
        beside.record(container, IMAGE, "megatron:x")  # type: ignore[arg-type]
