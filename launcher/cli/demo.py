"""`launcher demo` and `launcher engine`, which bring their own container engine."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path

from launcher.cli.command import argument, command


@command()
def demo(args: Namespace) -> int:
    """Build the CPU image from Megatron's source and train a tiny GPT in it."""
    from launcher.base.settings import settings
    from launcher.tools import demo

    demo.run(settings())
    return 0


@command(
    argument(
        "folder",
        "keeps the engine's packages and images (default: that of `make demo`)",
        "FOLDER",
        type=Path,
        nargs="?",
    )
)
def engine(args: Namespace) -> int:
    """Keep a private engine up (Linux, root, apt) and print its DOCKER_HOST."""
    from launcher.base.settings import settings
    from launcher.images.engine.private.private import keep_up

    keep_up(args.folder or settings().cache / "engine", partial(print, flush=True))
    return 0
