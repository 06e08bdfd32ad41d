"""Layouts that fit, chosen or refused; the report of what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.runs.checks import fit, machine_report, memory
from launcher.runs.checks.gather import SHM
from launcher.runs.checks.machine import UNLIMITED, Machine, Use
from launcher.runs.plan.layout import layout
from launcher.runs.runfile.values import parse_gpus
from tests.runs.checks.conftest import ENGINE, GB, Asker, card

LARGE = ("model.num_layers=48", "model.hidden_size=1600", "model.num_attention_heads=25")


@pytest.mark.parametrize(
    ("gpus", "sets", "total", "mend"),
    [
        (1, (), 7, "--set training.micro_batch_size=8: then about 5"),
        (1, (), 4.4, "--set training.micro_batch_size=2: then about 3"),
        (
            8,
            (*LARGE, "training.micro_batch_size=1"),
            16,
            "--set parallel.use_distributed_optimizer=true: then about 1",
        ),
        (
            2,
            ("parallel.tensor_model_parallel_size=2", "training.micro_batch_size=1",
             "parallel.use_distributed_optimizer=true", "model.seq_length=8192",
             "model.max_position_embeddings=8192", "training.global_batch_size=1"),
            5.7,
            "--set parallel.sequence_parallel=true",
        ),
        (
            1,
            ("program=pretrain_gpt.py", "training.micro_batch_size=1", "model.seq_length=8192",
             "model.max_position_embeddings=8192"),
            8,
            "--set megatron_args.recompute_granularity=full",
        ),
        (
            2,
            ("model.num_layers=24", "model.hidden_size=2048", "model.num_attention_heads=16",
             "training.micro_batch_size=1", "parallel.use_distributed_optimizer=true"),
            18.5,
            "--set parallel.tensor_model_parallel_size=2",
        ),
        (
            8,
            LARGE,
            16.5,
            "--set training.micro_batch_size=1 --set parallel.use_distributed_optimizer=true: then",
        ),
        (
            1,
            LARGE,
            16,
            "No setting makes it fit on these GPUs. 3 of this size would hold it: "
            "tensor 1 × pipeline 3.",
        ),
        (1, LARGE, 1, "No layout of this model fits on GPUs of 1.0 GB"),
        (  # which is of use once a layer is split
            4,
            ("training.global_batch_size=4",),
            2.1,
            "--set parallel.use_distributed_optimizer=true "
            "--set megatron_args.recompute_granularity=full "
            "--set megatron_args.recompute_method=uniform "
            "--set megatron_args.recompute_num_layers=1 "
            "--set parallel.tensor_model_parallel_size=4 "
            "--set parallel.sequence_parallel=true: then about 1.9",
        ),
    ],
)  # fmt: skip
def test_the_smallest_change_that_makes_it_fit_is_told(
    asked: Asker, gpus: int, sets: tuple[str, ...], total: float, mend: str
) -> None:
    machine = Machine(gpus=tuple(card(n, total=int(total * GB)) for n in range(gpus)))
    (finding,) = asked("gpt2", f"gpus={gpus}", *sets).on(machine)
    assert finding.mend.startswith(mend), finding
    assert finding.refuse or sets is not LARGE  # which is far too large
    assert "weights" in finding.why
    assert f"has {total:.1f}" in finding.what


def test_llama_3_8b_at_tp2_cp4_fits_eight_cards_of_80_gb(asked: Asker) -> None:
    """The optimizer's states were divided by DP alone: 94.8 GB, and the run was refused."""
    llama = asked(
        "gpt3-175b",
        "gpus=8", "nodes=1", "model={num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336,"
        " num_attention_heads: 32, num_query_groups: 8, seq_length: 8192, swiglu: true,"
        " max_position_embeddings: 8192, position_embedding_type: rope, normalization: RMSNorm,"
        " disable_bias_linear: true, untie_embeddings_and_output_weights: true,"
        " hidden_dropout: 0, attention_dropout: 0}",
        "training={micro_batch_size: 4, global_batch_size: 128, train_iters: 10, lr: 1.0e-4,"
        " bf16: true}",
        "parallel={tensor_model_parallel_size: 2, context_parallel_size: 4,"
        " sequence_parallel: true, use_distributed_optimizer: true}",
        "data.vocab_size=128256", "checkpoint={}", "logging={}",
    )  # fmt: skip
    found = memory.estimate(llama.config, layout(llama.config, 8), (9, 0))
    assert found
    assert found.total == pytest.approx(58.7 * GB, rel=0.001)
    machine = Machine(gpus=tuple(card(n) for n in range(8)))
    assert [finding for finding in llama.on(machine) if finding.refuse] == []


def test_the_advice_holds_in_the_estimate(asked: Asker) -> None:
    run, small = asked("gpt2", "gpus=1", *LARGE), card(total=16 * GB)
    found = fit.replicas_of_one(run.config, small)
    assert found == (1, 3)
    wide = asked("gpt2", "gpus=3", *LARGE, "parallel.pipeline_model_parallel_size=3",
                 "training.micro_batch_size=1")  # fmt: skip
    needed = memory.estimate(wide.config, layout(wide.config, 3), (9, 0))
    assert needed
    assert needed.total < 16 * GB


@pytest.mark.parametrize("share", [0.95, 0.85, 1.05])
def test_near_the_limit_it_warns(asked: Asker, share: float) -> None:
    run = asked("gpt2")
    needed = memory.estimate(run.config, layout(run.config, 1), (9, 0))
    assert needed
    findings = run.on(Machine(gpus=(card(total=int(needed.total * share)),)))
    assert [finding.refuse for finding in findings] == [share < 0.9]


def test_a_gpu_that_others_fill_is_refused_with_their_names(asked: Asker) -> None:
    busy = card(used=80 * GB)
    uses = (Use("GPU-0", 4242, 79 * GB), Use("GPU-1", 1, None))
    findings = asked("gpt2").on(Machine(gpus=(busy, card(1)), uses=uses))
    (refusal,) = [finding for finding in findings if finding.refuse]
    assert refusal.what == "GPU 0 has 5.0 GB of 85.0 free: process 4242 (79.0 GB)"
    assert "about 8.4 GB" in refusal.why


def test_the_smallest_of_unlike_gpus_counts(asked: Asker) -> None:
    machine = Machine(gpus=(card(), card(1, name="NVIDIA L4", total=5 * GB)))
    (finding,) = asked("gpt2", "gpus=2").on(machine)
    assert "NVIDIA L4" in finding.what


def test_options_after_the_dashes_count(asked: Asker) -> None:
    sets = ("program=pretrain_gpt.py", "model.transformer_impl=local")
    rest = ("--recompute-granularity", "full", "--recompute-method=uniform",
            "--recompute-num-layers", "1")  # fmt: skip
    machine = Machine(gpus=(card(total=8 * GB),))
    assert asked("gpt2", *sets).on(machine)
    assert asked("gpt2", *sets, rest=rest).on(machine) == []


def test_a_gpu_that_tells_no_memory_isnt_judged(asked: Asker) -> None:
    assert asked("gpt2", *LARGE).on(Machine(gpus=(card(total=0),))) == []


def test_recomputing_that_is_on_isnt_advised(asked: Asker) -> None:
    sets = ("program=pretrain_gpt.py", "training.micro_batch_size=1", "model.seq_length=8192",
            "model.max_position_embeddings=8192", "megatron_args.recompute-granularity=full",
            "megatron_args.recompute-method=uniform",
            "megatron_args.recompute-num-layers=1")  # fmt: skip
    (finding,) = asked("gpt2", *sets).on(Machine(gpus=(card(total=2 * GB),)))
    assert "recompute" not in finding.mend


CACHE = ("/home/user/.cache", 500 * GB)
GOOD = Machine(gpus=(card(), card(1)), engine=ENGINE, shm=64 << 30, memlock=UNLIMITED)
NO_TOOLKIT = replace(GOOD, engine=replace(ENGINE, gpus=False))
OLD = replace(GOOD, gpus=(card(name="NVIDIA GeForce RTX 3090", driver="470.57.02"),))
POOR = replace(GOOD, uses=(Use("GPU-1", 7, None),), shm=1 << 20, memlock=1 << 16)
TABLE = """\
ok       engine    27.0 at unix:///run/docker.sock, rootful, cgroup v2 (systemd)
ok       GPU 0     NVIDIA H100 80GB HBM3, 85.0 GB, compute capability 9.0
ok       GPU 1     NVIDIA H100 80GB HBM3, 85.0 GB, compute capability 9.0
warning  driver    driver 535.104.05; the image has CUDA 12.6.2
                   CUDA 12.6 came with 560.28.03; older ones carry it by minor version \
compatibility, without what is new in it.
                   → Install driver 560.28.03 or newer if something isn't supported.
ok       toolkit   the engine gives GPUs to containers
ok       /dev/shm  65536 MiB free
ok       memlock   unlimited
ok       cache     500.0 GB free for /home/user/.cache
"""


FAR = Machine(engine=replace(ENGINE, local=False, gpus=None))
BARE = replace(GOOD, gpus=None, engine=replace(ENGINE, gpus=False), shm=1, memlock=1)


def test_the_table() -> None:
    old = replace(GOOD, gpus=tuple(card(n, driver="535.104.05") for n in range(2)))
    assert machine_report.table(machine_report.lines(old, "12.6.2", CACHE)) == TABLE


def test_no_gpu_is_no_fault() -> None:
    found = {line.name: line for line in machine_report.lines(BARE, None, CACHE)}
    assert {line.state for line in found.values()} == {machine_report.OK}
    assert found["GPUs"].found == "no GPU: CPU runs only"


@pytest.mark.parametrize(
    ("machine", "cuda", "gpus", "name", "state", "mend"),
    [
        (GOOD, None, "3", "GPUs", machine_report.REFUSED, "--gpus 2"),
        (GOOD, None, "device=0,7", "GPUs", machine_report.REFUSED, "device=0,1"),
        (GOOD, None, "2", "GPUs", None, ""),  # nothing is wrong with what was asked about
        (NO_TOOLKIT, None, None, "toolkit", machine_report.REFUSED, "nvidia-ctk"),
        (NO_TOOLKIT, None, "0", "toolkit", None, ""),  # which isn't needed
        (OLD, "12.6", None, "driver", machine_report.REFUSED, "560.28.03"),
        (OLD, None, None, "driver", machine_report.OK, ""),
        (POOR, None, None, "GPU 1", machine_report.WARNING, "Choose free ones"),
        (POOR, None, None, SHM, machine_report.WARNING, "remount"),
        (POOR, None, None, "memlock", machine_report.WARNING, "ulimit -l"),
        (POOR, None, None, "GPU 0", machine_report.OK, ""),
    ],
)
def test_what_is_wrong_has_its_line(
    machine: Machine, cuda: str | None, gpus: str | None, name: str, state: str | None, mend: str
) -> None:
    asked = parse_gpus(gpus) if gpus else None
    found = [
        one for one in machine_report.lines(machine, cuda, CACHE, asked=asked) if one.name == name
    ]
    assert [line.state for line in found] == ([state] if state else [])
    assert all(mend in line.mend for line in found)


def test_a_full_disk_is_a_warning() -> None:
    (line,) = [one for one in machine_report.lines(GOOD, None, ("/c", 5)) if one.name == "cache"]
    assert line.state == machine_report.WARNING


def test_of_an_engine_elsewhere_nothing_is_made_up() -> None:
    names = {line.name for line in machine_report.lines(FAR, None, CACHE)}
    assert names == {"engine", "machine", "toolkit", "cache"}
