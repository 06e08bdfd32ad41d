"""Ask one of Megatron's programs whether it takes a command line, as rank 0 of a described world.

`python3 -m launcher.agent.validate --world-size N [--capability 9.0] PROGRAM ARGS…` runs upstream's
pretrain_*.py up to its call of `pretrain` or of the parser, validates the arguments as rank 0 of
N ranks would, and prints one JSON line: {"refused": message, "where": place}, {"unasked": reason}
or {}. It needs no GPU, talks to no other process and makes no model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from launcher.agent import compat, cpu, script

REFUSALS = (AssertionError, ValueError, TypeError, RuntimeError, ArithmeticError)
"""What Megatron raises of arguments that can't work; anything else is no answer."""

NEED_A_DRIVER = ("transformer_engine", "apex", "flash_attn")
"""What Megatron asks for versions of; where one is there and can't be imported, it would lie."""


class PretrainCall(BaseException):
    """The program's first call of Megatron's, with the arguments that this has by their names."""


def main(argv: Sequence[str]) -> None:
    """Print the verdict."""
    parser = argparse.ArgumentParser(prog="python3 -m launcher.agent.validate", allow_abbrev=False)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--capability", default="9.0", help="the GPUs'; 0.0 for the CPU")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    if asked.program:  # a checkout's Megatron lies beside its programs
        sys.path.insert(0, os.path.dirname(asked.program[0]))
    major, _, minor = asked.capability.partition(".")
    print(json.dumps(verdict(asked.program, asked.world_size, (int(major), int(minor)))))


def verdict(argv: Sequence[str], world_size: int, capability: tuple[int, int]) -> dict[str, str]:
    """What the program says of `argv`, which begins with the program."""
    with os.fdopen(os.memfd_create("said"), "w+") as said:  # faulthandler asks for a descriptor
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                _describe(world_size, capability)
                _ask_upstreams(argv)
        except SystemExit as ended:  # argparse, after its message
            said.seek(0)
            last = (said.read().strip().splitlines() or [f"it exits with {ended.code}"])[-1]
            return {"refused": last, "where": "its options"}
        except Exception as error:
            return _judged(error)
    return {}


def _judged(error: Exception) -> dict[str, str]:
    """A refusal is what Megatron raises itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    _, found, place = last.filename.rpartition("/megatron/")
    if found and (isinstance(error, REFUSALS) or type(error) is Exception):
        message = " ".join(str(error).split()) or (last.line or type(error).__name__)
        return {"refused": message, "where": f"megatron/{place}:{last.lineno}"}
    return {"unasked": f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"}


def _describe(world_size: int, capability: tuple[int, int]) -> None:
    """Make this process rank 0 of `world_size`, with a GPU of that capability."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ.update(ranks | {"LOCAL_WORLD_SIZE": "1"})
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the runner does
    compat.trust_checkpoints()
    compat.prepare()
    if not cpu.is_installed():
        cpu.install()
    import torch

    size = {"multi_processor_count": 1, "total_memory": 1 << 36}
    properties = SimpleNamespace(major=capability[0], minor=capability[1], **size)
    torch.cuda.get_device_capability = lambda *args, **kwargs: capability
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    for name in NEED_A_DRIVER:
        if importlib.util.find_spec(name):
            importlib.import_module(name)


def _ask_upstreams(argv: Sequence[str]) -> None:
    """All that upstream's program checks before it makes a model, in its order or nearly so."""
    given = _reached(argv)
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments as upstream
    from megatron.training import global_vars, training

    args = upstream.parse_args(given.get("extra_args_provider"))
    if args.yaml_cfg is not None or args.use_checkpoint_args:
        return  # another file has the arguments
    upstream.validate_args(args, given.get("args_defaults", {}))
    global_vars.set_args(args)
    calculate = num_microbatches_calculator.init_num_microbatches_calculator
    calculate(**{name: getattr(args, name) for name in inspect.signature(calculate).parameters})
    upstream.core_transformer_config_from_args(args)
    if not args.skip_train:
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    with _nobody_to_talk_to(args.world_size):
        from megatron.training import initialize

        spread = initialize._initialize_distributed
        spread(*[None] * len(inspect.signature(spread).parameters))


def _reached(argv: Sequence[str]) -> dict[str, Any]:
    """What the program gives Megatron's `pretrain`; from 0.18 on what it parses with before."""
    import megatron.training as package
    from megatron.training import arguments

    for module, name in ((arguments, "parse_and_validate_args"), (package, "pretrain")):
        if hasattr(module, name):
            setattr(module, name, _caught(getattr(module, name)))
    try:
        script.run(argv)
    except PretrainCall as reached:
        found: dict[str, Any] = reached.args[0]
        return found
    raise LookupError(f"{argv[0]} doesn't call megatron.training.pretrain")


def _caught(real: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a function of Megatron's: raises PretrainCall."""

    @functools.wraps(real)
    def called(*args: Any, **kwargs: Any) -> None:
        raise PretrainCall(inspect.signature(real).bind_partial(*args, **kwargs).arguments)

    return called


@contextlib.contextmanager
def _nobody_to_talk_to(world_size: int) -> Iterator[None]:
    """Process groups of which the other ranks are made up."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    start = distributed.init_process_group.__wrapped__  # what `cpu` has put gloo before
    group = distributed.new_group.__wrapped__
    start("fake", store=FakeStore(), rank=0, world_size=world_size)
    distributed.new_group = lambda *args, **kwargs: group(
        *args, **{**kwargs, "backend": "fake", "pg_options": None}
    )
    yield


if __name__ == "__main__":
    main(sys.argv[1:])
