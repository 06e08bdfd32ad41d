"""Chooses the parts of the fast path that a run can use; captures its step as a CUDA graph."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from launcher.agent import compat, words
from launcher.agent.ranks.exit_codes import RunError
from launcher.trainer.fast import memsets
from launcher.trainer.gpt.arguments import RankLayout
from launcher.trainer.gpt.training import StepOutcome

WARM_UP = 3
"""Steps before a capture: torch asks for some, so that what is made once is made outside."""

WIDEST = 4096
"""Hidden size of layers in Triton, which has a row of them at once."""

ALIGNED = 8
"""Elements of 16 bits, of whose rows grouped products take 16 bytes at a time."""

KERNELS = "LAUNCHER_KERNELS"
"""0 leaves GPT-2's layers to torch's compiler: what our kernels are compared with."""

PATIENCE = datetime.timedelta(minutes=5)
"""How long a rank whose first step failed waits for the others' to fail."""

Batches = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class FastPath:
    """The parts that are used, and why the others aren't.

    `compiled` is "whole" for the model and its loss as one, "kernels" where the layers are Triton's
    (`block`), "layers" for each for itself, or "". `optimizer` is "whole" where each replica
    steps all, "shared" for its share of it, or ""; `symmetric` where two replicas, or two ranks
    of experts, use each other's memory.
    """

    optimizer: str
    compiled: str
    graphed: bool
    missing: tuple[str, ...] = ()
    symmetric: bool = False

    def __str__(self) -> str:
        named = {
            "layers in Triton": self.compiled == "kernels",
            "compiled": self.compiled in ("whole", "kernels"),
            "layers compiled": self.compiled == "layers",
            "one CUDA graph": self.graphed,
            "optimizer without waits": self.optimizer == "whole",
            "distributed optimizer without waits": self.optimizer == "shared",
            "symmetric memory": self.symmetric,
        }
        used = ", ".join(name for name, there in named.items() if there) or "off"
        return "; ".join((f"{words.FAST}{used}", *self.missing))

    @property
    def slow_steps(self) -> int:
        """The first steps of a process, which compile, warm up and capture."""
        return WARM_UP + 1 if self.graphed else int(bool(self.compiled))

    def without(self, part: str, reason: str) -> FastPath:
        """One that does without a part, since something doesn't work here."""
        if part == "kernels":
            return replace(self, missing=(*self.missing, reason), compiled="whole")
        nothing: dict[str, Any] = {part: False if part in ("graphed", "symmetric") else ""}
        return replace(self, missing=(*self.missing, reason), **nothing)


def choose(arguments: argparse.Namespace, layout: RankLayout) -> FastPath:
    """What holds for these arguments."""
    missing = []
    optimizer = "shared" if arguments.use_distributed_optimizer else "whole"
    reasons = {
        "CPU": arguments.on_cpu,
        "TransformerEngine's layers": arguments.transformer_impl == "transformer_engine",
        "FP8 before torch 2.5, which is left to Transformer Engine": bool(arguments.fp8)
        and torch.__version__ < (2, 5)
        and arguments.transformer_impl == "auto"
        and bool(find_spec("transformer_engine")),
        _against_experts(arguments, layout): bool(arguments.num_experts),
    }
    against = [name for name, there in reasons.items() if there and name]
    again = bool(arguments.recompute_granularity)
    split = layout.tensor > 1 or layout.pipeline > 1 or again or bool(arguments.num_experts)
    compiled = "" if against else "layers" if split else "whole"
    if compiled == "whole" and layout.context == 1 and _in_kernels(arguments):
        compiled = "kernels"
    if against:
        missing.append(f"not compiled: {against[0]}")
    reasons = {
        "an interleaved pipeline": layout.virtual > 1,
        "recomputing, whose random states the host keeps": again,
        "ranks' own random numbers need Megatron-Core 0.12": layout.tensor > 1
        and arguments.attention_dropout > 0
        and not compat.capturable_randomness(True),
    }
    waits = [name for name, there in reasons.items() if there]
    graphed = bool(compiled) and not waits
    if compiled and waits:
        missing.append(f"no CUDA graph: {waits[0]}")
    return FastPath(optimizer, compiled, graphed, tuple(missing))


def _against_experts(arguments: argparse.Namespace, layout: RankLayout) -> str:
    """What keeps experts from being what `experts` has products for, "" where nothing does."""
    sizes = (arguments.hidden_size, arguments.moe_ffn_hidden_size or ALIGNED)
    reasons = {
        "experts that tensor parallelism splits": layout.tensor > 1,
        "experts with context parallelism": layout.context > 1,
        "experts that aren't SwiGLUs": not arguments.swiglu,
        "experts in FP8": bool(arguments.fp8),
        "experts by Sinkhorn's rule": arguments.moe_router_load_balancing_type == "sinkhorn",
        "experts in another precision than bf16": not arguments.bf16,
        f"experts of sizes that {ALIGNED} doesn't divide": any(x % ALIGNED for x in sizes),
        "experts, for want of Triton": not _has_triton(),
    }
    return next((name for name, there in reasons.items() if there), "")


def _in_kernels(arguments: argparse.Namespace) -> bool:
    """Whether the layers are what `block` has kernels for: GPT-2's, where it was seen on a GPU."""
    width, widest = arguments.hidden_size, max(arguments.ffn_hidden_size, 3 * arguments.hidden_size)
    others = (
        arguments.normalization != "LayerNorm",
        arguments.position_embedding_type != "learned_absolute",
        *(arguments.disable_bias_linear, arguments.swiglu, arguments.squared_relu),
        *(arguments.qk_layernorm, arguments.window_size, arguments.group_query_attention),
        arguments.kv_channels * arguments.num_attention_heads != width,
        not arguments.bf16 or arguments.fp8 or arguments.overlap_grad_reduce,
        width > WIDEST or width % 32,
        arguments.micro_batch_size * arguments.seq_length * widest >= 2**31,
        os.environ.get(KERNELS) == "0" or not _has_triton(),
    )
    return not any(others)


def _has_triton() -> bool:
    """Whether it imports: torch comes with it, and an image may have another."""
    with suppress(Exception):
        import triton  # noqa: F401

        return True
    return False


@contextmanager
def attention() -> Iterator[None]:
    """cuDNN's attention first, where torch (2.6 and newer) takes an order.

    On an H100, it takes 224 µs forward and backward for GPT-2's heads, flash attention 279.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    order = [getattr(SDPBackend, name) for name in names if hasattr(SDPBackend, name)]
    with ExitStack() as stack:
        with suppress(TypeError):
            stack.enter_context(sdpa_kernel(order, set_priority=True))
        yield


def compile_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, for what has to give the same bits on all ranks.

    Of two forms of an elementwise kernel torch takes the one that is faster at the moment, and the
    optimizer's, on an H100, differ in the last bit of 3 masters in 1000: replicas would part. For
    each size anew: experts' buffer is a second one, and what torch compiles for any size loads
    single numbers, which took Adam 3.96 ms for 2.86 on an H200.
    """
    options = {"triton.autotune_pointwise": False}
    made: Callable[..., Any] = torch.compile(function, dynamic=False, options=options)
    return made


class GraphedStep:
    """A step from inputs that stay in their place: compiled at its first call, then captured.

    `body` makes a step of an iterator of micro-batches. What doesn't work is reported by `say`, and
    done without: `plain` takes "kernels" or all "compiled" parts out.
    """

    def __init__(
        self,
        path: FastPath,
        body: Callable[[Batches | None], StepOutcome],
        plain: Callable[[str], None],
        say: Callable[[str], None],
        micro_batches: int,
    ) -> None:
        self.path, self.body, self.plain, self.say = path, body, plain, say
        self.micro_batches, self.calls = micro_batches, 0
        self.inputs: list[dict[str, torch.Tensor]] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outcome: StepOutcome = (None, None, None)

    def __call__(self, batches: Batches | None) -> StepOutcome:
        """One step, on the next micro-batches."""
        if batches is not None:
            self._fill([next(batches) for _ in range(self.micro_batches)])
        self.calls += 1
        if self.calls == 1:
            return self._first()
        if self.path.graphed and self.calls == WARM_UP + 1:
            self._capture()
        if not self.graph:
            return self.body(self._batches())
        self.graph.replay()
        return self.outcome

    def _fill(self, fetched: Sequence[dict[str, torch.Tensor]]) -> None:
        """Bring the batches to the device, while it may still be at the step before."""
        if not self.inputs:
            self.inputs = [{name: x.cuda() for name, x in each.items()} for each in fetched]
            return
        for place, each in zip(self.inputs, fetched, strict=True):
            for name, value in each.items():
                place[name].copy_(value, non_blocking=True)

    def _batches(self) -> Batches | None:
        """Those of this step; None in the middle of a pipeline."""
        return iter(self.inputs) if self.inputs else None

    def _first(self) -> StepOutcome:
        self.say(f"{words.COMPILING}: the first takes some time")
        began = time.perf_counter()
        try:
            outcome = self.body(self._batches())
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            reason = _first_line(error)  # its frames hold what the step had in memory
        else:
            self.say(f"{words.COMPILED} in {time.perf_counter() - began:.0f} s")
            return outcome
        part = "kernels" if self.path.compiled == "kernels" else "compiled"
        if not _fails_everywhere(part):
            rank = torch.distributed.get_rank()
            raise RunError(f"the first step failed on rank {rank} alone, try --no-fast: {reason}")
        self._do_without(part, f"{'no' if part == 'kernels' else 'not'} {part}: {reason}")
        self.plain(part)
        return self._first() if part == "kernels" else self.body(self._batches())

    def _capture(self) -> None:
        """Record a step, which does nothing yet; ranks' own generators are registered for it."""
        from megatron.core import tensor_parallel

        graph = memsets.graph()
        for state in tensor_parallel.get_cuda_rng_tracker().get_states().values():
            if isinstance(state, torch.Generator):
                graph.register_generator_state(state)
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.outcome = self.body(self._batches())
        except Exception as error:  # also for want of memory: a graph's is its own
            self._do_without("graphed", f"no CUDA graph: {_first_line(error)}")
        else:
            self.graph = graph
            try:
                memsets.replace(graph)
            except Exception as error:
                self.say(f"memsets stay in the CUDA graph: {_first_line(error)}")
        torch.cuda.synchronize()

    def release(self) -> None:
        """Let the graph go: NCCL doesn't end before those that hold its kernels."""
        if self.graph:
            torch.cuda.synchronize()
            self.graph.reset()
            self.graph = None

    def give_memory_back(self, reason: str) -> None:
        """Go on without the graph, whose memory nothing else can use."""
        self.release()
        self._do_without("graphed", reason)

    def _do_without(self, part: str, reason: str) -> None:
        self.path = self.path.without(part, reason)
        if part == "compiled" and self.path.graphed:
            self.path = self.path.without("graphed", "nor a CUDA graph")
        self.say(str(self.path))


def _fails_everywhere(part: str) -> bool:
    """Whether all ranks' steps fail that use `part` of the path.

    A rank alone that did without would wait for collectives that the others don't call, or its
    replica would part from theirs.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    names = [f"fast/{part}/{rank}" for rank in range(torch.distributed.get_world_size())]
    store.set(names[torch.distributed.get_rank()], "")
    with suppress(RuntimeError):
        store.wait(names, PATIENCE)
        return True
    return False


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
