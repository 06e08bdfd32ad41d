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
CHECKOUT, PASSED, MADE = (re.compile(LINES[name]) for name in ("checkout", "passed", "made"))
WRAPPER = re.compile(r"(?:^|[._])(?:wrapp(?:er|ed)\w*|decorat\w*|inner(?:_f)?|new_func|_fn)$")
"""Functions that call another for somebody: decorators'."""
HANDS_ON = re.compile(r"\*\*\w*(?:kwargs?|kwds)\b")  # a call with whatever its caller gave

NATIVE, ENDING = re.compile(LINES["native"], re.VERBOSE), re.compile(LINES["ending"])
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


def traceback(before: Iterable[Words], error: str = "TypeError") -> list[re.Match[str]]:
    """The frames of the last traceback, outermost first, without those that pass this error on."""
    frames, is_last = list[re.Match[str]](), False  # is_last: this line may be the last one's code
    passes = 0  # frames at the end that pass on what they got
    for line in before:
        frames = [] if line.text.startswith("Traceback") else frames
        if frame := FRAME.search(line.text):
            is_last = not PASSED.search(frame[1]) and not WRAPPER.search(frame[3])
            frames, passes = [*frames[: len(frames) - passes], *([frame] * is_last)], 0
        elif is_last and len(frames) > 1 and HANDS_ON.search(line.text):
            passes = 1
    return frames[: len(frames) - passes * ("TypeError" in error)]


def meaning(error: str, place: str) -> tuple[str, str]:
    """Who says an error that no row knows and what its words mean; and what to try first."""
    owner = OWNER.search(place)
    found = {"package": LINES["packages"].get(owner[1], owner[1]) if owner else PROGRAM}
    told, step = next((told, step) for says, told, step in STEPS if says.search(error))
    return f"{who(error)}: {told}", fill(step, found)


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
    whose = owner or ("your script or checkout" if _is_yours(last[1], frames) else "")
    return f"raised by {_place(last)}{f' (code of {whose})' if whose else ''}{called}"


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


def _is_yours(path: str, frames: list[re.Match[str]]) -> bool:
    """Whether a file is below the working folder or the script's, and no program wrote it."""
    scripts = [one[1] for one in frames if one[3] == "<module>" and not _owner(one)]
    below = (
        scripts and scripts[0][0] == "/" and path.startswith(f"{scripts[0].rpartition('/')[0]}/")
    )
    return not MADE.search(path) and bool(below or path[0] != "/")


def _place(frame: re.Match[str]) -> str:
    line = f", line {frame[2]}" if frame[2] else ""  # IPython's old tracebacks have none here
    return f"{frame[3]} of {'/'.join(frame[1].split('/')[-3:])}{line}"
