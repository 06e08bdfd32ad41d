"""Types of values in a run file: strict, with messages in the user's words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import core_schema

from launcher.base import names
from launcher.base.errors import LauncherError, UsageError


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


def _number(value: object) -> object:
    """A YAML number; PyYAML reads 1e-4 as text, for want of a dot."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("not a number") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _tag(value: object) -> object:
    """A tag written without quotes: YAML reads 24.10 as 24.1, and months have two digits."""
    return f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else value


def _no_null_byte(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a null byte")
    if re.search(r"[\x01-\x08\x0b-\x1f\x7f-\x9f]", value):
        raise ValueError("holds a control character")
    return value


def _gpus(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not a request for GPUs: a number, all, 0 (the CPU) or device=0,1")
    try:
        return str(parse_gpus(value))
    except LauncherError as error:
        reason = error.problem.removeprefix("gpus: ")
        raise ValueError(f"{reason}. {error.remedy}".rstrip(". ")) from error


def _batch(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if whole or value == "auto":
        return value
    raise ValueError("neither a whole number above 0 nor auto")


def _scalar(value: object) -> object:
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return _no_null_byte(value) if isinstance(value, str) else value
    raise ValueError("not text, a number, true or false")


def _scalars(value: object) -> object:
    return [_scalar(item) for item in value] if isinstance(value, list) else _scalar(value)


def _prefixes(value: object) -> object:
    """A path prefix, or prefixes with or without a weight before each."""
    if isinstance(value, str) and value:
        return _blend(value) or _no_null_byte(value)
    if not isinstance(value, list) or not value:
        raise ValueError("neither a path prefix nor a list of weights and path prefixes")
    parts = [_scalar(part) for part in value]
    if any(isinstance(part, bool) for part in parts):
        raise ValueError("a list takes weights and path prefixes")
    if not any(isinstance(part, str) for part in parts):
        raise ValueError("a list needs at least one path prefix")
    return parts


def _blend(text: str) -> list[object] | None:
    """Weights and prefixes in one string, as Megatron's --data-path has them; None for a path."""
    words = text.split()
    if len(words) < 2 or len(words) % 2:
        return None
    try:
        weights = [float(word) if "." in word else int(word) for word in words[::2]]
    except ValueError:
        return None
    return [part for pair in zip(weights, words[1::2], strict=True) for part in pair]


def _shares(value: object) -> object:
    """Shares in a list for the same with commas: [949, 50, 1] for 949,50,1."""
    if isinstance(value, list) and value and not any(isinstance(one, bool) for one in value):
        if all(isinstance(one, int | float) for one in value):
            return ",".join(f"{one:.15g}" for one in value)
        raise ValueError("a list of shares takes numbers")
    return value


def _size(value: object) -> str:
    if isinstance(value, bool) or not re.fullmatch(r"\d+[bkmgBKMG]?", str(value), re.ASCII):
        raise ValueError("doesn't look like a size: 512m")
    return str(value)


def _steps(value: object) -> str:
    """Steps by their numbers, the first and the last: "10-12"; one alone is both."""
    text = "" if isinstance(value, bool) else str(value)
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    if not found:
        raise ValueError("no steps: the first and the last, 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ValueError("the first step is 1, and the last isn't before the first")
    if last - first >= MOST_STEPS:
        raise ValueError(f"more than {MOST_STEPS} steps: a few show as much, in a smaller trace")
    return f"{first}-{last}"


@dataclass(frozen=True)
class Regex:
    """What a text must match, with an example of one that does."""

    pattern: str
    example: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        check = names.matching(self.pattern, self.example)
        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"pattern": f"^({self.pattern})$"}


def _like(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _either(*kinds: dict[str, Any], **limits: Any) -> WithJsonSchema:
    """What may stand in a file for a value that a validator reads in its own way."""
    return WithJsonSchema({"anyOf": [*kinds], **limits})


_VERSION = r"(===|[<>=!~]=|[<>])[\w.*+!-]+"
_EXTRA = rf"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?({_VERSION}(,{_VERSION})*)?"
MOST_STEPS = 50
"""A step of a large model is tens of megabytes of trace, and a profiler keeps all in memory."""

LARGEST = 10**12  # far above any size, and still quick to factor for a suggestion
NUMBERS = (
    {"type": "number"},
    _like(r"^\s*[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?\s*$"),
)
"""Numbers in a file: YAML 1.1, which the launcher reads, takes 1e-4 for text."""
GPUS = _like(r"^\s*(all|\d{1,6}|device=[\w:.-]+(,[\w:.-]+)*)\s*$")
SCALAR: dict[str, Any] = {"type": ["string", "boolean", "number"]}
TAGS = ({"type": "number", "minimum": 0}, _like(r"^[A-Za-z0-9][\w.-]{0,99}$"))
PARTS = {"type": "array", "items": {"type": ["string", "number"]}, "contains": {"type": "string"}}

Text = Annotated[str, Field(min_length=1, strict=True), AfterValidator(_no_null_byte)]
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Positive = Annotated[int, Field(strict=True, gt=0, le=LARGEST)]
Flag = Annotated[bool, Field(strict=True)]
Fraction = Annotated[
    float,
    Field(ge=0, le=1),
    BeforeValidator(_number),
    _either(*NUMBERS, minimum=0, maximum=1),
]
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(_number), _either(*NUMBERS, minimum=0)]
Name = Annotated[Text, Regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}", "a name: gpt2-small")]
Extra = Annotated[Text, Regex(_EXTRA, "a package or a set of the matrix: transformers<5")]
Tag = Annotated[Text, BeforeValidator(_tag), AfterValidator(names.tag), _either(*TAGS)]
Reference = Annotated[Text, Regex(names.IMAGE, "an image's name: nvcr.io/nvidia/pytorch:24.10-py3")]
Time = Annotated[
    Text,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Regex(r"\d[\d:-]*|UNLIMITED", "90 (minutes), 12:00:00 or 2-12:00:00"),
    _either({"type": "integer", "minimum": 0}, _like(r"^(\d[\d:-]*|UNLIMITED)$")),
]
Line = Annotated[Text, Regex(r"[^\n]+", "a single line")]
Object = Annotated[
    Text, Regex(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a name in a cluster: team-a")
]
Absolute = Annotated[Text, Regex(r"/.*", "an absolute path: /data")]
Device = Annotated[
    Text, Regex(r"/dev/[^:]+(:/dev/[^:]+(:[rwm]{1,3})?)?", "a device: /dev/infiniband")
]
Variable = Annotated[Text, Regex(r"[A-Za-z_]\w*", "a variable's name")]
Size = Annotated[
    str,
    BeforeValidator(_size),
    _either({"type": "integer", "minimum": 0}, _like("^[0-9]+[bkmgBKMG]?$")),
]
Steps = Annotated[
    str,
    BeforeValidator(_steps),
    _either({"type": "integer", "minimum": 1}, _like(r"^[0-9]{1,9}(-[0-9]{1,9})?$")),
]
GpuRequest = Annotated[
    str,
    BeforeValidator(_gpus),
    _either({"type": "integer", "minimum": 0, "maximum": 999999}, GPUS),
]
MicroBatch = Annotated[
    int | str,
    BeforeValidator(_batch),
    _either({"type": "integer", "minimum": 1}, {"const": "auto"}),
]
Prefixes = Annotated[
    str | list[str | int | float],
    BeforeValidator(_prefixes),
    _either({"type": "string", "minLength": 1}, PARTS),
]
Shares = Annotated[
    Text,
    BeforeValidator(_shares),
    _either({"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "number"}}),
]
Texts = Annotated[
    list[Text], Field(min_length=1), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
]
Scalar = str | bool | int | float
OneScalar = Annotated[Scalar, BeforeValidator(_scalar), WithJsonSchema(SCALAR)]
Scalars = Annotated[
    Scalar | list[Scalar],
    BeforeValidator(_scalars),
    _either(SCALAR, {"type": "array", "items": SCALAR}),
]


class Strict(BaseModel):
    """Refuses unknown keys."""

    # A part needs a validator of its own only where it is made on its own: built when needed.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
