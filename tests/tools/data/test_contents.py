"""Data files are checked to the last entry, compared to the first difference, joined exactly."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import cli
from launcher.base.errors import UsageError
from launcher.runs.datasets.indexed import IndexedOutput
from launcher.runs.datasets.output import publish
from launcher.tools.data import contents
from launcher.tools.data.faults import DataError
from launcher.tools.data.tokenize import laid_out
from tests.tools.data.conftest import documents

Documents = list[list[list[int]]]
TWO, FOUR = np.dtype("<u2"), np.dtype("<i4")
SOME: Documents = [[[1, 2, 3]], [], [[4], [5, 6]], [[7] * 40]]
DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 65499), max_size=5), max_size=3), min_size=1, max_size=9
)


def write(prefix: Path, found: Documents, kind: np.dtype[np.generic] = TWO) -> Path:
    output = IndexedOutput(prefix, kind.itemsize)
    for document in found:
        texts = [np.array(text, np.uint32) for text in document]
        made = laid_out(texts, [len(texts)], kind, None)
        output.add(made.tokens, made.lengths, made.counts)
    publish([output])
    output.close()
    return prefix


def without_empty(found: Documents) -> Documents:
    return [[text for text in document if text] for document in found]


@given(found=DOCUMENTS, kind=st.sampled_from([TWO, FOUR]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, found: Documents, kind: np.dtype[np.generic]
) -> None:
    prefix = write(tmp_path_factory.mktemp("data") / "d", found, kind)
    wanted = without_empty(found)
    data = contents.open_data(prefix)
    assert documents(prefix) == wanted
    sizes = [sum(map(len, document)) for document in wanted]
    assert np.concatenate([*data.sizes()]).tolist() == sizes
    assert (data.documents, data.tokens) == (len(found), sum(sizes))
    assert data.sequences == sum(map(len, wanted))
    counted = contents.sizes(data)
    assert (counted.shortest, counted.longest, counted.empty) == (
        min(sizes),
        max(sizes),
        sizes.count(0),
    )
    assert sum(counted.bars) == len(found)
    for number, document in enumerate(wanted):
        assert data.document(number, 4) == [*chain(*document)][:4]


@given(
    found=DOCUMENTS,
    end=st.sampled_from([".idx", ".bin"]),
    at=st.integers(0, 300),
    put=st.binary(max_size=9),
    cut=st.integers(0, 9),
)
def test_damage_is_told_or_does_none(
    tmp_path_factory: pytest.TempPathFactory,
    found: Documents,
    end: str,
    at: int,
    put: bytes,
    cut: int,
) -> None:
    prefix = write(tmp_path_factory.mktemp("data") / "d", found)
    file = Path(f"{prefix}{end}")
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + put + whole[at + cut :])
    try:
        data = contents.open_data(prefix)
    except DataError:
        return
    assert sum(map(len, documents(prefix))) == data.sequences  # reads, each byte in one sequence


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (SOME, ""),
        (SOME[:3], "documents: 4 and 3"),
        ([[[1, 2, 3]], [[4]], [[5, 6]], [[7] * 40]], "sequences of document 1: 0 and 1"),
        ([[[1, 2]], [], [[3, 4], [5, 6]], [[7] * 40]], "tokens of document 0: 3 and 2"),
        ([[[1, 2, 3]], [], [[4, 5], [6]], [[7] * 40]], "tokens of sequence 1: 1 and 2"),
        (
            [[[1, 2, 3]], [], [[4], [5, 6]], [[7] * 5 + [9] + [7] * 34]],
            "token 5 of sequence 3, in document 3: 7 and 9",
        ),
    ],
)
def test_the_first_difference_is_told(tmp_path: Path, other: Documents, said: str) -> None:
    first, second = write(tmp_path / "a", SOME), write(tmp_path / "b", other)
    assert contents.difference(contents.open_data(first), contents.open_data(second)) == said


@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_joined_is_as_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[Documents]
) -> None:
    folder = tmp_path_factory.mktemp("data")
    prefixes = [write(folder / f"{number}", part) for number, part in enumerate(parts)]
    contents.merge(prefixes, folder / "joined")
    write(folder / "whole", [*chain(*parts)])
    for suffix in (".bin", ".idx"):
        joined = folder / f"joined{suffix}"
        assert joined.read_bytes() == joined.with_stem("whole").read_bytes()


def test_what_cant_be_joined_is_told(tmp_path: Path) -> None:
    two, four = write(tmp_path / "a", SOME), write(tmp_path / "b", SOME, FOUR)
    with pytest.raises(UsageError, match="two bytes and some of four"):
        contents.merge([two, four], tmp_path / "joined")
    with pytest.raises(UsageError, match="written while it is read"):
        contents.merge([two], two)
    (tmp_path / "c.bin").symlink_to(f"{two}.bin")
    (tmp_path / "c.idx").symlink_to(f"{two}.idx")
    for again in (Path(f"{two}.idx"), Path(f"{two}.bin"), two, tmp_path / "c"):
        with pytest.raises(UsageError, match=f"{again}: it is named twice"):
            contents.merge([two, again], tmp_path / "joined")
    with pytest.raises(UsageError, match=r"absent\.idx: no such file"):
        contents.merge([tmp_path / "absent"], tmp_path / "joined")
    assert contents.open_data(two).documents == 4
    assert not [*tmp_path.glob("joined*")]


def test_a_pattern_in_quotes_means_each_once(tmp_path: Path) -> None:
    """It was looked for as a file of that name."""
    _shards(tmp_path, "d", 2)
    (tmp_path / "d.1-of-2.rejects.jsonl").touch()
    target = tmp_path / "joined"
    for pattern in ("d.*", "d.*-of-2_text_document", "d.?-*.bin", "d.[12]*.idx"):
        merge = ["data", "merge", str(tmp_path / pattern), "--output-prefix", str(target)]
        assert cli.main(merge) == 0
        assert contents.open_data(target).documents == 2 * len(SOME)


@pytest.mark.parametrize("names", [["1", "3"], ["2", "1", "3"], ["1", "2", "2", "3"], ["1", "2"]])
def test_missing_and_disordered_shards_are_told(tmp_path: Path, names: list[str]) -> None:
    prefixes = [write(tmp_path / f"d.{name}-of-3_text_document", SOME) for name in names]
    for beside in ([], [write(tmp_path / "e", SOME)], _shards(tmp_path, "e", 2)):
        with pytest.raises(UsageError, match=r"d\.\*-of-3_text_document: of 3 shards, these"):
            contents.merge([*beside, *prefixes], tmp_path / "joined")
    both = [*_shards(tmp_path, "f", 2), *_shards(tmp_path, "g", 3)]
    assert contents.merge(both, tmp_path / "joined").documents == 5 * len(SOME)


def _shards(folder: Path, name: str, parts: int) -> list[Path]:
    """Those of one job, all the same."""
    names = [f"{name}.{part}-of-{parts}_text_document" for part in range(1, parts + 1)]
    return [write(folder / name, SOME) for name in names]


def test_the_record_of_other_files_is_not_told(tmp_path: Path) -> None:
    """As after a kill between the new files and their record."""
    data = contents.open_data(write(tmp_path / "a", SOME))
    record = tmp_path / "a.made.json"
    assert contents.how_made(data) is None
    for tokens in (data.tokens, data.tokens + 1):
        record.write_text(json.dumps({"documents": data.documents, "tokens": tokens}))
        assert (contents.how_made(data) is not None) == (tokens == data.tokens)
    record.write_text("[")
    assert contents.how_made(data) is None
