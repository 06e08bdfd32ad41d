"""The tuned file: what was written stays, but for what was changed."""

from __future__ import annotations

import pytest

from launcher.base import yamlfile
from launcher.runs.runfile import source
from launcher.runs.runfile.config import RunConfig
from launcher.tools.tuning import tuned
from launcher.tools.tuning.settings import MICRO

BLOCK = """\
# mine
name: a
image: "24.10"
training:
  micro_batch_size: 1  # small
  global_batch_size: 16
model: {num_layers: 2}
gpus: 2
"""
CHANGES = {
    MICRO: 16,
    "training.bf16": True,
    "parallel.tensor_model_parallel_size": 2,
    "model.make_vocab_size_divisible_by": 64,
    "megatron_args.recompute_granularity": None,
    "data.num_workers": 4,
}


def read(text: str) -> RunConfig:
    root = yamlfile.tree(text, "it")
    assert root
    return source.made(yamlfile.value(root, "it"), "it")


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        BLOCK.replace("\n", "\r\n"),
        BLOCK.rstrip(),
        "{name: a, image: cpu, training: {micro_batch_size: 1}}",
        "name: a\nimage: cpu\nmodel: &m {num_layers: 2}\nparallel:\n    sequence_parallel: true\n",
        "name: a\nimage: cpu\nmodel:\n  {num_layers: 2,\n   hidden_size: 8}\n",
    ],
)
def test_it_reads_as_the_run_that_was_tuned(text: str) -> None:
    wanted = source.overridden(read(text), [source.Override("", dict(CHANGES))])
    assert read(tuned.changed(text, CHANGES, wanted)) == wanted


def test_every_other_line_stays() -> None:
    wanted = source.overridden(read(BLOCK), [source.Override("", dict(CHANGES))])
    lines = tuned.changed(BLOCK, CHANGES, wanted).splitlines()
    assert "  micro_batch_size: 16  # small" in lines
    changed = ("micro_batch", "model")
    kept = [line for line in BLOCK.splitlines() if not any(word in line for word in changed)]
    assert [line for line in lines if line in kept] == kept


def test_measurements_are_comments() -> None:
    head = tuned.headed(BLOCK, ["12.5 ms: a setting", ""])
    assert head.startswith("# 12.5 ms: a setting\n#\n# mine\n")
    assert read(head) == read(BLOCK)
