"""Forecasts by earlier runs and by published rates, and the receipt beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.tools.forecast import estimates, receipt, site, timing, usage
from launcher.tools.forecast.forecast import Hardware, forecast
from tests.tools.forecast.conftest import Said
from tests.tools.forecast.records import H100, MadeUpRun

H100_GPU = Hardware(H100, H100, 85 * 10**9, (9, 0))


@pytest.fixture(autouse=True)
def _prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_SETTINGS", str(tmp_path / "settings.yaml"))
    (tmp_path / "settings.yaml").write_text("prices: {h100-80gb: 2.5}\n")


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"save_interval": 125, "eval_interval": 100, "log_interval": 25},
    {"eval_iters": 0, "save": None, "train_iters": 500},
]


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_forecast_by_its_own_record_is_within_a_tenth(
    folder: Path, options: dict[str, Any]
) -> None:
    done = MadeUpRun(options=options, warm_up=45, end=90)
    done = done.attempt(0, 0, done.options["train_iters"])
    fact = usage.of_run(done.keep(folder))
    assert fact
    found = forecast(fact.work, H100_GPU, [fact])
    assert found.step
    assert found.hours
    assert found.step.ms == pytest.approx(fact.ms, rel=0.1)
    assert found.hours.value * 3600 == pytest.approx(fact.total, rel=0.1)
    assert found.hours.least <= fact.total / 3600 <= found.hours.most


def test_other_work_is_scaled_by_what_ran_here(folder: Path) -> None:
    """Runs on a slow card would be forecast at the published rate."""
    known = []
    for number, micro in enumerate((2, 4, 8)):
        sizes = {"micro_batch_size": micro, "global_batch_size": micro}
        one = MadeUpRun(f"aaaa000{number}", sizes, ms=10 * micro, day=number)
        fact = usage.of_run(one.attempt(0, 0, 1000).keep(folder))
        assert fact
        known.append(fact)
    asked = usage.of_run(MadeUpRun("bbbb0001").attempt(0, 0, 200).keep(folder))
    assert asked
    published = timing.step(asked.work, rates(asked.work.precision))
    found = site.step(asked.work, rates(asked.work.precision), known)
    assert published
    assert found
    assert found.ms > 3 * published.ms
    assert "3 earlier runs with other work here; each left out, the others were" in found.source
    assert found.least <= 160 <= found.most


def rates(precision: str) -> timing.GpuRates:
    found = timing.published(H100, precision)
    assert found
    return found


def test_on_the_cpu_a_step_by_one_other_run_is_less_sure(folder: Path) -> None:
    """A first run of gpt2-tiny took 2.3 times the step that was to be 2 times off at most."""
    fact = usage.of_run(MadeUpRun().attempt(0, 0, 1000).keep(folder))
    assert fact
    for on_cpu, times in ((False, 2), (True, 4)):
        work = replace(fact.work, on_cpu=on_cpu)
        wider = replace(work, options=work.options | {"hidden_size": 1536})
        rates = None if on_cpu else timing.published(H100, "bf16")
        step = site.step(wider, rates, [replace(fact, work=work)])
        assert step
        assert f"it may be {times} times off" in step.source
        assert (step.least, step.most) == pytest.approx((step.ms / times, step.ms * times))


def test_a_card_by_its_alias_has_the_records_of_its_name(folder: Path) -> None:
    MadeUpRun().attempt(0, 0, 1000).keep(folder)
    assert [one.run for one in site.earlier("h100-80gb")] == ["aaaa0001"]
    assert site.earlier("h200") == site.earlier("") == []


def test_a_forecast_says_what_it_cannot_know(said: Said) -> None:
    """On a CPU alone, and without records, there is no time; sizes are known all the same."""
    found = said("forecast", "gpt2", "--gpus", "1")
    assert found["step_ms"] is found["hours"] is None
    assert found["memory"]["weights"] == pytest.approx(2 * 124e6, rel=0.01)
    assert found["checkpoint_bytes"] == pytest.approx(14 * 124e6, rel=0.01)
    assert found["disk_bytes"] == 2 * found["checkpoint_bytes"]
    assert any("the card isn't known" in text for text in found["unknown"])


def test_a_forecast_for_a_named_card(said: Said) -> None:
    found = said("forecast", "llama3-8b", "--gpu", "h100-80gb", "--nodes", "2")
    assert (found["world"], found["nodes"], found["bound"]) == (16, 2, "arithmetic")
    step, rate = found["step_ms"], found["tokens_per_s"]
    assert step["least"] < step["value"] < step["most"]
    assert rate["value"] == pytest.approx(128 * 8192 * 1000 / step["value"])
    assert found["gpu_hours"]["value"] == pytest.approx(16 * found["hours"]["value"])
    assert found["price_of_gpu_hour"] == 2.5
    assert len(found["others"]) == 2
    for other in found["others"]:
        assert other["bytes"] < 80e9
        assert other["step_ms"]["value"] > 0
    assert set(found["sources"]) >= {"memory", "step", "checkpoints"}


def test_a_network_that_is_not_known_has_no_time(said: Said) -> None:
    """Its time was as if the nodes were one machine."""
    words = ("forecast", "llama3-8b", "--gpu", "l40s", "--nodes", "4")
    assert said(*words)["step_ms"] is None
    slow, fast = (said(*words, "--network", each)["step_ms"]["value"] for each in ("1", "50"))
    assert slow > 1.4 * fast


def link(nodes: int, ranks: int, rate: float) -> dict[str, Any]:
    reach = "between" if nodes > 1 else "within"
    return {reach: {"nodes": nodes, "ranks": ranks, "gpu": H100, "gb_s": rate}}


def test_links_are_as_the_newest_run_here_measured_them(said: Said, folder: Path) -> None:
    """A slow link was forecast as published. Those of the nodes' GPUs share a way out."""
    words = ("forecast", "llama3-8b", "--gpu", "h100-80gb", "--nodes", "2")
    before = said(*words)
    eager = {"no_fast": True}  # what starts kernels otherwise scales no step
    links = link(1, 8, 9.0) | link(2, 8, 16.0)
    MadeUpRun("aaaa0001", eager, links=links, seen=False).attempt(0, 0, 200).keep(folder)
    found = said(*words)
    assert found["sources"]["links"] == (
        "9 GB/s within a machine, measured by run aaaa0001; "
        "2 GB/s between machines, measured by run aaaa0001"
    )
    sent = [each["step_parts_ms"]["communication"] for each in (before, found)]
    assert sent[1] > 10 * sent[0]
    assert "as published" not in str(found["sources"])
    MadeUpRun("aaaa0002", eager, links=link(1, 8, 300.0), day=1).attempt(0, 0, 200).keep(folder)
    newer = said(*words, "--network", "50")
    assert newer["sources"]["links"] == (
        "300 GB/s within a machine, measured by run aaaa0002; "
        "37.5 GB/s between machines, by --network"
    )
    assert newer["step_parts_ms"]["communication"] == pytest.approx(sent[0], rel=0.3)
    assert said(*words[:3], "l40s", "--nodes", "2", "--network", "9")["sources"]["links"].count("%")


def test_links_on_the_cpu_are_those_that_were_measured(folder: Path) -> None:
    """Where two processes mostly send, one alone takes much less than they did."""
    fact = usage.of_run(MadeUpRun(gpus=2).attempt(0, 0, 1000).keep(folder))
    assert fact
    two = replace(fact.work, on_cpu=True)
    one = replace(two, where=replace(two.where, world=1))
    fast, slow = (
        site.step(one, None, [replace(fact, work=two, links={timing.MACHINE: rate})])
        for rate in (1.0, 1e-4)
    )
    assert fast
    assert slow
    assert slow.ms < 0.5 * fast.ms


def test_what_does_not_fit_is_named_with_layouts_that_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["forecast", "llama3-8b", "--gpu", "a100-40gb"]) == 0
    out = capsys.readouterr().out
    assert " GB on a GPU of 40.0, 14.0 too much: " in out
    assert "\n  or          tensor_model_parallel_size 8: 29.7 GB" in out
    assert cli.main(["forecast", "gpt3-175b", "--gpu", "t4"]) == 0
    assert "none of the layouts next to this one fits" in capsys.readouterr().out


def test_a_card_for_a_run_on_the_cpu_is_not_passed_over(said: Said) -> None:
    """It gave the CPU's forecast without a word."""
    assert "h100-80gb" in said("forecast", "gpt2-tiny", "--gpu", "h100-80gb")["unknown"][0]


def test_an_unknown_card_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["forecast", "gpt2", "--gpu", "h100-81gb"]) == 2
    assert "h100-80gb" in capsys.readouterr().err


def test_a_receipt_has_the_forecast_by_the_runs_before_it(said: Said, folder: Path) -> None:
    """By its own record, or by later ones, a forecast would always have been right."""
    MadeUpRun("aaaa0001", ms=500).attempt(0, 0, 1000).keep(folder)
    MadeUpRun("aaaa0002", day=1).attempt(0, 0, 1000).keep(folder)
    MadeUpRun("aaaa0003", ms=2000, day=2).attempt(0, 0, 1000).keep(folder)
    found = said("runs", "receipt", "aaaa0002")
    assert found["forecast"]["step_ms"]["value"] == 500
    assert found["step_ms"] == 1000
    assert found["gpu_hours"] == pytest.approx(1207 / 3600, rel=0.01)
    assert found["cost"] == pytest.approx(2.5 * found["gpu_hours"])
    assert found["tokens"] == 1000 * 16 * 512
    assert sum(found["seconds_by_part"].values()) == pytest.approx(found["seconds"], abs=0.01)
    first = said("runs", "receipt", "aaaa0001")["forecast"]
    assert "published rates" in first["sources"]["step"]


def test_energy_is_what_the_log_says(said: Said, folder: Path) -> None:
    made = MadeUpRun(gpus=2).attempt(0, 0, 1000)
    for line in made.lines:
        line |= {"energy_j": 300.0} if line["kind"] == "step" else {}
    made.keep(folder)
    assert said("runs", "receipt", "aaaa0001")["joules"] == 2 * 1000 * 300


def test_the_page_of_runs_has_receipts_that_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the page read all records again."""
    for number in range(3):
        MadeUpRun(f"aaaa000{number}", day=number).attempt(0, 0, 1000).keep(folder)
    receipts, read = receipt.Receipts(), list[str]()
    of_run = usage.of_run
    monkeypatch.setattr(usage, "of_run", lambda run: read.append(run) or of_run(run))
    first = receipts.read()
    assert {*first} == {*read} == {"aaaa0000", "aaaa0001", "aaaa0002"}
    assert "an earlier run of the same work" in first["aaaa0001"][-1]
    assert "2 earlier runs of the same work" in first["aaaa0002"][-1]
    assert receipts.read() == first
    assert len(read) == 3
    odd = MadeUpRun("aaaa0003", day=3).attempt(0, 0, 1000)
    odd.lines[5]["ms_per_step"] = 1e308
    odd.keep(folder)
    assert {*receipts.read()} - {"aaaa0003"} == {*first}


def test_the_vocabulary_is_that_of_the_data_as_in_the_run(said: Said, tmp_path: Path) -> None:
    """A preset's 256 tokens made a checkpoint of 2 MB of one that took 40 MB."""
    text = tmp_path / "corpus.jsonl"
    text.write_text('{"text": "a quick fox"}\n' * 400)
    prefix = f"{tmp_path}/corpus"
    assert cli.main(["data", "tokenize", str(text), "-o", prefix]) == 0
    sets = [f"data.path={prefix}_text_document", "checkpoint.save=ck"]
    words = [word for each in sets for word in ("--set", each)]
    found = said("forecast", "gpt2-tiny", "--backend", "local", *words)
    assert found["checkpoint_bytes"] > 3e7


def test_a_run_of_which_nothing_is_known_yet(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MadeUpRun().attempt(0, 0, 50).keep(folder)
    assert cli.main(["runs", "receipt", "aaaa0001"]) == 2
    assert "no two lines of training" in capsys.readouterr().err
    assert estimates.card("t4").total == 16 * 10**9
