"""Splits of few documents: dropped where nothing uses them, refused by name where they are used."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from launcher.runs.checks import splits
from launcher.runs.checks.machine import Dataset
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.resolved import Resolved, resolve
from tests.plans import HOST, load

UPSTREAM = ("program=pretrain_gpt.py",)


def resolved(*sets: str, rest: tuple[str, ...] = ()) -> Resolved:
    return replace(resolve(*load("gpt2", *sets), ImageFacts("0.16.1"), HOST), rest=rest)


@pytest.mark.parametrize("documents", [1, 2, 3, 19, 320, 1000, 12345])
@pytest.mark.parametrize("split", ["949,50,1", "969, 30, 1", "98,2,0", "0.9,0.1", "1,1,1"])
def test_documents_are_shared_out_as_megatron_does(split: str, documents: int) -> None:
    """Shares of tokens, which were counted, say nothing of a share that rounds to no document."""
    parts = splits.shares(split)
    fractions = [part / sum(parts) for part in parts]
    ends = [0.0, fractions[0], fractions[0] + fractions[1], sum(fractions)]
    whole = [round(end * float(documents)) for end in ends]
    assert splits.bounds(parts, documents) == [*pairwise(whole)]


@pytest.mark.parametrize(
    ("sets", "documents", "split"),
    [
        ((), (320,), "949,51,0"),  # the preset's own split: it died by SIGABRT
        ((), (320, 5000), "949,51,0"),
        (("logging.eval_iters=0", "data.split='98,1,1'"), (20,), "100,0,0"),
        (("logging.eval_iters=0", *UPSTREAM), (320,), "949,51,0"),
    ],
)
def test_a_split_without_a_document_that_nothing_uses_is_dropped(
    sets: tuple[str, ...], documents: tuple[int, ...], split: str
) -> None:
    """Megatron looked for the first sample of it for ever."""
    run, (note,) = splits.without_empty(resolved(*sets), documents)
    assert run.values["split"] == run.config.data.split == split
    assert note.endswith(", which would have no document")
    before = splits.bounds(splits.shares("949,50,1"), 320)
    assert splits.bounds(splits.shares("949,51,0"), 320)[:2] == before[:2]


@pytest.mark.parametrize(
    ("sets", "rest", "documents"),
    [((), (), 5000), (UPSTREAM, (), 320), ((), ("--split", "949,50,1"), 320)],
)
def test_a_split_with_documents_and_one_that_is_used_or_behind_two_dashes_stay(
    sets: tuple[str, ...], rest: tuple[str, ...], documents: int
) -> None:
    """Upstream's program tests at the end, on what a user then asked for."""
    run = resolved(*sets, rest=rest)
    assert splits.without_empty(run, (documents,)) == (run, [])


@pytest.mark.parametrize(
    ("sets", "documents", "what", "mend"),
    [
        (("data.split='10,90,0'",), 3, "no document for training: 10 of 100", "75,25,0"),
        (("data.split='0,100,0'",), 300, "no document for training: 0 of 100", "95,5,0"),
        ((), 1, "no document for evaluation: 50 of 1000", "logging.eval_iters=0"),
        (("data.split='98,1,1'",), 20, "no document for evaluation: 1 of 100", "95,5,0"),
        (UPSTREAM, 320, "no document for test: 1 of 1000 parts of its 320 documents", "95,5,0"),
    ],
)
def test_a_split_without_a_document_that_is_used_is_refused_by_name(
    sets: tuple[str, ...], documents: int, what: str, mend: str
) -> None:
    """Megatron hung, or ended by SIGABRT, without a word on the split."""
    data = Dataset("/d", "", 10**6, 9, documents)
    (finding,) = splits.check_splits(resolved(*sets), [data])
    assert (what in finding.what, mend in finding.mend, finding.refuse) == (True, True, True)


@pytest.mark.parametrize("program", [(), UPSTREAM])
@pytest.mark.parametrize("documents", [(1,), (2,), (3,), (4,), (5,), (8,), (15,), (320, 2)])
def test_the_split_that_a_refusal_offers_works(
    documents: tuple[int, ...], program: tuple[str, ...]
) -> None:
    """For two documents it offered 90,10,0, and refused that with the same words."""
    files = [Dataset("/d", "", 10**6, 9, count) for count in documents]
    first, *_ = splits.check_splits(resolved(*program, "data.split='0,100,0'"), files)
    split, *more = re.findall(r"--set (\S+=[\d,]*\d)", first.mend)
    key, _, value = split.partition("=")
    assert [*splits.check_splits(resolved(*program, f"{key}='{value}'", *more), files)] == []
