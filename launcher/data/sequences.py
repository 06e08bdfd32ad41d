"""Makes a data file's columns from tokenized texts: which sequences there are, where documents end.

Upstream's rules (tools/preprocess_data.py): a text without tokens gives no sequence; a document is
the sequences of its texts, maybe none; the end-of-document token follows the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from launcher.data.faults import DataError
from launcher.data.indexed import UINT16_VOCABULARY

Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True)
class Columns:
    """Some documents as they are written: tokens, each sequence's length, each document's count.

    tokens: little-endian, two or four bytes each; lengths: int32, tokens of each sequence;
    counts: int32, sequences of each document.
    """

    tokens: bytes
    lengths: Ints
    counts: Ints


def token_type(vocab_size: int) -> np.dtype[np.generic]:
    """What a token is written as; Megatron's DType.optimal_dtype."""
    return np.dtype("<u2" if vocab_size < UINT16_VOCABULARY else "<i4")


def columns(
    texts: Sequence[NDArray[np.generic]],
    counts: Sequence[int],
    kind: np.dtype[np.generic],
    end: int | None,
) -> Columns:
    """Lay out texts, of which each document has as many as `counts` says.

    `end` is the end-of-document token, None for none. Raises DataError for tokens that `kind`
    can't hold.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    kept = lengths > 0
    of_document: NDArray[Any] = np.repeat(np.arange(len(counts)), counts)
    found = np.bincount(of_document[kept], minlength=len(counts))
    lengths = lengths[kept]
    tokens = _as(kind, np.concatenate(texts)) if texts else np.empty(0, kind)
    if end is not None:
        last = (np.cumsum(found) - 1)[found > 0]
        tokens = np.insert(tokens, np.cumsum(lengths)[last], end)
        lengths[last] += 1
    return Columns(tokens.tobytes(), lengths.astype("<i4"), found.astype("<i4"))


def _as(kind: np.dtype[np.generic], tokens: NDArray[Any]) -> NDArray[Any]:
    """The tokens as `kind`, whose bytes would make another token of one that is too large."""
    most = np.iinfo(kind).max
    if tokens.size and (wrong := tokens[(tokens < 0) | (tokens > most)]).size:
        raise DataError(
            f"token {wrong[0]}, and the tokens of this vocabulary are from 0 to {most} at most",
            "The tokenizer's own special tokens aren't all in its vocabulary.",
        )
    return tokens.astype(kind)
