"""Parses a `docker run` line: image, GPUs, mounts, variables, and what isn't imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.base.errors import UsageError
from launcher.runs.runfile.values import parse_gpus
from launcher.tools.importing.shell import Unfollowed
from launcher.tools.importing.words import Word

WITHOUT_VALUE = frozenset("detach d init interactive i privileged rm tty t it ti itd".split())
OF_THE_LAUNCHER = (WITHOUT_VALUE - {"privileged"}) | {"name", "ipc", "ulimit", "shm-size"}
"""Options that the launcher decides itself, by the run file or as NVIDIA's images ask for."""


@dataclass
class ContainerLine:
    """What a `docker run` line asks for; mounts are host path, container path, read-only."""

    image: str = ""
    line: int = 0
    gpus: str = ""
    mounts: list[tuple[str, str, bool]] = field(default_factory=list)
    env: dict[str, Word] = field(default_factory=dict)
    left: list[Unfollowed] = field(default_factory=list)

    def tell(self, word: Word, what: str) -> None:
        self.left.append(Unfollowed(word.line, what))

    def outside(self, path: str) -> str:
        """The host's path of one in the container; one that isn't mounted stays as it is."""
        for outer, inner, _ in sorted(self.mounts, key=lambda mount: -len(mount[1])):
            if path == inner or path.startswith(f"{inner}/"):
                return outer + path[len(inner) :]
        return path


def parse_docker_run(words: tuple[Word, ...]) -> ContainerLine:
    """What stands behind `docker run`, up to the image."""
    found = ContainerLine()
    for name, value in _options(words):
        if not name:
            found.image, found.line = value.text, value.line
            if value.unknown:
                found.tell(value, f"{value.unknown}: the image isn't known")
        elif value.unknown:
            found.tell(value, f"{value.unknown}: docker's {name} isn't carried over")
        elif name in ("v", "volume") and ":" in value.text:
            outer, _, rest = value.text.partition(":")
            inner, _, mode = rest.partition(":")
            found.mounts.append((outer.rstrip("/"), inner.rstrip("/") or "/", mode == "ro"))
        elif name in ("e", "env"):
            key, _, text = value.text.partition("=")
            found.env[key] = Word(text, value.line)
        elif name == "gpus" and _is_gpus(value.text.strip("\"'")):
            found.gpus = value.text.strip("\"'")
        elif name not in OF_THE_LAUNCHER and (name, value.text) != ("network", "host"):
            asked = f"docker's {name} {value.text}".rstrip()
            found.tell(value, f"{asked}: not carried over")
    return found


def _is_gpus(text: str) -> bool:
    try:
        parse_gpus(text)
    except UsageError:
        return False
    return True


def _options(words: tuple[Word, ...]) -> Iterator[tuple[str, Word]]:
    """Each option with its value; the image last, under the name ""."""
    at = 0
    while at < len(words):
        word = words[at]
        if not word.text.startswith("-"):
            yield "", word
            return
        name, equals, value = word.text.lstrip("-").partition("=")
        if equals:
            yield name, Word(value, word.line, word.unknown)
        elif name in WITHOUT_VALUE:
            yield name, Word("", word.line)
        elif at + 1 < len(words):
            at += 1
            yield name, words[at]
        at += 1
