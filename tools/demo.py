"""`make demo`: where a base will have to be made, begins it while .venv is being set up.

Run by the system's own interpreter: standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tools import bootstrap


def main() -> int:
    """Set up .venv and run the demo in it, a base being made beside; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ahead = None
    if sys.version_info >= bootstrap.OLDEST and needs_base():
        print("no container engine answers: a Debian base is made while .venv is", flush=True)
        command = [sys.executable, "-u", "-m", "tools.demo", "base"]
        ahead = subprocess.Popen(command, cwd=bootstrap.ROOT, start_new_session=True)
    try:
        if code := bootstrap.main([str(bootstrap.ROOT / "requirements.txt")]):
            return code
        python = str(bootstrap.python_in(bootstrap.ROOT / ".venv"))
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the demo, too
        demo = subprocess.Popen([python, "-m", "launcher", "demo"])
        signal.signal(signal.SIGTERM, lambda *_: demo.terminate())
        return code if (code := demo.wait()) >= 0 else 128 - code
    except KeyboardInterrupt:
        return 130
    finally:
        if ahead and ahead.poll() is None:
            os.killpg(ahead.pid, signal.SIGINT)
            ahead.wait()


def make_base() -> None:
    """Make what of a base needs no package; where that fails, the demo makes it again."""
    from launcher.base.errors import LauncherError
    from launcher.base.settings import settings
    from launcher.images.engine.private import debian

    with suppress(LauncherError, OSError, KeyboardInterrupt):
        debian.make_layer(settings().cache / "bases", print)


def needs_base() -> bool:
    """Whether the demo will start an engine of its own, with nothing in it, and make its base.

    Not where that can't be known without .venv: a settings file needs packages to be read.
    """
    from launcher.base.errors import LauncherError
    from launcher.base.settings import settings
    from launcher.images.engine import connect
    from launcher.images.engine.private import packages, private

    try:
        cache = settings().cache
        if private.unsupported() or (cache / "engine/packages" / packages.COMPLETE).exists():
            return False
        return not any(
            one.chosen or not connect.socket_fault(Path(one.host.removeprefix("unix://")), 1.0)
            for one in connect.endpoints(os.environ)
        )
    except (ImportError, LauncherError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(make_base() if sys.argv[1:] == ["base"] else main())
