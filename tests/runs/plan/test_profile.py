"""Steps to trace, and a run that would go back: what programs are told, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.program_options import table
from launcher.runs.records import resume
from launcher.runs.runfile.config import RunConfig
from tests.plans import HOST, MINIMAL, Planner, refusal

OURS = MINIMAL + (
    "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64}\n"
    "training: {micro_batch_size: 1, train_iters: 20, lr: 1.0e-4}\n"
)
OURS = OURS.replace("{mock: true}", "{mock: true, vocab_size: 256}")
UPSTREAMS = OURS.replace("gpus: 0", "gpus: 2\nprogram: pretrain_gpt.py").replace(
    "seq_length: 64}", "seq_length: 64, max_position_embeddings: 64}"
)
ASKED = "profile:\n  steps: 10-12\n"
BACK = "guard: {on_nan: rewind}\n"
SAVED = "checkpoint: {save: out, save_interval: 10}\n"


def given(argv: tuple[str, ...]) -> list[str]:
    """What of a command line is about traces."""
    text = " ".join(argv).split(" --")
    return [
        one for one in text if one.startswith(("prof", "use-py", "tensor")) and "model" not in one
    ]


def test_our_program_writes_to_the_runs_folder(plan: Planner) -> None:
    made = plan(OURS + ASKED, host=replace(HOST, runs="/state/runs"))
    assert given(made.argv) == [
        "profile /profile",
        "profile-ranks 0",
        "profile-steps 10 12",
        "profile-dir /profile",
    ]
    (mount,) = [mount for mount in made.mounts if mount.key == "profile"]
    assert (mount.source, mount.read_only) == ("/state/runs/0a1b2c3d/profile", False)
    made = plan(OURS + ASKED + "  folder: traces\n", host=replace(HOST, contained=False))
    assert "/home/user/work/traces" in made.argv


@pytest.mark.parametrize("release", table().releases)
def test_upstreams_programs_have_their_own_options(plan: Planner, release: str) -> None:
    facts = ImageFacts(f"{release}.0", True)
    assert given(plan(UPSTREAMS + ASKED, facts=facts).argv) == [
        "profile /profile",
        "profile-ranks 0",
        "profile",
        "profile-step-start 10",
        "profile-step-end 13",
        "use-pytorch-profiler",
        "tensorboard-dir /profile/tensorboard",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OURS.replace("gpus: 0", "gpus: 2"), ["profile-ranks 1", "profile-steps 10 12"]),
        (  # counted from 0, the last left out (megatron/training/training.py)
            UPSTREAMS,
            ["profile-ranks 1", "profile", "profile-step-start 9", "profile-step-end 12"],
        ),
    ],
)
def test_nsys_is_asked_by_the_program_and_started_by_the_runner(
    plan: Planner, text: str, told: list[str]
) -> None:
    made = plan(text + ASKED + "  tool: nsys\n  ranks: [1]\n", facts=ImageFacts("0.16.1", True))
    assert given(made.argv) == ["profile /profile", *told]
    assert "--nsys 1 " in " ".join(made.argv)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OURS + "profile: {steps: 19-21}\n", ":7: profile.steps: the last step is 20"),
        (UPSTREAMS + "profile: {steps: 19-20}\n", "profile.steps: Megatron writes a trace when"),
        (OURS + "profile: {steps: 0-3}\n", ":7: profile.steps: the first step is 1"),
        (OURS + "profile: {steps: ten}\n", "no steps: the first and the last, 10-12"),
        (OURS + "profile: {steps: 1-51}\n", "more than 50 steps"),
        (OURS + ASKED + "  ranks: [0, 1]\n", ":9: profile.ranks: no rank 1: there are 1"),
        (OURS + ASKED + "  tool: nsys\n", ":9: profile.tool: nsys traces GPUs"),
        (OURS + ASKED + "  tool: perf\n", "takes 'torch' or 'nsys'"),
        (MINIMAL + "program: ./mine.py\n" + ASKED, "./mine.py can't trace steps"),
        (
            UPSTREAMS + ASKED + "logging: {tensorboard_dir: tb}\n",
            ":10: logging.tensorboard_dir: M",
        ),
        (OURS + BACK, ":7: guard: rewind needs checkpoints to go back to"),
        (MINIMAL + "program: ./mine.py\n" + BACK, "can't skip batches"),
        (OURS + "guard: {on_flat: rewind}\n", "guard.on_flat"),
        (OURS + "guard: {window: 19}\n", "guard.window"),
    ],
)
def test_what_would_write_no_trace_or_could_not_go_back_is_refused(
    plan: Planner, text: str, told: str
) -> None:
    assert told in refusal(plan, text)
    older = refusal(plan, UPSTREAMS + SAVED + BACK, facts=ImageFacts("0.9.0", True))
    assert "rewind needs --iterations-to-skip: Megatron 0.9.0" in older


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
