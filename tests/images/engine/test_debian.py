"""A Debian where no registry can be reached, and the packages that it is made of."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base import files, owned
from launcher.base.errors import EngineError
from launcher.base.settings import ROOT
from launcher.images.engine import connect
from launcher.images.engine.private import debian, packages, private
from launcher.images.matrix.matrix_file import load_matrix
from tests.e2e.site import program
from tests.images.carry.conftest import Engine
from tools import demo

EPOCH = 1_730_000_000


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine without images, on a machine where mmdebstrap's part is stood in for."""
    monkeypatch.setattr(debian, "_architecture", lambda: "amd64")
    monkeypatch.setattr(debian.os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian, "_bootstrap", write_layer)
    return Engine()


def write_layer(layer: Path, recipe: debian.BaseRecipe, cache: Path, say: debian.Say) -> None:
    with tarfile.open(layer, "w") as tar:
        tar.addfile(tarfile.TarInfo(f"./{recipe.suite}"))


def test_made_once_then_taken_from_the_engine_then_from_the_cache(
    client: Engine, tmp_path: Path
) -> None:
    said: list[str] = []
    first = debian.debian_base(client, "base:x", EPOCH, cache=tmp_path, say=said.append)
    assert debian.debian_base(client, "base:x", EPOCH, cache=tmp_path) == first
    assert (client.loads, len(said)) == (1, 1)
    client.images.clear()
    assert debian.debian_base(client, "other:y", EPOCH, cache=tmp_path, say=said.append) == first
    assert (client.loads, len(said)) == (2, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tar"]


def test_without_an_engine_the_archive_is_made(client: Engine, tmp_path: Path) -> None:
    """It had to wait for an engine that was still being unpacked."""
    assert debian.debian_base(None, "", EPOCH, cache=tmp_path) == ""
    assert debian.debian_base(client, "base:x", EPOCH, cache=tmp_path, say=pytest.fail)
    assert client.loads == 1


def test_the_layer_is_made_before_there_is_a_venv(
    client: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` made it after .venv, 14 s later."""
    debian.make_layer(tmp_path, print)
    monkeypatch.setattr(debian, "_bootstrap", None)
    debian.make_layer(tmp_path, pytest.fail)
    python = load_matrix().rows["cpu"].python  # of the base that the demo makes first
    assert debian.debian_base(client, "base:x", debian.STANDIN_EPOCH, python, cache=tmp_path)
    debian.make_layer(tmp_path, pytest.fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tar"]


def test_what_the_demo_cannot_know_without_packages_does_not_end_it(tmp_path: Path) -> None:
    """`make demo` ended with a traceback where there was a file of settings."""
    (tmp_path / "settings.yaml").write_text("answer_within: 5\n")
    without = [sys.executable, "-S", "-c", "from tools import demo; demo.needs_base()"]
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": os.defpath}
    settings = {"LAUNCHER_SETTINGS": str(tmp_path / "settings.yaml")}
    for more in ({}, settings, {"DOCKER_CONTEXT": "nowhere"}):
        subprocess.run(without, check=True, cwd=ROOT, env=env | more)


STOPPED_DEMO = """
import sys
from pathlib import Path
from tools import bootstrap, demo
bootstrap.main = lambda argv: 0
bootstrap.python_in = lambda venv: Path(sys.argv[1])
demo.needs_base = lambda: False
sys.exit(demo.main())
"""
TIDIES = f"""#!{sys.executable}
import signal, sys, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("tidied", flush=True)
    sys.exit(130)
"""


@pytest.mark.parametrize(("send", "signum"), [(os.killpg, "SIGINT"), (os.kill, "SIGTERM")])
def test_a_demo_that_is_stopped_tidies_up(
    send: Callable[[int, int], None], signum: str, tmp_path: Path
) -> None:
    """It was killed 0.25 s after Ctrl-C, and went on after SIGTERM."""
    program(tmp_path / "python", TIDIES)
    command = [sys.executable, "-c", STOPPED_DEMO, str(tmp_path / "python")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        send(process.pid, getattr(signal, signum))
        assert process.communicate()[0] == "tidied\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("chosen", "listening", "fetched", "needed"),
    [
        ("", False, False, True),
        ("unix:///nowhere", False, False, False),
        ("", True, False, False),
        ("", False, True, False),
    ],
)
def test_the_demo_makes_a_base_beside_venv_where_nothing_else_gives_one(
    chosen: str,
    listening: bool,
    fetched: bool,
    needed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", chosen)
    monkeypatch.setattr(private, "unsupported", lambda: "")
    monkeypatch.setattr(connect, "_default_hosts", lambda env: [("unix:///x", "a test")])
    monkeypatch.setattr(connect, "socket_fault", lambda *_: "" if listening else "no such socket")
    if fetched:
        (tmp_path / "engine/packages").mkdir(parents=True)
        (tmp_path / "engine/packages" / packages.COMPLETE).touch()
    assert demo.needs_base() == needed


def test_dpkg_flushes_no_file_and_keeps_its_defaults(client: Engine) -> None:
    """dpkg --force-help marks these two; 1,476 files took 6.6 s in place of 3.1."""
    forced = debian._environment(Path("/"), EPOCH)["DPKG_FORCE"].split(",")
    assert {"security-mac", "downgrade", "unsafe-io"} == {*forced}


def test_the_engine_s_own_id_of_it_is_taken(client: Engine, tmp_path: Path) -> None:
    """In containerd's store that isn't the one of the image's configuration."""
    other = client.add("other:1", [b"other"])
    told = [{"stream": f"Loaded image ID: {other.id}"}]
    client.api.load_image = lambda chunks, quiet: iter(told)
    assert debian.debian_base(client, "base:x", EPOCH, cache=tmp_path) == other.id
    assert "base:x" in other.names


def test_a_damaged_one_in_the_cache_is_told(client: Engine, tmp_path: Path) -> None:
    debian.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    client.images.clear()
    (made,) = tmp_path.iterdir()
    whole = made.read_bytes()
    for damaged in (b"", whole[:700], whole.replace(b".json", b".jsom", 1)):
        made.write_bytes(damaged)
        with pytest.raises(EngineError, match="the engine doesn't take it") as caught:
            debian.debian_base(client, "base:x", EPOCH, cache=tmp_path)
        assert str(made) in caught.value.problem
        assert "Remove it" in caught.value.remedy


def test_an_image_of_another_recipe_is_not_taken(client: Engine, tmp_path: Path) -> None:
    foreign = client.add("base:x", [b"other"], **{debian.STANDIN: "debian-bookworm"})
    made = debian.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    assert made != foreign.id
    assert client.find("base:x").id == made


def test_nothing_half_made_is_left(
    client: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layer: Path, *_: object) -> None:
        layer.write_bytes(b"half")
        raise EngineError("mmdebstrap failed")

    monkeypatch.setattr(debian, "_bootstrap", fail)
    with pytest.raises(EngineError, match="mmdebstrap failed"):
        debian.debian_base(client, "base:x", EPOCH, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


KILLED = """#!/bin/sh
mkdir "$TMPDIR/root" && mount -t tmpfs none "$TMPDIR/root" && touch "$TMPDIR/root/mounted" || exit
grep -q " $TMPDIR/root " /proc/mounts && echo mounted >&2
kill -9 $$
"""


@pytest.mark.skipif(
    bool(subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode),
    reason="no namespaces of mounts",
)
def test_a_killed_mmdebstrap_leaves_no_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed in /tmp for good. A stand-in mounts here what mmdebstrap would."""
    (tmp_path / "mmdebstrap").write_text(KILLED)
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}", prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    recipe = debian.BaseRecipe("bookworm", "amd64", 1, (), (), ())
    for asks_apt in ("_sources", "_proxies"):
        monkeypatch.setattr(debian, asks_apt, lambda *_: {})
    with pytest.raises(EngineError, match=r"code -9:\n  \| mounted\n"):
        debian._bootstrap(tmp_path / "layer.tar", recipe, tmp_path, pytest.fail)
    left = os.path.ismount(tmp_path / "root")
    if left:
        subprocess.run(["umount", str(tmp_path / "root")], check=True)
    assert not left


def test_the_recipe_is_all_that_decides() -> None:
    recipe = debian.BaseRecipe("bookworm", "amd64", 1, ("python3",), (), ())
    assert recipe.key == replace(recipe).key
    others = [replace(recipe, epoch=2), replace(recipe, suite="trixie")]
    others += [replace(recipe, packages=("g++",)), replace(recipe, excluded=("/x",))]
    assert len({recipe.key, *(other.key for other in others)}) == 5
    assert recipe.labels[debian.STANDIN] == "debian-bookworm"


def test_a_python_that_no_debian_has_and_another_user_than_root_are_refused(
    client: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"no Debian release has Python 3\.12") as caught:
        debian.debian_base(client, "base:x", EPOCH, "3.12", cache=tmp_path)
    assert "3.11" in caught.value.remedy
    monkeypatch.setattr(debian.os, "geteuid", lambda: 1000)
    with pytest.raises(EngineError, match="root only"):
        debian.debian_base(client, "base:x", EPOCH, cache=tmp_path)


MMDEBSTRAP = """\
import sys
for line in ("I: automatically chosen mode: root", "I: downloading packages with apt...",
             "Get:1 a", "I: installing essential packages...", "E: no space"):
    print(line, file=sys.stderr)
sys.exit(25)
"""


def test_the_steps_of_a_debian_are_told_and_its_last_lines_are_kept() -> None:
    """258 s passed without a line."""
    told = list[str]()
    code, last = debian._told([sys.executable, "-c", MMDEBSTRAP], {}, told.append)
    assert told == ["  downloading packages with apt...", "  installing essential packages..."]
    assert (code, last[-1], len(last)) == (25, "E: no space", 5)


def stand_in_for(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stdout=answer, stderr="", returncode=0)
    monkeypatch.setattr(debian.subprocess, "run", lambda *_, **__: done)


def test_this_suites_own_sources_are_used_and_apts_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        "deb http://mirror.site/debian/ bookworm main",
        "deb http://mirror.site/debian/ bookworm-updates main",
        "deb http://mirror.site/debian-security/ bookworm-security main",
        "deb http://mirror.site/debian/ bookworm contrib",
        "deb https://somewhere.else/linux bookworm stable",
        "deb https://somewhere.else/apt cloud-sdk-bookworm main",
        "deb http://mirror.site/debian/ trixie main",
    ]
    stand_in_for("\n".join(lines), monkeypatch)
    assert debian._sources("bookworm") == sorted(lines[:3])
    assert debian._sources("bullseye") == []
    stand_in_for("proxy='http://proxy.site:3128'\n", monkeypatch)
    assert debian._proxies()["http_proxy"] == "http://proxy.site:3128"
    stand_in_for("", monkeypatch)
    assert debian._proxies() == {}


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
        program(tools / name, text)
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
    program(
        tmp_path / "tools/apt-get", NEWER.format(log=apt, mirror="http://mirror.example/debian")
    )
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
    owned.make_folder(tmp_path / "half")
    (tmp_path / "half" / "left").touch()
    packages.unpack(tmp_path / "half", ["tool"])
    assert not (tmp_path / "half" / "left").exists()
    calls = apt.read_text()
    packages.unpack(tmp_path / "half", ["tool"])
    assert apt.read_text() == calls
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "thesis").touch()
    with pytest.raises(files.ForeignFileError):
        packages.unpack(tmp_path / "root", ["tool"])
    assert (tmp_path / "root" / "thesis").exists()


def test_apts_own_words_are_the_reason(
    apt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "tools/apt-get", NEWER.format(log=apt, mirror=""))
    with pytest.raises(EngineError, match="no mirror"):
        packages.unpack_newer(tmp_path / "root", "tool", "trixie")
    failing = '#!/bin/sh\necho "E: Unable to fetch some archives" >&2\nexit 100\n'
    program(tmp_path / "tools/apt-get", failing)
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


needs_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt")


@needs_apt
def test_what_is_installed_is_unpacked_as_well(tmp_path: Path) -> None:
    """apt left it out: where Slurm or containerd was installed, the private copy had no part."""
    root = packages.unpack(tmp_path / "root", ["make"])  # which runs these tests
    assert (root / "usr/bin/make").is_file()


@needs_apt
def test_only_what_every_system_has_counts_as_there(tmp_path: Path) -> None:
    text = packages._bare_system(tmp_path).read_text("utf-8")
    listed = {line.removeprefix("Package: ") for line in text.splitlines() if "Package: " in line}
    assert {"dpkg", "libc6", "bash"} <= listed
    assert not listed & {"make", "python3", "git", "docker.io", "slurmctld", "containerd", "runc"}
