"""Adds to the text of matrix.yaml what is new upstream, with no fact that nobody stated.

A base's facts are read from its configuration at the registry, a release's from its commit. What
lacks a fact that a row or a release must have is added as a comment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import yaml
from packaging.requirements import Requirement
from pydantic import BaseModel, Field, ValidationError

from launcher.agent import checkout
from launcher.agent.series import numbers
from launcher.base import owned, yamlfile
from launcher.base.errors import LauncherError, UsageError, first_fault
from launcher.base.settings import Settings
from launcher.images.matrix.schema import AMD64, Matrix, MegatronRelease, Row, misfit
from launcher.images.sources import megatron_source
from launcher.tools.news import repository
from launcher.tools.news.news import UpstreamNews

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLES = {
    "python": ("PYTHON_VERSION", "PYVER"),
    "torch": ("PYTORCH_BUILD_VERSION", "PYTORCH_VERSION"),
    "cuda": ("CUDA_VERSION",),
    "cudnn": ("CUDNN_VERSION",),
    "nccl": ("NCCL_VERSION",),
}
"""What states a fact: variables of a base's processes, or else arguments of its build."""
INFO = "megatron/core/package_info.py"
OS = "org.opencontainers.image.ref.name", "org.opencontainers.image.version"  # labels


Model = TypeVar("Model", bound=BaseModel)


class UnknownFact(ValueError):
    """A fact that must be there and that nobody states."""


class _Project(BaseModel):
    requires_python: str = Field("", alias="requires-python")
    dependencies: list[str] = []


class _PyProject(BaseModel):
    project: _Project


def propose(matrix: Matrix, text: str, news: Iterable[UpstreamNews], site: Settings) -> str:
    """The text of matrix.yaml with all that is new; what was there stays as it is.

    Raises UsageError where what would be written is no matrix.
    """
    news = [*news]
    text = _with_releases(matrix, text, news, site)
    for one in news:  # what is inserted last stands first
        for version, stands_for in reversed([*one.new.items()]):
            if one.kind == "images":
                text = _with_base(matrix, text, one, version, stands_for, site)
            if one.kind == "extensions":
                *_, last = (
                    key for key, each in matrix.extensions.items() if each.package == one.name
                )
                why = UnknownFact(f"commit {stands_for}, which nobody has compiled")
                text = _insert(text, "extensions", last, _comment(f"{one.name}-{version}", why))
    yamlfile.parse(text, Matrix, "matrix.yaml as it would be")
    return text


def _with_releases(matrix: Matrix, text: str, news: list[UpstreamNews], site: Settings) -> str:
    """The text with each new release behind the one before it."""
    at_index: dict[str, str] = {}
    in_git: dict[str, tuple[str, str]] = {}
    for one in news:
        if one.kind == "index":
            at_index |= one.new
        if one.kind == "git":
            in_git |= {version: (one.name, commit) for version, commit in one.new.items()}
    for version in sorted({*at_index, *in_git}, key=numbers, reverse=True):
        before = [one for one in matrix.releases if numbers(one) < numbers(version)]
        after = max(before, key=numbers)
        try:
            if version not in in_git:
                raise UnknownFact("at the package index; git has no tag of it, or didn't answer")
            entry = _release(version, *in_git[version], matrix.releases[after], site)
            entry |= {"sdist": True} if at_index.get(version) else {}
            block = _block(version, entry, MegatronRelease, f"its own facts, patches of {after}")
        except (LauncherError, ValueError) as error:
            block = _comment(version, error)
        text = _insert(text, "releases", after, block)
    return text


def _with_base(
    matrix: Matrix, text: str, news: UpstreamNews, tag: str, name: str, site: Settings
) -> str:
    """The text with a row of a base, after the newest row on that repository."""
    rows = {key: row for key, row in matrix.rows.items() if row.base == f"{news.name}:{news.known}"}
    if not rows:
        return text  # a builder
    after, like = next(iter(rows.items()))
    before, own, behind = news.known.partition(after)
    key = tag.removeprefix(before).removesuffix(behind)
    try:
        if not own or like.packages:
            raise UnknownFact(f"its packages are to be chosen, as those of {after} were")
        block = _block(key, _row(name, matrix, site), Row, "facts of the base's configuration")
    except (LauncherError, ValueError) as error:
        block = _comment(name, error)
    return _insert(text, "rows", after, block)


def _row(name: str, matrix: Matrix, site: Settings) -> dict[str, Any]:
    """A row on a base, with the newest release that fits. Raises UnknownFact and EngineError."""
    there = repository.describe(site.mirrored(name))
    given = (one.partition(" /bin/")[0] for one in there.steps if one.startswith("RUN |"))
    said = {**dict(re.findall(r"\b([A-Z_]+)=(\S+)", " ".join(given))), **there.env}
    facts: dict[str, Any] = {"base": name, "os": " ".join(there.labels.get(one, "") for one in OS)}
    for fact, variables in VARIABLES.items():
        facts[fact] = next((said[one] for one in variables if said.get(one)), "")
    facts["python"] = ".".join(facts["python"].split(".")[:2])
    for fact in ("os", "python", "torch"):
        if not facts[fact].strip():
            raise UnknownFact(f"its configuration doesn't state {fact}")
    for fact, value in facts.items():
        if not re.fullmatch(r"[\w.+:/ -]*", value):
            raise UnknownFact(f"its configuration states no {fact}: {value!r}")
    facts = {fact: value for fact, value in facts.items() if value}
    facts["megatron"] = next(iter(matrix.releases))
    row = _checked(Row, facts)
    fitting = [
        release
        for release, each in matrix.releases.items()
        if each.git.is_named and not misfit(row, release, each)
    ]
    if not fitting:
        raise UnknownFact("no release of the matrix fits it")
    platforms = [
        one
        for one in ("linux/amd64", "linux/arm64")
        if one in there.platforms and row.compiled_by(one) in matrix.builders
    ]
    if not platforms:
        raise UnknownFact(f"no builder for {row.abi} in builders")
    facts["megatron"] = max(fitting, key=numbers)
    return facts | ({} if platforms == [AMD64] else {"platforms": platforms}) | {"untried": True}


def _release(
    version: str, url: str, commit: str, like: MegatronRelease, site: Settings
) -> dict[str, Any]:
    """A release by its commit: what its own files say of it. Raises LauncherError, ValueError."""
    at = megatron_source.repository(url, commit, site)
    files = {
        name: megatron_source.git(at, "show", f"{commit}:{name}")
        for name in (INFO, "pyproject.toml", "setup.py")
    }
    with owned.scratch(site.cache) as folder:
        (folder / INFO).parent.mkdir(parents=True)
        (folder / INFO).write_text(files[INFO], encoding="utf-8")
        own = checkout.release(folder)
    extension = re.search(r'Extension\(\s*"(megatron[\w.]+)"', files["setup.py"])
    if not extension:
        raise UnknownFact("its setup.py names no compiled module")
    project = _checked(_PyProject, tomllib.loads(files["pyproject.toml"])).project
    torch = [one for one in map(Requirement, project.dependencies) if one.name == "torch"]
    limits = {
        "python": project.requires_python,
        "torch": str(torch[0].specifier) if torch else "",
    }
    return {
        "git": {"url": url, "commit": commit},
        "patches": like.patches,
        "extension": extension[1],
        **({"version": own} if own != version else {}),
        **{name: limit for name, limit in limits.items() if limit},
    }


def _block(key: str, entry: dict[str, Any], model: type[BaseModel], why: str) -> list[str]:
    """The lines of an entry, as the matrix writes them. Raises ValueError for one that isn't."""
    _checked(model, entry)
    dumped = yaml.safe_dump({key: entry}, sort_keys=False, width=1000, default_flow_style=None)
    lines = dumped.replace("'", '"').splitlines()
    return [f"  # Proposed by `launcher matrix news`: {why}.", *(f"  {line}" for line in lines)]


def _checked(model: type[Model], entry: dict[str, Any]) -> Model:
    try:
        return model.model_validate(entry)
    except ValidationError as error:
        raise UnknownFact(first_fault(error)) from error


def _comment(what: str, why: Exception) -> list[str]:
    """The line that stands for what can't be an entry."""
    reason = " ".join(str(getattr(why, "problem", why)).split())
    return [f"  # New {what}: {reason}"]


def _insert(text: str, section: str, after: str, block: list[str]) -> str:
    """The text with a block behind an entry of a section, unless the section has the comment.

    Raises UsageError where the entry doesn't stand on lines of its own.
    """
    lines = text.splitlines()
    tops = [at for at, line in enumerate(lines) if re.match(rf"{section}:\s*(#|$)", line)]
    entry = re.compile(rf"""  (['"]?){re.escape(after)}\1:""")
    found = [at for top in tops for at in range(top, len(lines)) if entry.match(lines[at])]
    if not found:
        raise UsageError(
            f"matrix.yaml: {section}: {after} isn't written on lines of its own, by two spaces",
            "Write it so, or add what is new by hand: " + block[0].strip(),
        )
    if len(block) == 1 and any(line.startswith(block[0].partition(": ")[0]) for line in lines):
        return text
    at = found[0] + 1
    while at < len(lines) and lines[at].startswith("   "):
        at += 1
    return "".join(f"{line}\n" for line in [*lines[:at], *block, *lines[at:]])
