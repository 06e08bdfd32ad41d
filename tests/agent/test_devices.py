"""GPUs: whether torch has code for one, the driver in a container, and a machine without any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.agent import cpu
from launcher.agent.ranks import devices, driver
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


INSIDE = {"APPTAINER_CONTAINER": "/shared/image.sif"}


@pytest.fixture
def bound(tmp_path: Path) -> Path:
    """A stand-in for the folder of the node's driver, as --nv makes it."""
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs/libcuda.so.1").write_text("the driver")
    return tmp_path / "libs"


@pytest.mark.parametrize("by_path", [False, True])
def test_triton_finds_the_driver_under_apptainer(
    bound: Path, tmp_path: Path, by_path: bool
) -> None:
    """It asked the image's ldconfig, or linked with libcuda.so, and neither knows the node's."""
    environ = INSIDE | ({"LD_LIBRARY_PATH": f":/nowhere:{bound}"} if by_path else {})
    where = str(tmp_path / "nowhere" if by_path else bound)
    found = driver.for_triton(environ, tmp_path / "driver", where)
    assert found == {"TRITON_LIBCUDA_PATH": str(tmp_path / "driver")}
    for name in ("libcuda.so", "libcuda.so.1"):
        assert (tmp_path / "driver" / name).read_text() == "the driver"


@pytest.mark.parametrize(
    "environ", [{}, INSIDE | {"TRITON_LIBCUDA_PATH": "/mine"}, INSIDE | {"LD_LIBRARY_PATH": "/a"}]
)
def test_else_nothing_is_set(tmp_path: Path, environ: dict[str, str]) -> None:
    """Outside of Apptainer, where the user has set it, and without --nv."""
    assert driver.for_triton(environ, tmp_path / "driver", str(tmp_path / "libs")) == {}
    assert not (tmp_path / "driver").exists()


@pytest.mark.parametrize(
    ("loaded", "path", "said"),
    [
        ("535.104.05", "", True),
        ("560.35.03", "", False),
        ("570.1", "", False),
        ("535.104.05", "COMPAT", False),
        (None, "", False),
    ],
)
def test_a_newer_drivers_libraries_that_nobody_uses_are_told(
    tmp_path: Path, loaded: str | None, path: str, said: bool
) -> None:
    """`apptainer exec` runs no entrypoint: CUDA found the driver too old, and nobody knew why."""
    folder = tmp_path / "compat/lib.real"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.560.35.03").touch()
    (tmp_path / "compat/lib").symlink_to(folder)
    if loaded:
        (tmp_path / "version").write_text(f"{loaded}\n")
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}/compat/lib"} if path else {}
    compat, version = str(tmp_path / "compat"), tmp_path / "version"
    told = driver.unused_compatibility(environ, compat, version)
    assert bool(told) == said
    if said:
        assert told.endswith(f"set in env: LD_LIBRARY_PATH: {folder}")


def test_a_gpus_properties_are_those_of_a_machine_without_one() -> None:
    """From 0.13 on, pretrain_gpt.py asks for them where TP is above 1: a NameError in torch."""
    torch = SimpleNamespace(cuda=SimpleNamespace(nvtx=SimpleNamespace()))  # a stand-in
    cpu._redirect_device_queries(torch)
    found = torch.cuda.get_device_properties("cuda:0")
    assert (found.name, found.major, found.minor) == ("CPU", 0, 0)
    assert found.total_memory > 1 << 20


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
