"""What an error says itself, with the packages it names; and what is a cause, what but a clue."""

from __future__ import annotations

import re
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from launcher.runs.explain import failures
from tests.tables import table
from tools.anchors import REPEATS

FEWEST = 8
"""Of the fixed text by which a cause is known; fewer stand in lines of other causes too."""

SITE = '  File "/x/site-packages/{}", line 77, in turn\n    gizmo(1)\n'


def fixed(parsed: Any) -> int:
    """The fewest characters that are fixed in whatever an expression matches."""
    count = 0
    for operation, value in parsed:
        if operation is code.LITERAL:
            count += not chr(value).isspace()
        elif operation is code.IN:
            count += all(one is code.LITERAL for one, _ in value)
        elif operation is code.SUBPATTERN:
            count += fixed(value[3])
        elif operation is code.BRANCH:
            count += min(map(fixed, value[1]))
        elif operation in REPEATS and value[0]:
            count += fixed(value[2])
    return count


def first(text: str) -> failures.FailureSign:
    found = failures.explain([text.encode()]).first
    assert found is not None
    return found


CERTAIN = [one for one in failures.table() if one.kind == "cause" and one.certainty == "cause"]


@pytest.mark.parametrize("known", CERTAIN, ids=lambda known: known.row)
def test_a_cause_is_known_by_more_than_a_few_letters(known: failures.Failure) -> None:
    """Any line with `ArrowInvalid` was told as a damaged file; such a row names its causes."""
    for says in known.says:
        assert fixed(parser.parse(says, re.MULTILINE)) >= FEWEST or known.who, says


@pytest.mark.parametrize("known", failures.table(), ids=lambda known: known.row)
def test_a_row_has_one_cure_or_several_causes(known: failures.Failure) -> None:
    """One cause beside others is a cause; a clue with four says nothing."""
    assert bool(known.cure) != bool(known.either)
    assert len(known.either) in (0, 2, 3)
    assert not (known.kind == "request" and known.either)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SITE.format("nemo/x.py") + "TypeError: turn() got an unexpected keyword argument 'by'",
         "turn doesn't take what nemo calls it with ('by')"),
        ("ModuleNotFoundError: No module named 'cv2'",
         "the Python module cv2 isn't found where the program runs"),
        (SITE.format("swift/x.py") + "ImportError: cannot import name 'turn' from 'peft' (/x)",
         "the installed peft has no turn, which swift imports from it"),
        ("ImportError: cannot import name 'Mapping' from 'collections' (/x)",
         "the installed Python has no Mapping, which the program imports from it"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x.json'",
         "/data/x.json isn't there"),
        ("requests.exceptions.HTTPError: 503 Server Error: for url: https://x.example",
         "a server answers 503: it refuses, or hasn't, what is asked of it"),
    ],
)  # fmt: skip
def test_an_error_that_says_what_is_wrong_is_told_in_its_words(text: str, name: str) -> None:
    """A missing module and a keyword of another release were two of three unknown errors."""
    assert first(text).failure.name == name


def test_the_package_of_a_module_is_named_as_pip_does() -> None:
    found = first("ModuleNotFoundError: No module named 'cv2'").failure
    assert "`pip install opencv-python-headless`" in found.remedy


@pytest.mark.parametrize(
    "prefix", ["WARNING ", "[W1128 03:04:05.6 x.cpp:7] ", "x.py:7: UserWarning: "]
)
def test_a_line_that_calls_itself_a_warning_is_no_cause(prefix: str) -> None:
    """A cache that couldn't be written was told as why a run failed that lost its GPU later."""
    lost = "OSError: [Errno 28] No space left on device"
    assert first(lost).failure.row == "a disk is full"
    assert failures.explain([f"{prefix}{lost}".encode()]).signs == []


def test_a_caught_error_in_a_line_of_a_log_is_no_end() -> None:
    """A retried download, quoted in a warning of a run that went on, was its end."""
    text = "'(MaxRetryError(\"HTTPSConnectionPool(host='x.example', port=443): Max retries\")'"
    assert failures.explain([text.encode()]).signs == []


def test_of_two_rows_in_a_line_the_later_one_is_the_reason() -> None:
    """`Unable to allocate resources: Socket timed out` was told as resources that aren't there."""
    text = "srun: error: Unable to allocate resources: Socket timed out on send/recv operation"
    assert first(text).failure.row == "Slurm's controller or a node's daemon doesn't answer"


def test_programs_are_told_whether_it_is_a_cause_or_a_clue() -> None:
    text = "ModuleNotFoundError: No module named 'cv2.gizmo'"
    clue = failures.explain([text.encode()]).as_json()["causes"][0]
    assert (clue["certainty"], len(clue["either"])) == ("clue", 3)
    assert clue["row"] == "this Python finds no {module} in {package}"
    cause = failures.explain([b"RuntimeError: uncorrectable ECC error"]).as_json()["causes"][0]
    assert (cause["certainty"], list(cause["either"])) == ("cause", [])


def test_a_clue_names_its_causes_the_likeliest_first() -> None:
    text = SITE.format("verl/x.py") + "ModuleNotFoundError: No module named 'cv2'"
    lines = failures.explain([text.encode()]).lines
    assert lines[0].startswith("this points to: ")
    assert lines[3] == f"{failures.OPEN}:"
    assert "isn't installed" in lines[4]


OWN = """Traceback (most recent call last):
  File "/home/x/train.py", line 9, in <module>
    main()
  File "/home/x/model.py", line 7, in turn
    gizmo.by
"""


@table("error")
def test_an_error_of_ones_own_code_is_located(error: str) -> None:
    """A fault of a script was told as packages whose releases don't fit."""
    inner = '  File "/x/site-packages/torch/nn/modules/module.py", line 3, in __getattr__\n'
    for text in (OWN + error, OWN + inner + error):
        found = first(text).failure
        assert (found.certainty, found.either) == ("located", ())
        assert found.cure
        assert found.name == (
            "raised by turn of home/x/model.py, line 7 (code of your script or checkout), "
            "called by <module> of home/x/train.py, line 9"
        )


def test_a_script_whose_name_has_no_ending_is_located() -> None:
    """Lines of a traceback were read only where a file ends in .py."""
    text = OWN.replace("model.py", "tool") + "KeyError: 'gizmo'"
    assert first(text).failure.name.startswith("raised by turn of home/x/tool, line 7 ")


def test_an_error_of_an_installed_package_is_located() -> None:
    """Three causes were guessed, and an engine was told to be of another release than itself."""
    found = first(OWN + SITE.format("verl/x.py") + "KeyError: 'gizmo'").failure
    assert (found.certainty, found.either) == ("located", ())
    assert "(code of verl), called by turn of home/x/model.py" in found.name


ARGUMENT = "TypeError: Gizmo.__init__() got an unexpected keyword argument 'by'"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        # A decorator's file was told as the caller.
        (SITE.format("transformers/by.py").replace("in turn", "in by.<locals>.wrapper"),
         "Gizmo.__init__ doesn't take what the program calls it with ('by')"),
        (SITE.format("trl/x.py") + SITE.format("hub/by.py").replace("gizmo(1)", "f(*a, **kwargs)"),
         "Gizmo.__init__ doesn't take what trl calls it with ('by')"),
        # A file's key was told as a package of another release.
        (SITE.format("accelerate/x.py").replace("gizmo(1)", "cls(**config_dict)"),
         "accelerate reads a setting that it doesn't know: 'by'"),
    ],
)  # fmt: skip
def test_who_calls_is_who_chose_the_argument(frames: str, name: str) -> None:
    assert first(f"Traceback (most recent call last):\n{frames}{ARGUMENT}").failure.name == name


def test_only_the_last_traceback_says_what_called() -> None:
    """The frames of an exception that was caught before were callers of the one that ended it."""
    caught = "Traceback (most recent call last):\n" + SITE.format("verl/x.py") + "EOFError\n"
    own = OWN.replace('  File "/home/x/train.py", line 9, in <module>\n    main()\n', "")
    assert "called by" not in first(caught + own + "KeyError: 'gizmo'").failure.name


def test_an_exception_without_its_message_is_quoted_with_it() -> None:
    """`CheckpointingException:` was all that was quoted, and its place in Megatron not found."""
    text = "gizmo.FrobnicateException:\nthe gizmo is upside down"
    said = first(text).said
    assert said is not None
    assert said.text == "gizmo.FrobnicateException: the gizmo is upside down"


def test_a_line_that_passes_on_a_warning_is_no_place() -> None:
    """Apptainer's `extract command failed: WARNING: ...` hid the error some lines below."""
    log = b"FATAL:   by turning x: gizmo failed: WARNING: no passwd\ngizmo: failed to turn\n"
    found = failures.explain([log]).first
    assert found
    assert found.said
    assert found.said.text == "gizmo: failed to turn"


@table("said", "step")
def test_a_tool_s_last_words_are_a_place(said: str, step: str) -> None:
    """Errors without the word were no line like one; an errno's step asks for its object."""
    found = failures.explain([f"step 1\n{said}\n".encode()]).first
    assert found is not None
    assert found.said is not None
    assert found.said.text == said.split("\n")[0]
    assert step in found.failure.cure


def test_an_unknown_error_is_located() -> None:
    """Only Megatron's own lines were; a thread that asks needs the line that raised it."""
    said = failures.explain([(OWN + "FrobnicateError: upside down").encode()]).suspects[0]
    assert said.raised_by.startswith("raised by turn of home/x/model.py, line 7 (code of your")


def test_an_error_in_torch_is_of_who_called_it() -> None:
    """A checkpoint without an optimizer was told as releases of torch that don't fit."""
    found = first(OWN + SITE.format("torch/optim/x.py") + "KeyError: 'gizmo'").failure
    assert found.certainty == "located"
    assert found.name.endswith("(code of torch), called by turn of home/x/model.py, line 7")


def test_a_traceback_of_a_notebook_has_its_owner() -> None:
    """Its head, "KeyError  Traceback", was quoted as the error, and no package was named."""
    text = (
        "KeyError                                  Traceback (most recent call last)\n"
        "/usr/lib/dist-packages/verl/loss.py in _batch(self, *args, **kwargs)\n"
        '--> 316                     ids = kwargs["ids"]\n\n'
        "KeyError: 'ids'"
    )
    found = first(text)
    assert found.said is not None
    assert (found.said.text, found.said.raised_by) == (
        "KeyError: 'ids'",
        "raised by _batch of dist-packages/verl/loss.py (code of verl)",
    )
