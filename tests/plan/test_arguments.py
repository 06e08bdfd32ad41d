"""The table of options and their values, and what is refused by it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from launcher.errors import UsageError
from launcher.plan import arguments
from launcher.plan.arguments import Option
from launcher.plan.image import Facts
from launcher.plan.plan import Plan
from launcher.train.gpt.arguments import parser

Planner = Callable[..., Plan]
UPSTREAM = (
    "name: a\nimage: cpu\ngpus: 1\nprogram: pretrain_gpt.py\ndata: {mock: true, vocab_size: 100}\n"
    "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64,"
    " max_position_embeddings: 64}\n"
    "training: {micro_batch_size: 1, train_iters: 10, lr: 0.1}\n"
)


def refusal(plan: Planner, *args: object, **more: object) -> str:
    with pytest.raises(UsageError) as caught:
        plan(*args, **more)
    return str(caught.value)


def test_our_programs_options_are_those_of_its_parser() -> None:
    actions = parser()._actions
    options = {name for action in actions for name in action.option_strings}
    own = {name for name in options if name.startswith("--")} - {"--help"}
    assert arguments.table().gpt == own
    required = {name for action in actions if action.required for name in action.option_strings}
    assert set(arguments.table().gpt_required) == required


def test_what_our_program_needs_is_missed_by_its_key(plan: Planner) -> None:
    text = "name: a\nimage: cpu\ngpus: 0\ndata: {mock: true}\n"
    told = refusal(plan, text, "training.lr=1.0")
    assert "the program gpt needs " in told
    assert "model.num_layers" in told
    assert "data.vocab_size" in told
    assert "training.lr" not in told


@pytest.mark.parametrize("release", ["0.9.0", "0.12.3", "0.16.1", "0.19.0"])
def test_what_megatrons_program_needs_is_missed_by_its_key(plan: Planner, release: str) -> None:
    facts = Facts(release, True)
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


@pytest.mark.parametrize(
    ("sets", "rest"),
    [
        (("training.train_iters=null", "training.train_samples=100"), ()),
        (("model.num_layers=null", "megatron_args.encoder_num_layers=2"), ()),
        (("model.num_layers=null",), ("--encoder-num-layers", "2")),
        (("model.num_layers=null",), ("--encoder-num-layers=2",)),
        (("model={}",), ("--use-checkpoint-args",)),
        (("model={}", "training={}", "megatron_args.yaml_cfg=/x.yaml"), ()),
        (("training={micro_batch_size: 1}", "megatron_args.skip_train=true"), ()),
        (("checkpoint.save=/x", "megatron_args.persistent_save_interval=5"), ()),
    ],
)
def test_what_megatrons_program_needs_may_be_given_otherwise(
    plan: Planner, sets: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    assert plan(UPSTREAM, *sets, rest=rest)


def test_what_a_checkpoint_does_not_know_is_still_missed(plan: Planner) -> None:
    told = refusal(plan, UPSTREAM, "model={}", "training={}", rest=("--use-checkpoint-args",))
    assert "training.micro_batch_size" in told
    assert "model." not in told


def test_other_programs_are_not_asked_for_what_megatrons_needs(plan: Planner) -> None:
    assert plan(UPSTREAM.replace("pretrain_gpt", "pretrain_vision"), "model={}")


def test_all_that_is_wrong_is_told_at_once(plan: Planner) -> None:
    sets = ("data={}", "parallel.tensor_model_parallel_size=3", "training.lr=null")
    more = ("megatron_args.nothing=1", "megatron_args.num-layers=2", "model.transformer_impl=x")
    told = refusal(plan, UPSTREAM, *sets, *more, facts=Facts("0.9.0", False))
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


def test_the_table_is_sorted_and_compact() -> None:
    data = json.loads(arguments.DATA.read_text(encoding="utf-8"))
    assert list(data["megatron"]) == sorted(data["megatron"])
    assert data["gpt"] == sorted(data["gpt"])
    assert arguments.DATA.stat().st_size < 120_000


@pytest.mark.parametrize(
    ("release", "count"),
    [("0.9.0", 347), ("0.11.0", 407), ("0.12.3", 456), ("0.16.1", 700), ("0.19.0", 868)],
)
def test_releases_have_as_many_options_as_their_own_parsers(release: str, count: int) -> None:
    assert len(arguments.table().options_of(release) or ()) == count


@pytest.mark.parametrize(
    ("option", "release", "there"),
    [
        ("--attention-backend", "0.10.0", False),
        ("--attention-backend", "0.11.0", True),
        ("--num-layers", "0.9.0", True),
        ("--num-layers", "0.19.0", True),  # from a dataclass by then
        ("--disable-gloo-process-groups", "0.19.0", True),
    ],
)
def test_when_options_came(option: str, release: str, there: bool) -> None:
    assert (option in (arguments.table().options_of(release) or ())) == there


def test_a_release_that_is_not_in_the_table_is_not_checked(plan: Planner) -> None:
    assert arguments.table().options_of("0.99.0") is None
    planned = plan(UPSTREAM, "megatron_args.brand_new=1", facts=Facts("0.99.0", True))
    assert planned.argv[-2:] == ("--brand-new", "1")


def test_an_option_of_a_later_release_is_refused_with_when_it_came(plan: Planner) -> None:
    told = refusal(plan, UPSTREAM, "model.attention_backend=auto", facts=Facts("0.9.0", True))
    assert told.startswith(
        "--set model.attention_backend=auto: model.attention_backend: "
        "Megatron 0.9.0 has no --attention-backend; Megatron has it from 0.11 on\n"
        "  Did you mean --"
    )
    assert plan(UPSTREAM, "model.attention_backend=auto", facts=Facts("0.11.0", True))


def test_a_mistyped_option_is_refused_with_the_nearest(plan: Planner) -> None:
    facts = Facts("0.9.0", True)
    told = refusal(plan, UPSTREAM, "megatron_args.use_flash_atn=true", facts=facts)
    assert "megatron_args.use_flash_atn: Megatron 0.9.0 has no --use-flash-atn" in told
    assert "Did you mean --use-flash-attn" in told


def test_the_rest_is_checked_too(plan: Planner) -> None:
    told = refusal(plan, UPSTREAM, rest=("--recompute-granularty=full",))
    assert "-- --recompute-granularty=full: " in told
    assert "--recompute-granularity" in told
    rest = ("--recompute-granularity=selective",)
    assert plan(UPSTREAM, rest=rest).argv[-1].endswith("=selective")


def test_what_has_a_key_must_stand_there(plan: Planner) -> None:
    told = refusal(plan, UPSTREAM, rest=("--tensor-model-parallel-size", "2"))
    assert "--set parallel.tensor_model_parallel_size=" in told
    assert "model.num_layers" in refusal(plan, UPSTREAM, "megatron_args.num-layers=2")


def test_our_program_says_what_it_does_not_take(plan: Planner) -> None:
    told = refusal(plan, "gpt2-tiny", "data.vocab_file=/v.json")
    assert "the program gpt takes no --vocab-file" in told
    assert "program: pretrain_gpt.py" in told


def test_a_script_of_the_host_parses_what_it_likes(plan: Planner) -> None:
    text = UPSTREAM.replace("pretrain_gpt.py", "./own.py")
    planned = plan(text, "megatron_args.anything=1", rest=("--num-layers", "2"))
    assert planned.argv[-4:] == ("--anything", "1", "--num-layers", "2")


def test_another_pretrain_script_may_have_options_of_its_own(plan: Planner) -> None:
    text = UPSTREAM.replace("pretrain_gpt", "pretrain_own")
    assert plan(text, "megatron_args.own_option=1")
    facts = Facts("0.9.0", True)
    assert "from 0.11 on" in refusal(plan, text, "model.attention_backend=auto", facts=facts)


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
        assert plan(UPSTREAM, given, facts=Facts(release, "git")).argv[-1] == spelled


def test_every_option_has_a_kind() -> None:
    for release in arguments.table().releases:
        kinds = arguments.table().kinds_of(f"{release}.0")
        assert kinds.keys() == arguments.table().options_of(f"{release}.0")
    assert arguments.table().kinds_of(None).keys() == arguments.table().gpt


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("--eod-mask-loss", ("5",), "takes no value, and is given 5"),
        ("--recompute-num-layers", ("two",), "takes a whole number, and is given two"),
        ("--recompute-num-layers", ("1.5",), "takes a whole number, and is given 1.5"),
        ("--recompute-num-layers", (), "takes a whole number, and is given none"),
        ("--recompute-num-layers", ("1", "2"), "takes a whole number, and is given 1 2"),
        ("--rotary-percent", ("half",), "takes a number, and is given half"),
        ("--data-path", ("--x",), "can't be given --x, which looks like an option"),
        ("--num-layers", ("-1",), ""),
        ("--data-path", (), ""),
        ("--rampup-batch-size", ("1", "2", "3"), ""),
        ("--lr", ("1e-4",), ""),
    ],
)
def test_values_are_of_the_options_type_and_number(
    name: str, values: tuple[str, ...], told: str
) -> None:
    given = [Option(name, list(values) or True, "run.yaml:3: megatron_args.x")]
    if told:
        with pytest.raises(UsageError, match=f"x: {name} of Megatron 0.9.0 {told}"):
            arguments.check_values(given, "0.9.0")
    else:
        arguments.check_values(given, "0.9.0")


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    with pytest.raises(UsageError, match="is given ") as caught:
        arguments.check_values([Option("--save-interval", "https://u:hunter2@h", "a")], None)
    assert "hunter2" not in str(caught.value)


def test_our_programs_choices_are_those_of_its_parser() -> None:
    assert arguments.table().gpt_choices == {
        action.option_strings[-1]: tuple(action.choices)
        for action in parser()._actions
        if action.choices
    }


def test_the_choices_are_of_options_that_there_are_and_sorted() -> None:
    data = json.loads(arguments.DATA.read_text(encoding="utf-8"))
    assert list(data["choices"]) == sorted(data["choices"])
    for release in data["releases"]:
        choices = arguments.table().choices_of(f"{release}.0")
        assert choices.keys() <= (arguments.table().options_of(release) or set())


@pytest.mark.parametrize(
    ("release", "option", "allowed"),
    [
        (None, "--lr-decay-style", ("constant", "linear", "cosine")),
        ("0.9.0", "--optimizer", ("adam", "sgd")),
        ("0.9.0", "--position-embedding-type", ("learned_absolute", "rope", "none")),
        ("0.9.0", "--attention-backend", None),
        ("0.12.3", "--attention-backend", ("flash", "fused", "unfused", "local", "auto")),
        ("0.19.0", "--attention-backend", ("flash", "fused", "unfused", "local", "auto")),
        ("0.19.0", "--normalization", ("LayerNorm", "RMSNorm")),
        ("0.99.0", "--optimizer", None),
    ],
)
def test_what_releases_take(release: str | None, option: str, allowed: object) -> None:
    assert arguments.table().choices_of(release).get(option) == allowed


def test_a_wrong_value_is_refused_with_place_nearest_and_all() -> None:
    wrong = Option("--normalization", "RMSNrom", "run.yaml:3: model.normalization")
    with pytest.raises(UsageError) as caught:
        arguments.check_values([wrong], "0.9.0")
    assert str(caught.value) == (
        "run.yaml:3: model.normalization: Megatron 0.9.0 takes no --normalization 'RMSNrom'\n"
        "  Did you mean 'RMSNorm'? Known: LayerNorm, RMSNorm"
    )
    with pytest.raises(UsageError, match="the program gpt takes no --lr-decay-style 'WSD'"):
        arguments.check_values([Option("--lr-decay-style", "WSD", "here")], None)


def test_an_option_of_two_lines_is_told_on_one() -> None:
    for check in (arguments.check_ours, lambda one: arguments.check_megatron(one, "0.9.0")):
        with pytest.raises(UsageError, match=r"run.yaml:2: a: .* no --a\\nb"):
            check({"--a\nb": "run.yaml:2: a"})


def test_right_values_and_options_without_choices_pass() -> None:
    options = [Option("--optimizer", "sgd", ""), Option("--data-path", "anything", "")]
    arguments.check_values([*options, Option("--fp16", True, "")], "0.9.0")
    arguments.check_values([Option("--optimizer", "new", "")], "0.99.0")


def test_words_are_options_with_their_values() -> None:
    words = ("left", "--a", "1", "2", "--b=x=y", "--c", "--api-key=z")
    assert arguments.given(words) == [
        Option("--a", ["1", "2"], "-- --a"),
        Option("--b", "x=y", "-- --b=x=y"),
        Option("--c", True, "-- --c"),
        Option("--api-key", "z", "-- --api-key=(hidden)"),
    ]


def test_what_any_release_takes_is_known_for_editors() -> None:
    assert "muon" in arguments.table().any_choices("--optimizer")
    assert arguments.table().any_choices("--data-path") == ()
