"""Finds what is new upstream against the matrix: releases, tags of bases, tags of extensions.

Each place is asked by itself, and one that doesn't answer keeps no other from being asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from launcher.agent.series import numbers
from launcher.base.errors import LauncherError
from launcher.base.reference import parse_reference
from launcher.base.settings import Settings
from launcher.images.matrix.schema import Matrix
from launcher.images.sources import fetch, index, megatron_source
from launcher.tools.news import repository

AT_A_TIME = 6  # places asked
PROJECT = "megatron-core"
NUMBERS = re.compile(r"\d{1,9}")
FINAL = re.compile(r"\d{1,9}(\.\d{1,9})+")


@dataclass(frozen=True)
class UpstreamNews:
    """What a place has that the matrix lacks, from old to new.

    kind: index (releases), git (releases), images (tags of a base), extensions (tags); what: for
    people; known: the newest in the matrix, "" for none; name: of an extension its package, of a
    base the repository; new: what each stands for: a commit, an image's name, of an index "sdist"
    or ""; problem: why the place can't be asked
    """

    kind: str
    what: str
    known: str
    name: str
    new: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def said(self) -> str:
        """What is new, or why that isn't known."""
        if self.problem:
            return f"no answer: {self.problem}"
        return f"new: {' '.join(self.new)}" if self.new else "nothing new"


def table(news: Sequence[UpstreamNews]) -> str:
    """A line for each place: its name, the newest in the matrix, what is new."""
    cells = [(one.what, one.known or "none", one.said) for one in news]
    widths = [max(len(cell[column]) for cell in cells) for column in (0, 1)]
    return "".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}\n" for a, b, c in cells)


@dataclass(frozen=True)
class _Place:
    """A place to ask: all that it has, and which of that is new."""

    kind: str
    what: str
    name: str
    known: list[str]
    ask: Callable[[], Mapping[str, str]]
    choose: Callable[[Iterable[str], Iterable[str]], list[str]]

    def news(self) -> UpstreamNews:
        """What is new there, or why it can't be asked."""
        newest = max(self.known, key=numbers, default="")
        told = partial(UpstreamNews, self.kind, self.what, newest, self.name)
        try:
            found = self.ask()
        except LauncherError as error:
            lines = " ".join(fetch.without_login(error.problem).split())
            return told(problem=lines)
        return told({one: found[one] for one in self.choose(found, self.known)})


def look(matrix: Matrix, site: Settings) -> list[UpstreamNews]:
    """What each place upstream has that the matrix lacks, the places in the matrix's order."""
    places = [*_of_releases(matrix, site), *_of_images(matrix, site), *_of_extensions(matrix, site)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return [*pool.map(_Place.news, places)]


def shape_of(tag: str) -> str:
    """A tag with an asterisk for each number: 24.10-py3 as *.*-py3."""
    return NUMBERS.sub("*", tag)


def newest_of_series(found: Iterable[str], known: Iterable[str]) -> list[str]:
    """Of each series not older than the matrix's first, the newest release, where it lacks that."""
    newest: dict[tuple[int, ...], str] = {}
    for one in sorted((one for one in found if len(numbers(one)) == 3), key=numbers):
        newest[numbers(one)[:2]] = one
    have = sorted(map(numbers, known))
    return [
        one
        for series, one in newest.items()
        if have
        and series >= have[0][:2]
        and all(numbers(one) > each for each in have if each[:2] == series)
    ]


def newer(found: Iterable[str], known: Iterable[str]) -> list[str]:
    """What is newer than all that the matrix has; the newest alone, where it has none."""
    have, there = [*map(numbers, known)], sorted(found, key=numbers)
    return [one for one in there if numbers(one) > max(have)] if have else there[-1:]


def _of_releases(matrix: Matrix, site: Settings) -> list[_Place]:
    known = [*matrix.releases]
    at_index = partial(_index_releases, site)
    found = [
        _Place("index", f"{PROJECT}, package index", PROJECT, known, at_index, newest_of_series)
    ]
    for url in dict.fromkeys(release.git.url for release in matrix.releases.values()):
        ask = partial(_tags, url, "core_v", site)
        what = f"{_last(url)}, git tags"
        found.append(_Place("git", what, url, known, ask, newest_of_series))
    return found


def _of_extensions(matrix: Matrix, site: Settings) -> list[_Place]:
    versions: dict[str, list[str]] = {}
    packages: dict[str, str] = {}
    for name, extension in matrix.extensions.items():
        url, version = extension.git.url, name.removeprefix(f"{extension.package}-")
        packages[url] = extension.package
        versions.setdefault(url, []).extend([version] if FINAL.fullmatch(version) else [])
    return [
        _Place(
            *("extensions", f"{packages[url]}, git tags", packages[url], known),
            partial(_tags, url, "", site),
            newer,
        )
        for url, known in versions.items()
    ]


def _of_images(matrix: Matrix, site: Settings) -> list[_Place]:
    """A place for each repository and shape of its tags; a tag without a number has no news."""
    known: dict[tuple[str, str], list[str]] = {}
    for reference in matrix.images:
        name, tag = parse_reference(reference).name, parse_reference(reference).tag
        if NUMBERS.search(tag):
            known.setdefault((name, shape_of(tag)), []).append(tag)
    return [
        _Place("images", f"{name}:{shape}", name, have, partial(_images, name, shape, site), newer)
        for (name, shape), have in known.items()
    ]


def _images(name: str, shape: str, site: Settings) -> dict[str, str]:
    """The images of a repository whose tags have this shape, by their tags."""
    there = repository.tags(site.mirrored(name))
    return {tag: f"{name}:{tag}" for tag in there if shape_of(tag) == shape}


def _tags(url: str, prefix: str, site: Settings) -> dict[str, str]:
    """The commits of the final versions that a repository has a tag of."""
    found = megatron_source.refs(url, site, f"refs/tags/{prefix}*")
    versions = {}
    for name, commit in sorted(found.items()):  # a tag's own object, then NAME^{}, its commit
        version = name.removeprefix(f"refs/tags/{prefix}").removesuffix("^{}").removeprefix("v")
        if FINAL.fullmatch(version):
            versions[version] = commit
    return versions


def _index_releases(site: Settings) -> dict[str, str]:
    """The final releases at pip's indexes, and which have an sdist. Raises BuildError."""
    found = dict[str, str]()
    for version, file in index.files_of(PROJECT, index.Pip.configured(site)):
        if FINAL.fullmatch(str(version)) and len(version.release) == 3:
            sdist = file.filename.endswith(".tar.gz")
            found[str(version)] = "sdist" if sdist else found.get(str(version), "")
    return found


def _last(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2].removesuffix(".git")
