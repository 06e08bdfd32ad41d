"""Checks every file of a saved image by its sha256, before anything of it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher import files
from launcher.errors import LauncherError, UsageError
from launcher.images.save import INCOMING
from launcher.images.shown import counted
from launcher.oci import layout, parts
from launcher.oci.layout import Listing
from launcher.progress import Progress

READERS = 4  # at once: a disk is kept busy while hashes are made


class DamagedError(LauncherError):
    """A saved image has files that are damaged or missing."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """A file that isn't as it was written; `found` is its sha256, or why it has none."""

    path: str
    expected: str
    found: str


def read_listing(folder: Path) -> Listing | None:
    """The list of files, or None where it is damaged or missing in a folder with an image in it.

    Raises UsageError for a folder without one, or where its save hasn't ended.
    """
    ours = (layout.LISTING, layout.SUMS, layout.INDEX, layout.MARKER)
    if not any(os.path.lexists(folder / name) for name in (*ours, INCOMING)):
        raise UsageError(
            f"{folder}: no image was saved there",
            "Name the folder that was given to `image save -o`.",
        )
    try:
        return layout.parse(parts.whole(folder, layout.LISTING, layout.LARGEST_LISTING))
    except FileNotFoundError:
        if (folder / INCOMING).exists():
            raise UsageError(
                f"{folder}: the save was cut off before its end",
                "Run it again on the machine that has the image: what is there is kept.",
            ) from None
    except OSError:
        pass
    return None


def check(folder: Path, progress: Progress) -> Listing:
    """The list of files of the image saved in `folder`, each checked.

    Raises DamagedError, which names every file that is damaged or missing; UsageError as above.
    """
    listing = read_listing(folder)
    expected = _expected(folder, listing)
    sizes = {file.path: file.size for file in listing.files} if listing else {}
    sizes |= {layout.SUMS: len(layout.sums(listing))} if listing else {}
    with (
        counted(progress, f"check {len(expected)} files", sum(sizes.values())) as seen,
        ThreadPoolExecutor(READERS) as readers,
    ):
        found = readers.map(lambda path: _sha256(folder, path, sizes.get(path)), expected)
        faults = []
        for (path, sha256), actual in zip(expected.items(), found, strict=True):
            seen(sizes.get(path, 0))
            if actual != sha256:
                faults.append(Fault(path, sha256, actual))
    if listing is None and not any(fault.path == layout.LISTING for fault in faults):
        faults.insert(0, Fault(layout.LISTING, "unknown", _sha256(folder, layout.LISTING)))
    if faults or listing is None:
        raise damaged(folder, faults)
    return listing


def damaged(folder: Path, faults: list[Fault]) -> DamagedError:
    """The error that names every file that isn't as it was written."""
    return DamagedError(_told(folder, faults), _remedy(faults))


def unreadable(error: OSError) -> str:
    """Why a file has no sha256."""
    why = str(error.strerror or error)
    return why if isinstance(error, files.Refused) else f"can't be read: {why}"


def _expected(folder: Path, listing: Listing | None) -> dict[str, str]:
    """Each file's sha256: by the list, or where that is damaged by what SHA256SUMS still says."""
    if listing is None:
        try:
            return layout.parse_sums(parts.whole(folder, layout.SUMS, layout.LARGEST_LISTING))
        except OSError:
            return {}
    sums = layout.sums(listing)
    known = layout.parse_sums(sums)
    return known | {layout.SUMS: hashlib.sha256(sums).hexdigest()}


def _sha256(folder: Path, path: str, size: int | None = None) -> str:
    """The sha256 of a file of `size` bytes, any where that isn't known; or why it has none."""
    digest = hashlib.sha256()
    try:
        if size is None:
            size = min(os.lstat(folder / path).st_size, layout.LARGEST_FILE)
        for block in parts.listed(folder, path, size):
            digest.update(block)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return unreadable(error)
    return digest.hexdigest()


def _told(folder: Path, faults: list[Fault]) -> str:
    def lines() -> Iterator[str]:
        count = f"{len(faults)} files are" if len(faults) > 1 else "a file is"
        yield f"{folder}: {count} damaged or missing; nothing was loaded"
        for fault in faults:
            yield f"  {fault.path}"
            yield f"    expected: {fault.expected}"
            yield f"    found:    {fault.found}"

    return "\n".join(lines())


def _remedy(faults: list[Fault]) -> str:
    names = ", ".join(os.fspath(fault.path) for fault in faults[:3])
    more = ", …" if len(faults) > 3 else ""
    return (
        f"Copy {names}{more} again from where it was saved; or run the save again into that "
        "folder, which writes only what is wrong."
    )
