"""What the fast path and asynchronous saves hold in memory, and what they give back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.conftest import python, start

pytestmark = pytest.mark.megatron


def printed(folder: Path, text: str) -> list[str]:
    """The words that a script of its own process prints."""
    (script := folder / "script.py").write_text(text)
    ended = start(1, str(script))
    assert not ended.code, ended.output
    return ended.output.split()


LOSS = """
import torch
from torch.profiler import ProfilerActivity, profile
from launcher.trainer.fast.compiled import output_loss

tokens, hidden, vocabulary = 512, 64, 4096
torch.manual_seed(1)
x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
weight = (torch.randn(vocabulary, hidden) / 8).bfloat16().requires_grad_()
wanted, made = torch.randint(vocabulary, (tokens,)), torch.compile(output_loss, dynamic=False)
factors = torch.rand(tokens)
for _ in range(2):
    x.grad = weight.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        losses = made(x, weight, wanted)
        (losses * factors).sum().backward()
events = profiled.profiler.kineto_results.events()
held, most = 0, 0
for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
    held += size
    most = max(most, held)
a, b = (each.detach().double().requires_grad_() for each in (x, weight))
exact = torch.nn.functional.cross_entropy(a @ b.t(), wanted, reduction="none")
(exact * factors).sum().backward()
pairs = (losses.double(), exact), (x.grad.double(), a.grad), (weight.grad.double(), b.grad)
print(most / (2 * tokens * vocabulary), *(float((u - v).norm() / v.norm()) for u, v in pairs))
"""


@pytest.mark.long
def test_the_losses_gradient_takes_the_logits_place() -> None:
    """A function with a gradient of its own held both: 3.9 GiB of llama3.2-1b's 51."""
    ended = python("-c", LOSS)  # what `start` forks has no compiler, as ranks on the CPU
    assert not ended.returncode, ended.stderr
    copies, *apart = map(float, ended.stdout.split())
    assert copies < 1.5
    assert len(apart) == 3
    assert max(apart) < 1e-2


ROOM = """
from types import SimpleNamespace
import torch
from contextlib import nullcontext
from functools import partial
from launcher.trainer.fast import trainer
from launcher.trainer.gpt import evaluation

torch.distributed.get_world_size = lambda: 1
evaluation.Meter = partial(evaluation.Meter, joules=None)  # which only a GPU has
told = []

class Step(SimpleNamespace):
    def give_memory_back(self, reason):
        told.append(reason)
        self.graph = None

class Passes:
    evaluating = nullcontext

    def __call__(self, batches, forward_only):
        loss = next(batches)
        if one.fast_step.graph:
            raise torch.cuda.OutOfMemoryError
        return loss

class TwoBatches(evaluation.Evaluation):
    def __init__(self):
        self.count, self.passes, self.asked_for = 2, Passes(), True
        self.loader = [torch.tensor(1.0), torch.tensor(2.0)]
        self._fetch()

one = object.__new__(trainer.FastTrainer)
one.fast_step, one.evaluation = Step(graph="captured"), TwoBatches()
one.stop = one.progress = None
one.report = SimpleNamespace(validation=lambda _, meter: told.append(float(meter.loss)))
print(one._evaluate(), told[1:])
"""


def test_an_evaluation_without_room_lets_the_graph_go(tmp_path: Path) -> None:
    """The run ended: a CUDA graph's memory is its own, and at 32,768 tokens it was nearly all.

    The second try began behind the batch that the first had taken, and ended for want of one.
    """
    assert printed(tmp_path, ROOM) == ["True", "[3.0]"]


COPIES = """
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from launcher.trainer.gpt.distributed_checkpoint import HostCopies

class OnDevice(torch.Tensor):
    device = torch.device("meta")

def on_device(values):
    return torch.tensor(values).as_subclass(OnDevice)

real = torch.empty
torch.empty = lambda *given, pin_memory=False, **more: real(*given, **more)
copies, first = HostCopies(), on_device([1.0, 2.0])
def state(data):
    return {name: ShardedTensor.from_rank_offsets(name, data, replica_id=number)
            for number, name in enumerate(("mine", "another's"))}
given = state(first)
copies.replace(given)
place = given["mine"].data
first += 1
print(place.tolist() == [1.0, 2.0], given["another's"].data is first)
again = state(on_device([5.0, 6.0]))
copies.replace(again)
kept = again["mine"].data.data_ptr() == place.data_ptr()
print(kept, place.tolist() == [5.0, 6.0], len(copies.kept))
"""

STRATEGY = """
import inspect
from launcher.agent import compat
from megatron.core.dist_checkpointing.strategies import async_utils, torch

def without_nvrx(name="nvrx"):
    if name == "nvrx":
        raise ModuleNotFoundError
    return name, {"AsyncCallsQueue": queue if "persistent" in parameters else dict}

queue = async_utils.AsyncCallsQueue
parameters = inspect.signature(queue).parameters  # releases before strategies lack it
torch.HAVE_NVRX, torch.get_async_strategy = False, without_nvrx
print(compat.async_saving()[1]["async_strategy"])
"""


def test_an_asynchronous_saves_copies_are_kept(tmp_path: Path) -> None:
    """Each of the first two saves allocated memory for 1.7 s; what others save was copied too."""
    assert printed(tmp_path, COPIES) == "True True True True 1".split()


def test_megatron_saves_beside_training_where_nothing_else_does(tmp_path: Path) -> None:
    """From 0.17 on a run ended with a traceback where nvidia-resiliency-ext wasn't in the image."""
    assert printed(tmp_path, STRATEGY) == ["mcore"]
