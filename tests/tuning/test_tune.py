"""What of a tuned setting is written to the run file."""

from __future__ import annotations

import pytest

from launcher.plan import layout, source
from launcher.plan.source import Asked
from launcher.tuning.search import Measured
from launcher.tuning.settings import MICRO, Setting
from launcher.tuning.tune import Result
from tests.tuning.test_settings import space


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
    found = Result(Measured(setting, 1.0), given, (), ()).changes(Asked(config, origin, "/"))
    assert found == written
    made = source.overridden(config, [source.Override("tune", found)])
    assert layout.settled(made).training.bf16 == (True if changed else None)
