"""Imports a shell script as a run file: the training command, its options, and the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from launcher.agent.series import removed, series_of
from launcher.base.errors import UsageError
from launcher.base.yamlfile import printable
from launcher.runs.plan import program_options
from launcher.runs.plan.program import upstreams
from launcher.runs.runfile.secrets import has_credential, is_secret, is_secret_option
from launcher.tools.importing.commands import Omission, ScriptCommand, Word
from launcher.tools.importing.counts import set_processes
from launcher.tools.importing.placeholders import TO_FILL
from launcher.tools.importing.recording import Recording
from launcher.tools.importing.sheet import NUMBER, Sheet, fits, wrong, yaml_text
from launcher.tools.importing.starters import ScriptContext, exported, parse_around
from launcher.tools.importing.starts import (
    Start,
    as_options,
    choose,
    differences,
    distinct,
    find_starts,
    named_in_part,
    respelled,
    upstreams_path,
)

NGC = re.compile(r"nvcr\.io[/#]nvidia/pytorch:(\d\d\.\d\d)-py3")
OURS = {"--distributed-backend": "nccl", "--local-rank": None, "--local_rank": None}
"""Options that go without saying here, with the value that does; None for any."""
FORKS = {
    "--deepspeed": "a Megatron-DeepSpeed script",
    "--zero-stage": "a Megatron-DeepSpeed script",
    "--patch-tokenizer-type": "a Pai-Megatron-Patch script",
    "--use-mcore-models": "a script for an earlier Megatron",
}
HARMLESS = frozenset(
    "bash sh env exec date hostname scontrol nvidia-smi sleep mkdir touch ls module conda git "
    "chmod kill pkill killall squeue sacct which ip ifconfig ulimit source".split()
)
"""Commands that leave a run as it is, or that the image makes needless."""
OF_THE_HOST = frozenset("PATH LD_LIBRARY_PATH PYTHONPATH CUDA_HOME".split())
OF_THE_RUNNER = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK NNODES "
    "LOCAL_SIZE".split()
)
PATHS = frozenset(
    "data.path data.cache data.vocab_file data.merge_file data.tokenizer_model checkpoint.save "
    "checkpoint.load logging.tensorboard_dir".split()
)


@dataclass(frozen=True)
class Images:
    """The images to choose from: the releases of each tag, its default first.

    `tag` is taken where the script names no other; those in `bare` have no programs of upstream's.
    """

    releases: Mapping[str, tuple[str, ...]]
    tag: str
    bare: Collection[str] = ()

    @property
    def upstream(self) -> dict[str, tuple[str, ...]]:
        """Those with upstream's programs."""
        return {t: releases for t, releases in self.releases.items() if t not in self.bare}


@dataclass(frozen=True)
class ImportResult:
    """A run file's text; what of the script isn't in it; what keeps the file from running."""

    text: str
    told: tuple[Omission, ...]
    wrong: str
    start: Start


@dataclass
class _Import:
    """One start on its way into a run file."""

    start: Start
    around: ScriptContext
    images: Images
    exists: Callable[[str], bool]
    rows: tuple[str, ...]
    sheet: Sheet = field(default_factory=Sheet)


def imported(
    recording: Recording,
    asked: ScriptContext,
    name: str,
    images: Images,
    *,
    number: int | None = None,
    exists: Callable[[str], bool] = lambda path: False,
) -> ImportResult:
    """The run file of what was recorded of a script; `number` chooses among its starts, from 1.

    `exists` says whether a path, relative to where the launcher was started, is a file there.
    Raises UsageError where the script starts no program, or no such number.
    """
    found = find_starts(recording.commands)
    starts = distinct(found)
    if not starts:
        raise UsageError(
            f"{name}: no command that starts a program of Megatron's", _hint(recording)
        )
    if number is not None and not 1 <= number <= len(starts):
        raise UsageError(f"--start {number}: {name} has {len(starts)} starts")
    chosen = choose(starts) if number is None else number - 1
    start = starts[chosen]
    work = _Import(start, parse_around(asked, start.around), images, exists, recording.rows)
    sheet = work.sheet
    sheet.told += [*recording.told, *work.around.told]
    _set_name(work, name)
    _set_program(work)
    set_processes(sheet, start, work.around)
    _set_options(work)
    _set_slurm(work)
    _set_env(work)
    _set_resources(work)
    inner = {id(command) for one in found for command in (one.command, *one.around)}
    _tell_others(work, starts, [one for one in recording.commands if id(one) not in inner])
    for reason, (line, keys) in sheet.missing.items():
        sheet.tell(line, f"to be given: {reason} ({', '.join(dict.fromkeys(keys))})")
    written = sheet.written(name)
    told = sorted(dict.fromkeys(sheet.told), key=lambda left: left.line)
    return ImportResult(written, tuple(told), wrong(written, images.releases, images.bare), start)


def _hint(recording: Recording) -> str:
    """What to say of a script in which no command starts a program."""
    if recording.told:
        return f"Line {recording.told[0].line}: {recording.told[0].what}."
    if recording.commands:
        words = " ".join(word.text for word in recording.commands[-1].words[:6])
        return f"The last command that it ran is on line {recording.commands[-1].line}: {words}"
    return "It takes torchrun, deepspeed, accelerate launch or python, and the program."


def _tell_others(work: _Import, starts: Sequence[Start], commands: Sequence[ScriptCommand]) -> None:
    """Say what other commands there are: further starts, and what prepares the run."""
    sheet = work.sheet
    for number, other in enumerate(starts, 1):
        if other is not work.start:
            what = differences(work.start, other)
            sheet.tell(other.line, f"start {number} of {len(starts)}, not taken: {what}")
    for command in commands:
        if command.name not in HARMLESS:
            text = " ".join(word.text for word in command.words)
            text = printable(text if len(text) <= 60 else f"{text[:60]}…")
            sheet.tell(command.line, f"{text}: not carried over")


def _set_name(work: _Import, name: str) -> None:
    asked = work.around.slurm.pop("name", None)
    stem = re.sub(r"\.\w+$", "", name.rpartition("/")[2])
    if asked and not asked.unknown and re.fullmatch(r"[A-Za-z0-9][\w.-]{0,59}", asked.text):
        stem = asked.text
    usable = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:60]
    work.sheet.keys["name"] = yaml_text(usable or "imported")


def _set_program(work: _Import) -> None:
    """One of the image's programs by its name; any other is a script of this machine."""
    sheet, program, cwd = work.sheet, work.start.program, work.start.command.cwd
    text = program.text
    if cwd != ".":
        what = "relative paths start there, and here where the launcher is started"
        sheet.tell(work.start.line, f"cd {printable(cwd)}: {what}")
    own = upstreams_path(text) or (named_in_part(text) if program.unknown else "")
    if own:
        sheet.keys["program"] = yaml_text(own)
        if text.startswith(("/", "./")) and not program.unknown:
            sheet.tell(program.line, f"{text}: the image's own {own} is taken")
        return
    if program.unknown:
        sheet.keys["program"] = yaml_text(f"./{work.start.name or 'program.py'}")
        sheet.lack(program, "program")
        return
    if text.startswith("-m "):
        sheet.keys["program"] = yaml_text(f"./{text[3:].replace('.', '/')}.py")
        sheet.tell(program.line, f"{text}: its file is taken, not the module")
        return
    if not text.startswith(("/", "~")):
        text = text.removeprefix("./")
        text = text if cwd == "." else f"{cwd}/{text}"
    text = work.around.outside(text)
    text = text if text.startswith(("/", "./", "../", "~")) else f"./{text}"
    sheet.keys["program"] = yaml_text(text)
    if not work.exists(text):
        sheet.tell(
            program.line, f"{printable(text)}: no such file here; it is taken for the host's"
        )


# Options


def _set_options(work: _Import) -> None:
    """The program's options under their keys, the rest under megatron_args; and the image."""
    sheet, given = work.sheet, dict[str, tuple[tuple[Word, ...], int]]()
    forked = sheet.keys["program"] in upstreams()
    spelled = respelled(work.start.arguments) if forked else {}
    if spelled:
        what = "taken with - for _, as Megatron has them"
        sheet.tell(work.start.line, f"{', '.join(spelled)}: {what}")
    for name, values in as_options(work.start.arguments):
        line = values[0].line if values else _line_of(work.start, name)
        name = spelled.get(name, name)
        if not name:
            for word in values:
                if word.unknown:
                    work.sheet.lack(word, "further options")
                else:
                    sheet.tell(word.line, f"{word.text}: not carried over")
        elif name not in OURS or OURS[name] not in (None, " ".join(w.text for w in values)):
            if name in given and [w.text for w in given[name][0]] != [w.text for w in values]:
                sheet.tell(given[name][1], f"{name}: given again on line {line}, which counts")
            given[name] = (values, line)
    release = _set_image(work, list(given))
    known = program_options.table().options_of(release) if release else None
    if known is not None:
        known = known - {*removed(str(release))}
    upstreams_own = sheet.keys["program"] == "pretrain_gpt.py" and known is not None
    foreign = {
        name: given[name][1] for name in given if upstreams_own and name not in (known or ())
    }
    kinds = program_options.table().kinds_of(release) if release else {}
    for name, (values, line) in given.items():
        if name in foreign:
            continue
        if variable := _left_empty(work, name, values, kinds.get(name)):
            work.sheet.lack(Word("", line, variable), _key(name))
        else:
            _set_option(work, name, _taken(work, values, kinds.get(name)), line, list(given))
    if foreign:
        _tell_foreign(sheet, foreign, str(release))


def _line_of(start: Start, name: str) -> int:
    return next((w.line for w in start.arguments if w.text.partition("=")[0] == name), start.line)


def _taken(work: _Import, values: tuple[Word, ...], kind: str | None) -> tuple[Word, ...]:
    """The values that an option takes; further words that aren't known hold options."""
    most = {None: 1, "flag": 0}.get(kind, 10**6 if kind and " " in kind else 1)
    if kind is None and len(values) > 1 and not values[1].unknown:
        return values
    for word in values[most:]:
        if word.unknown:
            work.sheet.lack(word, "further options")
    return tuple(word for at, word in enumerate(values) if at < most or not word.unknown)


def _tell_foreign(sheet: Sheet, foreign: Mapping[str, int], release: str) -> None:
    """One headline for the options that the release hasn't, with the list."""
    whose = next((what for option, what in FORKS.items() if option in foreign), "")
    count = "an option" if len(foreign) == 1 else f"{len(foreign)} options"
    head = f"{whose}: " if whose else ""
    instead = removed(release)
    names = ", ".join(
        f"{name} (now {instead[name]})" if instead.get(name, "").startswith("--") else name
        for name in foreign
    )
    sheet.tell(min(foreign.values()), f"{head}Megatron {release} doesn't have {count}: {names}")


def _set_option(
    work: _Import, name: str, values: tuple[Word, ...], line: int, names: list[str]
) -> None:
    if name == "--group-query-attention" and "--num-query-groups" in names:
        return  # the key num_query_groups says it too
    key = _key(name)
    if any(is_secret_option(name, w.text) or has_credential(w.text) for w in values):
        work.sheet.tell(line, f"{name}: a secret isn't written down")
        return
    for word in values:
        if re.search(r"-tokens?$", name) and TO_FILL.fullmatch(word.text):
            continue  # <image> is a token's name
        filled = TO_FILL.search(word.text)
        if word.unknown or filled:
            reason = word.unknown or (filled and filled[0])
            work.sheet.lack(Word(word.text, word.line, reason or ""), key)
            return
        if re.search(r"(?<!\\)[*?]", word.text) and "/" in word.text:
            work.sheet.lack(Word(word.text, word.line, f"the files of {word.text}"), key)
            return
    texts = [work.around.outside(w.text) if key in PATHS else w.text for w in values]
    work.sheet.put(key, name, texts, line)


def _left_empty(work: _Import, name: str, values: tuple[Word, ...], kind: str | None) -> str:
    """The variable that the script names for an option's value, and that is empty; "" for none."""
    if any(w.text or w.unknown for w in values) or not (values or kind not in (None, "flag")):
        return ""
    naming = re.compile(rf"{re.escape(name)}[=\s]+[\"']?\$\{{?(\w+)")
    found = filter(None, map(naming.search, work.rows))
    return next((match[1] for match in found), "")


def _key(name: str) -> str:
    """An option's key; under megatron_args as it stands where its _ aren't Megatron's."""
    known = name in program_options.table().megatron
    spelled = name[2:].replace("-", "_") if known or "_" not in name else name
    return program_options.own_keys().get(name, f"megatron_args.{spelled}")


def _set_image(work: _Import, names: list[str]) -> str | None:
    """The image by its tag, with the release of those it may have that knows most options."""
    sheet, images, tag = work.sheet, work.images.releases, work.images.tag
    image = work.around.image
    named = NGC.search(image.text)
    if named and named[1] in images and not image.unknown:
        tag = named[1]
    elif image.text:
        what = image.unknown or image.text
        sheet.tell(image.line, f"{printable(what)}: isn't of the matrix; {tag} is taken")
    program = sheet.keys["program"]
    series = upstreams().get(program)
    having = {
        one: tuple(r for r in releases if series is None or series_of(r) in series)
        for one, releases in (work.images.upstream if series else images).items()
    }
    if not having.get(tag):
        other = next((one for one in having if images[one][0] in having[one]), tag)
        what = program if tag in work.images.upstream else "programs of upstream's"
        there = f"{program}: Megatron has it in {', '.join(series or ())}"
        sheet.tell(work.start.line, f"{tag} has no {what}, so {other} is taken ({there})")
        tag = other
    releases = having.get(tag) or images[tag]
    table = program_options.table()
    known = {release: table.options_of(release) or set() for release in releases}
    release = max(releases, key=lambda one: sum(name in known[one] for name in names))
    if table.options_of(releases[0]) is None:  # it may have them all
        release = releases[0]
    sheet.keys["image"] = f'"{tag}"' if NUMBER.fullmatch(tag) else tag
    usual = images[tag][0]
    if release != usual:
        sheet.keys["image"] = f'{{tag: "{tag}", megatron: "{release}"}}'
        lacking = [name for name in names if name not in (table.options_of(usual) or names)]
        some = ", ".join([name for name in lacking if name in known[release]][:3])
        asked = program if usual not in releases else some
        sheet.tell(work.start.line, f"{asked}: not in Megatron {usual}, so {release} is taken")
    return release


# Around the program


def _set_slurm(work: _Import) -> None:
    """The section slurm: keys of its own, and sbatch's further options."""
    sheet, around = work.sheet, work.around
    free = list[str]()
    for name, word in around.slurm.items():
        key, value = name.replace("-", "_"), int(word.text) if word.text.isdigit() else word.text
        shown = f"{name} {printable(word.text)}".rstrip()
        if word.unknown:
            work.sheet.lack(word, f"slurm.{name}")
        elif fits("slurm", {key: word.text or True}) or fits("slurm", {key: value}):
            bare = name == "signal" or not word.text
            sheet.keys[f"slurm.{key}"] = (word.text or "true") if bare else yaml_text(word.text)
        elif fits("slurm", {"options": {name: word.text or True}}):
            free.append(f"{name}: {yaml_text(word.text, flow=True) if word.text else 'true'}")
        else:
            sheet.tell(word.line, f"Slurm's {shown}: not carried over")
    if free:
        sheet.keys["slurm.options"] = f"{{{', '.join(free)}}}"
    kind = around.container
    batch = sheet.section("slurm") or any(
        one.name in ("srun", "sbatch") for one in work.start.around
    )
    if kind and (batch or kind in ("pyxis", "apptainer")) and fits("slurm", {"container": kind}):
        sheet.keys["slurm.container"] = kind
        image = around.image
        if image.text and not image.unknown and kind in ("pyxis", "apptainer"):
            sheet.keys["slurm.image"] = yaml_text(image.text)
        elif image.unknown:
            work.sheet.lack(image, "slurm.image")


def _set_env(work: _Import) -> None:
    """The variables that the script exports, but for those that the launcher sees to."""
    split = {"parallel.tensor_model_parallel_size", "parallel.context_parallel_size"}
    sheet, start = work.sheet, work.start
    words = {word.text for word in start.command.words}
    for name, word in {**exported(start.command, start.around), **work.around.env}.items():
        if name in OF_THE_RUNNER or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            continue
        if name.startswith(("SLURM_", "PBS_", "OMPI_", "PMI", "BASH_FUNC")):
            continue
        if name == "CUDA_VISIBLE_DEVICES" and "device=" in sheet.keys["gpus"]:
            continue
        if (name, word.text) == ("CUDA_DEVICE_MAX_CONNECTIONS", "1") and any(
            sheet.keys.get(key, "1") != "1" for key in split
        ):
            continue  # the launcher sets it itself
        if name in OF_THE_HOST:
            sheet.tell(word.line, f"{name}: belongs to the image, and isn't carried over")
        elif is_secret(name, word.text or None):
            sheet.keys[f"env.{name}"] = "null"
            sheet.tell(word.line, f"{name}: a secret isn't written down; yours is passed on")
        elif {*word.text.split()} <= words and " " in word.text:
            continue  # a part of the command itself
        elif word.unknown or TO_FILL.search(word.text):
            work.sheet.lack(Word(word.text, word.line, word.unknown or word.text), f"env.{name}")
        else:
            number = NUMBER.fullmatch(word.text) and str(yaml.safe_load(word.text)) == word.text
            sheet.keys[f"env.{name}"] = word.text if number else yaml_text(word.text)


def _set_resources(work: _Import) -> None:
    """What docker was asked for the container: memory, devices, folders."""
    sheet = work.sheet
    for key, word in work.around.resources.items():
        several = key in ("devices", "cap_add")
        value = word.text.split() if several else word.text
        if key == "workdir":
            continue  # relative paths are those of the host
        if not word.unknown and fits("resources", {key: value}):
            listed = ", ".join(yaml_text(one, flow=True) for one in word.text.split())
            sheet.keys[f"resources.{key}"] = f"[{listed}]" if several else yaml_text(word.text)
        else:
            sheet.tell(word.line, f"{key} {printable(word.text)}: not carried over")
    texts = [*sheet.section("megatron_args").values(), *sheet.section("env").values()]
    for mount in work.around.mounts:
        if any(mount.target in text for text in texts):
            sheet.mounts.append(
                f"- {{source: {yaml_text(mount.source, flow=True)}, target: "
                f"{yaml_text(mount.target, flow=True)}, read_only: {str(mount.read_only).lower()}}}"
            )
