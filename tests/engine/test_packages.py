"""Distribution packages are unpacked privately, once, and a failure says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import files
from launcher.engine.private import packages
from launcher.errors import EngineError

APT = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *update*) exit 0;; esac
case "$*" in *Dir::State::lists*) ;; *) {first};; esac
for word in "$@"; do
  case "$word" in *Dir::Cache=*) touch "${{word#*=}}/archives/tool_1_all.deb";; esac
done
"""
DPKG_DEB = '#!/bin/sh\nmkdir -p "$4/usr/bin" && echo unpacked > "$4/usr/bin/tool"\n'


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for apt's programs, of which the first attempt fails; the log of their calls."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    texts = {
        "apt-get": APT.format(log=log, first='echo "E: Unable to locate package" >&2; exit 100'),
        "apt-cache": '#!/bin/sh\ncase "$*" in *known*) exit 0;; esac\nexit 100\n',
        "dpkg-deb": DPKG_DEB,
    }
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return log


def test_lists_are_fetched_privately_where_the_systems_fail(apt: Path, tmp_path: Path) -> None:
    root = packages.unpack(tmp_path / "root", ["tool"], optional=["known", "absent"])
    assert (root / "usr/bin/tool").read_text() == "unpacked\n"
    first, update, second = apt.read_text().splitlines()
    assert first.endswith("install --yes --download-only --no-install-recommends -- tool known")
    assert update.endswith("update")
    assert "Dir::State::lists=" in second
    assert all("Dir::Cache=" in call and "NoLocking=true" in call for call in (first, second))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "root", "tools"]


NEWER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *indextargets*) echo {mirror};; *download*) touch tool_2_all.deb;; esac
for word in "$@"; do
  case "$word" in *Dir::Etc::SourceList=*) cat "${{word#*=}}" >> {log};; esac
done
"""


def test_a_newer_suite_is_that_of_the_systems_mirror(apt: Path, tmp_path: Path) -> None:
    program = tmp_path / "tools" / "apt-get"
    program.write_text(NEWER.format(log=apt, mirror="http://mirror.example/debian"))
    for _ in range(2):  # the second finds it there
        root = packages.unpack_newer(tmp_path / "root", "tool", "trixie")
        assert (root / "usr/bin/tool").read_text() == "unpacked\n"
    asked, update, first, download, second = apt.read_text().splitlines()
    assert asked.startswith("indextargets")
    assert first == second == "deb http://mirror.example/debian trixie main"
    assert update.endswith(" update")
    assert download.endswith(" download -- tool")
    for call in (update, download):
        assert "Dir::State::lists=" in call
        assert "Dir::Etc::SourceParts=/dev/null" in call
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "root", "tools"]


def test_a_complete_folder_and_one_of_others_stay_and_half_of_one_is_made_again(
    apt: Path, tmp_path: Path
) -> None:
    """Whatever stood where packages go was removed."""
    files.make_folder(tmp_path / "half")
    (tmp_path / "half" / "left").touch()
    packages.unpack(tmp_path / "half", ["tool"])
    assert not (tmp_path / "half" / "left").exists()
    calls = apt.read_text()
    packages.unpack(tmp_path / "half", ["tool"])
    assert apt.read_text() == calls
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "thesis").touch()
    with pytest.raises(files.Refused):
        packages.unpack(tmp_path / "root", ["tool"])
    assert (tmp_path / "root" / "thesis").exists()


def test_apts_own_words_are_the_reason(
    apt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools" / "apt-get").write_text(NEWER.format(log=apt, mirror=""))
    with pytest.raises(EngineError, match="no mirror"):
        packages.unpack_newer(tmp_path / "root", "tool", "trixie")
    program = tmp_path / "tools" / "apt-get"
    program.write_text('#!/bin/sh\necho "E: Unable to fetch some archives" >&2\nexit 100\n')
    with pytest.raises(EngineError, match="Unable to fetch some archives") as caught:
        packages.unpack(tmp_path / "root", ["tool"])
    assert "apt-get update" in caught.value.remedy
    assert not (tmp_path / "root").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"docker\.io: can't be fetched.*no apt-get"):
        packages.unpack(tmp_path / "root", ["docker.io"])


def test_environment_finds_what_was_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    (tmp_path / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    env = packages.environment(tmp_path)
    assert env["PATH"].split(":")[:2] == [str(tmp_path / "usr/sbin"), str(tmp_path / "usr/bin")]
    assert "/usr/bin" in env["PATH"].split(":")
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path}/usr/lib/x86_64-linux-gnu:/mine"
    assert os.environ["PATH"] == "/usr/bin"
