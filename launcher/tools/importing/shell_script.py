"""Imports a shell script as a run file: the training command, its options, and the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import yaml
from pydantic import ValidationError

from launcher.agent.series import series_of
from launcher.base.errors import UsageError
from launcher.base.yamlfile import printable
from launcher.runs.plan import arguments
from launcher.runs.plan.program import upstreams
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.secrets import has_credential, is_secret, is_secret_option
from launcher.tools.importing import shell
from launcher.tools.importing.container_line import ContainerLine, parse_docker_run
from launcher.tools.importing.sheet import NUMBER, Sheet, wrong, yaml_text
from launcher.tools.importing.shell import HARMLESS, Script, Unfollowed
from launcher.tools.importing.slurm_lines import SbatchRequest, parse_sbatch
from launcher.tools.importing.starts import (
    Start,
    choose_start,
    file_name,
    hint,
    named_in_part,
    start_of,
)
from launcher.tools.importing.words import PLACEHOLDER, Word

NGC = re.compile(r"nvcr\.io[/#]nvidia/pytorch:(\d\d\.\d\d)-py3")
BUNDLE = re.compile(r"(\$|what )\w*(ARG|OPT|PARAM|FLAG|EXTRA)", re.IGNORECASE)
"""A variable of unknown value that by its name holds options, not one option's value."""
OURS = {
    "--distributed-backend": "nccl",
    "--local-rank": None,
    "--local_rank": None,
}
"""Options that go without saying here, with the value that does; None for any."""
CARRIED = frozenset("nproc_per_node nnodes node_rank master_addr master_port max_restarts".split())
ITSELF = frozenset("standalone use_env rdzv_backend rdzv_endpoint rdzv_id start_method".split())
"""What of torchrun's the runner does itself, in its own way."""
OF_THE_HOST = frozenset("PATH LD_LIBRARY_PATH PYTHONPATH CUDA_HOME".split())
OF_THE_RUNNER = frozenset("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK".split())
PATHS = frozenset(
    "data.path data.cache data.vocab_file data.merge_file data.tokenizer_model checkpoint.save "
    "checkpoint.load logging.tensorboard_dir".split()
)


@dataclass(frozen=True)
class ImportResult:
    """A run file's text; what of the script isn't in it; what keeps the file from running."""

    text: str
    told: tuple[Unfollowed, ...]
    wrong: str


def imported(
    text: str,
    name: str,
    images: Mapping[str, tuple[str, ...]],
    *,
    tag: str,
    bare: Collection[str] = (),
    positional: tuple[str, ...] = (),
) -> ImportResult:
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
    asked = parse_sbatch(text[: shell.LONGEST])
    script = shell.read_script(text, positional, asked.variables)
    start, script, others = choose_start(script)
    if start is None:
        raise UsageError(f"{name}: no command that starts a program of Megatron's", hint(script))
    sheet = Sheet(told=[*asked.left, *script.left])
    around = _around(script, start, sheet)
    stem = name.rpartition("/")[2].removesuffix(".sh")
    usable = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:60]
    sheet.keys["name"] = yaml_text(usable or "imported")
    _set_program(sheet, start, around)
    _set_processes(sheet, start, around, asked)
    _set_slurm(sheet, asked)
    upstream = {t: releases for t, releases in images.items() if t not in bare}
    _set_options(sheet, start, around, images, upstream, tag)
    _set_env(sheet, script, start, around)
    for other in others:
        sheet.tell(other.line, "another command that starts a program: not carried over")
    written = sheet.written(name)
    told = sorted(dict.fromkeys(sheet.told), key=lambda left: left.line)
    return ImportResult(written, tuple(told), wrong(written, images, bare))


# Around it: docker run, srun, mkdir


def _around(script: Script, start: Start, sheet: Sheet) -> ContainerLine:
    """The container that the script starts, if any; what other commands do is told."""
    found = ContainerLine()
    for command in script.commands:
        mine = bool(start.before) and command.words[: len(start.before)] == start.before
        words = start.before if mine else command.words
        called = file_name(words[0])
        if called == "sudo" and len(words) > 1:
            words, called = words[1:], words[1].text
        contained = called == "docker" and len(words) > 1 and words[1].text == "run"
        if contained:
            found = parse_docker_run(words[2:])
            sheet.told += found.left
        if mine:  # what stands beside the start, in the same bash -c
            words = command.words[len(start.before) :]
            called = file_name(words[0])
        if called == "cd":
            sheet.tell(command.line, "cd: relative paths start where the launcher is started")
        elif (mine or not contained) and called not in HARMLESS and not start_of(command):
            text = " ".join(word.text or "…" for word in words)
            text = printable(text if len(text) <= 60 else f"{text[:60]}…")
            sheet.tell(command.line, f"{text}: not carried over")
    if start.before and start.before[0].unknown:
        why = start.before[0].unknown
        sheet.tell(start.line, f"{why}: how it starts the program isn't carried over")
    wrapper = start.before[0].text if start.before else ""
    if wrapper and wrapper not in ("docker", "sudo", "exec", "nohup", "time", "env"):
        sheet.tell(start.line, f"{wrapper}: how it starts the program isn't carried over")
    if start.output.replace("&", "").strip():
        sheet.tell(start.line, f"{start.output}: the launcher prints the output; redirect that")
    return found


# Keys


def _set_program(sheet: Sheet, start: Start, around: ContainerLine) -> None:
    """One of the image's programs by its name; any other is a script of this machine."""
    text = start.program.text
    inside = re.search(r"(?:^|/)((?:pretrain_\w+|train_rl|(?:examples|tools)/.+)\.py)$", text)
    own = inside[1] if inside else named_in_part(start.program)
    if own:
        sheet.keys["program"] = yaml_text(own)
        if text.startswith("/"):
            sheet.tell(start.program.line, f"{text}: the image's own {own} is taken")
        return
    text = around.outside(text)
    own = text if text.startswith(("/", "./", "../", "~")) else f"./{text}"
    sheet.keys["program"] = yaml_text(own)


def _set_processes(sheet: Sheet, start: Start, around: ContainerLine, asked: SbatchRequest) -> None:
    """gpus, nodes and max_restarts, by what torchrun is told, or srun by the #SBATCH lines."""
    given: dict[str, Word] = {}
    if start.torchrun is None and any(word.text == "srun" for word in start.before):
        counts = {"nproc_per_node": asked.tasks or asked.gpus, "nnodes": asked.nodes}
        given = {name: word for name, word in counts.items() if word}
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
    sheet.keys["gpus"] = yaml_text(text) if not text.isdigit() else text
    restarts = _whole(sheet, given.get("max_restarts"), "max_restarts", 0)
    if restarts:
        sheet.keys["max_restarts"] = str(restarts)
    if asked.gpus and text.isdigit():
        _tell_difference(sheet, asked.gpus, "GPUs of each node", "gpus", count)
    _set_nodes(sheet, given, asked)


def _set_slurm(sheet: Sheet, asked: SbatchRequest) -> None:
    """The section slurm, by the #SBATCH lines."""
    for key, word in asked.keys.items():
        text = yaml_text(word.text) if word.text else "true"
        try:
            Slurm.model_validate({key: word.text or True})
        except ValidationError:
            sheet.tell(word.line, f"#SBATCH --{key}={printable(word.text)}: not carried over")
        else:
            sheet.slurm[key] = text


def _tell_difference(sheet: Sheet, asked: Word, what: str, key: str, count: int) -> None:
    if int(asked.text) != count:
        told = f"{asked.text} {what} are asked for, and the script uses {count}: {key} is {count}"
        sheet.tell(asked.line, told)


def _set_nodes(sheet: Sheet, given: dict[str, Word], asked: SbatchRequest) -> None:
    count = _whole(sheet, given.get("nnodes"), "nodes", 1)
    if asked.nodes:
        _tell_difference(sheet, asked.nodes, "nodes", "nodes.count", count)
    if count < 2:
        return
    rank = given.get("node_rank")
    address = given.get("master_addr")
    port = _whole(sheet, given.get("master_port"), "nodes.master_port", 29500)
    known = address is not None and address.text and not address.unknown
    # 0 is the default, and as a key it would be every node's, whatever Slurm says there.
    number = _whole(sheet, rank, "nodes.rank", 0)
    sheet.keys["nodes"] = (
        f"{{count: {count}, {f'rank: {number}, ' if number else ''}master_addr: "
        f"{yaml_text(address.text, flow=True) if address and known else 'first-node'}, "
        f"master_port: {port}}}"
    )
    line = given["nnodes"].line
    sheet.tell(line, "nodes: start it on each with --node-rank N")
    if not known:
        sheet.tell(line, "nodes.master_addr: fill in the address of the first node")


def _whole(sheet: Sheet, word: Word | None, key: str, otherwise: int) -> int:
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
    sheet: Sheet,
    start: Start,
    around: ContainerLine,
    images: Mapping[str, tuple[str, ...]],
    upstream: Mapping[str, tuple[str, ...]],
    tag: str,
) -> None:
    """The program's options under their keys, the rest under megatron_args; and the image."""
    own, given = arguments.own_keys(), dict[str, tuple[tuple[Word, ...], int]]()
    for name, values, line in _options(start.arguments):
        for word in values:
            if BUNDLE.match(word.unknown):
                sheet.tell(word.line, f"{word.unknown}: what it stands for is left out")
        values = tuple(word for word in values if not BUNDLE.match(word.unknown))
        if not name:
            for word in values:
                sheet.tell(word.line, f"{word.unknown or word.text}: not carried over")
        elif name not in OURS or OURS[name] not in (None, " ".join(w.text for w in values)):
            if name in given:
                sheet.tell(given[name][1], f"{name}: given again on line {line}, which counts")
            given[name] = (values, line)
    release = _set_image(sheet, start, around, images, upstream, tag, list(given))
    known = arguments.table().options_of(release) if release else None
    checked = sheet.keys["program"] == "pretrain_gpt.py" and known is not None
    for name, (values, line) in given.items():
        if name == "--group-query-attention" and "--num-query-groups" in given:
            continue  # the key num_query_groups says it too
        if checked and name not in (known or ()):
            sheet.tell(line, f"{name}: Megatron {release} has no such option")
            continue
        unknown = next((w for w in values if w.unknown or PLACEHOLDER.search(w.text)), None)
        key = own.get(name, f"megatron_args.{name[2:].replace('-', '_')}")
        if any(is_secret_option(name, w.text) or has_credential(w.text) for w in values):
            sheet.tell(line, f"{name}: a secret isn't written down")
            continue
        if unknown:
            why = unknown.unknown or f"{unknown.text} is to be filled in"
            sheet.tell(unknown.line, f"{why}: {key} is left out ({name})")
            continue
        texts = [around.outside(w.text) if key in PATHS else w.text for w in values]
        sheet.put(key, name, texts, line)


def _set_image(
    sheet: Sheet,
    start: Start,
    around: ContainerLine,
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
        one: tuple(r for r in releases if series is None or series_of(r) in series)
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
    known = {release: table.options_of(release) or set() for release in releases}
    release = max(releases, key=lambda one: sum(name in known[one] for name in options))
    if table.options_of(releases[0]) is None:  # it may have them all
        release = releases[0]
    sheet.keys["image"] = f'"{tag}"' if NUMBER.fullmatch(tag) else tag
    usual = images[tag][0]
    if release != usual:
        sheet.keys["image"] = f'{{tag: "{tag}", megatron: "{release}"}}'
        lacking = [name for name in options if name not in (table.options_of(usual) or options)]
        some = ", ".join([name for name in lacking if name in known[release]][:3])
        asked = program if usual not in releases else some
        sheet.tell(start.line, f"{asked}: not in Megatron {usual}, so {release} is taken")
    return release


def _set_env(sheet: Sheet, script: Script, start: Start, around: ContainerLine) -> None:
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
        elif is_secret(name, word.text or None):
            sheet.env[name] = "null"
            sheet.tell(word.line, f"{name}: a secret isn't written down; yours is passed on")
        elif word.unknown:
            sheet.tell(word.line, f"{word.unknown}: env.{name} is left out")
        else:
            number = NUMBER.fullmatch(word.text) and str(yaml.safe_load(word.text)) == word.text
            sheet.env[name] = word.text if number else yaml_text(word.text)
    for outer, inner, read_only in around.mounts:
        texts = [*sheet.megatron.values(), *sheet.env.values()]
        if any(inner in text for text in texts):
            sheet.mounts.append(
                f"- {{source: {yaml_text(outer, flow=True)}, target: "
                f"{yaml_text(inner, flow=True)}, read_only: {str(read_only).lower()}}}"
            )
