"""Sorts a step's time by cost, from a trace: kernel families, gaps, communication.

A trace is Chrome's JSON as torch's profiler writes it (Kineto's output_json.cpp); names of kernels
are those of cuBLAS, cuDNN, CUTLASS, NCCL, Triton, PyTorch, Apex and Transformer Engine.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from json import JSONDecodeError, JSONDecoder
from typing import Any, TextIO

CHUNK = 1 << 20
LONGEST_EVENT = 1 << 26
"""Characters after which what isn't whole JSON yet will never be."""

LONGEST_NAME = 160
TOLD = 5
LEAST = 0.005
"""The share from which a cost is worth a word."""

COMMUNICATION = "communication"
WAITING = "waiting for the host"
PYTHON = "Python and the rest"
OTHER = "others"

PATTERNS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        (COMMUNICATION, r"nccl|nvshmem|gloo|c10d::|userbuffers|all_?reduce|all_?gather"),
        (
            "attention",
            r"fmha|flash|sdpa|scaled_dot_product|attention|attn|masked_softmax|softmax_warp"
            r"|(?<!log)(?<!cunn)_softmax|::softmax|(?<!log)SoftMax(For|Back)wardEpilogue",
        ),
        (
            "optimizer",
            r"adam|lamb(?!da)|multi_tensor|l2norm|_foreach_|optimizer"
            r"|^triton_.*(div.*(?<!r)sqrt|(?<!r)sqrt.*div)",
        ),
        ("loss", r"log_?softmax|nll_loss|cross_?entropy|_weigh$"),
        (
            "matrix products",
            r"gemm|gemv|nvjet|cutlass|cublas|xmma|split_?k|matmul|(add|b)mm|aten::(mm|linear)$"
            r"|MmBackward|LinearBackward",
        ),
        ("norms", r"layer_?norm|rms_?norm|add_norm|column_sums|(^|_|::)ln_|GammaBeta|welford"),
        ("routing of experts", r"moe_|permute_kernel|topk|router"),
        ("embeddings", r"embedding|index_?select|indexing|index_put|gather|_rows$"),
        ("activations", r"gelu|silu|swiglu|relu|tanh"),
        ("dropout", r"dropout|bernoulli|philox"),
        ("copies", r"^(?!triton_).*(memcpy|memset|copy|CatArray|::cat$|transpose)|^_pack$"),
        (
            "elementwise",
            r"elementwise|vectorized|unrolled|triton_|reduce_kernel|fill"
            r"|::(add|sub|mul|div|neg|sqrt|pow|where|zero|sum|mean)",
        ),
    )
)
"""What a kernel or an operator is for, by its name: the first that fits."""

OPENING = re.compile(r'"traceEvents"\s*:\s*\[')
SEPARATORS = (" ", "\n", "\t", "\r", ",")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "ProfilerStep"


@lru_cache(maxsize=1 << 14)
def family(name: str) -> str:
    """The family of a kernel or operator, by its name."""
    return next((one for one, pattern in PATTERNS if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class Cost:
    """What a family takes, in ms a step and as a share of the time; its largest kernel by name."""

    family: str
    ms: float
    share: float
    largest: str


@dataclass(frozen=True)
class Costs:
    """What the traced time went to, the largest first; all costs together are `ms`, a step's time.

    device: whether the time is a GPU's, or the host's, of which operators are known
    steps: how many the trace has; 0 where it doesn't separate them, and `ms` is all of it
    hidden: ms a step of communication while the GPU computed, which cost nothing
    """

    device: bool
    steps: int
    ms: float
    hidden: float
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        """The largest in words: "3 steps of 18.9 ms: matrix products 47 %, attention 12 %, …"."""
        worth = [cost for cost in self.costs if cost.share >= LEAST]
        told = [f"{cost.family} {cost.share:.0%}".replace("%", " %") for cost in worth[:TOLD]]
        if rest := sum(cost.share for cost in self.costs) - sum(c.share for c in worth[:TOLD]):
            told += [f"the rest {rest:.0%}".replace("%", " %")] if rest >= LEAST else []
        what = f"{self.steps} steps of {self.ms:.1f} ms" if self.steps else f"{self.ms:.1f} ms"
        where = "" if self.device else ", operators on the CPU"
        beside = f"; {self.hidden:.1f} ms of communication beside them" if self.hidden else ""
        return f"{what}{where}: {', '.join(told) or 'nothing'}{beside}"


def events(text: TextIO) -> Iterator[Mapping[str, Any]]:
    """The events of a trace, one after the other: a trace may be gigabytes.

    Raises ValueError where it ends before its last event, or isn't a trace.
    """
    decoder, kept = JSONDecoder(strict=False), ""
    while not (opening := OPENING.search(kept)):
        kept = kept[-CHUNK:] + _more(text)
    at = opening.end()
    while True:
        while kept[at : at + 1] in SEPARATORS:
            at += 1
        if kept.startswith("]", at):
            return
        try:
            event, at = decoder.raw_decode(kept, at)
        except JSONDecodeError:
            kept, at = kept[at:] + _more(text), 0
            if len(kept) > LONGEST_EVENT:
                raise ValueError("the trace isn't JSON") from None
        else:
            yield event


def _more(text: TextIO) -> str:
    more = text.read(CHUNK)
    if not more:
        raise ValueError("the trace isn't whole")
    return more


class TimeSpans:
    """Stretches of time in µs, each with a name; compact, since there may be millions."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names = names
        self.starts, self.ends, self.named = array("d"), array("d"), array("L")

    def add(self, start: float, length: float, name: str) -> None:
        self.starts.append(start)
        self.ends.append(start + length)
        self.named.append(self.names.setdefault(name[:LONGEST_NAME], len(self.names)))

    @property
    def length(self) -> float:
        """µs from the first one's start to the last one's end."""
        return max(self.ends) - min(self.starts) if self.starts else 0.0

    def in_order(self) -> Iterator[tuple[float, float, int]]:
        """(start, end, name's number) by their starts, what encloses others before them."""
        starts, ends = self.starts, self.ends
        order = sorted(range(len(starts)), key=lambda at: (starts[at], -ends[at]))
        return ((starts[at], ends[at], self.named[at]) for at in order)


def costs(found: Iterable[Mapping[str, Any]]) -> Costs:
    """What the time of a trace went to; `found` are its events."""
    names: dict[str, int] = {}
    device, host, steps = TimeSpans(names), dict[object, TimeSpans](), TimeSpans({})
    for event in found:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat"), str(event.get("name"))
        span = float(event["ts"]), float(event["dur"]), name
        if kind in DEVICE:
            device.add(*span)
        elif kind == "cpu_op":
            host.setdefault((event.get("pid"), event.get("tid")), TimeSpans(names)).add(*span)
        elif kind == "user_annotation" and name.startswith(STEP):
            steps.add(*span)
    count = len(steps.names)
    if device.starts:
        by_name, busy, hidden = _on_device(device, names)
        whole = _whole(device, steps)
        return _summed(by_name, [*names], (WAITING, whole - busy), whole, hidden, count)
    by_name = _on_host(host)
    busy = sum(by_name.values())
    whole = max(steps.length, busy)
    return _summed(by_name, [*names], (PYTHON, whole - busy), whole, 0.0, count)


def _summed(
    by_name: Mapping[int, float],
    names: list[str],
    idle: tuple[str, float],
    whole: float,
    hidden: float,
    steps: int,
) -> Costs:
    """Put the times of names, µs by their numbers, together by families."""
    totals, largest = defaultdict[str, float](float), dict[str, tuple[float, str]]()
    for number, time in by_name.items():
        of = family(names[number])
        totals[of] += time
        largest[of] = max(largest.get(of, (0.0, "")), (time, names[number]))
    totals[idle[0]] += idle[1]
    unit = 1000.0 * (steps or 1)
    listed = (
        Cost(of, time / unit, time / whole if whole else 0.0, largest.get(of, (0.0, ""))[1])
        for of, time in sorted(totals.items(), key=lambda one: -one[1])
        if time > 0
    )
    return Costs(idle[0] == WAITING, steps, whole / unit, hidden / unit, tuple(listed))


def _on_device(
    spans: TimeSpans, names: Mapping[str, int]
) -> tuple[Mapping[int, float], float, float]:
    """µs of each name, in which no other was at work yet; those of any; of hidden communication.

    Communication counts where nothing else is at work: the rest of it is hidden.
    """
    talks = {number for name, number in names.items() if family(name) == COMMUNICATION}
    by_name, talking = defaultdict[int, float](float), defaultdict[int, float](float)
    computed = covered = talked = float("-inf")
    busy = hidden = computing = 0.0
    for start, end, number in spans.in_order():
        busy, covered = busy + _gain(start, end, covered), max(covered, end)
        if number in talks:
            gain, talked = _gain(start, end, talked), max(talked, end)
            talking[number] += gain
        else:
            gain, computed = _gain(start, end, computed), max(computed, end)
            by_name[number] += gain
            computing += gain
    if total := sum(talking.values()):
        alone = busy - computing
        hidden = max(0.0, total - alone)
        by_name.update({number: time * alone / total for number, time in talking.items()})
    return by_name, busy, hidden


def _gain(start: float, end: float, covered: float) -> float:
    """What of a stretch lies behind `covered`."""
    return max(0.0, end - max(start, covered))


def _on_host(threads: Mapping[object, TimeSpans]) -> Mapping[int, float]:
    """µs of each operator, without those that it calls."""
    by_name = defaultdict[int, float](float)
    for spans in threads.values():
        around: list[tuple[float, int]] = []
        for start, end, number in spans.in_order():
            while around and around[-1][0] <= start:
                around.pop()
            by_name[number] += end - start
            if around:
                by_name[around[-1][1]] -= end - start
            around.append((end, number))
    return by_name


def _whole(device: TimeSpans, steps: TimeSpans) -> float:
    """µs reported on: the steps', where all that the GPU did lies in them, or all that it did.

    A program that doesn't wait for its GPU leaves some of a step's work behind the step.
    """
    begin, end = min(device.starts), max(device.ends)
    if steps.starts and min(steps.starts) <= begin and end <= max(steps.ends):
        return steps.length
    return end - begin
