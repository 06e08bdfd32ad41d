"""Megatron-Core's own count of the documents of each split."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.checks import splits
from launcher.runs.datasets import indexed
from tests.agent.conftest import start

pytestmark = pytest.mark.megatron

SCRIPT = """\
import sys
from pathlib import Path
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from launcher.trainer.gpt.data import TokenVocabulary
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
    (script := tmp_path / "counts.py").write_text(SCRIPT)
    done = start(1, str(script), str(tmp_path / "d"), str(tmp_path), *several)
    counted = [line for line in done.output.splitlines() if line.startswith("counts ")]
    for split, line in zip(several, counted, strict=True):
        parts = splits.shares(split)
        counts = [end - begin for begin, end in splits.bounds(parts, 600)]
        wanted = [count if part else None for count, part in zip(counts, parts, strict=True)]
        assert line == f"counts {wanted}"
