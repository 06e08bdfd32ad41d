"""How a rank ends: with an exit code of its own, and a line where it can say why."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from launcher.train.arguments import UsageError

FAILED = 1
USAGE = 2


class RunError(Exception):
    """The run can't go on, for the reason in the text, which rank 0 prints; exit code 1.

    It is for what every rank finds out at the same time.
    """


def code(work: Callable[[], None]) -> int:
    """Do a rank's work; its exit code: 0, 1 where it failed, 2 for arguments that can't work."""
    try:
        work()
    except (UsageError, RunError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"gpt: {error}", file=sys.stderr, flush=True)
        return USAGE if isinstance(error, UsageError) else FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


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
