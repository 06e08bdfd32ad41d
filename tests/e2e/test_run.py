"""Real training runs in containers: Megatron-Core on two CPU processes, by the command line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher import demo
from launcher.data import indexed
from tests.e2e.command import launcher, refused

if TYPE_CHECKING:
    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

ITERATION = re.compile(r"iteration +(\d+)/ *\d+ .*\| lm loss: (\S+) ")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text as .bin and .idx: the demo's."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    indexed.write(prefix, demo.text(), demo.VOCABULARY)
    return prefix


@pytest.fixture(scope="module")
def image(cpu_images: CpuImages) -> str:
    """The cpu row with its default release."""
    return cpu_images.build()


def train(
    image: str, data: Path, folder: Path, *settings: str, iterations: int = 8
) -> subprocess.CompletedProcess[str]:
    """The demo's preset, small, logging every step, with its files in `folder`."""
    chosen = [
        *(f"image={image}", f"data.path={data}", f"data.cache={folder / 'index'}"),
        *(f"checkpoint.save={folder / 'save'}", f"checkpoint.load={folder / 'save'}"),
        *("model.hidden_size=64", "model.seq_length=64", "training.global_batch_size=4"),
        *("training.micro_batch_size=2", f"training.train_iters={iterations}"),
        *("training.lr_decay_iters=20", "training.lr_warmup_iters=2", "logging.log_interval=1"),
        *("logging.eval_interval=100", "checkpoint.save_interval=4", *settings),
    ]
    return launcher("run", "demo.yaml", *(part for s in chosen for part in ("--set", s)))


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """The printed losses by iteration, digit for digit."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {int(match[1]): match[2] for match in ITERATION.finditer(done.stdout)}


@pytest.fixture(scope="module")
def uninterrupted(image: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Eight steps at TP=2, by which the others are judged."""
    return losses(train(image, data, tmp_path_factory.mktemp("uninterrupted")))


def test_it_learns(uninterrupted: dict[int, str]) -> None:
    assert list(uninterrupted) == list(range(1, 9))
    assert float(uninterrupted[8]) < float(uninterrupted[1])


def test_a_second_run_prints_the_same_digits(
    image: str, data: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    assert losses(train(image, data, tmp_path)) == uninterrupted


def test_the_steps_after_a_reload_are_those_of_the_uninterrupted_run(
    image: str, data: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    first = losses(train(image, data, tmp_path, iterations=4))
    resumed = losses(train(image, data, tmp_path))
    assert list(resumed) == [5, 6, 7, 8]
    assert first | resumed == uninterrupted


# The padded vocabulary is a multiple of this times TP: with 8 at TP=2 and 16 at TP=1 it is one.
TP_1 = ["parallel.tensor_model_parallel_size=1", "model.make_vocab_size_divisible_by=16"]


@pytest.mark.parametrize(
    "layout",
    [["processes=1", *TP_1], TP_1, ["parallel.sequence_parallel=true"]],
    ids=["TP=1", "DP=2", "TP=2 with SP"],
)
def test_other_layouts_agree_with_tp_2(
    image: str, data: Path, tmp_path: Path, uninterrupted: dict[int, str], layout: list[str]
) -> None:
    found = losses(train(image, data, tmp_path, *layout))
    for iteration, loss in uninterrupted.items():
        assert float(found[iteration]) == pytest.approx(float(loss), abs=1e-3)


def test_a_pipeline_of_two_stages_learns_as_fast(
    image: str, data: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    """Megatron seeds each stage differently, so the weights at the start are others."""
    found = losses(train(image, data, tmp_path, *TP_1, "parallel.pipeline_model_parallel_size=2"))
    for iteration, loss in uninterrupted.items():
        assert float(found[iteration]) == pytest.approx(float(loss), abs=0.1)


def test_a_checkpoint_of_tp_2_goes_on_at_tp_1(
    image: str, data: Path, tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    train(image, data, tmp_path, iterations=4)
    one = ["processes=1", "parallel.tensor_model_parallel_size=1"]
    resumed = losses(train(image, data, tmp_path, *one))
    assert list(resumed) == [5, 6, 7, 8]
    for iteration, loss in resumed.items():
        assert float(loss) == pytest.approx(float(uninterrupted[iteration]), abs=1e-3)


def test_a_program_of_the_host_runs_and_its_exit_code_comes_through(
    image: str, tmp_path: Path
) -> None:
    script = tmp_path / "three.py"
    script.write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"name: three\nimage: {image}\nprogram: {script}\ngpus: 0\nprocesses: 2\n"
    )
    done = launcher("run", str(tmp_path / "run.yaml"), "--", "--flag", "a b")
    assert done.returncode == 3, done.stderr
    assert "rank 0 of 2 ['--flag', 'a b']" in done.stdout
    assert "rank 1 of 2" in done.stdout


@pytest.mark.usefixtures("engine")
def test_an_image_that_is_not_there_says_how_to_build_it() -> None:
    refused(launcher("run", "gpt2.yaml", "--tag", "24.03", "--gpus", "1"), 125, "TAG=24.03")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.num_attention_heads=3", "num_attention_heads"),
        ("parallel.tensor_model_parallel_size=3", "tensor_model_parallel_size"),
        ("training.global_batch_size=7", "global_batch_size"),
        ("model.layers=3", "model.layers"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(image: str, setting: str, said: str) -> None:
    done = launcher("run", "gpt2-tiny.yaml", "--set", f"image={image}", "--set", setting)
    refused(done, 2, said)


def test_a_script_that_an_sdist_does_not_have_is_refused(image: str) -> None:
    done = launcher(
        *("run", "gpt2-tiny.yaml", "--set", f"image={image}", "--set", "program=pretrain_gpt.py")
    )
    refused(done, 2, "pretrain_gpt.py", "sdist")


def test_an_option_of_a_later_release_is_refused() -> None:
    done = launcher(
        *("run", "gpt2.yaml", "--gpus", "2", "--dry-run", "--set", "program=pretrain_gpt.py"),
        *("--set", "model.attention_backend=auto"),
    )
    refused(done, 2, "Megatron 0.9.0 has no --attention-backend", "from 0.11 on")
