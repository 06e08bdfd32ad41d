"""Checks names from outside: git addresses and refs, images, tags, folders, package indexes.

Each is checked wherever it comes in, from a file or the command line. It goes on to git, pip or
docker as a word, so none begins with a dash, which would make an option of it.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable

LABEL = "megatron-launchpad."
"""What the names of all our labels begin with."""

Check = Callable[[str], str]

HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?"
PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
"""Of an image's name, as registries take it: the distribution specification, and docker's."""
IMAGE = rf"(?:{HOST}/)?{PART}(?:/{PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
_USER = r"\w[\w.+-]*"
_PATH = r"[\w~.%][!-~]*"
_GIT_URL = "|".join(
    (
        rf"https?://(?:[^\s/@]+@)?{HOST}/{_PATH}",
        rf"git://{HOST}/{_PATH}",
        rf"ssh://(?:{_USER}@)?{HOST}/{_PATH}",
        rf"{_USER}@{HOST}:(?:/?{_PATH})",
        rf"file:///{_PATH}",
    )
)


def matching(pattern: str, example: str) -> Check:
    """A check that gives back a text that `pattern` fits as a whole, and else raises ValueError."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"doesn't look like {example}")
        return text

    return check


image = matching(IMAGE, "an image's name: nvcr.io/nvidia/pytorch:24.10-py3")
registry = matching(rf"{HOST}(?:/{PART})*/?", "a registry: registry.example/team")
tag = matching(r"[A-Za-z0-9][\w.-]{0,99}", "an image tag: 24.10")
folder = matching(
    r"(?!.*\.\.)\.?[\w+][\w.+-]*(?:/\.?[\w+][\w.+-]*)*", "a folder below: 3rdparty/cutlass"
)
git_url = matching(_GIT_URL, "a git address: https://…, ssh://…, git@host:…, file:///…")
git_ref = matching(
    r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[\w+][\w./+-]*(?<![./])",
    "a tag or a branch: core_r0.9.0",
)
index = matching(
    rf"https?://(?:[^\s/@]+@)?{HOST}(?:/[!-~]*)?|(?:file://)?/[!-~]*", "an index's address"
)


def git_mirror(text: str) -> str:
    """The beginning of git's addresses, `git@git.example:` as well. Raises ValueError."""
    try:
        git_url(f"{text}name" if text.endswith(("/", ":")) else f"{text}/name")
    except ValueError:
        raise ValueError(
            "doesn't look like the beginning of git addresses: https://git.example/mirrors/"
        ) from None
    return text


def image_for_tag(text: str) -> str:
    """An image's name in which {tag} may stand for a row's tag. Raises ValueError."""
    image(text.replace("{tag}", "tag"))
    return text


def argument(check: Check) -> Check:
    """A check of a word of the command line, as argparse takes it."""

    def checked(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} {error}") from None

    return checked
