"""A checkout of Megatron-LM runs in place of the image's, with the image's extension."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launcher.agent import checkout

from .conftest import environment, python


def tree(root: Path, release: str = "0.16.1", extension: str = "helpers_cpp") -> Path:
    """A stand-in for what an image has: a release and a file with an extension's name."""
    datasets = root / "megatron/core/datasets"
    datasets.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True)
    lines = [f"{name} = {number}\n" for name, number in numbers]
    (root / "megatron/core/package_info.py").write_text("".join([*lines, "PRE_RELEASE = ''\n"]))
    if extension:
        (datasets / f"{extension}{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    return root


def test_the_release_is_read_as_text(tmp_path: Path) -> None:
    image = tree(tmp_path / "image", "0.15.3")
    assert checkout.release(image) == "0.15.3"
    info = image / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("''", "'rc1'"))
    assert checkout.release(image) == "0.15.3rc1"
    assert checkout.release(tmp_path) == ""


@pytest.mark.parametrize("name", ["helpers_cpp", "helpers"])
def test_the_images_extension_is_found(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tree(tmp_path / "image", extension=name)
    python = tree(tmp_path / "python", extension="")
    for folder in (image, python):
        (folder / "megatron/core/datasets/helpers.py").touch()  # which is no extension
    finder = checkout.Extensions([str(tmp_path), str(image)])
    found = finder.find_spec(f"megatron.core.datasets.{name}")
    assert found
    assert Path(str(found.origin)).parent == image / "megatron/core/datasets"
    assert f"checkout: {found.origin} stands in" in capsys.readouterr().err
    assert finder.find_spec("megatron.core.datasets.gpt_dataset") is None
    assert checkout.Extensions([str(python)]).find_spec(found.name) is None


INSTALL = """
import os, sys
from launcher.agent import checkout
checkout.install(sys.argv[1])
print(sys.path.index(sys.argv[1]), os.environ["PYTHONPATH"].split(":")[0] == sys.argv[1])
"""


@pytest.mark.parametrize("image", ["0.16.1", "0.15.3"])
@pytest.mark.parametrize("first", [True, False], ids=["on-path", "not-on-path"])
def test_the_checkout_comes_first(tmp_path: Path, image: str, first: bool) -> None:
    mine, theirs = tree(tmp_path / "checkout", extension=""), tree(tmp_path / "image", image)
    folders = [*([str(mine)] if first else []), str(theirs), environment()["PYTHONPATH"]]
    done = python("-c", INSTALL, str(mine), PYTHONPATH=":".join(folders))
    assert done.stdout == "1 True\n", done.stderr
    assert f"Megatron 0.16.1 from {mine}" in done.stderr
    assert ("the image's own is 0.15.3" in done.stderr) == (image == "0.15.3")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = python("-m", "launcher.agent.checkout", str(tmp_path), "x.py")
    said = f"checkout: {tmp_path} is no Megatron-LM checkout: it has no megatron/core\n"
    assert (done.returncode, done.stderr) == (2, said)
