"""What of these tests is skipped: what needs Megatron or transformers, where they aren't."""

from __future__ import annotations

import importlib.util

import pytest


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = ("torch", "megatron.core", "transformers")
    missing = [name for name in needed if not _importable(name)]
    skip = pytest.mark.skip(reason=f"{' and '.join(missing)} can't be imported here")
    for item in items if missing else ():
        if item.get_closest_marker("megatron") and "tests/tools/weights" in item.path.as_posix():
            item.add_marker(skip)
