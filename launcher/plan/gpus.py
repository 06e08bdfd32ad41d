"""Which GPUs a run sees: N, all, 0 (none) or device=0,1."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from launcher.errors import UsageError


@dataclass(frozen=True)
class Gpus:
    """The GPUs made visible: `count` of any, or those of `devices`; `count` 0 is the CPU.

    Those of several nodes on one machine are `count` of `devices` for each, in the nodes' order.
    `everything` asks for all there are; then `count` is how many that was found to be, or None
    as long as nobody has looked.
    """

    count: int | None
    devices: tuple[str, ...] = ()
    everything: bool = False

    def of_node(self, rank: int) -> Gpus:
        """The part of `devices` that is for the node `rank`."""
        if not self.count:
            return self
        return replace(self, devices=self.devices[rank * self.count : (rank + 1) * self.count])

    def __str__(self) -> str:
        if self.everything:
            return "all"
        return f"device={','.join(self.devices)}" if self.devices else str(self.count)


def parse_gpus(value: str | int) -> Gpus:
    """What `value` asks for. Raises UsageError for anything else, with the forms there are."""
    text = str(value).strip()
    if text == "all":
        return Gpus(count=None, everything=True)
    if re.fullmatch(r"\d{1,6}", text, re.ASCII):
        return Gpus(count=int(text))
    ids = text.removeprefix("device=").split(",") if text.startswith("device=") else []
    if ids and all(re.fullmatch(r"[\w:.-]+", one, re.ASCII) for one in ids):
        if len(set(ids)) < len(ids):
            raise UsageError(f"gpus: {text!r} names a device twice")
        return Gpus(count=len(ids), devices=tuple(ids))
    raise UsageError(
        f"gpus: {text!r} isn't a request for GPUs",
        "A number, all, 0 (the CPU), or device=0,1 (indices or UUIDs).",
    )


def split(gpus: Gpus, nodes: int) -> Gpus:
    """Of `gpus`, whose count is known, those of each of `nodes` nodes on one machine.

    A number is for each node; all, or devices by name, are for all nodes together. Raises
    UsageError where these can't be shared out evenly.
    """
    if nodes == 1 or not gpus.count:
        return gpus
    if not (gpus.devices or gpus.everything):
        return Gpus(gpus.count, tuple(str(index) for index in range(nodes * gpus.count)))
    if gpus.count % nodes:
        raise UsageError(
            f"gpus: {gpus} is {gpus.count} GPUs, which {nodes} nodes can't share evenly",
            f"Name a multiple of {nodes}, or give the number for each node: --gpus 1.",
        )
    devices = gpus.devices or tuple(str(index) for index in range(gpus.count))
    return Gpus(gpus.count // nodes, devices)
