"""Row cpu-3.13 on a Debian 13 with its own torch: releases that no older Python has."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import BuildError
from launcher.base.settings import ROOT, Settings
from launcher.images.engine.acquire import BaseNames
from launcher.images.engine.private.base import STANDIN_EPOCH, debian_base
from launcher.images.matrix.load import load_lock, load_matrix
from launcher.images.matrix.schema import caution, misfit
from launcher.images.sources.fetch import wheels
from launcher.tools.trials.trials import TrialPlace, entrypoint
from tests.conftest import NAMES, CpuImages
from tests.e2e.command import in_image, matrix_folder, tarred
from tests.e2e.test_image import CALL_HELPERS
from tests.e2e.test_needs import base_with

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]

TAG, BEFORE = "cpu-3.13", "0.16.1"
ROW = load_matrix().rows[TAG]
DEBIANS = {"packages": [], "torch": "2.6.0"}
ON_TORCH_2_6 = ROW.model_copy(update=DEBIANS)
NEW = [
    version
    for version, release in load_matrix().releases.items()
    if release.sdist and misfit(load_matrix().rows["cpu"], version, release)
]
PRESETS = [path.stem for path in sorted((ROOT / "launcher/presets").glob("*-tiny.yaml"))]
# Debian's torch is built without libuv; Megatron up to 0.16 imports setuptools.
BASE = """
FROM {}
ENV USE_LIBUV=0
COPY wheels /wheels
RUN python3 -m pip install --no-index --no-deps --break-system-packages /wheels/*.whl
"""


@pytest.fixture(scope="module")
def images(
    engine: DockerClient, site: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuImages]:
    """Images of the row without its packages, on a base that has them."""
    name, plain = f"{NAMES}-debian:13", f"{NAMES}-debian:13-plain"
    debian_base(engine, plain, STANDIN_EPOCH, ROW.python, more=["python3-torch"], say=print)
    pins = [pin for pin in load_lock().packages[TAG] if pin.startswith("setuptools==")]
    files = {f"wheels/{one.name}": one.read_bytes() for one in wheels(pins, ROW.python, site)}
    context = io.BytesIO(tarred({"Dockerfile": BASE.format(plain).encode(), **files}))
    engine.images.build(fileobj=context, custom_context=True, tag=name, rm=True)
    folder = matrix_folder(tmp_path_factory.mktemp("matrix"), {TAG: DEBIANS})
    own = replace(site, matrix=folder)
    yield CpuImages(engine, own, BaseNames(name, name), TAG)
    for image in (name, plain):
        engine.images.remove(image, force=True)


@pytest.fixture(scope="module")
def before(images: CpuImages, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What the presets' losses are with the last release that an older Python has."""
    place = TrialPlace(tmp_path_factory.mktemp("before"), {"name": images.build(BEFORE)}, 0, 2, 600)
    return {preset: losses(place, preset) for preset in PRESETS}


def losses(place: TrialPlace, preset: str) -> list[float]:
    """The training losses of the first steps of a preset."""
    training = {"train_iters": 5, "min_lr": 1e-3}
    config = {"extends": preset, "training": training, "logging": {"log_interval": 1}}
    records = place.run(preset, config, 2).metrics
    found = [float(one["loss"]) for one in records if one["kind"] == "step"]
    assert len(found) == 5
    return found


def test_a_base_with_an_older_resiliency_ext_is_refused_by_name(
    engine: DockerClient, images: CpuImages
) -> None:
    """`import megatron.core` asserts a newer one: each run would end there."""
    base = base_with(engine, images.bases.base, "nvidia-resiliency-ext", "0.5.0")
    older = replace(images, bases=BaseNames(base, images.bases.builder))
    with pytest.raises(BuildError, match=r"nvidia-resiliency-ext 0\.5\.0: .* >=0\.6\.0"):
        older.build("0.19.2")
    engine.images.remove(base, force=True)


@pytest.mark.parametrize("megatron", NEW)
def test_a_release_builds_imports_and_trains_as_the_one_before(
    engine: DockerClient,
    images: CpuImages,
    before: dict[str, list[float]],
    tmp_path: Path,
    megatron: str,
) -> None:
    """0.18 and 0.19 couldn't be imported without Triton, and none had been run by our program."""
    name = images.build(megatron)
    record = json.loads(in_image(engine, name, "cat", "/opt/megatron/build.json"))
    assert record["wheel"]["name"] == f"megatron_core-{megatron}-cp313-cp313-linux_x86_64.whl"
    assert "/opt/megatron/lib" in in_image(engine, name, "python3", "-c", CALL_HELPERS)
    in_image(engine, name, "python3", "-c", "import megatron.core, megatron.training")
    place = TrialPlace(tmp_path, {"name": name}, 0, 2, 600)
    if caution(ON_TORCH_2_6, load_matrix().releases[megatron]) is None:
        entrypoint(place)  # saves, and loads in another layout
    for preset in PRESETS:
        assert losses(place, preset) == pytest.approx(before[preset], abs=1e-5), preset
