"""Downloads an sdist without pip, which would run its setup.py.

Indexes, their logins, proxy and certificates are those of pip's own configuration. An index answers
by the simple API: PEP 691's JSON, or PEP 503's HTML.
"""

from __future__ import annotations

import ast
import email
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, Field, ValidationError

from launcher.base import owned
from launcher.base.errors import BuildError, first_fault
from launcher.base.settings import Settings, settings
from launcher.images.matrix.recipe import sha256_of_pin
from launcher.images.sources import fetch

JSON = "application/vnd.pypi.simple.v1+json"
ASKING = {"Accept": f"{JSON}, text/html;q=0.1", "Accept-Encoding": "identity"}
SECTIONS = ("global", "download", ":env:")  # of pip's configuration; the last one counts
METADATA = 1 << 20  # bytes that are read of a PKG-INFO


class IndexFile(BaseModel):
    """A file of a project, as an index lists it."""

    filename: str
    url: str
    hashes: dict[str, str] = {}
    requires_python: Annotated[str | None, Field(alias="requires-python")] = None
    yanked: bool | str = False


class _Page(BaseModel):
    files: list[IndexFile]


def sdist(pin: str, site: Settings) -> Path:
    """The sdist of `name==version --hash=sha256:…`, from cache or index. Raises BuildError."""
    digest = sha256_of_pin(pin)
    if not fetch.cached(digest, site):
        project, _, version = pin.partition(" ")[0].partition("==")
        with owned.scratch(site.cache) as folder:
            fetch.store(download(project, version, site, folder, digest), site)
    return fetch.checked(digest, pin, site)


def download(
    project: str, version: str, site: Settings, folder: Path, digest: str | None = None
) -> Path:
    """Fetch an sdist into `folder`: the first whose bytes are what its index, or `digest`, says.

    Raises BuildError with each place's reason where none has it.
    """
    pip = Pip.configured(site)
    reasons = []
    for page in pip.pages(project):
        try:
            found = [one for one in pip.listed(page) if _is_sdist(one.filename, project, version)]
            if not found:
                reasons.append(f"{page}: doesn't list it")
            for one in found:
                path = folder / one.filename
                pip.save(one.url, path)
                wanted, actual = digest or one.hashes.get("sha256"), fetch.sha256(path)
                if wanted in (None, actual):
                    return path
                reasons.append(f"{one.url}: its sha256 is {actual}, and {wanted} was expected")
        except (OSError, ValueError) as error:
            reasons.append(f"{page}: {error}")
    said = "\n".join(f"  {fetch.without_login(reason)}" for reason in reasons)
    raise BuildError(
        f"{project} {version}: no index of pip's configuration gives its sdist\n{said}",
        fetch.remedy_if_full(said) or "`pip config list` shows them; PIP_INDEX_URL names another.",
    )


def newest_release(project: str, python: str, pip: Pip) -> tuple[Version, bool] | None:
    """The newest final release for a Python, and whether an index has a wheel of it; else None."""
    with suppress(BuildError, ValueError):
        found = [*files_of(project, pip)]
        wheels = {version for version, file in found if file.filename.endswith(".whl")}
        fits = (v for v, file in found if SpecifierSet(file.requires_python or "").contains(python))
        newest = max((one for one in fits if not one.is_prerelease), default=None)
        return (newest, newest in wheels) if newest else None
    return None


def files_of(project: str, pip: Pip) -> Iterator[tuple[Version, IndexFile]]:
    """The wheels and sdists of a project, as pip's indexes list them, with their versions.

    Raises BuildError, after the last, where no index lists any.
    """
    found, reasons = False, []
    for page in pip.pages(project):
        try:
            for file in pip.listed(page):
                is_wheel = file.filename.endswith(".whl")
                parse = parse_wheel_filename if is_wheel else parse_sdist_filename
                with suppress(ValueError):
                    name, version = parse(file.filename)[:2]
                    if name == project and not file.yanked:
                        found = True
                        yield version, file
        except (OSError, ValueError) as error:
            reasons.append(f"{page}: {error}")
    if not found:
        raise BuildError("; ".join(reasons) or "no index of pip's configuration lists it")


def epoch_of(archive: Path, project: str, version: str) -> int:
    """The newest time in an sdist, in seconds since 1970, read without running it.

    Raises BuildError for one without a readable PKG-INFO, or whose PKG-INFO names something else.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            newest = int(max(member.mtime for member in members))
            top = next(m for m in members if m.isreg() and re.fullmatch(r"[^/]*/PKG-INFO", m.name))
            file = tar.extractfile(top)
            assert file is not None
            said = email.message_from_bytes(file.read(METADATA))
    except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError, OverflowError) as error:
        raise BuildError(f"{archive.name}: can't be read: {error}") from error
    except StopIteration:
        raise BuildError(f"{archive.name}: isn't an sdist: it has no PKG-INFO") from None
    if (canonicalize_name(str(said["Name"])), said["Version"]) != (project, version):
        raise BuildError(
            f"{archive.name}: its PKG-INFO says that it is {said['Name']} {said['Version']}",
            "The index serves another file under this name: don't build with it.",
        )
    return newest


@dataclass(frozen=True)
class Pip:
    """Where pip would look for a file, and how it would ask, by its own options' names."""

    options: dict[str, list[str]]

    @classmethod
    def configured(cls, site: Settings) -> Pip:
        """What `pip config list` says, with the site's index. Raises BuildError where it fails."""
        done = fetch.pip(["config", "list"], site)
        if done.returncode:
            raise BuildError(f"pip can't read its settings:\n{fetch.last_errors(done.stderr)}")
        lines = [line.partition("=") for line in done.stdout.splitlines()]
        options = {
            key.removeprefix(f"{section}."): words
            for section in SECTIONS
            for key, _, value in lines
            if key.startswith(f"{section}.") and (words := ast.literal_eval(value).split())
        }
        if "index-url" not in options:
            options["index-url"] = _own_index()
        return cls(options)

    @property
    def indexes(self) -> list[str]:
        """The indexes, with their logins."""
        if self._first("no-index").lower() in ("1", "true", "yes", "on"):
            return []
        return self.options.get("index-url", []) + self.options.get("extra-index-url", [])

    @property
    def links(self) -> list[str]:
        """Where files lie beside the indexes, as addresses: pip takes folders as well."""
        places = self.options.get("find-links", [])
        return [
            one if "://" in one else Path(one).expanduser().absolute().as_uri() for one in places
        ]

    def requirement_lines(self, more: str = "") -> list[str]:
        """Where uv is to look, as lines of a requirements file; more: one index besides.

        uv takes a version from the first index that has it, and its default index is the last.
        """
        links = [f"--find-links {place}" for place in self.links]
        if not self.indexes:
            return ["--no-index", *links]
        *first, last = filter(None, [*self.indexes, more])
        return [*links, *(f"--extra-index-url {one}" for one in first), f"--index-url {last}"]

    def uv_environment(self) -> dict[str, str]:
        """How uv is to ask, in its own variables."""
        said = {
            "SSL_CERT_FILE": self._first("cert"),
            "SSL_CLIENT_CERT": self._first("client-cert"),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), self._first("proxy")),
            "UV_INSECURE_HOST": " ".join(self.options.get("trusted-host", [])),
            "UV_HTTP_TIMEOUT": self._first("timeout") or self._first("default-timeout"),
        }
        return {name: value for name, value in said.items() if value}

    def pages(self, project: str) -> Iterator[str]:
        """The addresses where a project's files are listed, those on this machine first."""
        yield from self.links
        for index in self.indexes:
            yield f"{index.rstrip('/')}/{canonicalize_name(project)}/"

    def listed(self, page: str) -> list[IndexFile]:
        """The files of a page, or of a folder without one. Raises OSError; ValueError: no page."""
        folder = _path(page)
        if folder and folder.is_dir() and not (folder / "index.html").is_file():
            return [IndexFile(filename=one.name, url=one.as_uri()) for one in folder.iterdir()]
        at = urljoin(page, "index.html") if folder and folder.is_dir() else page
        with owned.scratch(settings().cache) as scratch:
            kind = self.save(at, Path(scratch) / "page")
            text = (Path(scratch) / "page").read_text(encoding="utf-8")
        try:
            is_json = kind.startswith(JSON)
            found = _Page.model_validate_json(text).files if is_json else _of_html(text)
        except ValidationError as error:
            raise ValueError(f"not a page of an index: {first_fault(error)}") from error
        there = [one.model_copy(update={"url": urljoin(at, one.url)}) for one in found]
        return [one for one in there if folder or not _path(one.url)]

    def save(self, url: str, path: Path) -> str:
        """Write what is at an address to `path`; its content type. Raises OSError."""
        if local := _path(url):
            shutil.copyfile(local, path)
            return ""
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        trusted = {host, parts.hostname} & {*self.options.get("trusted-host", [])}
        proxy = self._first("proxy")
        return fetch.save(
            parts._replace(netloc=host).geturl(),
            path,
            headers=ASKING,
            auth=self._login(parts.scheme, host),
            proxies={"http": proxy, "https": proxy} if proxy else None,
            verify=False if trusted else self._first("cert") or True,
            cert=self._first("client-cert") or None,
        )

    def _login(self, scheme: str, host: str) -> tuple[str, str] | None:
        """Name and password for a host, of the index that is there; else .netrc is asked."""
        for index in map(urlsplit, self.indexes):
            name, at, there = index.netloc.rpartition("@")
            if at and (index.scheme, there) == (scheme, host):
                user, _, password = name.partition(":")
                return unquote(user), unquote(password)
        return None

    def _first(self, option: str) -> str:
        return self.options.get(option, [""])[0]


class _Links(HTMLParser):
    """The addresses that a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "base":
            self.base = href
        elif href and tag == "a":
            self.found.append(urljoin(self.base, href))


def _of_html(text: str) -> list[IndexFile]:
    """The files that a page of HTML links to; hashes are in the addresses."""
    page = _Links()
    page.feed(text)
    found = []
    for href in page.found:
        url, fragment = urldefrag(href)
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        hashes = {kind: values[0] for kind, values in parse_qs(fragment).items()}
        found.append(IndexFile(filename=name, url=url, hashes=hashes))
    return found


@cache
def _own_index() -> list[str]:
    """pip's own index, which is in no file: its help has it."""
    said = " ".join(fetch.pip(["download", "--help"], settings()).stdout.split())
    return re.findall(r"Base URL of the Python Package Index \(default (\S+)\)", said)


def _is_sdist(filename: str, project: str, version: str) -> bool:
    """Whether a file is called as the sdist of a version; then its name is no path either."""
    try:
        named = parse_sdist_filename(filename)
        return filename.endswith(".tar.gz") and named == (
            canonicalize_name(project),
            Version(version),
        )
    except (InvalidSdistFilename, InvalidVersion):
        return False


def _path(url: str) -> Path | None:
    """The file or folder that a file:// address names, or None for another address."""
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None
