"""The download cache: content-addressed, and every use of a file checks its hash."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from launcher.build import fetch
from launcher.errors import BuildError
from launcher.matrix.recipe import sha256_of_pin
from launcher.settings import Settings


def cache_file(site: Settings, folder: Path, content: bytes, name: str = "a-1.whl") -> str:
    """Store a file with `content`; its pin."""
    path = folder / name
    path.write_bytes(content)
    fetch.store(path, site)
    return f"a==1 --hash=sha256:{hashlib.sha256(content).hexdigest()}"


def test_an_empty_file_in_the_cache_is_fetched_again(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a crash left one, and each build was refused until somebody removed it."""
    pin = cache_file(empty_site, tmp_path, b"wheel")
    path = fetch.cached(sha256_of_pin(pin), empty_site)
    assert path is not None
    path.write_bytes(b"whEel")  # a changed byte is refused
    with pytest.raises(BuildError) as caught:
        fetch.wheels([pin], "3.10", empty_site)
    assert sha256_of_pin(pin) in str(caught.value)
    assert hashlib.sha256(b"whEel").hexdigest() in str(caught.value)
    path.write_bytes(b"")

    def pip(args: list[str], *_: object) -> subprocess.CompletedProcess[str]:
        target = Path(args[args.index("--dest") + 1])
        target.mkdir()
        (target / "a-1.whl").write_bytes(b"wheel")
        return subprocess.CompletedProcess(args, 0)

    monkeypatch.setattr(fetch, "pip", pip)
    assert fetch.wheels([pin], "3.10", empty_site) == [path]
    assert path.read_bytes() == b"wheel"


def test_a_hash_that_the_index_does_not_have_is_refused(empty_site: Settings) -> None:
    pin = f"six==1.17.0 --hash=sha256:{'0' * 64}"
    with pytest.raises(BuildError) as caught:
        fetch.wheels([pin], "3.10", empty_site)
    assert "six==1.17.0" in str(caught.value)
    assert not any((empty_site.cache / "sha256").glob("*/*"))


@pytest.mark.parametrize("place", ["variable", "file"])
def test_what_the_user_has_set_of_pip_changes_nothing_that_is_fetched(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("PIP_REQUIREMENT", "/nowhere")
    monkeypatch.setenv("PIP_USER", "1")
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("six==1.0\n")
    if place == "variable":
        monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    else:
        (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {constraint}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    digest = "4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274"
    (path,) = fetch.wheels([f"six==1.17.0 --hash=sha256:{digest}"], "3.12", empty_site)
    assert path.name.startswith("six-1.17.0")


def test_of_a_traceback_of_pip_s_its_reason_is_told() -> None:
    said = fetch.last_errors(
        "WARNING: old\nERROR: Exception:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in run\nOSError: [Errno 28] No space left on device\n'
    )
    assert said == "  OSError: [Errno 28] No space left on device"
    assert "TMPDIR" in fetch.remedy_if_full(said)
    assert fetch.remedy_if_full("ERROR: no matching distribution") == ""
