"""Whether a GPU can run what torch was compiled for."""

from __future__ import annotations

import pytest

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
