"""Makes the page of all runs: one file, with the runs as data in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from pydantic_core import to_json

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.screen import printable
from launcher.base.settings import settings
from launcher.runs.follow import find
from launcher.runs.records import recorded_runs
from launcher.tools.board.cards import Cards
from launcher.tools.pages import page

PARTS = Path(__file__).with_name("page")
"""The template of the page, its style and its script."""

TITLE = "Runs"
MARK = f'<meta name="generator" content="{page.GENERATOR}">'.encode()
"""What a page of ours has in its head; no other file is replaced by one."""


def data(
    cards: Cards, base: str, refresh: int = 0, wanted: recorded_runs.Filter | None = None
) -> bytes:
    """The wanted runs, and what the page says of them together, as JSON that may stand in HTML.

    `base` is the address below which each record's files are found; the page asks again each
    `refresh` seconds, 0 never.
    """
    jobs, silent = find.everywhere()
    about = {
        "folder": printable(str(settings().runs)),
        "base": base,
        "refresh": refresh,
        "notes": _notes(silent),
        "receipts": {
            run: [printable(line) for line in lines] for run, lines in cards.receipts.read().items()
        },
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    found = cards.read(recorded_runs.living(job for _, job in jobs), wanted)
    whole = to_json(about)[:-1] + b',"runs":' + found + b"}"
    return whole.replace(b"<", b"\\u003c")  # so that no text in it ends the page's script


def _notes(silent: Sequence[find.SilentBackends]) -> list[str]:
    return [printable(str(one)) for one in silent if one.may_have_jobs]


def as_html(found: bytes, *, live: bool = False) -> str:
    """The page of what `data` returns; a live one asks its server for more."""
    from markupsafe import Markup

    shown = Markup(found.decode())  # noqa: S704 - JSON without a <
    return page.render(PARTS, TITLE, {}, fetches=live, live=live, data=shown)


def write(path: Path, wanted: recorded_runs.Filter | None = None) -> None:
    """Write the page of the wanted runs to a file, or over one of ours.

    Raises UsageError for a file that is somebody else's, or can't be written.
    """
    with suppress(FileNotFoundError), files.named(path), files.open_regular(path) as before:
        if MARK not in before.read(1 << 12):
            raise UsageError(f"{path} is no page of ours, and isn't replaced", "Name another file.")
    text = as_html(data(Cards(), f"{settings().runs.absolute().as_uri()}/", wanted=wanted))
    try:
        files.write(path, text, 0o600)
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror}", "Name another file: --html FILE"
        ) from error
