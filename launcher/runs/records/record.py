"""The record of a run: its folder, written and read here only.

First of all what was asked for, to go on with it later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from launcher.base import files, logfile, owned
from launcher.base.errors import UsageError, nearest
from launcher.base.names import LABEL
from launcher.base.settings import runs_folder
from launcher.runs.payload import KEY
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin, RunRequest
from launcher.runs.runfile.secrets import (
    HIDDEN,
    has_credential,
    is_secret,
    is_secret_option,
    redacted,
)

FILE, FACTS, PLAN, BUILD = "run.json", "facts.json", "plan.json", "build.json"
METRICS, ENDINGS, LOG = "metrics.jsonl", "endings.jsonl", "log"
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
LINE_ROOM = 1 << 13
"""More bytes than a line of an ending has."""

IMAGE_NAME = re.compile(rb'^ "image": \{\n  "name": ("(?:[^"\\]|\\.)*")', re.MULTILINE)
PIECE = 1 << 20
"""Bytes of lines that are read together."""

BLOCK = 1 << 12
"""Bytes that are read at once of what is short, or of which the beginning or the end is enough."""


@dataclass(frozen=True)
class Record:
    """A run as it was asked for; `config` is the run file with all that was laid over it.

    `processes` is the number on each node. The values of secrets aren't in it; `hidden` are the
    keys that they were left out of; of `rest`, "--" and the option. `payload` is the digest of what
    ran: "" of an older launcher's, which was in the image.
    """

    run: str
    name: str
    created: str
    backend: str
    cwd: str
    file: str
    config: dict[str, Any]
    rest: tuple[str, ...]
    processes: int
    hidden: tuple[str, ...] = ()
    payload: str = ""

    def asked(self) -> RunRequest:
        """The request, to be assembled again. Raises UsageError for another launcher's keys."""
        try:
            config = RunConfig.model_validate(self.config)
        except ValueError as error:
            raise UsageError(
                f"run {self.run}: this launcher can't read its record: {folder(self.run)}",
                "Use the launcher that started it.",
            ) from error
        origin = Origin(f"run {self.run} ({self.file})", {}, {})
        return RunRequest(config, origin, self.cwd, tuple(self.rest), payload_digest=self.payload)


def record_of(plan: Plan, asked: RunRequest, backend: str) -> Record:
    """The record of a run that is about to start."""
    config, hidden = without_secrets(asked.config, exclude_unset=True)
    rest, option = redacted(asked.rest), ""
    for word, safe in zip(asked.rest, rest, strict=True):
        option = safe.partition("=")[0] if safe.startswith("--") else option
        if word != safe:
            hidden.append(f"-- {option}")
    return Record(
        run=plan.run,
        name=plan.name,
        created=dict(plan.labels).get(f"{LABEL}created", ""),
        backend=backend,
        cwd=asked.cwd,
        file=asked.origin.name,
        config=config,
        rest=rest,
        processes=plan.processes_per_node,
        hidden=tuple(hidden),
        payload=dict(plan.labels).get(LABEL + KEY, ""),
    )


def without_secrets(
    config: RunConfig, *, exclude_unset: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The configuration as it is kept, and the dotted keys whose values were left out of it.

    A variable's becomes null, which is the launcher's own of that name.
    """
    hidden = list[str]()

    def kept(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: kept(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
        if isinstance(value, list):
            return [kept(inner, f"{key}.{at}") for at, inner in enumerate(value)]
        section, _, name = key.partition(".")
        variable = section == "env" and is_secret(name, value)
        option = section == "megatron_args" and is_secret_option(name, value)
        if variable or has_credential(value) or (option and value is not None):
            hidden.append(key)
            return None if variable else HIDDEN
        return value

    return kept(config.model_dump(mode="json", exclude_unset=exclude_unset), ""), hidden


def check_secrets(record: Record, config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise UsageError with the secrets that the record left out and `config` lacks."""
    lacking = [key for key in record.hidden if not _supplied(key, config, environ)]
    if lacking:
        raise UsageError(
            f"run {record.run}: the record keeps no secrets, and lacks {', '.join(lacking)}",
            "Export a variable of env by its name, or set the key: --set KEY=VALUE. "
            "What stood after -- needs a new run.",
        )


def _supplied(key: str, config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Whether what was under the key is there; what stood after `--` never is."""
    section, _, name = key.partition(".")
    if section == "env":
        literal = config.env.get(name) is not None
        return literal or name in config.secrets or name in environ or name not in config.env
    return not key.startswith("--") and (key, HIDDEN) not in _leaves("", config.model_dump())


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    """The dotted keys of all that is in dictionaries and lists, and what is under each."""
    below = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(below, dict):
        return [(key, value)]
    return [leaf for part in below for leaf in _leaves(f"{key}.{part}".lstrip("."), below[part])]


def folder(run: str) -> Path:
    """The folder of a run's record and files."""
    return runs_folder() / run


def make(run: str) -> Path:
    """The folder of a run's record, made where it isn't there. Raises `OSError`."""
    at = folder(run)
    at.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        owned.make_folder(at, 0o700)
    return at


def write(record: Record) -> None:
    """Keep the record. Raises UsageError where it can't be kept."""
    put(record.run, FILE, asdict(record))


def put(run: str, name: str, value: object) -> None:
    """Keep `value` as JSON under `name`, for its user alone. Raises UsageError where it can't."""
    try:
        make(run)
        put_bytes(run, name, f"{json.dumps(value, indent=1)}\n".encode())
    except OSError as error:
        raise UsageError(
            f"the run's record can't be kept in {folder(run)}: {error.strerror}",
            "export LAUNCHER_RUNS=FOLDER, one you may write to.",
        ) from error


def put_bytes(run: str, name: str, content: bytes) -> None:
    """Write a file of the run's folder, which is there, so that nobody sees half of it."""
    files.write(folder(run) / name, content, 0o600)


def append(run: str, name: str, value: object) -> None:
    """Add a line of JSON to a file of the run's folder, and see it on the disk. Raises OSError."""
    with open(files.open_own(folder(run) / name, APPEND), "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(value)}\n")
        file.flush()
        os.fsync(file.fileno())


def keep_room(run: str, name: str) -> None:
    """Keep space for another line of a file of the run's folder, where the disk has some now."""
    with suppress(OSError), open(files.open_own(folder(run) / name, APPEND), "ab") as file:
        logfile.keep_room(file.fileno(), LINE_ROOM)


def read(run: str, name: str) -> dict[str, Any] | None:
    """What is kept under `name`; None where nothing is, as of an older launcher's."""
    return read_file(folder(run) / name)


def read_file(path: str | Path) -> dict[str, Any] | None:
    """The object in a file of JSON; None where there is none, or the file can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = _parse(file.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def image_name(path: str | Path) -> str:
    """The image's name in a file of facts, "" where there is none.

    The beginning is enough, as `put` writes it: only a key of the outermost object follows a line's
    end and one space.
    """
    with suppress(OSError, ValueError), open(path, "rb", buffering=0) as file:
        if found := IMAGE_NAME.search(file.read(BLOCK)):
            return str(json.loads(found[1]))
    image = (read_file(path) or {}).get("image")
    return str(image.get("name", "")) if isinstance(image, dict) else ""


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON: none of a line cut short, nor in a file that can't be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        rest = b""
        while piece := file.read(PIECE):
            whole, _, rest = (rest + piece).rpartition(b"\n")
            yield from _together(whole)
        yield from _together(rest)


def _together(lines: bytes) -> Iterable[dict[str, Any]]:
    """The objects in lines; where all of them are whole, they are parsed at once, which is fast."""
    try:
        found = from_json(b"[" + lines.replace(b"\n", b",") + b"]")
    except ValueError:
        return _objects(lines.split(b"\n"))
    return [one for one in found if isinstance(one, dict)]


def newest_lines(path: str | Path, most: int) -> Iterator[dict[str, Any]]:
    """As `read_lines`, the newest first, of the last `most` bytes; no more is read than is used."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        at = os.fstat(file.fileno()).st_size
        first, begun = max(0, at - most), b""
        while at > first:
            end, at = at, max(first, at - BLOCK)
            begun, *whole = (os.pread(file.fileno(), end - at, at) + begun).split(b"\n")
            yield from _objects(reversed(whole))
        yield from _objects([begun])


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in filter(None, lines):
        with suppress(ValueError):
            if isinstance(found := _parse(line), dict):
                yield found


def _parse(text: bytes) -> Any:
    """What JSON says; it may have halves of characters, as a file's name has. Raises ValueError."""
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def log_name(attempt: int) -> str:
    """The file of an attempt's log: "log" of the first, then "log.1"."""
    return f"{LOG}.{attempt}" if attempt else LOG


def logs(folder: Path) -> list[Path]:
    """The logs that are kept of a run, the first attempt's first."""
    found = [path for path in folder.glob(f"{LOG}.*") if path.suffix[1:].isdecimal()]
    found.sort(key=lambda path: int(path.suffix[1:]))
    return [path for path in (folder / LOG, *found) if path.exists()]


def records() -> list[Record]:
    """All that are kept, newest first."""
    return sorted(each(), key=lambda record: record.created, reverse=True)


def each() -> Iterator[Record]:
    """One after the other, in no order; a folder without a readable record is passed over."""
    runs, names = runs_folder(), list[str]()
    with suppress(OSError):
        names = os.listdir(runs)
    for name in names:
        if kept := load(name, f"{runs}/{name}/{FILE}"):
            yield kept


def load(run: str, path: str | Path) -> Record | None:
    """The record of a run: its folder, written and read here only, to resume and repeat it."""
    with suppress(TypeError):  # another launcher's
        kept = Record(**read_file(path) or {})
        return kept if kept.run == run else None  # it becomes a path
    return None


def forget(run: str) -> None:
    """Remove the record of a run that never started."""
    with suppress(OSError):
        owned.remove_folder(folder(run), runs_folder())


def find(text: str) -> Record:
    """The record that `text` names: an id, its beginning, or a name's newest. Raises UsageError."""
    if text.isalnum() and (whole := load(text, folder(text) / FILE)):
        return whole
    known = records()
    run = match(text, [(record.run, record.name) for record in known], "None was started yet.")
    return next(record for record in known if record.run == run)


def expanded(texts: Iterable[str], known: Iterable[tuple[str, str]]) -> list[str]:
    """The texts, each pattern as the ids of all runs among (id, name) whose names fit it.

    A pattern that fits none stays, so that whoever looks for it says so.
    """
    pairs, found = [*known], list[str]()
    for text in texts:
        fitting = [run for run, name in pairs if fits(name, text)] if is_pattern(text) else []
        found += fitting or [text]
    return [*dict.fromkeys(found)]


def is_pattern(text: str) -> bool:
    """Whether it may fit several names, none of which has such a character."""
    return any(character in text for character in "*?[")


def fits(name: str, pattern: str) -> bool:
    """Whether a run's name is the one given, or fits the pattern."""
    from fnmatch import fnmatchcase

    return name == pattern or (is_pattern(pattern) and fnmatchcase(name, pattern))


def match(
    text: str,
    known: list[tuple[str, str]],
    none: str,
    own: list[tuple[str, str]] | None = None,
) -> str:
    """The id that `text` names among (id, name), the newest first; a name may be a pattern.

    Raises UsageError, which lists what is known, or the user's `own` runs where others' are known,
    and says `none` where there is nothing to choose from.
    """
    begun = [run for run, _ in known if text and run.startswith(text)]
    named = [run for run, name in known if fits(name, text)]
    if text in begun:
        return text
    if named:
        return named[0]
    if len(set(begun)) == 1:
        return begun[0]
    if begun:
        raise UsageError(f"{text!r} begins several runs: {', '.join(sorted(set(begun)))}")
    own = [*dict.fromkeys(known if own is None else own)]
    like = nearest(text, [word for pair in own for word in pair if word]).partition("Known")[0]
    listed = ", ".join(f"{run} ({name})" for run, name in own[:8])
    raise UsageError(f"no run {text!r}", f"{like}Known: {listed}" if listed else none)
