"""Measurements of a run: memory of each rank, a summary, traces."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import math
import os
import platform
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from launcher.agent import allreduce
from launcher.agent.ranks.exit_codes import OptionError, RunError
from launcher.agent.traces import TRACE
from launcher.agent.words import say
from launcher.base import files
from launcher.trainer.gpt.arguments import RankLayout

MEGABYTE = 1024 * 1024
SPLIT = ("tensor", "pipeline", "context", "expert", "data")
STATM = Path("/proc/self/statm")  # proc(5): total and resident pages, …

symmetric: list[int] = []  # bytes of tensors in such memory, which torch's allocator doesn't count


def memory_line(iteration: int) -> str:
    """Upstream's line of this rank's GPU."""
    now, most = current(on_cpu=False), peak(on_cpu=False)
    fields = [
        f"{prefix}{kind}: {memory[kind] / MEGABYTE:.2f}"
        for kind in ("allocated", "reserved")
        for prefix, memory in (("", now), ("max ", most))
    ]
    rank = os.environ["RANK"]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | " + " | ".join(fields)


def current(on_cpu: bool) -> dict[str, int]:
    """Bytes now: of this rank's GPU `allocated` and `reserved`, of a process `resident`."""
    if on_cpu:
        pages = int(STATM.read_text().split()[1])
        return {"resident": pages * resource.getpagesize()}
    from torch import cuda

    held = {"allocated": cuda.memory_allocated(), "reserved": cuda.memory_reserved()}
    return {kind: size + sum(symmetric) for kind, size in held.items()}


def peak(on_cpu: bool) -> dict[str, int]:
    """The most there has been so far, in bytes, by the same names."""
    if on_cpu:  # getrusage(2): in kilobytes
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    from torch import cuda

    held = {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}
    return {kind: size + sum(symmetric) for kind, size in held.items()}


def energy() -> float | None:
    """J that this rank's GPU has used since its driver was loaded, from Volta on; None unknown."""
    gpu, used = _in_driver(), ctypes.c_ulonglong()
    if not gpu or gpu[0].nvmlDeviceGetTotalEnergyConsumption(gpu[1], ctypes.byref(used)):
        return None
    return used.value / 1000


@cache
def _in_driver() -> tuple[Any, Any] | None:
    """NVML, the driver's own library, and this rank's GPU there."""
    import torch

    with contextlib.suppress(AttributeError, OSError, RuntimeError):
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        asked = f"GPU-{uuid}".encode(), ctypes.byref(handle)
        if not (library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(*asked)):
            return library, handle
    return None


def say_links() -> None:
    """Print on rank 0 how fast groups that are used anyhow sum; all ranks call it."""
    import torch
    from megatron.core import parallel_state as state

    each, over = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), {"with_context_parallel": True}
    for group in (state.get_tensor_model_parallel_group(), state.get_data_parallel_group(**over)):
        ranks = torch.distributed.get_process_group_ranks(group)
        nodes = len({rank // each for rank in ranks})
        if len(ranks) > 1 and len(ranks) % nodes == 0:
            told = allreduce.link_line(torch, torch.cuda.current_device(), nodes, group)
            if torch.distributed.get_rank() == 0:
                print(told, flush=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def sampled(arguments: argparse.Namespace) -> Iterator[None]:
    """Sample this rank's memory meanwhile, where `arguments` ask for that.

    Each line of `rank-N.jsonl` is one sample: `time` in seconds since 1970, and bytes. Raises
    `OptionError` where the file can't be written.
    """
    if not arguments.memory_samples:
        yield
        return
    folder = Path(arguments.memory_samples)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"rank-{os.environ['RANK']}.jsonl").open("w", buffering=1)
    except OSError as error:
        raise OptionError(f"can't write to {folder}: {error.strerror}") from error
    over = threading.Event()
    work = (file, over, arguments.memory_interval, arguments.on_cpu)
    thread = threading.Thread(target=_sample, args=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _sample(file: IO[str], over: threading.Event, interval: float, on_cpu: bool) -> None:
    import torch

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # each thread has its own
    try:
        with file:
            last = False
            while not last:
                last = over.wait(interval) if file.tell() else False
                sample = {"time": round(time.time(), 3), **current(on_cpu)}
                file.write(json.dumps(sample) + "\n")
    except OSError as error:  # the training is worth more than this
        print(f"memory is no longer sampled: {error.strerror}", flush=True)


def check_summary(file: str) -> None:
    """Raises `OptionError` where the summary's folder can't be written: before the training."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "can't be written" if folder.is_dir() else "isn't there"
        raise OptionError(f"--performance-summary: the folder {folder} {what}")


def summary(
    arguments: argparse.Namespace,
    layout: RankLayout,
    seconds: Sequence[float],
    loss: float,
    memory: Mapping[str, int],
) -> dict[str, Any]:
    """The summary of a run whose steps took `seconds`, of all ranks together.

    `loss` is the last step's, `memory` the most that any rank had, in bytes. The median leaves
    out what the first step does once. What isn't known is None.
    """
    median = statistics.median(seconds) if seconds else None
    tokens = arguments.global_batch_size * arguments.seq_length
    return {
        "steps": len(seconds),
        "ms_per_step_median": None if median is None else 1000.0 * median,
        "tokens_per_second": None if median is None else tokens / median,
        "max_memory_bytes": dict(memory),
        "final_loss": loss if math.isfinite(loss) else None,
        "layout": {
            "world_size": layout.world,
            **{name: getattr(layout, name) for name in SPLIT},
            "micro_batch_size": arguments.micro_batch_size,
            "global_batch_size": arguments.global_batch_size,
        },
        "precision": "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "fp32",
        **_device_and_versions(),
    }


def _device_and_versions() -> dict[str, Any]:
    import torch
    from megatron.core.package_info import __version__

    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "megatron_core": __version__,
    }
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def write(summary: Mapping[str, Any], file: Path) -> str:
    """Write the JSON file; the line to say of it. Raises `RunError` where it can't be written."""
    try:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"can't write to {file}: {error.strerror}") from error
    if not summary["steps"]:
        return f"wrote {file}: no steps"
    return (
        f"wrote {file}: {summary['steps']} steps, {summary['ms_per_step_median']:.1f} ms a step, "
        f"{summary['tokens_per_second']:.0f} tokens/s"
    )


@dataclass
class Meter:
    """Sums since the last line of the log; the loss stays on the device until then."""

    started: float = field(default_factory=time.perf_counter)
    joules: float | None = field(default_factory=energy)
    iterations: int = 0
    advanced: Any = 0
    loss: Any = 0.0
    nan: Any = 0

    def add(self, loss: Any, advanced: Any) -> None:
        import torch

        self.iterations += 1
        self.advanced = self.advanced + advanced
        if loss is not None:
            self.nan = self.nan + torch.isnan(loss)
            if isinstance(advanced, torch.Tensor):
                self.loss = self.loss + torch.where(advanced, loss, 0.0)
            elif advanced:
                self.loss = self.loss + loss


@dataclass
class Waits:
    """An iterator that adds up the seconds that the host waits for another's values."""

    values: Iterator[Any]
    seconds: float = 0.0

    def __iter__(self) -> Waits:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self.values)
        finally:
            self.seconds += time.perf_counter() - began


class StepTracer:
    """Traces some of a rank's steps, where `arguments` ask for them: by torch, or for nsys.

    A trace has all that is due between its first step and the last, evaluations and saves too.
    """

    def __init__(self, arguments: argparse.Namespace, done: int, slow: int) -> None:
        """`done` steps lie behind the run; this process compiles in the `slow` first of its own."""
        asked = arguments.profile_steps and int(os.environ["RANK"]) in arguments.profile_ranks
        steps: tuple[int, int] = arguments.profile_steps if asked else (0, 0)
        self.first, self.last = steps
        self.folder = Path(arguments.profile_dir) if arguments.profile_dir else None
        self.tracer: Any = None
        if asked and self.first <= done:
            say(f"step {self.first} lies behind: nothing is traced", "gpt: ")
            self.first = self.last = 0
        elif asked and self.first <= done + slow:
            told = f"steps {done + 1}-{done + slow}" if slow > 1 else f"step {done + 1}"
            say(f"{told} will be traced as the step is compiled: later ones show more", "gpt: ")

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Trace what is done meanwhile, step `number` of the run, if it is one of those."""
        if self.folder and number in (self.first - 1, self.first) and not self.tracer:
            self._prepare()
        mine = self.first <= number <= self.last
        return self._traced(number) if mine else contextlib.nullcontext()

    def _prepare(self) -> None:
        """Let the tracer warm up, as a step would be slower that began with that."""
        import torch

        # What Kineto needs to see into graphs; torch sets it for those of its compiler alone.
        os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
        self.tracer = torch.profiler._KinetoProfile()
        self.tracer.prepare_trace()

    @contextlib.contextmanager
    def _traced(self, number: int) -> Iterator[None]:
        import torch

        if number == self.first:
            torch.cuda.synchronize()
            self.tracer.start_trace() if self.tracer else torch.cuda.cudart().cudaProfilerStart()
        with torch.profiler.record_function(f"ProfilerStep#{number}"):
            yield
            if number == self.last:
                torch.cuda.synchronize()
        if number == self.last and self.tracer:
            self.tracer.stop_trace()
            self._write()
        elif number == self.last:
            torch.cuda.cudart().cudaProfilerStop()

    def _write(self) -> None:
        """Write the trace, all or nothing; the training is worth more than it."""
        assert self.folder
        target = self.folder / TRACE.format(os.environ["RANK"])
        try:
            with tempfile.TemporaryDirectory() as scratch, files.PendingFile(target) as new:
                whole = Path(scratch) / "trace.json"
                self.tracer.export_chrome_trace(str(whole))
                with whole.open("rb") as source, gzip.open(new.file, "wb", 6) as packed:
                    shutil.copyfileobj(source, packed)
                new.publish()
        except (OSError, RuntimeError) as error:
            say(f"no trace of steps {self.first}-{self.last}: {error}", "gpt: ")
        self.tracer = None
