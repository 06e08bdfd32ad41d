"""Fills a row's texts with what an error's own words, and the traceback before it, name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from launcher.runs.explain.loglines import LINES, Words

FRAME = re.compile(
    r'(?:File "?|^(?=\S+\.py(?::\d+ in | in \w+\()))([^"]+?)(?:(?:", line |:)(\d+))?,? '
    r"in ([\w<>.]+)"
)
"""A frame of a traceback, Python's, IPython's or rich's: its file, line and function."""

INSTALLED = re.compile(r"(?:site|dist)-packages[/\\](\w+)")
CHECKOUT = re.compile(
    r"/(megatron|nemo|verl|swift|slime|torchtitan|torch(?=/(?:_\w+|nn|distributed|utils|cuda)/)"
    r"|deepspeed(?=/(?:runtime|ops|comm|launcher)/)|transformers(?=/(?:models|utils)/))/"
)
PASSED = re.compile(
    r"/lib/python3[\d.]*/(?!(?:site|dist)-packages)|torch/nn/modules/module\.py$|^<|/bin/[\w.-]+$"
)
"""Files that pass an error on: Python's own, a command's, and torch's for a module's attributes."""

MADE = re.compile(r"^/(?:tmp|dev/shm)/|/torchinductor_|/\.(?:cache|triton)/")  # by a program

WRAPPER = re.compile(r"(?:^|[._])(?:wrapp(?:er|ed)\w*|decorat\w*|inner(?:_f)?|new_func|_fn)$")
"""Functions that call another for somebody: decorators'."""
CALL = "TypeError"
HANDS_ON = re.compile(r"\*\*\w*(?:kwargs?|kwds)\b")  # a call with whatever its caller gave

NATIVE = re.compile(LINES["native"], re.VERBOSE)
ENDING = re.compile(LINES["ending"])
HOLE = re.compile(r"\{(\w+)\}")
PROGRAM = "the program"
OWNER = re.compile(r"\(code of (\w+)\)")  # in location()
REASONS = [(re.compile(says), re.compile(texts)) for says, texts in LINES["reasons"].items()]
STEPS = [(re.compile(says), meaning, step) for says, (meaning, step) in LINES["steps"].items()]
WHO = [(re.compile(says), name) for name, says in LINES["who"].items()]


def fill(text: str, found: dict[str, str]) -> str:
    """A text with the words that were found in place of its {holes}; others stay as they are."""
    return HOLE.sub(lambda hole: found.get(hole[1], hole[0]), text)


def values(match: re.Match[str], frames: list[re.Match[str]]) -> dict[str, str]:
    """What a match's groups name, and by its frames the caller (a package)."""
    found = {name.rstrip("_"): value for name, value in match.groupdict().items() if value}
    module = found.get("module", "").partition(".")[0]
    is_python = module in sys.stdlib_module_names
    return {
        "package": "Python" if is_python else LINES["packages"].get(module, module),
        "caller": (frames and _owner(frames[-1])) or PROGRAM,
        **found,
    }


def traceback(before: Iterable[Words], error: str = CALL) -> list[re.Match[str]]:
    """The frames of the last traceback, outermost first, without those that pass an error on.

    A frame that calls with whatever its caller gave passes on but errors of the call itself.
    """
    frames, is_last = list[re.Match[str]](), False  # is_last: this line may be the last one's code
    hands_on = False  # whether the last one does
    for line in before:
        frames = [] if line.text.startswith("Traceback") else frames
        if frame := FRAME.search(line.text):
            is_last = not PASSED.search(frame[1]) and not WRAPPER.search(frame[3])
            frames = [*(frames[:-1] if hands_on else frames), *([frame] * is_last)]
            hands_on = False
        elif is_last and len(frames) > 1:
            hands_on = hands_on or bool(HANDS_ON.search(line.text))
    return frames[:-1] if hands_on and CALL in error else frames


def meaning(error: str, place: str) -> tuple[str, str]:
    """Who says an error that no row knows and what its words mean; and what to try first."""
    owner = OWNER.search(place)
    found = {"package": LINES["packages"].get(owner[1], owner[1]) if owner else PROGRAM}
    told, step = next((told, step) for says, told, step in STEPS if says.search(error))
    return f"{who(error)}: {told}", fill(step, found)


def overlooks(texts: str, line: str) -> bool:
    """Whether a line has words that say why, of which the texts of a row that fits it do not."""
    return any(says.search(line) and not known.search(texts) for says, known in REASONS)


def who(error: str) -> str:
    """Which tool or library says a line, by its words; the program where they don't name one."""
    found = ((says.match(error), name) for says, name in WHO)
    return next((fill(name, match.groupdict()) for match, name in found if match), PROGRAM)


def location(frames: list[re.Match[str]]) -> str:
    """Which line raised an error, whose code it is, and which other code called it; "" for none."""
    if not frames:
        return ""
    *calls, last = frames
    owner = _owner(last)
    others = [frame for frame in calls if _owner(frame) != owner] or calls
    called = f", called by {_place(others[-1])}" if others else ""
    whose = f" (code of {owner})" if owner else " (code of your script or checkout)" * _is_yours(last, frames)
    return f"raised by {_place(last)}{whose}{called}"


def native(lines: Iterable[Words]) -> str:
    """The innermost function of a crashed process that isn't of the handler; "" for none."""
    for frame in filter(None, (NATIVE.search(line.text) for line in lines)):
        called = frame["func"] or frame["of"] or frame["at"]
        if not ENDING.match(called):
            where = (frame["lib"] or frame["file"] or "").rpartition("/")[2].strip("?")
            return f"crashed in {called}{f' of {where}' if where else ''}"
    return ""


def _owner(frame: re.Match[str]) -> str:
    owner = INSTALLED.search(frame[1]) or CHECKOUT.search(frame[1])
    return owner[1] if owner else ""


def _is_yours(frame: re.Match[str], frames: list[re.Match[str]]) -> bool:
    """Whether its file is below the working folder or the script's, and written by nobody else."""
    own = [one for one in frames if not _owner(one) and not MADE.search(one[1])]
    folders = [one[1].rpartition("/")[0] for one in own if one[3] == "<module>"][:1]
    below = not frame[1].startswith("/") or any(frame[1].startswith(f"{one}/") for one in folders)
    return below and not MADE.search(frame[1])


def _place(frame: re.Match[str]) -> str:
    line = f", line {frame[2]}" if frame[2] else ""  # IPython's old tracebacks have none here
    return f"{frame[3]} of {'/'.join(frame[1].split('/')[-3:])}{line}"
