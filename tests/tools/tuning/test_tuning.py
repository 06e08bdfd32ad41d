"""What of a tuned setting is written to the run file, where what was written stays as it is."""

from __future__ import annotations

import re

import pytest

from launcher import cli
from launcher.base import yamlfile
from launcher.runs.plan import layout
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import RunRequest
from launcher.tools.tuning import tuned, tuning
from launcher.tools.tuning.candidates import MICRO, Setting
from launcher.tools.tuning.search import Measurement, Search
from launcher.tools.tuning.tuning import TuneResult
from tests.tools.tuning.test_candidates import space


@pytest.mark.parametrize(
    ("sets", "changed", "written"),
    [
        (("training.precision=fp16",), True, {MICRO: 16, "training.precision": "bf16"}),
        (("training.precision=null", "training.fp16=true", "training.micro_batch_size=1"), True,
         {"training.bf16": True, "training.fp16": None}),
        (("training.fp16=true",), True,
         {MICRO: 16, "training.precision": "bf16", "training.fp16": None}),
        ((), False, {MICRO: 16}),
    ],
)  # fmt: skip
def test_a_precision_is_written_as_the_file_writes_it(
    sets: tuple[str, ...], changed: bool, written: dict[str, object]
) -> None:
    """Both ways together would be refused, after all that was measured."""
    config, origin = origins.load("gpt2", [origins.parse_set(each) for each in sets])
    given = space(*sets, any_precision=True)
    to_bf16 = {"training.bf16": True, "training.fp16": None}
    setting = given.changed(Setting(), to_bf16 if changed else {})
    found = TuneResult(Measurement(setting, 1.0), given, (), ()).changes(
        RunRequest(config, origin, "/")
    )
    assert found == written
    made = origins.overridden(config, [origins.Override("tune", found)])
    assert layout.with_precision(made).training.bf16 == (True if changed else None)


def test_a_plan_is_for_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """The user's setting, what would be better, what bounds it, and how far off that may be."""
    asked = ["tune", "gpt2", "--plan", "--set", "program=pretrain_gpt.py", "--card"]
    asked = [*asked, "H100 80GB HBM3", "--set", "training.micro_batch_size=1"]
    assert cli.main(asked) == 0
    head, _, *rows, bound, off = capsys.readouterr().out.splitlines()
    assert head == "predicted for 1 × H100 80GB HBM3, by its published rates:"
    assert rows[-1].split()[2:] == ["as", "given"]
    times = [float(row.split()[0]) for row in rows]
    assert times == sorted(times)
    assert times[-1] > 10 * times[0]
    assert re.fullmatch(r"micro_batch_size 16: bound by the \w+", bound)
    assert re.match(
        r"such predictions were 0\.\d+ to 1\.\d+ of what runs on H100s and H200s took, 4", off
    )
    asked[asked.index("H100 80GB HBM3")] = "X1"
    assert cli.main(asked) == 2
    assert "nothing is published here of X1" in capsys.readouterr().err


def test_auto_is_settled_for_the_card_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """It was the batch's largest, 164 GB on a card of 80."""
    assert cli.main(["tune", "llama3.2-1b", "--plan", "--card", "H100 80GB HBM3"]) == 0
    given = next(row for row in capsys.readouterr().out.splitlines() if "as given" in row)
    assert float(given.split()[1]) == 50.3


BLOCK = """\
# mine
name: a
image: "24.10"
training:
  micro_batch_size: 1  # small
  global_batch_size: 16
model: {num_layers: 2}
gpus: 2
"""
CHANGES = {
    MICRO: 16,
    "training.bf16": True,
    "parallel.tensor_model_parallel_size": 2,
    "model.make_vocab_size_divisible_by": 64,
    "megatron_args.recompute_granularity": None,
    "data.num_workers": 4,
}


def read(text: str) -> RunConfig:
    root = yamlfile.tree(text, "it")
    assert root
    return origins.made(yamlfile.value(root, "it"), "it")


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        BLOCK.replace("\n", "\r\n"),
        BLOCK.rstrip(),
        "{name: a, image: cpu, training: {micro_batch_size: 1}}",
        "name: a\nimage: cpu\nmodel: &m {num_layers: 2}\nparallel:\n    sequence_parallel: true\n",
        "name: a\nimage: cpu\nmodel:\n  {num_layers: 2,\n   hidden_size: 8}\n",
    ],
)
def test_it_reads_as_the_run_that_was_tuned(text: str) -> None:
    wanted = origins.overridden(read(text), [origins.Override("", dict(CHANGES))])
    assert read(tuned.changed(text, CHANGES, wanted)) == wanted


def test_every_other_line_stays() -> None:
    wanted = origins.overridden(read(BLOCK), [origins.Override("", dict(CHANGES))])
    lines = tuned.changed(BLOCK, CHANGES, wanted).splitlines()
    assert "  micro_batch_size: 16  # small" in lines
    changed = ("micro_batch", "model")
    kept = [line for line in BLOCK.splitlines() if not any(word in line for word in changed)]
    assert [line for line in lines if line in kept] == kept


def test_measurements_are_comments() -> None:
    head = tuned.headed(BLOCK, ["12.5 ms: a setting", ""])
    assert head.startswith("# 12.5 ms: a setting\n#\n# mine\n")
    assert read(head) == read(BLOCK)


def test_of_many_settings_without_time_the_best_predicted_are_named() -> None:
    """Where the time was over after the first, each of 13 on 8 GPUs had a line."""
    first = [Measurement(Setting(), 100.0)]
    found = Search(
        space(processes=8),
        lambda one: 100.0 + 10 * len(one.changes),
        lambda _: first.pop() if first else None,
    )
    best = found.run()
    assert best
    assert len(found.left) > 5
    *named, last = tuning._left(found, best)
    assert len(named) == tuning.MOST_LEFT
    for line in named:
        assert re.fullmatch(
            "no time was left to measure .*; it should take 1.10 times as long", line
        )
    assert f"measure others: {len(found.left) - tuning.MOST_LEFT} " in last
