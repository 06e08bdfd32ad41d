"""Options that name a tokenizer, as upstream's tools have them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.data.tokenizers import Chosen

TYPES = (
    *("GPT2BPETokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer"),
    *("GPTSentencePieceTokenizer", "TikTokenizer"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    add("--tokenizer-type", choices=TYPES, default=TYPES[0], help="%(default)s, or:")
    add("--vocab-file", metavar="FILE", type=Path, help="vocab.json (GPT-2's own)")
    add("--merge-file", metavar="FILE", type=Path, help="merges.txt (GPT-2's own)")
    add("--tokenizer-model", metavar="FILE", type=Path, help="tokenizer.json, .model, ranks")
    add("--eod-token", metavar="TOKEN", help="of a tokenizer.json, else its eos_token")
    add("--vocab-size", metavar="N", type=int, help="of TikTokenizer (131072)")
    add("--tiktoken-pattern", choices=("v1", "v2"), help="of TikTokenizer (v2)")
    add("--tiktoken-num-special-tokens", metavar="N", type=int, help="of TikTokenizer (1000)")
    add("--megatron", metavar="RELEASE", default="0.9.0", help="whose rules hold (%(default)s)")


def chosen(args: argparse.Namespace) -> Chosen:
    """The tokenizer that the options name."""
    from launcher.data.tokenizers import Chosen

    return Chosen(
        type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        model=args.tokenizer_model,
        end=args.eod_token,
        vocab_size=args.vocab_size,
        pattern=args.tiktoken_pattern,
        special_tokens=args.tiktoken_num_special_tokens,
        megatron=args.megatron,
    )
