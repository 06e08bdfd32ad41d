"""Runs a program with a mounted Megatron-LM checkout in place of the image's Megatron.

A checkout has no compiled extension, and upstream would compile it by `make` into a folder that
is mounted read-only: the image's own stands in for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from launcher.agent import compat, script
from launcher.agent.words import say

DATASETS = "megatron.core.datasets"
EXTENSIONS = (f"{DATASETS}.helpers_cpp", f"{DATASETS}.helpers")  # the latter up to 0.9
COMPILER = f"{DATASETS}.utils"


class Extensions:
    """Finds the image's extension where the checkout has none; stands last on sys.meta_path."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = [os.path.join(folder, *DATASETS.split(".")) for folder in folders]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in EXTENSIONS:
            return None
        found = PathFinder.find_spec(name, self.folders)
        if not found or not found.origin or found.origin.endswith(".py"):
            return None
        _say(f"{found.origin} stands in for what isn't compiled in the checkout")
        return found


class Compilers:
    """Lets upstream compile the extension only where there is none; first on sys.meta_path."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name == COMPILER else None
        if found and found.loader:
            loader: Any = found.loader
            execute = loader.exec_module

            def execute_and_spare(utils: Any) -> None:
                execute(utils)
                _spare_compilation(utils)

            loader.exec_module = execute_and_spare
        return found


def _spare_compilation(utils: Any) -> None:
    compile_helpers = utils.compile_helpers

    def compile_unless_there() -> None:
        for name in EXTENSIONS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
                return
        compile_helpers()

    utils.compile_helpers = compile_unless_there


def release(folder: Path) -> str:
    """The release that a folder's Megatron-Core says it is, read as text; "" where it says none."""
    try:
        text = (folder / "megatron/core/package_info.py").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE)
    before = re.search(r"^PRE_RELEASE *= *(['\"])(.*)\1", text, re.MULTILINE)  # rc0
    return ".".join(numbers) + (before[2] if before else "")


def install(checkout: str) -> None:
    """Import `megatron` from the checkout from here on, here and in processes started here."""
    sys.path[1:] = [checkout, *(entry for entry in sys.path[1:] if entry != checkout)]
    variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in variable if entry not in ("", checkout)]
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, *kept])
    sys.meta_path.insert(0, Compilers())
    sys.meta_path.append(Extensions(kept))
    here = release(Path(checkout))
    image = next(filter(None, (release(Path(entry)) for entry in kept)), "")
    _say(f"Megatron {here or '(of no release)'} from {checkout}")
    if image and image != here:
        _say(f"warning: the image's own is {image}, and so is its extension")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(text, "checkout: ")


def main(argv: Sequence[str]) -> None:
    """Run argv[1:], a script or `-m MODULE` with arguments, with the checkout argv[0]."""
    if not (Path(argv[0]) / "megatron/core").is_dir():
        _say(f"{argv[0]} is no Megatron-LM checkout: it has no megatron/core")
        sys.exit(2)
    install(argv[0])
    compat.trust_checkpoints()
    compat.prepare()  # torch may be newer than the checkout's Megatron knew
    script.run(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
