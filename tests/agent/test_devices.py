"""Whether a GPU can run what torch was compiled for."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from launcher.agent.ranks import devices
from launcher.agent.ranks.devices import able

VOLTA, AMPERE, ADA, HOPPER, BLACKWELL = (7, 0), (8, 0), (8, 9), (9, 0), (12, 0)


@pytest.mark.parametrize(
    ("capability", "arch_list", "expected"),
    [
        (AMPERE, "sm_80", True),
        (ADA, "sm_80", True),
        (ADA, "sm_86 sm_90", True),
        (AMPERE, "sm_86", False),
        (HOPPER, "sm_80", False),
        (HOPPER, "sm_80 compute_80", True),
        (VOLTA, "sm_80 compute_80", False),
        (VOLTA, "sm_70 sm_90", True),
        (BLACKWELL, "sm_80 sm_90 sm_100", False),
        (BLACKWELL, "sm_90 compute_90", True),
        (BLACKWELL, "sm_120", True),
        ((12, 1), "sm_120", True),
        (HOPPER, "sm_90a", True),
        (BLACKWELL, "sm_90a compute_90a", False),
        ((10, 3), "sm_100f", True),
        ((10, 3), "sm_100a", False),
        (BLACKWELL, "sm_100f compute_100f", False),
        (HOPPER, "gfx90a gfx942", True),
        (HOPPER, "", True),
    ],
)
def test_able(capability: tuple[int, int], arch_list: str, expected: bool) -> None:
    assert able(capability, arch_list.split()) == expected


def test_the_check_asks_torch_for_nothing_that_makes_a_cuda_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A context would take a GPU in exclusive mode from the rank that starts beside the check.

    A stand-in for torch: what it has gives a device's properties, for which torch makes none.
    """
    known = {"get_device_name": lambda number: "a GPU", "get_arch_list": lambda: ["sm_90"]}
    known |= {"device_count": lambda: 1, "get_device_capability": lambda number: HOPPER}
    monkeypatch.setattr(devices.signal, "signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**known)))
    devices.main()
    told = json.loads(capsys.readouterr().out)
    assert told == {"devices": [["a GPU", [*HOPPER]]], "arch_list": ["sm_90"]}
