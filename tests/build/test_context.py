"""The build context: the same inputs give the same bytes, and each input is in the key."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

from launcher.build import context, source

from .test_source import ANY


def inputs(checkout: Path) -> context.Inputs:
    return context.Inputs(
        dockerfile="FROM scratch\n",
        base="sha256:base",
        builder="sha256:builder",
        source=source.from_path(checkout, "0.9.0", ANY),
        extension="megatron.core.datasets.helpers",
        version="0.9.0",
        patches=(),
        pins={"runtime": ["a==1 --hash=sha256:" + "1" * 64]},
    )


def packed(given: context.Inputs, scratch: Path) -> bytes:
    scratch.mkdir()
    wheel = scratch / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    file = io.BytesIO()
    context.write(given, {"runtime": [wheel]}, scratch, file)
    return file.getvalue()


def test_the_same_inputs_give_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    given = inputs(checkout)
    first = packed(given, tmp_path / "one")
    umask = os.umask(0o077)
    try:
        second = packed(given, tmp_path / "two")
    finally:
        os.umask(umask)
    assert first == second


def test_it_holds_what_the_dockerfile_copies(checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(inputs(checkout), tmp_path / "one"))) as tar:
        names = set(tar.getnames())
    assert {"Dockerfile", "stage.py", "source.json", "source/setup.py"} <= names
    assert {"wheels/runtime/requirements.txt", "launcher/__init__.py"} <= names
    assert "launcher/train/runner.py" in names
    assert not any(name.startswith("launcher/build") for name in names)


def test_each_input_is_in_the_key(checkout: Path, tmp_path: Path) -> None:
    given = inputs(checkout)
    patch = tmp_path / "01.patch"
    patch.write_text("x")
    others = [
        replace(given, dockerfile="FROM other\n"),
        replace(given, base="sha256:other"),
        replace(given, builder="sha256:other"),
        replace(given, source=replace(given.source, identity="other")),
        replace(given, source=replace(given.source, epoch=1)),
        replace(given, extension="other"),
        replace(given, version="other"),
        replace(given, patches=(patch,)),
        replace(given, pins={}),
    ]
    keys = {given.key(), *(other.key() for other in others)}
    assert len(keys) == 1 + len(others)
    assert inputs(checkout).key() == given.key()
