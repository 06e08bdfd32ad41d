"""The distribution's packages, unpacked privately: whole, whatever is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.images.engine.private import packages

pytestmark = pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt")


def test_what_is_installed_is_unpacked_as_well(tmp_path: Path) -> None:
    """apt left it out: where Slurm or containerd was installed, the private copy had no part."""
    root = packages.unpack(tmp_path / "root", ["make"])  # which runs these tests
    assert (root / "usr/bin/make").is_file()


def test_only_what_every_system_has_counts_as_there(tmp_path: Path) -> None:
    text = packages._bare_system(tmp_path).read_text("utf-8")
    listed = {line.removeprefix("Package: ") for line in text.splitlines() if "Package: " in line}
    assert {"dpkg", "libc6", "bash"} <= listed
    assert not listed & {"make", "python3", "git", "docker.io", "slurmctld", "containerd", "runc"}
