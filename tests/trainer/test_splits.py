"""Megatron-Core's own count of the documents of each split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runs.checks import splits
from launcher.runs.datasets import indexed

pytestmark = pytest.mark.megatron

SCRIPT = """\
import sys
from pathlib import Path
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from launcher.trainer.gpt.data import TokenVocabulary
config = GPTDatasetConfig(
    random_seed=1, sequence_length=8, blend=([sys.argv[1]], None), split=sys.argv[2],
    path_to_cache=sys.argv[3], tokenizer=TokenVocabulary(99, 98), reset_position_ids=False,
    reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
)
built = BlendedMegatronDatasetBuilder(GPTDataset, [9, 9, None], lambda: True, config).build()
print([None if one is None else len(one.indices) for one in built])
"""


def test_megatron_itself_counts_so(tmp_path: Path) -> None:
    """Another rule in Megatron would make the counts wrong."""
    indexed.write(tmp_path / "d", [[1] * 20] * 41, 99)
    for split in ("949,50,1", "90,10,0", "2,1,1"):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "d"), split, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        parts = splits.shares(split)
        counts = [end - begin for begin, end in splits.bounds(parts, 41)]
        wanted = [count if part else None for count, part in zip(counts, parts, strict=True)]
        assert done.stdout.splitlines()[-1] == str(wanted)
