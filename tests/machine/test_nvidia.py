"""What nvidia-smi prints, with a stand-in for it on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.machine import gather
from launcher.machine.machine import Gpu, Use

MIB = 1 << 20
GPUS = """\
0, GPU-1a2b, NVIDIA H100 80GB HBM3, 81559, 1024, 9.0, 550.54.15
1, GPU-3c4d, "Odd, with a comma", 16384, 0, [N/A], 550.54.15
half a row
"""
USES = "GPU-1a2b, 4242, 1000\nGPU-1a2b, 4243, [N/A]\n"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an nvidia-smi on PATH that runs a shell script."""

    def put(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def test_gpus_and_their_users(stand_in, tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "uses").write_text(USES)
    stand_in(f'case "$1" in *query-gpu*) cat {tmp_path}/gpus;; *) cat {tmp_path}/uses;; esac')
    assert gather.nvidia_gpus() == (
        Gpu(0, "GPU-1a2b", "NVIDIA H100 80GB HBM3", 81559 * MIB, 1024 * MIB, (9, 0), "550.54.15"),
        Gpu(1, "GPU-3c4d", "Odd, with a comma", 16384 * MIB, 0, None, "550.54.15"),
    )
    assert gather.nvidia_uses() == (Use("GPU-1a2b", 4242, 1000 * MIB), Use("GPU-1a2b", 4243, None))


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo No devices were found; exit 6", ()),
        ("echo 'NVIDIA-SMI has failed' ; exit 9", None),
        (  # an older driver doesn't know the capability
            'case "$1" in *compute_cap*) exit 2;; *) echo "0, GPU-1, Tesla T4, 15109, 0, 450.80";; '
            "esac",
            (Gpu(0, "GPU-1", "Tesla T4", 15109 * MIB, 0, None, "450.80"),),
        ),
    ],
)
def test_other_drivers(stand_in, script: str, gpus: tuple[Gpu, ...] | None) -> None:
    stand_in(script)
    assert gather.nvidia_gpus() == gpus
    assert gather.nvidia_uses() == ()


def test_no_driver_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather.nvidia_gpus() is None
