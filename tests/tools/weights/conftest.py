"""What of these tests is skipped: what needs Megatron or transformers, where they aren't."""

from __future__ import annotations

import pytest

from tests.conftest import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = missing("torch", "megatron.core", "transformers")
    skip = pytest.mark.skip(reason=f"{' and '.join(absent)} can't be imported here")
    for item in items if absent else ():
        if item.get_closest_marker("megatron") and "tests/tools/weights" in item.path.as_posix():
            item.add_marker(skip)
