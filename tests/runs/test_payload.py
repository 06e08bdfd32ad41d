"""The payload: what travels with a run, and who notices that it isn't that."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.agent import start
from launcher.base import files, owned
from launcher.base.errors import EngineError
from launcher.base.settings import ROOT
from launcher.runs import payload

OLD = "0123456789abcdef0123456789abcdef"


def test_it_is_written_once_for_all_to_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        kept = payload.write_payload(tmp_path)
    finally:
        os.umask(before)
    folder = Path(kept.folder)
    assert folder.name == kept.digest == payload.digest()
    modes = {stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*") if path.is_dir()}
    assert modes == {0o755}
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    found = [path for path in files if stat.S_IMODE(path.lstat().st_mode) == 0o644]
    assert len(found) == len(payload.contents())
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    written = folder.stat().st_ino
    assert payload.write_payload(tmp_path) == kept
    assert folder.stat().st_ino == written


def test_it_has_the_agent_and_the_trainer_and_nothing_else(tmp_path: Path) -> None:
    """The launcher's own modules need packages that an image may lack."""
    paths = {path.removeprefix("launcher/") for path in payload.contents()}
    others = {path for path in paths if path.split("/")[0] not in ("agent", "trainer")}
    assert others == {"__init__.py", "base/__init__.py", "base/files.py", "base/owned.py"}


@pytest.mark.parametrize("kind", ["changed", "more", "less"])
def test_one_that_was_changed_is_refused(tmp_path: Path, kind: str) -> None:
    """By the launcher before it is used, and by the runner before it does anything."""
    kept = payload.write_payload(tmp_path)
    at = Path(kept.folder, "launcher/agent/words.py")
    if kind == "changed":
        at.write_text(at.read_text() + "\n")
    elif kind == "more":
        at.with_name("torch.py").write_text("")
    else:
        at.unlink()
    with pytest.raises(EngineError, match="isn't what was written there"):
        payload.write_payload(tmp_path)
    done = run(kept, "runner", "--help")
    assert (done.returncode, done.stdout) == (121, "")
    assert "isn't the payload that was sent" in done.stderr


def run(kept: payload.Payload, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, payload.entry(kept.folder), *words]
    given = {"PATH": os.environ["PATH"], start.DIGEST: kept.digest, **env}
    return subprocess.run(command, env=given, cwd="/", capture_output=True, text=True, timeout=300)


def test_it_runs_by_its_path_whatever_else_is_called_launcher(tmp_path: Path) -> None:
    """As an image of an older launcher has one on its path."""
    kept = payload.write_payload(tmp_path / "runs")
    other = tmp_path / "other/launcher"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the wrong one')")
    done = run(kept, "runner", "--help", PYTHONPATH=str(other.parent))
    assert (done.returncode, done.stderr) == (0, "")
    assert "--processes-per-node" in done.stdout


def test_the_archive_is_the_same_each_time_and_fits_a_config_map(tmp_path: Path) -> None:
    kept = payload.write_payload(tmp_path)
    packed = payload.archive(kept.folder)
    assert packed == payload.archive(kept.folder)
    assert len(packed) < 150_000  # of the 1 MiB that a ConfigMap holds, in base64
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert {one.name for one in tar} == {f"opt/launchpad/{path}" for path in payload.contents()}
        assert {(one.mode, one.uid, one.mtime) for one in tar} == {(0o644, 0, 0)}


def test_an_earlier_runs_is_taken_where_it_is_still_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="isn't there any more"):
        payload.write_payload(tmp_path, OLD)
    kept = payload.write_payload(tmp_path)
    assert payload.write_payload(tmp_path, kept.digest) == kept


def test_of_those_that_nobody_names_only_old_and_own_ones_go(tmp_path: Path) -> None:
    kept = payload.write_payload(tmp_path)
    folders = {name: tmp_path / payload.FOLDER / (name * 16) for name in ("a1", "b2", "c3")}
    for folder in folders.values():
        owned.make_folder(folder)
        os.utime(folder, (0, 0))
    os.utime(folders["b2"])
    os.utime(kept.folder, (0, 0))
    payload.sweep(tmp_path, {kept.digest, folders["c3"].name})
    left = {path.name for path in (tmp_path / payload.FOLDER).iterdir()}
    assert left == {kept.digest, folders["b2"].name, folders["c3"].name}
    (foreign := tmp_path / payload.FOLDER / OLD).mkdir()
    os.utime(foreign, (0, 0))
    with pytest.raises(files.ForeignFileError):
        payload.sweep(tmp_path, {kept.digest})


def test_an_old_python_is_named(tmp_path: Path) -> None:
    """The first file is one that any Python 3 reads; an older one is stood in for."""
    kept = payload.write_payload(tmp_path)
    script = "import sys, runpy; sys.version_info = (3, 8); runpy.run_path(sys.argv[1], None, %r)"
    done = subprocess.run(
        [sys.executable, "-c", script % "__main__", payload.entry(kept.folder), "runner"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 121
    assert "is Python 3.8, and 3.10 or later is needed: name one as image.python" in done.stderr


def test_a_script_sees_its_own_packages_and_nothing_of_the_launchers_folder(tmp_path: Path) -> None:
    """An installed launcher lies among packages in versions that the run may not want.

    A script may have a package of the same name.
    """
    kept = payload.write_payload(tmp_path / "runs")
    for name, text in {
        "venv/pydantic.py": "VERSION = 'the run’s own'",
        "launcher/__init__.py": "who = 'mine'",
        "script.py": "import sys, launcher, pydantic\n"
        "print(launcher.who, sys.argv[1], pydantic.VERSION, *sys.path, sep='\\n')",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script, own = str(tmp_path / "script.py"), str(tmp_path / "venv")
    done = run(kept, "ranks.stacks", script, "x", PYTHONPATH=own, PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, "")
    who, word, version, first, *path = done.stdout.splitlines()
    assert (who, word, version, first) == ("mine", "x", "the run’s own", str(tmp_path))
    plain = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    own_path = subprocess.run(
        plain, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    added = {*path} - {*own_path.splitlines()}
    assert not {str(ROOT), str(ROOT / "launcher"), str(kept.folder)} & added
