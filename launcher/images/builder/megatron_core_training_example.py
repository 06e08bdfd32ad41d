"""Train a small GPT with Megatron-Core on made-up data, to try a layout on GPUs or the CPU.

One file that needs Python, torch and megatron.core alone; docs/models.md has the options.

    torchrun --nproc_per_node=8 megatron_core_training_example.py \
        --tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --batch-size=16
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import resource
import socket
import statistics
import sys
import threading
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

NAME = "megatron_core_training_example"
SUMMARY, SAMPLES = "performance_summary.json", "memory"
USAGE = 2
OTHERS_WAIT = 2.0
"""Seconds: torchrun kills the rank that says the reason once another one has ended."""

MICRO_BATCHES_PER_STAGE = 4
"""With P stages and 4 × P micro-batches, a stage idles less than a fifth of a step
((P - 1) / (5 × P - 1), https://arxiv.org/abs/2104.04473, section 2.2)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class UsageError(Exception):
    """What can't work as asked for, in a line."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser() -> Parser:
    made = Parser(f"{NAME}.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = made.add_argument
    add("--num-layers", type=_above_0, default=4)
    add("--hidden-size", type=_above_0, default=256)
    add("--ffn-hidden-size", type=_above_0, help="4 × hidden size")
    add("--num-attention-heads", type=_above_0, default=8)
    add("--vocab-size", type=_above_0, default=1024)
    add("--seq-length", type=_above_0, default=128)
    add("--batch-size", type=_above_0, default=8, help="samples of each replica in a step")
    add("--micro-batch-size", type=_above_0, help="samples of one pass, an equal part of these")
    add("--train-steps", type=_above_0, default=100, help="steps of an epoch")
    add("--epochs", type=_above_0, default=1)
    add("--dataset-size", type=_above_0, help="samples, taken again and again; else all differ")
    add("--lr", type=float, default=1e-3)
    add("--warmup-steps", type=int, help="a tenth of all steps where not given")
    add("--gradient-clip-val", type=float, default=1.0)
    add("--seed", type=int, default=1234)
    add("--log-interval", type=_above_0)
    add("--fp16", action="store_true")
    add("--bf16", action="store_true")
    add("--tensor-model-parallel-size", type=_above_0, default=1)
    add("--pipeline-model-parallel-size", type=_above_0, default=1)
    add("--sequence-parallel", action="store_true")
    add("--world-size", type=_above_0, help="checked against the ranks that were started")
    add("--init-method", help="checked against where they meet: tcp://HOST:PORT")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch's
    add("--monitor-memory-continuously", action="store_true", help=f"into {SAMPLES}/")
    add("--memory-monitor-interval", type=float, default=1.0, help="seconds")
    add("--save-performance-summary", action="store_true", help=f"as {SUMMARY}")
    add("--output-dir", default=".", help="the folder of both")
    add("--use-wandb", action="store_true", help="Weights & Biases; the key is WANDB_API_KEY's")
    return made


def _above_0(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options. Raises UsageError, without the value of one that isn't known."""
    options, unknown = parser().parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        raise UsageError(f"unknown argument {name}: --help lists those that there are")
    return options


# The ranks


def environment(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environ`, which torchrun made, or nobody.

    Raises UsageError where the options say something else than the environment.
    """
    added = {}
    if "RANK" not in environ:
        added = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = {**environ, **added}
    started, meeting = int(ranks["WORLD_SIZE"]), ranks.get("MASTER_ADDR", "")
    if options.world_size not in (None, started):
        raise UsageError(
            f"--world-size {options.world_size}, and {started} "
            f"{'process was' if started == 1 else 'processes were'} started: make them equal, by "
            "torchrun's --nproc_per_node and --nnodes, or leave the option out"
        )
    port = ranks.get("MASTER_PORT", "")
    if not added and not _meet_at(options.init_method, meeting, port):
        raise UsageError(
            f"--init-method {options.init_method}, and the processes meet at {meeting}:{port}: "
            "make them equal, by torchrun's --master_addr and --master_port, or leave it out"
        )
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron's overlap needs one queue
    if ranks["WORLD_SIZE"] == ranks.get("LOCAL_WORLD_SIZE") or meeting in LOOPBACK:
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return added | {name: value for name, value in defaults.items() if name not in environ}


def _meet_at(url: str | None, host: str, port: str) -> bool:
    """Whether tcp://HOST:PORT, or env://, is where the processes meet; names may be numbers."""
    if url in (None, "env://"):
        return True
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(\d+)/?", url)
    if not match:
        raise UsageError(f"--init-method {url}: doesn't look like tcp://HOST:PORT")
    wanted = match[1].strip("[]")
    try:
        places = [{found[4][0] for found in socket.getaddrinfo(x, None)} for x in (wanted, host)]
    except OSError:
        return (wanted, match[2]) == (host, port)
    return match[2] == port and not places[0].isdisjoint(places[1])


def check(options: argparse.Namespace, world: int) -> None:
    """Settle what follows from other options. Raises UsageError for what can't work."""
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if options.fp16 and options.bf16:
        raise UsageError("--fp16 and --bf16: give one of them")
    _divides("the world size", world, "TP × PP", tensor * pipeline)
    options.micro_batch_size = options.micro_batch_size or micro_batch(options.batch_size, pipeline)
    heads, size = options.num_attention_heads, options.micro_batch_size
    _divides("--hidden-size", options.hidden_size, "--num-attention-heads", heads)
    _divides("--num-attention-heads", heads, "TP", tensor)
    _divides("--num-layers", options.num_layers, "PP", pipeline)
    _divides("--batch-size", options.batch_size, "--micro-batch-size", size)
    if options.sequence_parallel:
        _divides("--seq-length", options.seq_length, "TP", tensor)
    if options.memory_monitor_interval <= 0:
        raise UsageError("--memory-monitor-interval must be above 0")
    options.replicas = world // (tensor * pipeline)
    options.micro_batches = options.batch_size // options.micro_batch_size
    options.steps = options.epochs * options.train_steps
    options.log_interval = options.log_interval or min(10, max(1, options.steps // 20))
    if options.warmup_steps is None:
        options.warmup_steps = options.steps // 10
    options.sequence_parallel = options.sequence_parallel and tensor > 1
    if options.monitor_memory_continuously or options.save_performance_summary:
        _make(options.output_dir)


def _divides(name: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UsageError(f"{name} ({value}) is not divisible by {by} ({divisor})")


def micro_batch(batch: int, stages: int) -> int:
    """What one pass takes of a replica's batch: all of it, or of a pipeline an equal part."""
    most = MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    return batch // max(parts for parts in range(1, most + 1) if batch % parts == 0)


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir: can't make {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        where = os.path.abspath(folder)
        raise UsageError(f"{where} can't be written: give --output-dir a folder that can be")


def choose_device() -> bool:
    """The GPUs, one for each rank of this machine; True where there are none: the CPU."""
    import torch

    if hasattr(torch.cuda, "redirected_to_cpu"):  # the launcher has redirected it
        return True
    if not torch.cuda.is_available():
        if os.environ["RANK"] == "0":
            print(f"{NAME}: no GPU here: training on the CPU", flush=True)
        redirect_to_cpu(torch)
        return True
    local, visible = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if local > visible:
        raise UsageError(
            f"{local} processes on this machine, and {visible} GPUs visible: start no more than "
            f"--nproc_per_node={visible}"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return False


def redirect_to_cpu(torch: Any) -> None:
    """Have the calls of CUDA that Megatron-Core makes work on the CPU, and NCCL's by gloo."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\b")
    cuda, tensor, distributed = torch.cuda, torch.Tensor, torch.distributed

    def on_cpu(value: Any) -> Any:
        kind = value if isinstance(value, str) else getattr(value, "type", "")
        cuda_device = isinstance(kind, str) and kind.startswith("cuda")
        return "cpu" if cuda_device or isinstance(value, int) else value

    def without_device(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            return function(*args, **kwargs)

        return redirected

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    made = "arange empty empty_like full ones rand randint randn tensor zeros zeros_like"
    for name in made.split():
        setattr(torch, name, without_device(getattr(torch, name)))
    to, kind_of = tensor.to, tensor.type
    tensor.to = lambda self, *args, **kwargs: without_device(to)(
        self, *map(on_cpu, args[:1]), *args[1:], **kwargs
    )
    tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.compile = lambda model=None, **kwargs: (lambda f: f) if model is None else model
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", 0))
    cuda.get_device_capability = lambda *args, **kwargs: (0, 0)
    generator = torch.default_generator
    for place in (cuda, cuda.random):
        place.get_rng_state = lambda *args, **kwargs: generator.get_state()
        place.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
        place.manual_seed = place.manual_seed_all = generator.manual_seed
    cuda.default_generators = defaultdict(lambda: generator)
    cuda._lazy_call = lambda function, **kwargs: function()
    for name in ("set_device", "synchronize", "_lazy_init", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: nothing())
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: nothing())
    stream = types.SimpleNamespace(
        wait_stream=nothing, wait_event=nothing, synchronize=nothing, record_event=nothing
    )
    cuda.current_stream = cuda.default_stream = cuda.Stream = lambda *args, **kwargs: stream
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))  # Megatron's optimizer takes no others

    def redirected_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return kind_of(self).replace("torch.", "torch.cuda.", 1)
        dtype = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
        return kind_of(self, dtype, *args, **kwargs)

    tensor.type = redirected_type
    begin, group = distributed.init_process_group, distributed.new_group
    distributed.init_process_group = lambda *args, **kwargs: begin("gloo")
    distributed.new_group = lambda *args, **kwargs: group(
        *args, **{**kwargs, "backend": "gloo", "pg_options": None}
    )


# The model and its training


def precision(options: argparse.Namespace) -> str:
    return "fp16" if options.fp16 else "bf16" if options.bf16 else "fp32"


def build(options: argparse.Namespace, on_cpu: bool) -> tuple[Any, Any]:
    """This rank's part of the model, under Megatron's data parallelism; and its optimizer."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = known[precision(options)]
    half = {"fp16": options.fp16, "bf16": options.bf16, "params_dtype": dtype}
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_attention_heads,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        sequence_parallel=options.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        **half,
    )
    norm, layer = norm_layer(), get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layers = [layer] * (options.num_layers // options.pipeline_model_parallel_size)
    tensor = options.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layers, norm),
        vocab_size=-(-options.vocab_size // tensor) * tensor,
        max_sequence_length=options.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()
    if options.fp16 or options.bf16:
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    settings = {"lr": options.lr, "clip_grad": options.gradient_clip_val, "weight_decay": 0.01}
    # 2^32, the usual one, would leave out the first steps, one for each halving.
    scale = {"initial_loss_scale": 2.0**16, "min_loss_scale": 1.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings, **scale, **half), [wrapped])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _finalize
    return wrapped, optimizer


def norm_layer() -> Any:
    """torch's LayerNorm, which Megatron's own, without Apex, refuses with sequence parallelism."""
    import torch

    class Norm(torch.nn.LayerNorm):  # type: ignore[misc]
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps)
            for parameter in self.parameters():  # their gradients are summed over TP then
                parameter.sequence_parallel = config.sequence_parallel

    return Norm


def _finalize(*args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    finalize_model_grads(*args, **kwargs)


def batches(options: argparse.Namespace, replica: int, first: int = 0) -> Iterator[Any]:
    """Micro-batches of token ids, [micro-batch, sequence + 1], the same on a replica's ranks.

    A sequence counts up from a random token, so that there is something to learn.
    """
    import torch

    size, number = options.micro_batch_size, first + replica * options.batch_size
    while True:
        for at in range(number, number + options.batch_size, size):
            begun = []
            for sample in range(at, at + size):
                which = sample % options.dataset_size if options.dataset_size else sample
                chance = torch.Generator().manual_seed(options.seed + which)
                begun.append(torch.randint(options.vocab_size, (1, 1), generator=chance))
            yield (torch.cat(begun) + torch.arange(options.seq_length + 1)) % options.vocab_size
        number += options.batch_size * options.replicas


def forward(data: Iterator[Any], model: Any) -> Any:
    """One micro-batch through this rank's layers, and how to make its output a loss."""
    import torch

    tokens = next(data).cuda()
    places = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1).cuda()
    mask = torch.ones(1, 1, places.shape[1], places.shape[1], dtype=torch.bool).tril().logical_not()
    output = model(tokens[:, :-1], places, mask.cuda(), labels=tokens[:, 1:].contiguous())

    def loss(losses: Any) -> Any:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def rate(options: argparse.Namespace, step: int) -> float:
    """Up from 0 in the warm-up, then straight down to 0 at the last step."""
    if step <= options.warmup_steps:
        return float(options.lr * step / options.warmup_steps)
    return float(options.lr * (options.steps - step + 1) / (options.steps - options.warmup_steps))


class Trainer:
    """Trains on this rank: a line of the log each few steps, by the last rank, as upstream's."""

    def __init__(self, options: argparse.Namespace, on_cpu: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.options, self.on_cpu = options, on_cpu
        self.model, self.optimizer = build(options, on_cpu)
        self.replica = parallel_state.get_data_parallel_rank()
        self.schedule = get_forward_backward_func()
        self.data = batches(options, self.replica)
        self.seconds: list[float] = []
        self.skipped, self.loss = 0, math.nan
        self.is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.board = self._board() if options.use_wandb and self.is_last else None

    def _board(self) -> Any:
        wandb = importlib.import_module("wandb")
        layout = f"tp{self.options.tensor_model_parallel_size}"
        layout += f"-pp{self.options.pipeline_model_parallel_size}-dp{self.options.replicas}"
        return wandb.init(project=NAME, name=layout, config=vars(self.options))

    def passes(self, data: Iterator[Any], *, forward_only: bool = False) -> float:
        """The mean loss of a batch over micro-batches and replicas; nan on other stages."""
        import torch
        from megatron.core import parallel_state

        found = self.schedule(
            forward_step_func=forward,
            data_iterator=data,
            model=[self.model],
            num_microbatches=self.options.micro_batches,
            seq_length=self.options.seq_length,
            micro_batch_size=self.options.micro_batch_size,
            decoder_seq_length=self.options.seq_length,
            forward_only=forward_only,
        )
        if not found:
            return math.nan
        loss = torch.stack([each["loss"] for each in found]).mean()
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss.item()) / float(self.options.replicas)

    def run(self) -> None:
        import torch

        options = self.options
        for step in range(1, options.steps + 1):
            began = time.perf_counter()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self.passes(self.data)
            for group in self.optimizer.param_groups:
                group["lr"] = rate(options, step)
            advanced, norm, _ = self.optimizer.step()
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - began)
            self.skipped += not advanced
            self.loss = loss
            if step % options.log_interval == 0 or step == options.steps:
                self._log(step, loss, norm)
            if step % options.train_steps == 0:
                self._evaluate(step)

    def _log(self, step: int, loss: float, norm: float | None) -> None:
        if not self.is_last:
            return
        options, batch = self.options, self.options.batch_size * self.options.replicas
        done = self.seconds[-options.log_interval :]
        told = "" if norm is None else f" grad norm: {norm:.3f} |"
        now, took = time.strftime("%Y-%m-%d %H:%M:%S"), 1000 * sum(done) / len(done)
        print(
            f" [{now}] iteration {step:8d}/{options.steps:8d} | "
            f"consumed samples: {step * batch:12d} | "
            f"elapsed time per iteration (ms): {took:.1f} | learning rate: "
            f"{rate(options, step):.6E} | global batch size: {batch:5d} | lm loss: {loss:.6E} | "
            f"loss scale: {float(self.optimizer.get_loss_scale()):.1f} |{told}"
            f" number of skipped iterations: {self.skipped:3d} | number of nan iterations:   0 |",
            flush=True,
        )
        if self.board:
            self.board.log({"lm loss": loss, "learning rate": rate(options, step)}, step=step)
        self.skipped = 0

    def _evaluate(self, step: int) -> None:
        import torch

        with torch.no_grad():
            loss = self.passes(batches(self.options, self.replica, 1 << 40), forward_only=True)
        if self.is_last:
            perplexity = math.exp(min(20.0, loss))
            print(
                f"validation loss at iteration {step} | lm loss value: {loss:.6E} | "
                f"lm loss PPL: {perplexity:.6E} | ",
                flush=True,
            )


# What it measures of itself


def memory(on_cpu: bool, *, most: bool = False) -> dict[str, int]:
    """Bytes of this rank, now or at most: of its GPU, or resident of the process."""
    if on_cpu and most:
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if on_cpu:
        with open("/proc/self/statm") as file:
            return {"resident": int(file.read().split()[1]) * resource.getpagesize()}
    from torch import cuda

    known = {"allocated": cuda.memory_allocated, "reserved": cuda.memory_reserved}
    if most:
        known = {"allocated": cuda.max_memory_allocated, "reserved": cuda.max_memory_reserved}
    return {name: int(ask()) for name, ask in known.items()}


def sample(options: argparse.Namespace, on_cpu: bool, over: threading.Event) -> None:
    """Write this rank's memory as lines of JSON until `over`, at the end once more."""
    import torch

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each thread has its own
    folder = os.path.join(options.output_dir, SAMPLES)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"rank-{os.environ['RANK']}.jsonl"), "w", buffering=1) as file:
        last = False
        while True:
            file.write(json.dumps({"time": round(time.time(), 3), **memory(on_cpu)}) + "\n")
            if last:
                return
            last = over.wait(options.memory_monitor_interval)


def summarise(trainer: Trainer) -> None:
    """Write the summary, by rank 0, of what all ranks know."""
    import torch
    from megatron.core.package_info import __version__

    options = trainer.options
    known: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    mine: dict[str, Any] = {"memory": memory(trainer.on_cpu, most=True), "loss": trainer.loss}
    torch.distributed.all_gather_object(known, mine)
    if os.environ["RANK"] != "0":
        return
    loss, median = known[-1]["loss"], statistics.median(trainer.seconds)
    tokens = options.batch_size * options.replicas * options.seq_length
    written = {
        "steps": options.steps,
        "ms_per_step_median": 1000 * median,
        "tokens_per_second": tokens / median,
        "max_memory_bytes": {
            kind: max(each["memory"][kind] for each in known) for kind in mine["memory"]
        },
        "final_loss": loss if math.isfinite(loss) else None,
        "layout": {
            "world_size": len(known),
            "tensor": options.tensor_model_parallel_size,
            "pipeline": options.pipeline_model_parallel_size,
            "data": options.replicas,
            "micro_batches": options.micro_batches,
        },
        "precision": precision(options),
        "device": "CPU" if trainer.on_cpu else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "megatron_core": __version__},
    }
    with open(os.path.join(options.output_dir, SUMMARY), "w") as file:
        json.dump(written, file, indent=2)


def train(argv: Sequence[str]) -> None:
    """Join the ranks that the environment tells of, or be the only one, and train."""
    options = parse(argv)
    os.environ.update(environment(options, os.environ))
    check(options, int(os.environ["WORLD_SIZE"]))
    if options.use_wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("--use-wandb needs the Python package wandb")
    on_cpu = choose_device()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)
    over = threading.Event()
    sampler = threading.Thread(target=sample, args=(options, on_cpu, over), daemon=True)
    if options.monitor_memory_continuously:
        sampler.start()
    trainer = Trainer(options, on_cpu)
    trainer.run()
    over.set()
    if options.monitor_memory_continuously:
        sampler.join()
    if options.save_performance_summary:
        summarise(trainer)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """Train; the exit code: 2 for what can't work, with one line on each machine."""
    try:
        train(argv)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{NAME}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(OTHERS_WAIT)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
