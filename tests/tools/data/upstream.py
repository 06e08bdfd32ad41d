"""Upstream's own program, of a checkout: what it makes is what ours has to be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launcher.tools.data import vocabulary


def tokenize(checkout: Path, source: Path, prefix: Path, model: Path | None = None) -> None:
    """Run it by MEGATRON_PYTHON, a Python with torch and regex, on GPT-2's vocabulary.

    With a SentencePiece `model`, as Llama 2's: then that Python needs sentencepiece.
    """
    program = checkout / "tools/preprocess_data.py"
    command = [os.environ.get("MEGATRON_PYTHON", "python3"), str(program), "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--append-eod", "--workers", "2"]
    if model:
        command += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(model)]
    else:
        vocab_file, merge_file = vocabulary.vocabulary_files(None, None)
        command += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
        command += ["--tokenizer-type", "GPT2BPETokenizer"]
    subprocess.run(command, check=True, capture_output=True)
