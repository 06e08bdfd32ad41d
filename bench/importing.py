"""`launcher import` over a folder of scripts: what comes of each, word for word.

    python3 -m bench import FOLDER [--list | --truth N]

FOLDER holds scripts, or is a file with one path a line. A script is complete where its run file
has the model's sizes, or names what they wait for. A word is lost where the start has an option
that neither the run file nor a message has. With `--truth`, N scripts for which all values are
given are compared with what plain bash starts, word for word.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench import truth
from launcher.base import yamlfile
from launcher.base.errors import LauncherError
from launcher.cli.runfile import images
from launcher.runs.plan import render
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.program import program
from launcher.runs.runfile.config import RunConfig
from launcher.tools.importing import placeholders
from launcher.tools.importing.commands import Word
from launcher.tools.importing.from_script import _beside, import_script, machine
from launcher.tools.importing.recording import Recorder, World
from launcher.tools.importing.sandbox import ScriptCall, find_sandbox
from launcher.tools.importing.shell_script import ImportResult
from launcher.tools.importing.starters import batch_lines
from launcher.tools.importing.starts import as_options

SUFFIXES = (".sh", ".sbatch", ".slurm", ".pbs", ".job")
GOES_WITHOUT = [("--distributed-backend", ["nccl"])]
SIZES = ("--num-layers", "--hidden-size")
"""T5 has encoder- before its layers, a fork _ for -, and a hybrid model its layers in a pattern."""


def main(arguments: list[str]) -> int:
    """Print what comes of each script with `--list`, and the sums; 1 where a goal is missed."""
    paths = [path.resolve() for path in _scripts(Path(arguments[0]))]
    if "--truth" in arguments:
        return _truth(paths, int(arguments[arguments.index("--truth") + 1]))
    sandbox, chosen = find_sandbox(), images("24.10")
    kinds, waits, lost, slow = collections.Counter[str](), collections.Counter[str](), 0, 0.0
    for path in paths:
        begun = time.monotonic()
        os.chdir(_beside(path))  # where its users call it
        try:
            text = yamlfile.read(path, str(path))
            done = import_script(path, text, chosen, sandbox)
        except LauncherError as error:
            kind, what = "refused", " ".join(str(error).split())[-160:]
        else:
            missing = _lost(done)
            lost += len(missing)
            kind, needs = _kind(done)
            waits.update(needs)
            what = ", ".join([*needs, *(f"LOST {one}" for one in missing)])
        kinds[kind] += 1
        slow = max(slow, time.monotonic() - begun)
        if "--list" in arguments:
            print(f"{kind:<10} {path}: {what}", flush=True)
    complete = kinds["as it is"] + kinds["waits"]
    print(f"{len(paths)} scripts: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    print(f"waited for most: {', '.join(f'{name} ({n})' for name, n in waits.most_common(8))}")
    print(f"complete: {100 * complete / max(1, len(paths)):.1f} % (at least 85)")
    print(f"options lost without a word: {lost} (none); the slowest took {slow:.1f} s")
    return 0 if complete >= 0.85 * len(paths) and not lost else 1


def _truth(paths: list[Path], most: int) -> int:
    """Compare with plain bash; 1 where a word is another, or too few scripts start something."""
    box, compared, wrong = find_sandbox(), 0, 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if compared == most:
            break
        names, _ = placeholders.unset_variables(text)
        count = placeholders.count_arguments(text)
        given, values = truth.values(text, names, count)
        call = ScriptCall(text, path, path.parent, path.parent, values)
        answered = machine(text, batch_lines(text), None, None)
        recorder = Recorder(call, answered, given, box)
        sent = {k: v for k, v in recorder._environment(World()).items() if "STANDIN" not in k}
        plain = truth.starts(path, {**sent, **given}, values)
        plain = [_as_shown(one, path) for one in plain if one[0] in truth.COMPARED]
        try:
            commands = recorder.record().commands
        except LauncherError:
            commands = ()
        ours = [[*one.words] for one in commands if one.name in truth.COMPARED]
        if not plain:
            continue
        compared += 1
        left = [words for words in plain if not any(_same(words, one) for one in ours)]
        wrong += bool(left)
        for words in left:
            near = max(ours, key=lambda one: len({w.text for w in one} & {*words}), default=[])
            odd = [word for word in words if word not in {w.text for w in near}]
            print(f"{path}: {' '.join(words[:4])}: {odd[:6]}", flush=True)
    print(f"{compared} scripts compared with plain bash, {wrong} of them not equal (none)")
    return 0 if compared == most and not wrong else 1


def _as_shown(words: list[str], path: Path) -> list[str]:
    """Words as the importer shows them: relative to the script's folder, with ~."""
    folder = str(path.parent)
    shown = (word.replace("/home/me", "~").replace(f"{folder}/", "./") for word in words)
    return [os.path.normpath(word) if word.startswith((".", "~")) else word for word in shown]


def _same(words: list[str], ours: list[Word]) -> bool:
    """Whether each word is equal, but for those that the importer marks as not known."""
    return len(words) == len(ours) and all(
        a in (b.text, os.path.normpath(b.text or ".")) or b.unknown
        for a, b in zip(words, ours, strict=True)
    )


def _scripts(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield from map(Path, place.read_text(encoding="utf-8").split())
        return
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES:
            yield path


def _kind(done: ImportResult) -> tuple[str, list[str]]:
    """How complete a run file is, and what it waits for."""
    needs = [left.what for left in done.told if left.what.startswith("to be given: ")]
    names = [text[len("to be given: ") :].partition(" (")[0] for text in needs]
    options = {name for name, values in as_options(done.start.arguments) if values}
    plain = {one.replace("_", "-").replace("--encoder-num", "--num") for one in options}
    hybrid = {"--hybrid-layer-pattern", "--hybrid-override-pattern"} & plain
    if not {*plain, *(SIZES[:1] if hybrid else ())}.issuperset(SIZES):
        return "no sizes", names
    if not names and not done.wrong:
        return "as it is", names
    return "waits", names


def _lost(done: ImportResult) -> list[str]:
    """The options of the start that are neither in the run file nor in a message."""
    config = yamlfile.parse(done.text, RunConfig, "run.yaml")
    kind = program(config.program).kind
    release = config.image.megatron or "0.9.0"
    rendered = {
        one.name: [_plain(word) for word in one.words]
        for one in render.options(config, kind, Layout(1, 1, 1, 1), release)
    }
    said = " ".join(left.what for left in done.told)
    lost = []
    for name, values in dict(as_options(done.start.arguments)).items():
        words = [_plain(word.text) for word in values]
        key = name.lstrip("-").replace("-", "_")
        named = re.search(rf"(?<![\w-])({re.escape(name)}|[\w.]*\b{re.escape(key)})(?![\w-])", said)
        own = rendered.get(name, [])
        mapped = len(own) == len(words) and all(
            a == b or ("/" in a and "/" in b) for a, b in zip(own, words, strict=True)
        )
        if (name, words) in GOES_WITHOUT:
            continue
        if name and not mapped and not named and not any(word.unknown for word in values):
            lost.append(" ".join([name, *words]))
    return lost


def _plain(text: str) -> str:
    """A number in one spelling, any other text as it is."""
    try:
        return repr(float(text))
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
