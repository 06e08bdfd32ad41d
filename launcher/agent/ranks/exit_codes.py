"""Exit codes of a rank, and the errors that end one with a message."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from launcher.agent.words import say

FAILED = 1
USAGE = 2
LOST = ("Connection closed by peer", "Connection reset by peer")  # in gloo's words


class OptionError(Exception):
    """The options can't work together; the text says which, and how to mend it."""

    @property
    def options(self) -> list[str]:
        """Those that the text names, as a command line has them."""
        return list(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", str(self))))


class RunError(Exception):
    """The run can't go on, for the reason in the text; "" where another rank gives it."""


def code(work: Callable[[], None], program: str = "gpt") -> int:
    """Do a rank's work; its exit code: 0, 1 where it failed, 2 for arguments that can't work.

    `program` begins each line. Arguments that can't work are reported once on each node: they may
    have been typed there by hand.
    """
    try:
        work()
    except OptionError as error:  # the same on every rank of a node
        if is_first_here():
            say(str(error), f"{program}: ")
        return USAGE
    except RunError as error:
        if str(error):
            say(str(error), f"{program}: ")
        return FAILED
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch has some that aren't Exceptions
        if has_lost_another(error):
            say(f"rank {os.environ.get('RANK')} has lost another rank", f"{program}: ")
        else:
            traceback.print_exc()
        return FAILED
    return 0


def is_first_here() -> bool:
    """Whether this rank is the first of its node."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def has_lost_another(error: BaseException) -> bool:
    """Whether this rank failed for no more than that another one has ended."""
    return any(words in str(error) for words in LOST)


def leave(code: int) -> NoReturn:
    """End this process with `code`.

    A failure leaves a process group undestroyed, and C++ aborts a process (134) whose static
    destructors come upon the group's running threads: so those are skipped.
    """
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
