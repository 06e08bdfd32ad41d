"""Nine rows on nine bases: one compilation, and little more than one cold build."""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from bench.measure import Figure
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.matrix.matrix_file import load_matrix

if TYPE_CHECKING:
    from docker import DockerClient

NAME = "launchpad-bench"
STANDIN = "megatron-launchpad.standin"


class Counting(Progress):
    """Counts how often the compiler ran: its step prints a line, which a cached one doesn't."""

    compilations = 0

    def show(self, text: str) -> None:
        """Count the line that the build stage prints before it compiles."""
        self.compilations += "stage: compiling" in text
        super().show(text)


def figures(client: DockerClient, site: Settings, base: str, builder: str) -> list[Figure]:
    """Stand-ins for the NGC bases: the same rows with the stand-in's Python, from an sdist."""
    tags = load_matrix().usual
    with tempfile.TemporaryDirectory() as folder:
        site = Settings(
            site.cache, _matrix(Path(folder), client, tags, base), "", "", site.runs, site.extras
        )
        cold, all_nine, again, compilations, images = _build(client, site, tags, builder)
    for found in client.images.list(NAME):
        client.images.remove(found.id, force=True)
    return [
        Figure("nine rows, images that are not their own", 9 - images, 0, ""),
        Figure("nine rows, compilations beyond one", compilations - 1, 0, ""),
        Figure("nine rows, of one cold build", all_nine / cold, 2, "x"),
        Figure("nine rows again, nothing changed", again, 3, "s"),
    ]


def _build(
    client: DockerClient, site: Settings, tags: list[str], builder: str
) -> tuple[float, float, float, int, int]:
    """Seconds of one cold build, of all nine cold, and of all nine again; the two counts."""
    started = time.perf_counter()
    Builds(client, site, Counting(), NAME).build(
        BuildRequest(tags[0], builder=builder, no_cache=True)
    )
    cold = time.perf_counter() - started

    progress = Counting()
    started = time.perf_counter()
    builds = Builds(client, site, progress, NAME)
    first = BuildRequest(tags[0], builder=builder, no_cache=True)
    built = [
        builds.build(first),
        *(builds.build(BuildRequest(t, builder=builder)) for t in tags[1:]),
    ]
    all_nine = time.perf_counter() - started

    started = time.perf_counter()
    builds = Builds(client, site, Progress(), NAME)
    reused = [builds.build(BuildRequest(tag, builder=builder)).reused for tag in tags]
    assert all(reused)
    again = time.perf_counter() - started
    return cold, all_nine, again, progress.compilations, len({one.id for one in built})


def _matrix(folder: Path, client: DockerClient, tags: list[str], base: str) -> Path:
    """A matrix whose NGC rows have stand-in bases; beside it lock, template and patches."""
    data = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    for tag in tags:
        text = f"FROM {base}\nLABEL {STANDIN}=bench\nENV STANDIN={tag}\n"
        client.images.build(fileobj=io.BytesIO(text.encode()), tag=f"{NAME}:base-{tag}", rm=True)
        own = {"base": f"{NAME}:base-{tag}", "python": "3.11"}
        data["rows"][tag] |= {**own, "megatron": "0.10.0", "source": "sdist"}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    for name in ("matrix.lock", "Dockerfile.template", "patches"):
        (folder / name).symlink_to(ROOT / name)
    return folder / "matrix.yaml"
