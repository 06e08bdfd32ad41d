"""Upstream's shell script to a run file: what starts training, its options, what is left over."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import yaml
from pydantic import ValidationError

from launcher import yamlfile
from launcher.errors import UsageError
from launcher.importing import shell
from launcher.importing.container_line import Container, container
from launcher.importing.shell import HARMLESS, PLACEHOLDER, Branch, Command, Left, Script, Word
from launcher.importing.slurm_lines import Batch, Count, batch
from launcher.plan import arguments
from launcher.plan.config import RunConfig
from launcher.plan.gpus import parse_gpus
from launcher.plan.image import Facts
from launcher.plan.mounts import Host
from launcher.plan.plan import Stamp, make_plan
from launcher.plan.program import fewest, upstreams
from launcher.plan.secrets import has_credential, is_secret, is_secret_option
from launcher.plan.source import Origin

NGC = re.compile(r"nvcr\.io[/#]nvidia/pytorch:(\d\d\.\d\d)-py3")
MOST_WORDS = 1000
"""Values of one option; a blend of data has two for each of its files."""
NUMBER = re.compile(r"(?=.{1,18}$)[+-]?(?!0\d)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
BUNDLE = re.compile(r"(\$|what )\w*(ARG|OPT|PARAM|FLAG|EXTRA)", re.IGNORECASE)
"""A variable of unknown value that by its name holds options, not one option's value."""
OURS = {
    "--distributed-backend": "nccl",
    "--local-rank": None,
    "--local_rank": None,
}
"""Options that go without saying here, with the value that does; None for any."""
OF_TORCHRUN = frozenset(
    "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id "
    "rdzv_conf max_restarts monitor_interval start_method role log_dir redirects tee "
    "local_ranks_filter node_ip local_addr".split()
)
"""torchrun's options that take a value: https://docs.pytorch.org/docs/stable/elastic/run.html"""
CARRIED = frozenset("nproc_per_node nnodes node_rank master_addr master_port max_restarts".split())
ITSELF = frozenset("standalone use_env rdzv_backend rdzv_endpoint rdzv_id start_method".split())
"""What of torchrun's the runner does itself, in its own way."""
OF_THE_HOST = frozenset("PATH LD_LIBRARY_PATH PYTHONPATH CUDA_HOME".split())
OF_THE_RUNNER = frozenset("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK".split())
PATHS = frozenset(
    "data.path data.cache data.vocab_file data.merge_file data.tokenizer_model checkpoint.save "
    "checkpoint.load logging.tensorboard_dir".split()
)
ORDER = ("name", "image", "program", "gpus", "nodes", "max_restarts")


@dataclass(frozen=True)
class Imported:
    """A run file's text; what of the script isn't in it; what keeps the file from running."""

    text: str
    told: tuple[Left, ...]
    wrong: str


@dataclass(frozen=True)
class Start:
    """The command that starts training: torchrun's options, the program, its arguments.

    `torchrun` is None where Python starts the program itself.
    """

    line: int
    torchrun: tuple[Word, ...] | None
    program: Word
    arguments: tuple[Word, ...]
    env: dict[str, Word]
    before: tuple[Word, ...]
    output: str


@dataclass
class _Sheet:
    """The run file as it is filled: YAML texts by dotted key, and what is told."""

    keys: dict[str, str] = field(default_factory=dict)
    megatron: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)
    told: list[Left] = field(default_factory=list)

    def tell(self, line: int, what: str) -> None:
        self.told.append(Left(line, what))


def imported(
    text: str,
    name: str,
    images: Mapping[str, tuple[str, ...]],
    *,
    tag: str,
    bare: Collection[str] = (),
    positional: tuple[str, ...] = (),
) -> Imported:
    """The run file of the script `text`; nothing of it is run.

    `images` has the releases of each tag, the default first; `tag` is taken where the script names
    no other. Images of the tags in `bare` have no programs of upstream's. `positional` are the
    script's own arguments, $1 and on. Raises UsageError where the script starts no program.
    """
    if any("\udc80" <= char <= "\udcff" for argument in positional for char in argument):
        raise UsageError(f"{name}: an argument behind -- isn't UTF-8 text")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{name}:{line}: a null byte: this is no shell script")
    asked = batch(text[: shell.LONGEST])
    script = _unwrapped(shell.read(text, positional, asked.variables))
    starts = list(_starts(script))
    if not starts:
        raise UsageError(f"{name}: no command that starts a program of Megatron's", _hint(script))
    start, branches = max(starts, key=lambda one: _rank(*one))
    script = _entered(script, branches, start)
    sheet = _Sheet(told=[*asked.left, *script.left])
    around = _around(script, start, sheet)
    sheet.keys["name"] = _yaml_text(_run_name(name))
    _set_program(sheet, start, around)
    _set_processes(sheet, start, around, asked)
    upstream = {t: releases for t, releases in images.items() if t not in bare}
    _set_options(sheet, start, around, images, upstream, tag)
    _set_env(sheet, script, start, around)
    for other, _ in starts:
        if other is not start:
            sheet.tell(other.line, "another command that starts a program: not carried over")
    written = _written(sheet, name)
    told = sorted(dict.fromkeys(sheet.told), key=lambda left: left.line)
    return Imported(written, tuple(told), _wrong(written, images, bare))


# What starts training


def _unwrapped(script: Script) -> Script:
    """The script with what `bash -c "…"` is given read as part of it."""
    commands: list[Command] = []
    for command in script.commands:
        at = _shell_text(command)
        if at is None:
            commands.append(command)
            continue
        inner = shell.within(command.words[at])
        before = command.words[: at - 2]
        for one in inner.commands:
            env = command.env | one.env
            commands.append(Command((*before, *one.words), env, one.line, command.output))
        script.left += inner.left
    branches = [replace(one, script=_unwrapped(one.script)) for one in script.branches]
    return replace(script, commands=commands, branches=branches)


def _starts(
    script: Script, branches: tuple[Branch, ...] = ()
) -> Iterator[tuple[Start, tuple[Branch, ...]]]:
    """The commands that start a program, each with the branches that lead to it."""
    for command in script.commands:
        if start := _start(command):
            yield start, branches
    for branch in script.branches:
        yield from _starts(branch.script, (*branches, branch))


def _rank(start: Start, branches: tuple[Branch, ...]) -> tuple[bool, bool, bool, int]:
    """The best is a pretrain_*.py, then what is started on several GPUs, then what is followed.

    Of several others, it is the one with most arguments.
    """
    trains = _program_name(start).startswith("pretrain_")
    several = start.torchrun is not None or any(word.text == "srun" for word in start.before)
    return trains, several, not branches, 0 if trains else len(start.arguments)


def _entered(script: Script, branches: tuple[Branch, ...], start: Start) -> Script:
    """The script with these branches followed, which is told."""
    for branch in branches:
        what = (
            f"{branch.left.what.partition(':')[0]}: followed to line {start.line}, where it starts"
        )
        inner = branch.script
        script = Script(
            [*script.commands, *inner.commands],
            script.exported | inner.exported,
            [one for one in script.left if one != branch.left]
            + [Left(branch.left.line, f"{what} {_program_name(start)}"), *inner.left],
        )
    return script


def _shell_text(command: Command) -> int | None:
    """Where the text of `bash -c TEXT` stands among the words, if anything of it is known."""
    words = command.words
    for at in range(2, len(words)):
        shells = words[at - 2].text.rpartition("/")[2] in ("bash", "sh")
        if shells and re.fullmatch(r"-[a-z]*c", words[at - 1].text) and words[at].text.strip():
            return at
    return None


def _start(command: Command) -> Start | None:
    """The command taken apart, if it starts a Python program."""
    words = command.words
    for at, word in enumerate(words):
        called = word.text.rpartition("/")[2]
        if called == "torchrun":
            return _taken_apart(command, at, words[at + 1 :])
        if re.fullmatch(r"python[\d.]*", called):
            rest = words[at + 1 :]
            while rest and re.fullmatch(r"-[uOBsSEI]+", rest[0].text):
                rest = rest[1:]
            modules = ("torch.distributed.launch", "torch.distributed.run")
            launched = (
                [w.text for w in rest[:1]] == ["-m"] and rest[1:2] and rest[1].text in modules
            )
            return _taken_apart(
                command, at, rest[2:] if launched else rest, launched=bool(launched)
            )
        if word.unknown and words[at + 1 : at + 2] and _named_in_part(words[at + 1]):
            return _taken_apart(command, at + 1, words[at + 1 :], launched=False)
        if re.fullmatch(r"pretrain_\w+\.py", called):
            return _taken_apart(command, at, words[at:], launched=False)
    return None


def _taken_apart(
    command: Command, at: int, words: tuple[Word, ...], *, launched: bool = True
) -> Start | None:
    """torchrun's own words end at the program, the first that is no option or its value."""
    position = 0
    while position < len(words) and words[position].text.startswith("-"):
        name = words[position].text.lstrip("-").replace("-", "_")
        position += 2 if name in OF_TORCHRUN else 1
    if position >= len(words):
        return None
    program = words[position]
    if words[:position] and words[position - 1].text in ("-m", "--module"):
        path = f"{program.text.replace('.', '/')}.py"
        program = replace(program, text=path if path in upstreams() else "")
    if not program.text.endswith(".py"):
        return None
    return Start(
        line=command.line,
        torchrun=words[:position] if launched else None,
        program=program,
        arguments=words[position + 1 :],
        env=command.env,
        before=command.words[:at],
        output=command.output,
    )


def _program_name(start: Start) -> str:
    return _last(start.program)


def _last(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _hint(script: Script) -> str:
    for command in script.commands:
        words = (Word("-c", 0), *command.words)
        for before, word in pairwise(words):
            if word.unknown and re.fullmatch(r"-[a-z]*c", before.text):
                return f"Line {command.line} starts what isn't known: {word.unknown}."
    if script.left:
        return f"Line {script.left[0].line}: {script.left[0].what}."
    return "It takes torchrun, python -m torch.distributed.launch, or python, and the program."


# Around it: docker run, srun, mkdir


def _around(script: Script, start: Start, sheet: _Sheet) -> Container:
    """The container that the script starts, if any; what other commands do is told."""
    found = Container()
    for command in script.commands:
        mine = bool(start.before) and command.words[: len(start.before)] == start.before
        words = start.before if mine else command.words
        called = words[0].text.rpartition("/")[2]
        if called == "sudo" and len(words) > 1:
            words, called = words[1:], words[1].text
        contained = called == "docker" and len(words) > 1 and words[1].text == "run"
        if contained:
            found = container(words[2:])
            for left in found.left:
                sheet.tell(left.line, left.what)
        if mine:  # what stands beside the start, in the same bash -c
            words = command.words[len(start.before) :]
            called = words[0].text.rpartition("/")[2]
        if called == "cd":
            sheet.tell(command.line, "cd: relative paths start where the launcher is started")
        elif (mine or not contained) and called not in HARMLESS and not _start(command):
            sheet.tell(command.line, f"{_told_words(words)}: not carried over")
    if start.before and start.before[0].unknown:
        why = start.before[0].unknown
        sheet.tell(start.line, f"{why}: how it starts the program isn't carried over")
    wrapper = start.before[0].text if start.before else ""
    if wrapper and wrapper not in ("docker", "sudo", "exec", "nohup", "time", "env"):
        sheet.tell(start.line, f"{wrapper}: how it starts the program isn't carried over")
    if start.output.replace("&", "").strip():
        sheet.tell(start.line, f"{start.output}: the launcher prints the output; redirect that")
    return found


def _told_words(words: tuple[Word, ...]) -> str:
    text = " ".join(word.text or "…" for word in words)
    return yamlfile.printable(text if len(text) <= 60 else f"{text[:60]}…")


# Keys


def _run_name(name: str) -> str:
    stem = name.rpartition("/")[2].removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:60] or "imported"


def _set_program(sheet: _Sheet, start: Start, around: Container) -> None:
    """One of the image's programs by its name; any other is a script of this machine."""
    text = start.program.text
    inside = re.search(r"(?:^|/)((?:pretrain_\w+|train_rl|(?:examples|tools)/.+)\.py)$", text)
    own = inside[1] if inside else _named_in_part(start.program)
    if own:
        sheet.keys["program"] = _yaml_text(own)
        if text.startswith("/"):
            sheet.tell(start.program.line, f"{text}: the image's own {own} is taken")
        return
    text = around.outside(text)
    own = text if text.startswith(("/", "./", "../", "~")) else f"./{text}"
    sheet.keys["program"] = _yaml_text(own)


def _named_in_part(program: Word) -> str:
    """Of a path that isn't known wholly, the one program of upstream's that ends as it does."""
    if not program.unknown:
        return ""
    found = [path for path in upstreams() if f"/{path}".endswith(f"/{_last(program)}")]
    return found[0] if len(found) == 1 else ""


def _set_processes(sheet: _Sheet, start: Start, around: Container, asked: Batch) -> None:
    """gpus, nodes and max_restarts, by what torchrun is told, or srun by the #SBATCH lines."""
    given = _by_srun(start, asked)
    for name, values, line in _options(start.torchrun or ()):
        key = name.lstrip("-").replace("-", "_")
        given[key] = values[0] if values else Word("", line)
        if key not in CARRIED | ITSELF:
            sheet.tell(line, f"torchrun's {name}: not carried over")
    count = _whole(sheet, given.get("nproc_per_node"), "gpus", 1)
    devices = (start.env.get("CUDA_VISIBLE_DEVICES") or Word("", 0)).text
    devices = devices or around.gpus.partition("device=")[2]
    text = str(count)
    if (given.get("nproc_per_node") or Word("", 0)).text in ("gpu", "auto"):
        text = "all"
    elif "nproc_per_node" not in given and around.gpus:
        text = around.gpus
    if devices and len(devices.split(",")) == count:
        text = f"device={devices}"
    sheet.keys["gpus"] = _yaml_text(text) if not text.isdigit() else text
    restarts = _whole(sheet, given.get("max_restarts"), "max_restarts", 0)
    if restarts:
        sheet.keys["max_restarts"] = str(restarts)
    if asked.gpus and text.isdigit():
        _tell_difference(sheet, asked.gpus, "GPUs of each node", "gpus", count)
    _set_nodes(sheet, given, asked)


def _by_srun(start: Start, asked: Batch) -> dict[str, Word]:
    """What torchrun would be told where srun starts each process itself."""
    if start.torchrun is not None or not any(word.text == "srun" for word in start.before):
        return {}
    counts = {"nproc_per_node": asked.tasks or asked.gpus, "nnodes": asked.nodes}
    return {name: Word(str(one.number), one.line) for name, one in counts.items() if one}


def _tell_difference(sheet: _Sheet, asked: Count, what: str, key: str, count: int) -> None:
    if asked.number != count:
        told = f"{asked.number} {what} are asked for, and the script uses {count}: {key} is {count}"
        sheet.tell(asked.line, told)


def _set_nodes(sheet: _Sheet, given: dict[str, Word], asked: Batch) -> None:
    count = _whole(sheet, given.get("nnodes"), "nodes", 1)
    if asked.nodes:
        _tell_difference(sheet, asked.nodes, "nodes", "nodes.count", count)
    if count < 2:
        return
    rank = given.get("node_rank")
    address = given.get("master_addr")
    port = _whole(sheet, given.get("master_port"), "nodes.master_port", 29500)
    known = address is not None and address.text and not address.unknown
    sheet.keys["nodes"] = (
        f"{{count: {count}, rank: {_whole(sheet, rank, 'nodes.rank', 0)}, master_addr: "
        f"{_yaml_text(address.text, flow=True) if address and known else 'first-node'}, "
        f"master_port: {port}}}"
    )
    line = given["nnodes"].line
    sheet.tell(line, "nodes: start it on each with --set nodes.rank=N")
    if not known:
        sheet.tell(line, "nodes.master_addr: fill in the address of the first node")


def _whole(sheet: _Sheet, word: Word | None, key: str, otherwise: int) -> int:
    """The word as a whole number; what isn't one is told."""
    if word is None or word.text in ("gpu", "auto"):
        return otherwise
    if re.fullmatch(r"\d{1,6}", word.text) and not word.unknown:
        return int(word.text)
    why = word.unknown or f"{word.text!r} isn't a whole number"
    sheet.tell(word.line, f"{why}: {key} is taken as {otherwise}")
    return otherwise


def _options(words: Iterable[Word]) -> Iterator[tuple[str, tuple[Word, ...], int]]:
    """Each option with its values and its line; words before the first are of the option ""."""
    name, values, line = "", list[Word](), 0
    for word in words:
        if not re.match(r"--\w", word.text):
            values.append(word)
            line = line or word.line
            continue
        if name or values:
            yield name, tuple(values), line
        name, equals, value = word.text.partition("=")
        values, line = [], word.line
        if equals or word.unknown:
            values = [replace(word, text=value)]
    if name or values:
        yield name, tuple(values), line


def _set_options(
    sheet: _Sheet,
    start: Start,
    around: Container,
    images: Mapping[str, tuple[str, ...]],
    upstream: Mapping[str, tuple[str, ...]],
    tag: str,
) -> None:
    """The program's options under their keys, the rest under megatron_args; and the image."""
    own, given = arguments.own_keys(), dict[str, tuple[tuple[Word, ...], int]]()
    for name, values, line in _options(start.arguments):
        values = _without_bundles(sheet, values)
        if len(values) > MOST_WORDS:
            sheet.tell(line, f"{name} with {len(values)} values: not carried over")
        elif not name:
            for word in values:
                sheet.tell(word.line, f"{word.unknown or word.text}: not carried over")
        elif not _goes_without_saying(name, values):
            if name in given:
                sheet.tell(given[name][1], f"{name}: given again on line {line}, which counts")
            given[name] = (values, line)
    release = _set_image(sheet, start, around, images, upstream, tag, list(given))
    known = arguments.table().of(release) if release else None
    checked = sheet.keys["program"] == "pretrain_gpt.py" and known is not None
    for name, (values, line) in given.items():
        if name == "--group-query-attention" and "--num-query-groups" in given:
            continue  # the key num_query_groups says it too
        if checked and name not in (known or ()):
            sheet.tell(line, f"{name}: Megatron {release} has no such option")
            continue
        unknown = next((w for w in values if w.unknown or PLACEHOLDER.search(w.text)), None)
        key = own.get(name, f"megatron_args.{name[2:].replace('-', '_')}")
        if is_secret_option(name) or any(has_credential(word.text) for word in values):
            sheet.tell(line, f"{name}: a secret isn't written down")
            continue
        if unknown:
            why = unknown.unknown or f"{unknown.text} is to be filled in"
            sheet.tell(unknown.line, f"{why}: {key} is left out ({name})")
            continue
        texts = [around.outside(w.text) if key in PATHS else w.text for w in values]
        _put(sheet, key, name, texts, line)


def _without_bundles(sheet: _Sheet, values: tuple[Word, ...]) -> tuple[Word, ...]:
    """The values without unknown words that stand for further options."""
    for word in values:
        if BUNDLE.match(word.unknown):
            sheet.tell(word.line, f"{word.unknown}: what it stands for is left out")
    return tuple(word for word in values if not BUNDLE.match(word.unknown))


def _goes_without_saying(name: str, values: tuple[Word, ...]) -> bool:
    if name not in OURS:
        return False
    return OURS[name] is None or [word.text for word in values] == [OURS[name]]


def _put(sheet: _Sheet, key: str, name: str, texts: list[str], line: int) -> None:
    """Put an option's values under its key in the first form that the key takes."""
    section, _, last = key.partition(".")
    for form in _forms(texts):
        value = yaml.load(form, Loader=yamlfile.Loader)  # noqa: S506 - a safe loader
        if section == "megatron_args":
            if _same(value, texts, exact=True):
                sheet.megatron[last] = form
                return
        elif _same(value, texts, exact=False) and _fits(section, last, value):
            sheet.keys[key] = form
            return
    sheet.tell(line, f"{name} {' '.join(texts)}: {key} doesn't take it")


def _forms(texts: list[str]) -> Iterator[str]:
    """YAML for an option's values: true, a number as it stands, text, a list."""
    if not texts:
        yield "true"
    elif len(texts) == 1:
        if NUMBER.fullmatch(texts[0]):
            yield texts[0]
        yield _yaml_text(texts[0])
    if texts:
        numbers = [NUMBER.fullmatch(text) for text in texts]
        parts = [t if n else _yaml_text(t, flow=True) for t, n in zip(texts, numbers, strict=True)]
        yield f"[{', '.join(parts)}]"
        yield f"[{', '.join(_yaml_text(text, flow=True) for text in texts)}]"


def _same(value: Any, texts: list[str], *, exact: bool) -> bool:
    """True where the value is rendered as it was given; as the same number, where not `exact`."""
    if not texts:
        return value is True
    values = value if isinstance(value, list) else [value]
    if len(values) != len(texts) or any(isinstance(one, bool | None) for one in values):
        return False
    for one, text in zip(values, texts, strict=True):
        same_number = not isinstance(one, str) and not exact and float(one) == float(text)
        if str(one) != text and not same_number:
            return False
    return True


def _fits(section: str, key: str, value: object) -> bool:
    try:
        arguments.SECTIONS[section].model_validate({key: value})
    except ValidationError:
        return False
    return True


def _set_image(
    sheet: _Sheet,
    start: Start,
    around: Container,
    images: Mapping[str, tuple[str, ...]],
    upstream: Mapping[str, tuple[str, ...]],
    tag: str,
    options: list[str],
) -> str | None:
    """The image by its tag, with the release of those it may have that knows most options.

    `upstream` are the images with upstream's programs: one that lacks the script's is told, and
    another taken.
    """
    named = NGC.search(around.image)
    if named and named[1] in images:
        tag = named[1]
    elif around.image:
        sheet.tell(around.line, f"{around.image}: isn't of the matrix; {tag} is taken")
    program = sheet.keys["program"]
    series = upstreams().get(program)
    having = {
        one: tuple(r for r in releases if series is None or arguments.series(r) in series)
        for one, releases in (upstream if series else images).items()
    }
    if not having.get(tag):
        other = next((one for one in having if images[one][0] in having[one]), tag)
        what = program if tag in upstream else "programs of upstream's"
        there = f"{program}: Megatron has it in {', '.join(series or ())}"
        sheet.tell(start.line, f"{tag} has no {what}, so {other} is taken ({there})")
        tag = other
    releases = having.get(tag) or images[tag]
    table = arguments.table()
    known = {release: table.of(release) or set() for release in releases}
    release = max(releases, key=lambda one: sum(name in known[one] for name in options))
    if table.of(releases[0]) is None:  # it may have them all
        release = releases[0]
    sheet.keys["image"] = f'"{tag}"' if NUMBER.fullmatch(tag) else tag
    usual = images[tag][0]
    if release != usual:
        sheet.keys["image"] = f'{{tag: "{tag}", megatron: "{release}"}}'
        lacking = [name for name in options if name not in (table.of(usual) or options)]
        some = ", ".join([name for name in lacking if name in known[release]][:3])
        asked = program if usual not in releases else some
        sheet.tell(start.line, f"{asked}: not in Megatron {usual}, so {release} is taken")
    return release


def _set_env(sheet: _Sheet, script: Script, start: Start, around: Container) -> None:
    """The variables that the script exports, but for those that the launcher sees to."""
    split = {"parallel.tensor_model_parallel_size", "parallel.context_parallel_size"}
    for name, word in {**script.exported, **around.env, **start.env}.items():
        if name in OF_THE_RUNNER or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            continue
        if name == "CUDA_VISIBLE_DEVICES" and "device=" in sheet.keys["gpus"]:
            continue
        if (name, word.text) == ("CUDA_DEVICE_MAX_CONNECTIONS", "1") and any(
            sheet.keys.get(key, "1") != "1" for key in split
        ):
            continue  # the launcher sets it itself
        if name in OF_THE_HOST:
            sheet.tell(word.line, f"{name}: belongs to the image, and isn't carried over")
        elif is_secret(name, word.text):
            sheet.env[name] = "null"
            sheet.tell(word.line, f"{name}: a secret isn't written down; yours is passed on")
        elif word.unknown:
            sheet.tell(word.line, f"{word.unknown}: env.{name} is left out")
        else:
            number = NUMBER.fullmatch(word.text) and str(yaml.safe_load(word.text)) == word.text
            sheet.env[name] = word.text if number else _yaml_text(word.text)
    for outer, inner, read_only in around.mounts:
        texts = [*sheet.megatron.values(), *sheet.env.values()]
        if any(inner in text for text in texts):
            sheet.mounts.append(
                f"- {{source: {_yaml_text(outer, flow=True)}, target: "
                f"{_yaml_text(inner, flow=True)}, read_only: {str(read_only).lower()}}}"
            )


# Writing


def _yaml_text(text: str, *, flow: bool = False) -> str:
    """The text as a YAML scalar that is read as text, quoted where it must be."""
    import json

    plain = f"[{text}]" if flow else f"a: {text}"
    wanted: object = [text] if flow else {"a": text}
    try:
        if "\n" not in text and yaml.load(plain, Loader=yamlfile.Loader) == wanted:  # noqa: S506
            return text
    except (yaml.YAMLError, ValueError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _written(sheet: _Sheet, name: str) -> str:
    """The run file: sections in the models' order, keys in the script's."""
    blocks = [[f"# From {yamlfile.printable(name.rpartition('/')[2])}, by `launcher import`."]]
    blocks[0] += [f"{key}: {sheet.keys[key]}" for key in ORDER if key in sheet.keys]
    for section in arguments.SECTIONS:
        own = {k: v for k, v in sheet.keys.items() if k.startswith(f"{section}.")}
        if own:
            lines = [f"  {key.partition('.')[2]}: {value}" for key, value in own.items()]
            blocks.append([f"{section}:", *lines])
    for title, values in (("megatron_args", sheet.megatron), ("env", sheet.env)):
        if values:
            lines = [f"  {_yaml_text(key)}: {value}" for key, value in values.items()]
            blocks.append([f"{title}:", *lines])
    if sheet.mounts:
        blocks.append(["mounts:", *(f"  {mount}" for mount in sheet.mounts)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _wrong(text: str, images: Mapping[str, tuple[str, ...]], bare: Collection[str]) -> str:
    """What the launcher would say to the run file, "" where it would start it."""
    name = "the run file"
    root = yamlfile.tree(text, name)
    config = yamlfile.validate(root, RunConfig, name)
    release = config.image.megatron or images[config.image.tag or ""][0]
    origin = Origin(name, yamlfile.lines(root), {})
    gpus = parse_gpus(config.gpus)
    gpus = replace(gpus, count=fewest(config)) if gpus.count is None else gpus
    host = Host(uid=1, gid=1, home="/", cwd="/", cache="/")
    try:
        make_plan(
            config,
            origin,
            Facts(release, config.image.tag not in bare),
            host,
            Stamp("", ""),
            gpus=gpus,
        )
    except UsageError as error:
        return str(error)
    return ""
