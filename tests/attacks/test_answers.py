"""What kubectl and Slurm's programs answer: nonsense is one line, and the others are shown."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.base.settings import settings
from launcher.runs.backends.kubernetes import kubernetes_answers, kubernetes_job
from launcher.runs.backends.kubernetes.kubernetes_request import RUN
from launcher.runs.backends.slurm import slurm_queue
from launcher.runs.follow import find

Answer = Callable[..., None]
ITEM: dict[str, Any] = {
    "kind": "JobSet",
    "metadata": {
        "name": "a",
        "labels": {RUN: "aaaa1111"},
        "annotations": {f"{LABEL}run": "aaaa1111", f"{LABEL}nodes": "2"},
    },
    "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    "spec": {"failurePolicy": {"maxRestarts": 1}, "suspend": False},
}
ENDED = {"terminated": {"exitCode": 3, "finishedAt": "2025-01-02T03:04:05Z"}}
POD = {
    "kind": "Pod",
    "metadata": {"name": "a", "uid": "u", "annotations": {kubernetes_job.INDEX: "0"}},
    "status": {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "node", "state": {**ENDED, "waiting": {"reason": "x", "message": "y"}}}
        ],
    },
}
ODD: list[Any] = [None, True, -1, 1 << 70, 1.5, "", "../../x", "x" * 3000, [], {}, [None]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sets what kubectl and squeue print, and their exit code; a run of Kubernetes is recorded."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    folder = settings().runs / "aaaa1111"
    folder.mkdir(parents=True)
    (folder / kubernetes_job.PLACE).write_text('{"kind": "JobSet", "place": []}')
    for name in ("kubectl", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n. {tmp_path}/then\n")
        (tmp_path / name).chmod(0o755)

    def sets(said: bytes | str, then: str = "exit 0") -> None:
        (tmp_path / "answer").write_bytes(said if isinstance(said, bytes) else said.encode())
        (tmp_path / "then").write_text(f"{then}\n")

    return sets


def asked() -> tuple[list[str], list[str]]:
    """The runs of Kubernetes that are found, and why it can't be asked."""
    found, silent = find.everywhere()
    why = [str(each) for each in silent if "kubernetes" in each.names]
    return [job.run for chosen, job in found if chosen.name == "kubernetes"], why


def changed(chance: random.Random, value: Any) -> Any:
    """The value with something in it that is of another kind."""
    if chance.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(ODD)
    if isinstance(value, list):
        return [changed(chance, value[0])]
    key = chance.choice([*value])
    return {**value, key: changed(chance, value[key])}


NONSENSE: list[tuple[bytes | str, str]] = [
    *((text, "exit 0") for text in ("", "null", "[]", "{}", '{"items": null}', "not json")),
    *((f'{{"items": [{text}]}}', "exit 0") for text in ("null", "{}", "3", '{"kind": "JobSet"}')),
    ("[" * 100_000, "exit 0"),
    ('{"items": ' + "1" * 6000 + "}", "exit 0"),
    (bytes(30_000_000), "exit 0"),
    (b"\xff\xfe\x00\n", "exit 0"),
    ("\x1b]0;x\x07\x1b[2J\n", "exit 1"),
    ("x" * 5_000_000, "exit 255"),
    ("", "kill -9 $$"),
    ("", "exec sleep 60"),
]


@pytest.mark.parametrize(("said", "then"), NONSENSE, ids=range(len(NONSENSE)))
def test_what_kubectl_answers_is_read_or_told_in_one_line(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, said: bytes | str, then: str
) -> None:
    """One such answer ended `ps` of every backend with 70, or held it for over a minute."""
    monkeypatch.setenv("LAUNCHER_ANSWER_WITHIN", "1" if "sleep" in then else "10")
    answer(said, then)
    found, why = asked()
    assert (found, len(why)) == ([], 1)
    assert len(why[0]) < 3000


def test_an_answer_with_something_of_another_kind_ends_nothing(answer: Answer) -> None:
    chance = random.Random(1)  # noqa: S311
    answer(json.dumps({"items": [ITEM]}))
    assert asked() == (["aaaa1111"], [])
    for _ in range(6):
        answer(json.dumps({"items": [changed(chance, ITEM)]}))
        found, why = asked()
        assert all(run == "aaaa1111" for run in found)
        assert bool(found) != bool(why)


def test_no_object_of_another_kind_ends_the_reading() -> None:
    """The same without kubectl, for many more of them, and all that is read of one."""
    chance, read = random.Random(2), 0  # noqa: S311
    for _ in range(500):
        answer = json.dumps({"items": [changed(chance, ITEM), changed(chance, POD)]})
        try:
            found = kubernetes_answers.listing(answer, RUN)
        except EngineError:
            continue
        for one in found:
            kubernetes_job._waits(one)
            kubernetes_job._ended(one)
            read += 1
    assert read > 5


ANSWERS = ("COMPLETED", "1 2 3", "5|RUNNING|", "|", "|||||", "-1", "../../x", "5|5|running|")
MORE = ("Submitted batch job 3", "slurm_load_jobs error: x", b"\xff\xfe\n", "5|x|RUNNING|None")


@pytest.mark.parametrize("said", [*ANSWERS, *MORE])
def test_what_squeue_says_wrongly_is_not_that_there_is_no_job(
    answer: Answer, said: bytes | str
) -> None:
    """`stop --now` forgot a job that goes on."""
    answer(said)
    with pytest.raises(EngineError, match="squeue's answer can't be read"):
        slurm_queue.Queue().ask()
    answer("7|7|RUNNING|None\n8_[1-3%1]|8|PENDING|a|b\n8_0|8|COMPLETED|None\n\n")
    queue = slurm_queue.Queue()
    queue.ask()
    assert queue.states["7"] == ("RUNNING", "None")
    assert queue.states["8_[1-3%1]"] == ("PENDING", "a|b")
