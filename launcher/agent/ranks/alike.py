"""Compares nodes before their ranks start: image, GPUs, clock, shared folders."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.agent import start
from launcher.agent.checkpoints import lineage
from launcher.agent.ranks import network, reduction, ring
from launcher.agent.ranks.command_line import (
    MismatchError,
    NodeIsSpare,
    NodeRanks,
    NodesUnreachable,
)
from launcher.agent.ranks.rendezvous import (
    MOST,
    NodeNotNeeded,
    Rendezvous,
    RendezvousFailure,
    StopWaiting,
    named,
)
from launcher.agent.words import IMAGE, say
from launcher.base import files, owned

JOIN_SECONDS = 600.0
"""How long nodes may come after each other: some fetch an image first."""

CLOCK_SECONDS = 5.0
"""How far clocks may be apart: by them the first failure is found among those that it causes."""

MAY_DIFFER = "LAUNCHER_NODES_MAY_DIFFER"
"""Set, nodes that aren't alike are a warning."""

BUILD = Path("/opt/megatron/build.json")
PIECES, PIECE = 64, 1 << 16
"""How many pieces of an .idx are compared, and the bytes of each: all of most files."""

CHECKPOINTS, INDEX = "checkpoints", "the data's sample index"
CURES = {
    CHECKPOINTS: "let it be on a disk that all nodes share",
    INDEX: "let it be on a disk that all nodes share, by data.cache, or make it on each beforehand",
}
"""Folders that nodes share, and what is to be done where they don't."""

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "numpy")


def facts(environ: Mapping[str, str], program: Sequence[str], gpus: int) -> dict[str, str]:
    """What must be equal on all nodes, by its name; "" where it isn't known here."""
    layers = environ.get(IMAGE, "")
    return {
        "image": _digest(layers.encode()) if layers else "",
        "build.json": _digest(BUILD.read_bytes()) if BUILD.is_file() else "",
        "packages": ", ".join([f"Python {platform.python_version()}", *_packages()]),
        "launcher": launcher_digest(),
        "data": data_digest(program),
        **devices(gpus),
    }


def devices(gpus: int, driver: str = "") -> dict[str, str]:
    """The GPUs of a node, and their driver."""
    loaded = Path("/sys/module/nvidia/version")
    if gpus and not driver and loaded.is_file():
        driver = loaded.read_text().strip()
    return {"GPUs": str(gpus), "driver": driver}


def data_digest(program: Sequence[str]) -> str:
    """Of Megatron's data among a program's words: sizes, and pieces of each .idx."""
    digest, found = hashlib.sha256(), 0
    for word in program:
        index, tokens = Path(f"{word}.idx"), Path(f"{word}.bin")
        with suppress(OSError), index.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size} {tokens.stat().st_size}".encode())
            for piece in range(PIECES):
                file.seek(max(piece * PIECE, size * piece // PIECES))
                digest.update(file.read(PIECE))
            found += 1
    return f"{found} files, {digest.hexdigest()[:16]}"


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def launcher_digest() -> str:
    """Of the payload that this process was started from."""
    return start.digest(start.contents(start.ROOT))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass(frozen=True)
class LinkedNodes:
    """The nodes, linked: this one's ranks among theirs, and variables by which they find them."""

    ranks: NodeRanks
    rendezvous: Rendezvous
    variables: Mapping[str, str]


def look(
    ranks: NodeRanks,
    environ: Mapping[str, str],
    gpus: int,
    stopped: Callable[[], object],
    refusal: str = "",
) -> LinkedNodes | None:
    """Meet the other nodes, and see that all are alike.

    Raises, on every node, MismatchError where they aren't, and NodesUnreachable where not enough
    come. `refusal` is why this one starts no rank. With `stopped` it gives up, and says nothing:
    None.
    """
    if refusal:  # which the others hear of when they are here
        say(refusal)
    me = {"host": socket.gethostname(), "refusal": refusal}
    same = {"processes": str(ranks.processes), **facts(environ, ranks.program, gpus)}
    place = (ranks.node_rank, ranks.nodes, ranks.master_addr, ranks.master_port)
    seconds = reduction.limit(ranks.nodes, environ)
    folders = _shared(ranks, environ)
    with ExitStack() as left, _signs(ranks, folders) as signs:
        rendezvous = left.enter_context(closing(Rendezvous(*place, say, stopped, ranks.fewer)))
        try:
            rendezvous.join(JOIN_SECONDS)
            if 0 < ranks.wanted < rendezvous.nodes:
                _leave_spares(rendezvous, ranks, me | {"facts": same}, environ, seconds)
            refused, wrong, signs = rendezvous.exchange(
                me | {"facts": same, "signs": signs}, judged
            )
            now = me | {"time": time.time()}  # all got that answer within moments
            off = rendezvous.exchange(now, clocks)
            blind = [what for what, sign in signs.items() if not _sees(folders.get(what), sign)]
            wrong += rendezvous.exchange(me | {"blind": blind}, apart)
            found = [] if refused or rendezvous.nodes == 1 else ring.look(rendezvous)
            if refused:
                raise MismatchError(_listed("not all nodes can start their ranks:", refused))
            if wrong and not environ.get(MAY_DIFFER):
                cure = f"{MAY_DIFFER}=1 among the run's env starts it all the same"
                raise MismatchError(_listed("the nodes aren't alike:", [*wrong, cure]))
            if broken := ring.broken(found):
                raise NodesUnreachable(
                    _listed("the nodes don't reach each other, as ranks would:", broken)
                )
            variables = _interface(rendezvous.own, environ) if rendezvous.nodes > 1 else {}
            summed = []
            if rendezvous.nodes > 1:
                summed = reduction.look(rendezvous, variables, cpu=ranks.cpu, seconds=seconds)
            if broken := reduction.broken(summed):
                if not environ.get(MAY_DIFFER):
                    raise NodesUnreachable(_listed("the nodes get no all-reduce done:", broken))
                wrong += broken
        except NodeNotNeeded as unneeded:
            raise (NodeIsSpare if ranks.wanted else MismatchError)(str(unneeded)) from None
        except RendezvousFailure as failed:
            raise NodesUnreachable(f"the nodes don't meet: {failed}") from None
        except StopWaiting:
            return None
        left.pop_all()
    if (warned := [*wrong, *off, *ring.slow(found)]) and ranks.node_rank == 0:
        say(_listed("warning:", warned))
    ranks = replace(ranks, nodes=rendezvous.nodes, node_rank=rendezvous.node)
    return LinkedNodes(ranks, rendezvous, variables)


def _leave_spares(
    rendezvous: Rendezvous,
    ranks: NodeRanks,
    mine: Mapping[str, Any],
    environ: Mapping[str, str],
    seconds: float,
) -> None:
    """Go on with as many nodes as are wanted, those first that are fit for it.

    Raises NodeNotNeeded on the others, which all know alike, and RendezvousFailure, StopWaiting.
    """
    wrong = {int(node): str(why) for node, why in rendezvous.exchange(mine, unfit)}
    wrong |= ring.unfit(ring.look(rendezvous))
    if not wrong:
        used = _interface(rendezvous.own, environ)
        summed = reduction.look(rendezvous, used, cpu=ranks.cpu, seconds=seconds)
        wrong = {node: one["why"] for node, one in enumerate(summed) if one["blamed"]}
    wrong.pop(0, None)  # where all meet
    order = sorted(range(rendezvous.nodes), key=lambda node: (node in wrong, node))
    chosen = sorted(order[: ranks.wanted])
    if rendezvous.node == 0:
        left = [node for node in range(rendezvous.nodes) if node not in chosen]
        why = [f"node {node}: {wrong[node]}" for node in left if node in wrong][:MOST]
        say(_listed(f"going on without {named(left)}:", why or ["as a spare it isn't needed"]))
    rendezvous.go_on_with(chosen)


def unfit(known: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The nodes that can start no ranks, or aren't like most, and why; of equals the first."""
    found = {node: one["refusal"] for node, one in enumerate(known) if one["refusal"]}
    for name in known[0]["facts"]:
        told = [one["facts"].get(name, "") for one in known]
        most = Counter(filter(None, told)).most_common(1)
        for node, value in enumerate(told):
            if value and value != most[0][0]:
                found.setdefault(node, f"{name}: {value}, and on most {most[0][0]}")
    return [*found.items()]


def _interface(own: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What gloo and NCCL are to take, where by themselves they wouldn't find the other nodes.

    gloo goes by this machine's name. Of NCCL's own choice a bridge is wrong for sure: virbr0, say.
    """
    there = network.interfaces()
    used = network.interface_of(own, there)
    wrong = dict(network.misled(used, there, environ, network.own_address())) if used else {}
    if not network.is_bridge(network.first_of_nccl(there)):
        wrong.pop(network.NCCL, None)
    wrong = {name: why for name, why in wrong.items() if not environ.get(name)}
    for name, why in wrong.items():
        say(f"{name}={used}, by which the nodes met: {why}")
    return dict.fromkeys(wrong, used)


def _shared(ranks: NodeRanks, environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders that all nodes share: of checkpoints, and where rank 0 puts the sample index.

    Our own programs build that on each node which has none.
    """
    request = lineage.save_request(environ)
    saved = Path(request.folder) if request else ranks.checkpoints
    data = [Path(word).absolute().parent for word in ranks.program if Path(f"{word}.idx").is_file()]
    given = [Path(at) for option, at in pairwise(ranks.program) if option == "--data-cache-path"]
    theirs = not any(word.startswith("launcher.trainer.") for word in ranks.program[:2])
    index = [*given, *data][:1] if data and theirs else []
    return ({CHECKPOINTS: saved} if saved else {}) | ({INDEX: index[0]} if index else {})


@contextmanager
def _signs(ranks: NodeRanks, folders: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """The names of files for the others to see, which the first node writes where it can."""
    name = f".seen-by-all-{os.urandom(8).hex()}"
    paths = {} if ranks.node_rank else {w: path.absolute() / name for w, path in folders.items()}
    try:
        for path in paths.values():
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, "")
        yield {what: name for what, path in paths.items() if path.exists()}
    finally:
        for path in paths.values():
            with suppress(OSError):
                owned.remove_file(path, path.parent)


def _sees(folder: Path | None, sign: str) -> bool:
    if not folder:
        return True
    with suppress(OSError):  # asked for the folder, a server lists one that was just made
        folder.mkdir(parents=True, exist_ok=True)
    return (folder / sign).exists() or any(folder.rglob("*_index.npy"))  # made here beforehand


def _listed(heading: str, several: Sequence[str]) -> str:
    return "\n".join([heading, *(f"  {line}" for line in several)])


def judged(known: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str], dict[str, str]]:
    """Why nodes start no ranks, what isn't alike in their facts, and the first one's signs."""
    refused = [
        f"node {node} ({one['host']}): {one['refusal']}"
        for node, one in enumerate(known)
        if one["refusal"]
    ]
    return refused[:MOST], differences(known), known[0]["signs"]


def differences(known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Facts that aren't node 0's, and on which nodes; what a node doesn't know isn't compared."""
    lines = []
    for name, first in known[0]["facts"].items():
        others: dict[str, list[int]] = {}
        for node, one in enumerate(known):
            value = one["facts"].get(name, "")
            if first and value not in ("", first):
                others.setdefault(value, []).append(node)
        for value, nodes in [*others.items()][:MOST]:
            hosts = ", ".join(known[node]["host"] for node in nodes[:MOST])
            lines.append(f"{name}: {value} on {named(nodes)} ({hosts}), {first} on node 0")
    return lines


def clocks(known: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes whose clock isn't node 0's; all read theirs at once."""
    first = known[0]
    return [
        f"clock: node {node} ({one['host']}) is {abs(ahead):.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} node 0 ({first['host']}): `timedatectl` says "
        "whether it is set by the network"
        for node, one in enumerate(known)
        if abs(ahead := one["time"] - first["time"]) > CLOCK_SECONDS
    ][:MOST]


def apart(known: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes that don't see what the first one writes to folders that they share."""
    lines = []
    for what in CURES:
        if blind := [node for node, one in enumerate(known) if what in one["blind"]]:
            hosts = ", ".join(known[node]["host"] for node in blind[:MOST])
            lines.append(
                f"{what}: {named(blind)} ({hosts}) doesn't see what node 0 writes to their folder: "
                f"{CURES[what]}"
            )
    return lines
