"""Upstream's own program, of a checkout: what it makes is what ours has to be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launcher.data import vocabulary


def tokenize(checkout: Path, source: Path, prefix: Path) -> None:
    """Run it by MEGATRON_PYTHON, a Python with torch and regex, on GPT-2's vocabulary."""
    vocab_file, merge_file = vocabulary.files(None, None)
    program = checkout / "tools/preprocess_data.py"
    command = [os.environ.get("MEGATRON_PYTHON", "python3"), str(program), "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--append-eod", "--workers", "2"]
    command += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
    command += ["--tokenizer-type", "GPT2BPETokenizer"]
    subprocess.run(command, check=True, capture_output=True)
