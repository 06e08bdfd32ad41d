"""The layers' arithmetic in bf16, beside Megatron's own functions in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.megatron

SMALL = 2.0**-10
"""A bias below half of the last place of a number above 0.5 in bf16, as after a few steps."""


@pytest.fixture
def layers() -> Any:
    """The module, and torch."""
    return pytest.importorskip("launcher.trainer.gpt.layers")


def numbers(torch: Any, seed: int) -> Any:
    """[s, b, h] of magnitudes between 0.5 and 1."""
    drawn = torch.rand(64, 4, 32, generator=torch.Generator().manual_seed(seed)) / 2 + 0.5
    return drawn.bfloat16()


def test_a_small_bias_is_not_lost_beside_a_layers_output(layers: Any) -> None:
    """Added in bf16 it vanished: on a GPU, losses parted from upstream's at the third step."""
    torch = layers.torch
    x, residual, bias = numbers(torch, 1), -numbers(torch, 2) / 7, torch.full((32,), SMALL)
    x.requires_grad_()
    half = bias.bfloat16().requires_grad_()
    assert torch.equal(x + half, x)
    plain = layers.bias_dropout_add(True, False)
    made = plain((x, half), residual, 0.0)
    exact = (residual.float() + (x.float() + bias)).bfloat16()
    assert torch.equal(made, exact)
    gained = made.float() - plain((x, None), residual, 0.0).float()
    assert gained.mean().item() == pytest.approx(SMALL, rel=0.1)
    made.float().sum().backward()
    assert torch.equal(half.grad, torch.full_like(half, 64 * 4))
    dropped = plain((x, half), residual, 0.5).float() - residual.float()
    assert 0.4 < (dropped.abs() < 1e-2).float().mean().item() < 0.6


@pytest.mark.parametrize("name", ["gelu", "squared_relu", "gated"])
def test_a_small_bias_is_not_lost_before_an_activation(layers: Any, name: str) -> None:
    """Values and gradients are fp32's, rounded once."""
    torch = layers.torch
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu

    def gated(both: Any) -> Any:
        gate, linear = both.chunk(2, dim=-1)
        return silu(gate) * linear

    activation = {"gelu": gelu, "gated": gated}.get(name, layers.squared_relu)
    x, bias = numbers(torch, 3), torch.full((32,), SMALL).bfloat16()
    config = SimpleNamespace(gated_linear_unit=name == "gated")
    function = silu if config.gated_linear_unit else activation
    mlp = SimpleNamespace(config=config, activation_func=function)
    for given in ([x, bias], [x]):
        mine, wide = (
            [each.to(kind, copy=True).requires_grad_() for each in given]
            for kind in (x.dtype, torch.float)
        )
        made = layers.WideMLP._activated(mlp, mine[0], *(mine[1:] or [None]))
        exact = activation(sum(wide))
        assert torch.equal(made, exact.bfloat16())
        made.sum().backward()
        exact.sum().backward()
        for half, whole in zip(mine, wide, strict=True):
            assert torch.equal(half.grad, whole.grad.bfloat16())


@pytest.mark.parametrize("old", [False, True])
def test_rms_norm_is_rounded_once(layers: Any, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was rounded before its weight too: a quarter of its values were others than upstream's."""
    torch = layers.torch
    if old:
        monkeypatch.delattr(torch.nn.functional, "rms_norm")
    norm = layers.RMSNorm(SimpleNamespace(sequence_parallel=False), 32)
    norm.weight.data = numbers(torch, 5)[0, 0]
    x, weight = numbers(torch, 6), norm.weight.detach().double()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    assert (norm(x) != exact.bfloat16()).float().mean().item() < 0.01
