"""What a release needs of its base, asked of real images on a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import yaml

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import beside
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.matrix.load import load_matrix
from tests.conftest import NAMES
from tests.e2e.command import built, launcher, matrix_folder, refused
from tests.e2e.site import Site

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytestmark = pytest.mark.engine

PACKAGE = """FROM {}
LABEL megatron-launchpad.standin=test
RUN python3 -c "import sysconfig, pathlib; at = pathlib.Path(sysconfig.get_path('purelib')); \
at.mkdir(parents=True, exist_ok=True); info = at / '{}-{}.dist-info'; info.mkdir(); \
(info / 'METADATA').write_text('Name: {}\\\\nVersion: {}\\\\n'); (at / '{}.py').write_text('{}')"
"""


def base_with(engine: DockerClient, on: str, name: str, version: str, text: str = "") -> str:
    """A stand-in base with a package of this name and version, which is one module."""
    module = name.replace("-", "_")
    values = (on, module, version, name, version, module, text)
    tag = f"launchpad-test:{name}-{version}"
    built(engine, PACKAGE.format(*values), tag)
    return tag


@pytest.fixture(scope="module")
def builds(
    engine: DockerClient, site: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builds]:
    """Row 24.10 with this base's Python, and a release that needs of it what 0.19.0 does."""
    row = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    path = matrix_folder(tmp_path_factory.mktemp("matrix"), {"24.10": row})
    data = yaml.safe_load(path.read_text())
    data["releases"]["0.10.0"]["needs_base"] = data["releases"]["0.19.0"]["needs_base"]
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    made = Builds(engine, replace(site, matrix=path), Progress(), f"{NAMES}-needs")
    yield made
    for image in engine.images.list(f"{NAMES}-needs"):
        engine.images.remove(image.id, force=True)


def test_a_base_with_an_older_resiliency_ext_is_refused_before_anything_is_compiled(
    engine: DockerClient, builds: Builds, python_image: str, bases: BaseNames
) -> None:
    """Such an image was built, and each run in it ended at its first import."""
    assert load_matrix().releases["0.19.0"].needs_base
    env = {"LAUNCHER_MATRIX": str(builds.site.matrix)}
    for version, fits in (("0.5.0", False), ("0.6.0", True)):
        base = base_with(engine, python_image, "nvidia-resiliency-ext", version)
        if fits:
            image = builds.build(BuildRequest("24.10", base=base, builder=bases.builder)).id
            listed = beside.packages(image, builds.site) or {}
            assert listed["nvidia-resiliency-ext"] == version
            assert "megatron-core" in listed
            continue
        done = launcher(
            "image", "build", "24.10", "--base", base, "--builder", bases.builder, **env
        )
        refused(done, 122, f"{base}: has nvidia-resiliency-ext {version}", ">=0.6.0")
        assert "build [" not in done.stderr


RUN = """\
name: needs
image: {name: %s}
gpus: 0
program: gpt
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 16,
  max_position_embeddings: 16}
training: {micro_batch_size: 2, global_batch_size: 2, train_iters: 2, lr: 1.0e-3}
data: {mock: true, vocab_size: 100}
logging: {log_interval: 1, tensorboard_dir: board}
"""


def test_an_option_whose_package_the_image_has_starts_and_one_without_is_refused(
    here: Site, image: str
) -> None:
    """The CPU row has tensorboard and no wandb."""
    (here.folder / "run.yaml").write_text(RUN % image)
    assert here.start("run", "run.yaml", "--dry-run").ends() == 0  # and test_trained starts one
    more = ("--set", "logging.wandb_project=p", "--set", "logging.wandb_exp_name=e")
    for dry in ([], ["--dry-run"]):
        done = here.start("run", "run.yaml", *more, *dry)
        assert done.ends() == 121
        said = done.err
        assert "needs the Python package wandb, which isn't in" in said
        assert "pip install wandb" in said
    unknown = here.start(
        "run",
        "run.yaml",
        *more,
        "--set",
        "env.PYTHONPATH=/mine:/opt/megatron/lib:/opt/packages/lib",
    )
    assert unknown.ends() == 121
    assert "python3 has no wandb: " in repr(unknown)


@pytest.mark.parametrize(
    ("version", "torch", "said"),
    [
        ("1.1", "import nowhere", "No module named"),
        ("1.3", "raise OSError(chr(108)+chr(105)+chr(98)+chr(99)+chr(117)+chr(100)+chr(97))", ""),
    ],
)
def test_an_image_whose_megatron_cannot_be_imported_gets_no_name(
    engine: DockerClient,
    builds: Builds,
    python_image: str,
    bases: BaseNames,
    version: str,
    torch: str,
    said: str,
) -> None:
    """Of a stand-in for torch that fails as others do; for want of libcuda it is a note."""
    base = base_with(engine, python_image, "torch", version, torch)
    wanted = BuildRequest("24.10", base=base, builder=bases.builder)
    if not said:
        assert builds.build(replace(wanted, base=base)).names
        return
    with pytest.raises(BuildError, match=rf"megatron\.core can't be imported.*{said}"):
        builds.build(wanted)
