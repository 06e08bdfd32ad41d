"""Attention over sequences that are split over ranks, for torch's compiler.

Around attention, ranks exchange a part of the sequence of all heads for all of it of a part of the
heads, as DeepSpeed-Ulysses does (https://arxiv.org/abs/2309.14509): two all-to-alls each way, and
torch's causal kernel in between. Where heads don't divide by the ranks, keys and values are
gathered.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from launcher.trainer.fast.tensor_parallel import Exchange, GatherFromRanks, LayerRanks
from launcher.trainer.gpt.layers import Attention


class GatheredAttention(Attention):
    """Of this rank's queries to the keys and values of all ranks."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.ranks = LayerRanks(parallel_state.get_context_parallel_group())

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """[s / CP, …] of this rank to [s, …]."""
        return GatherFromRanks.apply(part, self.ranks)


class ExchangedAttention(GatheredAttention):
    """Of a part of the heads, over the whole sequence."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.divided = False

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query [s / CP, b, heads, d]; key, value of groups; result [s / CP, b, heads × d]."""
        ranks, groups = self.ranks.size, key.shape[2]
        repeats = ranks // gcd(groups, ranks)  # so many ranks need the same group
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        parts = [x.unflatten(2, (ranks, -1)) for x in (query, key, value)]
        sent = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4)
        whole = in_order(Exchange.apply(sent, self.ranks))
        attended = super().forward(*whole.split([x.shape[3] for x in parts], dim=2))
        back = Exchange.apply(by_rank(attended, ranks), self.ranks)
        return back.permute(1, 2, 0, 3).flatten(2)


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """[CP, s / CP, …], rank r's pieces r and 2 × CP - 1 - r of the sequence, to [s, …]."""
    first, second = parts.unflatten(1, (2, -1)).unbind(dim=1)
    return torch.cat((first, second.flip(0))).flatten(0, 1)


def by_rank(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """The way back of `in_order`."""
    first, second = whole.unflatten(0, (2, ranks, -1)).unbind(dim=0)
    return torch.stack((first, second.flip(0)), dim=1).flatten(1, 2)


class KnownPositions(RotaryEmbedding):
    """RoPE's angles of this rank's tokens: Megatron finds them anew, by a copy from the host."""

    known: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[s / CP, 1, 1, d]."""
        return self.known


def keep_positions(gpt: Any, length: int) -> None:
    """Have RoPE's angles ready for sequences of `length`, where a rank has a part of each."""
    if gpt.position_embedding_type == "rope" and gpt.config.context_parallel_size > 1:
        rotary = gpt.rotary_pos_emb
        rotary.known = rotary(length)  # as a buffer it would be rounded to the weights' 16 bits
        rotary.__class__ = KnownPositions
