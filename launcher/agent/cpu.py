"""Redirect a program's CUDA calls to the CPU, and NCCL to gloo: `-m launcher.agent.cpu PROGRAM`."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from launcher.agent import compat, script

MARK = "redirected_to_cpu"
"""An attribute of torch.cuda: this module itself may be loaded twice, once as `__main__`."""

FACTORIES = (
    "arange empty empty_like empty_strided eye full full_like linspace logspace ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm tensor as_tensor "
    "zeros zeros_like"
).split()
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
TENSOR_TYPES = (
    "BFloat16Tensor BoolTensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor"
).split()


def install() -> None:
    """Redirect from here on; to be called once, before Megatron is imported.

    Device counts are those of a node with one device per local rank, so that programs
    which compare them with their ranks find what they would find on GPUs.
    """
    for package in ("megatron", "torch"):  # they warn of the absence of what needs a GPU, mostly
        warnings.filterwarnings("ignore", module=rf"{package}\b")
    import torch

    # Compiling for the CPU would need a C++ compiler, which an image need not have.
    torch.compile = lambda model=None, **kwargs: (lambda f: f) if model is None else model
    # Upstream's training programs ask nvcc for its version to compile these.
    kernels = types.ModuleType("megatron.legacy.fused_kernels")
    kernels.load = _nothing  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    _redirect_devices(torch)
    _redirect_device_queries(torch)
    _redirect_random_state(torch)
    _redirect_streams(torch)
    _redirect_tensor_types(torch)
    _redirect_collectives(torch.distributed)
    _separate_loader_randomness(torch)
    setattr(torch.cuda, MARK, True)


def is_installed() -> bool:
    """Whether CUDA calls are redirected in this process."""
    import torch

    return hasattr(torch.cuda, MARK)


def _on_cpu(value: Any) -> Any:
    """`value`, or "cpu" where it is a CUDA device: by string, index or `torch.device`."""
    kind = value if isinstance(value, str) else getattr(value, "type", "")
    named = isinstance(kind, str) and kind.startswith("cuda")
    return "cpu" if named or isinstance(value, int) else value


def _with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return redirected


def _redirect_devices(torch: Any) -> None:
    for name in FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _with_cpu_device(getattr(torch.Tensor, name)))
    to = torch.Tensor.to

    def redirected_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(_on_cpu, args[:1]), *args[1:], **kwargs)

    histc = torch.histc

    def redirected_histc(given: Any, *args: Any, **kwargs: Any) -> Any:
        """A CPU counts no whole numbers."""
        return histc(given.float(), *args, **kwargs).to(given.dtype)

    torch.Tensor.to, torch.histc = redirected_to, redirected_histc
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _redirect_device_queries(torch: Any) -> None:
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", 0))
    cuda.get_device_capability = lambda *args, **kwargs: (0, 0)
    cuda.get_device_name = lambda *args, **kwargs: "CPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=memory, multi_processor_count=1
    )
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _no_operation())
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _no_operation())


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a call that only concerns a device does on the CPU."""


def _no_operation() -> Callable[..., None]:
    """A new `_nothing`: torch's compiler refuses one function under two of torch's names."""
    return lambda *args, **kwargs: _nothing()


def _redirect_random_state(torch: Any) -> None:
    generator = torch.default_generator
    names: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda *args, **kwargs: generator.get_state(),
        "set_rng_state": lambda state, *args, **kwargs: generator.set_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
    }
    for module in (torch.cuda, torch.cuda.random):
        for name, function in names.items():
            setattr(module, name, function)
    torch.cuda.default_generators = defaultdict(lambda: generator)  # every device's
    # Calls are otherwise queued until CUDA is initialised, which never happens.
    torch.cuda._lazy_call = lambda function, **kwargs: function()
    torch.cuda._lazy_init = _no_operation()
    # On the CPU, the tracker's forks do change the CPU's state, which it warns of each time.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


class CpuStream:
    """The one order of execution that a CPU has; priorities and devices make no difference."""

    cuda_stream = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> CpuStream:
        return STREAM

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    synchronize = wait_event = wait_stream = _nothing


STREAM = object.__new__(CpuStream)


class Event:
    """A point in time, reached as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, *args: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return 1000.0 * (end.seconds - self.seconds)

    query = CpuStream.query
    synchronize = wait = _nothing


def _redirect_streams(torch: Any) -> None:
    torch.cuda.Stream, torch.cuda.Event = CpuStream, Event
    torch.cuda.current_stream = lambda *args: STREAM
    torch.cuda.default_stream = lambda *args: STREAM
    torch.cuda.set_stream = _no_operation()
    torch.cuda.stream = lambda stream: contextlib.nullcontext(stream)


def _redirect_tensor_types(torch: Any) -> None:
    """Megatron's optimizers take only parameters whose type is a CUDA tensor's."""
    for name in TENSOR_TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    tensor_type = torch.Tensor.type

    def redirected_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return tensor_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = redirected_type


def _redirect_collectives(distributed: Any) -> None:
    init_process_group, new_group = distributed.init_process_group, distributed.new_group

    @functools.wraps(init_process_group)
    def redirected_init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init_process_group("gloo", *args, **kwargs)

    @functools.wraps(new_group)
    def redirected_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "gloo", "pg_options": None})

    all_to_all = distributed.all_to_all_single

    @functools.wraps(all_to_all)
    def redirected_exchange(output: Any, given: Any, *splits: Any, **kwargs: Any) -> Any:
        """Sizes come as tensors where a GPU's would have been brought to the CPU as arrays."""
        listed = [x.tolist() if hasattr(x, "tolist") else x for x in splits]
        kwargs = {n: x.tolist() if hasattr(x, "tolist") else x for n, x in kwargs.items()}
        return all_to_all(output, given, *listed, **kwargs)

    distributed.all_to_all_single = redirected_exchange
    distributed.init_process_group = redirected_init
    distributed.new_group = redirected_group


def _separate_loader_randomness(torch: Any) -> None:
    """Give each data loader a random generator of its own.

    Only some ranks of a tensor-parallel group build one, and it draws from the CPU's
    generator, from which here dropout draws too: the ranks' replicas would drift apart.
    """
    loader = torch.utils.data.DataLoader
    initialise = loader.__init__

    @functools.wraps(initialise)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        initialise(self, *args, **{**kwargs, "pin_memory": False})

    loader.__init__ = redirected


def write_whole_lines() -> None:
    """Write each line at once: unbuffered, the pieces of several ranks' lines get mixed."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def main(argv: Sequence[str]) -> None:
    """Run a script, or `-m MODULE`, as `__main__` with the redirection installed."""
    write_whole_lines()
    compat.trust_checkpoints()
    install()
    compat.prepare()
    script.run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
