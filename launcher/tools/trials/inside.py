"""Facts about the image that this text runs in: `python3 -c TEXT NAME…`, a line of JSON for each.

It needs nothing but Python, so that any base can be asked. A fact is a function here: its value is
a text, None is that there is no such thing, and an exception is a failure in a line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import warnings
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HELPERS = ("megatron.core.datasets.helpers_cpp", "megatron.core.datasets.helpers")


def operating_system() -> str | None:
    """The distribution as matrix.yaml writes it: ubuntu 22.04."""
    with open("/etc/os-release", encoding="utf-8") as file:
        found = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', file.read(), re.MULTILINE))
    return f"{found['ID']} {found['VERSION_ID']}"


def python() -> str | None:
    """3.10.12."""
    return "{}.{}.{}".format(*sys.version_info[:3])


def cuda() -> str | None:
    """The toolkit's version, by the image's variable, its own file, or what torch was built for."""
    if version := os.environ.get("CUDA_VERSION"):
        return version
    try:
        with open("/usr/local/cuda/version.json", encoding="utf-8") as file:
            return str(json.load(file)["cuda"]["version"])
    except OSError:
        return _torch_was_built_for_cuda()


def driver() -> str | None:
    """The driver that the image was made with: it runs on that and newer ones."""
    return os.environ.get("CUDA_DRIVER_VERSION")


def cudnn() -> str | None:
    """cuDNN's version, as the image states it for its own, else torch's number: 90300 is 9.3.0."""
    if (stated := _stated("cudnn", "CUDNN_VERSION")) or not _torch_was_built_for_cuda():
        return stated
    number = importlib.import_module("torch.backends.cudnn").version() or 0
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}" if number else None


def nccl() -> str | None:
    """NCCL's version, as the image states it for its own, else torch's."""
    if (stated := _stated("nccl", "NCCL_VERSION")) or not _torch_was_built_for_cuda():
        return stated
    return ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))


def extension() -> str | None:
    """The compiled helpers that load where no compiler can be found."""
    if _version("megatron-core") is None:
        return None
    error: Exception | None = None
    before = dict(os.environ)
    os.environ["PATH"] = ""
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)
    try:
        for name in HELPERS:
            try:
                found = str(importlib.import_module(name).__file__)
            except ModuleNotFoundError as missing:
                error = missing
                continue
            if found.endswith(".so"):
                return os.path.basename(found)
    finally:  # other facts may need a program
        os.environ.clear()
        os.environ.update(before)
    raise error or ImportError(f"no compiled module among {', '.join(HELPERS)}")


def training() -> str | None:
    """Whether megatron.training imports, where the image has it."""
    if _version("megatron-core") is None or not importlib.util.find_spec("megatron.training"):
        return None
    return str(importlib.import_module("megatron.training").__name__)


def gpus() -> str | None:
    """The GPUs that torch sees: 2 × NVIDIA H100 80GB HBM3."""
    if not _torch_was_built_for_cuda():
        return None
    cuda = importlib.import_module("torch.cuda")
    names = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    told = [f"{names.count(name)} × {name}" for name in sorted(set(names))]
    return ", ".join(told) or None


def transformer_engine_layer() -> str | None:
    """A layer of Transformer Engine, forward and backward on a GPU."""
    if _version("transformer-engine") is None or gpus() is None:
        return None
    engine = importlib.import_module("transformer_engine.pytorch")
    return _runs(engine.LayerNormLinear(64, 64, device="cuda"))


def apex_layer() -> str | None:
    """A layer of Apex, forward and backward on a GPU."""
    if _version("apex") is None or gpus() is None:
        return None
    return _runs(importlib.import_module("apex.normalization").FusedLayerNorm(64).cuda())


def _runs(layer: Callable[..., object]) -> str:
    framework = importlib.import_module("torch")
    out = layer(framework.randn(16, 64, device="cuda", requires_grad=True))
    out.sum().backward()  # type: ignore[attr-defined]
    framework.cuda.synchronize()
    return "runs"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _stated(library: str, variable: str) -> str | None:
    """The version of the image's own library by its variable: of 2.16.2-1, 2.16.2+cuda12.0, 2.16.2.

    None where torch has one from a package beside it, nvidia/nccl: it loads that.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        packages = os.path.dirname(os.path.dirname(spec.origin))
        own = os.path.isdir(os.path.join(packages, "nvidia", library, "lib"))
        if own and _torch_was_built_for_cuda():
            return None
    return re.split("[-+]", os.environ.get(variable, ""))[0] or None


def _torch_was_built_for_cuda() -> str | None:
    if _version("torch") is None:
        return None
    return str(importlib.import_module("torch").version.cuda or "") or None


FACTS: dict[str, Callable[[], str | None]] = {
    "os": operating_system,
    "python": python,
    "cuda": cuda,
    "driver": driver,
    "cudnn": cudnn,
    "nccl": nccl,
    "torch": partial(_version, "torch"),
    "transformer_engine": partial(_version, "transformer-engine"),
    "apex": partial(_version, "apex"),
    "flash_attention": partial(_version, "flash-attn"),
    "megatron_core": partial(_version, "megatron-core"),
    "extension": extension,
    "training": training,
    "gpus": gpus,
    "transformer_engine_layer": transformer_engine_layer,
    "apex_layer": apex_layer,
}


def ask(name: str) -> dict[str, object]:
    """A fact's value, or why it failed, and the warnings that came with it, each once."""
    found: dict[str, object] = {"name": name}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found["value"] = FACTS[name]()
        except Exception as error:  # whatever an image's packages raise is the finding
            found["error"] = f"{type(error).__name__}: {error}".strip()
    told = (f"{one.category.__name__}: {one.message}".strip().splitlines()[0] for one in caught)
    return {**found, "warnings": list(dict.fromkeys(told))}


def main(names: list[str]) -> None:
    """A line for each fact as it is found; what packages print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for name in names:
            print(json.dumps(ask(name)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
