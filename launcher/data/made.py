"""How data files were made, kept beside them as PREFIX.made.json: tokenizer, release, inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.data import tokenizers
from launcher.data.indexed import Output
from launcher.data.output import alone

if TYPE_CHECKING:
    from launcher.data.tokenize import Job

COUNTED = ("inputs", "documents", "tokens")
"""What tells one record from that of another shard."""
LARGEST = 1 << 24
"""Bytes of a record that is read."""


def path(prefix: Path) -> Path:
    """The record of PREFIX.bin and PREFIX.idx."""
    return Path(f"{prefix}.made.json")


def of_job(job: Job) -> dict[str, Any]:
    """What a job's record says: the release's rule makes other tokens of the same vocabulary."""
    chosen = {key: value for key, value in asdict(job.tokenizer).items() if value is not None}
    chosen["rule"] = asdict(tokenizers.rule(job.tokenizer))
    return {
        "launcher": __version__,
        "tokenizer": {key: str(v) if isinstance(v, Path) else v for key, v in chosen.items()},
        "append_eod": job.append_eod,
        "inputs": list(job.inputs),
    }


class Made:
    """The record of an output, written aside with it and named after it. As `output.alone`."""

    def __init__(self, output: Output, said: Mapping[str, Any]) -> None:
        self._output, self._said, self._files = output, said, ExitStack()
        (self._aside,) = alone([path(output.prefix)], self._files)

    def complete(self) -> None:
        """Bring it to the disk, where it stays aside."""
        counts = {"documents": self._output.documents, "tokens": self._output.tokens}
        self._aside.file.write(json.dumps({**self._said, **counts}, indent=1).encode() + b"\n")
        self._aside.complete()

    def publish(self) -> None:
        """Give it its name, in place of an older one."""
        self._aside.publish()
        self._files.close()

    def close(self) -> None:
        """Remove what is unfinished; nothing after `publish`."""
        self._files.close()


def read(prefix: Path, documents: int, tokens: int) -> dict[str, Any] | None:
    """The record of files with so much in them; None where there is none, or of other ones."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with path(prefix).open("rb") as file:
            said: dict[str, Any] = json.loads(file.read(LARGEST))
        if (said["documents"], said["tokens"]) == (documents, tokens):
            return said
    return None


def joined(records: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What holds for all of them together; None where they were made in different ways."""
    alike = [{k: v for k, v in one.items() if k not in COUNTED} for one in records if one]
    if len(alike) < len(records) or any(one != alike[0] for one in alike):
        return None
    return {**alike[0], "inputs": [name for one in records if one for name in one["inputs"]]}
