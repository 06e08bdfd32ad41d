"""One thing that is wrong, as all checks tell it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import PreflightError


@dataclass(frozen=True)
class Finding:
    """What is wrong, with its value and place; why that can't work; the smallest mend.

    `refuse` False is a warning: the run may start.
    """

    what: str
    why: str
    mend: str
    refuse: bool

    def __str__(self) -> str:
        return f"{self.what}\n  {self.why}\n  {self.mend}"


def enforce(findings: Sequence[Finding]) -> None:
    """Print the warnings on stderr. Raises PreflightError with every refusal."""
    for finding in findings:
        if not finding.refuse:
            print(f"launcher: warning: {finding}", file=sys.stderr, flush=True)
    refusals = [str(finding) for finding in findings if finding.refuse]
    if refusals:
        raise PreflightError("\n".join(refusals), "--no-preflight starts it all the same.")
