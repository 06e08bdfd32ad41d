"""A small stand-in for a Megatron checkout, wheels with nothing in them, and servers of them."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.images.sources import source

INFO = "MAJOR = 0\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that passes for Megatron 0.9.0 by its package_info.py."""
    path = tmp_path / "Megatron-LM"
    (path / "megatron/core").mkdir(parents=True)
    (path / "megatron/core/package_info.py").write_text(INFO.format(minor=9, patch=0))
    (path / "setup.py").write_text("print('setup')\n")
    return path


def commit_all(path: Path) -> str:
    """Commit all in `path`, a git repository of which any commit may be fetched; the commit."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    fetched = ["config", "uploadpack.allowAnySHA1InWant", "true"]
    for command in (["init", "-q"], fetched, ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(path), *command], check=True)
    return source.git(path, "rev-parse", "HEAD").strip()


def wheel(folder: Path, name: str, version: str, *needs: str, text: str = "") -> Path:
    """A wheel of one module, which is empty or has the text, with what it needs."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return made


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """A server on loopback; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
