"""The example script's command line: what becomes of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.train import example
from launcher.train.gpt import arguments as command_line
from launcher.train.gpt.arguments import Layout, UsageError

TORCHRUN = {
    **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
}


def laid_out(text: str, world_size: int) -> tuple[object, Layout]:
    """What gpt makes of it: all that it checks, too."""
    arguments = example.complete(example.parser().known(text.split()), world_size)
    return arguments, command_line.layout(arguments, world_size)


def holds(arguments: object, text: str) -> bool:
    """Whether each of the words, NAME=VALUE, is so."""
    return {f"{name}={value}" for name, value in vars(arguments).items()} >= set(text.split())


def test_the_guides_hybrid_example() -> None:
    arguments, layout = laid_out(
        "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --batch-size=16 "
        "--epochs=3 --train-steps=1000 --sequence-parallel --fp16",
        8,
    )
    assert layout == Layout(tensor=2, pipeline=2, data=2, micro_batches=8)
    assert holds(
        arguments,
        "global_batch_size=32 train_iters=3000 eval_interval=1000 lr_warmup_iters=300 "
        "sequence_parallel=True fp16=True initial_loss_scale=65536.0 mock_data=True",
    )


def test_every_option_of_the_guide_arrives() -> None:
    arguments, _ = laid_out(
        "--num-layers=6 --hidden-size=96 --num-attention-heads=12 --ffn-hidden-size=100 "
        "--vocab-size=77 --seq-length=20 --batch-size=3 --lr=0.5 --warmup-steps=0 "
        "--gradient-clip-val=0 --dataset-size=9 --num-workers=0 --bf16 "
        "--monitor-memory-continuously --memory-monitor-interval=0.5 --save-performance-summary "
        "--output-dir=out --use-wandb --world-size=1 --init-method=env:// --local-rank=0",
        1,
    )
    assert holds(
        arguments,
        "num_layers=6 hidden_size=96 num_attention_heads=12 ffn_hidden_size=100 vocab_size=77 "
        "seq_length=20 micro_batch_size=3 lr=0.5 lr_warmup_iters=0 clip_grad=0.0 mock_samples=9 "
        "num_workers=0 bf16=True memory_samples=out/memory memory_interval=0.5 "
        "performance_summary=out/performance_summary.json wandb_exp_name=tp1-pp1-dp1 "
        "wandb_project=megatron_core_training_example",
    )


def test_gpts_own_options_win_and_real_data_take_the_place_of_made_up(tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"text{end}").touch()
    text = f"--batch-size 8 --micro-batch-size 2 --save x --data-path {tmp_path / 'text'}"
    arguments, layout = laid_out(text, 2)
    assert layout.micro_batches == 4
    assert arguments.save == "x"
    assert not arguments.mock_data


@given(
    batch=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 9),
)
def test_any_batch_on_any_number_of_replicas(
    batch: int, tensor: int, pipeline: int, replicas: int
) -> None:
    text = f"--batch-size={batch} --tensor-model-parallel-size={tensor}"
    text += f" --pipeline-model-parallel-size={pipeline}"
    arguments, layout = laid_out(text, tensor * pipeline * replicas)
    assert layout.data == replicas
    assert arguments.global_batch_size == batch * replicas
    assert arguments.micro_batch_size * layout.micro_batches == batch
    assert layout.micro_batches == 1 or layout.micro_batches <= 4 * pipeline


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--batch-size=0", "--batch-size: must be at least 1"),
        ("--epochs=0", "--epochs: must be at least 1"),
        ("--train-steps=x", "--train-steps: invalid"),
        ("--epoch=3", r"unknown argument --epoch; did you mean --epochs\?"),
        ("--wandb-api-key=abc", "unknown argument --wandb-api-key(?!=)"),
        ("--tensor-model-parallel-size=3", r"size \(4\) is not divisible by TP × PP × CP \(3\)"),
        ("--memory-monitor-interval=0", "--memory-interval must be above 0"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        laid_out(text, 4)


def environment(text: str, environ: dict[str, str]) -> dict[str, str]:
    return example.environment(example.parser().known(text.split()), environ)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", "10.0.0.1"),
        ("--world-size=8 --init-method=tcp://10.0.0.1:29500", "10.0.0.1"),
        ("--init-method tcp://10.0.0.1:29500/", "10.0.0.1"),
        ("--init-method=env://", "10.0.0.1"),
        ("--init-method=tcp://127.0.0.1:29500", "localhost"),
    ],
)
def test_ranks_are_those_of_the_environment(text: str, address: str) -> None:
    made = environment(text, {**TORCHRUN, "MASTER_ADDR": address})
    assert made.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert bool(made) == (address == "localhost")  # gloo's variables


def test_one_process_alone_is_rank_0() -> None:
    made = environment("--world-size=1", {})
    assert int(made.pop("MASTER_PORT")) > 0
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert made.items() >= (ranks | {"MASTER_ADDR": "127.0.0.1"}).items()


def test_gloo_stays_on_the_machine_and_what_is_set_stays() -> None:
    one = {**TORCHRUN, "WORLD_SIZE": "4"}
    assert environment("", one)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment("", {**one, "GLOO_SOCKET_IFNAME": "eth0"})


@pytest.mark.parametrize(
    ("text", "environ", "reason"),
    [
        ("--world-size=4", TORCHRUN, "--world-size 4, and 8 processes were started"),
        ("--world-size=8", {}, "--world-size 8, and 1 process was started"),
        ("--init-method=tcp://10.0.0.1:29501", TORCHRUN, "the processes meet at 10.0.0.1:29500"),
        ("--init-method=tcp://127.0.0.1:29500", TORCHRUN, "the processes meet at 10.0.0.1:29500"),
        ("--init-method=10.0.0.1:29500", TORCHRUN, "doesn't look like tcp://HOST:PORT"),
        ("--init-method=tcp://10.0.0.1", {}, "doesn't look like tcp://HOST:PORT"),
    ],
)
def test_contradictions(text: str, environ: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        environment(text, environ)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir: can't make .*file/out: Not a directory"):
        example._make(str(tmp_path / "file/out"))
