"""What the tests of data share: GPT-2's tokenizer loaded once, and a plain reader of the files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.tools.data import tokenizers
from launcher.tools.data.tokenizers import TokenizerChoice


@pytest.fixture(scope="session")
def gpt2() -> tokenizers.Tokenizer:
    """GPT-2's own."""
    return tokenizers.load_tokenizer(TokenizerChoice())


@pytest.fixture
def loaded(gpt2: tokenizers.Tokenizer) -> Iterator[None]:
    """Jobs use the tokenizer that is loaded; loading it is most of the time of a small job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "load_tokenizer", lambda chosen: gpt2)
        yield


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """A file with a document of each text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(prefix: Path) -> list[list[list[int]]]:
    """The documents of a data file, each a list of sequences, by the format's description alone."""
    data, index = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
    version, code, sequences, starts = struct.unpack_from("<QBQQ", index, 9)
    assert (index[:9], version) == (b"MMIDIDX\0\0", 1)
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    at = 34
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    offsets = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
    begins = struct.unpack_from(f"<{starts}q", index, at + 12 * sequences)
    assert len(index) == at + 12 * sequences + 8 * starts
    assert begins[0] == 0
    assert begins[-1] == sequences
    assert sum(lengths) * size == len(data)
    found = [
        list(struct.unpack_from(f"<{length}{letter}", data, offset))
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return [found[a:b] for a, b in pairwise(begins)]
