"""Which two requirements clash, by what uv says where it can't resolve a set. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

NAME = r"[a-z0-9][a-z0-9._-]*"
ONE = r"(?:[<>=!~]=?|===)[\w.*+!-]*[\w*]"
PACKAGE = rf"({NAME})(?:\[[^\]]*\])?(?:\{{[^}}]*\}})?((?:{ONE}(?:, ?{ONE})*)?)"
"""A package, with options and a condition, and its versions, as uv writes them."""
NEEDS = re.compile(rf"{PACKAGE} depends? on {PACKAGE}")
ASKED = re.compile(rf"(?:you require|(?<=\|)) ?{PACKAGE}(?=,|\.$|\. |\|)")
WHEELLESS = re.compile(rf"(all versions of )?{PACKAGE} (?:has|have) no (?:usable )?wheels")
ABSENT = re.compile(rf"there (?:is|are) no versions? of {PACKAGE}")
NO_WHEEL = "has no wheel for this Python and platform, and none is compiled here"


@dataclass(frozen=True)
class _Claim:
    """A step of uv's: what needs which versions of a package; of "" the user asks."""

    who: str
    versions: str
    name: str
    limit: str

    def __str__(self) -> str:
        who = f"{self.who}{self.versions} needs" if self.who else "this asks for"
        return f"{who} {self.name}{self.limit}"

    @property
    def is_of_newest(self) -> bool:
        return not re.search(r"<|==", self.versions)


def clash_in(said: str, there: Mapping[str, str], limits: Sequence[str] = ()) -> str | None:
    """What uv says can't be met, as one sentence: who needs what, and what stands against it.

    there: versions of what the base has; limits: requirements of ours. uv shows for each version
    in turn why it can't be had: what it says of the newest counts. None where it names no cause.
    """
    text = " ".join(said.lower().split())
    claims = [*_claims(text)]
    bounds = {canonicalize_name(one.name): str(one.specifier) for one in map(Requirement, limits)}
    lacking = [(all_ or not limit, name, limit) for all_, name, limit in WHEELLESS.findall(text)]
    found = []
    for at, claim in enumerate(claims):
        ours = not claim.who and claim.limit == bounds.get(claim.name)
        if ours or claim.who == claim.name:  # one of its options, of the same version
            continue
        if against := _against(claim, claims, there, bounds, lacking):
            found.append((claim.is_of_newest, bool(claim.who), at, f"{claim}{against}"))
    if found:
        return max(found)[-1]
    for claim in claims:
        bound = bounds.get(claim.name, claim.limit)
        one_fits = claim.limit.startswith("==") and overlap(claim.limit, bound)
        if claim.limit not in ("", bound) and not one_fits:
            return f"{claim}, and here it is limited to {claim.name}{bound}"
    if absent := ABSENT.search(text):
        return f"no index has {absent[1]}{absent[2]}"
    if lacking:
        return f"{lacking[-1][1]} {NO_WHEEL}"
    missing = re.search(rf"({NAME}) was not found", text)
    return f"no index has a package {missing[1]}" if missing else None


def _claims(text: str) -> Iterator[_Claim]:
    asked = re.sub(r"(you require [^|,]*?) and (?!you )", r"\1|", text)
    for name, limit in ASKED.findall(asked):
        yield _Claim("", "", canonicalize_name(name), limit.replace(" ", ""))
    for who, versions, name, limit in NEEDS.findall(text):
        yield _Claim(who, versions, canonicalize_name(name), limit.replace(" ", ""))


def _against(
    claim: _Claim,
    claims: Sequence[_Claim],
    there: Mapping[str, str],
    bounds: Mapping[str, str],
    lacking: Sequence[tuple[object, str, str]],
) -> str:
    """What a claim can't be met for, as the end of a sentence; "" where nothing is against it."""
    name = claim.name
    if name in there:
        fits = overlap(f"=={there[name]}", claim.limit)
        return "" if fits else f", and the base has {name} {there[name]}"
    for other in claims:
        if other.name == name and not overlap(claim.limit, other.limit):
            if other.who:
                return f", and {other}" if claim.who else ""
            if bounds.get(name) == other.limit:
                return f", and here it is limited to {name}{other.limit}"
            return f", and {other}" if claim.who else f", and for {name}{other.limit}"
    for all_, other_name, limit in lacking:
        if canonicalize_name(other_name) == name and (
            all_ if not claim.limit or not limit else overlap(claim.limit, limit)
        ):
            return f", which {NO_WHEEL}" if claim.who else ""
    return ""


def overlap(one: str, other: str) -> bool:
    """Whether a version can meet both specifiers; what can't be read is taken to meet both."""
    named = re.findall(r"[\w.+!-]*\w", f"{one},{other}")
    try:
        both = SpecifierSet(f"{one},{other}".strip(","))
        bounds = [Version("0"), *map(Version, named)]
    except ValueError:
        return True
    above = (Version(f"{one.base_version}.0.0.1") for one in bounds)
    return any(both.contains(version, prereleases=True) for version in (*bounds, *above))
