"""The user's case, from raw text to a checkpoint: real text, GPT-2's vocabulary, real training."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.images.engine.private import packages
from tests.e2e.command import launched

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

LOSS = re.compile(r"iteration +(\d+)/ *\d+ .*\| lm loss: (\S+) ")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Jargon File of Debian's dict-jargon, 1.4 MB in the public domain, as csv."""
    folder = tmp_path_factory.mktemp("corpus")
    packages.unpack(folder / "debian", ["dict-jargon"])
    (path,) = (folder / "debian").rglob("jargon.dict.dz")
    entries = gzip.decompress(path.read_bytes()).decode(errors="replace").split("\n\n")
    rows = ['"' + entry.replace('"', '""') + '"' for entry in entries if entry.strip()]
    (folder / "jargon.csv").write_text("\n".join(["content", *rows]), encoding="utf-8")
    return folder / "jargon.csv"


def train(image: str, folder: Path, *settings: str) -> list[str]:
    chosen = [
        *(f"image={image}", "training.train_iters=30"),
        *("model.hidden_size=32", "model.seq_length=32", "training.global_batch_size=4"),
        *("training.micro_batch_size=2", "training.lr=1e-2", "training.lr_warmup_iters=3"),
        *("logging.log_interval=1", "logging.eval_interval=100", "checkpoint.save_interval=30"),
        *(f"checkpoint.save={folder / 'save'}", f"checkpoint.load={folder / 'save'}"),
        *(f"data.cache={folder / 'index'}", "env.OMP_NUM_THREADS=1", *settings),
    ]
    return ["run", "demo.yaml", *(part for one in chosen for part in ("--set", one))]


def test_one_command_from_text_to_a_checkpoint(
    cpu_images: CpuImages, corpus: Path, tmp_path: Path
) -> None:
    """Megatron's own GPTDataset reads what was written, and the model learns from it."""
    cache = {"LAUNCHER_CACHE": str(tmp_path / "cache")}
    command = train(cpu_images.build(), tmp_path, f"data.text=[{corpus}]", "data.text_key=content")
    done = launched(*command, **cache)
    losses = [float(match[2]) for match in LOSS.finditer(done.stdout)]
    assert len(losses) == 30
    assert abs(losses[0] - math.log(50257)) < 0.5
    assert losses[-1] < losses[0] - 1.5
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "30"
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"state"')]
    assert (told[-1]["state"], told[-1]["tokens"] > 300_000) == ("done", True)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/data").iterdir()}
    assert {path.suffix for path in made} == {".bin", ".idx", ".json"}
    launched(*command, "--dry-run", **cache)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/data").iterdir()} == made


READ_AND_WRITE = """
import json, numpy, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
found = IndexedDataset(sys.argv[1])
made = IndexedDatasetBuilder(sys.argv[2] + ".bin", dtype=numpy.uint16)
ends = [int(end) for end in found.document_indices]
documents = [[found[n].tolist() for n in range(a, b)] for a, b in zip(ends, ends[1:])]
for sequences in documents:
    tokens = [token for sequence in sequences for token in sequence]
    made.add_document(numpy.array(tokens, numpy.uint16), list(map(len, sequences)))
made.finalize(sys.argv[2] + ".idx")
print(json.dumps(documents))
"""


def test_megatrons_indexed_dataset_reads_it_and_its_builder_writes_the_same(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path
) -> None:
    texts = ["Hello world", "", ["Hello", "", " world"], "世界"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "in.jsonl").write_text("".join(lines), encoding="utf-8")
    made = ("--output-prefix", str(tmp_path / "ours"), "--append-eod")
    launched("data", "tokenize", str(tmp_path / "in.jsonl"), *made)
    printed = engine.containers.run(
        cpu_images.build(),
        ["python3", "-c", READ_AND_WRITE, "/data/ours_text_document", "/data/theirs"],
        volumes={str(tmp_path): {"bind": "/data", "mode": "rw"}},
        network_mode="none",
        remove=True,
    )
    eod = 50256
    world = [10310, 244, 45911, 234]  # the six bytes of two characters, by GPT-2's merges
    assert json.loads(printed.splitlines()[-1]) == [
        [[15496, 995, eod]],
        [],
        [[15496], [995, eod]],
        [[*world, eod]],
    ]
    for kind in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{kind}" for name in ("ours_text_document", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()
