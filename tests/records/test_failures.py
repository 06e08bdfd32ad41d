"""Known failures: each is told by the text that it really has, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.plan.job import Cause, Ended
from launcher.records import failures
from launcher.records.ending import Ending, describe

ROOT = Path(__file__).parents[2]

# As torch, NCCL, upstream and this launcher's runner write them; those marked "seen" were produced
# with torch 2.13 in the cpu image, others are from reports of the projects' own users.
REAL = {
    "GPU memory is out": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.11 GiB of which 1.17 GiB is free.",
        "[0] transport.cc:1 NCCL WARN Cuda failure 2 'out of memory'",
    ],
    "host memory is out": [
        "runner: rank 1 was killed by signal 9 (SIGKILL), exit code 137: out of memory (the "
        "container's limit)",  # seen
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate "
        "memory)",
        "RuntimeError: DataLoader worker (pid(s) 3144, 3145) is killed by signal: Killed.",
    ],
    "shared memory, /dev/shm, is too small": [
        "runner: rank 0 was killed by signal 7 (SIGBUS), exit code 135",  # seen
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_12_528827928_0>: No "
        "space left on device (28)",  # seen
        "RuntimeError: unable to write to file </torch_18_1692924247>",
        "RuntimeError: DataLoader worker (pid 1284) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
        "x:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left "
        "on device",
        "x:202016 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)",
        "[6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 "
        "bytes",
    ],
    "the GPU's driver is too old for the image, or isn't there": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver",
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "runner: CUDA can't be started: Found no NVIDIA driver on your system.",
    ],
    "ranks and GPUs don't fit": [
        "runner: 2 processes on 1 visible CUDA devices: make them equal, by --processes-per-node 1 "
        "or by CUDA_VISIBLE_DEVICES",
        "runner: no CUDA device is visible: give --cpu to run on the CPU",  # seen
        "[0] init.cc:748 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
        "3b000",
        "RuntimeError: CUDA error: invalid device ordinal",
    ],
    "the port is taken": [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 34765, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",  # seen
        "RuntimeError: The server socket has failed to listen on any local network address. The "
        "server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ],
    "locked memory is limited, which InfiniBand needs": [
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate "
        "memory",
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
    ],
    "a compiled extension is missing": [
        "ModuleNotFoundError: No module named 'megatron.core.datasets.helpers_cpp'",  # seen
        "ModuleNotFoundError: No module named 'amp_C'",  # seen
        "ImportError: cannot import name 'helpers' from 'megatron.core.datasets' (/x/__init__.py)",
        "ModuleNotFoundError: No module named 'transformer_engine.pytorch'",
    ],
    "the image has no Transformer Engine, whose layers Megatron takes unless told otherwise": [
        "NameError: name 'TELayerNormColumnParallelLinear' is not defined",  # seen
        "NameError: name 'TESpecProvider' is not defined. Did you mean: "
        "'LocalSpecProvider'?",  # seen
        "AssertionError: persist_layer_norm not supported by torch LayerNorm when instantiating "
        "WrappedTorchLayerNorm when instantiating TransformerLayer",  # seen
    ],
    "Megatron's quickstart and torch don't fit: torch.utils.data has no Iterator": [
        "ImportError: cannot import name 'Iterator' from 'torch.utils.data' (/x/__init__.py)",
    ],
    "the vocabulary file is wrong, or not the one that the data was made with": [
        "KeyError: '<|endoftext|>'",  # upstream's tokenizer reads it from the vocabulary
        'File "/m/megatron/training/tokenizer/gpt2_tokenization.py", line 151, in __init__\n'
        "    self.encoder = json.load(open(vocab_file))\n"
        '  File "/usr/lib/python3.10/json/decoder.py", line 355, in raw_decode\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "IndexError: index out of range in self",  # seen
    ],
    "the learning rate's schedule isn't the one that the checkpoint was saved with": [
        "[rank0]: AssertionError: OptimizerParamScheduler: class input value 19.52 and "
        "checkpointvalue 16000.0 for warmup iterations do not match",  # seen
    ],
    "a GPU is broken": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "a collective timed out: a rank didn't come to it": [
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
        "NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for "
        "recv operation to complete",
    ],
}
BEFORE = "training\n[2025-04-13 23:41:20] iteration 20/ 1000 | lm loss: 1.07E+01 |\n"


def test_every_row_of_the_table_has_its_real_text() -> None:
    assert [known.name for known in failures.table()] == list(REAL)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in REAL.items() for text in texts]
)
def test_each_is_named_by_its_text_and_by_nothing_else(name: str, text: str) -> None:
    tail = f"{BEFORE}{text}\nrunner: rank 0 exited with code 1\n"
    found = failures.named(tail, Ended(1))
    assert [failure.name for failure in found] == [name]
    assert found[0].quote
    assert found[0].quote.rstrip("…") in text
    told = describe(Ending(Ended(1), False, tail), "0a1b", None, "")
    assert told[1].startswith(f"cause: {name}: ")
    assert told[2].startswith("cure: ")


def test_memory_is_named_by_what_the_engine_says_where_nothing_was_written() -> None:
    found = failures.named("", Ended(137, Cause.MEMORY))
    assert [failure.lines[0] for failure in found] == ["cause: host memory is out"]


def test_the_first_cause_is_told_where_others_follow_from_it() -> None:
    order = list(REAL)
    tail = "\n".join(REAL[name][0] for name in reversed(order))
    told = describe(Ending(Ended(1), False, tail), "0a1b", None, "")
    assert [line for line in told if line.startswith("cause: ")] == [
        f"cause: {order[0]}: {REAL[order[0]][0][:160]}{'…' * (len(REAL[order[0]][0]) > 160)}"
    ]


def test_a_run_that_was_stopped_or_done_has_no_failure() -> None:
    text = REAL["the port is taken"][0]
    assert len(describe(Ending(Ended(143), True, text), "0a1b", None, "")) == 1
    assert describe(Ending(Ended(0), False, text), "0a1b", None, "") == []


def test_a_full_shared_memory_is_no_full_disk() -> None:
    full = REAL["shared memory, /dev/shm, is too small"][1]
    assert not Ending(Ended(1), False, full).full
    assert Ending(Ended(1), False, f"{full}\nOSError: [Errno 28] No space left on device").full


def healthy() -> list[Path]:
    """What is no failing run's output: our own words, and what healthy runs have printed."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/golden/*.txt"), ROOT / "README.md"]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("path", healthy(), ids=lambda path: path.name)
def test_ordinary_text_names_nothing(path: Path) -> None:
    assert failures.named(path.read_text(encoding="utf-8"), Ended(1)) == []


WORDS = st.sampled_from(
    "CUDA memory out of port 29500 address timeout NCCL INFO WARN rank 0 runner: shm /dev/shm "
    "vocab_file driver 550.54 memlock extension helpers GPU iteration error 0 warning: "
    "exited with code 1".split()
)


@given(st.lists(st.lists(WORDS, max_size=8).map(" ".join), max_size=30).map("\n".join))
@example("runner: rank 1 exited with code 3")
@example("launcher: asked the run to stop and save to /data/ckpt; it has 10 min.")
def test_words_that_failures_have_too_name_nothing(text: str) -> None:
    assert failures.named(text, Ended(1)) == []


@given(st.text(max_size=2000), st.sampled_from([text for texts in REAL.values() for text in texts]))
def test_noise_around_a_failure_hides_nothing(noise: str, text: str) -> None:
    found = failures.named(f"{noise}\n{text}\n{noise}", Ended(1))
    assert any(text in REAL[failure.name] for failure in found)
