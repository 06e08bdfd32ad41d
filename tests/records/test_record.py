"""What is kept of a run: enough to go on with it, and no secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import files
from launcher.errors import UsageError
from launcher.plan.config import RunConfig
from launcher.plan.plan import Plan
from launcher.plan.source import Asked, Origin
from launcher.records import record
from launcher.records.record import Record

SECRETS = {
    "env": {"API_KEY": "se cret", "HF_TOKEN": None, "DEBUG": True, "LEVEL": 3},
    "megatron_args": {"wandb-api-key": "se cret", "weight-decay-incr-style": "constant"},
}
PROXY = "http://user:se-cret@proxy:80"
REST = ("--hf-token", "se cret", "--api-key=se cret", "--seed", "7")


def asked(rest: tuple[str, ...] = (), **sections: Any) -> Asked:
    values: dict[str, Any] = {"name": "a", "image": "cpu", "gpus": 0, "data": {"mock": True}}
    config = RunConfig.model_validate(values | sections)
    return Asked(config, Origin("run.yaml", {}, {}), "/home/user/work", rest)


@pytest.fixture
def keep(plan: Callable[..., Plan], runs: Path) -> Callable[..., Record]:
    """Keeps the record of what is asked for."""

    def keep(wanted: Asked, run: str = "0a1b2c3d", name: str = "a", created: str = "") -> Record:
        labels = (("megatron-launchpad.created", created),)
        started = replace(plan("gpt2-tiny.yaml"), run=run, name=name, labels=labels)
        found = record.record_of(started, wanted, "docker")
        record.write(found)
        return found

    return keep


def test_what_was_asked_for_comes_back(keep: Callable[..., Record], runs: Path) -> None:
    wanted = asked(("--seed", "7"), model={"num_layers": 2}, env={"A": "1"})
    keep(wanted)
    kept = record.find("0a1b2c3d")
    again = kept.asked()
    assert (again.config, again.cwd, again.rest) == (wanted.config, wanted.cwd, wanted.rest)
    assert again.config.model_fields_set == wanted.config.model_fields_set
    assert again.origin.place("model.num_layers") == "run 0a1b2c3d (run.yaml): model.num_layers"
    assert (runs / "0a1b2c3d").stat().st_mode & 0o777 == 0o700  # its user's alone
    held = sorted(path.name for path in (runs / "0a1b2c3d").iterdir())
    assert held == [files.MARKER, record.FILE]
    with pytest.raises(UsageError, match="can't read its record"):  # another launcher's
        replace(kept, config=kept.config | {"later": 1}).asked()


def test_no_secret_is_in_it_and_each_is_named(keep: Callable[..., Record], runs: Path) -> None:
    keep(asked(REST, **SECRETS))
    texts = [path.read_text() for path in runs.rglob("*.json")]
    assert len(texts) == 1
    assert "se cret" not in texts[0]
    kept = record.find("a")
    assert kept.config["env"] == {"API_KEY": None, "HF_TOKEN": None, "DEBUG": True, "LEVEL": 3}
    assert kept.asked().rest == ("--hf-token", "(hidden)", "--api-key=(hidden)", "--seed", "7")
    assert set(kept.hidden) == {
        "env.API_KEY",
        "env.HF_TOKEN",
        "megatron_args.wandb-api-key",
        "-- --hf-token",
        "-- --api-key",
    }


def test_what_looks_like_a_credential_is_kept_under_no_key(
    keep: Callable[..., Record], runs: Path
) -> None:
    """Only variables and Megatron's further options were looked at, by few names."""
    sections: dict[str, Any] = {
        "data": {"text": ["a.jsonl", "https://se-cret@host/b.jsonl"], "vocab_size": 9},
        "logging": {"wandb_project": "hf_" + "secret1" * 5},
        "mounts": [{"source": "/a;AccountKey=se-cret", "target": "/b"}],
        "env": {"dbPassword": "se-cret", "PLAIN": "--token se-cret", "PROXY": PROXY},
        "megatron_args": {"b": PROXY},
    }
    keep(asked(("--a", "1", PROXY), **sections))
    text = (runs / "0a1b2c3d" / record.FILE).read_text()
    assert "se-cret" not in text
    assert "secret1" not in text
    kept = record.find("a")
    keys = ["data.text.1", "logging.wandb_project", "mounts.0.source"]
    env = {name: "x" for name in ("dbPassword", "PLAIN", "PROXY")}
    others = {*(f"env.{name}" for name in env), "megatron_args.b", "-- --a"}
    assert set(kept.hidden) == {*keys, *others}
    with pytest.raises(UsageError, match="lacks") as caught:
        record.check_secrets(kept, kept.asked().config, env)
    lacking = caught.value.problem.rpartition("lacks ")[2].split(", ")
    assert sorted(lacking) == sorted([*keys, "megatron_args.b", "-- --a"])
    now = kept.asked().config.model_dump(exclude_unset=True)
    config = RunConfig.model_validate(now | {key: sections[key] for key in sections})
    with pytest.raises(UsageError, match=r"lacks -- --a\n"):  # which can't come from elsewhere
        record.check_secrets(kept, config, {})


@pytest.mark.parametrize(
    ("changes", "environ", "lacking"),
    [
        ({}, {}, "megatron_args.wandb-api-key, env.API_KEY, env.HF_TOKEN"),
        ({}, {"API_KEY": "x", "HF_TOKEN": ""}, "megatron_args.wandb-api-key"),
        ({"secrets": {"API_KEY": "~/.k"}}, {"HF_TOKEN": "x"}, "megatron_args.wandb-api-key"),
        (
            {"env": {"API_KEY": "x", "HF_TOKEN": "x"}, "megatron_args": {"wandb-api-key": "x"}},
            {},
            "",
        ),
        ({"env": {}, "megatron_args": {}}, {}, ""),
    ],
)
def test_a_secret_comes_from_elsewhere_or_is_said_to_be_missing(
    keep: Callable[..., Record], changes: dict[str, Any], environ: dict[str, str], lacking: str
) -> None:
    kept = keep(asked(**SECRETS))
    now = kept.asked().config.model_dump(exclude_unset=True) | changes
    config = RunConfig.model_validate(now)
    if not lacking:
        record.check_secrets(kept, config, environ)
        return
    with pytest.raises(UsageError, match=f"lacks {lacking}\n"):
        record.check_secrets(kept, config, environ)


def test_a_record_of_another_folder_and_a_broken_one_are_none(
    keep: Callable[..., Record], runs: Path
) -> None:
    """Its run becomes a path, of which all is removed that lies there."""
    for number, text in enumerate(["{", "[]", '{"run": "x"}', json.dumps({"later": 1})]):
        (runs / str(number)).mkdir(parents=True)
        (runs / str(number) / record.FILE).write_text(text)
    made = {"aaaa0000": "2025-01-01", "bbbb0000": "2025-01-03", "cccc0000": "2025-01-02"}
    for run, created in made.items():
        keep(asked(), run, created=created)
    newest_first = ["bbbb0000", "cccc0000", "aaaa0000"]
    assert [one.run for one in record.records()] == newest_first
    kept = keep(asked())
    (runs / "0a1b2c3d").rename(runs / "other")
    assert [one.run for one in record.records()] == newest_first
    record.put("other", record.FILE, vars(kept) | {"run": "../../home"})
    assert [one.run for one in record.records()] == newest_first


KNOWN = [("aa11", "gpt2"), ("aa22", "gpt2"), ("bb33", "other"), ("cc44", "aa11")]


@pytest.mark.parametrize(
    ("text", "run"),
    [("aa22", "aa22"), ("gpt2", "aa11"), ("b", "bb33"), ("other", "bb33"), ("aa11", "aa11")],
)
def test_a_run_is_named_by_id_beginning_or_name(text: str, run: str) -> None:
    assert record.match(text, KNOWN, "") == run


@pytest.mark.parametrize(
    ("text", "known", "said"),
    [
        ("aa", KNOWN, "'aa' begins several runs: aa11, aa22"),
        ("", KNOWN, "no run ''"),
        ("zz", KNOWN, "no run 'zz'\n  Known: aa11 .gpt2., aa22 .gpt2., bb33"),
        ("zz", [], "no run 'zz'\n  None was started yet"),
    ],
)
def test_what_names_none_or_several_is_refused(
    text: str, known: list[tuple[str, str]], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        record.match(text, known, "None was started yet.")
    assert str(caught.value).replace("(", ".").replace(")", ".").startswith(said)


def test_a_folder_that_cannot_be_written_to_is_told_with_the_way_out(
    runs: Path, keep: Callable[..., Record]
) -> None:
    runs.write_text("a file")
    with pytest.raises(UsageError, match="the run's record can't be kept in") as caught:
        keep(asked())
    assert "LAUNCHER_RUNS" in caught.value.remedy
