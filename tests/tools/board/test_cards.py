"""What the page is given of each run: curves, sizes, reasons; and that no text gets out of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.cli import main
from launcher.runs.records import record, recorded_runs
from launcher.tools.board import board, cards
from tests.runs.record_samples import HOSTILE, keep, several, steps


def read(alive: dict[str, str] | None = None, **more: Any) -> dict[str, dict[str, Any]]:
    """The runs that the page has, by their ids."""
    found = json.loads(cards.Cards().read(alive or {}, **more))
    return {one["run"]: one for one in found}


def test_a_run_has_its_sizes_its_layout_and_why_it_failed(folder: Path) -> None:
    several(folder)
    found = read({"bbbb0001": "running"})
    assert len(found) == 6
    one = found["aaaa0001"]
    assert (one["model"], one["layout"], one["world"]) == ("125 M · 12 × 768", "TP 2 · DP 4", 8)
    assert one["why"][0] == "rank 3 was killed by SIGKILL"
    assert one["why"][2].startswith("cure: ")
    assert (one["iteration"], one["of"], one["saved"]) == (800, 2000, "/data/ckpt/iter_0000600")
    assert found["aaaa0002"]["why"] == ["ended by launcher stop"]
    assert found["aaaa0003"]["line"] == found["aaaa0002"]["line"] == "aaaa0001"
    assert found["aaaa0003"]["alarms"] == [[1700, "spike: rose"]]
    assert found["bbbb0001"]["layout"] == "TP 4 · PP 2 · DP 8"
    assert (found["bbbb0001"]["state"], found["aaaa0003"]["state"]) == ("running", "finished")
    assert "curves" not in found["cccc0001"]
    assert {"log", "metrics.jsonl", "endings.jsonl"} <= {*one["files"]}


def test_files_are_listed_that_a_person_reads(folder: Path) -> None:
    kept = keep(folder, "aaaa0001", steps=[])
    for name in ("stdout", "followed", ".megatron-launchpad", "log.1", "stalled-1/rank-0.txt"):
        (kept / name).parent.mkdir(exist_ok=True)
        (kept / name).write_text("x")
    assert read()["aaaa0001"]["files"] == [
        "facts.json", "log", "log.1", "metrics.jsonl", "plan.json", "run.json",
        "stalled-1/rank-0.txt",
    ]  # fmt: skip


def test_a_folder_that_is_a_link_isnt_listed(folder: Path, tmp_path: Path) -> None:
    """What runs in a container may put a link there, which leads to names of this machine's."""
    kept = keep(folder, "aaaa0001", steps=[])
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "name").write_text("x")
    (kept / "profile").symlink_to(tmp_path / "far")
    assert "profile/name" not in read()["aaaa0001"]["files"]


@pytest.mark.parametrize("value", ["1e999", "1" + "0" * 400, "[" * 100_000])
def test_a_number_out_of_range_is_its_run_s_alone(folder: Path, value: str) -> None:
    """One record that can't be read left the page of all runs out."""
    for run in ("aaaa0001", "aaaa0002"):
        kept = keep(folder, run, steps=steps(range(1, 5)))
    text = (kept / record.METRICS).read_text()
    before, _, after = text.rpartition('"ms_per_step": ')
    text = f'{before}"ms_per_step": {value}, {after.partition(", ")[2]}'
    (folder / "aaaa0001" / record.METRICS).write_text(text)
    found = read()
    assert "its record can't be read" in found["aaaa0001"]["why"][0]
    assert found["aaaa0002"]["iteration"] == 4


def test_an_attempt_that_went_back_counts_once(folder: Path) -> None:
    """What was trained again would make the curve go back and forth."""
    more = [*steps(range(10, 110, 10)), *steps(range(60, 160, 10), attempt=1)]
    keep(folder, "aaaa0001", steps=more)
    curves = read()["aaaa0001"]["curves"]
    assert curves["iteration"] == [*range(10, 160, 10)]
    assert curves["ms"] == sorted(curves["ms"])
    assert len({len(column) for column in curves.values()}) == 1
    assert curves["ms"][-1] == pytest.approx(150 * 210, rel=0.05)


def test_a_long_run_keeps_its_extremes(folder: Path) -> None:
    """A spike of one line among thousands is what somebody looks for."""
    more = [one for one in steps(range(1, 6001)) if one["kind"] == "step"]
    more[3210]["loss"], more[4321]["loss"] = 99.0, None
    keep(folder, "aaaa0001", steps=more)
    curves = read()["aaaa0001"]["curves"]
    assert len(curves["loss"]) <= cards.MOST_POINTS + 2
    assert max(one for one in curves["loss"] if one is not None) == 99.0
    assert (curves["iteration"][0], curves["iteration"][-1]) == (1, 6000)
    assert curves["iteration"] == sorted({*curves["iteration"]})


def test_what_changed_is_read_again_and_nothing_else(folder: Path) -> None:
    several(folder)
    kept = cards.Cards()
    before = kept.read({})
    (folder / "aaaa0001" / record.FILE).chmod(0o600)  # what changes nothing
    assert kept.read({}) == before
    with (folder / "bbbb0001" / record.METRICS).open("a") as file:
        file.write(json.dumps(steps([1501])[0]) + "\n")
    after = {one["run"]: one for one in json.loads(kept.read({}))}
    assert after["bbbb0001"]["iteration"] == 1501
    alive = {one["run"]: one for one in json.loads(kept.read({"dddd0001": "paused"}))}
    assert alive["dddd0001"]["state"] == "paused"


def test_only_what_is_wanted_is_in_it(folder: Path) -> None:
    several(folder)
    assert {*read(wanted=recorded_runs.Filter(states=("failed",)))} == {"aaaa0001", "cccc0001"}
    assert {*read(wanted=recorded_runs.Filter(name="mixtral"))} == {"dddd0001"}


@pytest.mark.parametrize(
    "spoilt",
    ["", "{", "[]", '{"program": "gpt"}', '{"nodes": 1, "processes_per_node": 1}', "\udcff"],
)
def test_a_spoilt_plan_or_line_takes_no_other_run_away(folder: Path, spoilt: str) -> None:
    """One file of an older launcher's, or of a full disk, would leave no page at all."""
    several(folder)
    for name in (record.PLAN, record.METRICS, record.FACTS, record.ENDINGS):
        text = spoilt.encode(errors="surrogateescape")
        (folder / "aaaa0001" / name).write_bytes(text + b"\n")
        assert len(read()) == 6, name


def test_no_text_gets_out_of_the_page(folder: Path) -> None:
    several(folder)
    page = board.as_html(board.data(cards.Cards(), folder.as_uri() + "/"))
    assert page.count("</script>") == page.count("<script") == 2
    assert "<img" not in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "connect-src" not in policy  # a file asks nobody
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    named = {one["run"]: one["name"] for one in json.loads(text)["runs"]}
    assert named["cccc0001"] == HOSTILE.replace("\u202e", "\\u202e")


def test_a_file_that_is_no_page_of_ours_stays(folder: Path, tmp_path: Path) -> None:
    several(folder)
    other, own = tmp_path / "other.html", tmp_path / "own.html"
    other.write_text("<html>mine</html>")
    with pytest.raises(UsageError, match="isn't replaced"):
        board.write(other)
    assert other.read_text() == "<html>mine</html>"
    board.write(own)
    board.write(own)
    assert own.stat().st_mode & 0o077 == 0
    own.unlink()
    own.symlink_to(other)
    with pytest.raises(UsageError, match="isn't replaced"):
        board.write(own)


def test_the_command_writes_what_its_filters_take(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several(folder)
    path = tmp_path / "failed.html"
    assert main(["runs", "--state", "failed", "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text().count('"run":') == 2
    assert main(["runs", "--html", str(tmp_path / "none/x.html")]) == 2
    assert f"{tmp_path}/none/x.html can't be written" in capsys.readouterr().err


@pytest.mark.long
def test_thousands_are_read_in_little_more_than_parsing_takes(folder: Path) -> None:
    """Against json.loads of the same lines, so that a machine that is busy is slow in both."""
    lines = steps(range(10, 410, 10))
    for number in range(1000):
        keep(folder, f"{number:08x}", steps=lines, ended="finished")
    texts = [path.read_bytes().splitlines() for path in folder.glob("*/metrics.jsonl")]
    best = []
    for _ in range(3):
        begun = time.process_time()
        for text in texts:
            for line in text:
                json.loads(line)
        parsed = time.process_time()
        assert cards.Cards().read({}).count(b'"run":') == 1000
        best.append((time.process_time() - parsed) / (parsed - begun))
    assert min(best) < 2.5
