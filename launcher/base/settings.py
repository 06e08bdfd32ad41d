"""A site's settings: folders and mirrors, from variables or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from launcher.base import files, names
from launcher.base.errors import UsageError
from launcher.base.trust import require_trusted

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
"""The checkout, or the folder that the package is installed in."""

DATA = PACKAGE / "share" if (PACKAGE / "share").is_dir() else ROOT
"""Where matrix, lock, template and patches lie by default: with an installed package, in it."""

GITHUB = "https://github.com/"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_WITHIN, LONGEST_WITHIN = 10.0, 3600.0
SECRET = ("git_mirror", "index_url", "torch_index")
"""Keys of the settings file whose values may hold a password."""
_REPOSITORY = re.compile(rf"(?P<host>{names.HOST})(/{names.PART})*")


@dataclass(frozen=True)
class Settings:
    """What differs from site to site.

    cache: the folder of downloads, a private engine, the demo's files (LAUNCHER_CACHE); by default
        megatron-launchpad in $XDG_CACHE_HOME or ~/.cache
    matrix: the matrix file (LAUNCHER_MATRIX), with its lock, template and patches beside it
    torch_index: a second index, for packages that `index_url` lacks (LAUNCHER_TORCH_INDEX); by
        default that of PyTorch's CPU builds; "" turns it off
    runs: the folder of the records (LAUNCHER_RUNS); by default megatron-launchpad/runs in
        $XDG_STATE_HOME or ~/.local/state
    extras: the folder of the locks of extras (LAUNCHER_EXTRAS); by default beside `runs`
    git_mirror: replaces `https://github.com/` in a source's address (LAUNCHER_GIT_MIRROR)
    index_url: the package index (PIP_INDEX_URL); by default the one in pip's configuration
    image_mirrors: beginnings of image names, each with its replacement (LAUNCHER_IMAGE_MIRRORS)
    answer_within: seconds to wait for each answer (LAUNCHER_ANSWER_WITHIN); by default 10
    prices: the price of a GPU-hour, in your currency, for each GPU model: {h100-80gb: 2.5}
    """

    cache: Path
    matrix: Path
    torch_index: str
    git_mirror: str
    runs: Path
    extras: Path
    index_url: str = ""
    image_mirrors: Mapping[str, str] = field(default_factory=dict)
    answer_within: float = ANSWER_WITHIN
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def written(self) -> Path:
        """Where the lock and what is rendered are written: beside the matrix.

        In the current folder where the matrix is that of an installed package.
        """
        beside = self.matrix.parent
        return Path.cwd() if beside == DATA != ROOT else beside

    def mirrored(self, reference: str) -> str:
        """Where to pull `reference` from: of the mirrors that fit, the one with the longest prefix.

        A prefix ends where a part of the name ends: `nvcr.io/nvidia` is none of `nvcr.io/nvidia2`.
        """
        full = _with_registry(reference)
        fitting = [prefix for prefix in self.image_mirrors if _begins(full, prefix)]
        if not fitting:
            return reference
        prefix = max(fitting, key=len)
        return self.image_mirrors[prefix] + full.removeprefix(prefix)


def settings() -> Settings:
    """The settings of this process: variables, then the settings file, then what is usual.

    Raises UsageError for a file that is wrong, or a variable, and ForeignFileError for a file or a
    folder that other users could change.
    """
    env, file = os.environ, _file()
    home_cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mirrors, within = env.get("LAUNCHER_IMAGE_MIRRORS"), env.get("LAUNCHER_ANSWER_WITHIN")

    def text(variable: str, key: str, usual: str, check: names.Check) -> str:
        if not env.get(variable):
            return "" if variable in env else str(file.get(key, usual))
        try:
            return check(env[variable])
        except ValueError as error:  # its value may hold a password
            raise UsageError(f"{variable}: {error}") from None

    return Settings(
        cache=_own_folder("LAUNCHER_CACHE", "cache", home_cache / "megatron-launchpad"),
        matrix=_folder("LAUNCHER_MATRIX", "matrix", DATA / "matrix.yaml"),
        torch_index=text("LAUNCHER_TORCH_INDEX", "torch_index", TORCH_INDEX, names.index),
        git_mirror=_ended(
            text("LAUNCHER_GIT_MIRROR", "git_mirror", GITHUB, names.git_mirror) or GITHUB
        ),
        runs=runs_folder(),
        extras=_own_folder("LAUNCHER_EXTRAS", "extras", _state() / "extras"),
        index_url=text("PIP_INDEX_URL", "index_url", "", names.index),
        image_mirrors=file.get("image_mirrors", {}) if mirrors is None else _pairs(mirrors),
        answer_within=_seconds(within) if within else file.get("answer_within", ANSWER_WITHIN),
        prices=file.get("prices", {}),
    )


def runs_folder() -> Path:
    """The folder of the records, as in `settings`; it is asked for more often than all else."""
    return _own_folder("LAUNCHER_RUNS", "runs", _state() / "runs")


def _state() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(home) / "megatron-launchpad"


def _folder(variable: str, key: str, usual: Path) -> Path:
    return _path(os.environ.get(variable) or _file().get(key) or usual)


def _own_folder(variable: str, key: str, usual: Path) -> Path:
    path = _folder(variable, key, usual)
    try:
        require_trusted(path)
    except files.ForeignFileError:
        raise
    except OSError as error:  # too long a name, or one below a file
        raise UsageError(f"{variable}, or {key}: is no folder: {error.strerror}") from error
    return path


def file_path() -> Path:
    """Where the settings file is looked for (LAUNCHER_SETTINGS)."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    usual = config / "megatron-launchpad/settings.yaml"
    return _path(os.environ.get("LAUNCHER_SETTINGS") or usual)


def expanded(path: str | Path) -> Path:
    """`path` with a folder for ~ or ~user. Raises UsageError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(
            f"{path}: {user} is no user with a home folder here", "Write the folder out."
        ) from None


def _repository(text: str) -> str:
    """What an image's reference can begin with. Raises ValueError."""
    from launcher.base.reference import parse_reference

    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise ValueError(
            "takes a registry and parts of a name in lower case, as in mirror.example/nvidia"
        )
    if parse_reference(f"{match['host']}/x").registry != match["host"]:
        raise ValueError(f"begins with a registry, as in docker.io/{text}")
    return text


def _file() -> Mapping[str, Any]:
    """What the settings file says by its keys; YAML is read only where there is one."""
    path = file_path()
    if not os.environ.get("LAUNCHER_SETTINGS") and not path.exists():
        return {}
    require_trusted(path)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(
            f"{path}: can't be read: {error.strerror}",
            "LAUNCHER_SETTINGS names it: unset it, or name another.",
        ) from error
    return _read(path, changed)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> Mapping[str, Any]:
    """Read once for all who ask for settings, until the file changes (ns since 1970).

    Raises UsageError with file, line and key where it is wrong; nothing but comments is fine.
    """
    from pydantic import AfterValidator, ConfigDict, Field, create_model

    from launcher.base import yamlfile

    def text(check: names.Check, least: int = 1) -> Any:
        checked = AfterValidator(lambda value: value and check(value))
        return Annotated[str, Field(min_length=least), checked] | None, None

    folder = text(names.matching(r"[^\0-\x1f\x7f]+", "a path"))
    repository = Annotated[str, Field(min_length=1), AfterValidator(_repository)]
    keys: dict[str, Any] = {
        **dict.fromkeys(("cache", "matrix", "runs", "extras"), folder),
        "torch_index": text(names.index, least=0),
        "git_mirror": text(names.git_mirror),
        "index_url": text(names.index),
        "image_mirrors": (dict[repository, repository], {}),
        "answer_within": (Annotated[float, Field(gt=0, le=LONGEST_WITHIN)], ANSWER_WITHIN),
        "prices": (dict[str, Annotated[float, Field(ge=0)]], {}),
    }
    strict = ConfigDict(extra="forbid", strict=True)
    model = create_model("SettingsFile", __config__=strict, **keys)
    root = yamlfile.tree(yamlfile.read(path, str(path)), str(path))
    if root is None:
        return {}
    found = yamlfile.validate(root, model, str(path), _is_secret)
    read: dict[str, Any] = found.model_dump(exclude_none=True)
    beside = {
        key: path.parent / expanded(read[key])
        for key in read.keys() & {"cache", "matrix", "runs", "extras"}
    }
    return read | beside


def _is_secret(key: str, value: object) -> bool:
    """Whether a value may have a password in it, by its key or, before a host, wherever it is."""
    return key in SECRET or "@" in str(value)


def _ended(url: str) -> str:
    """A mirror's URL so that a repository's name can follow: `git@host:` can as it is."""
    return url if url.endswith(("/", ":")) else f"{url}/"


def _pairs(text: str) -> dict[str, str]:
    """The mirrors in `nvcr.io=mirror.example/nvcr,docker.io=mirror.example/hub`."""
    mirrors = {}
    for pair in filter(None, (one.strip() for one in text.split(","))):
        prefix, equals, mirror = pair.partition("=")
        try:
            if not equals:
                raise ValueError("takes a=b")
            mirrors[_repository(prefix)] = _repository(mirror)
        except ValueError as fault:
            raise UsageError(
                f"LAUNCHER_IMAGE_MIRRORS: {pair.rpartition('@')[2]}: {fault}",
                "LAUNCHER_IMAGE_MIRRORS=nvcr.io=mirror.example/nvcr,docker.io=mirror.example/hub",
            ) from None
    return mirrors


def _seconds(text: str) -> float:
    """The seconds in LAUNCHER_ANSWER_WITHIN."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds <= LONGEST_WITHIN:
        return seconds
    raise UsageError(
        f"LAUNCHER_ANSWER_WITHIN: {text!r} is no number of seconds above 0, {LONGEST_WITHIN:.0f} "
        "at most"
    )


def _begins(reference: str, prefix: str) -> bool:
    """True where `prefix` is all of the first parts of a name; a colon may begin a tag or port."""
    rest = reference.removeprefix(prefix)
    if rest == reference or not prefix:
        return False
    return rest[:1] in ("", "/", "@") or (rest[0] == ":" and "/" not in rest.partition("@")[0])


def _with_registry(reference: str) -> str:
    """The reference in full: `python:3.11` is docker.io/library/python:3.11 to an engine."""
    from launcher.base.reference import parse_reference

    parts = parse_reference(reference)
    return parts.in_full + reference.removeprefix(parts.name)


def _path(value: str | Path) -> Path:
    """An absolute path: a relative one would mean another folder to an engine or to git."""
    return expanded(value).absolute()
