"""Which two requirements clash, by what uv says where it can't resolve a set. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

NAME = r"(?<![\w.\[<>=!~,+|-])([a-z0-9][a-z0-9._-]*)"
OPTIONS = r"(?:\[[^][\s]*\])?"
RANGE = r"(?:[<>=!~]=?|===)[\w.*+!-]*[\w*]"
RANGES = rf"{RANGE}(?:[,|]{RANGE})*"
PACKAGE = rf"{NAME}{OPTIONS}(?:\{{[^{{}}]*\}})?((?:{RANGES})?)"
"""A package, with options and a condition, and its versions, as `_one_line` has them."""
LISTED = re.compile(rf"{NAME}{OPTIONS}{RANGES}(?: \1{OPTIONS}{RANGES})+")
ASKED = re.compile(rf"(?:one of: )?{PACKAGE}")
NEEDS = re.compile(rf"{PACKAGE} depends? on (?:one of: )?{PACKAGE}")
WHEELLESS = re.compile(rf"(all versions of )?{PACKAGE} (?:has|have) no (?:usable )?wheels")
SERIES = re.compile(r"<((?:\d+\.)*)(\d{1,9})\.dev0\|>=\1(\d{1,9})\.dev0")
ABSENT = re.compile(rf"there (?:is|are) no versions? of {PACKAGE}|{NAME} was not found")
NO_WHEEL = "has no wheel for this Python and platform, and none is compiled here"
RIVALS = 16  # claims on one package that a claim is compared with: uv may name each version
_Claim = tuple[str, str, str, str]
"""A step of uv's: what, "" for the user, in which versions needs a package in which versions."""


@dataclass(frozen=True)
class _Known:
    """What a claim can clash with: the base's versions, our limits, others' claims and wheels.

    lacking: the versions without a wheel, with whether these are all
    """

    there: Mapping[str, str]
    bounds: Mapping[str, str]
    claims: dict[str, list[_Claim]] = field(default_factory=lambda: defaultdict(list))
    lacking: dict[str, list[tuple[bool, str]]] = field(default_factory=lambda: defaultdict(list))


def clash_in(said: str, there: Mapping[str, str], limits: Sequence[str] = ()) -> str | None:
    """What uv says can't be met, as one sentence: who needs what, and what stands against it.

    there: versions of what the base has; limits: requirements of ours. uv shows for each version
    in turn why it can't be had: what it says of the newest counts. None where it names no cause.
    """
    text = _one_line(said)
    claims = [*dict.fromkeys([*_asked(text), *NEEDS.findall(text)])]
    ours = map(Requirement, limits)
    bounds: dict[str, str] = {canonicalize_name(one.name): str(one.specifier) for one in ours}
    known = _Known(there, bounds)
    for claim in claims:
        known.claims[claim[2]].append(claim)
    for every, name, limit in WHEELLESS.findall(text):
        known.lacking[name].append((bool(every) or not limit, limit))
    found, loose = [], []
    for at, claim in enumerate(claims):
        who, versions, name, limit = claim
        bound = bounds.get(name, limit)
        if who == name or (not who and limit == bounds.get(name)):  # of its options; our own
            continue
        if against := _against(claim, known):
            newest = not re.search(r"<|==", versions.rpartition("|")[2])
            found.append((newest, bool(who), at, f"{_in_words(claim)}{against}"))
        elif limit not in ("", bound) and not (limit.startswith("==") and overlap(limit, bound)):
            loose.append(f"{_in_words(claim)}, and here it is limited to {name}{bound}")
    if found or loose:
        return max(found)[-1] if found else loose[0]
    if absent := ABSENT.search(text):
        return f"no index has a package {absent[1] or absent[3]}{absent[2] or ''}"
    return f"{[*known.lacking][-1]} {NO_WHEEL}" if known.lacking else None


def _one_line(said: str) -> str:
    """The text in one line, in which a package that is listed with several ranges stands once.

    uv writes pkg>=1,!=1.5 as `one of: pkg>=1,<1.5 pkg>1.5`; what isn't that becomes pkg<1|>2.
    """
    text = " ".join(said.lower().split())
    text = LISTED.sub(lambda m: re.sub(rf" {re.escape(m[1])}{OPTIONS}", "|", m[0]), text)
    text = re.sub(r"<([\w.+!]+)\|>\1(?![\w.+!])", r"!=\1", text)
    return SERIES.sub(lambda m: f"!={m[1]}{m[2]}.*" if int(m[3]) - int(m[2]) == 1 else m[0], text)


def _asked(text: str) -> Iterator[_Claim]:
    """What the user requires, by the lists after `you require`."""
    for clause in re.split("(?<!conclude that )you require ", text)[1:]:
        for one in re.split(r", |\. |\.$", clause, maxsplit=1)[0].split(" and "):
            if found := ASKED.fullmatch(one):
                yield "", "", found[1], found[2]


def _in_words(claim: _Claim) -> str:
    who, versions, name, limit = (part.replace("|", " or ") for part in claim)
    return f"{who}{versions} needs {name}{limit}" if who else f"this asks for {name}{limit}"


def _against(claim: _Claim, known: _Known) -> str:
    """What a claim can't be met for, as the end of a sentence; "" where nothing is against it."""
    who, _, name, limit = claim
    if own := known.there.get(name):
        where = "image" if name == "megatron-core" else "base"
        return "" if overlap(f"=={own}", limit) else f", and the {where} has {name} {own}"
    for other in known.claims[name][:RIVALS]:
        if not overlap(limit, other[3]):
            if not other[0] and known.bounds.get(name) == other[3]:
                return f", and here it is limited to {name}{other[3]}"
            return f", and {_in_words(other)}" if who or not other[0] else ""
    for every, versions in known.lacking[name][:RIVALS] if who else ():
        if overlap(limit, versions) if limit and versions else every:
            return f", which {NO_WHEEL}"
    return ""


def overlap(one: str, other: str) -> bool:
    """Whether a version can meet both specifiers; what can't be read is taken to meet both.

    A specifier may be several with | between them, of which one has to be met.
    """
    return any(_overlap(*pair) for pair in product(one.split("|"), other.split("|")))


@cache
def _overlap(one: str, other: str) -> bool:
    try:
        both = SpecifierSet(f"{one},{other}".strip(","))
        bounds = map(Version, ["0", *re.findall(r"[\w.+!-]*\w", f"{one},{other}")])
        tried = [(bound, Version(f"{bound.base_version}.0.0.1")) for bound in bounds]
    except ValueError:
        return True
    return any(both.contains(version, prereleases=True) for pair in tried for version in pair)
