"""What is told first of a run that can't start: its file, then the engine and the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launcher.errors import EngineError, UsageError
from launcher.follow.assemble import assemble
from launcher.plan import source
from launcher.plan.image import Facts
from launcher.plan.plan import Stamp
from launcher.plan.source import Asked

Write = Callable[[str], str]
HEAD = "name: a\nimage: cpu\ngpus: {gpus}\n"
TINY = (
    "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64}\n"
    "training: {micro_batch_size: 1, train_iters: 10, lr: 0.1}\n"
    "data: {mock: true, vocab_size: 256}\n"
)


class Engine:
    """An engine with one image or without, or none at all."""

    contained = True
    every_node = False
    scheduled = False

    def __init__(self, facts: Facts | None, *, lost: bool = False, gpus: int | None = None) -> None:
        self.known = facts
        self.lost = lost
        self.gpus = gpus

    def facts(self, image: str) -> Facts | None:
        if self.lost:
            raise EngineError("no engine answers")
        return self.known

    def rootless(self) -> bool:
        return False

    def count_gpus(self) -> int | None:
        return self.gpus


NO_IMAGE = Engine(None)
NO_ENGINE = Engine(None, lost=True)
NO_GPUS = Engine(Facts("0.16.1", False))


def assembled(write: Write, text: str, engine: Engine) -> Any:
    config, origin = source.load(write(text), [])
    chosen: Any = engine
    return assemble(Asked(config, origin, "/"), chosen, Stamp("0a1b2c3d", ""))


@pytest.mark.parametrize("engine", [NO_IMAGE, NO_ENGINE])
def test_what_is_wrong_with_the_file_is_told_before_image_and_engine(
    write: Write, engine: Engine
) -> None:
    text = HEAD.format(gpus=2) + TINY + "parallel: {tensor_model_parallel_size: 3}\n"
    with pytest.raises(UsageError, match="2 processes aren't divisible by tensor 3"):
        assembled(write, text, engine)
    with pytest.raises(UsageError, match=r"no tag '24\.11'"):
        assembled(write, text.replace("cpu", '"24.11"'), engine)
    with pytest.raises(UsageError, match="takes no --attention-backend"):
        assembled(
            write,
            HEAD.format(gpus=0) + TINY.replace("{num", "{attention_backend: flash, num"),
            engine,
        )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (NO_IMAGE, "no image megatron:cpu"),
        (NO_ENGINE, "no engine answers"),
        (NO_GPUS, "no GPUs found"),
    ],
)
@pytest.mark.parametrize(
    "rest",
    [
        TINY + "parallel: {tensor_model_parallel_size: 4}\n",
        TINY + "nodes: {count: 2, rank: 0, master_addr: a}\n",
        "program: ./mine.py\n",
        'image: "24.10"\nprogram: examples/run_simple_mcore_train_loop.py\n',
    ],
)
def test_of_a_right_file_on_all_gpus_what_is_missing_is_told(
    write: Write, rest: str, engine: Engine, said: str
) -> None:
    text = HEAD.format(gpus="all") + rest
    text = text.replace("image: cpu\n", "") if "image" in rest else text
    with pytest.raises(EngineError, match=said.replace("cpu", r"(cpu|24\.10)")):
        assembled(write, text, engine)


def test_with_an_image_the_plan_is_made_of_what_is_there(write: Write) -> None:
    made = assembled(write, HEAD.format(gpus="all") + TINY, Engine(Facts("0.16.1", False), gpus=3))
    assert made.plan.processes_per_node == 3
