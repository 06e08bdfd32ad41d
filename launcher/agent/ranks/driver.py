"""The GPU driver's library in a container: for Triton, and where a newer one lies unused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.agent.series import numbers

LIBRARY = "libcuda.so.1"
BOUND = "/.singularity.d/libs"
"""Where Apptainer puts the node's driver with --nv; the image's ldconfig doesn't know it."""

IN_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
TRITON = "TRITON_LIBCUDA_PATH"
"""The variable with the folder that Triton links with; without it, it asks ldconfig."""

PATH = "LD_LIBRARY_PATH"
COMPAT = "/usr/local/cuda/compat"
"""Where NVIDIA's images keep the libraries of a newer driver, for their entrypoint to use."""

LOADED = Path("/sys/module/nvidia/version")


def for_triton(environ: Mapping[str, str], folder: Path, bound: str = BOUND) -> dict[str, str]:
    """The variable by which Triton finds the driver under `apptainer --nv`; {} elsewhere.

    It names `folder`, which gets links, as Triton also looks for the name without a number.
    Raises `OSError`.
    """
    if environ.get(TRITON) or not any(environ.get(name) for name in IN_APPTAINER):
        return {}
    for where in (*environ.get(PATH, "").split(":"), bound):
        library = Path(where, LIBRARY)
        if where and library.exists():
            folder.mkdir()
            for name in (LIBRARY, "libcuda.so"):
                (folder / name).symlink_to(library)
            return {TRITON: str(folder)}
    return {}


def unused_compatibility(
    environ: Mapping[str, str], compat: str = COMPAT, loaded: Path = LOADED
) -> str:
    """What to say where the image has the libraries of a newer driver, and nobody uses them.

    That is so where its entrypoint isn't run: under Apptainer, and under pyxis by default. "" where
    the driver is new enough, or they are used.
    """
    try:
        driver = loaded.read_text().strip()
    except OSError:
        return ""
    used = {os.path.realpath(where) for where in environ.get(PATH, "").split(":") if where}
    for folder, version in _compatible(compat):
        if numbers(version) > numbers(driver) and os.path.realpath(folder) not in used:
            return (
                f"the driver is {driver}, and this image has the libraries of {version}, which its "
                f"entrypoint puts to use on data-centre GPUs; here it isn't run. Where CUDA finds "
                f"the driver too old, set in env: {PATH}: {folder}:{environ.get(PATH, '')}".rstrip(
                    ":"
                )
            )
    return ""


def _compatible(compat: str) -> Iterator[tuple[str, str]]:
    """The folders with a driver's library, and its version, which is the end of its name."""
    for path in sorted(Path(compat).glob("**/libcuda.so.*.*")):
        yield str(path.parent), path.name.removeprefix("libcuda.so.")
