"""Rows of a test as data: from the YAML beside its file, under the test's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

Test = TypeVar("Test", bound=Callable[..., None])


@cache
def _tables(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in an image another Python's has no C
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506
    return found


def table(*names: str) -> Callable[[Test], Test]:
    """Parametrize a test by its rows: a list of them, or a mapping by ids that name the defects.

    Of several names a row is a list of as many values. Raises KeyError where a test has no rows.
    """

    def parametrized(test: Test) -> Test:
        rows = _tables(Path(test.__globals__["__file__"]).with_suffix(".yaml"))[test.__name__]
        ids = [*rows] if isinstance(rows, dict) else None
        values = [*rows.values()] if isinstance(rows, dict) else rows
        return pytest.mark.parametrize(names if names[1:] else names[0], values, ids=ids)(test)

    return parametrized
