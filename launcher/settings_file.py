"""The settings file: a site's folders and mirrors as YAML, each key in place of a variable."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from launcher import names, yamlfile
from launcher.errors import UsageError
from launcher.settings import ANSWER_WITHIN, LONGEST_WITHIN, expanded, repository_fault

SECRET = ("git_mirror", "index_url", "torch_index")
"""Keys whose values may hold a password."""


def _repository(value: str) -> str:
    if fault := repository_fault(value):
        raise ValueError(fault)
    return value


def _is_secret(key: str, value: object) -> bool:
    """Whether a value may have a password in it, by its key or, before a host, wherever it is."""
    return key in SECRET or "@" in str(value)


Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Text, AfterValidator(names.matching(r"[^\0-\x1f\x7f]+", "a path"))]
Repository = Annotated[Text, AfterValidator(_repository)]
Index = Annotated[Text, AfterValidator(names.index)]
GitMirror = Annotated[Text, AfterValidator(names.git_mirror)]


class SettingsFile(BaseModel):
    """The keys of the file; launcher.settings.Settings says what each is."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cache: Folder | None = None
    matrix: Folder | None = None
    runs: Folder | None = None
    torch_index: Annotated[str, AfterValidator(lambda text: text and names.index(text))] | None = (
        None
    )
    git_mirror: GitMirror | None = None
    index_url: Index | None = None
    image_mirrors: dict[Repository, Repository] = {}
    answer_within: Annotated[float, Field(gt=0, le=LONGEST_WITHIN)] = ANSWER_WITHIN


def read(path: Path) -> SettingsFile:
    """The file at `path`; one with nothing but comments is fine.

    Raises UsageError with file, line and key where it is wrong.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(
            f"{path}: can't be read: {error.strerror}",
            "LAUNCHER_SETTINGS names it: unset it, or name another.",
        ) from error
    return _read(path, changed)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> SettingsFile:
    """Read once for all who ask for settings, until the file changes (ns since 1970)."""
    name = str(path)
    root = yamlfile.tree(yamlfile.read(path, name), name)
    if root is None:
        return SettingsFile()
    read = yamlfile.validate(root, SettingsFile, name, _is_secret)
    beside = {
        key: str(path.parent / expanded(folder))
        for key in ("cache", "matrix", "runs")
        if (folder := getattr(read, key)) is not None
    }
    return read.model_copy(update=beside)
