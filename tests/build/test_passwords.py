"""A mirror's name and password reach it, and stand on no command line, which `ps` shows to all."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from launcher.build import fetch, lock, source
from launcher.errors import BuildError
from launcher.settings import Settings

from .conftest import commit_all, serving, wheel

URL = "https://github.com/a/b.git"
BASIC = f"Basic {base64.b64encode(b'me:hunter@2').decode()}"


@dataclass
class Mirror:
    """A server on loopback that asks for a name and a password: me and hunter@2.

    seen: the command lines of all processes while it was asked
    """

    folder: Path
    port: int = 0
    seen: list[str] = field(default_factory=list)
    came_in: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://me:hunter%402@127.0.0.1:{self.port}/"


class Handler(SimpleHTTPRequestHandler):
    """Answers from a folder whoever has the password, and looks who asks."""

    def __init__(self, *args: object, mirror: Mirror) -> None:
        self.mirror = mirror
        super().__init__(*args, directory=str(mirror.folder))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                self.mirror.seen.append(file.read_bytes().replace(b"\0", b" ").decode())
        if self.headers.get("Authorization") != BASIC:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="a"')
            self.end_headers()
            return
        self.mirror.came_in.append(self.path)
        super().do_GET()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    found = Mirror(tmp_path / "www")
    found.folder.mkdir()
    with serving(partial(Handler, mirror=found)) as address:
        found.port = int(address.rpartition(":")[2])
        yield found


def shown(mirror: Mirror) -> list[str]:
    """The command lines with the password in them, plain, as an address has it, or as a header."""
    secrets = ("hunter", BASIC.split()[1])
    return [line for line in mirror.seen if any(one in line for one in secrets)]


def test_git_asks_a_mirror_with_its_password_in_no_command_line(
    mirror: Mirror, checkout: Path, empty_site: Settings, monkeypatch: pytest.MonkeyPatch
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
    site = replace(empty_site, git_mirror=mirror.address)
    assert source.commit_of(URL, "core_v1", site) == commit
    with pytest.raises(BuildError, match="git can't fetch"):  # a server without git takes no depth
        source.repository(URL, commit, site)
    assert len([line for line in mirror.seen if "remote-http" in line]) >= 2
    assert shown(mirror) == []


def test_git_takes_a_name_without_a_password_from_the_address(
    mirror: Mirror, empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is before the @ may be a token; with a user's credential.helper it is the user."""
    (tmp_path / "config").write_text(
        '[credential]\n helper = "!f() { test $1 = get && grep -q ^username=me$ && '
        'echo password=hunter@2; }; f"\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    site = replace(empty_site, git_mirror=f"http://me@127.0.0.1:{mirror.port}/")
    with pytest.raises(BuildError, match="not found"):
        source.commit_of(URL, "core_v1", site)
    assert mirror.came_in == ["/a/b.git/info/refs?service=git-upload-pack"]
    assert not any("me@" in line for line in mirror.seen)


@pytest.fixture
def pin(mirror: Mirror) -> str:
    """The pin of a wheel that the mirror's index has."""
    page = mirror.folder / "extra/mine/index.html"
    page.parent.mkdir(parents=True)
    made = wheel(page.parent, "mine", "1")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    page.write_text(f'<a href="{made.name}#sha256={digest}">{made.name}</a>')
    return f"mine==1 --hash=sha256:{digest}"


def test_pip_asks_indexes_with_their_passwords_in_no_command_line(
    mirror: Mirror, empty_site: Settings, pin: str
) -> None:
    """Both of a site's indexes have one: what the first lacks is in PyTorch's."""
    site = replace(
        empty_site,
        index_url=f"{mirror.address}none",
        torch_index=f"{mirror.address}extra",
    )
    (path,) = fetch.wheels([pin], "3.11", site)
    assert path.name == "mine-1-py3-none-any.whl"
    assert lock.resolve(lock.Wanted(["mine"], "3.11"), site) == [pin]
    assert len([line for line in mirror.seen if "-m pip" in line or "uv pip" in line]) >= 2
    assert {"/none/mine/", "/extra/mine/"} <= set(mirror.came_in)
    assert shown(mirror) == []


def test_an_index_of_the_user_s_own_is_asked_beside_pytorch_s(
    mirror: Mirror, empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable for PyTorch's index would take the place of pip.conf's extra-index-url."""
    (tmp_path / "pip.conf").write_text(f"[global]\nextra-index-url = {mirror.address}extra\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    site = replace(
        empty_site, index_url=f"{mirror.address}none", torch_index=f"{mirror.address}torch"
    )
    with pytest.raises(BuildError, match="can't fetch other==1"):
        fetch.wheels([f"other==1 --hash=sha256:{'0' * 64}"], "3.11", site)
    assert {"/torch/other/", "/extra/other/"} <= set(mirror.came_in)
    assert shown(mirror) == []
