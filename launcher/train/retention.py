"""Removes old checkpoints while a run goes on, whatever program it is that saves them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from launcher.train import folders

POLL_SECONDS = 5.0


class Retention:
    """Keeps the newest `keep` complete checkpoints under `root`.

    It looks when the tracker has changed, which is what a program writes last. What it removes,
    and that it can't, it tells `say`.
    """

    def __init__(self, root: Path, keep: int, say: Callable[[str], None]) -> None:
        self.root = root
        self.keep = keep
        self.say = say
        self.seen = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Retention:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.look()

    def _watch(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Remove what is too old, if the tracker has changed since the last look."""
        try:
            changed = (self.root / folders.TRACKER).stat().st_mtime_ns
            if changed == self.seen:
                return
            self.seen = changed
            removed = folders.prune(self.root, self.keep)
        except FileNotFoundError:
            return
        except OSError as error:
            self.say(f"old checkpoints in {self.root} can't be removed: {error.strerror}")
            return
        if removed:
            self.say(f"removed checkpoints {', '.join(path.name for path in removed)}")
