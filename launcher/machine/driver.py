"""Which NVIDIA driver carries which CUDA."""

from __future__ import annotations

import re

from launcher.machine.finding import Finding

# CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions", Linux x86_64:
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
TOOLKIT_DRIVER = {
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
}
"""The driver that each toolkit was released with: of its first version, updates included."""

LEAST_DRIVER = {11: "450", 12: "525.60.13", 13: "580"}
"""Below these a major version of CUDA doesn't run.

https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

DATA_CENTRE = re.compile(
    r"\bTesla\b|\b(P4|P40|P100|V100|T4|A2|A10|A16|A30|A40|A100|A800|L2|L4|L20|L40S?|H20|H100|H200|H800"
    r"|GH200|B100|B200|B300|GB200|GB300)\b"
)
"""Names of the GPUs that forward compatibility is for: those of data centres.

https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html
"""


def version(text: str) -> tuple[int, ...]:
    """(550, 54, 15) of '550.54.15'."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def check(driver: str, cuda: str, gpu: str) -> Finding | None:
    """What is wrong with `driver` for an image with `cuda`, on a GPU of the name `gpu`."""
    have, (major, minor) = version(driver), (*version(cuda), 0)[:2]
    least, own = LEAST_DRIVER.get(major), TOOLKIT_DRIVER.get((major, minor))
    what = f"driver {driver}; the image has CUDA {cuda}"
    if least and have < version(least):
        carried = bool(DATA_CENTRE.search(gpu))
        return Finding(
            what,
            f"CUDA {major} needs driver {least} or newer"
            + (f"; on {gpu} the image's forward compatibility may carry it." if carried else "."),
            f"Install driver {own or least} or newer, or take an image with an older CUDA.",
            refuse=not carried,
        )
    if own and have < version(own):
        return Finding(
            what,
            f"CUDA {major}.{minor} came with {own}; older ones carry it by minor version "
            "compatibility, without what is new in it.",
            f"Install driver {own} or newer if something isn't supported.",
            refuse=False,
        )
    return None
