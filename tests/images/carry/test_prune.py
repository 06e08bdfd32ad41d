"""What prune takes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.base.settings import Settings
from launcher.images.builder import beside
from launcher.images.carry import prune
from launcher.images.carry.prune import Layers, OwnImage

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


def test_repositories_that_no_lock_mentions_and_what_a_killed_launcher_left(
    empty_site: Settings,
) -> None:
    """Downloads are in tests/e2e/test_prune.py."""
    left = empty_site.cache / "scratch-ab12cd34"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x" * 7)
    assert prune.downloads(empty_site, [], []) == []
    os.utime(left, (1, 1))  # a day later
    assert prune.downloads(empty_site, [], []) == [left]
    assert (prune.title(left), prune.bytes_in(left)) == ("scratch-ab12cd34", 7)
    shutil.rmtree(left)
    known = empty_site.cache / "git/https-github-com-NVIDIA-Megatron-LM-git"
    stale = empty_site.cache / "git/https-example-org-old"
    for other in ("engine", "images/ab"):  # are left alone
        (empty_site.cache / other).mkdir(parents=True)
    for repository in (known, stale):
        (repository / "objects").mkdir(parents=True)
        (repository / "HEAD").write_bytes(b"x" * 5)
    url = "https://github.com/NVIDIA/Megatron-LM.git"
    assert prune.downloads(empty_site, [], [url]) == [stale]
    assert (prune.title(stale), prune.bytes_in(stale)) == ("https-example-org-old", 5)
