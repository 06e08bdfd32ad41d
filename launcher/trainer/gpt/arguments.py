"""The training program's command line, under upstream's names, and its arithmetic."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn

from launcher.agent.ranks.exit_codes import OptionError

AT_LEAST_ONE = (
    "num-layers hidden-size num-attention-heads seq-length vocab-size make-vocab-size-divisible-by "
    "micro-batch-size tensor-model-parallel-size pipeline-model-parallel-size "
    "context-parallel-size expert-model-parallel-size log-interval eval-interval "
    "tensorboard-log-interval"
).split()

IF_GIVEN = (
    "num-query-groups kv-channels rotary-base num-experts moe-router-topk moe-ffn-hidden-size "
    "moe-shared-expert-intermediate-size num-layers-per-virtual-pipeline-stage "
    "recompute-num-layers"
).split()
"""What is at least 1 where it is given."""


@dataclass(frozen=True)
class RankLayout:
    """How the ranks are divided: world = tensor × pipeline × context × data.

    `micro_batches` is what each rank runs per step: global batch / (micro-batch × data). `virtual`
    are the parts that each pipeline stage has; experts are over `expert` ranks of context × data.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    context: int = 1
    expert: int = 1
    virtual: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.context * self.data


class OptionParser(argparse.ArgumentParser):
    """A parser that raises, where argparse would print its message on every rank."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)

    def known(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; raises `OptionError` for one that isn't known, with the nearest."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]  # the value may be a secret
            from difflib import get_close_matches

            close = get_close_matches(name, self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"unknown argument {name}{hint}")
        return arguments


OWN_RECIPES = ("delayed", "tensorwise")
"""Of Transformer Engine's, whose formats our products have; a scale is never an earlier step's."""


def parser(
    prog: str = "python3 -m launcher.trainer.gpt",
    description: str = "Train a Megatron-Core GPT. Start its ranks with launcher.agent.runner.",
) -> OptionParser:
    """Every argument; `argument_default` is left alone, so help shows upstream's defaults."""
    made = OptionParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument_group("model").add_argument
    add("--num-layers", type=int, required=True)
    add("--hidden-size", type=int, required=True)
    add("--num-attention-heads", type=int, required=True)
    add("--ffn-hidden-size", type=int, help="by default 4 (with --swiglu: 8/3) × hidden size")
    add("--group-query-attention", action="store_true", help="heads share keys and values")
    add("--num-query-groups", type=int, help="groups of heads that share keys and values")
    add("--kv-channels", type=int, help="width of a head, by default hidden size / heads")
    add("--seq-length", type=int, required=True)
    add("--max-position-embeddings", type=int, help="by default the sequence length")
    add("--vocab-size", type=int, required=True, help="size before padding")
    padding = "pad the vocabulary to a multiple of this × TP"
    add("--make-vocab-size-divisible-by", type=int, default=128, help=padding)
    positions = ("learned_absolute", "rope")
    add("--position-embedding-type", choices=positions, default=positions[0])
    add("--rotary-base", type=int, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--use-rope-scaling", action="store_true", help="scale RoPE's frequencies, as Llama 3.1")
    add("--rope-scaling-factor", type=float, default=8.0)
    add("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5)
    add("--qk-layernorm", action="store_true", help="normalise each head's query and key")
    add("--swiglu", action="store_true")
    add("--squared-relu", action="store_true")
    add("--openai-gelu", action="store_true", help="compute GELU by tanh, as OpenAI's GPT-2")
    add("--disable-bias-linear", action="store_true")
    add("--add-qkv-bias", action="store_true", help="add biases to q, k and v, as Qwen 2")
    add("--window-size", type=window, help="N,0: each token attends to the N before it, as Mistral")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--init-method-std", type=float, default=0.02)
    add("--hidden-dropout", type=float, default=0.1)
    add("--attention-dropout", type=float, default=0.1)
    add("--transformer-impl", choices=("auto", "local", "transformer_engine"), default="auto")
    add("--bias-fusion", action="store_true", help="compile bias + GELU and bias + dropout")
    add("--cross-entropy-loss-fusion", action="store_true", help="compile the loss")
    add(
        "--use-cpu-initialization",
        action="store_true",
        help="draw the first weights alike in each layout",
    )
    add("--no-fast", action="store_true", help="train without the fast path")
    add = made.add_argument_group("mixture of experts").add_argument
    add("--num-experts", type=int, help="experts in each layer")
    add("--moe-router-topk", type=int, default=2)
    add("--moe-ffn-hidden-size", type=int, help="an expert's width, by default --ffn-hidden-size")
    add("--moe-shared-expert-intermediate-size", type=int, help="width of the shared experts")
    add("--moe-shared-expert-gate", action="store_true", help="gate the shared experts, as Qwen 2")
    add("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    add("--moe-router-pre-softmax", action="store_true", help="softmax before experts are chosen")
    balances = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")
    add("--moe-router-load-balancing-type", choices=balances, default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-z-loss-coeff", type=float)
    add("--moe-grouped-gemm", action="store_true", help="compute all experts in one product")
    dispatchers = ("allgather", "alltoall")
    add("--moe-token-dispatcher-type", choices=dispatchers, default="allgather")
    add = made.add_argument_group("parallelism").add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--num-layers-per-virtual-pipeline-stage", type=int, help="layers in each interleaved part")
    add("--context-parallel-size", type=int, default=1)
    add("--expert-model-parallel-size", type=int, default=1)
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--distributed-timeout-minutes", type=int, default=10)
    add = made.add_argument_group("training").add_argument
    add("--micro-batch-size", type=int, required=True)
    add("--global-batch-size", type=int, help="by default micro-batch × replicas")
    add("--train-iters", type=int, required=True)
    add("--seed", type=int, default=1234)
    add("--recompute-granularity", choices=("full",), help="recompute whole layers")
    which = "recompute all layers in groups (uniform), or the first layers of a stage (block)"
    add("--recompute-method", choices=("uniform", "block"), help=which)
    add("--recompute-num-layers", type=int, help="layers in a group, or first layers of a stage")
    passed = "iterations whose batches are left out, counted from 1"
    add("--iterations-to-skip", type=int, nargs="+", default=[], help=passed)
    add("--log-interval", type=int, default=100)
    add("--eval-interval", type=int, default=1000)
    add("--eval-iters", type=int, default=100)
    add("--exit-interval", type=int, help="stop at the next iteration that this number divides")
    add("--exit-signal-handler", action="store_true", help="on SIGTERM, save and exit with 0")
    agree = "iterations between replica checks (0: only at saves and at the end)"
    add("--check-replicas-interval", type=int, default=0, help=agree)
    add = made.add_argument_group("optimizer").add_argument
    add("--weight-decay", type=float, default=0.01)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--clip-grad", type=float, default=1.0)
    add = made.add_argument_group("learning rate").add_argument
    add("--lr", type=float, required=True)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    add("--lr-decay-iters", type=int, help="by default --train-iters")
    add("--lr-warmup-iters", type=int, default=0)
    add("--lr-warmup-fraction", type=float, help="warmup, as a fraction of the decay iterations")
    add = made.add_argument_group("precision").add_argument
    add("--fp16", action="store_true")
    add("--bf16", action="store_true")
    formats = ("e4m3", "hybrid")
    add("--fp8-format", dest="fp8", choices=formats, help="FP8 for the layers' matrix products")
    recipes = ("tensorwise", "delayed", "mxfp8", "blockwise")
    add("--fp8-recipe", choices=recipes, default="delayed", help="how FP8's scales are computed")
    add("--loss-scale", type=float, help="a constant scale, for fp16")
    skips = "scale of fp16's first step (upstream: 2**32)"
    add("--initial-loss-scale", type=float, default=2.0**16, help=skips)
    add("--min-loss-scale", type=float, default=1.0)
    add("--loss-scale-window", type=int, default=1000)
    add("--hysteresis", type=int, default=2)
    add = made.add_argument_group("data").add_argument
    add("--mock-data", action="store_true", help="train on consecutive numbers")
    add("--mock-samples", type=int, help="repeat this many samples of mock data")
    add("--data-path", nargs="+", help="a path without .bin and .idx, or pairs: weight, path")
    add("--split", default="969,30,1", help="shares of training, validation and test")
    add("--data-cache-path", help="folder for the sample index, by default beside the data")
    add("--eod-id", type=int, help="end-of-document id, by default the vocabulary's last")
    add("--num-workers", type=int, help="processes that read data (2 on GPUs, 0 on the CPU)")
    add = made.add_argument_group("checkpoints").add_argument
    add("--save")
    add("--load")
    add("--save-interval", type=int)
    beside = "copy a checkpoint to the host's memory, and write it while training goes on"
    add("--async-save", action="store_true", help=beside)
    add = made.add_argument_group("TensorBoard and W&B").add_argument
    add("--tensorboard-dir", help="folder for TensorBoard's event files")
    add("--tensorboard-log-interval", type=int, default=1, help="iterations between values")
    add("--wandb-project", help="project of Weights & Biases (key: WANDB_API_KEY)")
    add("--wandb-exp-name", help="the run's name in W&B")
    add("--wandb-save-dir", help="folder for W&B's files, by default wandb/ in --save")
    add = made.add_argument_group("measurements").add_argument
    add("--memory-samples", help="folder for rank-N.jsonl: memory of each rank, over time")
    add("--memory-interval", type=float, default=1.0, help="seconds between memory samples")
    add("--performance-summary", help="JSON file for steps, time, memory, loss and layout")
    add("--profile-steps", type=int, nargs=2, help="first and last iteration to trace")
    add("--profile-ranks", type=int, nargs="+", default=[0])
    traces = "folder for torch's traces, rank-N.json.gz; by default nsys records the steps"
    add("--profile-dir", help=traces)
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the values that follow from others filled in. Raises `OptionError`."""
    return complete(parser().known(argv))


def window(text: str) -> tuple[int, int]:
    """'4096,0' as (4096, 0). Raises `ValueError`, as argparse wants it."""
    left, right = (int(word) for word in text.strip("()").split(","))
    if left < 0 or right != 0:
        raise ValueError("only tokens before")
    return left, right


def complete(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in what follows from other values, as upstream does."""
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if arguments.swiglu else 4 * hidden
    arguments.ffn_hidden_size = arguments.ffn_hidden_size or usual
    if arguments.group_query_attention and arguments.num_query_groups is None:
        arguments.num_query_groups = 1
    arguments.group_query_attention = arguments.num_query_groups not in (None, heads)
    if not arguments.kv_channels and hidden % max(1, heads) == 0:
        arguments.kv_channels = hidden // max(1, heads)
    if arguments.num_experts:
        arguments.moe_ffn_hidden_size = arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size
    arguments.max_position_embeddings = arguments.max_position_embeddings or arguments.seq_length
    arguments.lr_decay_iters = arguments.lr_decay_iters or arguments.train_iters
    theirs = arguments.fp8 and arguments.fp8_recipe not in OWN_RECIPES
    if theirs and arguments.transformer_impl == "auto" and find_spec("transformer_engine"):
        arguments.transformer_impl = "transformer_engine"
    if arguments.eod_id is None:
        arguments.eod_id = arguments.vocab_size - 1
    return arguments


def padded_vocabulary(size: int, divisible_by: int, tensor: int) -> int:
    """The vocabulary's size, padded to a multiple of `divisible_by` × `tensor` as upstream does."""
    multiple = divisible_by * tensor
    return -(-size // multiple) * multiple


def learning_rate(arguments: argparse.Namespace, steps: int) -> float:
    """The rate after `steps` steps that the optimizer took, which the next one uses.

    Upstream's schedule: linear warmup from 0, then decay to the minimum. A step that was skipped
    for an overflow doesn't count.
    """
    decay, lowest = arguments.lr_decay_iters, arguments.min_lr
    fraction = arguments.lr_warmup_fraction
    warmup = float(arguments.lr_warmup_iters) if fraction is None else fraction * decay
    if warmup > 0 and steps <= warmup:
        return float(arguments.lr * steps / warmup)
    if arguments.lr_decay_style == "constant":
        return float(arguments.lr)
    if steps > decay:
        return float(lowest)
    done = (steps - warmup) / (decay - warmup)
    linear = arguments.lr_decay_style == "linear"
    left = 1.0 - done if linear else 0.5 * (math.cos(math.pi * done) + 1.0)
    return float(lowest + left * (arguments.lr - lowest))


def layout(arguments: argparse.Namespace, world_size: int) -> RankLayout:
    """The layout of `world_size` ranks; fills in the global batch size. Raises `OptionError`."""
    for name in (*AT_LEAST_ONE, *IF_GIVEN):
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None and value < 1:
            raise OptionError(f"--{name} must be at least 1")
    tensor, context = arguments.tensor_model_parallel_size, arguments.context_parallel_size
    pipeline = arguments.pipeline_model_parallel_size
    if tensor == 1:
        arguments.sequence_parallel = False  # as upstream's programs do
    _divides(tensor * pipeline * context, world_size, "TP × PP × CP", "the world size")
    data = world_size // (tensor * pipeline * context)
    step = arguments.micro_batch_size * data
    arguments.global_batch_size = arguments.global_batch_size or step
    batch = "micro-batch size × data-parallel size"
    _divides(step, arguments.global_batch_size, batch, "--global-batch-size")
    _check_model(arguments)
    _check_experts(arguments, context * data)
    _check_choices(arguments)
    micro_batches = arguments.global_batch_size // step
    _check_virtual(arguments, micro_batches)
    expert, virtual = arguments.expert_model_parallel_size, virtual_stages(arguments)
    return RankLayout(tensor, pipeline, data, micro_batches, context, expert, virtual)


def _divides(divisor: int, number: int, divisor_name: str, name: str) -> None:
    if number % divisor:
        raise OptionError(f"{name} ({number}) is not divisible by {divisor_name} ({divisor})")


def _check_model(given: argparse.Namespace) -> None:
    heads, groups = given.num_attention_heads, given.num_query_groups
    tensor, size = given.tensor_model_parallel_size, "--tensor-model-parallel-size"
    context, pipeline = given.context_parallel_size, given.pipeline_model_parallel_size
    _divides(tensor, heads, size, "--num-attention-heads")
    if given.kv_channels is None:
        _divides(heads, given.hidden_size, "--num-attention-heads", "--hidden-size")
    _divides(tensor, given.ffn_hidden_size, size, "--ffn-hidden-size")
    if groups:
        _divides(tensor, groups, size, "--num-query-groups")
        _divides(groups, heads, "--num-query-groups", "--num-attention-heads")
    _divides(pipeline, given.num_layers, "--pipeline-model-parallel-size", "--num-layers")
    if context > 1:
        _divides(2 * context, given.seq_length, "2 × --context-parallel-size", "--seq-length")
    if given.sequence_parallel:
        _divides(context * tensor, given.seq_length, f"CP × {size}", "--seq-length")
    if given.swiglu and given.squared_relu:
        raise OptionError("--swiglu and --squared-relu exclude each other")
    if (given.squared_relu or given.openai_gelu) and given.bias_fusion:
        raise OptionError("--bias-fusion knows no --squared-relu, and has --openai-gelu's anyway")
    rotates = given.position_embedding_type == "rope"
    if given.use_rope_scaling and not rotates:
        raise OptionError("--use-rope-scaling needs --position-embedding-type rope")
    if rotates and (given.kv_channels % 2 or not 0 < given.rotary_percent <= 1):
        raise OptionError("RoPE needs an even --kv-channels and --rotary-percent up to 1")


def _check_experts(given: argparse.Namespace, ranks: int) -> None:
    """Refuse what experts can't be; `ranks` are those of context and data parallelism."""
    parts, several = given.expert_model_parallel_size, given.num_experts
    if not several:
        for name in ("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"):
            if getattr(given, name.replace("-", "_")):
                raise OptionError(f"--{name} needs --num-experts")
        if parts > 1 or given.moe_grouped_gemm:
            raise OptionError("expert parallelism and --moe-grouped-gemm need --num-experts")
        return
    _divides(parts, several, "--expert-model-parallel-size", "--num-experts")
    _divides(parts, ranks, "--expert-model-parallel-size", "replicas × CP")
    size = "--tensor-model-parallel-size"
    _divides(given.tensor_model_parallel_size, given.moe_ffn_hidden_size, size, "an expert's size")
    if given.moe_shared_expert_intermediate_size:
        shared = given.moe_shared_expert_intermediate_size
        _divides(given.tensor_model_parallel_size, shared, size, "the shared experts' size")
        # 0.13 gathers tokens for both into one buffer, and finds that out in the backward pass.
        dispatcher = given.moe_token_dispatcher_type
        if given.tensor_model_parallel_size > 1 and dispatcher == "allgather":
            told = "shared experts with tensor parallelism need"
            raise OptionError(f"{told} --moe-token-dispatcher-type alltoall")
    if not given.disable_bias_linear:
        raise OptionError("--num-experts needs --disable-bias-linear: experts have no biases")
    if given.moe_router_topk > several:
        raise OptionError("--moe-router-topk is above --num-experts")
    if given.tensor_model_parallel_size > 1 and not given.sequence_parallel:
        raise OptionError("experts with tensor parallelism need --sequence-parallel")
    if given.moe_router_load_balancing_type == "sinkhorn" and given.moe_aux_loss_coeff:
        raise OptionError("sinkhorn goes without --moe-aux-loss-coeff")
    if given.moe_grouped_gemm and not (given.bf16 and given.disable_bias_linear):
        raise OptionError("--moe-grouped-gemm needs --bf16 and --disable-bias-linear")


def virtual_stages(given: argparse.Namespace) -> int:
    """The parts that each stage of the pipeline has: 1 where it isn't interleaved."""
    stage = given.num_layers // given.pipeline_model_parallel_size
    return int(stage // (given.num_layers_per_virtual_pipeline_stage or stage))


def _check_virtual(given: argparse.Namespace, micro_batches: int) -> None:
    each, stages = given.num_layers_per_virtual_pipeline_stage, given.pipeline_model_parallel_size
    if each is None:
        return
    name = "--num-layers-per-virtual-pipeline-stage"
    if stages == 1:
        raise OptionError(f"{name} needs a pipeline: --pipeline-model-parallel-size 2 or more")
    _divides(each, given.num_layers // stages, name, "the layers of a stage")
    _divides(stages, micro_batches, "the pipeline's stages", "the micro-batches of a step")


def _check_choices(given: argparse.Namespace) -> None:
    again = (given.recompute_granularity, given.recompute_method, given.recompute_num_layers)
    if any(again) and not all(again):
        raise OptionError("--recompute-granularity, -method and -num-layers go together")
    if given.max_position_embeddings < given.seq_length:
        raise OptionError("--max-position-embeddings is smaller than --seq-length")
    if not 0 <= given.eod_id < given.vocab_size:
        raise OptionError(f"--eod-id {given.eod_id} is not in the vocabulary")
    if given.fp16 and given.bf16:
        raise OptionError("--fp16 and --bf16 exclude each other")
    if given.fp8 and not given.bf16:
        raise OptionError("--fp8-format needs --bf16")
    if given.mock_data == bool(given.data_path):
        raise OptionError("give either --mock-data or --data-path")
    if given.mock_samples is not None and (given.data_path or given.mock_samples < 1):
        raise OptionError("--mock-samples is a number above 0, and needs --mock-data")
    if given.lr_warmup_iters and given.lr_warmup_fraction is not None:
        raise OptionError("--lr-warmup-iters and --lr-warmup-fraction exclude each other")
    if given.save_interval and not given.save:
        raise OptionError("--save-interval needs --save")
    if given.wandb_project and not given.wandb_exp_name:
        raise OptionError("--wandb-project needs --wandb-exp-name")
    first, last = given.profile_steps or (1, 1)
    if not 1 <= first <= last <= given.train_iters:
        raise OptionError("--profile-steps are two of --train-iters, the first of them first")
    if given.memory_interval <= 0:
        raise OptionError("--memory-interval must be above 0")


def check_files(given: argparse.Namespace) -> None:
    """Raises `OptionError` where the data isn't there."""
    # An even number of words is pairs of a weight and a prefix, as upstream has it.
    prefixes = given.data_path or []
    for prefix in prefixes if len(prefixes) % 2 else prefixes[1::2]:
        for name in (f"{prefix}.bin", f"{prefix}.idx"):
            if not os.path.isfile(name):
                raise OptionError(f"--data-path: there is no file {name}")
