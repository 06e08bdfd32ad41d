"""The fast path against Megatron's own optimizer, and what of it is chosen."""

from __future__ import annotations

import json
import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import compat, series
from launcher.runs.checks import memory
from tests.agent.conftest import TINY, Run, python, start
from tests.trainer.test_gpt import Train
from tests.trainer.test_models import AGAIN, EXPERT, MIXTRAL, TENSOR

pytestmark = pytest.mark.megatron

BESIDE_UPSTREAM = """
import json, os, sys
from launcher.agent import compat, series
compat.prepare()
import torch
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import model, optimizer, training
from launcher.trainer.fast.device_adam import DeviceAdam
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

steps, overflows = 50, set(json.loads(sys.argv[1]))
given = command_line.parse(sys.argv[2:])
given.on_cpu = True
layout = command_line.layout(given, int(os.environ["WORLD_SIZE"]))
training.initialise(given, layout)

def made():
    torch.manual_seed(1)
    gpt = model.build(given, 128)
    wrapped = optimizer.wrap(given, gpt)
    return gpt, optimizer.build(given, [wrapped])

(gpt, upstream), (ours, taken_over), (plain, last) = made(), made(), made()
schedule = OptimizerParamScheduler(
    upstream, init_lr=0.0, max_lr=given.lr, min_lr=given.min_lr, lr_warmup_steps=5,
    lr_decay_steps=steps, lr_decay_style="cosine", start_wd=given.weight_decay,
    end_wd=given.weight_decay, wd_incr_steps=steps, wd_incr_style="constant")
given.on_cpu = False  # whole buffers, as on a GPU
device = DeviceAdam(given, taken_over, 0, lambda function: function)
host = optimizer.HostSteps(given, last, 0)
told = {"taken": [[], [], []], "norms": [[], [], []], "scales": [[], [], []]}
steppers = (upstream.step, device.step, host.step)
for at in range(steps):
    torch.manual_seed(at)
    for parameters in zip(gpt.parameters(), ours.parameters(), plain.parameters(), strict=True):
        scale = float(upstream.get_loss_scale())
        gradient = torch.randn(parameters[0].shape) * scale * 0.05
        if at in overflows:
            gradient.view(-1)[0] = float("inf")
        for parameter in parameters:
            parameter.main_grad.copy_(gradient)
    for n, step in enumerate(steppers):
        taken, norm = step()[:2]
        told["taken"][n].append(bool(taken))
        told["norms"][n].append(float(norm) if taken else -1.0)
        if n == 0 and taken:
            schedule.step(increment=1)
    for n, each in enumerate((upstream, taken_over, last)):
        told["scales"][n].append(float(each.get_loss_scale()))
pairs = zip(gpt.named_parameters(), ours.parameters(), plain.parameters(), strict=True)
told["apart"] = {name: [float((p - q).abs().max()) for q in others] for (name, p), *others in pairs}
told["moved"] = min(float(p.detach().float().std()) for p in gpt.parameters())
told["steps"] = [device.settle(), host.settle()]
for rank in range(layout.data):
    if rank == int(os.environ["RANK"]):
        print("told", json.dumps(told), flush=True)
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
SHAPE = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
    "--micro-batch-size 1 --train-iters 50 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 5 --weight-decay 0.1 --mock-data"
).split()


SHARED = "--use-distributed-optimizer"


def needs(options: tuple[str, ...]) -> None:
    """Skip what this release of Megatron lacks without Apex and TransformerEngine."""
    if SHARED in options and not series.has(version("megatron-core"), compat.TORCH_SHARES):
        pytest.skip(
            f"the distributed optimizer needs Megatron-Core {series.since(compat.TORCH_SHARES)}"
        )


OVERFLOWS, SCALED = (0, 1, 2, 20, 21, 45), ("--fp16", "--loss-scale-window", "10")


@pytest.mark.parametrize(
    ("options", "overflows"),
    [
        pytest.param(("--bf16", "--hidden-size", "64"), (), id="bf16",  # in whole lines
                     marks=pytest.mark.long),
        pytest.param((), (), id="fp32"),  # to a thousandth of what 16 bits allow
        pytest.param(SCALED, OVERFLOWS, id="fp16-overflows"),
        pytest.param(("--bf16", SHARED), (), id="shared-bf16"),
        pytest.param(("--bf16", *MIXTRAL.split(), *EXPERT.split()), (), id="experts"),
        pytest.param(("--bf16", *MIXTRAL.split(), *EXPERT.split(), SHARED), (), id="experts-shared",
                     marks=pytest.mark.long),
        pytest.param((SHARED,), (), id="shared-fp32", marks=pytest.mark.long),
        pytest.param((*SCALED, SHARED), OVERFLOWS, id="shared-fp16", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_fifty_steps_equal_upstreams(
    options: tuple[str, ...], overflows: tuple[int], tmp_path: Path
) -> None:
    """Biases and norms that decay, a skipped step that counts, a scale that moves otherwise.

    Two replicas that share the steps, and don't gather what each has stepped.
    """
    needs(options)
    (script := tmp_path / "beside.py").write_text(BESIDE_UPSTREAM)
    ranks = 2 if SHARED in options or "--num-experts" in options else 1
    done = start(ranks, str(script), json.dumps(overflows), *SHAPE, *options)
    found = re.findall(r"^told (.*)$", done.output, re.MULTILINE)
    assert len(found) == ranks, done.output
    for text in found:
        _equals_upstreams(json.loads(text), options, overflows)


def _equals_upstreams(
    told: dict[str, Any], options: tuple[str, ...], overflows: tuple[int]
) -> None:
    taken, scales = told["taken"], told["scales"]
    assert taken[0] == [at not in overflows for at in range(50)]
    assert taken[1] == taken[2] == taken[0]
    assert scales[1] == scales[2] == scales[0]
    assert (len(set(scales[0])) > 2) == bool(overflows)
    for norms in told["norms"][1:]:
        assert norms == pytest.approx(told["norms"][0], rel=1e-5)
    assert told["steps"] == [50 - len(overflows)] * 2
    assert told["moved"] > 1e-3
    step = (
        0.01 if options[:-1] or "--bf16" in options else 1e-5
    )  # a unit in the last place of a 16-bit number of size 1
    assert max(max(apart) for apart in told["apart"].values()) < step


@pytest.mark.parametrize(
    ("ranks", "options", "first"),
    [
        pytest.param(1, (), "", id="whole", marks=pytest.mark.long),
        pytest.param(2, (SHARED,), "", id="shared"),
        pytest.param(2, (SHARED,), "--no-fast", id="shared-back", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_with_either(
    train: Train, ranks: int, options: tuple[str, ...], first: str, tmp_path: Path
) -> None:
    """Masters, moments and steps that aren't where Megatron's checkpoint looks for them."""
    needs(options)
    folder = str(tmp_path)
    ways = [("--bf16", *options, *way) for way in ((), ("--no-fast",))]
    begun, going = reversed(ways) if first else ways
    whole = train(ranks, "--save", folder, "--save-interval", "3", *begun)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    going_on: Run = train(ranks, "--load", folder, *going)
    fast, plain = (going_on, whole) if first else (whole, going_on)
    assert (
        f"{'distributed ' * bool(options)}optimizer without waits; not compiled: CPU" in fast.output
    )
    assert "fast: off; --no-fast" in plain.output
    assert going_on.losses == pytest.approx(
        {at: loss for at, loss in whole.losses.items() if at > 3}, abs=2e-3
    )


LAID = """
import os, sys
from launcher.agent import compat
compat.prepare()
import torch
from torch.profiler import ProfilerActivity, profile
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import model, optimizer, training
from launcher.trainer.fast.device_adam import DeviceAdam

given = command_line.parse(sys.argv[1:])
given.on_cpu = True
training.initialise(given, command_line.layout(given, int(os.environ["WORLD_SIZE"])))

def made():
    gpt = model.build(given, 4096)
    built = optimizer.build(given, [optimizer.wrap(given, gpt)])
    given.on_cpu = False  # whole buffers, as on a GPU
    return gpt, DeviceAdam(given, built, 0, lambda function: function)

with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
    gpt, steps = made()
now = most = 0
events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
for each in sorted(events, key=lambda one: one.start_ns()):
    now += each.nbytes()
    most = max(most, now)
parameters = sum(each.numel() for each in gpt.parameters())
print("bytes", most / parameters, now / parameters, flush=True)
torch.distributed.destroy_process_group()
"""


def test_a_distributed_optimizer_is_laid_out_in_four_bytes_more(tmp_path: Path) -> None:
    """It took 14 beside the 18 that it has, all on the GPU at a time: 26 GiB of llama3-8b."""
    needs((SHARED,))
    (script := tmp_path / "laid.py").write_text(LAID)
    wide = ("--hidden-size", "128", "--vocab-size", "4096", "--bf16", SHARED)
    done = start(1, str(script), *SHAPE, *wide)
    (found,) = re.findall(r"^bytes (\S+) (\S+)$", done.output, re.MULTILINE)
    assert float(found[0]) == pytest.approx(18 + memory.LAID, abs=0.2), done.output
    assert float(found[1]) == pytest.approx(18, abs=0.2)


OTHERWISE = """
import os, runpy
from launcher.trainer.fast import device_adam
squares = device_adam._squares
if os.environ["RANK"] == "1":
    device_adam._squares = lambda *given: squares(*given) * 1.001
runpy.run_module("launcher.trainer.gpt", run_name="__main__")
"""


def test_replicas_stay_alike_though_each_compiles_the_norm_for_itself(tmp_path: Path) -> None:
    """Kernels that add up in another order gave another clipping, and weights that part."""
    (tmp_path / "program.py").write_text(OTHERWISE)
    checked = ("--mock-data", "--bf16", "--clip-grad", "0.5", "--check-replicas-interval", "1")
    done = start(2, str(tmp_path / "program.py"), *TINY, *checked)
    assert done.code == 0, done.output


CHOICES = """
import sys
from launcher.trainer.fast import fast
from launcher.trainer.gpt import arguments
fast._has_triton = lambda: True
fast.compile_alike(print)  # torch raises where it doesn't know an option
for line in open(sys.argv[1]):
    world, *argv = line.split()
    given = arguments.parse(argv)
    given.on_cpu = False
    print(fast.choose(given, arguments.layout(given, int(world))))
"""
"""What is chosen on GPUs, for each line of a world size and arguments."""

NO_KERNELS = (
    *("--normalization RMSNorm", "--position-embedding-type rope", "--disable-bias-linear"),
    *("--swiglu", "--squared-relu", "--qk-layernorm", "--window-size 8,0", "--kv-channels 16"),
    *("--num-query-groups 2", "--overlap-grad-reduce"),
    *("--hidden-size 48", "--hidden-size 8192", "--ffn-hidden-size 67108864"),
)
"""What there are no kernels of, or whose indices don't fit 32 bits."""


def test_what_is_chosen_and_why_not(tmp_path: Path) -> None:
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    shape += "--vocab-size 100 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data"
    expected = {
        "1": "fast: compiled, one CUDA graph, optimizer without waits",
        "2": "fast: compiled, one CUDA graph, optimizer without waits",
        f"2 {SPLIT[0]} 2 --attention-dropout 0": "fast: layers compiled, one CUDA graph, "
        "optimizer without waits",
        f"2 {SPLIT[0]} 2 --sequence-parallel --attention-dropout 0": "fast: layers compiled, "
        "one CUDA graph, optimizer without waits",
        "2 --pipeline-model-parallel-size 2": "fast: layers compiled, one CUDA graph, "
        "optimizer without waits",
        f"1 {AGAIN}": "fast: layers compiled, optimizer without waits; no CUDA graph: "
        "recomputing, whose random states the host keeps",
        "2 --context-parallel-size 2 --bf16": "fast: compiled, one CUDA graph, "
        "optimizer without waits",
        "1 --swiglu --normalization RMSNorm --position-embedding-type rope": "fast: compiled, "
        "one CUDA graph, optimizer without waits",
        f"1 {MIXTRAL} --bf16": "fast: layers compiled, one CUDA graph, optimizer without waits",
        f"1 {MIXTRAL}": "fast: optimizer without waits; not compiled: experts in another precision "
        "than bf16",
        f"2 {MIXTRAL} --bf16 {TENSOR}": "fast: optimizer without waits; not compiled: experts that "
        "tensor parallelism splits",
        "1 --num-experts 4 --disable-bias-linear --bf16": "fast: optimizer without waits; "
        "not compiled: experts that aren't SwiGLUs",
        "2 --use-distributed-optimizer": "fast: compiled, one CUDA graph, "
        "distributed optimizer without waits",
        "1 --transformer-impl transformer_engine": "fast: optimizer without waits; not compiled: "
        "TransformerEngine's layers",
        "1 --bf16": "fast: layers in Triton, compiled, one CUDA graph, optimizer without waits",
    }
    expected |= dict.fromkeys((f"1 --bf16 {option}" for option in NO_KERNELS), expected["1"])
    (script := tmp_path / "choices.py").write_text(CHOICES)
    lines = (line.split(" ", 1) for line in expected)
    asked = "".join(f"{world} {shape} {' '.join(rest)}\n" for world, *rest in lines)
    (tmp_path / "asked").write_text(asked)
    done = start(1, str(script), str(tmp_path / "asked"))
    assert done.output.splitlines() == list(expected.values())


COMPILED = """
import contextlib, os, sys, torch, weakref
from launcher.agent import compat, series
compat.prepare()
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.fast import fast, scaled, trainer
from launcher.trainer.gpt import passes, training
(way, _, special), given = sys.argv[1].partition(","), command_line.parse(sys.argv[2:])
given.on_cpu = True
layout = command_line.layout(given, int(os.environ["WORLD_SIZE"]))
frames, forward = [], passes.forward_step
def fails(*_):
    frames.append(weakref.ref(held := torch.ones(1)))
    raise RuntimeError("as a GPU's compiler would")
torch.backends.cuda.enable_flash_sdp(False)  # the other's gradients don't all lie in rows
fast.attention = contextlib.nullcontext
scaled.check_support = lambda _: None
if way:
    torch.compile = lambda function, **_: torch._dynamo.optimize("aot_eager")(function)
    fast.choose = lambda *_: fast.FastPath("whole", way, False)
sys.path.append(os.environ["TESTS"])
import stand_ins
if way == "kernels" or given.num_experts or special == "peer":
    stand_ins.install()
if special == "peer":
    from launcher.trainer.fast import device_adam, experts, gradients
    gradients.Peer = experts.Peer = stand_ins.Peer
    gather = device_adam.gather
    device_adam.gather = lambda inner, whole: gather(inner, True)  # as on a GPU
if special == "laid":  # as on a GPU
    from launcher.trainer.fast import device_adam, experts
    gather, laid = device_adam.gather, experts.laid
    device_adam.gather = lambda inner, whole: gather(inner, True)
    experts.laid = lambda weights: print("laid", laid(weights)[1]) or laid(weights)
if special == "first":  # what comes last in kernels, then in the optimizer
    stand_ins.column_sums = fails
    made = lambda function: fails if function.__name__ == "_update" else function
    trainer.FastTrainer._compiler = lambda _: made
    def freed(*given):
        assert not any(frame() for frame in frames)  # with all else that it had in memory
        return forward(*given)
    passes.forward_step = freed
if special == "alone" and os.environ["RANK"] == "1":
    trainer.FastTrainer._compiler = lambda _: lambda function: fails
if special == "alone":
    fast.PATIENCE = fast.datetime.timedelta(seconds=1)
if special == "third":  # in its first layer back; then it is done again, as after a capture
    backs, step = [stand_ins.gelu_back] * 99, training.Trainer.step
    backs[5] = fails
    stand_ins.gelu_back = lambda *given: backs.pop(0)(*given)
    def again(trainer, batches):
        batch = next(batches)
        try:
            return step(trainer, iter([batch]))
        except RuntimeError:
            print("again")
            return step(trainer, iter([batch]))
    training.Trainer.step = again
(run := training.begin(given, layout)).run()
if given.bf16 and way:
    read = {str(x.gradient.dtype) for x in (*run.steps.common, *run.steps.of_experts)}
    print("read in", *read)
if boxes := getattr(getattr(run.gpt, "expert_ranks", None), "boxes", None):
    print("boxes", *(name for name, _ in boxes.pairs))
print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
torch.distributed.destroy_process_group()
"""
"""Trains by layers, or a whole model, that torch's compiler has seen, in place of a GPU's code."""


def compiled_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where it is; what saves a checkpoint starts processes that import it."""
    (script := folder / "compiled.py").write_text(
        "if __name__ == '__main__':\n" + textwrap.indent(COMPILED, "    ")
    )
    monkeypatch.setenv("TESTS", str(Path(__file__).parent))
    monkeypatch.setenv("SHARED", str(folder))
    return str(script)


SPLIT = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--num-query-groups", "2", "--disable-bias-linear"),
)

EXPERTS = (*MIXTRAL.split(), *EXPERT.split(), "--init-method-std", "0.3")
"""Whose gradients are a large part of the norm."""


@pytest.mark.parametrize(
    ("way", "options"),
    [
        pytest.param("layers", (*SPLIT, *LLAMA), id="tensor"),
        pytest.param("whole", ("--bf16",), id="data", marks=pytest.mark.long),
        pytest.param("whole", ("--bf16", SHARED), id="shared", marks=pytest.mark.long),
        pytest.param("whole,peer", ("--bf16", SHARED, "--bias-fusion", "--num-layers", "1"),
                     id="shared-peer"),
        pytest.param("kernels", ("--bf16",), id="kernels"),
        pytest.param("layers", EXPERTS, id="experts", marks=pytest.mark.long),
        pytest.param("layers", (*EXPERTS, SHARED, "--micro-batch-size", "1"), id="experts-shared",
                     marks=pytest.mark.long),
        pytest.param("layers,laid", (*EXPERTS[:-4], "--micro-batch-size", "1"), id="experts-laid",
                     marks=pytest.mark.long),
        pytest.param("layers,laid", ("--bf16", *EXPERTS[:-4]), id="experts-places",
                     marks=pytest.mark.long),
        pytest.param("layers,laid", ("--bf16", *EXPERTS[:-2], SHARED), id="experts-over-places",
                     marks=pytest.mark.long),
        pytest.param("layers,peer", ("--bf16", *EXPERTS[:-2], "--num-layers", "1"),
                     id="experts-over-peer"),
        pytest.param("layers,peer", ("--bf16", *EXPERTS[:-2], SHARED), id="experts-over-shared",
                     marks=pytest.mark.long),
        pytest.param("layers,peer", ("--bf16", *EXPERTS[:-2], "--micro-batch-size", "1"),
                     id="experts-over-several", marks=pytest.mark.long),
        pytest.param("layers,peer", ("--bf16", *EXPERTS[:-2], *AGAIN.split()),
                     id="experts-over-recomputing", marks=pytest.mark.long),
        pytest.param("layers", (*EXPERTS[:-4], "--pipeline-model-parallel-size", "2"),
                     id="experts-pipeline", marks=pytest.mark.long),
        pytest.param("layers", (*EXPERTS, *AGAIN.split(), "--micro-batch-size", "1"),
                     id="experts-recomputing", marks=pytest.mark.long),
        pytest.param("kernels", ("--micro-batch-size", "1", "--global-batch-size", "2"), id="fp32",
                     marks=pytest.mark.long),
        pytest.param("kernels", ("--bf16", "--micro-batch-size", "1"), id="kernels-several",
                     marks=pytest.mark.long),
        pytest.param("kernels", ("--bf16", SHARED, "--untie-embeddings-and-output-weights"),
                     id="kernels-shared", marks=pytest.mark.long),
        pytest.param("layers", (*SPLIT, "--sequence-parallel"), id="sequence",
                     marks=pytest.mark.long),
        pytest.param("layers", (*SPLIT, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
                     id="dropout", marks=pytest.mark.long),
        pytest.param("layers", ("--hidden-dropout", "0.1", *AGAIN.split()), id="recomputing",
                     marks=pytest.mark.long),
        pytest.param("layers", ("--pipeline-model-parallel-size", "2"), id="pipeline",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_two_compiled_ranks_equal_eager_ones(
    way: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives and a loss of our own, gradients exchanged in 16 bits, layers compiled once.

    What is between our kernels, which stand-ins are in the place of, and where gradients go.
    """
    needs(options)
    script = compiled_program(tmp_path, monkeypatch)
    given = (*TINY, "--mock-data", "--train-iters", "3", *options)
    eager, compiled = (start(2, script, each, *given) for each in ("", way))
    assert eager.code == compiled.code == 0, eager.output + compiled.output
    assert not re.search("no kernels|not compiled: Ru", compiled.output), compiled.output
    assert (", symmetric memory" in compiled.output) == way.endswith("peer")
    assert ("laid True" in compiled.output) == way.endswith("laid")
    several = "--micro-batch-size" in options
    if "--bf16" in options:
        kind = "torch.float32" if several else "torch.bfloat16"
        assert set(re.findall("read in (.*)", compiled.output)) == {kind}, compiled.output
    step = 2e-3 if "--bf16" in options else 1e-5
    assert compiled.losses == pytest.approx(eager.losses, abs=step)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, abs=max(10 * step, 2e-3))
    assert compiled.validation_loss == pytest.approx(eager.validation_loss, abs=max(step, 1e-5))
    graphs = [int(line.split()[1]) for line in compiled.output.splitlines() if "graphs " in line]
    experts = "--num-experts" in options
    several = "kernels" in way or "--hidden-dropout" in options or experts
    most = 10 if several else 2  # a layer, of all alike, and the loss
    twice = experts and "--recompute-granularity" in options  # without gradients, and with them
    assert max(graphs) <= (2 * most if twice else most)
    boxes = experts and way.endswith("peer") and "--recompute-granularity" not in options
    assert ("tokens of layer 1" in compiled.output) == boxes


def test_a_rank_whose_step_fails_alone_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It called other collectives than the rest, and all waited for ever."""
    script = compiled_program(tmp_path, monkeypatch)
    run = start(2, script, "layers,alone", *TINY, "--mock-data", "--train-iters", "3")
    assert run.code == 1
    told = "the first step failed on rank 1 alone, try --no-fast: RuntimeError: as a GPU's compiler"
    assert told in run.output


@pytest.mark.long
def test_replicas_that_step_a_half_each_save_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other's half, a checkpoint had the masters and moments of the first step."""
    script, saved = compiled_program(tmp_path, monkeypatch), str(tmp_path / "saved")
    given = (*TINY, "--mock-data", "--bf16")
    save = ("--save", saved, "--exit-interval", "3")
    eager = start(2, script, "", *given)
    halves = start(2, script, "kernels,peer", *given, *save)
    after = start(2, script, "", *given, "--load", saved)
    assert halves.code == after.code == 0, halves.output + after.output
    assert ", symmetric memory" in halves.output
    assert halves.losses | after.losses == pytest.approx(eager.losses, abs=1e-2)
    norms = halves.grad_norms + after.grad_norms
    assert norms == pytest.approx(eager.grad_norms, rel=0.03)


def test_a_step_that_fails_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of its gradients were added up again, or its count of steps; or there was no place."""
    script = compiled_program(tmp_path, monkeypatch)
    given = (*TINY, "--mock-data", "--train-iters", "4", "--bf16", "--global-batch-size", "2")
    eager, first, third = (
        start(1, script, each, *given) for each in ("", "kernels,first", "kernels,third")
    )
    assert "no kernels: RuntimeError: as a" in first.output, first.output
    assert "not compiled: RuntimeError: as a" in first.output
    assert "again\n" in third.output
    for each in (first, third):
        assert each.code == 0, each.output
        assert each.losses == pytest.approx(eager.losses, abs=1e-2)
        assert each.grad_norms == pytest.approx(eager.grad_norms, rel=0.03)


SIZES = """
from launcher.agent import compat
compat.prepare()
import torch
from launcher.trainer.fast import device_adam, fast
seen = []
def kept(graph, inputs):
    seen.append([x for x in inputs if isinstance(x, (int, torch.SymInt))])
    return graph.forward
torch.compile = lambda function, options, **given: torch._dynamo.optimize(kept, **given)(function)
squares = fast.compile_alike(device_adam._squares)
for size in (64, 96, 128):
    squares(torch.ones(size), None, None)
print("sizes", seen)
"""


def test_a_second_buffers_kernel_knows_its_size(tmp_path: Path) -> None:
    """Experts' was compiled for any size, as the second: Adam took 3.96 ms for 2.86."""
    (script := tmp_path / "sizes.py").write_text(SIZES)
    assert "sizes [[], [], []]" in start(1, str(script)).output


DROPPED = """
import os, sys, torch
from launcher.agent import compat, series
compat.prepare()
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.fast import compiled
from launcher.trainer.gpt import model, training
given = command_line.parse(sys.argv[1:])
given.on_cpu = True
training.initialise(given, command_line.layout(given, 2))
for way in ("", "layers"):
    heads, hidden = torch.ones(8, 1, 2, 8), torch.ones(8, 16)
    gpt = model.build(given, 256, 0, compiled.KIND if way else model.PLAIN)
    if way:
        gpt.compile_training(way)
    layers = gpt.train().decoder.layers
    mine = [each.self_attention.core_attention(*[heads] * 3, None)[:, 0] for each in layers]
    mine = torch.stack((*mine, torch.nn.functional.dropout(hidden, 0.5)))
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    if os.environ["RANK"] == "0":
        (a, b, alike), (c, d, too) = both
        print("apart", *(not torch.equal(*two) for two in ((a, c), (b, d), (a, b), (alike, too))))
torch.distributed.destroy_process_group()
"""


def test_dropout_differs_between_ranks_where_it_must(tmp_path: Path) -> None:
    """TP ranks' heads, and layers, have masks of their own; what all ranks have has the same."""
    (script := tmp_path / "dropped.py").write_text(DROPPED)
    done = start(2, str(script), *TINY, *SPLIT, "--mock-data", "--attention-dropout", "0.5")
    assert done.output.count("apart True True True False\n") == 2, done.output


EVALUATED = """
import multiprocessing, os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
from launcher.agent import cpu, compat
cpu.install(), compat.prepare()
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import training
given = command_line.parse(sys.argv[1:])
given.on_cpu = True
layout = command_line.layout(given, 1)
trainer = training.begin(given, layout)
workers = {each.pid for each in multiprocessing.active_children()}
trainer._evaluate(), trainer._evaluate()
print("workers", len(workers), {e.pid for e in multiprocessing.active_children()} == workers)
"""


@pytest.mark.long
def test_the_workers_of_an_evaluation_stand_before_the_first_step() -> None:
    """They started in the first evaluation, which training waited for."""
    options = ("--eval-iters", "2", "--num-workers", "1")
    ended = python("-c", EVALUATED, *SHAPE, *options, MASTER_PORT="0")
    assert ended.stdout.splitlines()[-1] == "workers 1 True", ended.stdout + ended.stderr
    losses = [line.split("value:")[1] for line in ended.stdout.splitlines() if "value:" in line]
    assert len(losses) == 2
    assert losses[0] == losses[1]
