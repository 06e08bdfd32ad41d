"""The sizes of a GPT from its options: parameters and operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from launcher.runs.plan.program_options import Value
from launcher.trainer.gpt.arguments import padded_vocabulary

GPT = "gpt"
UPSTREAM = "pretrain_gpt.py"

PADDING = 128
"""Megatron's --make-vocab-size-divisible-by where it isn't given; times TP."""

GPT2_TOKENS = 50257
"""The vocabulary of GPT2BPETokenizer: https://huggingface.co/openai-community/gpt2."""

ELSEWHERE = {
    "multi_latent_attention",
    "mtp_num_layers",
    "experimental_attention_variant",
    "attention_output_gate",
    "heterogeneous_layers_config_path",
    "moe_latent_size",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "use_checkpoint_args",
    "yaml_cfg",
    "spec",
}
"""Options of Megatron with which the sizes stand elsewhere, or the sums don't hold."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a GPT, its vocabulary padded; `positions` is 0 where none are learned.

    `head` is the width of a head, of which `groups` have keys and values of their own.
    `expert_layers` of the layers have `experts`, of which each token passes `routed`, `expert_ffn`
    wide, and shared ones that are `shared_ffn` wide together. `qk_norm`: heads are normalised;
    `qkv_bias`: queries, keys and values have one though the others haven't.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    sequence: int
    vocabulary: int
    positions: int = 0
    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    tied: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    expert_layers: int = 0
    experts: int = 0
    routed: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0

    def layer(self, tensor: int = 1) -> int:
        """Parameters of a layer without experts on each of `tensor` processes."""
        return self._attention(tensor) + self.mlp(self.ffn, tensor)

    def routing_layer(self, tensor: int = 1) -> int:
        """Parameters of a layer with experts, without those: what all processes have of it."""
        shared = self.mlp(self.shared_ffn, tensor) if self.shared_ffn else 0
        return self._attention(tensor) + self.experts * self.hidden + shared

    def _attention(self, tensor: int) -> int:
        """Parameters of the attention, and of a layer's two norms."""
        queries, keys = self.heads * self.head, 2 * self.groups * self.head
        divided = self.hidden * (queries + keys + queries)
        whole = 2 * self.norm + (2 * self.head * self.norm // self.hidden if self.qk_norm else 0)
        if self.bias or self.qkv_bias:
            divided += queries + keys
        return divided // tensor + whole + (self.hidden if self.bias else 0)

    def mlp(self, ffn: int, tensor: int = 1) -> int:
        """Parameters of an MLP, or of an expert, on each of `tensor` processes."""
        inner = ffn * (2 if self.gated else 1)
        divided = self.hidden * (inner + ffn) + (inner if self.bias else 0)
        return divided // tensor + (self.hidden if self.bias else 0)

    @property
    def norm(self) -> int:
        """Parameters of a layer norm, or of an RMSNorm."""
        return self.hidden * (2 if self.norm_bias else 1)

    def words(self, tensor: int = 1) -> int:
        """Parameters of the words' embedding on each of `tensor` processes."""
        return self.vocabulary // tensor * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, its padding included."""
        embeddings = self.words() * (1 if self.tied else 2) + self.positions * self.hidden
        dense = (self.layers - self.expert_layers) * self.layer()
        routing = self.expert_layers * self.routing_layer()
        experts = self.expert_layers * self.experts * self.mlp(self.expert_ffn)
        return embeddings + dense + routing + experts + self.norm

    def operations(self, sequences: int) -> float:
        """Floating-point operations of a step of so many sequences, forward and backward.

        Counted are the matrix products, each 2·m·n·k and three times: once forward, for its
        inputs' gradients and for its weights'. For B sequences of s tokens, l layers of hidden
        size h and a vocabulary V, with an MLP of 4h, this is 72·B·s·l·h²·(1 + s/(6h) +
        V/(12·l·h)): what the appendix of Narayanan et al., Efficient Large-Scale Language Model
        Training on GPU Clusters Using Megatron-LM (https://arxiv.org/abs/2104.04473), has without
        the forward pass that recomputing activations repeats. As there, attention counts every
        pair of tokens, although half of them are masked.

        Beyond the paper: query groups (keys and values are narrower), heads whose widths don't add
        up to h, any MLP size, gated MLPs (three products where others have two), and experts: those
        that a token passes. Norms, softmax, dropout, the router and the optimizer aren't counted.
        """
        queries, keys = self.heads * self.head, self.groups * self.head
        projections = self.hidden * (2 * queries + 2 * keys)  # queries, output; keys, values
        scores = 2 * self.sequence * queries  # queries by keys, and weights by values
        product = self.hidden * (3 if self.gated else 2)
        experts = product * (self.routed * self.expert_ffn + self.shared_ffn)
        per_token = (
            self.layers * (projections + scores)
            + (self.layers - self.expert_layers) * product * self.ffn
            + self.expert_layers * experts
            + self.hidden * self.vocabulary
        )
        return 3.0 * 2.0 * sequences * self.sequence * per_token


def shape(
    program: str, options: Mapping[str, Value], vocabulary: int | None = None
) -> ModelShape | None:
    """The sizes that a program is given by its options, under their plain names.

    `vocabulary` is the padded one where it is known: a tokenizer's isn't among the options. None
    where the program isn't our GPT or upstream's, or where a size isn't known.
    """
    upstream = program.rpartition("/")[2] == UPSTREAM
    if not (upstream or program == GPT) or ELSEWHERE & options.keys():
        return None
    try:
        return _shape(upstream, options, vocabulary)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None


def whole(options: Mapping[str, Value], name: str, default: int | None = None) -> int:
    """An option as a whole number. Raises KeyError if it is missing, TypeError or ValueError."""
    value = options[name] if default is None else options.get(name, default)
    if isinstance(value, bool | list):
        raise TypeError(f"{name} is no number")
    return int(value)


def _shape(
    upstream: bool, options: Mapping[str, Value], vocabulary: int | None
) -> ModelShape | None:
    hidden, heads = whole(options, "hidden_size"), whole(options, "num_attention_heads")
    layers, sequence = whole(options, "num_layers"), whole(options, "seq_length")
    gated = "swiglu" in options
    # Megatron's hidden size of the MLP where none is given (megatron/training/arguments.py).
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = whole(options, "ffn_hidden_size", usual)
    # Upstream groups queries only where asked to, and then into one group by default.
    told = "group_query_attention" in options
    groups = whole(options, "num_query_groups", 1 if told else heads)
    groups = groups if told or not upstream else heads
    learned = options.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    vocabulary = vocabulary or vocabulary_of(upstream, options)
    if not vocabulary or min(layers, hidden, heads, sequence) < 1:
        return None
    found = ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        head=whole(options, "kv_channels", hidden // heads),
        sequence=sequence,
        vocabulary=vocabulary,
        positions=whole(options, "max_position_embeddings", sequence) if learned else 0,
        gated=gated,
        bias="disable_bias_linear" not in options,
        norm_bias=options.get("normalization") != "RMSNorm",
        tied="untie_embeddings_and_output_weights" not in options,
        qk_norm="qk_layernorm" in options,
        qkv_bias="add_qkv_bias" in options,
    )
    if not whole(options, "num_experts", 0):
        return found
    return replace(
        found,  # every moe_layer_freqth layer has experts, from the first on
        expert_layers=-(-layers // whole(options, "moe_layer_freq", 1)),
        experts=whole(options, "num_experts"),
        routed=whole(options, "moe_router_topk", 2),
        expert_ffn=whole(options, "moe_ffn_hidden_size", ffn),
        shared_ffn=whole(options, "moe_shared_expert_intermediate_size", 0),
    )


def vocabulary_of(upstream: bool, options: Mapping[str, Value]) -> int | None:
    """The padded vocabulary; upstream's NullTokenizer adds one up to 0.17, which is counted."""
    tokenizer = options.get("tokenizer_type") if upstream else None
    if tokenizer == "GPT2BPETokenizer":
        size = GPT2_TOKENS
    elif "vocab_size" in options:
        size = whole(options, "vocab_size") + (tokenizer == "NullTokenizer")
    else:
        return None
    multiple = whole(options, "make_vocab_size_divisible_by", PADDING)
    return padded_vocabulary(size, multiple, whole(options, "tensor_model_parallel_size", 1))
