"""GPUs that aren't there, aren't able, aren't free, or that the engine can't give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.machine import gpus
from launcher.machine.machine import Machine, Use
from launcher.plan.gpus import Gpus, parse_gpus
from tests.machine.conftest import ENGINE, GB, Asker, card

V100 = card(name="Tesla V100-SXM2-32GB", total=34 * GB, capability=(7, 0))
TWO = (card(0), card(1))


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
    assert [gpu.index for gpu in gpus.chosen(parse_gpus(request_), TWO)] == indices


def test_all_makes_all_visible() -> None:
    assert gpus.chosen(Gpus(2, everything=True), TWO) == list(TWO)


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
