"""`launcher checkpoint export` and `import` of a Llama of 1.2 billion parameters, beside a copy.

The copy reads the same bytes with safetensors and writes them with it, file to file; ours also sees
to it that they are on the disk. By name only: it takes 10 GB of disk.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench.measure import Figure, timed

SHAPE = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Of https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json."""

TURNS = 5
COPY = """
import pathlib, sys
from safetensors.numpy import load_file, save_file
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    save_file(load_file(path), sys.argv[2] + "/" + path.name)
"""
PEAK = """
import resource, sys
from launcher.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    print(*(line.split()[1] for line in status if line.startswith("VmHWM")), file=open(PATH, "w"))
sys.exit(code)
"""


def figures() -> list[Figure]:
    """How long export and import take of the copy, and the most memory that the export had."""
    with tempfile.TemporaryDirectory(prefix="launchpad-export-") as name:
        folder = Path(name)
        _make(folder / "theirs")
        peak = PEAK.replace("PATH", repr(str(folder / "peak")))
        ours = [sys.executable, "-c", peak, "checkpoint"]
        bring = [*ours, "import", str(folder / "theirs"), "--to"]
        times: dict[str, list[float]] = {"copy": [], "export": [], "import": []}
        timed([*bring, str(folder / "ours")])
        for turn in range(TURNS):
            at = folder / str(turn)
            at.mkdir()
            times["copy"].append(timed([sys.executable, "-c", COPY, str(folder / "theirs"), name]))
            export = [*ours, "export", str(folder / "ours"), "--to", str(at / "back")]
            times["export"].append(timed(export))
            memory = int((folder / "peak").read_text()) / 1e6
            times["import"].append(timed([*bring, str(at / "again")]))
            for path in [*at.rglob("*")]:
                if path.is_file():
                    path.unlink()
        copy, export, bring_in = (statistics.median(seconds) for seconds in times.values())
    return [
        Figure(
            "1.2 billion parameters exported, of a copy by safetensors", export / copy, 1.5, "x"
        ),
        Figure("the same imported, of the copy", bring_in / copy, 1.5, "x"),
        Figure("the most memory that the export had", memory, 2 + 2.5, "GB"),
    ]


def _make(folder: Path) -> None:
    """The model with random bytes for weights, in two shards."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    random, hidden, ffn, keys = np.random.default_rng(1), 2048, 8192, 512
    shapes = {
        **{"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)},
        **{"self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden)},
        **{"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)},
        **{"mlp.down_proj": (hidden, ffn)},
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    whole = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(16)
        for name, shape in shapes.items()
    }
    ends = {"model.embed_tokens.weight": (128256, hidden), "model.norm.weight": (hidden,)}
    places = {}
    for number, part in enumerate((whole, ends)):
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(
            {
                key: np.frombuffer(random.bytes(2 * int(np.prod(shape))), "f2").reshape(shape)
                for key, shape in part.items()
            },
            folder / name,
        )
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
