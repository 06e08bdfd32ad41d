"""How fast a run trains: tokens a second, TFLOP/s on each GPU, and their share of its peak.

What a step takes is the published count of Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM (https://arxiv.org/abs/2104.04473), appendix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.arguments import given

GPT = "launcher.train.gpt"
UPSTREAM = "pretrain_gpt.py"
GPT2_TOKENS = 50257
"""The vocabulary of GPT2BPETokenizer: https://huggingface.co/openai-community/gpt2."""

PADDING = 128
"""Megatron's --make-vocab-size-divisible-by where it isn't given; times TP."""

UNKNOWN = {
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--experimental-attention-variant",
    "--attention-output-gate",
    "--heterogeneous-layers-config-path",
    "--moe-latent-size",
    "--hybrid-override-pattern",
    "--is-hybrid-model",
    "--use-checkpoint-args",
    "--yaml-cfg",
    "--spec",
}
"""Options of Megatron with which the sizes stand elsewhere, or the count doesn't hold."""

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM[23]-(16|32)GB", {"fp16": 125, "fp32": 15.7}),
    (r"V100-PCIE-(16|32)GB", {"fp16": 112, "fp32": 14}),
    (r"V100S-PCIE-32GB", {"fp16": 130, "fp32": 16.4}),
    (r"T4", {"fp16": 65, "fp32": 8.1}),
    (r"A10", {"fp16": 125, "bf16": 125, "fp32": 31.2}),
    (r"A30", {"fp16": 165, "bf16": 165}),
    (r"A40", {"fp16": 149.7, "bf16": 149.7, "fp32": 37.4}),
    (r"A100(-SXM4-.*|-PCIE-.*| 80GB PCIe)", {"fp16": 312, "bf16": 312, "fp32": 19.5}),
    (r"RTX A6000", {"fp16": 154.8, "bf16": 154.8, "fp32": 38.7}),
    (r"GeForce RTX 3090", {"fp16": 71, "bf16": 71, "fp32": 35.6}),
    (r"GeForce RTX 4090", {"fp16": 165.2, "bf16": 165.2, "fp32": 82.6}),
    (r"L4", {"fp16": 121, "bf16": 121, "fp32": 30.3}),
    (r"L40", {"fp16": 181.05, "bf16": 181.05, "fp32": 90.5}),
    (r"L40S", {"fp16": 362.05, "bf16": 362.05, "fp32": 91.6}),
    (r"H100 PCIe", {"fp16": 756, "bf16": 756, "fp32": 51.2}),
    (r"H100 NVL", {"fp16": 835.5, "bf16": 835.5, "fp32": 60}),
    (r"H100 80GB HBM3", {"fp16": 989.4, "bf16": 989.4, "fp32": 66.9}),
    (r"H200", {"fp16": 989.5, "bf16": 989.5, "fp32": 67}),
    (r"H200 NVL", {"fp16": 835.5, "bf16": 835.5, "fp32": 60}),
    (r"B200", {"fp16": 2250, "bf16": 2250, "fp32": 75}),
)
"""Dense TFLOP/s by the names that nvidia-smi tells, without their NVIDIA or Tesla.

fp16 and bf16 are those of the tensor cores that sum in fp32, as training does; fp32 is without
TF32. Where NVIDIA prints a number "with sparsity", it is halved here. A precision that a GPU
lacks, or whose number wasn't found, is left out, as are GPUs without a public one (H20). From
NVIDIA's

- V100 datasheet (volta-v100-datasheet-update-us-1165301-r5), T4 datasheet (951643)
- A10 datasheet, A30 datasheet, A40 datasheet, A100 datasheet (1758950-r4)
- Ampere GA102 whitepaper v2.1, table 3 (RTX A6000) and appendix A (RTX 3090)
- Ada whitepaper v2.1, appendix A (RTX 4090); L4 datasheet (2595652), L40 and L40S datasheets
- H100 whitepaper v1.04, table 3; H100 product page (NVL, halved); H200 datasheet (halved)
- Blackwell datasheet, HGX B200 (halved)
"""


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT and of a step; `batch` is in sequences, `world` in processes.

    `head` is the width of a head; `vocabulary` is padded. `expert_layers` of the layers have
    experts, of which each token passes `routed`, `expert_ffn` wide, and shared ones that are
    `shared_ffn` wide together.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    sequence: int
    vocabulary: int
    batch: int
    world: int
    gated: bool = False
    precision: str = "fp32"
    expert_layers: int = 0
    routed: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0


@dataclass(frozen=True)
class Rates:
    """How fast a step was: tokens on all GPUs together, TFLOP/s on each, 0 to 1 of its peak."""

    tokens_per_s: float
    tflops_per_gpu: float
    mfu: float | None = None


def shape_of(argv: Sequence[str], world: int, vocabulary: int | None = None) -> Shape | None:
    """The sizes that a plan's command line gives to `world` processes.

    `vocabulary` is the padded one, where the log told it: a tokenizer's isn't on the command line.
    None where the program isn't our GPT or upstream's, or where a size isn't known.
    """
    program, found = _options(argv)
    if program is None or UNKNOWN & found.keys():
        return None
    try:
        return _shape(program, found, world, vocabulary)
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def _options(argv: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """The training program among a plan's words, GPT or UPSTREAM, and the options behind it."""
    words = tuple(argv[list(argv).index("--") + 1 :]) if "--" in argv else tuple(argv)
    if words[:2] == ("-m", GPT):
        program = GPT
    elif words and words[0].rpartition("/")[2] == UPSTREAM:
        program = UPSTREAM
    else:
        return None, {}
    return program, {option.name: " ".join(option.values) for option in given(words)}


def _shape(program: str, found: dict[str, str], world: int, vocabulary: int | None) -> Shape | None:
    """Raises KeyError or ValueError where a size is missing or is no number."""
    hidden, heads = int(found["--hidden-size"]), int(found["--num-attention-heads"])
    layers, gated = int(found["--num-layers"]), "--swiglu" in found
    ffn = int(found.get("--ffn-hidden-size") or _ffn(hidden, gated))
    tensor = int(found.get("--tensor-model-parallel-size", 1))
    vocabulary = vocabulary or _vocabulary(program, found, tensor)
    if not vocabulary:
        return None
    return Shape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=_groups(program, found, heads),
        head=int(found.get("--kv-channels") or hidden // heads),
        sequence=int(found["--seq-length"]),
        vocabulary=vocabulary,
        batch=_batch(found, world, tensor),
        world=world,
        gated=gated,
        precision=_precision(found),
        **_experts(found, layers, ffn),
    )


def _ffn(hidden: int, gated: bool) -> int:
    """Megatron's hidden size of the MLP where none is given (megatron/training/arguments.py)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _groups(program: str, found: dict[str, str], heads: int) -> int:
    """Upstream groups queries only where told to, and then into one group by default."""
    if program == UPSTREAM and "--group-query-attention" not in found:
        return heads
    return int(found.get("--num-query-groups") or (heads if program == GPT else 1))


def _batch(found: dict[str, str], world: int, tensor: int) -> int:
    """Sequences in a step: one micro-batch on each replica where no global batch is given."""
    if "--global-batch-size" in found:
        return int(found["--global-batch-size"])
    sizes = ("--pipeline-model-parallel-size", "--context-parallel-size")
    pipeline, context = (int(found.get(size, 1)) for size in sizes)
    return int(found["--micro-batch-size"]) * (world // (tensor * pipeline * context))


def _vocabulary(program: str, found: dict[str, str], tensor: int) -> int | None:
    """The padded vocabulary; upstream's comes from the tokenizer, of which two are known."""
    tokenizer = found.get("--tokenizer-type")
    if program == GPT:
        size = int(found["--vocab-size"])
    elif tokenizer == "NullTokenizer":
        size = int(found["--vocab-size"]) + 1
    elif tokenizer == "GPT2BPETokenizer":
        size = GPT2_TOKENS
    else:
        return None
    multiple = int(found.get("--make-vocab-size-divisible-by") or PADDING) * tensor
    return -(-size // multiple) * multiple


def _precision(found: dict[str, str]) -> str:
    if any(option.startswith(("--fp8", "--fp4")) for option in found):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if f"--{name}" in found), "fp32")


def _experts(found: dict[str, str], layers: int, ffn: int) -> dict[str, int]:
    """What Shape has of experts; every `--moe-layer-freq`th layer has them, from the first on."""
    if "--num-experts" not in found:
        return {}
    return {
        "expert_layers": -(-layers // int(found.get("--moe-layer-freq", 1))),
        "routed": int(found.get("--moe-router-topk", 2)),
        "expert_ffn": int(found.get("--moe-ffn-hidden-size") or ffn),
        "shared_ffn": int(found.get("--moe-shared-expert-intermediate-size") or 0),
    }


def flops_per_step(shape: Shape) -> float:
    """Floating-point operations of a step of all GPUs together, forward and backward.

    Counted are the matrix products, each 2·m·n·k and three times: once forward, for its inputs'
    gradients and for its weights'. For B sequences of s tokens, l layers of hidden size h and a
    vocabulary V, with an MLP of 4h, this is the paper's 72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h)),
    its appendix without the forward pass that recomputing activations repeats. As there,
    attention counts every pair of tokens, although half of them are masked.

    Beyond the paper: query groups (keys and values are narrower), heads whose widths don't add
    up to h, any MLP size, gated MLPs (three products where others have two), and experts: those
    that a token passes. Norms, softmax, dropout, the router and the optimizer aren't counted.
    """
    queries, keys = shape.heads * shape.head, shape.groups * shape.head
    projections = shape.hidden * (2 * queries + 2 * keys)  # queries, output; keys, values
    scores = 2 * shape.sequence * queries  # queries by keys, and weights by values
    products = 3 if shape.gated else 2
    dense = products * shape.hidden * shape.ffn
    passed = shape.routed * shape.expert_ffn + shape.shared_ffn
    experts = products * shape.hidden * passed
    per_token = (
        shape.layers * (projections + scores)
        + (shape.layers - shape.expert_layers) * dense
        + shape.expert_layers * experts
        + shape.hidden * shape.vocabulary
    )
    return 3.0 * 2.0 * shape.batch * shape.sequence * per_token


def rates(shape: Shape, ms: float, gpu_name: str | None = None) -> Rates | None:
    """The rates of steps of `ms` milliseconds; mfu is None where the GPU's peak isn't known.

    None for a time that is no time. Where the batch grows in a run, give `shape` the step's.
    """
    seconds = ms / 1000
    if not 0 < seconds < float("inf"):
        return None
    tflops = flops_per_step(shape) / seconds / shape.world / 1e12
    most = peak(gpu_name, shape.precision) if gpu_name else None
    return Rates(
        tokens_per_s=shape.batch * shape.sequence / seconds,
        tflops_per_gpu=tflops,
        mfu=tflops / most if most else None,
    )


def peak(name: str, precision: str) -> float | None:
    """The dense TFLOP/s of a GPU by its name, in fp16, bf16 or fp32; None where not known."""
    plain = re.sub(r"^(NVIDIA |Tesla )+", "", name.strip())
    if "MIG" in plain:
        return None
    for pattern, peaks in PEAKS:
        if re.fullmatch(pattern, plain, re.IGNORECASE):
            return peaks.get(precision)
    return None
