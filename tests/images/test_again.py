"""What is built again for an image, what is told before, and what two builders let be claimed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.build import beside
from launcher.build.image import OCI, Built
from launcher.errors import BuildError, UsageError
from launcher.images import again
from launcher.images.again import (
    Claims,
    Comparison,
    Departures,
    Subject,
    Verification,
    claims,
    notes,
    request,
    unnamed,
)
from launcher.images.compare import Difference
from launcher.matrix.load import load_matrix
from launcher.names import LABEL
from launcher.screen import Progress
from launcher.settings import Settings

from .conftest import Engine

LABELS = {f"{LABEL}row": "24.10", f"{LABEL}megatron": "0.12.3", f"{LABEL}source": "git"}
EPOCH = 1735689600  # 2025-01-01
BUILDKIT, CLASSIC = "buildkit.dockerfile.v0", ""
BASE = Subject("sha256:b", (), ("b1", "b2"), "", {}, [{"CreatedBy": "x", "Comment": BUILDKIT}], [1])


def built(by: str = BUILDKIT, created: str = "2025-01-01T00:00:00Z", top: str = "1") -> Subject:
    step = {"CreatedBy": "COPY /stage/ /", "Comment": by}
    settings = {"Labels": LABELS}
    layers = (*BASE.layers, f"m{top}")
    return Subject("sha256:i", (), layers, created, settings, [*BASE.history, step], [1, EPOCH])


PATH = {f"{LABEL}source": "path"}


@pytest.mark.parametrize(
    ("change", "departures", "expected"),
    [
        (
            {},
            Departures(base="mirror/pytorch:{tag}-py3", builder="b"),
            {"tag": "24.10", "megatron": "0.12.3", "no_cache": True, "architectures": None}
            | {"base": "mirror/pytorch:24.10-py3", "builder": "b"},
        ),
        (
            {f"{LABEL}row": "cuda-12.4", f"{LABEL}architectures": "90a"},
            Departures(),
            {"tag": "cuda-12.4", "architectures": "90a"},
        ),
        (PATH, Departures(checkout=Path("/m")), {"checkout": Path("/m")}),
        (  # a checkout of another patch release is built by the same rules
            PATH | {f"{LABEL}megatron": "0.12.1", f"{LABEL}rules": "0.12.3"},
            Departures(checkout=Path("/m")),
            {"megatron": "0.12.3"},
        ),
    ],
)
def test_what_is_built_again_is_what_the_labels_say(
    change: dict[str, str], departures: Departures, expected: dict[str, Any]
) -> None:
    found = request("x", LABELS | change, departures, load_matrix())
    assert {key: getattr(found, key) for key in expected} == expected


MADE = LABELS | {f"{OCI}base.name": "standin:1", f"{LABEL}builder": "standin:2"}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({f"{LABEL}row": ""}, BuildError, r"has no label megatron-launchpad\.row"),
        ({f"{LABEL}row": "99.99"}, BuildError, "row '99.99', which the matrix doesn't have"),
        (PATH, UsageError, "--source PATH"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(
    change: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        request("x", MADE | change, Departures(), load_matrix())


def test_base_and_builder_that_the_image_names_are_both_told() -> None:
    """One of them was."""
    wanted = request("x", MADE, Departures(), load_matrix())
    assert unnamed(MADE, wanted, "row:1") == {"base": "standin:1", "builder": "standin:2"}
    assert unnamed(MADE, replace(wanted, base="b"), "row:1") == {"builder": "standin:2"}
    assert (
        unnamed(MADE | {f"{OCI}base.name": "row:1", f"{LABEL}builder": ""}, wanted, "row:1") == {}
    )


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"standin:1": True, "standin:2": True}, ("standin:1", "standin:2")),
        ({"standin:1": True, "standin:2": False}, ("standin:1", None)),
        ({}, (None, None)),
    ],
)
def test_stand_ins_that_are_here_need_no_option(
    empty_site: Settings, there: dict[str, bool], taken: tuple[str | None, str | None]
) -> None:
    """After a demo without a registry, `make verify TAG=cpu` wanted both of them named."""
    engine: Any = Engine()
    for name, stands_in in there.items():
        engine.add(name, (name.encode(),), **({f"{LABEL}standin": "d"} if stands_in else {}))
    verification = Verification(engine, empty_site, Progress(io.StringIO()))
    image = replace(built(), settings={"Labels": MADE})
    found = verification._standins(image, Departures())
    assert (found.get("base"), found.get("builder")) == taken
    assert verification._standins(image, Departures(base="a", builder="b")) == {}


def test_another_base_and_other_inputs_are_noted_with_what_the_labels_say() -> None:
    image = replace(built(), settings={"Labels": {**LABELS, f"{LABEL}version": "0.1"}})
    now = {f"{OCI}base.name": "base:1", f"{LABEL}version": "0.2"}
    base = replace(BASE, layers=("b1", "other", "b3"))
    first, second, *rest = notes(image, base, now, "k")
    assert first == "it lies on another base than base:1 sha256:b: it has 1 of that one's 3 layers"
    assert "other inputs" in second
    assert rest == [f"{LABEL}version: 0.1, now 0.2", f"{OCI}base.name: none, now base:1"]
    same = replace(built(), settings={"Labels": {**LABELS, f"{LABEL}key": "k"}})
    assert list(notes(same, BASE, {f"{OCI}base.name": "base:1"}, "k")) == []


LATE = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("image", "rebuilt", "layers", "whole"),
    [
        (built(), built(), True, True),
        (built(created=LATE), built(), True, True),  # it was changed, or made by something else
        (built(), built(created=LATE), True, False),
        (built(CLASSIC), built(), False, False),
        (built(CLASSIC, LATE), built(CLASSIC, LATE), False, False),
        (built(CLASSIC, LATE), built(CLASSIC), False, False),
        (built(CLASSIC), built(CLASSIC), True, True),  # Podman with its --timestamp
    ],
)
def test_claims_are_what_the_builders_allow(
    image: Subject, rebuilt: Subject, layers: bool, whole: bool
) -> None:
    found = claims(image, rebuilt, BASE, EPOCH)
    assert (found.layers, found.image) == (layers, whole)
    assert bool(found.because) == (not whole)


def test_on_another_base_as_many_layers_are_compared_as_are_added() -> None:
    image = replace(built(), layers=("o1", "o2", "o3", "m1"))
    pair = Comparison(image, built(), BASE, Claims(), (None, None), None, print)  # type: ignore[arg-type]
    assert pair._added() == (("m1",), ("m1",))
    changed = replace(pair, image=replace(image, layers=(*BASE.layers, "m1", "extra")))
    assert changed._added() == (("m1", "extra"), ("m1",))


@pytest.mark.parametrize(
    ("seconds", "within", "said"),
    [
        (0, 5, "  a and b differ"),
        (9, 1, "diffoscope takes more than 1 s: --diffoscope waits for it"),
        (1, None, "  a and b differ"),
    ],
)
def test_diffoscope_is_used_where_it_is_installed_and_takes_long_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, within: int | None, said: str
) -> None:
    program = tmp_path / "diffoscope"
    program.write_text(f"#!/bin/sh\nsleep {seconds}\necho a and b differ\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(again, "copy_out", lambda *_: False)
    lines: list[str] = []
    out = Progress(io.StringIO())
    pair = Comparison(built(), built(), BASE, Claims(), (None, None), out, lines.append)  # type: ignore[arg-type]
    pair._look_inside([Difference("/a", None, None)], within)
    assert lines == [said]


def test_what_is_built_again_goes_with_its_documents_unless_it_was_there(
    empty_site: Settings,
) -> None:
    engine: Any = Engine()
    new, there = engine.add("verify-1:cpu", (b"new",)), engine.add("verify-1:old", (b"there",))
    there.names.append("megatron:cpu")
    verification = Verification(engine, empty_site, Progress(io.StringIO()))
    for held in (new, there):
        beside.put({beside.SBOM: b""}, held.id, empty_site)
        verification._remove(Built(held.names[:1], held.id, reused=False))
    assert (new.names, there.names) == ([], ["megatron:cpu"])
    assert not beside.texts(new.id, empty_site)
    assert beside.texts(there.id, empty_site)


def test_without_diffoscope_nothing_is_built_for_it(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    verification = Verification(None, empty_site, Progress(io.StringIO()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no diffoscope"):
        verification.verify("x", Departures(), diffoscope=True)
