"""Copies of scores in upstream's plain attention, counted as Megatron's own layers run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.ranks.command_line import free_port
from launcher.runs.checks import memory
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model_size import UPSTREAM
from tests.conftest import missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.megatron,
    pytest.mark.skipif(bool(missing("torch", "megatron.core")), reason="no torch or megatron.core"),
]

SCRIPT = """
import weakref
from launcher.agent import compat, cpu
cpu.install()
compat.prepare()
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

class Live(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.total = self.most = 0
        self.sizes = {}
    def free(self, key):
        self.total -= self.sizes.pop(key, 0)
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_flatten(made)[0]:
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.total += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata)
        self.most = max(self.most, self.total)
        return made

torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
heads, tokens = 4, 512
def most(again, dropout):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=heads, ffn_hidden_size=32,
        bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0, attention_dropout=dropout,
        attention_softmax_in_fp32=False, masked_softmax_fusion=False,
        recompute_granularity="selective" if again else None)
    model = GPTModel(config, get_gpt_layer_local_spec(), 16, tokens).bfloat16()
    words, places = torch.zeros(1, tokens, dtype=int), torch.arange(tokens)[None]
    mask = torch.ones(1, 1, tokens, tokens).triu(1).bool()
    model(words, places, mask, labels=words).sum().backward()
    with Live() as live:
        model(words, places, mask, labels=words).sum().backward()
    return live.most / (heads * tokens * tokens)
print(most(True, 0.0), most(True, 0.1), most(False, 0.0))
"""


def test_scores_are_as_many_as_megatron_makes() -> None:
    """Autograd's copies for the mask weren't counted: a gigabyte of llama3.2-1b at 4096 tokens."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    env = os.environ | place | {"PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    taken = [*map(float, done.stdout.split()[-3:])]  # bytes for each score of a layer
    options = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 512,
        "micro_batch_size": 1, "hidden_dropout": 0, "attention_dropout": 0, "bf16": True,
        "transformer_impl": "local", "vocab_size": 16, "ffn_hidden_size": 32,
    }  # fmt: skip
    again = {"recompute_granularity": "selective"}
    for bytes_of_score, more in zip(
        taken, (again, again | {"attention_dropout": 0.1}, {}), strict=True
    ):
        found = memory.needed(UPSTREAM, options | more, Layout(1, 1, 1, 1))
        assert found
        beside = found.activations + found.logits + found.workspace
        assert beside / (4 * 512 * 512) == pytest.approx(bytes_of_score, rel=0.1)
