"""Row cpu-3.13, for releases that no older Python has: on Debian 13's torch, and on a newer one."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.engine import acquire
from launcher.images.engine.acquire import BaseNames
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.schema import caution, misfit
from launcher.images.sources.fetch import wheels
from launcher.tools.trials import trial_report
from launcher.tools.trials.trials import TrialPlace, entrypoint
from tests.conftest import NAMES, CpuImages
from tests.e2e.command import base_with, built, in_image, launched, matrix_folder, tarred
from tests.e2e.test_image import CALL_HELPERS

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

# Where no torch for the CPU can be had, PyPI's for CUDA 13 is one download of 527 MB; with CUDA's
# libraries it would be 2.5 GB.
TORCH = "2.13.0"
WHEEL = "a3a9a21312872af8a26950b2c15680335a386a1f56ed03e780653d78b9607e9e"
FOR_CUDA = f"torch=={TORCH} --hash=sha256:{WHEEL}"
# Makes libraries with the names and functions that torch's own want of CUDA's; each function
# returns 100, cudaErrorNoDevice.
STAND_INS = r"""
set -e
mkdir /unpacked /stand-ins
python3 -m zipfile -e /wheel/*.whl /unpacked
cd /unpacked/torch/lib
nm -D --undefined-only *.so* | sed -nE 's/^ +[Uw] ((__cuda|cu|nccl|nv)[A-Za-z]\w*)(@.*)?$/\1/p' |
  sort -u | sed 's/.*/int &(void) { return 100; }/' > /functions.c
gcc -shared -w -o /stand-ins/libstand-in.so -Wl,-soname,libstand-in.so /functions.c
for name in $(readelf -d *.so* | sed -nE 's/.*NEEDED.*\[(lib(cu|nv|nccl)[^]]*)\]/\1/p' | sort -u |
              grep -v '^libcuda\.'); do
  gcc -shared -o "/stand-ins/$name" "-Wl,-soname,$name" -Wl,--no-as-needed \
    -L/stand-ins -lstand-in -Wl,-rpath,'$ORIGIN'
done
"""
LINK = "echo /usr/local/lib/stand-ins > /etc/ld.so.conf.d/stand-ins.conf && ldconfig"


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
def newer(
    engine: DockerClient, site: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuImages]:
    """Images of the row as it is; its torch is PyPI's for CUDA where there is none for the CPU."""
    bases = acquire.bases(engine, load_matrix(), TAG, site, Progress())
    (torch,) = [pin for pin in load_lock().packages[TAG] if pin.startswith("torch==")]
    try:
        wheels([torch], ROW.python, site)
    except BuildError:
        base = with_stand_ins(engine, bases, site)
        own = other_torch(site, tmp_path_factory.mktemp("newer"), torch)
        yield CpuImages(engine, own, replace(bases, base=base), TAG)
        engine.images.remove(base, force=True)
    else:
        yield CpuImages(engine, site, bases, TAG)


def with_stand_ins(engine: DockerClient, bases: BaseNames, site: Settings) -> str:
    """The row's base with stand-ins for CUDA's libraries, which torch for CUDA can't do without."""
    try:
        (wheel,) = wheels([FOR_CUDA], ROW.python, site)
    except BuildError as error:
        pytest.skip(f"no torch {TORCH} for Python {ROW.python}: {error.problem}")
    volumes = {str(wheel.parent): {"bind": "/wheel", "mode": "ro"}}
    command = ["sh", "-c", STAND_INS]
    made = engine.containers.create(bases.builder, command, network_mode="none", volumes=volumes)
    try:
        made.start()
        assert made.wait()["StatusCode"] == 0, made.logs().decode()
        archive = b"".join(made.get_archive("/stand-ins")[0])
    finally:
        made.remove(force=True)
    name = f"{NAMES}-debian:13-without-cuda"
    text = f"FROM {bases.base}\nADD stand-ins.tar /usr/local/lib/\nRUN {LINK}\n"
    built(engine, text, name, {"stand-ins.tar": archive})
    return name


def other_torch(site: Settings, folder: Path, torch: str) -> Settings:
    """The site with a matrix whose row has PyPI's torch in place of the pin `torch`."""
    packages = [one for one in ROW.packages if not one.startswith("torch")]
    matrix = matrix_folder(
        folder, {TAG: {"torch": TORCH, "packages": [*packages, f"torch=={TORCH}"]}}
    )
    lock = matrix.with_suffix(".lock")
    text = lock.read_text()
    assert text.count(torch) == 1
    lock.unlink()
    lock.write_text(text.replace(torch, FOR_CUDA))
    return replace(site, matrix=matrix)


@pytest.fixture(scope="module")
def before(images: CpuImages, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What the presets' losses are with the last release that an older Python has."""
    place = TrialPlace(tmp_path_factory.mktemp("before"), {"name": images.build(BEFORE)}, 0, 2, 600)
    return {preset: losses(place, preset) for preset in PRESETS}


def losses(place: TrialPlace, preset: str) -> list[float]:
    """The training losses of the first steps of a preset."""
    training = {"train_iters": 5, "min_lr": 1e-3}
    config = {"extends": preset, "training": training, "logging": {"log_interval": 1}}
    found = of_steps(place.run(preset, config, 2).metrics)
    assert [*found] == [*range(1, 6)]
    return [*found.values()]


def of_steps(metrics: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """The training losses by their step."""
    return {int(one["iteration"]): float(one["loss"]) for one in metrics if one["kind"] == "step"}


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


def test_the_table_of_results_has_what_the_row_does(newer: CpuImages, tmp_path: Path) -> None:
    """Its releases were in no table: build, import, training, and loading in another layout.

    What this writes beside its matrix is what docs/compat.json has.
    """
    instead = ["--base", newer.bases.base, "--builder", newer.bases.builder]
    releases = [part for version in (BEFORE, *NEW) for part in ("--megatron", version)]
    launched(
        *("matrix", "compat", TAG, *releases, *instead, "--write", "-o", str(tmp_path)),
        LAUNCHER_MATRIX=str(newer.site.matrix),
    )
    seen, committed = (
        {one.cell: one.told for one in trial_report.load_committed(root) if one.tag == TAG}
        for root in (newer.site.matrix.parent, ROOT)
    )
    assert seen == committed


@pytest.mark.parametrize(
    "megatron", [one for one in NEW if caution(ON_TORCH_2_6, load_matrix().releases[one])]
)
def test_a_text_trains_in_one_layout_and_goes_on_in_another(
    newer: CpuImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatron: str
) -> None:
    """On Debian's torch these releases load nothing; by older rules `<|endoftext|>` is 7 tokens."""
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.jsonl"
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    assert not [page for page in pages if "<|endoftext|>" in page]
    lines = (json.dumps({"text": f"{page}<|endoftext|>{page}"}) for page in pages)
    text.write_text("\n".join(lines))
    place = TrialPlace(tmp_path, {"name": newer.build(megatron)}, 0, 2, 600)

    def trained(name: str, steps: int, tensor: int, **more: Any) -> dict[int, float]:
        config = {
            "extends": "llama-tiny",
            "model": {"make_vocab_size_divisible_by": 256},  # a table of one size in both layouts
            "data": {"text": [str(text)], "split": "100,0,0"},
            "training": {"train_iters": steps, "lr_decay_style": "constant"},
            "parallel": {"tensor_model_parallel_size": tensor},
            "logging": {"log_interval": 1, "eval_iters": 0},
        }
        return of_steps(place.run(name, config | more, tensor).metrics)

    kept = {"checkpoint": {"save": "kept", "load": "kept", "save_interval": 10}}
    whole, first = trained("whole", 14, 2), trained("first", 10, 2, **kept)
    then = trained("then", 14, 1, **kept)
    assert [*first, *then] == [*whole] == [*range(1, 15)]
    assert [*first.values(), *then.values()] == pytest.approx([*whole.values()], abs=1e-4)
    assert whole[14] < whole[1] - 1
    (tokens,) = (tmp_path / "cache/data").glob("*.bin")
    assert np.count_nonzero(np.fromfile(tokens, np.uint16) == 50256) == 2 * len(pages)
