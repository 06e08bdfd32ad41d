"""The tests of launcher.trainer start ranks, and skip, as the agent's do."""

from tests.agent.conftest import processes, pytest_collection_modifyitems, small_disk, train

__all__ = ["processes", "pytest_collection_modifyitems", "small_disk", "train"]
