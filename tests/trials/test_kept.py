"""Results that are committed: how they are merged, and what README.md shows of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.settings import ROOT
from launcher.trials import kept, report
from tests.trials.samples import RESULTS, facts

README = f"# A\n\n{kept.BEGIN}\n\nold\n{kept.END}\nafter\n"


def test_a_cell_is_replaced_by_its_newer_result_on_the_same_gpus() -> None:
    old = RESULTS[0]
    better = replace(old, verdict="runs with warnings")
    on_cpu = replace(old, facts=facts("2.13.0+cpu", "12.1", gpus=None))
    found = kept.merged([old], [better, on_cpu])
    assert found == [better, on_cpu]
    assert [one.on for one in found] == ["2 × NVIDIA H100 80GB HBM3", "CPU"]


def test_releases_are_in_the_order_of_their_numbers() -> None:
    versions = ("0.16.1", "0.9.0", "0.10.0")
    found = kept.merged([], [replace(RESULTS[0], megatron=version) for version in versions])
    assert [one.megatron for one in found] == ["0.9.0", "0.10.0", "0.16.1"]


def test_what_is_written_is_shown(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    assert kept.files({readme: README}, tmp_path) == {}
    kept.write(RESULTS[:2], tmp_path)
    kept.write(RESULTS[1:], tmp_path)
    assert kept.load(tmp_path) == kept.merged([], RESULTS)
    files = kept.files({readme: README}, tmp_path)
    assert "| 24.02 | 0.9.0 | runs | runs | 2 × NVIDIA H100 80GB HBM3 |  |\n" in files[readme]
    assert "old" not in files[readme]
    assert files[readme].endswith(f"{kept.END}\nafter\n")
    assert 'id="24.02-0.9.0"' in files[tmp_path / kept.PAGE]
    assert kept.files(files, tmp_path) == files
    with pytest.raises(UsageError, match=r"README\.md"):
        kept.files({readme: "no markers"}, tmp_path)


def test_what_is_committed_is_of_the_matrix_and_of_no_machine() -> None:
    text = (ROOT / kept.RESULTS).read_text(encoding="utf-8")
    assert report.as_json(kept.load(ROOT)) == text
    for place in ("/home/", "/root/", "/Users/", "/tmp/"):  # noqa: S108
        assert place not in text


def test_what_failed_before_it_was_asked_makes_way() -> None:
    """It doesn't say which GPUs it had."""
    failed = replace(RESULTS[0], verdict="fails", stage="pull", facts={}, trials={})
    assert kept.merged([failed], [RESULTS[0]]) == [RESULTS[0]]
    other = replace(failed, tag="24.03")
    assert kept.merged([other], [RESULTS[0]]) == [RESULTS[0], other]
