"""What the checks make of made-up runs and machines: refused, warned of, or let through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.agent.series import numbers
from launcher.base.errors import PreflightError
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.checks import auto, checkpoint_folders, checks
from launcher.runs.checks.machine import (
    UNLIMITED,
    Dataset,
    Finding,
    Folder,
    Machine,
    SavedCheckpoints,
    Use,
)
from launcher.runs.runfile.values import Gpus, parse_gpus
from tests.runs.checks.conftest import ENGINE, GB, Asker, card
from tests.tables import table

H100, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
V100 = card(name="Tesla V100-SXM2-32GB", total=34 * GB, capability=(7, 0))
TWO = (card(0), card(1))
PRIVATE = "resources.ipc=private"
NODES = ("gpt3-175b", "nodes.count=16")


def test_every_refusal_is_told_and_warnings_let_a_run_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warning = Finding("the disk is small", "it fills", "free some", refuse=False)
    told = "launcher: warning: the disk is small\n  it fills\n  free some\n"
    checks.enforce([warning])
    assert capsys.readouterr().err == told
    refusals = [Finding("a", "b", "c", refuse=True), Finding("d", "e", "f", refuse=True)]
    with pytest.raises(PreflightError) as caught:
        checks.enforce([refusals[0], warning, refusals[1]])
    assert caught.value.exit_code == 121
    assert caught.value.problem == "a\n  b\n  c\nd\n  e\n  f"
    assert "--no-preflight" in caught.value.remedy
    assert capsys.readouterr().err == told


@table("request_", "indices")
def test_which_gpus_a_request_makes_visible(request_: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in checks.chosen(parse_gpus(request_), TWO)] == indices
    assert checks.chosen(Gpus(2, everything=True), TWO) == list(TWO)


SAVE = "/home/user/work/checkpoints/gpt2"
BF16, FP16 = ("gpt2", "training.bf16=true"), ("gpt2", "training.fp16=true")
OLD = Machine(gpus=(card(name=RTX, driver="515.65.01"),))
BUSY = (Use("GPU-0", 12, 2 * GB), Use("GPU-0", 13, None))
PADDED = {"vocab_size": 50257, "tensor_model_parallel_size": 2}
BROKEN = (("/c/iter_0000900", "no .metadata"),)


def room(gigabytes: float, **more: SavedCheckpoints) -> Machine:
    """A machine with so much free for the preset's checkpoints."""
    return Machine(folders=(Folder(SAVE, "checkpoint.save", free=int(gigabytes * GB)),), **more)


@pytest.mark.parametrize(
    ("sets", "machine", "what", "also", "refuse"),
    [
        (("gpt2", "gpus=4"), Machine(gpus=TWO), "gpus: 4, and this machine has 2", "--gpus 2",
         True),
        (("gpt2",), Machine(gpus=()), "gpus: 1, and the driver finds none on this machine",
         "--gpus 0 trains on the CPU.", True),
        *((("gpt2", f"gpus='device={device}'"), Machine(gpus=TWO),
           f"gpus: no device {device} on this machine", "GPU-0; GPU-1", True)
          for device in ("2", "GPU-9", "GPU")),
        (BF16, Machine(gpus=(V100,)), "--set training.bf16=true: training.bf16: GPU 0 is a Tesla "
         "V100-SXM2-32GB, compute capability 7.0",
         "--set training.precision=fp16 --set training.bf16=null", True),
        ((*BF16, "gpus=2"), Machine(gpus=(V100, replace(V100, index=1, uuid="GPU-1"))),
         "compute capability 7.0", "", True),  # once for GPUs of one name
        (FP16, Machine(gpus=(replace(V100, capability=(6, 1)),)), "capability 6.1", "", False),
        (FP16, Machine(gpus=(replace(V100, capability=(5, 2)),)), "capability 5.2", "", True),
        ((*BF16, "megatron_args.fp8_format=hybrid", "program=pretrain_gpt.py"),
         Machine(gpus=(replace(V100, capability=(8, 0)),)),
         "megatron_args.fp8_format: GPU 0", "FP8 needs 8.9", True),
        (("gpt2", "training.precision=fp8"), Machine(gpus=(replace(V100, capability=(8, 6)),)),
         "megatron_args.fp8_format: GPU 0", "FP8 needs 8.9", True),
        (("gpt2",), Machine(gpus=TWO, uses=BUSY),
         "GPU 0 is in use: process 12 (2.0 GB), process 13", "", False),
        (("gpt2",), Machine(engine=replace(ENGINE, gpus=None)), "as far as it reports", "", False),
        (("gpt2",), Machine(engine=replace(ENGINE, gpus=False)), "CDI devices", "nvidia-ctk", True),
        (("gpt2",), OLD, "driver 515.65.01; the image has CUDA 12.6.2", "525.60.13", True),
        (("gpt2", "gpus=2", PRIVATE), Machine(engine=ENGINE), "64 MiB of /dev/shm for 2 processes",
         "resources.shm_size=8g", False),  # docker's default
        (NODES, Machine(engine=ENGINE, port=False), "nodes.master_port: port 29500 is taken",
         "nodes.master_port=29501", True),
        ((*NODES, "nodes.rank=3"), Machine(engine=ENGINE, resolves=False),
         "node0 isn't known here", "", False),
        (("gpt2", "data.path=/data/corpus"),
         Machine(datasets=(Dataset("/data/corpus", "cut short"), Dataset("b", ""))),
         "--set data.path=/data/corpus: data.path: cut short", "", True),
        (("gpt2-tiny", "data.path=/d"), Machine(datasets=(Dataset("/d", "", 9999, 256),)),
         "data.vocab_size: 256 is too small: /d has token 256", "data.vocab_size=257", True),
        (("gpt2-tiny", "data.path=/d"), Machine(datasets=(Dataset("/d", "", 64, 9, 40),)),
         "data.split: /d has about 62 tokens for training, and a sample 65", "more text", True),
        (("gpt2-tiny", "data.path=/d", "data.split='98,2,0'"),
         Machine(datasets=(Dataset("/d", "", 900, 9, 100),)),
         "data.split: /d has about 18 tokens for evaluation", "more text", False),
        (("gpt2",), Machine(folders=(Folder("/mnt/x", "checkpoint.save", "is read-only", 0),)),
         ": checkpoint.save: /mnt/x: is read-only", "", True),
        (("gpt2",), Machine(unseen=(("checkpoint.save", "/mnt/later"),)),
         ": checkpoint.save: /mnt/later: the engine sees something else there", "", True),
        (("gpt2",), room(1.7), f"1.70 GB free for {SAVE}", "", True),
        (("gpt2-tiny", "checkpoint.save=/x", "model.hidden_size=128"),
         Machine(folders=(Folder("/x", "checkpoint.save", free=10**6),)),
         "checkpoint.save: 1.0 MB free for /x", "One checkpoint takes about 5.7 MB: weights", True),
        (("gpt2",), Machine(load=SavedCheckpoints(500, BROKEN)), "/c/iter_0000900: no .metadata",
         "iteration 500", False),
        (("gpt2",), Machine(load=SavedCheckpoints(None, BROKEN)), "no .metadata", "begin anew",
         True),
        (("gpt2",),
         Machine(load=SavedCheckpoints(50, (), PADDED | {"make_vocab_size_divisible_by": 1024})),
         "data.vocab_size: padded to 50304, and iteration 50", "have another size", True),
        (("gpt2-tiny", "checkpoint.load=/c"),
         Machine(load=SavedCheckpoints(50, (), {"num_layers": 2, "hidden_size": 128, "lr": 1.0})),
         "model.hidden_size: 64, and iteration 50 in", "--set model.hidden_size=128", True),
    ],
)  # fmt: skip
def test_each_is_told_with_its_place_and_its_mend(
    asked: Asker, sets: tuple[str, ...], machine: Machine, what: str, also: str, refuse: bool
) -> None:
    (finding,) = asked(*sets).on(machine, cuda="12.6.2" if machine is OLD else None)
    assert what in finding.what
    assert also in f"{finding.why}\n{finding.mend}"
    assert finding.refuse == refuse


@pytest.mark.parametrize("capability", [(7, 0), (5, 2)])
@pytest.mark.parametrize(
    "given",
    ["precision=auto", "precision=fp16", "precision=bf16", "fp16=true", "bf16=true"],
)
def test_what_mends_a_precision_does(asked: Asker, given: str, capability: tuple[int, int]) -> None:
    """`fp16=false` over `precision: auto` is fp16 all the same."""
    gpu = replace(V100, capability=capability)
    sets = dict([f"training.{given}".split("=")])
    for _ in range(3):
        run = asked("gpt2", *map("=".join, sets.items()))
        decided, _ = auto.decide(run.run, [gpu])
        found = [one for one in checks._able(decided.config, run.origin, [gpu]) if one.refuse]
        if not found:
            return
        sets |= dict(one.split("=") for one in found[0].mend.split() if one != "--set")
    pytest.fail(f"{found[0].what}: {found[0].mend}")


@pytest.mark.parametrize(
    ("sets", "machine"),
    [
        (("gpt2", "gpus='device=MIG-1a2b'"), Machine(gpus=TWO)),  # a slice isn't in the list
        (("gpt2-tiny",), Machine(gpus=())),
        (("gpt2-tiny", "data.path=/d"), Machine(datasets=(Dataset("/d", "", 9999, 255),))),
        (("gpt2-tiny",), Machine(engine=replace(ENGINE, gpus=False))),
        (("gpt2", "gpus=8"), Machine()),  # what can't be told isn't checked
        (("gpt2",), OLD),
        (BF16, Machine(gpus=(replace(V100, capability=None),))),
        ((*BF16, "gpus='device=1'"), Machine(gpus=(V100, card(1)), uses=(Use("GPU-0", 1, GB),))),
        (("gpt2",), Machine(gpus=(V100,))),
        (("gpt2",), Machine(engine=ENGINE)),
        (("gpt2", "gpus=2", PRIVATE), Machine(shm=1 << 40)),  # without an engine, this machine's
        ((*NODES, "nodes.rank=3"), Machine(engine=ENGINE, port=False)),
        (("gpt2",), Machine(port=False)),
        (NODES, Machine(engine=ENGINE, resolves=False)),
        (("gpt2",), room(2, load=SavedCheckpoints(500))),  # one that goes on writes what is left
        (("simple", "resources.workdir=x"), Machine(folders=(Folder("/x", "y"),))),
        (("gpt2",), Machine(load=SavedCheckpoints(None))),
        (("gpt2",), Machine(load=SavedCheckpoints(10))),
        (
            ("gpt2",),
            Machine(load=SavedCheckpoints(10, (), PADDED | {"make_vocab_size_divisible_by": 64})),
        ),
    ],
)
def test_what_is_well_is_let_through(asked: Asker, sets: tuple[str, ...], machine: Machine) -> None:
    assert asked(*sets).on(machine) == []


@table("have", "cuda", "gpu", "refuse")
def test_a_driver_refused_warned_of_or_let_through(
    have: str, cuda: str, gpu: str, refuse: bool | None
) -> None:
    found = checks.driver_carries([card(name=gpu, driver=have)], cuda)
    assert [finding.refuse for finding in found] == ([] if refuse is None else [refuse])


@pytest.mark.parametrize(
    ("able", "cuda", "refuse"),
    [
        ((10, 0), "12.6.2", False),  # "sm_100 is not compatible with the current PyTorch"
        ((10, 0), "12.8", None),
        ((7, 0), "13.0", True),  # "no kernel image is available"
        ((7, 5), "13.0", None),
        ((7, 0), "12.6", None),
        ((9, 0), None, None),
    ],
)
def test_a_cuda_without_code_for_the_gpu_is_told(
    asked: Asker, able: tuple[int, int], cuda: str | None, refuse: bool | None
) -> None:
    found = asked("gpt2").on(Machine(gpus=(card(capability=able, driver="580.65.06"),)), cuda=cuda)
    told = [finding.refuse for finding in found if "compute capability" in finding.what]
    assert told == ([] if refuse is None else [refuse])


def test_every_cuda_of_the_usual_rows_is_known() -> None:
    matrix = load_matrix()
    found = {numbers(matrix.rows[tag].cuda or "")[:2] for tag in matrix.usual}
    assert found
    assert found <= set(checks.TOOLKIT_DRIVER)


SAVES = "checkpoint.save_interval"


def shared(free: int | None) -> Machine:
    """A machine with so many bytes free in its /dev/shm."""
    return Machine(engine=ENGINE, shm=free)


@pytest.mark.parametrize(
    ("sets", "machine", "refusals", "why"),
    [
        (("gpus=2",), shared(1 << 30), [], ""),
        (("gpus=2",), shared(1 << 29), [False], ""),
        (("gpus=2",), shared(1 << 22), [True], ""),
        (("gpus=2",), shared(None), [], ""),
        (("gpus=1",), shared(1 << 20), [], ""),
        (("gpus=2", PRIVATE), shared(1 << 40), [False], ""),
        (("gpus=2", PRIVATE, "resources.shm_size=8g"), shared(1 << 20), [], ""),
        (("gpus=2", PRIVATE, "resources.shm_size=4096k"), shared(1 << 40), [True], ""),
        (("gpus=0", "processes=2"), shared(1 << 20), [], ""),
        # what may be locked of memory
        (("gpus=2",), Machine(memlock=8 << 20), [False], ""),
        (("gpus=2",), Machine(memlock=UNLIMITED), [], ""),
        (("gpus=2",), Machine(memlock=None), [], ""),
        (("gpus=1",), Machine(memlock=8 << 20), [], ""),
        (("gpus=2", "resources.ulimits={}"), Machine(memlock=8 << 20), [], ""),
        (("gpus=2", "resources.ulimits={memlock: 65536}"), Machine(memlock=8 << 20), [], ""),
        # when the disk is full
        ((), room(3.4), [False], "it is full at iteration 1000"),
        ((), room(3.5), [], ""),
        ((f"{SAVES}=300",), room(5.3), [False], "it is full at iteration 1000"),
        ((f"{SAVES}=300",), room(3.5), [False], "it is full at iteration 900"),
        ((f"{SAVES}=10", "checkpoint.keep=2"), room(5.3), [], ""),
        ((f"{SAVES}=10", "checkpoint.keep=2"), room(5.1), [False], "it is full at iteration 30"),
        ((f"{SAVES}=null",), room(1.8), [], ""),
    ],
)
def test_memory_and_disk(
    asked: Asker, sets: tuple[str, ...], machine: Machine, refusals: list[bool], why: str
) -> None:
    findings = asked("gpt2", *sets).on(machine)
    assert [finding.refuse for finding in findings] == refusals
    assert all(why in finding.why for finding in findings)


def test_a_length_in_samples(asked: Asker) -> None:
    run = asked("gpt3-175b")
    assert checkpoint_folders.iterations(run.config) == -(-146484375 // 1536)


@pytest.mark.parametrize(
    ("done", "total", "at"),
    [(0, 10, [5, 10]), (0, 11, [5, 10, 11]), (7, 11, [10, 11]), (10, 10, []), (11, 11, [])],
)
def test_when_checkpoints_are_saved(asked: Asker, done: int, total: int, at: list[int]) -> None:
    config = asked("gpt2", f"{SAVES}=5").config
    assert checkpoint_folders.saves(config, done, total) == at
