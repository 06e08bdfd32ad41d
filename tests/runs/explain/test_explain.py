"""What outranks what in a log: reasons, requests, reports, summaries, and what is unknown."""

from __future__ import annotations

import time

import pytest

from launcher.runs.explain import failures
from tests.tables import table

ASKED = "a user or the scheduler ended the run"
GONE = "another rank, or its node, is gone"


def first(*lines: str) -> str:
    """The name of what is told as the cause, "" for none."""
    signs = failures.explain(["\n".join(lines).encode()]).signs
    return signs[0].failure.row if signs else ""


@table("lines", "name")
def test_kinds_of_lines_that_were_named_wrongly(lines: list[str], name: str) -> None:
    assert first(*lines) == name


def test_tracebacks_of_two_ranks_are_read_apart() -> None:
    """Line by line in one another, neither row of two lines fitted."""
    frame = '  File "/usr/lib/python3.12/multiprocessing/synchronize.py", line 57, in __init__'
    told = [frame, "    sl = self._semlock = _multiprocessing.SemLock(",
            "OSError: [Errno 28] No space left on device"]  # fmt: skip
    log = [f"[rank{rank}]: {line}" for line in told for rank in (0, 1)]
    assert first(*log) == "shared memory, /dev/shm, is too small"


def test_a_request_that_came_after_a_failure_is_no_cause() -> None:
    """torchrun asks the other ranks to end; so does who sees a run fail."""
    asked = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***"
    assert first(asked) == ASKED
    assert first("FrobnicateError: upside down", asked) == ""
    assert first("OSError: [Errno 98] Address already in use", asked) == "the port is taken"


def test_what_others_report_of_an_unknown_failure_is_no_cause() -> None:
    """The peers' broken connections were told as the cause of what rank 3 had raised."""
    log = "[rank3]: FrobnicateError: upside down\n[rank0]: RuntimeError: Connection closed by peer"
    found = failures.explain([log.encode()])
    assert found.signs == []
    assert [sign.failure.row for sign in found.aftermath] == [GONE]
    assert found.suspects[0].line == 1
    assert f"  {GONE} (line 2, rank 0)" in found.lines


def test_the_first_failure_of_a_rank_outranks_what_others_said_before_it() -> None:
    """Nodes' outputs come late: the rank that failed first was heard after the others."""
    log = "node-0 | [rank0]: RuntimeError: Connection closed by peer\n"
    late = "node-1 | [rank9]: FrobnicateError: upside down\n"
    assert first(log) == GONE
    assert first(log + late) == ""
    assert first(log + late.replace("rank9", "rank0")) == GONE


@pytest.mark.parametrize(
    "word",
    [
        *("slurmstepd: error: ", "NCCL WARN ", "Error: ", "needs: Error: ", "1"),
        *("Indexing.cu:1: block:  Assertion idx ", "[a]:" + " " * 65536),  # the cube of its length
    ],
)
def test_long_lines_take_no_long_time(word: str) -> None:
    """An expression that is tried at each place of a line, up to its end, took minutes of 64 KB."""
    begun = time.process_time()
    line = (word * (65536 // len(word) + 1))[:65536]
    kinds = "ghijklmnopqrstuvwxyz"
    failures.explain([f"{line} {kind} must be of Error\n".encode() for kind in kinds])
    assert time.process_time() - begun < 10


def test_of_chained_exceptions_the_first_is_suspected() -> None:
    """The last is what a handler made of it."""
    log = [
        "KeyError: 'a.b'",
        "During handling of the above exception, another exception occurred:",
        "FrobnicateError: the state has no a.b",
    ]
    found = failures.explain(["\n".join(log).encode()])
    assert [said.line for said in found.suspects] == [1]


def test_an_exception_without_a_name_of_its_own_is_suspected() -> None:
    """`Exception: …` looked like prose."""
    found = failures.explain([b"iteration 1\nException: the gizmo is upside down\n"])
    assert [said.line for said in found.suspects] == [2]


def test_of_two_rows_the_one_that_explains_more_lines_is_told() -> None:
    """A line of a longer text is no second failure."""
    log = [
        "    sl = self._semlock = _multiprocessing.SemLock(",
        "OSError: [Errno 28] No space left on device",
    ]
    found = failures.explain(["\n".join(log).encode()])
    assert [sign.failure.row for sign in found.signs] == ["shared memory, /dev/shm, is too small"]


@pytest.mark.parametrize(
    ("raised", "where"),
    [
        ("AssertionError: --attention-backend local is only supported with --spec local",
         "megatron/training/arguments.py"),
        ("AssertionError: something that no release says", ""),
    ],
)  # fmt: skip
def test_megatron_s_own_refusals_are_located(raised: str, where: str) -> None:
    """What no row knows was a line and no more."""
    found = failures.explain([raised.encode()])
    said = found.signs[0].said if found.signs else found.suspects[0]
    assert said is not None
    assert where in said.raised_by if where else said.raised_by == ""
    told = "\n".join(found.lines)
    assert (where in told) if where else ("raised" not in told)


def test_a_place_is_told_of_what_no_release_says() -> None:
    """A stack's last frame in Megatron is better than nothing."""
    log = [
        'File "/x/megatron/core/transformer/moe/router.py", line 9, in forward',
        "RuntimeError: the gizmo is upside down",
    ]
    found = failures.explain(["\n".join(log).encode()])
    where = "raised by forward of transformer/moe/router.py, line 9 (code of megatron)"
    assert found.suspects[0].raised_by == where


OWN = 'Traceback (most recent call last):\n  File "train.py", line 9, in turn\n'


@table("line")
def test_what_a_run_goes_on_after_is_not_its_failure(line: str) -> None:
    """Scripts and imports write these; a traceback after hundreds of steps was told as theirs."""
    log = f"{line}\niteration 1/ 9\niteration 2/ 9\n{OWN}FrobnicateError: upside down"
    found = failures.explain([log.encode()]).first
    assert found
    assert found.failure.name.startswith("raised by turn of train.py")
    log = f"{line}\niteration 1/ 9\niteration 2/ 9\nFrobnicateError: upside down"
    found = failures.explain([log.encode()]).first
    assert found
    assert found.said
    assert found.said.text == "FrobnicateError: upside down"


@pytest.mark.parametrize(
    "line", ["Error rate: 0.12", "Error: 0.12", "Timeout 30 s, on error", "epoch: 12: error 0.3"]
)
def test_a_number_that_is_called_an_error_is_no_place(line: str) -> None:
    assert failures.explain([line.encode()]).first is None


def test_a_place_is_not_that_of_an_error_before() -> None:
    """A caught exception's traceback was told as the place of a later one, which had none."""
    log = f"{OWN}ValueError: no cache\niteration 1/ 9\niteration 2/ 9\nFrobnicateError: upside down"
    places = [one.raised_by for one in failures.explain([log.encode()]).suspects]
    assert places == [
        "raised by turn of train.py, line 9 (code of your script or checkout)",
        "",
    ]


def test_who_called_a_package_is_told() -> None:
    """The frame before was torch's own, and what had called torch wasn't in the answer."""
    frames = ["/home/x/train.py", "/x/site-packages/torch/a.py", "/x/site-packages/torch/b.py"]
    log = [f'File "{path}", line 9, in turn' for path in frames]
    found = failures.explain(["\n".join([*log, "FrobnicateError: upside down"]).encode()])
    assert found.first
    assert found.first.failure.name == (
        "raised by turn of site-packages/torch/b.py, line 9 (code of torch), "
        "called by turn of home/x/train.py, line 9"
    )
    assert found.lines[0].startswith("where it failed: raised by turn of ")
    assert found.lines[2].startswith("first step: ")


def test_a_traceback_that_is_cut_off_is_a_place() -> None:
    """An excerpt that ended before the exception's own line had no line like a cause at all."""
    found = failures.explain([f"{OWN}    raise GizmoError(text)".encode()]).first
    assert found
    assert found.failure.name.startswith("raised by turn of train.py, line 9 ")
    assert found.said
    assert found.said.text == "raise GizmoError(text)"
    ignored = f"Exception ignored in: <function x>\n{OWN}OSError: upside down"
    assert failures.explain([ignored.encode()]).first is None


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (["==== backtrace ====", " 0  /l/libucs.so.0(ucs_handle_error+0x73) [0x7f]",
          " 1  /l/libuct.so.0(+0xf4) [0x7f]", " 2  /l/libuct.so.0(uct_turn+0xf4) [0x7f]"],
         "crashed in uct_turn of libuct.so.0"),
        ([" 0 0x000000000004a9d5 uct_turn()  /src/mm_ep.c:230"], "crashed in uct_turn of mm_ep.c"),
        (["    @     0x7fa86e496801 abort", "    @     0x7fa86f6f97b5 gizmo::Turn()"],
         "crashed in gizmo::Turn"),
    ],
)  # fmt: skip
def test_a_crash_has_the_function_that_it_was_in(frames: list[str], where: str) -> None:
    """Only the signal was quoted, and whose code it was in stood in the lines after it."""
    log = ["[n1:7 :0:7] Caught signal 11 (Segmentation fault)", *frames]
    found = failures.explain(["\n".join(log).encode()])
    assert found.signs[0].said
    assert found.signs[0].said.raised_by == where
    loud = "[n1:8 :0:8]       mm_ep.c:231  Fatal: Failed to attach the gizmo"
    assert failures.explain(["\n".join([*log, loud]).encode()]).lines[-2:] == [
        "lines that may say why:",
        f"  line {len(log) + 1}: {loud}",
    ]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("wandb: Network error (ReadTimeout), entering retry loop.",
         "Weights & Biases: a connection over the network failed, or got no answer"),
        ("n1:7:7 [0] misc/gizmo.cc:9 NCCL WARN Call to gizmo failed: Permission denied",
         "NCCL: something isn't permitted to this user"),
        ("/opt/bin/luajit: File.lua:210: write error: wrote 3 blocks instead of 4",
         "luajit: a file couldn't be written whole"),
        ("ImportError: cannot import name 'Gizmo'",
         "the program: a name isn't in the module that it is imported from"),
        ("n1:7:7 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v5", ""),
        ("gizmo: step failed\nwobble: step failed\nwidget: step failed", ""),
        ("gizmo: step failed" + "\nstep" * 99, ""),
    ],
)  # fmt: skip
def test_the_last_loud_line_of_a_tool_is_a_place(line: str, name: str) -> None:
    """It was shown without a claim, or what a finished run had passed over was a place."""
    found = failures.explain([line.encode()]).first
    assert (found.failure.name if found else "") == name


def test_a_summary_has_the_lines_that_may_say_why() -> None:
    """Only the line that sums up was quoted; what the tool had said before it wasn't."""
    log = ["helper: ERROR: the gizmo is upside down", "FATAL:   it can't go on"]
    found = failures.explain(["\n".join(log).encode()])
    assert found.signs[0].kind == "summary"
    assert found.lines[-2:] == ["lines that may say why:", f"  line 1: {log[0]}"]


def test_what_to_say_with_a_question_is_told() -> None:
    """Whoever is asked wants releases, layout and the last iteration first."""
    log = [
        "using world size: 8, data-parallel size: 2, context-parallel size: 1, "
        "tensor-model-parallel size: 2, pipeline-model-parallel size: 2",
        "n1:7:7 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
        " [2026-01-02 03:04:05] iteration       33/     100 | consumed samples: 132 |",
        "FrobnicateError: the gizmo is upside down",
    ]
    found = failures.explain(["\n".join(log).encode()])
    assert found.signs == []
    told = found.as_json()
    assert told["about"]["NCCL"].startswith("2.27.3")
    assert told["about"]["last iteration"] == "33"
    assert told["suspects"][0]["line"] == 4
    assert found.lines[-1].startswith("to include when you ask for help: ")


def test_an_exception_that_python_ignores_ends_nothing() -> None:
    """A finished run of MLPerf was told that its file system had failed, after it had ended."""
    ended = ["Finished after 5 epochs.", "Error in atexit._run_exitfuncs:"]
    stale = "OSError: [Errno 116] Stale file handle"
    assert first(*ended, stale) == ""
    assert first(ended[0], stale) == "a disk or a shared file system failed"
    frames = ["Exception ignored in: <function x>", "Traceback (most recent call last):", "  x"]
    assert first(*frames, stale) == ""
    assert first(*frames, stale, stale) == "a disk or a shared file system failed"


WRAPPED = {
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed": "certificate isn't trusted",
    "returned error 403 Forbidden": "a server answers 403",
    "Invalid feature specification": "features that the job",
}
WRAPPERS = [
    "hydra.errors.GizmoException: turn failed: {}",
    "requests.exceptions.SSLError: Max retries exceeded with url: /turn ({})",
    "sbatch: error: Batch job submission failed: {}",
]


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [(WRAPPERS[0], reason) for reason in list(WRAPPED)[:2]] + [(WRAPPERS[1], next(iter(WRAPPED)))],
)
def test_the_words_within_a_line_outrank_who_wraps_them(wrapper: str, reason: str) -> None:
    """A refused key was a key of the configuration, an untrusted server a missing model."""
    found = failures.explain([wrapper.format(reason).encode()]).first
    assert found
    assert WRAPPED[reason] in found.failure.name


def test_a_feature_that_no_node_has_is_no_lack_of_gpus() -> None:
    assert "features" in first(WRAPPERS[2].format("Invalid feature specification"))


def test_an_exception_that_led_to_another_says_why() -> None:
    """Its wrapper, two tracebacks later, was the cause."""
    lines = ["gizmo.TurnError: HTTP 503 Service Unavailable", "",
             "The above exception was the direct cause of the following exception:", "",
             "hydra.errors.GizmoException: the gizmo is upside down"]  # fmt: skip
    assert first(lines[-1]).startswith("a key of the configuration")
    assert not first(*lines).startswith("a key of the configuration")


@pytest.mark.parametrize(
    "lines",
    [
        ["RuntimeError: Internal Triton PTX codegen error:", "ptxas info    : (C1) note on 'turn'",
         "ptxas fatal   : the gizmo is upside down"],
        ["gizmo.FrobnicateError: turn failed:", "the gizmo is upside down"],
    ],
)  # fmt: skip
def test_a_line_that_ends_before_its_message_is_quoted_with_it(lines: list[str]) -> None:
    """Its line was said to say why, and said nothing."""
    found = failures.explain(["\n".join(lines).encode()]).first
    assert found
    assert found.said
    assert "the gizmo is upside down" in found.said.text


def test_a_blank_line_ends_a_message() -> None:
    text = "FrobnicateError:\n\nfrom user code:\n   error: turn"
    found = failures.explain([text.encode()]).first
    assert found
    assert found.said
    assert found.said.text == "FrobnicateError:"


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("/home/x/model.py", "your script or checkout"),
        ("sub/model.py", "your script or checkout"),
        ("/turn/torchinductor_x/ab/cd.py", ""),
        ("/opt/gizmo/lib/model.py", ""),
        ("/data/pt/torch/_gizmo/model.py", "torch"),
    ],
)
def test_only_files_below_the_script_are_the_users_own(path: str, whose: str) -> None:
    """A compiler's cache and somebody's checkout of torch were the user's script."""
    frames = ['  File "/home/x/train.py", line 1, in <module>', f'  File "{path}", line 9, in turn']
    found = failures.explain(["\n".join([*frames, "FrobnicateError: no"]).encode()]).first
    assert found
    assert (f"line 9 (code of {whose})" in found.failure.name) == bool(whose)
    assert ("(code of" in found.failure.name) == bool(whose)


def test_a_commands_own_file_raises_and_calls_nothing() -> None:
    frame = '  File "/opt/gizmo/bin/torchrun", line 8, in <module>'
    found = failures.explain([f"{frame}\nFrobnicateError: upside down".encode()]).first
    assert found
    assert "torchrun" not in found.failure.name


def test_the_innermost_frame_raises_though_it_hands_on_what_it_got() -> None:
    """Its caller was where a CUDA error was raised; of a wrong argument, it is who chose it."""
    frames = ['  File "a.py", line 1, in <module>', "    turn(1)", '  File "b.py", line 9, in turn',
              "    return super().turn(*args, **kwargs)"]  # fmt: skip
    for error, place in (("RuntimeError: no", "b.py, line 9"), ("TypeError: no", "a.py, line 1")):
        found = failures.explain(["\n".join([*frames, error]).encode()]).first
        assert found
        assert place in found.failure.name.split(", called by")[0]


@pytest.mark.parametrize(
    ("number", "name"),
    [(79, "a GPU is broken"), (95, "a GPU is broken"), (31, "a GPU ended a program"),
     (61, "a GPU reports a fault"), (94, "a GPU reports a fault"), (119, "a GPU reports a fault")],
)  # fmt: skip
def test_an_xid_is_of_its_kind(number: int, name: str) -> None:
    """A fault of the firmware or driver was a broken GPU."""
    assert first(f"kernel: NVRM: Xid (PCI:0000:1a:00): {number}, turn").startswith(name)


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("gizmo create failed: read turn-p: connection reset by peer", False),
        ("gizmod: writing to the shim: Connection closed by peer", False),
        ("gloo/transport/tcp/pair.cc:9 [10.0.0.1]:77: Connection closed by peer [10.0.0.2]", True),
        ("[c10d] TCPStore recv failed: Connection reset by peer", True),
    ],
)
def test_a_reset_connection_is_a_ranks_only_by_a_collectives_words(line: str, gone: bool) -> None:
    """A container's runtime that couldn't start was a rank that is gone."""
    assert (first(line) == GONE) == gone


def test_what_stands_before_the_cause_does_not_follow_from_it() -> None:
    """The true line 1 was listed as what follows."""
    lines = ["make: gizmo-config: Command not found",
             "ImportError: cannot import name 'helpers' from 'megatron.data' (/x)"]  # fmt: skip
    found = failures.explain(["\n".join(lines).encode()])
    assert found.lines[-2:] == [
        "also in the log, before it:",
        "  a command's program isn't on PATH where it is started (line 1)",
    ]
    told = found.as_json()
    assert ([one["said"]["line"] for one in told["before"]], told["follows"]) == ([1], [])


def test_a_fault_in_a_check_of_options_is_no_refusal() -> None:
    """A key that the check itself lacked was two options that don't go together."""
    frame = '  File "/x/megatron/training/arguments.py", line 9, in validate_args\n    turn[by]\n'
    assert first(f"{frame}KeyError: torch.gizmo") == ""


@pytest.mark.parametrize(
    "line",
    [
        "hydra.errors.GizmoException: Error calling 'turn': the gizmo is upside down",
        "grpc._channel._InactiveRpcError: status = StatusCode.INVALID_ARGUMENT, upside down",
        "CondaOSError: the gizmo is upside down",
    ],
)
def test_the_name_of_a_wrapper_is_no_cause(line: str) -> None:
    """Whatever it passed on was a key of the configuration, a service that is away."""
    assert first(line) == ""
