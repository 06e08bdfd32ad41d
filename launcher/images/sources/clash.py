"""Which two requirements clash, by what uv says where it can't resolve a set. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

NAME = r"[a-z0-9][a-z0-9._-]*"
ONE = r"(?:[<>=!~]=?|===)[\w.*+!-]*[\w*]"
PACKAGE = rf"({NAME})(?:\[[^\]]*\])?(?:\{{[^}}]*\}})?((?:{ONE}(?:,{ONE})*)?)"
"""A package, with options and a condition, and its versions, as uv writes them."""
NEEDS = re.compile(rf"{PACKAGE} depends? on {PACKAGE}")
ASKED = re.compile(rf"(?:you require|(?<=\|)) ?{PACKAGE}(?=,|\.$|\. |\|)")
WHEELLESS = re.compile(rf"(all versions of )?{PACKAGE} (?:has|have) no (?:usable )?wheels")
ABSENT = re.compile(rf"there (?:is|are) no versions? of {PACKAGE}|({NAME}) was not found")
NO_WHEEL = "has no wheel for this Python and platform, and none is compiled here"
_Claim = tuple[str, str, str, str]
"""A step of uv's: what, "" for the user, in which versions needs a package in which versions."""


def clash_in(said: str, there: Mapping[str, str], limits: Sequence[str] = ()) -> str | None:
    """What uv says can't be met, as one sentence: who needs what, and what stands against it.

    there: versions of what the base has; limits: requirements of ours. uv shows for each version
    in turn why it can't be had: what it says of the newest counts. None where it names no cause.
    """
    text = " ".join(said.lower().split())
    asked = re.sub(r"(you require [^|,]*?) and (?!you )", r"\1|", text)
    claims: list[_Claim] = [("", "", *one) for one in ASKED.findall(asked)] + NEEDS.findall(text)
    named = [Requirement(one) for one in limits]
    bounds = {str(canonicalize_name(one.name)): str(one.specifier) for one in named}
    lacking = [(all_ or not limit, name, limit) for all_, name, limit in WHEELLESS.findall(text)]
    found, loose = [], []
    for at, claim in enumerate(claims):
        who, versions, name, limit = claim
        bound = bounds.get(name, limit)
        if who == name or (not who and limit == bounds.get(name)):  # of its options; our own
            continue
        if against := _against(claim, claims, there, bounds, lacking):
            newest = not re.search(r"<|==", versions)
            found.append((newest, bool(who), at, f"{_in_words(claim)}{against}"))
        elif limit not in ("", bound) and not (limit.startswith("==") and overlap(limit, bound)):
            loose.append(f"{_in_words(claim)}, and here it is limited to {name}{bound}")
    if found or loose:
        return max(found)[-1] if found else loose[0]
    if absent := ABSENT.search(text):
        return f"no index has a package {absent[1] or absent[3]}{absent[2] or ''}"
    return f"{lacking[-1][1]} {NO_WHEEL}" if lacking else None


def _in_words(claim: _Claim) -> str:
    who, versions, name, limit = claim
    return f"{who}{versions} needs {name}{limit}" if who else f"this asks for {name}{limit}"


def _against(
    claim: _Claim,
    claims: Sequence[_Claim],
    there: Mapping[str, str],
    bounds: Mapping[str, str],
    lacking: Sequence[tuple[object, str, str]],
) -> str:
    """What a claim can't be met for, as the end of a sentence; "" where nothing is against it."""
    who, _, name, limit = claim
    if name in there:
        fits = overlap(f"=={there[name]}", limit)
        return "" if fits else f", and the base has {name} {there[name]}"
    for other in claims:
        if other[2] == name and not overlap(limit, other[3]):
            if not other[0] and bounds.get(name) == other[3]:
                return f", and here it is limited to {name}{other[3]}"
            return f", and {_in_words(other)}" if who or not other[0] else ""
    for all_, one, versions in lacking:
        if who and one == name and (overlap(limit, versions) if limit and versions else all_):
            return f", which {NO_WHEEL}"
    return ""


def overlap(one: str, other: str) -> bool:
    """Whether a version can meet both specifiers; what can't be read is taken to meet both."""
    try:
        both = SpecifierSet(f"{one},{other}".strip(","))
        bounds = map(Version, ["0", *re.findall(r"[\w.+!-]*\w", f"{one},{other}")])
        tried = [(bound, Version(f"{bound.base_version}.0.0.1")) for bound in bounds]
    except ValueError:
        return True
    return any(both.contains(version, prereleases=True) for pair in tried for version in pair)
