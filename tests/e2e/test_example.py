"""Every command line of the training guide, made small, in the CPU image with a real torchrun."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.command import contained, launched, launcher

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY = (
    "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --vocab-size=64 "
    "--lr=1e-2 --save-performance-summary"
)
SCRIPT = "megatron_core_training_example.py"

# What the guide's machines have and this container has not.
PREPARE = """
mkdir /tmp/bin && PATH=/tmp/bin:$PATH
ln -s "$(command -v python3)" /tmp/bin/python
cat > /tmp/bin/scontrol <<'END'
#!/bin/sh
echo 127.0.0.1
END
cat > /tmp/bin/srun <<'END'
#!/bin/sh
shift 2 # --jobid N
SLURM_PROCID=1 "$@" & second=$!
SLURM_PROCID=0 "$@" && wait $second
END
chmod +x /tmp/bin/*
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"""

GUIDE = dict(
    (head.split()[0], (command, [int(number) for number in head.split()[1:]]))
    for part in Path(__file__).with_name("guide.sh").read_text().split("\n#: ")[1:]
    for head, _, command in [part.partition("\n")]
)
"""The commands by name; of what they are made to be here TP, PP, DP, and how many losses."""
USUAL = ("hybrid",)
SCALE = {
    "--nproc_per_node=8": "--nproc_per_node=4",
    "--nproc_per_node=4 --nnodes=2": "--nproc_per_node=2 --nnodes=2",
    "GPUS_PER_NODE=4": "GPUS_PER_NODE=2",
    "--world-size=8": "--world-size=4",
    "MASTER_IP": "127.0.0.1",
    "MASTER_PORT": "29500",
    "--batch-size=16": "--batch-size=4",
    "--train-steps=1000": "--train-steps=3",
    "--seq-length=128": "--seq-length=32",
    "$SLURM_JOBID": "1",
}


def scaled(command: str) -> str:
    """The command on 2 or 4 processes, with a tiny model and few steps."""
    keep = "MASTER_PORT=29500\n"  # of the Slurm script, where it is a variable
    for theirs, ours in SCALE.items():
        if theirs != "MASTER_PORT" or keep not in command:
            command = command.replace(theirs, ours)
    steps = "" if "--train-steps" in command else " --train-steps=10"
    own = {word.partition("=")[0] for word in command.split()}
    tiny = [word for word in TINY.split() if word.partition("=")[0] not in own]
    return command.replace(SCRIPT, " ".join([SCRIPT, *tiny]) + steps)


@dataclass(frozen=True)
class Done:
    """What a command printed, its exit code, and the files it left in the working folder."""

    code: int
    output: str
    summary: dict
    samples: dict[str, list[dict]]

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", self.output)]


Shell = Callable[..., Done]

SHOW = """
code=$?
echo "--- files"
python3 - <<'END'
import json, pathlib
files = [*pathlib.Path().glob("performance_summary.json"), *pathlib.Path().glob("memory/*.jsonl")]
print(json.dumps({str(path): path.read_text() for path in files}))
END
exit $code
"""


@pytest.fixture(scope="module")
def shell(engine: DockerClient, cpu_images: CpuImages) -> Shell:
    """Run a script of bash in the image's /opt/megatron, without a network."""
    image = cpu_images.build()

    def run(script: str) -> Done:
        done = contained(
            engine,
            image,
            ["bash", "-c", PREPARE + script + SHOW],
            hostname="localhost",  # which resolves; torchrun looks its own name up
            working_dir="/opt/megatron",
        )
        output, _, files = done.stdout.partition("--- files\n")
        found = json.loads(files.splitlines()[0])
        summary = json.loads(found.pop("performance_summary.json", "{}"))
        samples = {
            Path(name).name: [json.loads(line) for line in text.splitlines()]
            for name, text in found.items()
        }
        return Done(done.returncode, done.stderr + output, summary, samples)

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in USUAL else pytest.mark.long) for one in GUIDE]
)
def test_a_command_of_the_guide(shell: Shell, name: str) -> None:
    command, (*layout, steps) = GUIDE[name]
    done = shell(scaled(command))
    assert done.code == 0, done.output[-6000:]
    assert done.output.count(f"{SCRIPT.removesuffix('.py')}: no GPU here") == 1
    assert len(done.losses) == steps
    assert all(map(math.isfinite, done.losses))
    assert done.losses[-1] < done.losses[0] - 0.1
    summary = done.summary
    assert [summary["layout"][kind] for kind in ("tensor", "pipeline", "data")] == layout
    assert summary["steps"] == steps
    assert summary["layout"]["world_size"] == math.prod(layout)
    assert summary["precision"] == ("fp16" if "--fp16" in command else "fp32")
    assert summary["final_loss"] == pytest.approx(done.losses[-1], rel=1e-5)
    assert summary["ms_per_step_median"] > 0
    assert summary["max_memory_bytes"]["resident"] > 50_000_000
    sampled = {f"rank-{rank}.jsonl" for rank in range(2)} if "--monitor" in command else set()
    assert set(done.samples) == sampled
    for samples in done.samples.values():
        assert len(samples) >= 2
        assert all(sample["resident"] > 50_000_000 for sample in samples)
        assert samples == sorted(samples, key=lambda sample: sample["time"])


RUN_FILE = """\
name: example-test
image: {{name: '{image}'}}
program: megatron_core_training_example.py
gpus: 0
processes: 2
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 16}}
parallel: {{tensor_model_parallel_size: 2, sequence_parallel: true}}
megatron_args: {{vocab_size: 64, batch_size: 4, train_steps: 10, save_performance_summary: true}}
resources: {{network: none, workdir: {folder}}}
"""


def test_by_the_launcher(cpu_images: CpuImages, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE.format(image=cpu_images.build(), folder=tmp_path / "work"))
    done = launcher("run", str(file), "--", "--lr=1e-2", "--use-wandb")
    assert done.returncode == 2
    assert done.stderr.count("--use-wandb needs the Python package wandb") == 1
    launched("run", str(file), "--", "--lr=1e-2", "--world-size=2")
    summary = json.loads((tmp_path / "work/performance_summary.json").read_text())
    assert summary["steps"] == 10
    assert summary["layout"]["tensor"] == 2
