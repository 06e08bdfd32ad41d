"""The example script's command line (docs/example.md), carried out by launcher.train.gpt."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from launcher.train.gpt import __main__ as gpt
from launcher.train.gpt import arguments as command_line
from launcher.train.gpt.arguments import UsageError
from launcher.train.ranks import ending
from launcher.train.ranks.job import free_port

NAME = "megatron_core_training_example"
SUMMARY = "performance_summary.json"
SAMPLES = "memory"

TELL_SECONDS = 2.0
"""How long other ranks wait: torchrun kills the rank that tells the reason when one has ended."""

MICRO_BATCHES_PER_STAGE = 4
"""Of a pipeline: with P stages and 4 × P micro-batches, a stage idles less than a fifth of a step
((P - 1) / (5 × P - 1), https://arxiv.org/abs/2104.04473, section 2.2)."""

DEFAULTS = {
    **{"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1024},
    **{"seq_length": 128, "lr": 1e-3},
}
LATER = (
    "eval_interval eval_iters log_interval lr_warmup_iters clip_grad initial_loss_scale "
    "memory_interval"
).split()
"""gpt's options that have defaults there, and follow from the script's own here."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str]) -> int:
    """Train; the process's exit code, 2 for arguments that can't work."""
    code = ending.code(lambda: train(argv), NAME)
    if code == ending.USAGE and not ending.is_first_here():
        time.sleep(TELL_SECONDS)
    return code


def train(argv: Sequence[str]) -> None:
    """Join the ranks that the environment tells of, or be the only one, and train.

    Raises `UsageError` and `RunError`.
    """
    options = parser().known(argv)
    os.environ.update(environment(options, os.environ))
    if options.monitor_memory_continuously or options.save_performance_summary:
        _make(options.output_dir)
    checked = gpt.check(complete(options, int(os.environ["WORLD_SIZE"])))
    _choose_device()
    gpt.train(*checked)


def parser() -> command_line.Parser:
    """gpt's options, with the script's own and its defaults; those of `LATER` follow from these."""
    made = command_line.parser(
        f"{NAME}.py",
        "Train a GPT with Megatron-Core on made-up data, on all ranks that torchrun starts, or as "
        "one process; on the CPU where there is no GPU. Takes the options of launcher.train.gpt, "
        "which win over the script's own.",
    )
    for action in made._actions:
        action.required = False
    made.set_defaults(**DEFAULTS, **dict.fromkeys(LATER))
    add = made.add_argument_group("the script's own").add_argument
    add("--batch-size", type=_above_0, default=8, help="samples of each replica in a step")
    add("--epochs", type=_above_0, default=1)
    add("--train-steps", type=_above_0, default=100, help="steps of an epoch")
    add("--dataset-size", type=_above_0, help="samples, taken again and again; else all differ")
    add("--warmup-steps", type=int, help="a tenth of all steps where not given")
    add("--gradient-clip-val", type=float, default=1.0)
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


def complete(options: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """gpt's arguments for `world_size` ranks: what isn't given follows from the script's own."""
    tensor = options.tensor_model_parallel_size
    pipeline = options.pipeline_model_parallel_size
    replicas = max(1, world_size // max(1, tensor * pipeline))  # gpt refuses what doesn't divide
    steps = options.epochs * options.train_steps
    warmup = steps // 10 if options.warmup_steps is None else options.warmup_steps
    values = {
        "micro_batch_size": micro_batch(options.batch_size, pipeline),
        "global_batch_size": options.batch_size * replicas,
        "train_iters": steps,
        "eval_interval": options.train_steps,
        "eval_iters": 2,
        "log_interval": min(10, max(1, steps // 20)),
        "lr_warmup_iters": warmup,
        "clip_grad": options.gradient_clip_val,
        # gpt's own 2^32 would leave out the first steps, one for each halving.
        "initial_loss_scale": 2.0**16,
        "mock_samples": options.dataset_size,
        "memory_interval": options.memory_monitor_interval,
    }
    if options.monitor_memory_continuously:
        values["memory_samples"] = os.path.join(options.output_dir, SAMPLES)
    if options.save_performance_summary:
        values["performance_summary"] = os.path.join(options.output_dir, SUMMARY)
    if options.use_wandb:
        values["wandb_project"] = NAME
        values["wandb_exp_name"] = f"tp{tensor}-pp{pipeline}-dp{replicas}"
    for name, value in values.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.mock_data = options.mock_data or not options.data_path
    return command_line.complete(options)


def micro_batch(batch: int, stages: int) -> int:
    """What one pass takes of a replica's batch: all of it, or of a pipeline an equal part.

    The parts are as many as divide the batch, up to `MICRO_BATCHES_PER_STAGE` a stage.
    """
    most = MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    return batch // max(parts for parts in range(1, most + 1) if batch % parts == 0)


def environment(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environ`, which torchrun or another launcher made, or nobody.

    Raises `UsageError` where the options say something else than the environment.
    """
    added = {}
    if "RANK" not in environ:
        added = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {**environ, **added}
    started, meeting = int(ranks["WORLD_SIZE"]), ranks.get("MASTER_ADDR", "")
    if options.world_size not in (None, started):
        raise UsageError(
            f"--world-size {options.world_size}, and {started} "
            f"{'process was' if started == 1 else 'processes were'} started: make them equal, by "
            "torchrun's --nproc_per_node and --nnodes, or leave the option out"
        )
    wanted = _address(options.init_method)
    if wanted and not added and not _same(wanted, (meeting, ranks.get("MASTER_PORT", ""))):
        raise UsageError(
            f"--init-method {options.init_method}, and the processes meet at "
            f"{meeting}:{ranks.get('MASTER_PORT', '')}: make them equal, by torchrun's "
            "--master_addr and --master_port, or leave the option out"
        )
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # as the runner does it, and for its reasons
    if ranks["WORLD_SIZE"] == ranks.get("LOCAL_WORLD_SIZE") or meeting in LOOPBACK:
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return added | {name: value for name, value in defaults.items() if name not in environ}


def _address(url: str | None) -> tuple[str, str] | None:
    """Host and port of tcp://HOST:PORT; None for env://, which says where to look instead."""
    if url in (None, "env://"):
        return None
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(\d+)/?", url)
    if not match:
        raise UsageError(f"--init-method {url}: doesn't look like tcp://HOST:PORT")
    return match[1].strip("[]"), match[2]


def _same(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two addresses are of one place, which may be known by a name and by a number."""
    if one == other:
        return True
    try:
        places = [{found[4][:2] for found in socket.getaddrinfo(*each)} for each in (one, other)]
    except OSError:
        return False
    return not places[0].isdisjoint(places[1])


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir: can't make {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        where = os.path.abspath(folder)
        raise UsageError(f"{where} can't be written: give --output-dir a folder that can be")


def _choose_device() -> None:
    """The GPUs, one for each rank of this machine; the CPU where there are none."""
    from launcher.train import cpu

    if cpu.is_installed():
        return
    import torch

    if not torch.cuda.is_available():
        if os.environ["RANK"] == "0":
            print(f"{NAME}: no GPU here: training on the CPU", flush=True)
        cpu.install()
        return
    local, visible = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if local > visible:
        raise UsageError(
            f"{local} processes on this machine, and {visible} GPUs visible: start no more than "
            f"--nproc_per_node={visible}"
        )


if __name__ == "__main__":
    ending.leave(main(sys.argv[1:]))
