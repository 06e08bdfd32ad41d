"""The compose file of a plan, and what is made of the nodes' output and ends: no engine needed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends import compose, compose_examples, compose_job, docker
from launcher.backends.compose_job import (
    ComposeJob,
    Lines,
    Passed,
    State,
    failing_since,
    merged,
    seconds,
)
from launcher.backends.docker_job import DockerJob
from launcher.errors import UsageError
from launcher.matrix import render
from launcher.matrix.load import load_matrix
from launcher.plan.gpus import Gpus, parse_gpus, split
from launcher.plan.job import Cause, Ended
from launcher.plan.mounts import Mount
from launcher.plan.plan import Plan
from launcher.train.words import CONCLUSION, REPORT

from .test_docker import SECRET, WORDS, kept, with_secrets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def single(full: Plan) -> Plan:
    """One node with something in every field."""
    return replace(full, tie=False)


@pytest.fixture
def several(full: Plan) -> Plan:
    """Two nodes with something in every field."""
    meeting = {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
    meeting |= {"PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500"}
    board = Mount("/tmp/board", "/tensorboard", False, "logging")  # noqa: S108
    return replace(
        full,
        tie=False,
        nodes=2,
        network=None,
        gpus=Gpus(1, ("0", "1")),
        env=tuple(sorted((dict(full.env) | meeting).items())),
        labels=(*full.labels, ("megatron-launchpad.node", "0")),
        mounts=(*full.mounts, board),
    )


@pytest.mark.parametrize("name", ["single", "several"])
def test_the_file_is_as_kept(name: str, request: pytest.FixtureRequest) -> None:
    kept(f"compose-{name}.txt", compose.show(request.getfixturevalue(name)))


def services(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose.request(plan).text)["services"]
    return found


def test_nodes_differ_by_rank_gpus_and_order_alone(several: Plan) -> None:
    first, second = (services(several)[name] for name in ("node-0", "node-1"))
    devices = [
        one.pop("deploy")["resources"]["reservations"]["devices"][0]["device_ids"]
        for one in (first, second)
    ]
    assert devices == [["0"], ["1"]]
    assert [one["environment"].pop("PET_NODE_RANK") for one in (first, second)] == ["0", "1"]
    assert [one["labels"].pop("megatron-launchpad.node") for one in (first, second)] == ["0", "1"]
    assert [one.pop("container_name")[-7:] for one in (first, second)] == ["-node-0", "-node-1"]
    assert "733C" in first.pop("healthcheck")["test"][3]
    assert second.pop("depends_on") == {"node-0": {"condition": "service_healthy"}}
    assert first == second


@pytest.mark.parametrize(
    ("asked", "nodes", "each"),
    [
        ("0", 2, [(), ()]),
        ("2", 2, [("0", "1"), ("2", "3")]),
        ("1", 3, [("0",), ("1",), ("2",)]),
        ("device=3,1,7,5", 2, [("3", "1"), ("7", "5")]),
        ("device=GPU-a,GPU-b", 2, [("GPU-a",), ("GPU-b",)]),
        ("all", 2, [("0", "1"), ("2", "3")]),
    ],
)
def test_gpus_are_shared_out_in_order(asked: str, nodes: int, each: list[tuple[str, ...]]) -> None:
    gpus = parse_gpus(asked)
    gpus = split(replace(gpus, count=4) if gpus.everything else gpus, nodes)
    found = [gpus.of_node(rank) for rank in range(nodes)]
    assert [one.devices for one in found] == each
    assert {one.count for one in found} == {len(each[0])}


@pytest.mark.parametrize("asked", ["device=0,1,2", "all"])
def test_what_cant_be_shared_out_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="3 GPUs, which 2 nodes can't share evenly"):
        split(replace(parse_gpus(asked), count=3), 2)


def test_on_one_node_gpus_stay_as_they_are() -> None:
    assert split(Gpus(2), 1) == Gpus(2)
    assert split(Gpus(8, everything=True), 1) == Gpus(8, everything=True)


def test_what_compose_cant_do_is_refused(full: Plan, several: Plan) -> None:
    with pytest.raises(UsageError, match="--tie"):
        compose.request(full)
    with pytest.raises(UsageError, match=r"resources\.network"):
        compose.request(replace(several, network="host"))


def test_a_project_has_a_name_that_compose_takes(bare: Plan) -> None:
    assert compose.project_name(replace(bare, name="My.Run_1-")) == "my-run_1--0a1b2c3d"


def test_secrets_are_in_the_environment_and_not_in_the_file(bare: Plan) -> None:
    plan = with_secrets(bare)
    wanted = compose.request(plan)
    assert SECRET not in compose.show(plan)
    assert wanted.secrets == {"API_KEY": SECRET, "SECRET_4": SECRET, "SECRET_5": SECRET}
    service = services(plan)["node-0"]
    assert service["environment"] == {"API_KEY": None, "DEBUG": "1"}
    assert [filled(word, wanted.secrets) for word in service["command"]] == [*plan.argv]
    asked = [line for line in compose.show(plan).splitlines() if line.startswith(": ")]
    assert [line.partition("{")[2].partition(":")[0] for line in asked] == [*wanted.secrets]


def test_an_address_with_a_password_is_a_secret_too(bare: Plan) -> None:
    proxy = f"http://user:{SECRET.replace(' ', '')}@proxy:3128"
    plan = replace(bare, argv=("python3", f"--proxy={proxy}", proxy), env=(("HTTPS_PROXY", proxy),))
    wanted = compose.request(plan)
    assert "proxy:3128" not in compose.show(plan)
    assert wanted.secrets == {"HTTPS_PROXY": proxy, "SECRET_1": proxy, "SECRET_2": proxy}
    service = services(plan)["node-0"]
    assert [filled(word, wanted.secrets) for word in service["command"]] == [*plan.argv]


def filled(word: str, secrets: dict[str, str]) -> str:
    """A word as compose reads it."""
    for name, value in secrets.items():
        word = word.replace(f"${{{name}?export it first}}", value)
    return word.replace("$$", "$")


@given(st.lists(WORDS, min_size=1), st.dictionaries(st.sampled_from("ABC"), WORDS))
def test_the_file_reads_back_as_the_same_words(argv: list[str], env: dict[str, str]) -> None:
    from .conftest import BARE

    plan = replace(BARE, argv=tuple(argv), env=tuple(env.items()))
    wanted = compose.request(plan)
    service = yaml.safe_load(wanted.text)["services"]["node-0"]
    assert [filled(word, wanted.secrets) for word in service["command"]] == argv
    read = {name: filled(value, {}) for name, value in service.get("environment", {}).items()}
    assert read == env


@pytest.mark.parametrize("text", ["1e-05", "24.10", "-1", "+2", ".5", "0x1F", "1:30", "2025-01-02"])
def test_what_looks_like_a_number_is_quoted(bare: Plan, text: str) -> None:
    """YAML 1.2, which compose reads, has other numbers than 1.1, which PyYAML reads."""
    assert f"'{text}'" in compose.request(replace(bare, argv=("x", text))).text


def test_what_is_shown_is_what_runs(several: Plan) -> None:
    before, _, rest = compose.show(several).partition(" <<'EOF'\n")
    assert rest == f"{compose.request(several).text}EOF\n"
    made, command = (shlex.split(line) for line in before.splitlines())
    assert made == ["mkdir", "-p", "--", "/var/tmp", "/tmp/board"]  # noqa: S108
    assert tuple(command[-2:]) == compose.UP


def test_examples_are_what_is_rendered() -> None:
    found = compose_examples.files(load_matrix(), ROOT)
    assert {path for path in found if render.drift({path: found[path]}, ROOT) == [path]} == set()
    assert {path.name for path in (ROOT / "compose").glob("*.yaml")} == {p.name for p in found}


def test_examples_name_no_place_of_a_machine() -> None:
    for path in (ROOT / "compose").glob("*.yaml"):
        for service in yaml.safe_load(path.read_text())["services"].values():
            assert all(one["source"].startswith("./") for one in service["volumes"])
            assert "labels" not in service


# Output and ends

PIECES = st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\r", b"\n")))


@given(PIECES)
def test_lines_are_whole_and_complete(pieces: list[bytes]) -> None:
    lines = Lines(b"node-1 | ")
    told = b"".join(lines.add(piece, False) for piece in pieces)
    assert told == b"" or told.endswith(b"\n")
    told += b"".join(rest for _, rest in lines.rest())
    whole = b"".join(pieces)
    ended = whole if whole.endswith(b"\n") or not whole else whole + b"\n"
    assert told == b"".join(b"node-1 | " + line for line in ended.splitlines(keepends=True))


def test_streams_dont_mix_within_a_line() -> None:
    lines = Lines(b"")
    assert lines.add(b"out", False) == b""
    assert lines.add(b"err\n", True) == b"err\n"
    assert lines.add(b"put\n", False) == b"output\n"


def test_a_line_without_an_end_is_passed_on_in_parts() -> None:
    lines = Lines(b"")
    assert lines.add(b"x" * (compose_job.LONGEST_LINE + 1), False).count(b"\n") == 1


def test_times_of_the_engine() -> None:
    assert seconds("1970-01-01T00:01:00Z") == 60
    assert seconds("2025-01-02T03:04:05.25Z") < seconds("2025-01-02T03:04:05.250000001Z") + 1e-6
    assert seconds("2025-01-02T03:04:05.5Z") > seconds("2025-01-02T03:04:05.123456789Z")


def log(second: int, *lines: str) -> str:
    """Lines as the engine keeps them, all of one second."""
    return "".join(f"2025-01-02T03:04:{second:02}.000000001Z {line}\n" for line in lines)


E0, E3 = "runner: rank 0 exited with code 1", "runner: rank 3 exited with code 1"
K0 = "runner: rank 0 was killed by signal 9 (SIGKILL), exit code 137"
AT = seconds("2025-01-02T03:04:00Z")


@pytest.mark.parametrize(
    ("logs", "first"),
    [
        # Two nodes: what each wrote, and when the engine saw it end.
        ([(log(9, E0), 12), (log(8, "a", E3), 13)], 1),
        ([(log(8, "gpt: rank 0 has lost another rank", E0), 9), ("", 9)], 1),
        ([(log(8, "gpt: rank 0 has lost another rank", E0), 9), (log(9, E3), 9)], 1),
        ([(log(8, "[pair.cc] Connection closed by peer", E0), 9), (log(9, E3), 9)], 1),
        (
            [
                (log(9, "rank 1 has lost another rank", E0), 9),
                (log(8, "rank 3 has lost another rank", E3), 9),
            ],
            0,
        ),
        (
            [
                (log(9, "Connection reset by peer", K0), 9),
                (log(8, "rank 3 has lost another rank", E3), 9),
            ],
            0,
        ),
        ([("iteration 1\n", 8), ("", 30)], 0),
        ([(log(8, E0), 9), ("", 20)], 0),
    ],
)
def test_the_first_to_fail_is_found(logs: list[tuple[str, int]], first: int) -> None:
    since = [failing_since(text, AT + ended) for text, ended in logs]
    assert since.index(min(since)) == first


def job(count: int) -> ComposeJob:
    nodes = tuple(DockerJob(None, str(rank), {}) for rank in range(count))  # type: ignore[arg-type]
    return ComposeJob(None, "a", nodes, {})  # type: ignore[arg-type]


def test_a_paused_node_holds_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were listed as running."""
    states = [RUNS, replace(RUNS, paused=True)]
    monkeypatch.setattr(ComposeJob, "_states", lambda self: states)
    assert job(2).state() == "paused"
    states.pop()
    assert job(1).state() == "running"


RUNS, WAITS = State(True, None), State(False, None)
DONE, FAILED = State(True, Ended(0), AT), State(True, Ended(3), AT)


@pytest.mark.parametrize(
    ("states", "code", "why"),
    [
        ([RUNS, WAITS], None, ""),
        ([RUNS, RUNS], None, ""),
        ([DONE, RUNS], None, ""),
        ([FAILED, RUNS], None, ""),
        ([DONE, DONE], 0, ""),
        ([FAILED, DONE], 3, "on node-0"),
        ([DONE, FAILED], 3, "on node-1"),
        ([FAILED, WAITS], 3, "on node-0"),
        ([DONE, WAITS], 125, "node-1 didn't start: node-0 ended before its port was open"),
        ([RUNS, State(False, None, refused="no GPU")], None, ""),
        (
            [State(True, Ended(0)), State(False, None, refused="no GPU")],
            125,
            "node-1 didn't start: no GPU",
        ),
        (
            [State(True, Ended(137, Cause.REMOVED), AT), DONE],
            137,
            "node-0: it was removed from outside",
        ),
        ([DONE], 0, ""),
        ([FAILED], 3, ""),
    ],
)
def test_how_a_run_ended(
    states: list[State], code: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComposeJob, "_log", lambda self, rank: "")
    ended = job(len(states))._decided(states)
    assert (ended.code if ended else None, ended.why if ended else "") == (code, why)


def test_a_refused_start_is_the_cause_of_what_it_ends() -> None:
    states = [State(True, Ended(137), AT), State(False, None, refused="no GPU")]
    assert job(2)._decided(states) == Ended(125, why="node-1 didn't start: no GPU")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=12), st.integers(0, 12))
def test_each_byte_is_passed_on_once_though_the_engine_was_lost(
    written: list[tuple[str, bool]], lost_after: int
) -> None:
    """Who follows counts the bytes of each stream, and leaves out as many the second time."""
    lines = [(*one, f"{number}\n".encode()) for number, one in enumerate(written)]
    passed = Passed()
    passed.begin_again()
    first = [told for line in lines[:lost_after] for told in passed.of(*line)]
    passed.begin_again()
    again = sorted(lines, key=lambda line: line[0], reverse=True)  # another order of the nodes
    second = [told for line in again for told in passed.of(*line)] + [*passed.held()]
    for stream in (False, True):
        before = b"".join(data for is_error, data in first if is_error is stream)
        after = b"".join(data for is_error, data in second if is_error is stream)
        total = before + after[len(before) :]
        assert sorted(total.splitlines()) == sorted(
            line[2].strip() for line in lines if line[1] is stream
        )


def test_reports_of_several_nodes_become_one() -> None:
    one = {REPORT: f"stacks\n{CONCLUSION}rank 1 is late\n".encode(), "rank-0.txt": b"a"}
    two = {REPORT: f"{CONCLUSION}all wait\n".encode(), "rank-0.txt": b"b"}
    found = merged([one, two])
    assert found["node-0.rank-0.txt"] == b"a"
    assert found["node-1.rank-0.txt"] == b"b"
    last = found[REPORT].decode().splitlines()[-1]
    assert last == f"{CONCLUSION}node-0: rank 1 is late; node-1: all wait"
    assert merged([{}, {}]) == {}


def test_containers_have_the_names_that_docker_gives(bare: Plan) -> None:
    assert services(bare)["node-0"]["container_name"] == docker.container_name(bare)
