"""Which GPUs a run sees: N, all, 0 (none) or device=0,1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.errors import UsageError


@dataclass(frozen=True)
class Gpus:
    """The GPUs made visible: `count` of any, or those of `devices`; `count` 0 is the CPU.

    `everything` asks for all there are; then `count` is how many that was found to be, or None
    as long as nobody has looked.
    """

    count: int | None
    devices: tuple[str, ...] = ()
    everything: bool = False

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
