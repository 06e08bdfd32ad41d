"""What a build reads from outside: by its hash, with no password on a command line, row by row."""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher import cli
from launcher.base.errors import BuildError, EngineError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import downloads, image
from launcher.images.builder.image import BuildRequest
from launcher.images.engine import connect
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe, sha256_of_pin
from launcher.images.sources import fetch, megatron_source, uv

from .conftest import Place, commit_all, wheel


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


URL = "https://github.com/a/b.git"


@pytest.fixture
def mirror(place: Place) -> Place:
    """A mirror that asks for a name and a password."""
    place.login = "me:hunter@2"
    return place


def shown(mirror: Place) -> list[str]:
    """The command lines with the password in them, plain, as an address has it, or as a header."""
    secrets = ("hunter", mirror.token)
    return [line for line in mirror.seen if any(one in line for one in secrets)]


def test_git_asks_a_mirror_with_its_password_in_no_command_line(
    mirror: Place, checkout: Path, empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git itself starts git-remote-https with the address, password and all, where it has one."""
    commit = commit_all(checkout)
    (mirror.folder / "a").mkdir()
    bare = mirror.folder / "a/b.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(checkout), str(bare)], check=True)
    subprocess.run(["git", "-C", str(bare), "tag", "core_v1"], check=True)
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True)
    for name, value in {"COUNT": "1", "KEY_0": "http.userAgent", "VALUE_0": "x"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    site = replace(empty_site, git_mirror=f"{mirror.login_address}/")
    assert megatron_source.commit_of(URL, "core_v1", site) == commit
    with pytest.raises(BuildError, match="git can't fetch"):  # a server without git takes no depth
        megatron_source.repository(URL, commit, site)
    assert len([line for line in mirror.seen if "remote-http" in line]) >= 2
    assert shown(mirror) == []


def test_git_takes_a_name_without_a_password_from_the_address(
    mirror: Place, empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is before the @ may be a token; with a user's credential.helper it is the user."""
    (tmp_path / "config").write_text(
        '[credential]\n helper = "!f() { test $1 = get && grep -q ^username=me$ && '
        'echo password=hunter@2; }; f"\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    site = replace(empty_site, git_mirror=f"http://me@{mirror.host}/")
    with pytest.raises(BuildError, match="not found"):
        megatron_source.commit_of(URL, "core_v1", site)
    assert mirror.came_in == ["/a/b.git/info/refs?service=git-upload-pack"]
    assert not any("me@" in line for line in mirror.seen)


@pytest.fixture
def pin(mirror: Place) -> str:
    """The pin of a wheel that the mirror's index has."""
    page = mirror.folder / "extra/mine/index.html"
    page.parent.mkdir(parents=True)
    made = wheel(page.parent, "mine", "1")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    page.write_text(f'<a href="{made.name}#sha256={digest}">{made.name}</a>')
    return f"mine==1 --hash=sha256:{digest}"


def test_pip_asks_indexes_with_their_passwords_in_no_command_line(
    mirror: Place, empty_site: Settings, pin: str
) -> None:
    """Both of a site's indexes have one: what the first lacks is in PyTorch's."""
    site = replace(
        empty_site,
        index_url=f"{mirror.login_address}/none",
        torch_index=f"{mirror.login_address}/extra",
    )
    (path,) = fetch.wheels([pin], "3.11", site)
    assert path.name == "mine-1-py3-none-any.whl"
    assert uv.resolve(uv.RequirementSet(["mine"], "3.11"), site).pins == [pin]
    assert len([line for line in mirror.seen if "-m pip" in line or "uv pip" in line]) >= 2
    assert {"/none/mine/", "/extra/mine/"} <= set(mirror.came_in)
    assert shown(mirror) == []


def test_an_index_of_the_user_s_own_is_asked_beside_pytorch_s(
    mirror: Place, empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable for PyTorch's index would take the place of pip.conf's extra-index-url."""
    (tmp_path / "pip.conf").write_text(
        f"[global]\nextra-index-url = {mirror.login_address}/extra\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    site = replace(
        empty_site,
        index_url=f"{mirror.login_address}/none",
        torch_index=f"{mirror.login_address}/torch",
    )
    with pytest.raises(BuildError, match="can't fetch other==1"):
        fetch.wheels([f"other==1 --hash=sha256:{'0' * 64}"], "3.11", site)
    assert {"/torch/other/", "/extra/other/"} <= set(mirror.came_in)
    assert shown(mirror) == []


MATRIX, LOCK = load_matrix(), load_lock()
CPU = recipe(MATRIX, LOCK, "cpu")


class StandInImages:
    """Finds every image but one."""

    def find(self, reference: str, chosen: str | None = None, *_: object) -> Any:
        if chosen == "gone:1":
            raise EngineError("gone:1: the registry has no such image (404)")
        if chosen == "No":
            raise UsageError("No: not an image's name")
        return SimpleNamespace(id=f"sha256:{len(chosen or reference):064x}", digest="")


def test_a_row_that_fails_keeps_no_other_from_being_fetched(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wheels(pins: list[str], python: str, site: Settings, platform: str, _: int) -> list[Path]:
        if python == "3.10":
            raise BuildError("pip can't fetch it")
        return [tmp_path / "a.whl"]

    monkeypatch.setattr(fetch, "wheels", wheels)
    monkeypatch.setattr(
        megatron_source, "from_sdist", lambda *_: SimpleNamespace(at=tmp_path / "b.tar.gz")
    )
    rows = [
        (recipe(MATRIX, LOCK, "24.10"), BuildRequest("24.10")),
        (CPU, BuildRequest("cpu", base="gone:1")),
        (CPU, BuildRequest("cpu", base="No")),
        (CPU, BuildRequest("cpu")),
    ]
    out = io.StringIO()
    images: Any = StandInImages()
    fetched, failed = downloads.fetch_all(rows, MATRIX, images, empty_site, Progress(out))
    assert [one.recipe for one in fetched] == [CPU]
    assert fetched[0].files == (tmp_path / "a.whl", tmp_path / "b.tar.gz")
    assert list(fetched[0].images) == [*CPU.images]
    codes = [(row.tag, error.exit_code) for row, error in failed]
    assert codes == [("24.10", 122), ("cpu", 125), ("cpu", 2)]
    assert "24.10: 10 Python packages: failed" in out.getvalue()
    without, _ = downloads.fetch_all(
        [(CPU, BuildRequest("cpu"))], MATRIX, None, empty_site, Progress(out)
    )
    assert without[0].images == {}


def downloads_of(module: ModuleType) -> set[Callable[..., object]]:
    """The functions of images/sources that a module calls, and that take a site: these download."""
    words = [ast.unparse(node) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    return {
        function
        for name, own in vars(module).items()
        if getattr(own, "__name__", "").startswith("launcher.images.sources.")
        for attribute, function in inspect.getmembers(own, inspect.isfunction)
        if f"{name}.{attribute}" in words and "site" in inspect.signature(function).parameters
    }


def test_what_a_build_downloads_is_fetched_ahead() -> None:
    """`launcher fetch --output` would carry too little to a site without internet."""
    assert fetch.wheels in downloads_of(image)
    assert downloads_of(image) <= downloads_of(downloads)


def test_a_commit_is_named_by_its_publisher_s_url(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = recipe(MATRIX, LOCK, "24.10")
    assert row.locked.git is not None
    found = SimpleNamespace(revision=row.locked.git.commit, at=tmp_path)
    monkeypatch.setattr(fetch, "wheels", lambda *_: [])
    monkeypatch.setattr(megatron_source, "from_git", lambda *_: found)
    site = replace(empty_site, git_mirror="https://mirror.example/")
    (one,), _ = downloads.fetch_all(
        [(row, BuildRequest("24.10"))], MATRIX, None, site, Progress(io.StringIO())
    )
    assert one.commits == (
        downloads.Commit(
            "https://github.com/NVIDIA/Megatron-LM.git", row.locked.git.commit, tmp_path
        ),
    )


@pytest.mark.parametrize(
    ("options", "platforms"),
    [
        (["26.06", "24.10"], ["linux/arm64", "linux/amd64"]),
        (["26.06", "--no-images"], ["linux/amd64"]),
        (["26.06", "--no-images", "--platform", "linux/arm64"], ["linux/arm64"]),
        (["26.06", "--platform", "linux/amd64"], ["linux/amd64"]),
    ],
)
def test_wheels_are_for_the_engine_whose_images_are_fetched(
    monkeypatch: pytest.MonkeyPatch, options: list[str], platforms: list[str]
) -> None:
    engine = SimpleNamespace(version=lambda: {"Os": "linux", "Arch": "arm64"})
    fetched: list[str] = []

    def fetch_all(rows: list[downloads.Wanted], *_: object) -> tuple[list[Any], list[Any]]:
        fetched.extend(one.platform for one, _ in rows)
        return [], []

    monkeypatch.setattr(connect, "connect", lambda timeout: engine)
    monkeypatch.setattr(downloads, "fetch_all", fetch_all)
    assert cli.main(["fetch", *options]) == 0
    assert fetched == platforms
