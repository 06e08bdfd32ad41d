"""The table of options and their values, and what is refused by it."""

from __future__ import annotations

import pytest

from launcher.base.errors import UsageError
from launcher.runs.plan import program_options
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.program_options import Option
from tests.plans import Planner, refusal
from tests.tables import table

UPSTREAM = (
    "name: a\nimage: cpu\ngpus: 1\nprogram: pretrain_gpt.py\ndata: {mock: true, vocab_size: 100}\n"
    "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64,"
    " max_position_embeddings: 64}\n"
    "training: {micro_batch_size: 1, train_iters: 10, lr: 0.1}\n"
)


def test_what_our_program_needs_is_missed_by_its_key(plan: Planner) -> None:
    text = "name: a\nimage: cpu\ngpus: 0\ndata: {mock: true}\n"
    told = refusal(plan, text, "training.lr=1.0")
    assert "the program gpt needs " in told
    assert "model.num_layers" in told
    assert "data.vocab_size" in told
    assert "training.lr" not in told


@pytest.mark.parametrize("release", ["0.9.0", "0.12.3", "0.16.1", "0.19.0"])
def test_what_megatrons_program_needs_is_missed_by_its_key(plan: Planner, release: str) -> None:
    facts = ImageFacts(release, True)
    told = refusal(plan, UPSTREAM, "model.num_layers=null", "training.lr=null", facts=facts)
    assert told.splitlines() == [
        f"--set model.num_layers=null: model.num_layers must be given: Megatron {release} ends "
        "without --num-layers",
        f"--set training.lr=null: training.lr must be given: Megatron {release} ends without --lr",
    ]
    told = refusal(plan, UPSTREAM, "training={}", "checkpoint.save=/x", facts=facts)
    for key in ("micro_batch_size", "train_iters or training.train_samples", "lr"):
        assert f"training.{key} must be given" in told
    assert "checkpoint.save_interval must be given" in told


@table("sets", "rest")
def test_what_megatrons_program_needs_may_be_given_otherwise(
    plan: Planner, sets: list[str], rest: list[str]
) -> None:
    assert plan(UPSTREAM, *sets, rest=rest)
    told = refusal(plan, UPSTREAM, "model={}", "training={}", rest=("--use-checkpoint-args",))
    assert "training.micro_batch_size" in told  # which no checkpoint knows
    assert "model." not in told


def test_all_that_is_wrong_is_told_at_once(plan: Planner) -> None:
    sets = ("data={}", "parallel.tensor_model_parallel_size=3", "training.lr=null")
    more = ("megatron_args.nothing=1", "megatron_args.num-layers=2", "model.transformer_impl=x")
    told = refusal(plan, UPSTREAM, *sets, *more, facts=ImageFacts("0.9.0", False))
    for one in (
        "pretrain_gpt.py isn't there",
        "no data to train on",
        "1 processes aren't divisible",
        "4 heads",
        "lr must be given",
        "has no --nothing",
        "--num-layers has a key of its own",
        "takes no --transformer-impl 'x'",
    ):
        assert one in told


@pytest.mark.parametrize(
    ("release", "count"),
    [("0.9.0", 347), ("0.11.0", 407), ("0.12.3", 456), ("0.16.1", 700), ("0.19.0", 868)],
)
def test_releases_have_as_many_options_as_their_own_parsers(release: str, count: int) -> None:
    table = program_options.table()
    options = table.options_of(release) or set()
    assert len(options) == count
    assert table.kinds_of(release).keys() == options
    assert table.choices_of(release).keys() <= options
    assert table.kinds_of(None).keys() == table.gpt.keys()
    assert "muon" in table.any_choices("--optimizer")  # what any release takes, for editors


def test_an_option_of_a_later_release_is_refused_with_when_it_came(plan: Planner) -> None:
    told = refusal(plan, UPSTREAM, "model.attention_backend=auto", facts=ImageFacts("0.9.0", True))
    assert told.startswith(
        "--set model.attention_backend=auto: model.attention_backend: "
        "Megatron 0.9.0 has no --attention-backend; Megatron has it from 0.11 on\n"
        "  Did you mean --"
    )
    assert plan(UPSTREAM, "model.attention_backend=auto", facts=ImageFacts("0.11.0", True))


@pytest.mark.parametrize(
    ("text", "sets", "rest", "said"),
    [
        (UPSTREAM, "megatron_args.use_flash_atn=true", (), "Did you mean --use-flash-attn"),
        (UPSTREAM, "megatron_args.num-layers=2", (), "model.num_layers"),
        (UPSTREAM, "gpus=1", ("--recompute-granularty=full",), "-- --recompute-granularty=full: "),
        (
            *(UPSTREAM, "gpus=1", ("--tensor-model-parallel-size", "2")),
            "--set parallel.tensor_model_parallel_size=",
        ),
        ("gpt2-tiny", "data.vocab_file=/v.json", (), "the program gpt takes no --vocab-file"),
        (UPSTREAM, 'megatron_args={"a\\nb": 1}', (), r"no --a\nb"),
    ],
)
def test_an_option_that_is_none_is_refused(
    plan: Planner, text: str, sets: str, rest: tuple[str, ...], said: str
) -> None:
    assert said in refusal(plan, text, sets, rest=rest, facts=ImageFacts("0.9.0", True))


def test_what_is_not_known_is_not_checked(plan: Planner) -> None:
    """Another release, a script of the host's, and options of other scripts' own."""
    assert program_options.table().options_of("0.99.0") is None
    planned = plan(UPSTREAM, "megatron_args.brand_new=1", facts=ImageFacts("0.99.0", True))
    assert planned.argv[-2:] == ("--brand-new", "1")
    own = UPSTREAM.replace("pretrain_gpt.py", "./own.py")
    planned = plan(own, "megatron_args.anything=1", rest=("--num-layers", "2"))
    assert planned.argv[-4:] == ("--anything", "1", "--num-layers", "2")
    other = UPSTREAM.replace("pretrain_gpt", "pretrain_own")
    assert plan(other, "megatron_args.own_option=1")
    facts = ImageFacts("0.9.0", True)
    assert "from 0.11 on" in refusal(plan, other, "model.attention_backend=auto", facts=facts)


@pytest.mark.parametrize(
    ("value", "rendered"),
    [
        ("true", ("--x",)),
        ("false", ()),
        ("null", ()),
        ("3", ("--x", "3")),
        ("1.5", ("--x", "1.5")),
        ("a b", ("--x", "a b")),
        ("[1, a]", ("--x", "1", "a")),
        ("'$(id)'", ("--x", "$(id)")),
    ],
)
def test_passed_through_values(plan: Planner, value: str, rendered: tuple[str, ...]) -> None:
    text = "name: a\nimage: cpu\ngpus: 0\nprogram: ./own.py\n"
    argv = plan(text, f"megatron_args.x={value}").argv
    assert argv[argv.index("/program/own.py") + 1 :] == rendered


def test_a_name_is_spelled_as_megatron_spells_it(plan: Planner) -> None:
    for release, spelled in (
        ("0.9.0", "--override-opt_param-scheduler"),
        ("0.16.1", "--override-opt-param-scheduler"),
    ):
        given = "megatron_args.override_opt_param_scheduler=true"
        assert plan(UPSTREAM, given, facts=ImageFacts(release, "git")).argv[-1] == spelled


@table("name", "values", "told")
def test_values_are_of_the_options_type_and_number(name: str, values: list[str], told: str) -> None:
    given = [Option(name, list(values) or True, "run.yaml:3: megatron_args.x")]
    if told:
        with pytest.raises(UsageError, match=f"x: {name} of Megatron 0.9.0 {told}"):
            program_options.check_values(given, "0.9.0")
    else:
        program_options.check_values(given, "0.9.0")


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    with pytest.raises(UsageError, match="is given ") as caught:
        program_options.check_values([Option("--save-interval", "https://u:hunter2@h", "a")], None)
    assert "hunter2" not in str(caught.value)


def test_a_wrong_value_is_refused_with_place_nearest_and_all() -> None:
    wrong = Option("--normalization", "RMSNrom", "run.yaml:3: model.normalization")
    with pytest.raises(UsageError) as caught:
        program_options.check_values([wrong], "0.9.0")
    assert str(caught.value) == (
        "run.yaml:3: model.normalization: Megatron 0.9.0 takes no --normalization 'RMSNrom'\n"
        "  Did you mean 'RMSNorm'? Known: LayerNorm, RMSNorm"
    )
    with pytest.raises(UsageError, match="the program gpt takes no --lr-decay-style 'WSD'"):
        program_options.check_values([Option("--lr-decay-style", "WSD", "here")], None)


def test_words_are_options_with_their_values() -> None:
    words = ("left", "--a", "1", "2", "--b=x=y", "--c", "--api-key=z")
    assert program_options.given(words) == [
        Option("--a", ["1", "2"], "-- --a"),
        Option("--b", "x=y", "-- --b=x=y"),
        Option("--c", True, "-- --c"),
        Option("--api-key", "z", "-- --api-key=(hidden)"),
    ]
