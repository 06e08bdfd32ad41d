"""How runs end, and why: what is told of a log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.agent.words import STOPPED
from launcher.runs.explain import failures, logreader
from launcher.runs.explain.loglines import by_source, parse
from launcher.runs.plan.job import EndCause, ExitStatus
from launcher.runs.records import ending, record, resume
from launcher.runs.records.ending import Ending, Outcome, describe
from launcher.runs.runfile import origins
from tests.tables import table
from tools.failures import PAGE, first_step, page

ROOT = Path(__file__).parents[3]

REAL: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("said.yaml").read_text())
"""What is really written, by the name of the known failure."""

BESIDE: dict[str, str] = yaml.safe_load(Path(__file__).with_name("beside.yaml").read_text())
"""What is like it and isn't it."""


def named(tail: str, cause: EndCause = EndCause.ITSELF) -> list[failures.FailureSign]:
    return failures.explain([tail.encode(errors="replace")], cause).signs


def words(text: str) -> str:
    """A text as rows read it, without prefixes."""
    lines = [parse(number, line) for number, line in enumerate(text.splitlines())]
    return "\n".join(line.text for line in by_source(lines))


BEFORE = "training\n[2025-04-13 23:41:20] iteration 20/ 1000 | lm loss: 1.07E+01 |\n"


def test_every_row_of_the_table_has_its_real_text_and_one_beside_it() -> None:
    assert sorted(REAL) == sorted(BESIDE) == sorted(known.name for known in failures.table())


def test_no_two_rows_have_one_name() -> None:
    """The second would never be told."""
    assert len({known.name for known in failures.table()}) == len(failures.table())


@pytest.mark.parametrize("name", BESIDE)
def test_a_text_beside_it_is_not_taken_for_it(name: str) -> None:
    """An expression that is too wide names a wrong cause, which costs more than none."""
    assert name not in [sign.failure.row for sign in named(BESIDE[name])]


WORD = re.compile(r"[A-Za-z]{3,}")
SYNTAX = re.compile(r"\\[A-Za-z]|\(\?P?<?[a-z_]*[>:]?")  # of an expression: \w, \n, (?P<name>


def fixed_words(says: str, text: str) -> set[str]:
    """The words of an expression's match in a text that stand as they are in the expression."""
    match = re.search(says, words(text), re.MULTILINE)
    written = set(WORD.findall(SYNTAX.sub(" ", says)))
    return written.intersection(WORD.findall(match[0])) if match else set()


@pytest.mark.parametrize("known", failures.table(), ids=lambda known: known.name)
def test_a_text_beside_it_has_half_of_its_words(known: failures.Failure) -> None:
    """Half of them were texts that no expression would match, which show nothing.

    A row that reads but one word, an exception's name, has no text beside it of this kind.
    """
    beside = set(WORD.findall(BESIDE[known.name]))
    of_text = [fixed_words(says, text) for says in known.says for text in REAL[known.name]]
    several = [fixed for fixed in of_text if len(fixed) > 1]
    assert not several or any(2 * len(fixed & beside) >= len(fixed) for fixed in several)


MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@table("text", "first")
def test_a_text_near_a_row_is_not_taken_for_it(text: str, first: str) -> None:
    """What is of git, of a download or of the user's own code, and what ends no run."""
    assert "".join(sign.failure.row for sign in named(text)[:1]) == first


@pytest.mark.parametrize(
    ("name", "says"), [(known.name, says) for known in failures.table() for says in known.says]
)
def test_every_expression_fits_a_real_text(name: str, says: str) -> None:
    """Else it may be one that nothing says, and its first match is a wrong name."""
    assert any(re.search(says, words(text), re.MULTILINE) for text in REAL[name])


@pytest.mark.parametrize("known", failures.table(), ids=lambda known: known.name)
def test_every_row_says_since_when(known: failures.Failure) -> None:
    """A new row would leave its column open, or fill it with a guess like "recent"."""
    release = r"[A-Za-z][A-Za-z ]* \d+(\.\d+)+"
    assert re.fullmatch(rf"any|{release}(, {release})*", known.since)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in REAL.items() for text in texts]
)
def test_each_is_named_by_its_text_and_by_nothing_else(name: str, text: str) -> None:
    tail = f"{BEFORE}{text}\n{BEFORE}runner: rank 0 exited with code 1\n"
    found = named(tail)
    assert [sign.failure.row for sign in found] == [name]
    assert found[0].said
    assert found[0].said.text.rstrip("…") in text
    told = describe(Ending(ExitStatus(1), False, tail), "0a1b", None, "")
    failure = found[0].failure
    assert told[1].startswith(f"{failures.HEADS[failure.certainty]}: {failure.name}: ")
    assert told[2].startswith(("cure", failures.OPEN, "first step"))


def test_memory_is_named_by_what_the_engine_says_where_nothing_was_written() -> None:
    found = named("", EndCause.MEMORY)
    assert [sign.lines[0] for sign in found] == ["cause: host memory is out"]


def test_the_first_cause_is_told_where_others_follow_from_it() -> None:
    """What follows from others comes last, though a log may have it first."""
    after = [known for known in failures.table() if known.follows]
    after.sort(key=lambda known: failures.KINDS.index(known.kind))
    others = ["GPU memory is out", "the port is taken"]
    texts = [*(REAL[known.name][0] for known in after), *(REAL[name][0] for name in others)]
    found = named("\n".join(texts))
    assert [sign.failure.row for sign in found] == [*others, *(known.name for known in after)]


WARNED = [
    (name, text)
    for name, texts in REAL.items()
    for text in texts
    if "NCCL WARN " in text and "nvls.cc" not in text  # whose file alone tells it
]


@pytest.mark.parametrize(("name", "text"), WARNED)
@pytest.mark.parametrize("rank", ["", "[rank3]: "])
def test_what_torch_repeats_of_nccl_is_named_alike(name: str, text: str, rank: str) -> None:
    """Without NCCL_DEBUG it is all that there is, behind a line that says only that it failed."""
    last = text.partition("NCCL WARN ")[2]
    failed = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
    found = named(f"{rank}{failed}\n{rank}Last error:\n{rank}{last}\n")
    assert found[0].failure.row == name


def test_a_run_that_was_stopped_or_done_has_no_failure() -> None:
    text = REAL["the port is taken"][0]
    assert len(describe(Ending(ExitStatus(143), True, text), "0a1b", None, "")) == 1
    finished = describe(Ending(ExitStatus(0), False, text), "0a1b", None, "")
    assert finished == ["run 0a1b finished"]


def test_a_full_shared_memory_is_no_full_disk() -> None:
    """The headline would contradict the cause."""
    full = "OSError: [Errno 28] No space left on device"
    shared = REAL["shared memory, /dev/shm, is too small"]
    assert Ending(ExitStatus(1), False, full).reason == "a disk is full"
    for text in (shared[1], f"{full}\n{shared[3]}", f"{shared[1]}\n{full}"):
        assert not Ending(ExitStatus(1), False, text).full


@pytest.mark.parametrize("name", REAL)
def test_the_headline_never_contradicts_the_cause(name: str) -> None:
    """Host memory that is out was "killed from outside", where the kernel did it."""
    (known,) = [one for one in failures.table() if one.name == name]
    for text in REAL[name]:
        said = Ending(ExitStatus(137), False, text).reason
        assert said in ("", "a disk is full") or known.follows or text.startswith("runner: ")
        assert (said == "a disk is full") == (name == "a disk is full")


def test_commands_are_told_to_programs() -> None:
    told = failures.explain([REAL["the port is taken"][0].encode()]).as_json()
    assert told["causes"][0]["commands"] == ["ss -ltnp"]


def healthy() -> list[Path]:
    """What is no failing run's output: our own words, and what healthy runs have printed."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/golden/*.txt"), ROOT / "README.md"]
    found += ROOT.glob("tests/runs/records/logs/*.txt")
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("path", healthy(), ids=lambda path: path.name)
def test_ordinary_text_names_nothing(path: Path) -> None:
    assert named(path.read_text(encoding="utf-8")) == []


@given(st.text(max_size=2000), st.sampled_from([text for texts in REAL.values() for text in texts]))
def test_noise_around_a_failure_hides_nothing(noise: str, text: str) -> None:
    found = named(f"{noise}\n{text}\n{noise}")
    assert any(text in REAL[sign.failure.row] for sign in found)


def aftermath(ranks: int) -> list[str]:
    """What ranks write when another has failed, with numbers and addresses of their own."""
    texts = [text for known in failures.table() if known.follows for text in REAL[known.name]]
    return [
        f"[rank{rank}]: {line} comm 0x{rank * 0x9E3779B97F4A7C15 % (1 << 48):x}"
        for rank in range(ranks)
        for text in texts
        for line in text.splitlines()
    ]


@pytest.mark.parametrize(
    "name", [known.name for known in failures.table() if known.kind == "cause"][::16]
)
@pytest.mark.parametrize("piece", [1 << 10, 1 << 22])
def test_a_first_cause_is_found_among_what_follows(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail alone would show the flood; a border between pieces must hide nothing."""
    monkeypatch.setattr(logreader, "PIECE", piece)
    flood = aftermath(64)
    log = "\n".join([*flood[:40], REAL[name][0], *flood[40:]]).encode()
    explained = failures.explain(log[at : at + 997] for at in range(0, len(log), 997))
    first = explained.signs[0]
    assert first.failure.row == name
    assert first.said
    assert first.said.line in range(41, 41 + len(REAL[name][0].splitlines()))


def test_what_is_not_known_is_said_to_be_unknown_with_the_lines_most_like_it() -> None:
    log = [
        "iteration 1/ 10 | lm loss: 1.0E+01 |",
        "node-1 | 2026-01-02T03:04:05 [rank3]: Traceback (most recent call last):",
        "node-1 | 2026-01-02T03:04:05 [rank3]: FrobnicateError: the gizmo is upside down",
        *(f"[rank{rank}]: ERROR rank {rank} gave up" for rank in range(64)),
    ]
    explained = failures.explain(["\n".join(log).encode()])
    assert explained.signs == []
    assert [(said.line, said.rank, said.node, said.time) for said in explained.suspects] == [
        (3, "3", "node-1", "2026-01-02T03:04:05"),
        (4, "0", "", ""),
    ]


def test_the_page_is_made_of_the_table() -> None:
    """A row changed and the page not would tell people of another cure."""
    assert page() == PAGE.read_text(encoding="utf-8")


VERBS = """
add ask call change check choose compare continue correct find free give install leave load look
lower make move open put raise read remove run save set start test try turn use write
""".split()


def test_each_first_step_is_a_whole_one() -> None:
    """Cures were cut at a preposition, and "with slurm.signal and requeue" was left."""
    rows = (line.strip("| ").split(" | ") for line in page().splitlines() if line[:2] == "| ")
    steps = [step for failure, step in rows if failure != "failure"]
    assert len(steps) > 90
    wrong = [one for one in steps if one.split(" ")[0] not in VERBS or {*one} & {*"{}…"}]
    odd = [one for one in steps if one.count("(") != one.count(")") or one.count("`") % 2]
    assert wrong + odd == []
    assert not [known.name for known in failures.table() if not known.either and not known.cure]


def test_a_first_step_ends_at_a_semicolon() -> None:
    for known in failures.table():
        assert known.cure.startswith(first_step(known))
        assert "; " not in first_step(known)


RUN = "0a1b2c3d"
DONE = "step 8\nfinished after iteration 8\n"
LEFT = f"{STOPPED}all 2 ranks ended after SIGTERM\n"
ASKED = "runner: SIGTERM: asked 2 ranks to stop, waiting 600 s\n"
THREE = "runner: rank 1 exited with code 3\n"
ASKED_WHERE = "runner: rank 0 waits in barrier (a.py:1)\n"
"""What `stacks` had been told before, which was taken for why it ended."""
LIMIT = "out of memory (the container's limit, resources.memory)"
UNDER = "the engine was restarted under it"
RANK_KILLED = "runner: rank 1 was killed by signal 9 (SIGKILL), exit code 137"

FINISHED, STOPPED, FAILED = Outcome.FINISHED, Outcome.STOPPED, Outcome.FAILED


@pytest.mark.parametrize(
    ("ended", "asked", "tail", "outcome", "restart", "reason"),
    [
        (ExitStatus(0), False, "", FINISHED, False, ""),
        (ExitStatus(0), False, DONE, FINISHED, False, ""),
        (ExitStatus(0), True, DONE, FINISHED, False, ""),  # it was done before it heard
        (ExitStatus(0), True, "", STOPPED, False, ""),
        (ExitStatus(0), False, LEFT, STOPPED, False, ""),  # docker stop
        (ExitStatus(0), False, DONE + LEFT, FINISHED, False, ""),
        (ExitStatus(7), False, "runner: the launcher has gone: asked 2 ranks to stop, waiting",
         STOPPED,
         False, ""),
        (ExitStatus(7), True, "", STOPPED, False, ""),
        (ExitStatus(7), False, ASKED + "runner: rank 0 exited with code 7\n", STOPPED, False,
         "rank 0 exited with code 7"),
        (ExitStatus(2), False, "", FAILED, False, ""),
        (ExitStatus(121), False, "", FAILED, False, ""),
        (ExitStatus(3), False, "", FAILED, True, ""),
        (ExitStatus(3), False, f"{ASKED_WHERE}{THREE}runner: rank 0 exited with code 1\n", FAILED,
         True,
         "rank 1 exited with code 3"),
        (ExitStatus(1), False, f"OSError: [Errno 28] No space left on device\n{THREE}", FAILED,
         True,
         "a disk is full"),
        (ExitStatus(137), True, "", STOPPED, False, ""),
        (ExitStatus(137), False, "", FAILED, True, "killed from outside, by SIGKILL"),
        (ExitStatus(137), False, f"step 3 of{RANK_KILLED}\n", FAILED, True,
         "rank 1 was killed by signal 9 (SIGKILL), exit code 137"),
        (ExitStatus(137), False, ASKED + "runner: killing rank 0, 1: grace period over\n", STOPPED,
         False, "killing rank 0, 1: grace period over"),
        (ExitStatus(137, EndCause.MEMORY), False, "", FAILED, True, LIMIT),
        (ExitStatus(137, EndCause.MEMORY), False, f"{RANK_KILLED}\n", FAILED, True, LIMIT),
        (ExitStatus(137, EndCause.MEMORY), False,
         f"{RANK_KILLED}: out of memory (the machine's memory)\n",
         FAILED, True,
         f"{RANK_KILLED.removeprefix('runner: ')}: out of memory (the machine's memory)"),
        (ExitStatus(137, EndCause.REMOVED), False, "", FAILED, False,
         "it was removed from outside"),
        (ExitStatus(137, EndCause.REMOVED), True, "", STOPPED, False,
         "it was removed from outside"),
        (ExitStatus(137, EndCause.ENGINE), False, "", FAILED, True, UNDER),
        (ExitStatus(0, EndCause.ENGINE), False, ASKED + LEFT, FAILED, True, UNDER),
        (ExitStatus(0, EndCause.ENGINE), False, DONE, FINISHED, False, UNDER),
        (ExitStatus(0, EndCause.ENGINE), True, ASKED + LEFT, STOPPED, False, UNDER),
        (ExitStatus(143, EndCause.ENGINE), False, "", FAILED, True, UNDER),
    ],
)  # fmt: skip
def test_what_became_of_it(
    ended: ExitStatus, asked: bool, tail: str, outcome: Outcome, restart: bool, reason: str
) -> None:
    found = Ending(ended, asked, tail)
    assert (found.outcome, found.may_restart) == (outcome, restart)
    assert found.reason == reason
    cut_short = ended.code == 0 and outcome is FAILED  # which would be a 0 for success
    stopped = ended.code == 0 and outcome is STOPPED and not asked
    assert found.code == (125 if cut_short else 143 if stopped else ended.code)


@table("tail", "code")
def test_a_run_that_a_signal_stopped_is_not_finished(tail: str, code: int) -> None:
    """A rank that got SIGTERM by itself ended the run with 0, as if it had been done."""
    found = Ending(ExitStatus(0), asked=False, tail=tail)
    assert (found.code, found.outcome) == (code, STOPPED if code else FINISHED)
    assert not found.may_restart


def test_the_newest_checkpoint_is_named_with_how_to_go_on() -> None:
    """After another schedule the command that was told failed in the same way again."""
    said = (
        "AssertionError: OptimizerParamScheduler: class input value 5e-05 and checkpointvalue "
        "0.0001 for learning rate do not match\nrunner: rank 0 exited with code 1\n"
    )
    saved = CheckpointFolder(40, Path("/saves/iter_0000040"))
    assert describe(Ending(ExitStatus(0), True, ""), "0a1b", saved, "/save") == [
        "run 0a1b stopped, exit code 0",
        "newest complete checkpoint: /saves/iter_0000040 (iteration 40)",
        "to go on: launcher resume 0a1b",
    ]
    *_, last = describe(Ending(ExitStatus(1), False, said), "0a1b", saved, "/save")
    command, _, setting = last.partition(" --set ")
    assert command == "to go on: launcher resume 0a1b"
    config, _ = origins.load("gpt2", [origins.parse_set(setting)])
    assert config.megatron_args[resume.OVERRIDE] is True


@pytest.mark.parametrize(
    ("code", "tail", "first"),
    [
        (3, THREE, "run 0a1b failed: rank 1 exited with code 3"),
        (1, THREE, "run 0a1b failed, exit code 1: rank 1 exited with code 3"),
        (3, "", "run 0a1b failed, exit code 3"),
        (30, THREE, "run 0a1b failed, exit code 30: rank 1 exited with code 3"),
    ],
)
def test_the_exit_code_is_told_once(code: int, tail: str, first: str) -> None:
    ending = Ending(ExitStatus(code), False, tail)
    assert describe(ending, "0a1b", None, "") == [first]
    assert describe(ending, "0a1b", None, "/save") == [first, "it saved no complete checkpoint"]
    finished = describe(Ending(ExitStatus(0), False, DONE), "0a1b", None, "/save")
    assert finished == ["run 0a1b finished"]


@pytest.mark.parametrize(
    ("found", "signals", "by"),
    [
        (Ending(ExitStatus(0), False, ""), [], "itself"),
        (Ending(ExitStatus(3), False, ""), [], "itself"),
        (Ending(ExitStatus(0), True, ""), ["SIGINT"], "the launcher, on SIGINT"),
        (
            Ending(ExitStatus(137), True, ""),
            ["SIGINT", "SIGTERM"],
            "the launcher, on SIGINT, SIGTERM",
        ),
        (Ending(ExitStatus(0), True, ""), [], "launcher stop"),
        (Ending(ExitStatus(0), False, ASKED), [], "somebody outside"),
        (Ending(ExitStatus(137, EndCause.REMOVED), False, ""), [], "removed from outside"),
        (Ending(ExitStatus(137, EndCause.MEMORY), False, ""), ["SIGINT"], "out of memory"),
    ],
)
def test_who_ended_it(kept: Path, found: Ending, signals: list[str], by: str) -> None:
    ending.write_ending(RUN, 0, found, signals, None)
    assert [told["by"] for told in record.read_lines(kept / record.ENDINGS)] == [by]


def test_what_a_log_says_of_a_failure_is_kept_with_its_end(kept: Path) -> None:
    """The page of runs would have to read every log to say what mends a run."""
    text = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    ending.write_ending(RUN, 0, Ending(ExitStatus(1), False, text), [], None)
    ending.write_ending(RUN, 1, Ending(ExitStatus(0), True, text), [], None)
    failed, stopped = record.read_lines(kept / record.ENDINGS)
    assert failed["clues"][0].startswith("cause: ")
    assert failed["clues"][1].startswith("cure: ")
    assert stopped["clues"] == []


def test_endings_come_back_in_their_order_with_what_was_saved(kept: Path) -> None:
    saved = CheckpointFolder(20, Path("/ck/iter_0000020"))
    ending.write_ending(
        RUN, 0, Ending(ExitStatus(1), False, "runner: rank 1 exited with code 1\n"), [], saved
    )
    ending.write_ending(RUN, 1, Ending(ExitStatus(0), False, ""), [], None)
    with (kept / record.ENDINGS).open("a") as file:
        file.write('{"attempt": 2, "out')
    first, second = record.read_lines(kept / record.ENDINGS)
    assert (first["outcome"], first["code"], first["iteration"]) == ("failed", 1, 20)
    assert first["reason"] == "rank 1 exited with code 1"
    assert (second["attempt"], second["outcome"], second["checkpoint"]) == (1, "finished", None)
    ending.write_ending(
        "ffffffff", 0, Ending(ExitStatus(0), False, ""), [], None
    )  # it has no record
    assert not (kept.parent / "ffffffff").exists()
