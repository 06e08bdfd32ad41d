"""What `auto` comes to: by the GPUs that are there, and kept by a run that goes on."""

from __future__ import annotations

import pytest

from launcher.base.errors import UsageError
from launcher.runs.checks import auto
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.resolved import Resolved, resolve
from launcher.runs.records import record
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import parse_gpus
from tests.plans import HOST, load
from tests.runs.checks.conftest import GB, card


def settled(
    *sets: str, cards: tuple[Gpu, ...] = (), preset: str = "gpt2"
) -> tuple[dict[str, object], list[str]]:
    """The options of a preset on the GPUs, and what is told."""
    found, notes = decided(*load(preset, *sets), cards)
    return dict(found.values), notes


def decided(
    config: RunConfig, origin: Origin, cards: tuple[Gpu, ...]
) -> tuple[Resolved, list[str]]:
    """A run file on as many GPUs as there are cards, or as it asks for where none is known."""
    gpus = parse_gpus(str(len(cards) or config.gpus))
    return auto.decide(resolve(config, origin, ImageFacts(), HOST, gpus=gpus), cards)


H100, V100 = card(capability=(9, 0)), card(1, capability=(7, 0))
QUADRO = card(name="Quadro RTX 8000", total=48 * GB, capability=(7, 5))


@pytest.mark.parametrize(
    ("preset", "sets", "cards", "precision", "note"),
    [
        ("gpt2", (), (V100,), "fp16", f"auto is fp16, by {V100.name}"),
        ("gpt2", (), (card(capability=(8, 0)),), "bf16", f"auto is bf16, by {H100.name}"),
        ("gpt2", (), (H100,), "bf16", f"auto is bf16, by {H100.name}"),
        ("gpt2", ("gpus=2",), (H100, V100), "fp16", "auto is fp16"),  # the older one decides
        ("gpt2", (), (), "fp16", "auto is fp16, which "),
        ("llama3.2-1b", (), (), "fp16", "auto is fp16, which "),
        # As a cluster's job it got fp16, on GPUs that all have bf16: no older one holds it.
        ("llama3-8b", (), (), "bf16", "auto is bf16, which "),
        ("gpt3-175b", (), (), "bf16", "auto is bf16, which "),
        ("llama3.2-1b", (), (QUADRO,) * 8, "fp16", "auto is fp16"),  # though it is a large one
        ("gpt2", ("training.fp16=true",), (H100,), "fp16", "auto is fp16, which the run file sets"),
        ("gpt2", ("training.bf16=true",), (), "bf16", "auto is bf16, which the run file sets"),
        ("gpt2", ("gpus=0",), (), "", None),
    ],
)
def test_the_precision_is_by_the_gpus(
    preset: str, sets: tuple[str, ...], cards: tuple[Gpu, ...], precision: str, note: str | None
) -> None:
    options, notes = settled(*sets, preset=preset, cards=cards)
    assert {"fp16", "bf16"} & options.keys() == ({precision} if precision else set())
    assert notes == [] if note is None else note in notes[0]


@pytest.mark.parametrize("given", ["hybrid", "e4m3"])
def test_fp8_is_bf16_with_products_in_a_format_of_it(given: str) -> None:
    """The format that the run file gives was written over."""
    sets = [f"megatron_args.fp8_format={given}"] if given != "hybrid" else []
    options, notes = settled("training.precision=fp8", *sets, cards=(card(capability=(9, 0)),))
    assert (options["bf16"], options["fp8_format"]) == (True, given)
    assert "fp16" not in options
    assert notes == []


def test_two_precisions_are_refused() -> None:
    with pytest.raises(UsageError, match="precision is fp32 and bf16 is set"):
        settled("training.bf16=true", "training.precision=fp32")


LONG = ("model.seq_length=4096", "model.max_position_embeddings=4096")


@pytest.mark.parametrize(
    ("preset", "sets", "cards", "size", "note"),
    [
        ("gpt2", (), (card(total=80 * GB),), 16, "training.precision: auto is "),
        ("gpt2", (), (card(total=6 * GB),), 4, "auto is 4: 16 needs about 8.1 GB"),
        ("llama3.2-1b", (), (QUADRO,) * 8, 1, ""),
        # On a cluster the largest was taken, and found not to fit once the job had waited.
        ("gpt2", (), (), 16, ""),
        ("gpt2", LONG, (), 4, "aren't known here, but have at least 16.0"),
        # It was said to be chosen for GPUs of 16 GB, on which it doesn't fit.
        ("llama3.2-1b", (), (), 1, "auto is 1: the smallest, which needs about 40.4 GB"),
    ],
)
def test_the_micro_batch_is_by_the_gpus_or_fits_on_small_ones(
    preset: str, sets: tuple[str, ...], cards: tuple[Gpu, ...], size: int, note: str
) -> None:
    options, notes = settled(*sets, preset=preset, cards=cards)
    assert options["micro_batch_size"] == size
    assert note in notes[-1]


def test_what_is_kept_of_a_run_is_what_it_was_settled_to() -> None:
    """A run that goes on where no GPU is seen, or an older one, would else take another one."""
    config, origin = load("gpt2")
    found = decided(config, origin, (card(total=6 * GB),))[0].config
    kept = record.without_secrets(found, exclude_unset=True)[0]
    again, notes = decided(RunConfig.model_validate(kept), origin, ())
    assert (again.config, notes) == (found, [])
    training = again.config.training
    assert (training.bf16, training.micro_batch_size) == (True, 4)
