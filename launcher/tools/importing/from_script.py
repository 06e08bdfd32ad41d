"""A run file of a script that lies on this machine: it is run in a sandbox, and read from that."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.tools.importing.commands import Word
from launcher.tools.importing.manifests import SUFFIXES, as_script
from launcher.tools.importing.recording import Recorder, Sandbox, ScriptMachine
from launcher.tools.importing.sandbox import ScriptCall
from launcher.tools.importing.shell_script import Images, ImportResult, imported
from launcher.tools.importing.starters import ScriptContext, batch_lines, variables

BATCH = re.compile(r"^#(SBATCH|PBS|BSUB)\b", re.MULTILINE)
LONGEST = 2**18
"""Characters that a script may have, far more than one that a person wrote."""
MOST_SECONDS = 120
"""For all runs of a script, and for reading what they gave."""


def import_script(
    path: Path,
    text: str,
    images: Images,
    sandbox: Sandbox,
    *,
    given: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    nodes: int | None = None,
    gpus: int | None = None,
    number: int | None = None,
) -> ImportResult:
    """The run file of the script `text` at `path`, called with variables and arguments.

    `nodes` and `gpus` are what it is answered where it asks for them. Raises UsageError where it
    is no script, starts no program, or has to be stopped before it does.
    """
    name = str(path)
    values = [*arguments, *(given or {}).values()]
    for what, one in [("the script", text), *(("an argument or value", each) for each in values)]:
        if any("\ud800" <= char <= "\udfff" for char in one):
            raise UsageError(f"{name}: {what} isn't UTF-8 text")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{name}:{line}: a null byte: this is no shell script")
    if len(text) > LONGEST:
        raise UsageError(f"{name}: more than {LONGEST} characters: this is no training script")
    whole, cwd, given = path.resolve(), Path.cwd(), dict(given or {})
    if whole.parent == Path("/"):
        raise UsageError(
            f"{name}: lies in /, and what lies beside a script is shown to it",
            "Copy it into a folder of its own.",
        )
    with _time_limit(name):
        if path.suffix in SUFFIXES:
            manifest = as_script(text, name)
            text, nodes = manifest.text, nodes or manifest.nodes
            given = {**manifest.variables, **given}
        called = _called(text, whole.parent, cwd)
        batch = next((one for one in (text, *called) if BATCH.search(one)), text)
        asked = batch_lines(batch)
        if nodes:
            asked.counts["nodes"] = Word(str(nodes), 1)
        if path.suffix in SUFFIXES:  # an operator sets torchrun's, by PET_NNODES
            asked.counts["operator"] = Word(str(nodes), 1)
        call = ScriptCall(text, whole, cwd, _beside(whole), arguments, "\n".join(called))
        recording = Recorder(call, machine(batch, asked, nodes, gpus), given, sandbox).record()
        return imported(
            recording,
            asked,
            name,
            images,
            number=number,
            exists=lambda one: Path(cwd, Path(one).expanduser()).is_file(),
        )


@contextmanager
def _time_limit(name: str) -> Iterator[None]:
    """Raise UsageError after MOST_SECONDS, also within a regular expression; on the main thread."""

    def late(*_: object) -> None:
        raise UsageError(f"{name}: it can't be read within {MOST_SECONDS} seconds")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def machine(text: str, asked: ScriptContext, nodes: int | None, gpus: int | None) -> ScriptMachine:
    """What a script is answered, by its batch lines and by what is given for it."""
    counts = {name: int(word.text) for name, word in asked.counts.items() if word.text.isdigit()}
    several = {"nodes": nodes or counts.get("nodes", 0), "gpus": gpus or counts.get("gpus", 0)}
    batch = bool(BATCH.search(text))
    known = variables({**counts, **{name: count for name, count in several.items() if count}})
    return ScriptMachine(
        max(1, several["nodes"]), several["gpus"], batch, known if batch or nodes else {}
    )


def _called(text: str, *folders: Path) -> list[str]:
    """The texts of the scripts in the folders that the text names, as far as they can be read."""
    found, size = dict[Path, str](), 0
    for name in dict.fromkeys(re.findall(r"(?<![\w./-])[\w./-]+\.(?:sh|sbatch|slurm|env)\b", text)):
        for path in (Path(folder / name.lstrip("/")).resolve() for folder in folders):
            with suppress(OSError):  # one that may not be read, or a name that is too long
                if path not in found and path.is_file():
                    size += path.stat().st_size
                    if size <= LONGEST:
                        found[path] = path.read_text(encoding="utf-8", errors="replace")
    return list(found.values())


def _beside(path: Path) -> Path:
    """The folder that a script may read: its checkout, else its own."""
    for folder in path.parents:
        if (folder / ".git").exists() and folder not in (Path.home(), Path("/")):
            return folder
    return path.parent
