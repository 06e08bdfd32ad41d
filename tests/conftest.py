"""What the tests that need a real engine share: the engine, a base, the CPU image."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from launcher.base.screen import Progress
from launcher.base.settings import Settings, settings

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytest_plugins = ["tests.machines", "tests.plans"]

# The same examples every time, so that what fails there fails here; search looks further. How long
# they take depends on what the machine does beside.
unhurried = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.register_profile("same", unhurried, derandomize=True, max_examples=25)
hypothesis_settings.register_profile("long", unhurried, derandomize=True, max_examples=300)
hypothesis_settings.register_profile("search", unhurried)
hypothesis_settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A launcher that is started must not compile all its modules: 0.4 s of CPU time, 3000 times.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's background jobs are deaf to SIGINT, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
KEPT_OF_BUILDS = 6_000_000_000  # bytes of layer cache, for the next time
NAMES = "launchpad-test"  # of the images that tests make, beside the user's


def missing(*names: str) -> list[str]:
    """Those modules that can't be imported here."""
    found = []
    for name in names:
        with suppress(ModuleNotFoundError):
            found += [name] if importlib.util.find_spec(name) else []
    return [name for name in names if name not in found]


@pytest.fixture(scope="session", autouse=True)
def _runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The records of the tests' runs are not the user's, and their nodes wait for one another."""
    os.environ["LAUNCHER_RUNS"] = str(tmp_path_factory.mktemp("runs"))
    os.environ["LAUNCHER_ALL_REDUCE_SECONDS"] = "300"


@pytest.fixture(scope="session")
def site() -> Settings:
    """The settings of this machine: its cache, and the matrix of this checkout."""
    return settings()


@pytest.fixture
def empty_site(tmp_path: Path) -> Settings:
    """Settings with a cache of their own and no index beside the user's."""
    own = [tmp_path / name for name in ("runs", "extras")]
    return Settings(tmp_path / "cache", ROOT / "matrix.yaml", "", "https://github.com/", *own)


@pytest.fixture(scope="session")
def engine(site: Settings) -> Iterator[DockerClient]:
    """A real engine: the one that answers, else a private one. DOCKER_HOST points to it.

    Workers share it, and the last one tidies up.
    """
    from launcher.images.engine.acquire import any_engine
    from launcher.images.engine.connect import engine_host

    site.cache.mkdir(parents=True, exist_ok=True)
    with (
        any_engine(site.cache / "engine", Progress()) as client,
        open(site.cache / "tests", "w") as used,
    ):
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = engine_host(client)
        fcntl.flock(used, fcntl.LOCK_SH)
        yield client
        with suppress(BlockingIOError):
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tidy(client, images=True)
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before


def tidy(client: DockerClient, images: bool = False) -> None:
    """Bound what builds leave in an engine of ours: it would fill the user's cache folder.

    images: remove images without a name too. Another worker's build has such ones until it ends.
    """
    from launcher.images.engine.connect import is_private

    if is_private(client):
        if images:
            client.images.prune()
        client.api.prune_builds(keep_storage=KEPT_OF_BUILDS)


@pytest.fixture(scope="session")
def bases(engine: DockerClient, site: Settings) -> BaseNames:
    """The base and builder of the cpu row, or their stand-in where no registry is in reach."""
    from launcher.images.engine import acquire
    from launcher.images.matrix.matrix_file import load_matrix

    return acquire.bases(engine, load_matrix(), "cpu", site, Progress())


@pytest.fixture(scope="session")
def python_image(bases: BaseNames) -> str:
    """A small image with python3, for what needs any container at all."""
    return bases.base


@dataclass(frozen=True)
class CpuImages:
    """Builds a row for the CPU with any release, once each."""

    client: DockerClient
    site: Settings
    bases: BaseNames
    tag: str = "cpu"

    def build(
        self,
        megatron: str | None = None,
        checkout: Path | None = None,
        extras: tuple[str, ...] = (),
    ) -> str:
        """The image's name."""
        from launcher.images.builder.image import BuildRequest, Builds

        names = (self.bases.base, self.bases.builder)
        request = BuildRequest(self.tag, megatron, checkout, *names, extras=extras)
        return Builds(self.client, self.site, Progress(), NAMES).build(request).names[0]


@pytest.fixture(scope="session")
def cpu_images(engine: DockerClient, site: Settings, bases: BaseNames) -> CpuImages:
    """Images of the cpu row."""
    return CpuImages(engine, site, bases)


SCOPES = {
    "trained": "data example trained payload watchdog",
    "runs": "compose compose_create debian13 faults shell source_mount",
    "inside": "train_in_image weights_in_image doctor",
    "slurm": "slurm",
    "hours": "nvcc arm64",
}
"""The files that train in the CPU image, those whose runs are started, stopped and killed, those
that run again in the CPU image, Slurm's, and what `make test-long` compiles or emulates for an
hour; the others that need an engine make and count images."""

ORDER = ["images", *SCOPES]
"""What takes longest comes first, and the small files of the other tests last."""


@cache
def scope(file: Path) -> str:
    """The files that one worker runs one after the other, for they share what an engine has."""
    if "pytest.mark.engine" not in file.read_text(encoding="utf-8"):
        return str(file)
    name = file.stem.removeprefix("test_")
    return next((one for one, files in SCOPES.items() if name in files.split()), "images")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that need an engine first."""

    def place(item: pytest.Item) -> int:
        found = scope(item.path)
        return ORDER.index(found) if found in ORDER else len(ORDER)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes the next one of ORDER, and then all take file by file.

    Where --dist names another way, as inside an image, that is taken.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(config.rootpath / nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test that is skipped for lack of root has failed."""
    report = yield
    if report.skipped and os.environ.get("CI") and os.geteuid() != 0:
        reason = str(report.longrepr)
        if "needs root" in reason:
            report.outcome, report.longrepr = "failed", f"CI is set, and it was skipped: {reason}"
    return report


passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each test that ran to its end and passed."""
    if report.when == "call" and report.passed:
        passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """All skipped is a failure as nothing collected is."""
    if exitstatus == 0 and not passed and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
