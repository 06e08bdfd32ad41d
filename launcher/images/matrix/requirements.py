"""Requirements and the pins that meet them, or don't."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pinned_versions(pins: Sequence[str]) -> dict[str, str]:
    """The versions of `name==version --hash=…` by normalised names."""
    parts = (pin.partition(" ")[0].partition("==") for pin in pins)
    return {canonicalize_name(name): version for name, _, version in parts}


def outdated(requirements: Sequence[str], pins: Sequence[str]) -> list[str]:
    """The requirements that no pin satisfies: torch==2.6.0 (locked: 2.5.1), scipy (not locked)."""
    locked, found = pinned_versions(pins), []
    for requirement in map(Requirement, requirements):
        version = locked.get(canonicalize_name(requirement.name))
        if version is None:
            found.append(f"{requirement} (not locked)")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement} (locked: {version})")
    return found
