"""What an image is scanned for, and what prune takes."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.build import beside
from launcher.build.sbom import sbom
from launcher.cli import main
from launcher.errors import UsageError
from launcher.images import prune, scan
from launcher.images.prune import Layers, OwnImage
from launcher.images.scan import Finding, Package
from launcher.settings import Settings
from tests.build.made import made
from tests.images.osv import Osv, record, serving

from .conftest import Engine

ONE = OwnImage(
    id="sha256:1",
    names=("megatron:cpu",),
    row="cpu",
    release="0.16.1",
    created="2026-01-01T00:00:00Z",
    named="2026-02-01T00:00:00Z",
    layers=("base", "added"),
    added=(20,),
    size=120,
    pinned=True,
    used=False,
)


def unnamed(id: str, **other: object) -> OwnImage:
    return replace(ONE, id=id, names=(), **other)


def test_what_has_a_tag_or_a_container_stays() -> None:
    by_digest = replace(ONE, id="d", names=("r.example/megatron@sha256:ab",))
    images = [ONE, unnamed("a"), unnamed("b", used=True), by_digest]
    assert [one.id for one in prune.to_prune(images, False, 0)] == ["a", "d"]
    assert [one.id for one in prune.to_prune(images, True, 0)] == ["sha256:1", "a", "d"]
    assert [one.id for one in prune.to_prune([replace(ONE, used=True)], True, 0)] == []


BASES = [("a",), ("a", "b"), ("c", "b", "a")]
ADDED = st.lists(st.sampled_from("xyz"), max_size=3).map(tuple)


def stored(images: list[Layers]) -> set[Layers]:
    """What an engine stores: a layer once for all images that have it on top of the same ones."""
    return {layers[:depth] for layers in images for depth in range(1, len(layers) + 1)}


def own(chain: Layers) -> int:
    """A layer's bytes, another number for each chain."""
    return sum(7**depth * ord(layer) for depth, layer in enumerate(chain))


@given(
    st.lists(st.tuples(st.sampled_from(BASES), ADDED), max_size=5),
    st.lists(st.tuples(st.sampled_from(BASES), ADDED), max_size=3),
)
def test_freed_is_what_an_engine_that_shares_layers_would_free(
    ours: list[tuple[Layers, Layers]], others: list[tuple[Layers, Layers]]
) -> None:
    images = [
        replace(
            ONE,
            layers=base + added,
            added=tuple(own(base + added[:n]) for n in range(1, len(added) + 1)),
            size=sum(map(own, stored([base + added]))),
        )
        for base, added in ours
    ]
    kept = [*BASES, *(base + added for base, added in others)]
    gone = stored([image.layers for image in images]) - stored(kept)
    assert prune.freed(images, kept) == sum(map(own, gone))


def test_what_was_named_while_somebody_was_asked_stays(empty_site: Settings) -> None:
    """A build that ends meanwhile: its image had no name yet, or takes that of an older one."""
    engine: Any = Engine()
    new, old = engine.add("m:1", (b"new",)), engine.add("m:2", (b"old",))
    old.names.clear()
    for image in (unnamed(new.id), replace(ONE, id=old.id, names=("m:1",))):
        beside.put({beside.SBOM: b""}, image.id, empty_site)
        assert prune.remove(engine, image, empty_site) == "names were given meanwhile"
        assert beside.texts(image.id, empty_site)
    assert (new.names, old.names, len(engine.images)) == (["m:1"], [], 2)


def test_downloads_that_no_lock_mentions_and_what_a_killed_launcher_left(
    empty_site: Settings,
) -> None:
    left = empty_site.cache / "scratch-ab12cd34"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x" * 7)
    assert prune.downloads(empty_site, [], []) == []
    os.utime(left, (1, 1))  # a day later
    assert prune.downloads(empty_site, [], []) == [left]
    assert (prune.title(left), prune.bytes_in(left)) == ("scratch-ab12cd34", 7)
    shutil.rmtree(left)
    sha256 = empty_site.cache / "sha256"
    for digest in ("aa", "bb"):
        (sha256 / digest).mkdir(parents=True)
        (sha256 / digest / f"{digest}.whl").write_bytes(b"x" * 10)
    known = empty_site.cache / "git/https-github-com-NVIDIA-Megatron-LM-git"
    stale = empty_site.cache / "git/https-example-org-old"
    for other in ("engine", "images/ab"):  # are left alone
        (empty_site.cache / other).mkdir(parents=True)
    for repository in (known, stale):
        (repository / "objects").mkdir(parents=True)
        (repository / "HEAD").write_bytes(b"x" * 5)
    url = "https://github.com/NVIDIA/Megatron-LM.git"
    found = prune.downloads(empty_site, ["aa"], [url])
    assert found == [stale, sha256 / "bb"]
    assert [prune.title(folder) for folder in found] == ["https-example-org-old", "bb.whl"]
    assert [prune.bytes_in(folder) for folder in found] == [5, 10]


EINOPS = Package("einops", "0.8.2")
TORCH = Package("torch", "2.13.0")
BROKEN = record("PYSEC-1", "Torch", "2.13.1", aliases=["CVE-1", "GHSA-1"])
SAME = record("GHSA-1", "torch", "2.13.1", aliases=["CVE-1"])
WITHDRAWN = record("PYSEC-3", "einops", withdrawn="2024-01-01T00:00:00Z")


class Broken(Osv):
    """One that answers, but nothing of use."""

    def answer(self, content: dict[str, Any]) -> None:
        super().answer({"error": "none"})


class Failing(Osv):
    """One that has an error of its own."""

    def answer(self, content: dict[str, Any]) -> None:
        self.send_error(500)


class Dripping(Osv):
    """One whose answer comes byte by byte, slower than anybody waits."""

    def answer(self, content: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(15):
                self.wfile.write(b" ")
                time.sleep(0.1)


def test_each_vulnerability_is_told_once() -> None:
    with serving(Osv, BROKEN, SAME, WITHDRAWN) as api:
        found = scan.scan([EINOPS, TORCH], api)
    names = ("CVE-1",)
    assert found == [Finding(TORCH, "GHSA-1", names, "torch is broken", ("2.13.1",))]


def test_a_withdrawn_record_hides_no_other_of_the_same_vulnerability() -> None:
    gone = record("A-1", "torch", aliases=["CVE-1"], withdrawn="2024-01-01")
    (found,) = scan.findings({TORCH: [gone, BROKEN]})
    assert found.id == "PYSEC-1"


@pytest.mark.parametrize(
    ("handler", "said"),
    [(Broken, "answers otherwise"), (Failing, "500"), (Dripping, "no answer within 0.3 s")],
)
def test_an_api_without_an_answer_of_use_is_told(
    handler: type[Osv], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SECONDS", 0.3)
    with serving(handler, BROKEN) as api, pytest.raises(UsageError, match=said) as caught:
        scan.scan([TORCH], api)
    assert "Nothing was checked" in caught.value.remedy


@pytest.mark.parametrize(
    "spoilt",
    [
        {"affected": [{"package": {"ecosystem": "PyPI"}}]},
        {key: value for key, value in BROKEN.items() if key not in ("summary", "affected")}
        | {"summary": 3},
        BROKEN | {"affected": [{**BROKEN["affected"][0], "ranges": [{"events": []}]}]},
    ],
)
def test_a_record_that_is_none_is_told(spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_ids", lambda *_: {TORCH: {"PYSEC-1"}})
    told = {"id": "PYSEC-1", **spoilt}
    with serving(Osv, told) as api, pytest.raises(UsageError, match="otherwise") as caught:
        scan.scan([TORCH], api)
    assert "Nothing was checked" in caught.value.remedy


def test_a_bill_of_materials_gives_its_packages_alone() -> None:
    found = scan.of_sbom(json.loads(sbom(made())))
    assert found == [EINOPS, Package("megatron-core", "0.9.0"), TORCH]


def test_a_row_is_scanned_as_the_lock_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is needed, the exit code says what was found, a record commands no terminal."""
    escaping = BROKEN | {"summary": "\x1b[2J gone\nmore"}
    with serving(Osv, escaping) as api:
        assert main(["image", "scan", "cpu", "--database", f"{api}/"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "torch 2.13.0  PYSEC-1 CVE-1 GHSA-1  fixed in 2.13.1  \\x1b[2J gone\n"
    assert "1 known" in printed.err
    with serving(Osv) as api:
        assert main(["image", "scan", "24.10", "--database", api]) == 0
    assert "7 packages, no known vulnerability" in capsys.readouterr().err
    assert main(["image", "scan", "24.10", "--database", "http://127.0.0.1:1"]) == 2
    assert "can't be reached\nNothing was checked" in capsys.readouterr().err.replace("  ", "")
