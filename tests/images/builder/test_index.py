"""An sdist from an index as pip is configured, of which nothing is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version

from launcher.base.errors import BuildError
from launcher.base.settings import Settings
from launcher.images.sources import fetch, index, lock

from .conftest import Place, PlaceHandler, serving

NAME = "megatron_core-0.16.1.tar.gz"
JSON = "application/vnd.pypi.simple.v1+json"


class Index(Place):
    """A package index, of one project."""

    def list_json(self, sha256: str | None, at: str = f"/files/{NAME}") -> None:
        """Serve the project's page as JSON."""
        hashes = {} if sha256 is None else {"sha256": sha256}
        page = {"files": [{"filename": NAME, "url": at, "hashes": hashes}]}
        self.pages["/simple/megatron-core/"] = (JSON, json.dumps(page).encode())

    def list_html(self, sha256: str, at: str = f"../../files/{NAME}") -> None:
        """Serve the project's page as HTML."""
        page = f'<!DOCTYPE html><a href="{at}#sha256={sha256}">{NAME}</a>'
        self.pages["/simple/megatron-core/"] = ("text/html; charset=utf-8", page.encode())


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that pip is configured to ask, and no other place."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    served = Index(tmp_path / "www")
    with serving(partial(PlaceHandler, place=served)) as served.host:
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.address}/simple/")
        yield served


def packed(files: dict[str, str], mtime: str = "1700000000") -> bytes:
    """A .tar.gz of text files, of a time as it is written there."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(text), {"mtime": mtime}
            tar.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def hostile(mark: Path, version: str = "0.16.1") -> bytes:
    """An sdist that writes `mark` as soon as its setup.py is run."""
    root = "megatron_core-0.16.1"
    info = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    setup = f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\n"
    setup += "setup(name='megatron-core', version='0.16.1')\n"
    files = {"PKG-INFO": info, "setup.py": setup}
    return packed({f"{root}/{name}": text for name, text in files.items()})


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def serve(served: Index, content: bytes) -> str:
    """Serve an sdist's bytes; its sha256."""
    served.pages[f"/files/{NAME}"] = ("application/octet-stream", content)
    return digest(content)


@pytest.mark.parametrize("page", ["json", "html"])
def test_locking_an_sdist_runs_none_of_it(
    served: Index, empty_site: Settings, tmp_path: Path, page: str
) -> None:
    """pip would run its setup.py as whoever runs `make lock`, before any hash is known."""
    sha256 = serve(served, hostile(tmp_path / "ran"))
    {"json": served.list_json, "html": served.list_html}[page](sha256)
    locked = lock._lock_sdist("0.16.1", empty_site)
    assert (locked.sha256, locked.epoch) == (sha256, 1700000000)
    assert not (tmp_path / "ran").exists()


def test_fetching_a_locked_sdist_runs_none_of_it(
    served: Index, empty_site: Settings, tmp_path: Path
) -> None:
    sha256 = serve(served, hostile(tmp_path / "ran"))
    served.list_html(sha256)
    pin = f"megatron-core==0.16.1 --hash=sha256:{sha256}"
    assert digest(index.sdist(pin, empty_site).read_bytes()) == sha256
    asked = len(served.asked)
    index.sdist(pin, empty_site)
    assert len(served.asked) == asked  # it is in the cache by now
    found = fetch.cached(sha256, empty_site)
    assert found is not None
    found.write_bytes(found.read_bytes() + b"x")
    with pytest.raises(BuildError, match=f"locked: {sha256}\n  file: "):
        index.sdist(pin, empty_site)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_names_another_hash_or_version_is_refused(
    served: Index, empty_site: Settings, tmp_path: Path
) -> None:
    """A file that was changed at the index, or on its way, is never locked."""
    sha256 = serve(served, hostile(tmp_path / "ran"))
    served.list_json("0" * 64)
    with pytest.raises(BuildError) as caught:
        lock._lock_sdist("0.16.1", empty_site)
    assert sha256 in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert not list(empty_site.cache.iterdir())
    served.list_json(serve(served, hostile(tmp_path / "ran", version="0.9.0")))
    with pytest.raises(BuildError, match=r"PKG-INFO says that it is megatron-core 0\.9\.0"):
        lock._lock_sdist("0.16.1", empty_site)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no archive", packed({"x/y": "z"}), packed({"x/PKG-INFO": "?"}, "inf")),
        packed({"x/PKG-INFO": "?" * 5000})[:-400],
    ],
    ids=["empty", "text", "without PKG-INFO", "a time without end", "cut off"],
)
def test_what_is_no_sdist_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(BuildError, match=NAME):
        index.epoch_of(tmp_path / NAME, "megatron-core", "0.16.1")


def test_a_login_goes_to_its_index_alone_and_into_no_message(
    served: Index, empty_site: Settings, tmp_path: Path
) -> None:
    """As pip: files on the index's host are asked for with the login in the index's address."""
    served.login = "me:p@ss"
    address = served.login_address
    sha256 = serve(served, hostile(tmp_path / "ran"))
    served.list_html(sha256, at=f"{served.address}/files/{NAME}")
    pip = index.Pip({"index-url": [f"{address}/simple"]})
    (page,) = pip.pages("megatron-core")
    (listed,) = pip.listed(page)
    pip.save(listed.url, tmp_path / NAME)
    assert fetch.sha256(tmp_path / NAME) == sha256
    other = index.Pip({"index-url": [f"{address.replace('127.0.0.1', 'localhost')}/simple"]})
    with pytest.raises(OSError, match="401"):
        other.save(listed.url, tmp_path / "other")


def test_a_failing_index_is_told_without_its_login(
    served: Index, empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served.address.replace("://", "://me:secret@")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{address}/more/")
    with pytest.raises(BuildError) as caught:
        lock._lock_sdist("0.16.1", empty_site)
    assert str(caught.value).count("404 Client Error") == 2
    assert "/more/megatron-core/" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_folders_and_pages_of_files_are_places_as_for_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offline site has its sdists in a folder, or in an index of plain files."""
    content = hostile(tmp_path / "ran")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / NAME).write_bytes(content)
    project = tmp_path / "simple/megatron-core"
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<a href="../../links/{NAME}#sha256={digest(content)}">')
    monkeypatch.chdir(tmp_path)
    for options in (
        {"no-index": ["1"], "find-links": ["links"]},
        {"index-url": [(tmp_path / "simple").as_uri()]},
    ):
        pip = index.Pip(options)
        (page,) = pip.pages("Megatron.Core")
        (listed,) = (one for one in pip.listed(page))
        pip.save(listed.url, tmp_path / "copy")
        assert (listed.filename, (tmp_path / "copy").read_bytes()) == (NAME, content)


def test_an_index_never_names_a_file_of_this_machine(served: Index) -> None:
    served.list_json(None, at="file:///etc/passwd")
    pip = index.Pip({"index-url": [f"{served.address}/simple"]})
    assert pip.listed(next(pip.pages("megatron-core"))) == []


def test_a_release_that_was_taken_back_is_no_newest(served: Index) -> None:
    """A yanked one without a wheel had the last good one refused, and stood in the news."""
    pip = index.Pip({"index-url": [f"{served.address}/simple"]})
    names = {"megatron_core-0.3-py3-none-any.whl": False, "megatron_core-0.4.tar.gz": "breaks"}
    page = [{"filename": name, "url": name, "yanked": why} for name, why in names.items()]
    served.pages["/simple/megatron-core/"] = (JSON, json.dumps({"files": page}).encode())
    assert index.newest_release("megatron-core", "3.10", pip) == (Version("0.3"), True)
    page[1]["yanked"] = False
    served.pages["/simple/megatron-core/"] = (JSON, json.dumps({"files": page}).encode())
    assert index.newest_release("megatron-core", "3.10", pip) == (Version("0.4"), False)


@pytest.mark.parametrize("text", ["", "[]", '{"files": [{"url": 1}]}', "{" * 9999])
def test_a_page_of_nonsense_is_a_reason(served: Index, empty_site: Settings, text: str) -> None:
    served.pages["/simple/megatron-core/"] = (JSON, text.encode())
    pip = index.Pip({"index-url": [f"{served.address}/simple"]})
    with pytest.raises(ValueError, match="not a page of an index"):
        pip.listed(next(pip.pages("megatron-core")))


def test_variables_go_before_pip_s_files_and_a_command_s_section_before_all(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "pip.conf"
    conf.write_text("[global]\nindex-url = a\nproxy = b\ncert = c\n[download]\nproxy = d\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(conf))
    monkeypatch.setenv("PIP_CERT", "e")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "f\ng")
    site = replace(empty_site, index_url="h")
    options = index.Pip.configured(site).options
    wanted = {"index-url": ["h"], "proxy": ["d"], "cert": ["e"], "extra-index-url": ["f", "g"]}
    assert {name: options[name] for name in wanted} == wanted


def test_where_nobody_says_otherwise_pips_own_index_is_asked(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no file of pip's, and pip's help alone tells it."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    (found,) = index.Pip.configured(empty_site).options["index-url"]
    assert re.fullmatch(r"https://[a-z.]+/simple/?", found)


def test_uv_asks_where_and_as_pip_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first index goes before the next; a folder is the user's, not one beside uv's file."""
    monkeypatch.chdir(tmp_path)
    options = {"index-url": ["a"], "extra-index-url": ["b"], "find-links": ["links"]}
    links = f"--find-links {(tmp_path / 'links').as_uri()}"
    pip = index.Pip(options)
    assert pip.requirement_lines() == [links, "--extra-index-url a", "--index-url b"]
    more = ["--extra-index-url a", "--extra-index-url b", "--index-url c"]
    assert pip.requirement_lines("c") == [links, *more]
    assert index.Pip({**options, "no-index": ["1"]}).requirement_lines("c") == ["--no-index", links]
    own = {"cert": ["x.pem"], "proxy": ["http://p"], "trusted-host": ["h", "i:1"]}
    assert index.Pip(own).uv_environment() == {
        "SSL_CERT_FILE": "x.pem",
        "HTTP_PROXY": "http://p",
        "HTTPS_PROXY": "http://p",
        "UV_INSECURE_HOST": "h i:1",
    }
