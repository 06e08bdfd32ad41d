"""Gradients of our layers beside eager ones: `python3 -m bench.gpu.gradients [experts]`.

For one GPU, with Megatron-Core and Triton: GPT-2's layers in Triton, or a mixture of experts as
grouped products. Both are bf16, and compared with those of the same model
in fp32, after one step of 8192 tokens, of which few are frequent as in text, without dropout. Ours
are written to their places, by hand and then by a CUDA graph that is replayed. A parameter of ours
that is further from fp32's than FURTHER times eager's ends it with exit code 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from launcher.agent import compat
from launcher.trainer.fast import memsets
from launcher.trainer.gpt import arguments as command_line

SIZES = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 "
    "--vocab-size 50257 --micro-batch-size 16 --train-iters 1 --lr 1e-4 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --use-cpu-initialization"
).split()
EXPERTS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 "
    "--seq-length 2048 --vocab-size 32000 --micro-batch-size 4 --train-iters 1 --lr 1e-4 "
    "--mock-data --hidden-dropout 0 --attention-dropout 0 --use-cpu-initialization --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 2816 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-shared-expert-intermediate-size 512"
).split()
FURTHER, STEPS = 1.5, 3


def distances(exact: Any, gradients: dict[str, Any]) -> dict[str, float]:
    """How far gradients are from those of `exact`, by parameters' names; those' norms are 1."""
    return {
        name: float((gradients[name].float() - of.grad).norm() / of.grad.norm())
        for name, of in exact.named_parameters()
    }


def ways(half: Any, exact: Any, loss: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Each way's name, and the distances of its gradients."""
    import torch

    from launcher.trainer.fast import compiled
    from launcher.trainer.gpt import model

    vocabulary = len(exact.embedding.word_embeddings.weight)
    for way in ("eager", "ours", "ours by a graph"):
        kind = model.PLAIN if way == "eager" else compiled.KIND
        gpt = model.build(half, vocabulary, 0, kind)
        if kind is compiled.KIND:
            gpt.compile_training("layers" if half.num_experts else "kernels")
        gpt = gpt.cuda().bfloat16()
        for mine, given in zip(gpt.parameters(), exact.parameters(), strict=True):
            mine.data.copy_(given)
        placed = [] if way == "eager" or half.num_experts else gpt.parameters()
        places = {each: torch.full_like(each, torch.nan) for each in placed}

        def step(gpt: Any = gpt, places: Any = places) -> None:
            for each in gpt.parameters():
                each.grad = None
            loss(gpt).backward()
            if places:
                gpt.decoder.gradients.complete()

        if places:
            gpt.decoder.gradients.write(places.get)
        for _ in range(STEPS):
            step()
        if "graph" in way:
            torch.cuda.synchronize()
            graph, stream = memsets.graph(), torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
            way += f", {memsets.replace(graph)} memsets replaced"
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize()
        left = {name: places.get(each) for name, each in gpt.named_parameters()}
        made = {name: each.grad for name, each in gpt.named_parameters() if each.grad is not None}
        yield way, distances(exact, left | made)


def main() -> None:
    """Print each way's mean distance and its worst parameter's."""
    for name, value in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 29650}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    compat.prepare()
    import torch

    from launcher.trainer.fast import fast
    from launcher.trainer.gpt import model, training

    sizes = EXPERTS if "experts" in sys.argv[1:] else SIZES
    whole, half = command_line.parse(sizes), command_line.parse([*sizes, "--bf16"])
    whole.on_cpu = half.on_cpu = False
    training.initialise(half, command_line.layout(half, 1), graphed=True)
    vocabulary = model.vocabulary(whole, 1, {})
    exact = model.build(whole, vocabulary).cuda()
    for each in exact.parameters():
        each.data = each.data.bfloat16().float()
    shape = (whole.micro_batch_size, whole.seq_length)
    tokens = (torch.rand(shape, device="cuda") ** 4 * whole.vocab_size).long()
    places = torch.arange(shape[1], device="cuda").expand(shape)

    def loss(gpt: Any) -> torch.Tensor:
        found: torch.Tensor = gpt(tokens, places, None, labels=tokens.roll(-1, 1))
        return found.float().mean()

    eager, wrong = dict[str, float](), list[str]()
    with fast.attention():
        loss(exact).backward()
        for way, found in ways(half, exact, loss):
            eager = eager or found
            worst = max(found, key=lambda name: found[name] / eager[name])
            mean = sum(found.values()) / len(found)
            print(f"{way}: {mean:.5f} on average; {worst} {found[worst]:.5f}", flush=True)
            right = [found[name] <= FURTHER * eager[name] for name in found]  # which nan isn't
            wrong += [] if all(right) else [way]
    torch.distributed.destroy_process_group()
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
