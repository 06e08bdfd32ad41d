"""Looks up what an image adds among known vulnerabilities, in OSV's records.

They are asked of OSV's API (https://google.github.io/osv.dev/api/). No scanner is installed for it:
the packages and their versions are known, and looking them up is one request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from launcher.deadline import within
from launcher.errors import UsageError

if TYPE_CHECKING:
    import requests

SECONDS = 30  # that one answer may take


@dataclass(frozen=True, order=True)
class Package:
    """A package of PyPI as records name it: normalised, without a build's own +suffix."""

    name: str
    version: str

    @staticmethod
    def of(name: str, version: str) -> Package:
        """torch 2.13.0+cpu is torch 2.13.0: no record has the suffix."""
        return Package(canonicalize_name(name), Version(version).public)


@dataclass(frozen=True)
class Finding:
    """One known vulnerability of one package, under all its names."""

    package: Package
    id: str
    aliases: tuple[str, ...]
    summary: str
    fixed: tuple[str, ...]


def of_pins(pins: list[str]) -> list[Package]:
    """The packages of `name==version --hash=…`, each once."""
    parts = [pin.partition(" ")[0].partition("==") for pin in pins]
    return sorted({Package.of(name, version) for name, _, version in parts})


def of_sbom(document: dict[str, Any]) -> list[Package]:
    """The packages of PyPI in a bill of materials."""
    found = document["components"]
    return sorted(
        Package.of(one["name"], one["version"])
        for one in found
        if one.get("purl", "").startswith("pkg:pypi/")
    )


def scan(packages: list[Package], api: str) -> list[Finding]:
    """What the API at this URL knows of `packages`. Raises UsageError where it says nothing."""
    import requests

    try:
        with requests.Session() as session:
            records = {
                package: [_asked(session, "GET", f"{api}/v1/vulns/{id}") for id in sorted(ids)]
                for package, ids in _ids(session, packages, api).items()
            }
        return findings(records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"answers otherwise than OSV's API does: {error!r}"  # bad JSON, a bad record
        if isinstance(error, requests.Timeout):
            why = f"no answer within {SECONDS} s"
        elif isinstance(error, requests.HTTPError):
            why = str(error)
        elif isinstance(error, OSError) and not isinstance(error, ValueError):
            why = "can't be reached"
        mend = "Nothing was checked. --database names another server with OSV's API."
        raise UsageError(f"{api}: {why}", mend) from error


def findings(records: dict[Package, list[dict[str, Any]]]) -> list[Finding]:
    """Each vulnerability once: databases record the same one under names of their own."""
    found: list[Finding] = []
    for package in sorted(records):
        named: set[str] = set()
        live = (record for record in records[package] if "withdrawn" not in record)
        for record in sorted(live, key=lambda one: str(one["id"])):
            names = {record["id"], *record.get("aliases", ())}
            if not names & named:
                found.append(_finding(package, record))
            named |= names
    return found


def _finding(package: Package, record: dict[str, Any]) -> Finding:
    text = record.get("summary") or record.get("details") or "no summary"
    affected = (
        one
        for one in record.get("affected", ())
        if (about := one.get("package", {})).get("ecosystem") == "PyPI"
        and canonicalize_name(about["name"]) == package.name
    )
    fixed = {
        event["fixed"]
        for one in affected
        for part in one.get("ranges", ())
        if part["type"] == "ECOSYSTEM"
        for event in part["events"]
        if "fixed" in event
    }
    return Finding(
        package=package,
        id=record["id"],
        aliases=tuple(sorted(record.get("aliases", ()))),
        summary=text.strip().splitlines()[0],
        fixed=tuple(sorted(fixed, key=lambda text: [*map(int, re.findall(r"\d+", text))])),
    )


def _ids(session: requests.Session, packages: list[Package], api: str) -> dict[Package, set[str]]:
    """The IDs of the records of each package; a long answer comes in pages."""
    found: dict[Package, set[str]] = {package: set() for package in packages}
    pages: dict[Package, str] = dict.fromkeys(packages, "")
    while pages:
        queries: list[Any] = [
            {
                "package": {"ecosystem": "PyPI", "name": package.name},
                "version": package.version,
                **({"page_token": token} if token else {}),
            }
            for package, token in pages.items()
        ]
        told = _asked(session, "POST", f"{api}/v1/querybatch", json={"queries": queries})
        results = dict(zip(pages, told["results"], strict=True))
        for package, result in results.items():
            found[package] |= {one["id"] for one in result.get("vulns", ())}
        tokens = {package: one.get("next_page_token", "") for package, one in results.items()}
        pages = {package: token for package, token in tokens.items() if token}
    return found


def _asked(session: requests.Session, method: str, url: str, **more: Any) -> dict[str, Any]:
    answer = within(SECONDS, partial(session.request, method, url, timeout=SECONDS, **more))
    answer.raise_for_status()
    record: dict[str, Any] = answer.json()
    return record
