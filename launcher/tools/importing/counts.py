"""How many processes and nodes a start has, by its starter's options and what stands around it."""

from __future__ import annotations

import re

from launcher.tools.importing.commands import Word
from launcher.tools.importing.sheet import Sheet, yaml_text
from launcher.tools.importing.starters import HELD, ScriptContext, tables
from launcher.tools.importing.starts import Start

RANKED = re.compile(r"\b(OMPI_|PMI|SLURM_PROCID|RANK|LOCAL_RANK|WORLD_SIZE)")
"""Variables that a starter of several processes sets for each."""


def set_processes(sheet: Sheet, start: Start, around: ScriptContext) -> None:
    """Set gpus, nodes and max_restarts; report what isn't known, and the value in its place."""
    given, table = dict[str, Word](), tables()["ranks"]
    for name, word in start.options:
        given[table["renamed"].get(name, name)] = word
        if name not in table["carried"].split() and name != HELD:
            value = f" {word.text}" if word.text else ""
            sheet.tell(word.line, f"{start.starter}'s {name}{value}: not carried over")
    if (held := given.pop(HELD, None)) and given.setdefault("nproc_per_node", held) is not held:
        sheet.tell(held.line, f"{start.starter}'s {held.text}: not carried over")
    counts = around.counts
    several = {one.name for one in start.around} & {"srun", "mpirun", "mpiexec", "aprun"}
    nodes = (
        given.get("nnodes")
        or counts.get("operator")
        or (counts.get("nodes") if several or not start.starter else None)
    )
    if not start.starter and several:
        nodes = nodes or _divided(counts.get("ntasks"), counts.get("tasks"))
        tasks = counts.get("tasks") or _divided(counts.get("ntasks"), nodes)
        given["nproc_per_node"] = tasks or counts.get("gpus") or Word("", start.line, "")
    if "num_processes" in given:
        given["nproc_per_node"] = _divided(given["num_processes"], nodes) or given["num_processes"]
    _set_gpus(sheet, start, around, given.get("nproc_per_node"), given.get("include"))
    restarts = _whole(sheet, given.get("max_restarts"), "max_restarts", 0)
    if restarts:
        sheet.keys["max_restarts"] = str(restarts)
    _set_nodes(sheet, given, around, nodes, several)


def _divided(whole: Word | None, parts: Word | None) -> Word | None:
    """A count divided by another, the count where it isn't known; None where there is none."""
    if whole is None or whole.unknown:
        return whole
    if not whole.text.isdigit():
        return None
    divisor = int(parts.text) if parts and parts.text.isdigit() and not parts.unknown else 1
    return Word(str(int(whole.text) // divisor), whole.line) if divisor else None


def _set_gpus(
    sheet: Sheet, start: Start, around: ScriptContext, per_node: Word | None, include: Word | None
) -> None:
    asked = around.counts.get("gpus")
    usual = int(asked.text) if asked and asked.text.isdigit() else 1
    devices = (start.command.env.get("CUDA_VISIBLE_DEVICES") or Word("", 0)).text
    devices = devices or around.gpus.partition("device=")[2]
    if include and (match := re.fullmatch(r"[\w.]+:([\d,]+)", include.text)):
        devices = match[1]
        per_node = per_node or Word(str(len(devices.split(","))), include.line)
    if per_node is not None and per_node.unknown == "the machine's GPUs":
        per_node = Word("gpu", per_node.line)
    if per_node is not None and not per_node.text and not per_node.unknown:
        per_node = None
    count = _whole(sheet, per_node, "gpus", usual if per_node else 1)
    text = str(count)
    if per_node is not None and per_node.text in ("gpu", "auto"):
        text = "all"
    elif per_node is None and (around.gpus or start.starter in ("deepspeed", "accelerate")):
        text = around.gpus or ("all" if not asked else str(usual))
    elif per_node is None and not start.starter:
        text = "1"
        words = [*start.arguments, *start.command.env.values()]
        for word in [one for one in words if RANKED.search(one.unknown)][:1]:
            sheet.tell(word.line, f"{word.unknown}: gpus is taken as 1")
    if devices and len(devices.split(",")) == count:
        text = f"device={devices}"
    sheet.keys["gpus"] = yaml_text(text) if not text.isdigit() else text
    if asked and text.isdigit():
        _tell_difference(sheet, asked, "GPUs of each node", "gpus", int(text))


def _set_nodes(
    sheet: Sheet,
    given: dict[str, Word],
    around: ScriptContext,
    nodes: Word | None,
    several: set[str],
) -> None:
    asked = around.counts.get("nodes")
    usual = int(asked.text) if asked and asked.text.isdigit() else 1
    count = _whole(sheet, nodes, "nodes", usual if nodes else 1)
    if asked:
        _tell_difference(sheet, asked, "nodes", "nodes.count", count)
    if count < 2:
        return
    if several or asked:
        sheet.keys["nodes"] = str(count)
        what = "start it with --backend slurm or kubernetes, or on each node with --node-rank N"
        sheet.tell((nodes or asked or Word("", 0)).line, f"nodes: {what}")
        return
    address = given.get("master_addr")
    port = _whole(sheet, given.get("master_port"), "nodes.master_port", 29500)
    known = address is not None and address.text and not address.unknown
    where = yaml_text(address.text, flow=True) if address and known else "first-node"
    sheet.keys["nodes"] = f"{{count: {count}, master_addr: {where}, master_port: {port}}}"
    line = nodes.line if nodes else 0
    sheet.tell(line, "nodes: start it on each with --node-rank N")
    if not known:
        sheet.tell(line, "nodes.master_addr: fill in the address of the first node")


def _tell_difference(sheet: Sheet, asked: Word, what: str, key: str, count: int) -> None:
    if asked.text.isdigit() and int(asked.text) != count:
        told = f"{asked.text} {what} are asked for, and the script uses {count}: {key} is {count}"
        sheet.tell(asked.line, told)


def _whole(sheet: Sheet, word: Word | None, key: str, otherwise: int) -> int:
    """The word as a whole number; what isn't one is reported."""
    if word is None or word.text in ("gpu", "auto"):
        return otherwise
    if re.fullmatch(r"\d{1,6}", word.text) and not word.unknown:
        return int(word.text)
    why = word.unknown or f"{word.text!r} isn't a whole number"
    sheet.tell(word.line, f"{why}: {key} is taken as {otherwise}")
    return otherwise
