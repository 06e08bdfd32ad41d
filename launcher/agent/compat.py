"""Adapts to differences between Megatron-Core releases and torch versions.

`fast/buffers.py`, `fast/device_adam.py`, `validate.py` and `completeness.py` find names themselves.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import queue
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from launcher.agent.ranks.exit_codes import OptionError
from launcher.agent.series import has, since

NEEDED: dict[str, tuple[object, str]] = {
    "moe_shared_expert_intermediate_size": (None, "shared experts"),
    "moe_shared_expert_gate": (False, "shared experts' gate"),
    "moe_router_score_function": ("softmax", "scores by sigmoid"),
    "fp8_recipe": ("delayed", "FP8 recipes"),
}
"""Options of the training program: what any series can do, and what it takes to do more."""

CHOICES_NEEDED = {("moe_router_load_balancing_type", "seq_aux_loss"): "balance by sequences"}
"""The same of single values."""

OVER_CONTEXT = "experts are over context parallelism"
VIRTUAL_ON_CPU = "interleaved stages wait for nothing that they send"
"""As gloo would have them."""

TORCH_SHARES = "the distributed optimizer shares torch's Adam"
"""In numpy 2 as well."""


def lacking(values: Mapping[str, Any], release: str, world: int) -> list[tuple[str, str]]:
    """Those of the training program's options that `release` can't do, and the series that can.

    Options go by their plain names: num_layers. `world` are all ranks.
    """
    told = [
        (name, since(fact))
        for name, (usual, fact) in NEEDED.items()
        if values.get(name, usual) != usual and not has(release, fact)
    ]
    told += [
        (f"{name} {value}", since(fact))
        for (name, value), fact in CHOICES_NEEDED.items()
        if values.get(name) == value and not has(release, fact)
    ]
    split = (f"{one}_parallel_size" for one in ("tensor_model", "pipeline_model", "context"))
    tensor, pipeline, context = (int(values.get(name) or 1) for name in split)
    experts, replicas = "expert_model_parallel_size", world // (tensor * pipeline * context)
    over = context > 1 and replicas % int(values.get(experts) or 1)
    if over and not has(release, OVER_CONTEXT):
        told.append((f"{experts} over context parallelism", since(OVER_CONTEXT)))
    return told


def check_model(arguments: Namespace) -> None:
    """Raises `OptionError` for what of the model this release of Megatron-Core can't do."""
    from megatron.core.package_info import __version__

    lacks = lacking(vars(arguments), __version__, int(os.environ.get("WORLD_SIZE", "1")))
    each = "num_layers_per_virtual_pipeline_stage"
    if getattr(arguments, each) and arguments.on_cpu and not has(__version__, VIRTUAL_ON_CPU):
        lacks.append((f"{each} on the CPU", since(VIRTUAL_ON_CPU)))
    for told, first in lacks:
        name, _, how = told.partition(" ")
        option = f"--{name.replace('_', '-')} {how}".strip()
        raise OptionError(f"{option} needs Megatron-Core {first} or newer; this is {__version__}")


def prepare_experts() -> None:
    """Let there be experts without TransformerEngine; call after importing Megatron.

    0.10 asks for its layers then too, and from 0.13 on the router for its product.
    """
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe import moe_utils

    stands_for = {
        "TEColumnParallelLinear": tensor_parallel.ColumnParallelLinear,
        "TERowParallelLinear": tensor_parallel.RowParallelLinear,
        "TEColumnParallelGroupedLinear": None,
    }
    for name, instead in stands_for.items():
        if not hasattr(gpt_layer_specs, name):
            setattr(gpt_layer_specs, name, instead)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def loss_factor(context: int) -> float:
    """What a rank's loss is multiplied by before it is given to the schedule.

    It is this rank's part of a mean over `context` ranks and the replicas.
    """
    from megatron.core.package_info import __version__

    return 1.0 / context if has(__version__, "schedules scale the loss by CP") else 1.0


def auxiliary_factor(context: int) -> int:
    """What the coefficients of the routers' losses are multiplied by, for the same in any CP."""
    from megatron.core.package_info import __version__

    return 1 if has(__version__, "schedules scale the routers' losses") else context


def expert_data_group() -> Any:
    """The ranks that have copies of the same experts."""
    from megatron.core import parallel_state

    if hasattr(parallel_state, "get_expert_data_parallel_group"):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_modulo_expert_parallel_group(with_context_parallel=True)


def capturable_randomness(wanted: bool) -> dict[str, bool]:
    """What makes the generators of TP ranks such as a CUDA graph can hold: from 0.12 on."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    name = "use_cudagraphable_rng"
    known = name in inspect.signature(model_parallel_cuda_manual_seed).parameters
    return {name: True} if wanted and known else {}


def trust_checkpoints() -> None:
    """Let upstream's training programs load what they saved; call before importing torch.

    They save their arguments as objects, which torch 2.6 and later load only where asked to.
    """
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


def prepare() -> None:
    """Make any supported release able to save; call before importing it.

    Those up to 0.12 call torch's `_write_item` as it was then. It has since gained transforms in
    front of its arguments, and a serialization format (torch 2.8) behind them.
    """
    from torch.distributed.checkpoint import filesystem

    write = filesystem._write_item
    parameters = list(inspect.signature(write).parameters)
    if parameters[0] == "stream" or hasattr(write, "__wrapped__"):
        return
    leading = (filesystem._StorageWriterTransforms(),)
    trailing: tuple[Any, ...] = ()
    if "serialization_format" in parameters:
        trailing = (filesystem.SerializationFormat.TORCH_SAVE,)

    @functools.wraps(write)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], filesystem._StorageWriterTransforms):
            args = leading + args
        if len(args) == 5 and "serialization_format" not in kwargs:
            args = args + trailing
        return write(*args, **kwargs)

    filesystem._write_item = adapted


class WriteResults:
    """What a writing process reports, by memory that it inherits: Megatron's queue of one item."""

    def __init__(self) -> None:
        self.file = io.FileIO(os.memfd_create("results"), "r+")

    def put(self, results: Any) -> None:
        """Keep these for `get_nowait`."""
        from multiprocessing.reduction import ForkingPickler

        self.file.seek(0)
        self.file.write(ForkingPickler.dumps(results))

    def get_nowait(self) -> Any:
        """What was put since the last time; raises `queue.Empty` where nothing was."""
        self.file.seek(0)
        if not (kept := self.file.read()):
            raise queue.Empty
        self.file.truncate(0)
        from multiprocessing.reduction import ForkingPickler

        return ForkingPickler.loads(kept)


def report_by_memory(writing: Any) -> None:
    """Have Megatron's module `writing` use no process for its queue: that costs 3 s of CPU."""
    with suppress(AttributeError, OSError):  # where the system has no files in memory, or no more
        writing._results_queue = writing._results_queue or WriteResults()


def async_saving() -> tuple[Any, dict[str, Any]]:
    """A queue of saves that go on beside training, and how Megatron's `save` is called for them.

    From 0.17 on they are nvidia-resiliency-ext's, where that is here in 0.6 or newer.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import async_utils, torch

    strategy = serialization.get_default_save_sharded_strategy()
    strategy.use_cached_ckpt_structure = True  # planned anew, a save takes 0.1 s longer
    _convert_once(torch)
    how: dict[str, Any] = {"async_sharded_save": True, "sharded_strategy": strategy}
    if not hasattr(torch, "get_async_strategy"):
        return async_utils.AsyncCallsQueue(), how
    name, modules = torch.get_async_strategy("nvrx" if torch.HAVE_NVRX else "mcore")
    return modules["AsyncCallsQueue"](persistent=False), how | {"async_strategy": name}


def _convert_once(strategy: Any) -> None:
    """Have Megatron make torch's sharded tensors of the same copies on the host once, for all
    saves: of GPT-2 that takes 0.02 s."""
    convert, kept = strategy.sharded_tensor_to_torch_sharded_tensor, dict[str, Any]()

    @functools.wraps(convert)
    def converted(tensors: Any, *args: Any) -> Any:
        copies = [each.data for each in tensors]
        places = [(each.data_ptr(), each.shape, each.dtype) for each in copies]
        known, made, _ = kept.get(tensors[0].key, (None, None, None))
        if known != places:
            made = convert(tensors, *args)
            if all(each.is_cpu and each.is_contiguous() for each in copies):
                kept[tensors[0].key] = places, made, copies
        return made

    if not hasattr(convert, "__wrapped__"):
        strategy.sharded_tensor_to_torch_sharded_tensor = converted


def check_distributed_optimizer() -> None:
    """Raises `OptionError` where the distributed optimizer can't be used.

    Before 0.15 it is Apex's or TransformerEngine's Adam that it takes, or saves well.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
    from megatron.core.package_info import __version__

    if not (HAVE_APEX_OR_TE or has(__version__, TORCH_SHARES)):
        raise OptionError(
            f"--use-distributed-optimizer needs Megatron-Core {since(TORCH_SHARES)} or newer, or "
            f"Apex or TransformerEngine; this is {__version__} without either"
        )


def sharded_optimizer_state(optimizer: Any, model_state: Any, is_loading: bool) -> Any:
    """The optimizer's state in the form that can be loaded with other TP, PP and DP sizes.

    It is the default up to 0.14; from 0.15 on it has another name, to be given as metadata.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    options: dict[str, Any] = {}
    if hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable"):
        options["metadata"] = {"distrib_optim_sharding_type": "fully_reshardable"}
    return optimizer.sharded_state_dict(model_state, is_loading, **options)
