"""Rearranges Megatron's tensors into Hugging Face's, and back; no value changes.

Each is a pair of functions. `apart` takes one of Megatron's and gives as many as there are names;
`together` takes those, and gives Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class ModelSizes(Protocol):
    """What is asked of a model's shape: an `Architecture`."""

    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def padded(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def tied(self) -> bool: ...


@dataclass(frozen=True)
class Transform:
    """One of the ways between the two; `turned` where theirs has the axes the other way round."""

    apart: Callable[[Any, ModelSizes], Sequence[NDArray[Any]]]
    together: Callable[[Sequence[Any], ModelSizes], NDArray[Any]]
    turned: bool = False

    def shape(self, parts: Sequence[tuple[int, ...]], shape: ModelSizes) -> tuple[int, ...]:
        """The shape of Megatron's tensor that is made of theirs."""
        if self is VOCABULARY:
            return (shape.padded, *parts[0][1:])
        if self.turned:
            return parts[0][::-1]
        return (sum(part[0] for part in parts), *parts[0][1:])


def _pad(parts: Sequence[Any], shape: ModelSizes) -> Any:
    """Rows of zeros after [vocabulary, hidden], to [padded vocabulary, hidden]."""
    [x] = parts
    return np.concatenate([x, np.zeros((shape.padded - len(x), *x.shape[1:]), x.dtype)])


def _groups_apart(x: Any, shape: ModelSizes) -> Sequence[Any]:
    """[groups × (queries + 2) × d, …]: of each group its queries, a key, a value; to q, k, v."""
    queries, rest = shape.heads // shape.groups, x.shape[1:]
    x = x.reshape(shape.groups, queries + 2, shape.head, *rest)
    parts = x[:, :queries], x[:, queries : queries + 1], x[:, queries + 1 :]
    return [part.reshape(-1, *rest) for part in parts]


def _groups_together(parts: Sequence[Any], shape: ModelSizes) -> Any:
    rest = parts[0].shape[1:]
    grouped = [part.reshape(shape.groups, -1, shape.head, *rest) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(-1, *rest)


def _turned(of: Transform) -> Transform:
    """The same for GPT-2's Conv1D, whose weights are [input, output]."""
    return Transform(
        lambda x, shape: [part.T for part in of.apart(x, shape)],
        lambda parts, shape: of.together([part.T for part in parts], shape),
        turned=True,
    )


SAME = Transform(lambda x, shape: [x], lambda parts, shape: parts[0])
VOCABULARY = Transform(lambda x, shape: [x[: shape.vocabulary]], _pad)
QKV = Transform(_groups_apart, _groups_together)
STACKED = Transform(
    lambda x, shape: [np.concatenate(_groups_apart(x, shape))],
    lambda parts, shape: _groups_together(np.split(parts[0], 3), shape),
)
"""The same for GPT-2, which has q, k and v in one: all queries, all keys, all values."""
HALVES = Transform(lambda x, shape: np.split(x, 2), lambda parts, shape: np.concatenate(parts))
"""[2 × ffn, hidden]: the gate's half and the other."""
TURNED, STACKED_TURNED = _turned(SAME), _turned(STACKED)
