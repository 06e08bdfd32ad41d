"""What differs between the Megatron-Core releases and the torch versions they meet.

Every other name that `launcher.train` uses of Megatron means the same in all of them.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from launcher.train.gpt.arguments import UsageError


def trust_checkpoints() -> None:
    """Let upstream's training programs load what they saved; call before importing torch.

    They save their arguments as objects, which torch 2.6 and later load only where told to.
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


def check_distributed_optimizer() -> None:
    """Raises `UsageError` where the distributed optimizer can't be used.

    Without Apex and TransformerEngine it refuses in 0.9, fails to save with torch's Adam in
    0.10 to 0.14, and fails to load since.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if not HAVE_APEX_OR_TE:
        raise UsageError(
            "--use-distributed-optimizer needs Apex or TransformerEngine, and neither is there"
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
