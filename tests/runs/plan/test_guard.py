"""A run that would go back: what it needs for that is refused with its line, where it lacks it."""

from __future__ import annotations

import pytest

from launcher.base.errors import UsageError
from launcher.runs.plan.image import ImageFacts
from launcher.runs.records import resume
from launcher.runs.runfile.config import RunConfig
from tests.plans import MINIMAL, Planner
from tests.runs.plan.test_profile import OURS, UPSTREAMS

BACK = "guard: {on_nan: rewind}\n"
SAVED = "checkpoint: {save: out, save_interval: 10}\n"


@pytest.mark.parametrize(
    ("text", "release", "told"),
    [
        (OURS + BACK, "0.16.1", ":7: guard: rewind needs checkpoints to go back to"),
        (MINIMAL + "program: ./mine.py\n" + BACK, "0.16.1", "can't skip batches"),
        (UPSTREAMS + SAVED + BACK, "0.9.0", "rewind needs --iterations-to-skip: Megatron 0.9.0"),
        (OURS + "guard: {on_flat: rewind}\n", "0.16.1", "guard.on_flat"),
        (OURS + "guard: {window: 19}\n", "0.16.1", "guard.window"),
    ],
)
def test_what_could_not_go_back_is_refused(
    plan: Planner, text: str, release: str, told: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan(text, facts=ImageFacts(release, True))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("program", "passed"), [("gpt", "3 20 21"), ("pretrain_gpt.py", "3 19 20 21")]
)
def test_the_batches_are_passed_over_beside_those_of_the_run_file(
    plan: Planner, program: str, passed: str
) -> None:
    """Megatron's releases count iterations from 0, or from 1: one more goes than ours."""
    text = (OURS if program == "gpt" else UPSTREAMS) + SAVED + BACK
    given = RunConfig.model_validate(
        {"name": "a", "image": "cpu", "program": program,
         "megatron_args": {"iterations-to-skip": [3]}}
    )  # fmt: skip
    assert resume.skipping(given, []) == given
    (found,) = resume.skipping(given, {20, 21}).megatron_args.values()
    assert found == [int(number) for number in passed.split()]
    made = plan(text + f"megatron_args: {{iterations_to_skip: {found}}}\n")
    assert f"--iterations-to-skip {passed}" in " ".join(made.argv)
