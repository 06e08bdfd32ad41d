"""The build context: the same inputs give the same bytes, and each input is in the key."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from launcher.build import context, source
from launcher.build.context import PACKAGE

from .made import BASE, RECIPE, inputs_of
from .test_source import ANY


def inputs(checkout: Path) -> context.Inputs:
    pins = {"runtime": ["a==1 --hash=sha256:" + "1" * 64]}
    own = source.from_path(checkout, "0.9.0", ANY)
    return inputs_of(own, recipe=replace(RECIPE, pins=pins), patches=())


def packed(given: context.Inputs, scratch: Path) -> bytes:
    scratch.mkdir()
    wheel = scratch / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    file = io.BytesIO()
    context.write(given, {"runtime": [wheel]}, scratch, file)
    return file.getvalue()


MODES = st.tuples(st.sampled_from([0o600, 0o644, 0o664, 0o666]), st.sampled_from([0o700, 0o755]))


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=30
)
@hypothesis.given(
    modes=MODES,
    when=st.floats(0, 4e9),
    umask=st.sampled_from([0o000, 0o022, 0o027, 0o077]),
    owner=st.sampled_from([(0, 0), (12345, 23456), (3_000_000, 3_000_000)]),
    linked=st.booleans(),
)
def test_who_has_a_checkout_and_the_launcher_shows_nowhere(
    checkout: Path,
    tmp_path: Path,
    modes: tuple[int, int],
    when: float,
    umask: int,
    owner: tuple[int, int],
    linked: bool,
) -> None:
    """Modes but for the owner's x, times, owners, links and umask of what is packed."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        mine, own = Path(folder, "Megatron-LM"), Path(folder, "launcher")
        shutil.copytree(checkout, mine)
        run = mine / "run.sh"
        run.write_text("echo")
        twin = mine / "twin.py"
        if linked:
            twin.hardlink_to(mine / "setup.py")
        else:
            shutil.copy(mine / "setup.py", twin)
        for path in context.inside_files().values():
            target = own / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for path in [*mine.rglob("*"), *own.rglob("*")]:
            path.chmod(modes[1] if path.is_dir() or path == run else modes[0])
            os.utime(path, (when, when))
            if os.geteuid() == 0:
                os.chown(path, *owner)
        patch.setattr(context, "PACKAGE", own)
        before = os.umask(umask)
        try:
            found = packed(inputs(mine), Path(folder, "scratch"))
        finally:
            os.umask(before)
    assert hashlib.sha256(found).hexdigest() == expected(checkout, tmp_path)


def expected(checkout: Path, tmp_path: Path) -> str:
    """The hash of the context of the same checkout as it is, with the two files more."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        plain = Path(folder, "Megatron-LM")
        shutil.copytree(checkout, plain)
        (plain / "run.sh").write_text("echo")
        (plain / "run.sh").chmod(0o755)
        shutil.copy(plain / "setup.py", plain / "twin.py")
        return hashlib.sha256(packed(inputs(plain), Path(folder, "scratch"))).hexdigest()


def test_each_input_is_in_the_key_and_in_the_context(checkout: Path, tmp_path: Path) -> None:
    given = inputs(checkout)
    patch = tmp_path / "01.patch"
    patch.write_text("x")
    helpers = given.recipe.named.model_copy(update={"extension": "other"})
    others = [
        replace(given, dockerfile="FROM other\n"),
        replace(given, base=replace(BASE, digest="sha256:other")),
        replace(given, builder=replace(BASE, digest="sha256:other")),
        replace(given, source=replace(given.source, identity="other")),
        replace(given, source=replace(given.source, epoch=1)),
        replace(given, source=replace(given.source, release="0.9.5")),
        replace(given, patches=(patch,)),
        replace(given, recipe=replace(given.recipe, pins={})),
        replace(given, recipe=replace(given.recipe, named=helpers)),
        replace(given, recipe=replace(given.recipe, platform="linux/arm64")),
    ]
    with tarfile.open(fileobj=io.BytesIO(packed(given, tmp_path / "one"))) as tar:
        names = set(tar.getnames())
    assert {"Dockerfile", "stage.py", "source.json", "source/setup.py"} <= names
    assert {"wheels/runtime/requirements.txt", "launcher/train/runner.py"} <= names
    assert not any(name.startswith("launcher/build") for name in names)
    keys = {given.key(), *(other.key() for other in others)}
    assert len(keys) == 1 + len(others)
    assert inputs(checkout).key() == given.key()
    here = replace(given, base=replace(BASE, id="sha256:as-this-engine-numbers-it"))
    assert here.key() == given.key()  # another engine's number of the same image
