"""The Python packages that options import: known before the start, in the words of the runner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from launcher.agent import series
from launcher.base.errors import PreflightError
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.plan import needs
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.needs import NeedRule
from launcher.runs.plan.program import upstreams
from launcher.runs.plan.program_options import table as arguments
from launcher.runs.plan.resolved import Resolved, resolve
from launcher.runs.runfile import origins
from tests.plans import HOST, MINIMAL, Planner

RULES = [
    pytest.param(rule, value, id=f"{rule.option or rule.programs[0]} {value}")
    for rule in needs.table()
    for value in rule.values or ([True] if rule.option else rule.programs)
]


LAST = f"{series.known()[-1]}.0"


def run_of(
    write: Callable[[str], str],
    rule: NeedRule,
    value: object,
    packages: set[str] | None,
    **more: object,
) -> Resolved:
    """The run file that needs a rule's modules, on an image with these packages."""
    given: dict[str, object] = {
        name: text or True for name, _, text in (one.partition("=") for one in rule.beside)
    }
    program = "pretrain_gpt.py" if rule.option else str(value)
    if rule.option:
        given |= {rule.option: value}
    text: dict[str, object] = {
        "name": "a",
        "image": {"tag": "24.10"},
        "gpus": 1,
        "data": {"mock": True},
    }
    text |= {"program": program, "megatron_args": given, **more}
    config, origin = origins.load(write(yaml.safe_dump(text)), [])
    known = None if packages is None else frozenset(packages)
    release = [one for one in series.known() if not rule.fact or series.has(one, rule.fact)][-1]
    return resolve(config, origin, ImageFacts(f"{release}.0", True, packages=known), HOST)


def test_a_row_has_texts_alone() -> None:
    """`values: [8]` or `values: muon` would need no package, and say nothing."""
    for rule in needs.table():
        several = [rule.values, rule.unless, rule.beside, rule.programs]
        assert all(isinstance(each, list | tuple) for each in several)
        words = [one for each in several for one in each]
        words += [rule.option, rule.fact, rule.extras, rule.source, *rule.modules]
        assert all(isinstance(one, str) for one in [*words, *rule.modules.values()])
        assert rule.modules
        assert rule.option or rule.programs


def test_our_program_has_products_in_fp8_of_its_own(write: Callable[[str], str]) -> None:
    """It was refused on images without Transformer Engine, as upstream's programs are."""
    rule = NeedRule(programs=["gpt"], modules={}, source="none")
    asked = {"training": {"precision": "fp8"}}
    assert needs.needed(run_of(write, rule, "gpt", set(), **asked), contained=True) == []


@pytest.mark.parametrize(("rule", "value"), RULES)
def test_a_run_alone_without_what_its_options_import_is_refused_with_the_cure(
    write: Callable[[str], str], rule: NeedRule, value: object
) -> None:
    """Each of these passed a dry run, and ended once all its ranks had started."""
    run = run_of(write, rule, value, set())
    wanted = needs.needed(run, contained=True)
    assert {need.module for need in wanted} == {*rule.modules}
    with pytest.raises(PreflightError) as caught:
        needs.check_needs(wanted, run, "megatron:24.10")
    for package in rule.modules.values():
        assert f"needs the Python package {package}, which isn't in megatron:24.10" in str(
            caught.value
        )
    extras = rule.extras or " ".join(rule.modules.values())
    assert f'make image TAG=24.10 EXTRAS="{extras}"' in caught.value.remedy
    said = needs.for_runner(wanted)
    for module, package in rule.modules.items():
        assert f"needs the Python package {package}. make image TAG=24.10" in said[module]
    local = needs.needed(run, contained=False)
    assert all(need.mend.startswith("python3 -m pip install ") for need in local)
    for packages in ({*rule.modules.values()}, None):  # with them, or where nothing is known
        run = run_of(write, rule, value, packages)
        needs.check_needs(needs.needed(run, contained=True), run, "megatron:24.10")
    run = run_of(write, rule, value, set(), env={"PYTHONPATH": "/mine"})
    needs.check_needs(needs.needed(run, contained=True), run, "megatron:24.10")


@pytest.mark.parametrize(
    ("option", "value", "more", "release"),
    [
        ("tokenizer_type", "NullTokenizer", {}, "0.19.0"),
        ("moe_flex_dispatcher_backend", "ncclep", {"moe_token_dispatcher_type": "flex"}, "0.19.0"),
        # Upstream ignores it beside another dispatcher, and such a run was refused.
        ("moe_flex_dispatcher_backend", "deepep", {"moe_token_dispatcher_type": "alltoall"}, LAST),
        ("moe_token_dispatcher_type", "flex", {}, "0.15.3"),
        ("async_strategy", "mcore", {"async_save": True}, "0.19.0"),
        ("async_strategy", "nvrx", {}, "0.19.0"),
        ("async_save", True, {}, "0.19.0"),  # it does that by a worker that stays, or not at all
        ("async_save", True, {"use_persistent_ckpt_worker": True}, "0.16.1"),
        ("transformer_impl", "local", {}, "0.19.0"),
        ("num_experts", 8, {}, "0.12.3"),  # until then the product is torch's
        ("num_experts", 8, {}, "0.17.1"),
    ],
)
def test_what_imports_nothing_more_needs_nothing(
    write: Callable[[str], str], option: str, value: object, more: dict[str, object], release: str
) -> None:
    rule = NeedRule(option=option, modules={}, source="none")
    run = run_of(write, rule, value, set(), megatron_args={option: value, **more})
    run = replace(run, facts=replace(run.facts, release=release))
    assert needs.needed(run, contained=True) == []


def test_the_table_is_of_options_programs_sets_and_facts_that_are_there() -> None:
    """A name that is written wrong would be a check that never refuses, or a cure that fails."""
    sets = load_matrix().extras
    known = {name for one in series.known() for name in arguments().options_of(one) or ()}
    for rule in needs.table():
        assert rule.option or rule.programs
        assert {*rule.programs} <= {*upstreams()}
        beside = [one.partition("=")[0] for one in rule.beside]
        for name in (rule.option, *rule.unless, *beside):
            assert name in ("", "gpt") or f"--{name.replace('_', '-')}" in known
        if rule.extras:
            own = sets[rule.extras]
            compiled = [load_matrix().extensions[one].package for one in own.extensions]
            packages = {re.split(r"[<>=\[]", one)[0] for one in own.packages} | {*compiled}
            assert packages >= {*rule.modules.values()}


def test_experts_without_transformer_engine_are_refused_of_upstreams_program_alone(
    plan: Planner,
) -> None:
    """Its router ended at the first step, by NameError: te_general_gemm; ours brings a product."""
    experts = ("megatron_args.num_experts=8", "model.disable_bias_linear=true")
    facts = ImageFacts("0.16.1", True, packages=frozenset())
    with pytest.raises(PreflightError, match=r"num_experts: 8 needs .* transformer-engine"):
        plan("gpt2", "program=pretrain_gpt.py", *experts, facts=facts)
    assert plan("gpt2", "program=gpt", *experts, facts=facts)


OURS = ("program=gpt", "logging.tensorboard_dir=/t")


def test_our_program_needs_what_its_writers_do_and_a_script_may_parse_what_it_likes(
    plan: Planner,
) -> None:
    facts = ImageFacts("0.16.1", True, packages=frozenset())
    with pytest.raises(PreflightError, match=r"logging\.tensorboard_dir.* package tensorboard"):
        plan("gpt2-tiny", *OURS, facts=facts)
    made = plan("gpt2-tiny", *OURS, facts=replace(facts, packages=frozenset({"tensorboard"})))
    assert (
        "logging.tensorboard_dir"
        in json.loads(dict(made.env)["LAUNCHER_NEEDS"] or "")["tensorboard"]
    )
    assert "LAUNCHER_NEEDS" not in dict(plan("gpt2-tiny", facts=facts).env)
    script = f"{MINIMAL}program: ./mine.py\nmegatron_args: {{tokenizer_type: TikTokenizer}}\n"
    assert "LAUNCHER_NEEDS" not in dict(plan(script, facts=facts).env)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"name": "a/b:1", "megatron": "0.16.1"}, "FROM a/b:1, RUN pip install tiktoken"),
        (
            {"tag": "24.10", "megatron": "0.16.1", "extras": ["wandb"]},
            'make image TAG=24.10 MEGATRON=0.16.1 EXTRAS="wandb hf", and in the run file '
            'image: {tag: "24.10", extras: [wandb, hf]}',
        ),
    ],
)
def test_the_cure_is_of_the_image_at_hand(
    write: Callable[[str], str], image: dict[str, object], said: str
) -> None:
    rule = NeedRule(option="tokenizer_type", modules={}, source="none")
    run = run_of(write, rule, "TikTokenizer", set(), image=image)
    with pytest.raises(PreflightError) as caught:
        needs.check_needs(needs.needed(run, contained=True), run, "it")
    assert said in str(caught.value)
