"""Re-lays fp32 masters, Adam moments and 16-bit parameters in flat buffers, as gradients lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

ALIGNED, LINE = 8, 64
"""Elements: 16 bytes of a 16-bit parameter, by which kernels load and store; and those that mostly
decay alike."""

GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)
"""Where Megatron's optimizers have parameters and their masters: the distributed one, the other."""


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class BufferPiece:
    """A master, fp32; its gradient, fp32 [elements]; and what it is of the model, in 16 bits.

    `model` is None where the master is the model's own. `lies` says what the gradient lies in.
    """

    master: torch.Tensor
    gradient: torch.Tensor
    model: torch.Tensor | None
    decays: bool
    lies: Any


@dataclass
class Buffer:
    """Pieces side by side, as their gradients lie in data parallelism's buffer.

    gradient: fp32 [elements], or in 16 bits as it was made; master, mean, square: fp32 [elements];
    decayed: bool [lines, 1], of as many elements each; counted (in the norm): bool [elements];
    model: the 16-bit parameters [elements], None where the masters are the model's own; `pairs` of
    a 16-bit parameter and its master, where the former don't lie side by side; `other`: the other
    of two replicas' gradient, where what is stepped by is the mean of both; `there`: `model` in the
    other's memory, where this replica writes it.
    """

    gradient: torch.Tensor
    master: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    decayed: torch.Tensor
    counted: torch.Tensor | None
    model: torch.Tensor | None
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    other: torch.Tensor | None = None
    there: torch.Tensor | None = None

    def half(self) -> int:
        """Elements of a half, in whole lines."""
        return len(self.master) // 2 // LINE * LINE

    def part(self, share: slice) -> Buffer:
        """What of it is in a share of whole lines."""
        width = len(self.master) // len(self.decayed)
        lines = slice(share.start // width, share.stop // width)
        flat = ("gradient", "master", "mean", "square", "counted", "model", "other")
        there = {name: made for name in flat if (made := getattr(self, name)) is not None}
        cut = {name: made[share] for name, made in there.items()}
        return replace(self, decayed=self.decayed[lines], **cut)


def _pairs(inner: Any, at: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of a group and their masters: in fp32 themselves, or this replica's share."""
    parameters = inner.optimizer.param_groups[at]["params"]
    there = [
        (getattr(inner, of)[at], getattr(inner, masters)[at])
        for of, masters in GROUPS
        if hasattr(inner, of)
    ]
    for pair in there or [(parameters, parameters)]:
        yield from zip(*pair, strict=True)


def _pieces(inner: Any) -> Iterator[BufferPiece]:
    """What this replica steps: all of the model, or its share."""
    for at, group in enumerate(inner.optimizer.param_groups):
        if group.get("lr_mult", 1.0) != 1.0:
            raise ValueError("rates that differ between parameters")
        decays = group.get("wd_mult", 1.0) > 0
        for parameter, master in _pairs(inner, at):
            gradient, halves = parameter.main_grad.view(-1), parameter.dtype != torch.float32
            if not hasattr(inner, "model_param_gbuf_map"):
                model = parameter if halves else None
                yield BufferPiece(
                    master, gradient, model, decays, gradient.untyped_storage().data_ptr()
                )
                continue
            share = inner._get_model_param_range_map(parameter)["param"]
            mine = slice(share.start, share.end)
            model = parameter.data.view(-1)[mine] if halves else None
            lies = inner.model_param_gbuf_map[parameter]
            yield BufferPiece(master, gradient[mine], model, decays, lies)


def gather(inner: Any, whole: bool) -> Iterator[Buffer]:
    """Lay masters, moments and 16-bit parameters out as their gradients lie.

    Each for itself unless `whole`: releases up to 0.10 write all of a CPU tensor's storage. The
    distributed optimizer's parameters lie so already, where they are gathered. Raises `ValueError`
    for what isn't one rate for all, or gradients in fp32.
    """
    stored: dict[Any, list[BufferPiece]] = {}
    for each in _pieces(inner):
        stored.setdefault(each.lies if whole else each.gradient.data_ptr(), []).append(each)
    placed = hasattr(inner, "model_param_gbuf_map")
    for pieces in stored.values():
        pieces.sort(key=lambda one: one.gradient.storage_offset())
        gradient = _flat([one.gradient for one in pieces])
        if gradient.dtype != torch.float32:
            raise ValueError(f"gradients in {gradient.dtype}")
        masters = torch.zeros_like(gradient)
        counts = [_is_counted(one.master) for one in pieces]
        halves = [one.model for one in pieces if one.model is not None]
        beside = len(halves) == len(pieces) and len({each.dtype for each in halves}) == 1
        model: torch.Tensor | None = None
        if placed and halves:
            model = _flat(halves)
        elif placed:
            masters = _flat([one.master.data for one in pieces])
        elif beside and all(one.gradient.storage_offset() % ALIGNED == 0 for one in pieces):
            model = torch.zeros_like(gradient, dtype=halves[0].dtype)
        begins = [one.gradient.storage_offset() - gradient.storage_offset() for one in pieces]
        places = [
            slice(at, at + one.gradient.numel()) for at, one in zip(begins, pieces, strict=True)
        ]
        pairs = []
        for one, at in zip(pieces, places, strict=True):
            if halves or not placed:
                _move(one.master, masters[at])
            if one.model is not None and model is None:
                pairs.append((one.model.data, one.master.data))
            elif one.model is not None and model is not None and not placed:
                _move(one.model, model[at])
        states = [inner.optimizer.state[one.master] for one in pieces]
        mean, square = (_moment(name, states, pieces, places, gradient) for name in MOMENTS)
        decayed = _lines(_flags([one.decays for one in pieces], places, gradient))
        counted = None if all(counts) else _flags(counts, places, gradient)
        yield Buffer(gradient, masters, mean, square, decayed, counted, model, pairs)


def _moment(
    name: str,
    states: list[dict[str, Any]],
    pieces: list[BufferPiece],
    places: list[slice],
    gradient: torch.Tensor,
) -> torch.Tensor:
    """One, fp32 [elements], with what is there of it, and its places in the states.

    What was there is let go before the next is made: billions of elements have no room for both.
    """
    whole = torch.zeros_like(gradient)
    for state, one, at in zip(states, pieces, places, strict=True):
        if name in state:
            whole[at] = state[name].view(-1)
        state[name] = whole[at].view(one.master.shape)
    return whole


def _flags(values: list[bool], places: list[slice], gradient: torch.Tensor) -> torch.Tensor:
    """Those of each piece's elements, bool [elements]."""
    flags = torch.zeros_like(gradient, dtype=torch.bool)
    for value, at in zip(values, places, strict=True):
        flags[at] = value
    return flags


def _is_counted(master: torch.Tensor) -> bool:
    """Whether the gradient's norm has it on this rank."""
    alone = param_is_not_shared(master) and param_is_not_tensor_parallel_duplicate(master)
    return bool(alone)


def _lines(decayed: torch.Tensor) -> torch.Tensor:
    """Each LINE's [lines, 1], where all in it are the same, else each element's: of 29 bytes that a
    step moves for an element, this is one."""
    if decayed.numel() % LINE == 0:
        lines = decayed.view(-1, LINE)
        if bool((lines.all(dim=1) == lines.any(dim=1)).all()):
            return lines[:, :1].contiguous()
    return decayed.view(-1, 1)


def _flat(views: list[torch.Tensor]) -> torch.Tensor:
    """All from the first of these views of one buffer to the end of the last, [elements]."""
    first, last = views[0], views[-1]
    elements = last.storage_offset() + last.numel() - first.storage_offset()
    return first.as_strided((elements,), (1,))


def _move(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Let `tensor` be a view of `place`, with the values that it has."""
    place.copy_(tensor.data.view(-1))
    tensor.data = place.view(tensor.shape)
