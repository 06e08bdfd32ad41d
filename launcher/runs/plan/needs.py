"""The Python packages that a run's program and options import, by needs.yaml. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from launcher.agent import series
from launcher.base.errors import PreflightError
from launcher.base.yamlfile import Loader
from launcher.runs.plan.image_facts import build_command
from launcher.runs.plan.program import ProgramKind
from launcher.runs.plan.program_options import key_of
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import ImageRequest

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class NeedRule:
    """A row of needs.yaml."""

    modules: Mapping[str, str]
    source: str
    option: str = ""
    values: Sequence[str] = ()
    unless: Sequence[str] = ()
    beside: Sequence[str] = ()
    programs: Sequence[str] = ()
    fact: str = ""
    extras: str = ""

    def holds(self, resolved: Resolved) -> bool:
        """Whether the run needs the modules."""
        if self.programs and resolved.config.program not in self.programs:
            return False
        if not self.option:
            return True
        given = resolved.values
        value = given.get(self.option, False)
        chosen = str(value) in self.values if self.values else value is not False
        release = resolved.facts.release
        return (
            resolved.program.kind is not ProgramKind.SCRIPT
            and chosen
            and not any(one in given or one == resolved.config.program for one in self.unless)
            and all(_is_given(given, one) for one in self.beside)
            and (not self.fact or series.has(release, self.fact))
        )


def _is_given(options: Mapping[str, object], wanted: str) -> bool:
    """Whether an option is given, and with its value in "option=value"."""
    name, _, value = wanted.partition("=")
    found = options.get(name, False)
    return str(found) == value if value else found is not False


@cache
def table() -> Sequence[NeedRule]:
    """The rows of needs.yaml."""
    rows = yaml.load(TABLE.read_bytes(), Loader=Loader)  # noqa: S506 - the safe one
    return [NeedRule(**row) for row in rows]


def modules() -> dict[str, str]:
    """Every module of the table, and its package."""
    return {module: package for rule in table() for module, package in rule.modules.items()}


@dataclass(frozen=True)
class PackageNeed:
    """A module that a run imports: its package, what of the run needs it, and what mends it."""

    module: str
    package: str
    why: str
    mend: str


def needed(resolved: Resolved, *, contained: bool) -> list[PackageNeed]:
    """What a run imports beyond Megatron's own needs; each module once."""
    found = dict[str, PackageNeed]()
    for rule in table():
        if rule.holds(resolved):
            for module, package in rule.modules.items():
                why = f"{_place(rule, resolved)} needs the Python package {package}"
                mend = _mend(rule, resolved.config.image, contained=contained)
                found.setdefault(module, PackageNeed(module, package, why, mend))
    return [*found.values()]


def check_needs(needs: Sequence[PackageNeed], resolved: Resolved, image: str) -> None:
    """Raise PreflightError where the image, or this environment, is known to lack one of them.

    What is on PYTHONPATH, mounted, or of another Python isn't known; the runner looks there.
    """
    there = resolved.facts.packages
    elsewhere = resolved.config.image.python != "python3" or "PYTHONPATH" in resolved.config.env
    if there is None or elsewhere or any("-packages" in one.target for one in resolved.mounts):
        return
    if lacks := [need for need in needs if need.package not in there]:
        problems = (f"{need.why}, which isn't in {image}" for need in lacks)
        raise PreflightError("\n".join(problems), "\n  ".join(dict.fromkeys(n.mend for n in lacks)))


def for_runner(needs: Sequence[PackageNeed]) -> Mapping[str, str]:
    """What the runner says of each module that isn't there, by their names."""
    return {need.module: f"{need.why}. {need.mend}" for need in needs}


def _place(rule: NeedRule, resolved: Resolved) -> str:
    if not rule.option:
        return f"{resolved.origin.place('program')}: {resolved.config.program}"
    value = resolved.values[rule.option]
    where = resolved.origin.place(key_of(rule.option))
    return where if value is True else f"{where}: {value}"


def _mend(rule: NeedRule, image: ImageRequest, *, contained: bool) -> str:
    packages = [*dict.fromkeys(rule.modules.values())]
    if not contained:
        return f"python3 -m pip install {' '.join(packages)}"
    if image.name:
        return f"Take an image with it: FROM {image.name}, RUN pip install {' '.join(packages)}"
    wanted = [rule.extras] if rule.extras else packages
    extras = [*image.extras, *(one for one in wanted if one not in image.extras)]
    return (
        f"{build_command(image, extras)}, and in the run file "
        f'image: {{tag: "{image.tag}", extras: [{", ".join(extras)}]}}'
    )
