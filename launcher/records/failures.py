"""Known failures, by what a run wrote before it ended: what it was, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.plan.job import Cause, Ended
from launcher.train.ranks import oom

LONGEST_QUOTE = 160


@dataclass(frozen=True)
class Failure:
    """A failure that is known: its cause and its cure, and what in the output it was told by.

    `sets` is the key that `resume` has to set, with its value, so that it doesn't fail so again.
    """

    name: str
    cure: str
    quote: str = ""
    sets: str = ""

    @property
    def lines(self) -> list[str]:
        """What to tell of it."""
        return [
            f"cause: {self.name}{f': {self.quote}' if self.quote else ''}",
            f"cure: {self.cure}",
        ]


@dataclass(frozen=True)
class Known:
    """A row of the table: `says` is how it is told in the output, `code` and `cause` of the end."""

    name: str
    cure: str
    says: re.Pattern[str]
    cause: Cause | None = None
    sets: str = ""


def _known(name: str, cure: str, *says: str, cause: Cause | None = None, sets: str = "") -> Known:
    return Known(name, cure, re.compile("|".join(says), re.MULTILINE), cause, sets)


TABLE = (
    _known(
        "GPU memory is out",
        "a smaller training.micro_batch_size, more tensor or pipeline parallelism, or "
        "--recompute-activations; the preflight's estimate says what takes how much",
        r"\bCUDA out of memory\. Tried to allocate",
        r"\bCUDA error: out of memory",
        r"NCCL WARN Cuda failure (?:\d+ )?'out of memory'",
    ),
    _known(
        "host memory is out",
        "a larger resources.memory, or none; fewer data.num_workers; fewer other programs on the "
        "machine",
        rf"^runner: .*{re.escape(oom.LIMIT)}",
        rf"^runner: .*{re.escape(oom.MACHINE)}",
        r"DefaultCPUAllocator: can't allocate memory",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Killed",
        cause=Cause.MEMORY,
    ),
    _known(
        "shared memory, /dev/shm, is too small",
        "resources.ipc: host, or, with ipc: private, a larger resources.shm_size",
        r"is killed by signal: Bus error\.",
        r"unable to (?:allocate shared memory\(shm\) for|write to) file </torch_",
        r"unable to mmap \d+ bytes from file </torch_",
        r"unable to open shared memory object </torch_.*Too many open files",
        r"NCCL WARN Error: failed to extend /dev/shm/nccl-",
        r"NCCL WARN Error while creating shared memory segment .*"
        r"(?:No space left on device|\(size \d+\)$)",
        r"NCCL WARN Call to posix_fallocate failed ?: No space left on device",
        r"^runner: rank \d+ was killed by signal 7 \(SIGBUS\)",
    ),
    _known(
        "the GPU's driver is too old for the image, or isn't there",
        "python3 -m launcher doctor says which driver is there, docs/images.md which one an image "
        "needs: update the driver, or take an older --tag",
        r"The NVIDIA driver on your system is too old",
        r"CUDA driver version is insufficient for CUDA runtime version",
        r"Found no NVIDIA driver on your system",
        r"forward compatibility was attempted on non supported HW",
        r"CUDA error: system not yet initialized",
        r"Failed to initialize NVML: Driver/library version mismatch",
    ),
    _known(
        "ranks and GPUs don't fit",
        "as many processes as GPUs that can be seen, one for each: gpus in the run file, and no "
        "CUDA_VISIBLE_DEVICES of your own in env",
        r"^runner: \d+ processes on \d+ visible CUDA devices",
        r"^runner: no CUDA device is visible",
        r"Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device",
        r"CUDA error: invalid device ordinal",
    ),
    _known(
        "the port is taken",
        "another nodes.master_port, the same on every node; `ss -ltnp` on the first one says who "
        "has it",
        r"The server socket has failed to listen on any local network address",
        r"EADDRINUSE",
    ),
    _known(
        "locked memory is limited, which InfiniBand needs",
        "resources.ulimits without a memlock of your own; where the engine refuses to raise the "
        "limit, LimitMEMLOCK=infinity in its systemd unit",
        r"NCCL WARN Call to ibv_\w+ failed with error Cannot allocate memory",
        r"libibverbs: Warning: RLIMIT_MEMLOCK is \d+ bytes",
        r"ibv_create_cq\(\) failed: Cannot allocate memory",
    ),
    _known(
        "a compiled extension is missing",
        "python3 -m launcher image verify; an image that this launcher builds has Megatron's, and "
        "NVIDIA's images have Apex and Transformer Engine: with another image, --transformer-impl "
        "local and no fusions",
        r"No module named '(?:megatron\.core\.datasets\.helpers(?:_cpp)?|amp_C|apex(?:\.\w+)*"
        r"|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda|scaled_\w+_softmax_cuda"
        r"|transformer_engine(?:\.\w+|_torch)*|flash_attn(?:_\w+)?)'",
        r"cannot import name 'helpers(?:_cpp)?' from 'megatron\.core\.datasets'",
        r"The helpers are compiled into the wheel, and none load in this Python",
    ),
    _known(
        "the image has no Transformer Engine, whose layers Megatron takes unless told otherwise",
        "model: {transformer_impl: local} and megatron_args: {no_persist_layer_norm: true}, or an "
        "image that has it, as NVIDIA's have",
        r"NameError: name 'TE\w+' is not defined",
        r"persist_layer_norm not supported by torch LayerNorm",
    ),
    _known(
        "Megatron's quickstart and torch don't fit: torch.utils.data has no Iterator",
        "program: gpt, or another release of Megatron: 0.15.3's imports what no torch from 2.2 to "
        "2.5, nor 2.13, has",
        r"cannot import name 'Iterator' from 'torch\.utils\.data'",
    ),
    _known(
        "the vocabulary file is wrong, or not the one that the data was made with",
        "data.vocab_file and data.merge_file (or data.tokenizer_model) are those that made the "
        "data, and data.vocab_size counts all of their tokens",
        r"KeyError: '<\|endoftext\|>'",
        r"File \"[^\"]*tokeni[sz][^\"]*\.py\", line \d+, in \w+\n(?:.*\n){0,60}?"
        r"(?:json\.decoder\.JSONDecodeError|UnicodeDecodeError|FileNotFoundError):",
        r"could not parse ModelProto from",
        r"IndexError: index out of range in self",
        r"(?:indexSelect\w+|vectorized_gather_kernel): block: .* Assertion .* failed",
    ),
    _known(
        "the learning rate's schedule isn't the one that the checkpoint was saved with",
        "training.lr…, min_lr and train_iters as they were, or megatron_args: "
        "{override_opt_param_scheduler: true} to go on with the new ones",
        r"AssertionError: OptimizerParamScheduler: class input value .* do not match",
        sets="megatron_args.override_opt_param_scheduler=true",
    ),
    _known(
        "a GPU is broken",
        "look for Xid in the machine's dmesg, and run elsewhere: gpus: device=… leaves it out",
        r"CUDA error: uncorrectable ECC error encountered",
        r"Unable to determine the device handle for GPU.*: (?:GPU is lost|Unknown Error)",
    ),
    _known(
        "a collective timed out: a rank didn't come to it",
        "the ranks' stacks say which one, where watchdog.timeout is shorter than the time-out; a "
        "step that takes longer needs a larger --distributed-timeout-minutes",
        r"Watchdog caught collective operation timeout: WorkNCCL\(",
        r"Timed out waiting \d+ ?ms for (?:recv|send) operation to complete",
    ),
)
"""The first cause first: what another failure may lead to stands below it."""


def named(tail: str, ended: Ended) -> list[Failure]:
    """The known failures in a failed run's last output, by the table's order."""
    found = []
    for known in TABLE:
        said = known.says.search(tail)
        if said:
            found.append(Failure(known.name, known.cure, _quote(tail, said), known.sets))
        elif known.cause and known.cause is ended.cause:
            found.append(Failure(known.name, known.cure))
    return found


def _quote(tail: str, said: re.Match[str]) -> str:
    """The last line of a match, as far as it fits on one of the launcher's."""
    start = tail.rfind("\n", 0, said.end()) + 1
    end = tail.find("\n", said.end())
    line = tail[start : end if end >= 0 else len(tail)].strip()
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}…"
