"""Training end to end on the CPU: layouts agree, checkpoints carry on, signals save."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent.checkpoints import completeness, folders
from launcher.runs.checks import splits
from launcher.runs.datasets import indexed
from tests.agent.conftest import ROOT, TINY, Run, going_on, python, runner_command, start
from tests.trainer import killed

pytestmark = pytest.mark.megatron

Train = Callable[..., Run]
TENSOR = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
DIVIDED = (
    *(*TENSOR, "--sequence-parallel"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)


@pytest.fixture(scope="module")
def single(train: Train) -> Run:
    """One rank; the loss of every layout is compared with its."""
    return train(1)


@pytest.fixture(scope="module")
def divided(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """TP=2 with dropout and sequence parallelism, saved beside it after iterations 3 and 6."""
    folder = tmp_path_factory.mktemp("divided")
    saving = ("--save", str(folder), "--save-interval", "3", "--async-save")
    return train(2, *DIVIDED, *saving), folder


def at_iteration_3(folder: Path, copy: Path) -> str:
    """A copy of a checkpoint folder as it was after iteration 3."""
    shutil.copytree(folder / "iter_0000003", copy / "iter_0000003")
    (copy / folders.TRACKER).write_text("3")
    return str(copy)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((*TENSOR, "--sequence-parallel"), id="sequence"),
        pytest.param(TENSOR, id="tensor", marks=pytest.mark.long),
        pytest.param((), id="data", marks=pytest.mark.long),
    ],
)
def test_two_ranks_agree_with_one(train: Train, single: Run, layout: tuple[str, ...]) -> None:
    run = train(2, *layout)
    assert run.losses == pytest.approx(single.losses, abs=1e-3)
    assert run.validation_loss == pytest.approx(single.validation_loss, abs=1e-3)
    assert run.grad_norms == pytest.approx(single.grad_norms, abs=2e-3)


def test_gradients_are_clipped(train: Train, single: Run) -> None:
    assert max(single.grad_norms) > 1.0
    run = train(1, "--clip-grad", "0")
    assert run.losses[1] == single.losses[1]
    assert run.losses[6] != single.losses[6]


@pytest.mark.parametrize(
    ("precision", "scale"),
    [pytest.param("--bf16", "1.0", marks=pytest.mark.long), ("--fp16", "65536.0")],
)
def test_half_precision_is_near(train: Train, single: Run, precision: str, scale: str) -> None:
    run = train(2, *TENSOR, precision, "--initial-loss-scale", "65536")
    assert run.losses == pytest.approx(single.losses, abs=0.03)
    assert f"loss scale: {scale} |" in run.output


def test_resumed_equals_uninterrupted(
    train: Train, divided: tuple[Run, Path], tmp_path: Path
) -> None:
    whole, folder = divided
    assert whole.output.count("saved ") == 2  # the last one isn't saved again at the end
    copy = at_iteration_3(folder, tmp_path)
    resumed = train(2, *DIVIDED, "--load", copy)
    assert resumed.losses == {step: whole.losses[step] for step in (4, 5, 6)}
    assert resumed.validation_loss == whole.validation_loss


@pytest.mark.long
def test_killed_while_a_checkpoint_is_written_beside_it_loses_nothing(
    train: Train, single: Run, tmp_path: Path
) -> None:
    """The tracker names a checkpoint that is whole, and from there it goes on to the digit."""
    saving = ["--save", str(tmp_path), "--save-interval", "2", "--async-save"]
    script = str(Path(__file__).with_name("killed.py"))
    with going_on(runner_command(1, script, *TINY, "--mock-data", *saving)) as run:
        pass
    assert run.code != 0
    assert f"saved {tmp_path}/iter_0000002" in run.output
    assert list(run.losses)[-1] >= 4
    assert folders.noted(tmp_path) == "2"
    left = {path.name for path in tmp_path.iterdir()} - {folders.TRACKER, "iter_0000002"}
    assert any(name.startswith("iter_0000004.") for name in left)

    resumed = train(1, "--load", str(tmp_path), *saving)
    assert resumed.losses == {step: single.losses[step] for step in (3, 4, 5, 6)}
    assert resumed.validation_loss == single.validation_loss
    assert [each.problem for each in folders.newest_first(tmp_path)] == [""] * 3
    assert folders.noted(tmp_path) == "6"


@pytest.mark.long
def test_a_killed_writer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has twice the model in the host's memory; the run ended without a word."""
    monkeypatch.setenv(killed.WRITER, "")
    script = str(Path(__file__).with_name("killed.py"))
    saving = ("--save", str(tmp_path), "--save-interval", "4", "--async-save")
    run = start(2, script, *TINY, "--mock-data", *saving)
    assert run.code == 1
    assert f"can't save to {tmp_path}: the process that writes it was killed" in run.output
    assert "Traceback" not in run.output
    assert list(tmp_path.iterdir()) == []


def test_other_layouts_load(train: Train, divided: tuple[Run, Path], tmp_path: Path) -> None:
    _, folder = divided
    copy = at_iteration_3(folder, tmp_path)
    one = train(1, "--load", copy)
    two = train(2, "--load", copy, "--pipeline-model-parallel-size", "2")
    assert "saved with TP=2 PP=1: random states are not carried over" in one.output
    assert one.losses == pytest.approx(two.losses, abs=1e-3)
    assert list(one.losses) == [4, 5, 6]


def test_a_checkpoint_of_less_than_the_model(divided: tuple[Run, Path], tmp_path: Path) -> None:
    """What Transformer Engine's layers keep beside tensors may be lacking, and nothing else."""
    copy = at_iteration_3(divided[1], tmp_path)
    lacking = (*TINY, "--mock-data", "--load", copy, "--qk-layernorm")
    run = start(1, "-m", "launcher.trainer.gpt", *lacking)
    assert run.code == 2
    assert "k_layernorm.bias of this model, and 11 more" in run.output
    assert "Traceback" not in run.output


def test_any_real_file_missing_or_a_byte_short_is_found(
    divided: tuple[Run, Path], tmp_path: Path
) -> None:
    _, folder = divided
    assert [each.problem for each in [*folders.newest_first(folder)][::-1]] == ["", ""]
    copy = tmp_path / "copy"
    shutil.copytree(folder / "iter_0000006", copy)
    names = sorted(path.name for path in copy.iterdir())
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"} <= {*names}
    for path in (copy / name for name in names):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert completeness.problem(copy).startswith(path.name)
        path.unlink()
        assert completeness.problem(copy) == f"{path.name} is missing"
        path.write_bytes(whole)
    assert completeness.problem(copy) == ""


def test_an_incomplete_checkpoint_is_left_out(
    train: Train, divided: tuple[Run, Path], tmp_path: Path
) -> None:
    whole, folder = divided
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "iter_0000006/.metadata").unlink()
    run = train(2, *DIVIDED, "--load", str(copy))
    assert f"{copy}/iter_0000006 is left out: .metadata is missing" in run.output
    assert run.losses == {step: whole.losses[step] for step in (4, 5, 6)}


def test_tracker_of_a_missing_checkpoint(tmp_path: Path) -> None:
    (tmp_path / folders.TRACKER).write_text("7")
    run = start(1, "-m", "launcher.trainer.gpt", *TINY, "--mock-data", "--load", str(tmp_path))
    assert run.code == 2
    assert "names iteration '7', whose checkpoint isn't there" in run.output
    assert "Traceback" not in run.output


def test_real_data(train: Train, tmp_path: Path) -> None:
    """A blend, of whose shares the third is never used: asked for all of that, Megatron refused."""
    prefix = tmp_path / "text_document"
    counting = [*range(99), *range(99)]
    indexed.write(prefix, ([*counting[n : n + 60], 99] for n in range(99)), vocab_size=100)
    arguments = (
        *("--data-path", "0.7", str(prefix), "0.3", str(prefix), "--split", "90,9,1"),
        *("--data-cache-path", str(tmp_path / "cache")),
    )
    run = train(2, *TENSOR, data=arguments)
    assert run.validation_loss < run.losses[1] - 0.3
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert any("train" in name for name in names)
    assert not any("test" in name for name in names)


COUNTS = """\
import sys
from pathlib import Path
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from launcher.trainer.gpt.samples import TokenVocabulary
of = lambda split: GPTDatasetConfig(
    random_seed=1, sequence_length=8, blend=([sys.argv[1]], None), split=split,
    path_to_cache=sys.argv[2], tokenizer=TokenVocabulary(99, 98), reset_position_ids=False,
    reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
)
for split in sys.argv[3:]:
    built = BlendedMegatronDatasetBuilder(GPTDataset, [9, 9, None], lambda: True, of(split)).build()
    print("counts", [None if one is None else len(one.indices) for one in built])
"""


def test_megatron_itself_counts_so(tmp_path: Path) -> None:
    """Another rule in Megatron would make the counts wrong."""
    indexed.write(tmp_path / "d", [[1] * 20] * 600, 99)
    several = ("949,50,1", "90,10,0", "2,1,1")
    (script := tmp_path / "counts.py").write_text(COUNTS)
    done = start(1, str(script), str(tmp_path / "d"), str(tmp_path), *several)
    counted = [line for line in done.output.splitlines() if line.startswith("counts ")]
    for split, line in zip(several, counted, strict=True):
        parts = splits.shares(split)
        counts = [end - begin for begin, end in splits.bounds(parts, 600)]
        wanted = [count if part else None for count, part in zip(counts, parts, strict=True)]
        assert line == f"counts {wanted}"


NODE = """
import os, runpy, sys
caches = [sys.argv.pop(1), sys.argv.pop(1)]
sys.argv += ["--data-cache-path", caches[int(os.environ["RANK"])]]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": os.environ["RANK"]}
if __name__ == "__main__":
    runpy.run_module("launcher.trainer.gpt", run_name="__main__")
"""
"""Each rank is that of a node of its own."""


@pytest.mark.parametrize("second", [pytest.param("one", marks=pytest.mark.long), "two"])
def test_the_index_is_built_on_each_node_that_has_none(second: str, tmp_path: Path) -> None:
    """Upstream builds it on rank 0 alone: a node with a folder of its own had none."""
    indexed.write(tmp_path / "text", ([*range(59), 99] for _ in range(99)), vocab_size=100)
    (tmp_path / "node.py").write_text(NODE)
    data = ["--data-path", str(tmp_path / "text"), "--split", "90,10,0"]
    caches = [str(tmp_path / "one"), str(tmp_path / second)]
    run = start(2, str(tmp_path / "node.py"), *caches, *TINY, *data)
    assert run.code == 0, run.output
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", second)]
    assert names[0]
    assert names[0] == names[1]


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--async-save"]])
@pytest.mark.parametrize("left", [0, 4096, 100 * 1024])
def test_a_full_disk_at_the_first_save(small_disk: Path, left: int, how: list[str]) -> None:
    """In the part that rank 0 writes alone, and in those of all ranks."""
    root = small_disk / "checkpoints"
    root.mkdir()
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - left))
    saving = ["--save", str(root), "--save-interval", "3", *how]
    run = start(2, "-m", "launcher.trainer.gpt", *TINY, "--mock-data", *TENSOR, *saving)
    assert run.code == 1
    assert f"gpt: can't save to {root}: No space left on device" in run.output
    assert list(root.iterdir()) == []


def stopped_at_2(root: Path, *extra: str, when: Callable[[], bool]) -> Run:
    """Train without an end, ask to stop after iteration 2 `when` it is so; the run's end.

    It ends well, and leaves one complete checkpoint and nothing else.
    """
    program = ["-m", "launcher.trainer.gpt", *TINY, "--mock-data", *TENSOR, "--save", str(root)]
    endless = ["--train-iters", "100000", "--exit-signal-handler", *extra]
    with going_on(runner_command(2, *program, *endless)) as run:
        while "iteration        2/" not in run.line():
            pass
        while not when():
            time.sleep(0.001)
        run.process.send_signal(signal.SIGTERM)
    assert run.code == 0, run.output
    assert "stopped after iteration 2: asked to by a signal" in run.output
    assert run.output.splitlines()[-1] == "runner: stopped: all 2 ranks ended after SIGTERM"
    assert [*folders.newest_first(root)][::-1] == [
        folders.CheckpointFolder(2, folders.folder(root, 2))
    ]
    assert folders.noted(root) == "2"
    return run


@pytest.mark.long
def test_a_signal_while_saving(tmp_path: Path) -> None:
    """The save in hand goes to its end, and the same iteration isn't saved again."""
    saving = folders.partial(tmp_path, 2).exists
    run = stopped_at_2(tmp_path, "--save-interval", "2", when=saving)
    assert run.output.count("saved ") == 1


@pytest.mark.long
def test_a_signal_while_evaluating(tmp_path: Path) -> None:
    """An evaluation that would take hours is given up."""
    endless = ["--eval-interval", "2", "--eval-iters", "100000", "--micro-batch-size", "1"]

    def evaluating() -> bool:
        time.sleep(0.5)
        return True

    run = stopped_at_2(tmp_path, *endless, when=evaluating)
    assert "validation loss" not in run.output


def test_without_the_fast_path_it_trains_to_the_same_losses(tmp_path: Path, train: Train) -> None:
    """`trainer/fast` is optional: a payload that lacks it trains by plain PyTorch, and says so."""
    plain = train(1, "--no-fast")
    ignored = shutil.ignore_patterns("fast", "__pycache__")
    shutil.copytree(ROOT / "launcher", tmp_path / "launcher", ignore=ignored)
    runner = [str(tmp_path / "launcher/agent/start.py"), "runner", "--cpu"]
    program = ["-m", "launcher.trainer.gpt", *TINY, "--mock-data"]
    done = python(*runner, "--processes-per-node", "1", "--", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fast: off; there is no launcher.trainer.fast" in done.stdout
    assert Run(done, done.stdout).losses == plain.losses
