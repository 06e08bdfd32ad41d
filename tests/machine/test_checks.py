"""What the checks make of made-up runs and machines: refused, warned of, or let through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import PreflightError
from launcher.machine import checks
from launcher.machine.machine import UNLIMITED, Dataset, Finding, Folder, Machine, Saved, Use
from launcher.matrix.load import load_matrix
from launcher.plan.gpus import Gpus, parse_gpus
from tests.machine.conftest import ENGINE, GB, Asker, card

H100, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
EACH = 14 * 124_082_688
V100 = card(name="Tesla V100-SXM2-32GB", total=34 * GB, capability=(7, 0))
TWO = (card(0), card(1))
PRIVATE = "resources.ipc=private"
NODES = ("gpt3-175b", "nodes.count=16")


def test_warnings_let_a_run_start(capsys: pytest.CaptureFixture[str]) -> None:
    checks.enforce([Finding("the disk is small", "it fills", "free some", refuse=False)])
    assert capsys.readouterr().err == (
        "launcher: warning: the disk is small\n  it fills\n  free some\n"
    )


def test_every_refusal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("a", "b", "c", refuse=True),
        Finding("warned", "of", "this", refuse=False),
        Finding("d", "e", "f", refuse=True),
    ]
    with pytest.raises(PreflightError) as caught:
        checks.enforce(findings)
    assert caught.value.exit_code == 121
    assert caught.value.problem == "a\n  b\n  c\nd\n  e\n  f"
    assert "--no-preflight" in caught.value.remedy
    assert "warned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_", "indices"),
    [
        ("1", [0]),
        ("2", [0, 1]),
        ("device=1", [1]),
        ("device=1,0", [1, 0]),
        ("device=GPU-1", [1]),
        ("device=GPU-", []),
        ("device=7", []),
    ],
)
def test_which_gpus_a_request_makes_visible(request_: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in checks.chosen(parse_gpus(request_), TWO)] == indices


def test_all_makes_all_visible() -> None:
    assert checks.chosen(Gpus(2, everything=True), TWO) == list(TWO)


def test_more_than_there_are_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2", "gpus=4").on(Machine(gpus=TWO))
    assert finding.what == "gpus: 4, and this machine has 2"
    assert finding.mend == "--gpus 2"
    assert finding.refuse


@pytest.mark.parametrize("device", ["2", "GPU-9", "GPU"])
def test_a_device_that_isnt_there_is_refused(asked: Asker, device: str) -> None:
    (finding,) = asked("gpt2", f"gpus='device={device}'").on(Machine(gpus=TWO))
    assert finding.what == f"gpus: no device {device} on this machine"
    assert "GPU-0; GPU-1" in finding.why
    assert finding.refuse


def test_a_slice_of_a_gpu_has_a_name_that_the_list_lacks(asked: Asker) -> None:
    assert asked("gpt2", "gpus='device=MIG-1a2b'").on(Machine(gpus=TWO)) == []


def test_a_driver_without_gpus_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(Machine(gpus=()))
    assert finding.refuse
    assert finding.mend == "--gpus 0 trains on the CPU."


def test_on_the_cpu_no_gpu_is_looked_for(asked: Asker) -> None:
    assert asked("gpt2-tiny").on(Machine(gpus=())) == []


def test_what_cant_be_told_isnt_checked(asked: Asker) -> None:
    assert asked("gpt2", "gpus=8").on(Machine()) == []


def test_bf16_on_volta_is_refused_and_fp16_named(asked: Asker) -> None:
    run = asked("gpt2", "training.fp16=false", "training.bf16=true")
    (finding,) = run.on(Machine(gpus=(V100,)))
    assert finding.what == (
        "--set training.bf16=true: training.bf16: GPU 0 is a Tesla V100-SXM2-32GB, "
        "compute capability 7.0"
    )
    assert finding.mend == "--set training.bf16=false --set training.fp16=true"
    assert finding.refuse
    assert run.on(Machine(gpus=(replace(V100, capability=None),))) == []


@pytest.mark.parametrize(
    ("capability", "refusals"), [((7, 0), []), ((6, 1), [False]), ((5, 2), [True])]
)
def test_fp16_on_old_gpus(asked: Asker, capability: tuple[int, int], refusals: list[bool]) -> None:
    findings = asked("gpt2").on(Machine(gpus=(replace(V100, capability=capability),)))
    assert [finding.refuse for finding in findings] == refusals


def test_only_visible_gpus_count(asked: Asker) -> None:
    run = asked("gpt2", "gpus='device=1'", "training.fp16=false", "training.bf16=true")
    assert run.on(Machine(gpus=(V100, card(1)), uses=(Use("GPU-0", 1, GB),))) == []


def test_one_line_for_gpus_of_one_name(asked: Asker) -> None:
    run = asked("gpt2", "gpus=2", "training.fp16=false", "training.bf16=true")
    assert len(run.on(Machine(gpus=(V100, replace(V100, index=1, uuid="GPU-1"))))) == 1


def test_a_gpu_in_use_is_a_warning_with_the_process(asked: Asker) -> None:
    uses = (Use("GPU-0", 12, 2 * GB), Use("GPU-0", 13, None))
    (finding,) = asked("gpt2").on(Machine(gpus=TWO, uses=uses))
    assert finding.what == "GPU 0 is in use: process 12 (2.0 GB), process 13"
    assert not finding.refuse


@pytest.mark.parametrize(("gives", "refusals"), [(True, []), (None, [False]), (False, [True])])
def test_an_engine_without_the_toolkit(
    asked: Asker, gives: bool | None, refusals: list[bool]
) -> None:
    machine = Machine(engine=replace(ENGINE, gpus=gives))
    assert [finding.refuse for finding in asked("gpt2").on(machine)] == refusals
    assert asked("gpt2-tiny").on(machine) == []


@pytest.mark.parametrize(
    ("have", "cuda", "gpu", "refuse"),
    [
        ("560.28.03", "12.6", RTX, None),
        ("580.65.06", "12.6.2", RTX, None),
        ("535.104.05", "12.6.2", RTX, False),
        ("525.60.13", "12.6.2", RTX, False),
        ("525.60.11", "12.6.2", RTX, True),
        ("515.105.01", "12.4.0.41", RTX, True),
        ("515.105.01", "12.4.0.41", H100, False),
        ("470.57.02", "12.3.2", "Tesla T4", False),
        ("470.57.02", "12.3.2", "NVIDIA RTX A6000", True),
        ("525.60.13", "13.0", RTX, True),
        ("580.65.06", "13.0", RTX, None),
        ("560.35.03", "12.9", RTX, None),  # no figure for 12.9: nothing is said
    ],
)
def test_a_driver_refused_warned_of_or_let_through(
    have: str, cuda: str, gpu: str, refuse: bool | None
) -> None:
    found = checks.driver_carries([card(name=gpu, driver=have)], cuda)
    assert [finding.refuse for finding in found] == ([] if refuse is None else [refuse])


def test_it_says_which_driver_is_needed(asked: Asker) -> None:
    old = Machine(gpus=(card(name=RTX, driver="515.65.01"),))
    (finding,) = asked("gpt2").on(old, cuda="12.6.2")
    assert finding.what == "driver 515.65.01; the image has CUDA 12.6.2"
    assert "525.60.13" in finding.why
    assert "560.28.03" in finding.mend
    assert asked("gpt2").on(old) == []


def test_every_cuda_of_the_usual_rows_is_known() -> None:
    matrix = load_matrix()
    found = {checks.version(matrix.rows[tag].cuda or "")[:2] for tag in matrix.usual}
    assert found
    assert found <= set(checks.TOOLKIT_DRIVER)


@pytest.mark.parametrize(
    ("sets", "shm", "refusals"),
    [
        (("gpus=2",), 1 << 30, []),
        (("gpus=2",), 1 << 29, [False]),
        (("gpus=2",), 1 << 22, [True]),
        (("gpus=2",), None, []),
        (("gpus=1",), 1 << 20, []),
        (("gpus=2", PRIVATE), 1 << 40, [False]),
        (("gpus=2", PRIVATE, "resources.shm_size=8g"), 1 << 20, []),
        (("gpus=2", PRIVATE, "resources.shm_size=4096k"), 1 << 40, [True]),
        (("gpus=0", "processes=2", "training.fp16=false"), 1 << 20, []),
    ],
)
def test_shared_memory(
    asked: Asker, sets: tuple[str, ...], shm: int | None, refusals: list[bool]
) -> None:
    findings = asked("gpt2", *sets).on(Machine(engine=ENGINE, shm=shm))
    assert [finding.refuse for finding in findings] == refusals


def test_a_private_one_has_dockers_default(asked: Asker) -> None:
    (finding,) = asked("gpt2", "gpus=2", PRIVATE).on(Machine(engine=ENGINE))
    assert "64 MiB of /dev/shm for 2 processes" in finding.what
    assert "resources.shm_size=8g" in finding.mend


def test_without_an_engine_it_is_this_machines(asked: Asker) -> None:
    findings = asked("gpt2", "gpus=2", PRIVATE).on(Machine(shm=1 << 40))
    assert findings == []


@pytest.mark.parametrize(
    ("sets", "memlock", "warns"),
    [
        (("gpus=2",), 8 << 20, True),
        (("gpus=2",), UNLIMITED, False),
        (("gpus=2",), None, False),
        (("gpus=1",), 8 << 20, False),
        (("gpus=2", "resources.ulimits={}"), 8 << 20, False),
        (("gpus=2", "resources.ulimits={memlock: 65536}"), 8 << 20, False),
    ],
)
def test_locked_memory(
    asked: Asker, sets: tuple[str, ...], memlock: int | None, warns: bool
) -> None:
    findings = asked("gpt2", *sets).on(Machine(memlock=memlock))
    assert [finding.refuse for finding in findings] == ([False] if warns else [])


def test_a_taken_port_is_refused_on_the_first_node_alone(asked: Asker) -> None:
    (finding,) = asked(*NODES).on(Machine(engine=ENGINE, port=False))
    assert finding.what.endswith("nodes.master_port: port 29500 is taken")
    assert "nodes.master_port=29501" in finding.mend
    assert finding.refuse
    assert asked(*NODES, "nodes.rank=3").on(Machine(engine=ENGINE, port=False)) == []
    assert asked("gpt2").on(Machine(port=False)) == []


def test_a_master_that_isnt_known_is_a_warning_on_the_others(asked: Asker) -> None:
    (finding,) = asked(*NODES, "nodes.rank=3").on(Machine(engine=ENGINE, resolves=False))
    assert "node0 isn't known here" in finding.what
    assert not finding.refuse
    assert asked(*NODES).on(replace(Machine(engine=ENGINE), resolves=False)) == []


def room(gigabytes: float, **more: Saved) -> Machine:
    """A machine with so much free for the preset's checkpoints."""
    folder = Folder("/home/user/work/checkpoints/gpt2", "checkpoint.save", free=int(gigabytes * GB))
    return Machine(folders=(folder,), **more)


def test_damaged_data_is_refused_with_its_line(asked: Asker) -> None:
    run = asked("gpt2", "data.path=/data/corpus")
    (finding,) = run.on(Machine(datasets=(Dataset("/data/corpus", "cut short"), Dataset("b", ""))))
    assert finding.what == "--set data.path=/data/corpus: data.path: cut short"
    assert finding.refuse


def test_a_folder_that_cant_be_written_to_is_refused(asked: Asker) -> None:
    folder = Folder("/mnt/x", "checkpoint.save", problem="its file system is read-only", free=0)
    (finding,) = asked("gpt2").on(Machine(folders=(folder,)))
    assert finding.what.endswith(": checkpoint.save: /mnt/x: its file system is read-only")
    assert finding.refuse


def test_a_folder_that_the_engine_does_not_see_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(Machine(unseen=(("checkpoint.save", "/mnt/later"),)))
    assert finding.what.endswith(
        ": checkpoint.save: /mnt/later: the engine sees something else there"
    )
    assert finding.refuse


def test_no_room_for_one_checkpoint_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(room(1.7))
    assert "1.7 GB free for /home/user/work/checkpoints/gpt2" in finding.what
    assert finding.refuse


@pytest.mark.parametrize(
    ("sets", "gigabytes", "full"),
    [
        ((), 3.4, "at iteration 1000"),
        ((), 3.5, None),
        (("checkpoint.save_interval=300",), 5.3, "at iteration 1000"),
        (("checkpoint.save_interval=300",), 3.5, "at iteration 900"),
        (("checkpoint.save_interval=10", "checkpoint.keep=2"), 5.3, None),
        (("checkpoint.save_interval=10", "checkpoint.keep=2"), 5.1, "at iteration 30"),
        (("checkpoint.save_interval=null",), 1.8, None),
    ],
)
def test_the_forecast(
    asked: Asker, sets: tuple[str, ...], gigabytes: float, full: str | None
) -> None:
    findings = asked("gpt2", *sets).on(room(gigabytes))
    assert [finding.refuse for finding in findings] == ([False] if full else [])
    assert all(f"it is full {full}" in finding.why for finding in findings)


def test_a_run_that_goes_on_writes_what_is_left(asked: Asker) -> None:
    assert len(asked("gpt2").on(room(2))) == 1
    assert asked("gpt2").on(room(2, load=Saved(500))) == []


def test_a_length_in_samples(asked: Asker) -> None:
    run = asked("gpt3-175b")
    assert checks.iterations(run.config) == -(-146484375 // 1536)


@pytest.mark.parametrize(
    ("done", "total", "step", "at"),
    [
        (0, 10, 5, [5, 10]),
        (0, 11, 5, [5, 10, 11]),
        (5, 11, 5, [10, 11]),
        (7, 10, 5, [10]),
        (10, 10, 5, []),
        (0, 10, None, [10]),
        (10, 10, None, []),
        (0, 3, 5, [3]),
        (11, 11, 5, []),
    ],
)
def test_when_checkpoints_are_saved(
    asked: Asker, done: int, total: int, step: int | None, at: list[int]
) -> None:
    config = asked("gpt2", f"checkpoint.save_interval={step or 'null'}").config
    assert list(checks.saves(config, done, total)) == at


def test_an_unknown_program_has_no_forecast(asked: Asker) -> None:
    assert asked("simple", "resources.workdir=x").on(Machine(folders=(Folder("/x", "y"),))) == []


def test_a_broken_newest_checkpoint_is_a_warning(asked: Asker) -> None:
    broken = (("/c/iter_0000900", "no .metadata"),)
    (finding,) = asked("gpt2").on(Machine(load=Saved(500, broken)))
    assert "/c/iter_0000900: no .metadata" in finding.what
    assert "iteration 500" in finding.why
    assert not finding.refuse


def test_a_folder_with_broken_ones_alone_is_refused(asked: Asker) -> None:
    (finding,) = asked("gpt2").on(Machine(load=Saved(None, (("/c/iter_1", "empty"),))))
    assert finding.refuse
    assert asked("gpt2").on(Machine(load=Saved(None))) == []
    assert asked("gpt2").on(Machine(load=Saved(10))) == []


def test_small_sizes_are_told_in_megabytes(asked: Asker) -> None:
    folder = Folder("/x", "checkpoint.save", free=10**6)
    (finding,) = asked("gpt2-tiny", "checkpoint.save=/x", "model.hidden_size=128").on(
        Machine(folders=(folder,))
    )
    assert finding.what.endswith("checkpoint.save: 1 MB free for /x")
    assert finding.why == "One checkpoint takes about 6 MB: weights and optimizer."
