"""Signs new checkpoints and removes old ones while a run goes on, whatever program saves them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.checkpoints import folders, lineage

POLL_SECONDS = 5.0


@dataclass
class Retention:
    """Lets the complete checkpoints of a `line` under `root` say so, and keeps the newest `keep`.

    It looks when the tracker, which a program writes last, has changed since the start: a run that
    saves nothing removes nothing. What it removes, or can't, it passes to `say`. Where another run
    has taken the folder over, it does nothing.
    """

    root: Path
    line: str
    keep: int | None
    say: Callable[[str], None]
    holder: str = ""
    seen: int = 0

    def __post_init__(self) -> None:
        with suppress(OSError):
            self.seen = (self.root / folders.TRACKER).stat().st_mtime_ns
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
        """Sign what is complete and remove what is too old, if the tracker has changed since."""
        try:
            changed = (self.root / folders.TRACKER).stat().st_mtime_ns
            claimed = lineage.claimed(self.root)
            if changed == self.seen or (claimed and claimed.holder != self.holder):
                return
            self.seen = changed
            folders.sign(self.root)
            removed = folders.clear(self.root, self.line)
            if self.keep:
                removed += folders.prune(self.root, self.keep, self.line)
        except FileNotFoundError:
            return
        except OSError as error:
            self.say(f"checkpoints in {self.root} can't be signed or removed: {error.strerror}")
            return
        if removed:
            self.say(f"removed checkpoints {', '.join(path.name for path in removed)}")
