"""What is kept of a run: the record, where it came from, whose it is; watched."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.base import owned
from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.runs.checks.machine import Gpu, Machine
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.records import owner, provenance, record
from launcher.runs.records.record import Record
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import RunRequest
from tests.plans import request
from tests.tables import table

SECRETS = {
    "env": {"API_KEY": "se cret", "HF_TOKEN": None, "DEBUG": True, "LEVEL": 3},
    "megatron_args": {"wandb-api-key": "se cret", "weight-decay-incr-style": "constant"},
}
PROXY = "http://user:se-cret@proxy:80"


def asked(rest: tuple[str, ...] = (), **sections: Any) -> RunRequest:
    return request("/home/user/work", rest, **{"data": {"mock": True}} | sections)


@pytest.fixture
def keep(plan: Callable[..., Plan], runs: Path) -> Callable[..., Record]:
    """Keeps the record of what is asked for."""

    def keep(
        wanted: RunRequest, run: str = "0a1b2c3d", name: str = "a", created: str = ""
    ) -> Record:
        created_at = ("megatron-launchpad.created", created)
        labels = (created_at, ("megatron-launchpad.payload", "a1" * 16))
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
    assert again.payload_digest == "a1" * 16  # by which a restart, or rerun, is what then ran
    assert again.config.model_fields_set == wanted.config.model_fields_set
    assert again.origin.place("model.num_layers") == "run 0a1b2c3d (run.yaml): model.num_layers"
    assert (runs / "0a1b2c3d").stat().st_mode & 0o777 == 0o700  # its user's alone
    held = sorted(path.name for path in (runs / "0a1b2c3d").iterdir())
    assert held == [owned.MARKER, record.FILE]
    with pytest.raises(UsageError, match="can't read its record"):  # another launcher's
        replace(kept, config=kept.config | {"later": 1}).asked()


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


@table("changes", "environ", "lacking")
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
    ("text", "known", "said"),
    [
        *((text, KNOWN, text) for text in ("aa22", "aa11")),
        *(("gpt2", KNOWN, "aa11"), ("b", KNOWN, "bb33"), ("other", KNOWN, "bb33")),
        ("aa", KNOWN, "'aa' begins several runs: aa11, aa22"),
        ("", KNOWN, "no run ''"),
        ("zz", KNOWN, "no run 'zz'\n  Known: aa11 (gpt2), aa22 (gpt2), bb33"),
        ("zz", [], "no run 'zz'\n  None was started yet"),
    ],
)
def test_a_run_is_named_by_id_beginning_or_name(
    text: str, known: list[tuple[str, str]], said: str
) -> None:
    try:
        found = record.match(text, known, "None was started yet.")
    except UsageError as error:
        assert str(error).startswith(said)
    else:
        assert found == said


def test_a_folder_that_cannot_be_written_to_is_told_with_the_way_out(
    runs: Path, keep: Callable[..., Record]
) -> None:
    runs.write_text("a file")
    with pytest.raises(UsageError, match="the run's record can't be kept in") as caught:
        keep(asked())
    assert "LAUNCHER_RUNS" in caught.value.remedy


BACKEND: Any = SimpleNamespace(identity=lambda image: {"name": image, "id": "sha256:aa"})


@pytest.fixture
def made(tmp_path: Path, plan: Callable[..., Plan]) -> Callable[..., dict[str, Any]]:
    """The facts of a run that reads a file and a secret."""
    (tmp_path / "text.bin").write_bytes(b"tokens")
    (tmp_path / "key").write_text("se cret")

    def make(*gpus: str) -> dict[str, Any]:
        mounts = (
            Mount(str(tmp_path / "text.bin"), "/data/0/text.bin", True, "data.path"),
            Mount(str(tmp_path / "key"), "/run/secrets/KEY", True, "secrets.KEY"),
            Mount(str(tmp_path), "/work", False, "resources.workdir"),
        )
        started = replace(plan("gpt2-tiny.yaml"), mounts=mounts)
        asked = request(str(tmp_path), env={"API_KEY": "se cret"})
        cards = tuple(Gpu(n, "", name, 0, 0, None, "550") for n, name in enumerate(gpus))
        return provenance.facts_of(started, asked, BACKEND, Machine(gpus=cards))

    return make


def test_facts_are_json_without_secrets_and_with_each_file(
    made: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    facts = json.loads(json.dumps(made("H100")))
    assert "se cret" not in json.dumps(facts)
    (path,) = facts["files"]
    assert path == str(tmp_path / "text.bin")
    assert facts["files"][path]["size"] == 6
    assert facts["config"]["training"]["seed"] is None  # resolved: what wasn't given is there too
    assert facts["machine"]["gpus"][0]["name"] == "H100"


@table("key", "value", "told")
def test_each_change_is_told(
    made: Callable[..., dict[str, Any]], key: str, value: object, told: str
) -> None:
    then = made("H100")
    now = copy.deepcopy(then) | {key: value}
    (line,) = provenance.changed(then, now)
    assert told in line
    assert provenance.changed(json.loads(json.dumps(then)), then) == []
    assert provenance.changed(then | {"machine": None}, then) == []  # it was not looked at
    for source in (f"{'a' * 40}+edited", "unversioned"):
        edited = then | {"source": source}
        unknown = [f"what was in the checkout isn't known: {source}"]
        assert provenance.changed(edited, edited) == unknown


def test_a_checkout_that_git_refuses_and_a_file_that_only_the_run_may_read_are_no_obstacle(
    made: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "text.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    (told,) = made()["files"].values()
    assert sorted(told) == ["modified", "size"]
    (tmp_path / "checkout/.git").mkdir(parents=True)  # a broken one
    assert provenance._revision(request(str(tmp_path), source="checkout")) == "unversioned"


def test_a_small_file_is_known_by_its_content_and_a_large_one_by_size_and_time(
    made: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = made()
    os.utime(tmp_path / "text.bin", (1, 1))
    assert provenance.changed(then, made()) == []
    (tmp_path / "text.bin").write_bytes(b"Tokens")
    assert len(provenance.changed(then, made())) == 1
    monkeypatch.setattr(provenance, "HASHED", 2)
    then = made()
    assert provenance.changed(then, made()) == []
    os.utime(tmp_path / "text.bin", (2, 2))
    assert len(provenance.changed(then, made())) == 1


HOLDER = """\
import sys
from launcher.runs.records import owner
with owner.following("0a1b2c3d") as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_the_first_of_two_owns_the_run_until_it_is_killed(kept: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n"
        with owner.following(kept.name) as mine:
            assert not mine
        with owner.following("ffffffff") as mine:  # a run without a record
            assert mine
        assert owner.stop_in_pause(kept.name)
        assert owner.asked_to_stop(kept.name)
        holder.kill()
        holder.wait()
        with owner.following(kept.name) as mine:
            assert mine
    (owner.runs_folder() / "0b1b2c3d").mkdir()
    assert not owner.stop_in_pause("0b1b2c3d")  # nobody waits there
    assert not owner.asked_to_stop("0b1b2c3d")


def test_one_that_starts_keeps_the_next_waiting(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PATIENCE", 0.2)
    began = []
    with owner.alone():
        handle = os.open(owner.runs_folder() / owner.STARTING, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with owner.alone():  # no longer than that
            began.append(True)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    assert began
