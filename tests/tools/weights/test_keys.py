"""Each key of a configuration is carried over, changes no logits, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.tools.weights import convert, reader
from tests.agent.conftest import start

from .models import CONFIGS
from .test_logits import TOKENS, randomised

pytestmark = [pytest.mark.megatron, pytest.mark.long]

OTHERS: dict[str, list[Any]] = {
    **{name: ["gelu", "relu", "gelu_new"] for name in ("hidden_act", "activation_function")},
    **{"head_dim": [16, 24], "sliding_window": [3, None], "n_inner": [96], "hidden_size": [96]},
    **{"n_embd": [96], "layer_types": [["full_attention", "sliding_attention"] * 2]},
    **{"num_key_value_heads": [1, 4], "num_attention_heads": [2, 8], "n_head": [2, 8]},
    **{"mlp_only_layers": [[0]], "rope_scaling": [{"rope_type": "linear", "factor": 2.0}]},
}
"""Values to try of what has no other that is one step away."""


def others(name: str, value: Any) -> list[Any]:
    """Other values for a key than the one it has."""
    if name in OTHERS:
        return [one for one in OTHERS[name] if one != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 2 + 1e-3, value / 2]
    return []


@pytest.mark.parametrize("family", CONFIGS)
def test_a_key_is_carried_changes_nothing_or_is_refused(family: str, tmp_path: Path) -> None:
    """A window, a head of its own or a scale was lost without a word."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = AutoConfig.for_model(family, **CONFIGS[family]).to_dict()
    theirs, refused = dict[str, Any](), set[str]()
    for name, value in usual.items():
        for number, other in enumerate(others(name, value)):
            folder = tmp_path / f"{name}-{number}"
            try:
                config = AutoConfig.for_model(family, **{**CONFIGS[family], name: other})
                model = randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
                with torch.no_grad():
                    logits = model(torch.tensor([TOKENS])).logits
                model.save_pretrained(folder)
            except Exception:  # no model of theirs  # noqa: S112
                continue
            try:
                convert.import_(folder, tmp_path / f"{folder.name}-ours", padding=64)
            except UsageError as error:
                named = (name, "rope", "layer_types")  # which theirs derive from others
                assert any(each in str(error) for each in named), (name, other, error)
                refused.add(name)
                continue
            theirs[str(reader.find(tmp_path / f"{folder.name}-ours"))] = name, other, logits
    assert len(theirs) > 10
    program = str(Path(__file__).with_name("logits.py"))
    run = start(1, program, str(tmp_path / "out.pt"), *map(str, TOKENS), "--", *theirs)
    assert run.code == 0, run.output
    ours = torch.load(tmp_path / "out.pt")
    wrong = {
        f"{name}={other}": float(apart)
        for folder, (name, other, logits) in theirs.items()
        if (apart := (logits - ours[folder][:, :, : logits.shape[-1]]).abs().max()) > 2e-5
    }
    assert refused
    assert wrong == {}
