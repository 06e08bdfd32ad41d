"""What CUDA is asked for is answered without any."""

from __future__ import annotations

from types import SimpleNamespace

from launcher.agent import cpu


def test_a_gpus_properties_are_those_of_a_machine_without_one() -> None:
    """From 0.13 on, pretrain_gpt.py asks for them where TP is above 1: a NameError in torch."""
    torch = SimpleNamespace(cuda=SimpleNamespace(nvtx=SimpleNamespace()))  # a stand-in
    cpu._redirect_device_queries(torch)
    found = torch.cuda.get_device_properties("cuda:0")
    assert (found.name, found.major, found.minor) == ("CPU", 0, 0)
    assert found.total_memory > 1 << 20
