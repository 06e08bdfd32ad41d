"""Where Megatron raises what: the index of its messages, and the tool that makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.runs.explain import refusals as found
from tools import refusals

SOURCE = """
def check(args):
    if args.sequence_parallel:
        assert args.tp > 1, f"the gizmo of {args.tp} ranks needs more than one of them"
    if args.num_layers % 2:
        raise ValueError(
            "the number of layers must be even here, "
            "not {}".format(args.num_layers)
        )
    raise RuntimeError("too short")
    raise ValueError("an option %s stands for nothing that is known" % args.spec)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    module = tmp_path / "megatron/core/gizmo.py"
    module.parent.mkdir(parents=True)
    module.write_text(SOURCE)
    (module.parent / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\n")
    return tmp_path


@pytest.fixture
def written(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index that the tool writes of the checkout, and that is looked into."""
    path = tmp_path / "refusals.json"
    for module in (found, refusals):
        monkeypatch.setattr(module, "INDEX", path)
    monkeypatch.setattr("sys.argv", ["refusals", str(checkout)])
    found._index.cache_clear()
    refusals.main()
    return path


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("AssertionError: the gizmo of 8 ranks needs more than one of them",
         ", for --tp, --sequence-parallel"),
        ("ValueError: the number of layers must be even here, not 7", ", for --num-layers"),
        ("ValueError: an option moe stands for nothing that is known", ""),
    ],
)  # fmt: skip
def test_a_message_is_found_whatever_its_values(written: Path, said: str, where: str) -> None:
    """A hash of the whole message would fit one run's values alone."""
    assert written.exists()
    told = found.find(said)
    found._index.cache_clear()
    assert told == f"raised by check of megatron/core/gizmo.py (Megatron 0.99.1){where}"


@pytest.mark.parametrize("said", ["RuntimeError: too short", "ValueError: some other gizmo fell"])
def test_what_is_short_or_unknown_has_no_place(written: Path, said: str) -> None:
    """Two words stand in every program's messages."""
    assert written.exists()
    told = found.find(said)
    found._index.cache_clear()
    assert told == ""


def test_the_index_has_no_text_of_megatron() -> None:
    """Its licence, and the wheel's size, ask for hashes."""
    index = json.loads(found.INDEX.read_bytes())
    assert all(part[0].isdigit() and " " not in part for part in index["messages"])
    assert found.INDEX.stat().st_size < 300_000
