"""Drivers against the CUDA of an image."""

from __future__ import annotations

import pytest

from launcher.machine import driver
from launcher.machine.machine import Machine
from launcher.matrix.load import load_matrix
from tests.machine.conftest import Asker, card

H100, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


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
    finding = driver.check(have, cuda, gpu)
    assert (finding.refuse if finding else None) == refuse


def test_it_says_which_driver_is_needed(asked: Asker) -> None:
    old = Machine(gpus=(card(name=RTX, driver="515.65.01"),))
    (finding,) = asked("gpt2").on(old, cuda="12.6.2")
    assert finding.what == "driver 515.65.01; the image has CUDA 12.6.2"
    assert "525.60.13" in finding.why
    assert "560.28.03" in finding.mend
    assert asked("gpt2").on(old) == []


def test_every_cuda_of_the_usual_rows_is_known() -> None:
    matrix = load_matrix()
    found = {driver.version(matrix.rows[tag].cuda or "")[:2] for tag in matrix.usual}
    assert found
    assert found <= set(driver.TOOLKIT_DRIVER)


def test_newer_toolkits_come_with_newer_drivers() -> None:
    drivers = [driver.version(text) for _, text in sorted(driver.TOOLKIT_DRIVER.items())]
    assert drivers == sorted(drivers)
