"""What is asked upstream for the matrix, with a real registry, git repositories and an index."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from launcher.base.settings import Settings
from launcher.images.matrix.matrix_file import load_matrix
from tests.e2e.command import launcher
from tests.e2e.registry import Registry, serving
from tests.images.builder.conftest import INFO, commit_all

ROOT = Path(__file__).resolve().parents[2]
PYTORCH = "nvcr.io/nvidia/pytorch"
SETUP = 'Extension(\n    "megatron.core.datasets.helpers_cpp",\n)\n'
PROJECT = '[project]\nrequires-python = ">=3.12"\ndependencies = ["torch>=2.6.0", "numpy"]\n'
LABELS = {
    "org.opencontainers.image.ref.name": "ubuntu",
    "org.opencontainers.image.version": "24.04",
}
ENV = ["PYTORCH_BUILD_VERSION=2.14.0a0+4fdf77b", "CUDA_VERSION=13.4.0.012"]
STEP = {"created_by": "RUN |2 NVIDIA_PYTORCH_VERSION=99.02 PYVER=3.12 /bin/sh -c make # buildkit"}


@dataclass(frozen=True)
class Upstream:
    """Stand-ins under the names of the matrix, by the settings of a site.

    folder: of a copy of the matrix, of its lock, of git repositories and of an index
    """

    folder: Path
    registry: Registry

    @property
    def matrix(self) -> Path:
        return self.folder / "matrix.yaml"

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`launcher matrix …` at this site."""
        hosts = ("nvcr.io", "docker.io", "quay.io")
        at = self.registry.address
        return launcher(
            "matrix",
            *command,
            LAUNCHER_MATRIX=str(self.matrix),
            LAUNCHER_SETTINGS="/dev/null",
            LAUNCHER_CACHE=str(self.folder / "cache"),
            LAUNCHER_GIT_MIRROR=f"file://{self.folder}/git/",
            LAUNCHER_IMAGE_MIRRORS=",".join(f"{host}={at}/{host}" for host in hosts),
            LAUNCHER_TORCH_INDEX="",
            PIP_CONFIG_FILE="/dev/null",
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(self.folder / "index"),
        )

    def repository(self, name: str, files: dict[str, str], *tags: str) -> str:
        """A commit in a repository, with tags; its hash."""
        at = self.folder / "git" / f"{name}.git"
        for path, text in files.items():
            (at / path).parent.mkdir(parents=True, exist_ok=True)
            (at / path).write_text(text)
        commit = commit_all(at)
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for tag in tags:  # with an object of its own, which isn't the commit
            subprocess.run(["git", "-C", str(at), *who, "tag", "-m", "it", tag], check=True)
        return commit


@pytest.fixture
def upstream(site: Settings, tmp_path: Path) -> Iterator[Upstream]:
    """A registry, and a matrix; nothing else is there yet."""
    for name in ("matrix.yaml", "matrix.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("index", "served"):
        (tmp_path / name).mkdir()
    with serving(site.cache, tmp_path / "served") as registry:
        yield Upstream(tmp_path, registry)


def test_what_is_new_is_proposed_with_the_facts_that_are_stated(upstream: Upstream) -> None:
    """No fact is invented, and nothing that was in the file is written anew."""
    before, matrix = upstream.matrix.read_text(), load_matrix(upstream.matrix)
    newest = max(matrix.releases, key=lambda one: [*map(int, one.split("."))])
    patches = matrix.releases[newest].patches
    files = {
        "megatron/core/package_info.py": INFO.format(minor=99, patch=1),
        "setup.py": SETUP,
        "pyproject.toml": PROJECT,
    }
    commit = upstream.repository(
        "NVIDIA/Megatron-LM",
        files,
        "core_v0.99.0",
        "core_v0.99.1",
        "core_v0.99.2rc0",
        "core_v0.100",
    )
    (upstream.folder / "index/megatron_core-0.99.1.tar.gz").touch()
    (upstream.folder / "index/megatron_core-0.98.0-py3-none-any.whl").touch()
    apex = upstream.repository("NVIDIA/apex", {"setup.py": ""}, "99.02", "22.03")
    push, both = upstream.registry.image, ("linux/amd64", "linux/arm64")
    push(
        "nvcr.io/nvidia/pytorch",
        "99.02-py3",
        both,
        config={"Env": ENV, "Labels": LABELS},
        history=[STEP],
    )
    push("nvcr.io/nvidia/pytorch", "99.01-py3", both[:1], config={"Env": ENV, "Labels": LABELS})
    push("nvcr.io/nvidia/pytorch", "23.01-py3", both[:1])
    push("nvcr.io/nvidia/pytorch", "99.02-py3-igpu", both[:1])

    told = upstream.call("news")
    assert told.returncode == 0, told.stderr
    lines = {line.partition("  ")[0]: line for line in told.stdout.splitlines()}
    assert lines["megatron-core, package index"].endswith("new: 0.98.0 0.99.1")
    assert lines["Megatron-LM, git tags"].endswith("new: 0.99.1")
    assert lines["apex, git tags"].endswith("new: 99.02")
    assert lines[f"{PYTORCH}:*.*-py*"].endswith("new: 99.01-py3 99.02-py3")
    assert "no answer: git can't ask" in lines["transformer-engine, git tags"]
    assert "no such image (404)" in lines["docker.io/library/python:*.*-slim-bookworm"]
    assert upstream.matrix.read_text() == before
    assert upstream.call("news", "--check").returncode == 1

    done = upstream.call("news", "--write")
    assert done.returncode == 0, done.stderr
    after = upstream.matrix.read_text()
    assert {line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines())} == {
        " ",
        "+",
    }
    found = yaml.safe_load(after)
    assert found["releases"]["0.99.1"] == {
        "git": {"url": matrix.releases[newest].git.url, "commit": commit},
        "patches": patches,
        "extension": "megatron.core.datasets.helpers_cpp",
        "python": ">=3.12",
        "torch": ">=2.6.0",
        "sdist": True,
    }
    assert found["rows"]["99.02"] == {
        "base": f"{PYTORCH}:99.02-py3",
        "os": "ubuntu 24.04",
        "python": "3.12",
        "torch": "2.14.0a0+4fdf77b",
        "cuda": "13.4.0.012",
        "megatron": [name for name, one in matrix.releases.items() if one.git.is_named][-1],
        "platforms": [*both],
        "untried": True,
    }
    assert "  # New 0.98.0: at the package index; git has no tag of it" in after
    assert f"  # New {PYTORCH}:99.01-py3: its configuration doesn't state python" in after
    assert f"  # New apex-99.02: commit {apex}" in after
    assert {*found["rows"]} == {*matrix.rows, "99.02"}
    assert {*found["extensions"]} == {*matrix.extensions}
    assert [*found["releases"]][-1] == "0.99.1"
    assert upstream.call("news", "--write").returncode == 0
    assert upstream.matrix.read_text() == after


def test_what_upstream_says_and_is_no_fact_is_a_comment(upstream: Upstream) -> None:
    """Else an image could write keys of its own into the matrix."""
    env = ['PYTORCH_VERSION=2.14"\n    driver: "1', "PYVER=3.12"]
    config = {"Env": env, "Labels": LABELS}
    upstream.registry.image("nvcr.io/nvidia/pytorch", "99.02-py3", ["linux/amd64"], config=config)
    done = upstream.call("news", "--write")
    assert done.returncode == 0, done.stderr
    assert (
        f"  # New {PYTORCH}:99.02-py3: its configuration states no torch"
        in upstream.matrix.read_text()
    )
    assert load_matrix(upstream.matrix) == load_matrix()


def test_all_pages_of_a_repositorys_tags_are_read(upstream: Upstream) -> None:
    """The newest tag stands on the last page of many."""
    platform = ["linux/amd64"]
    digest = upstream.registry.image("nvcr.io/nvidia/pytorch", "00.01-py3", platform)
    tags = (
        upstream.registry.data
        / "docker/registry/v2/repositories/nvcr.io/nvidia/pytorch/_manifests/tags"
    )
    for number in range(2100):
        link = tags / f"10.{number:04}-py3/current/link"
        link.parent.mkdir(parents=True)
        link.write_text(digest)
    upstream.registry.image("nvcr.io/nvidia/pytorch", "99.12-py3", platform)
    assert "new: 99.12-py3\n" in upstream.call("news").stdout
