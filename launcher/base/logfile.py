"""Log files of a running job: a full disk loses some lines, and never ends the run."""

from __future__ import annotations

import os

from launcher.base.files import UNLOCKABLE

KEEP_SIZE = 1
"""linux/falloc.h"""

GAP = "\nlauncher: {} bytes are missing here, which couldn't be written\n"


class LogFile:
    """Writes to an open file; what can't be written, as on a full disk, is lost.

    `error` is why nothing can be written now, None where it can. Each write tries again, and where
    one succeeds, `gap` goes before it, with the number of bytes that are missing.
    """

    def __init__(self, handle: int, gap: str = GAP) -> None:
        self.handle, self.gap = handle, gap
        self.error: OSError | None = None
        self.missing = 0

    def write(self, data: bytes) -> None:
        """Write all of it, or what can be written."""
        left = memoryview(self.gap.format(self.missing).encode() + data if self.error else data)
        try:
            while left:
                left = left[os.write(self.handle, left) :]
            self.error, self.missing = None, 0
        except OSError as error:
            self.error = error
            self.missing = len(left) if len(left) <= len(data) else self.missing + len(data)


def keep_room(handle: int, size: int) -> None:
    """Keep space for `size` more bytes of an open file, whose length stays as it is.

    Raises OSError where there is no space. On a file system that can't do this, nothing is kept.
    """
    import ctypes

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    end = os.fstat(handle).st_size
    if fallocate(handle, KEEP_SIZE, ctypes.c_long(end), ctypes.c_long(size)):
        error = ctypes.get_errno()
        if error not in UNLOCKABLE:
            raise OSError(error, os.strerror(error))
