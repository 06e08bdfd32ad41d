"""Known failures: each is told by the text that it really has, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.job import Cause, Ended
from launcher.records import failures
from launcher.records.ending import Ending, describe

ROOT = Path(__file__).parents[2]

REAL = {known.name: known.texts for known in failures.table()}


def named(tail: str, cause: Cause = Cause.ITSELF) -> list[failures.Sign]:
    return failures.explain([tail.encode(errors="replace")], cause).signs


BEFORE = "training\n[2025-04-13 23:41:20] iteration 20/ 1000 | lm loss: 1.07E+01 |\n"


def test_every_row_of_the_table_has_its_real_text() -> None:
    assert all(REAL.values())
    assert len(REAL) == len(failures.table())


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in REAL.items() for text in texts]
)
def test_each_is_named_by_its_text_and_by_nothing_else(name: str, text: str) -> None:
    tail = f"{BEFORE}{text}\nrunner: rank 0 exited with code 1\n"
    found = named(tail)
    assert [sign.failure.name for sign in found] == [name]
    assert found[0].said
    assert found[0].said.text.rstrip("…") in text
    told = describe(Ending(Ended(1), False, tail), "0a1b", None, "")
    assert told[1].startswith(f"cause: {name}: ")
    assert told[2].startswith("cure: ")


def test_memory_is_named_by_what_the_engine_says_where_nothing_was_written() -> None:
    found = named("", Cause.MEMORY)
    assert [sign.lines[0] for sign in found] == ["cause: host memory is out"]


def test_the_first_cause_is_told_where_others_follow_from_it() -> None:
    """What follows from others comes last, though a log may have it first."""
    after = [known for known in failures.table() if known.follows]
    others = ["GPU memory is out", "the port is taken"]
    texts = [*(known.texts[0] for known in after), *(REAL[name][0] for name in others)]
    found = named("\n".join(texts))
    assert [sign.failure.name for sign in found] == [*others, *(known.name for known in after)]


def test_a_run_that_was_stopped_or_done_has_no_failure() -> None:
    text = REAL["the port is taken"][0]
    assert len(describe(Ending(Ended(143), True, text), "0a1b", None, "")) == 1
    assert describe(Ending(Ended(0), False, text), "0a1b", None, "") == []


def test_a_full_shared_memory_is_no_full_disk() -> None:
    """The headline would contradict the cause."""
    full = "OSError: [Errno 28] No space left on device"
    shared = REAL["shared memory, /dev/shm, is too small"]
    assert Ending(Ended(1), False, full).reason == "a disk is full"
    for text in (shared[1], f"{full}\n{shared[3]}", f"{shared[1]}\n{full}"):
        assert not Ending(Ended(1), False, text).full


def healthy() -> list[Path]:
    """What is no failing run's output: our own words, and what healthy runs have printed."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/golden/*.txt"), ROOT / "README.md"]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("path", healthy(), ids=lambda path: path.name)
def test_ordinary_text_names_nothing(path: Path) -> None:
    assert named(path.read_text(encoding="utf-8")) == []


@given(st.text(max_size=2000), st.sampled_from([text for texts in REAL.values() for text in texts]))
def test_noise_around_a_failure_hides_nothing(noise: str, text: str) -> None:
    found = named(f"{noise}\n{text}\n{noise}")
    assert any(text in REAL[sign.failure.name] for sign in found)
