"""What of a tuned setting is written to the run file."""

from __future__ import annotations

import re

import pytest

from launcher import cli
from launcher.runs.plan import layout
from launcher.runs.runfile import source
from launcher.runs.runfile.source import RunRequest
from launcher.tools.tuning.search import Measurement
from launcher.tools.tuning.settings import MICRO, Setting
from launcher.tools.tuning.tune import TuneResult
from tests.tools.tuning.test_settings import space


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
    config, origin = source.load("gpt2", [source.parse_set(each) for each in sets])
    given = space(*sets, any_precision=True)
    to_bf16 = {"training.bf16": True, "training.fp16": None}
    setting = given.changed(Setting(), to_bf16 if changed else {})
    found = TuneResult(Measurement(setting, 1.0), given, (), ()).changes(
        RunRequest(config, origin, "/")
    )
    assert found == written
    made = source.overridden(config, [source.Override("tune", found)])
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
