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

    It looks when there are other checkpoints, or another tracker, which a program writes last, than
    at the start. So a run that begins no save removes nothing, and a save for which the disk has
    no room lets old ones go. What it removes, or can't, it passes to `say`. Where another run has
    taken the folder over, it does nothing.
    """

    root: Path
    line: str
    keep: int | None
    say: Callable[[str], None]
    holder: str = ""
    seen: tuple[int, frozenset[str]] = (0, frozenset())

    def __post_init__(self) -> None:
        with suppress(OSError):
            self.seen = self._found()
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
        """Sign what is complete and remove what is too old, if there is anything else since."""
        try:
            found = self._found()
            claimed = lineage.claimed(self.root)
            if found == self.seen or (claimed and claimed.holder != self.holder):
                return
            try:
                folders.sign(self.root)
                removed = folders.clear(self.root, self.line)
                if self.keep:
                    removed += folders.prune(self.root, self.keep, self.line)
            finally:  # what was removed here is no change
                self.seen = found[0], self._found()[1]
        except FileNotFoundError:
            return
        except OSError as error:
            self.say(f"checkpoints in {self.root} can't be signed or removed: {error.strerror}")
            return
        if removed:
            self.say(f"removed checkpoints {', '.join(path.name for path in removed)}")

    def _found(self) -> tuple[int, frozenset[str]]:
        """The tracker's time (ns), and the checkpoints' names. Raises `OSError`."""
        names = frozenset(path.name for path in self.root.glob("iter_*"))
        return (self.root / folders.TRACKER).stat().st_mtime_ns, names
