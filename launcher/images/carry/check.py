"""Checks every file of a saved image by its sha256 before it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.base import files
from launcher.base.errors import LauncherError, UsageError
from launcher.base.screen import Progress
from launcher.images.carry.save import INCOMING
from launcher.images.oci import oci_layout
from launcher.images.oci.blocks import read_small, sha256
from launcher.images.oci.oci_layout import FileList, LayoutFile, Listing

READERS = 4  # at once: a disk is kept busy while hashes are made
FilesT = TypeVar("FilesT", bound=FileList)


@dataclass(frozen=True)
class Damage:
    """A file that isn't as it was written; `found` is its sha256, or why it has none."""

    path: str
    expected: str
    found: str


class DamagedError(LauncherError):
    """A folder has files that are damaged or missing; all of them are named."""

    exit_code = 1

    def __init__(self, folder: Path, damages: Sequence[Damage]) -> None:
        self.damages = damages
        count = f"{len(damages)} files are" if len(damages) > 1 else "a file is"
        lines = [f"{folder}: {count} damaged or missing; nothing was loaded"]
        for one in damages:
            hashes = (f"    expected: {one.expected}", f"    found:    {one.found}")
            lines += [f"  {one.path}", *hashes]
        names = ", ".join(one.path for one in damages[:3]) + (", …" if len(damages) > 3 else "")
        super().__init__(
            "\n".join(lines),
            f"Copy {names} again from where it was saved; or run the save again into that folder, "
            "which writes only what is wrong.",
        )


def read_list(
    folder: Path, name: str, model: type[FilesT], others: Collection[str], what: str
) -> FilesT:
    """The list of files `name` in a folder that `what` wrote, with the `others` beside it.

    Raises UsageError for a folder with none of them, or that was not written to the end, and
    DamagedError for a list that isn't as it was written.
    """
    listing = None
    try:
        listing = oci_layout.parse(read_small(folder, name, oci_layout.LARGEST_LISTING), model)
        found = "something else"
    except OSError as error:
        if not any(os.path.lexists(folder / other) for other in (name, INCOMING, *others)):
            raise UsageError(
                f"{folder}: nothing was saved there", f"Name the folder that was given to {what}."
            ) from None
        if isinstance(error, FileNotFoundError):  # it is written last
            raise UsageError(
                f"{folder}: there is no {name}: what wrote the folder was cut off before its end",
                f"Run {what} again where that was: what is there is kept.",
            ) from None
        found = unreadable(error)
    if listing is None:
        raise DamagedError(folder, [Damage(name, "unknown", found)])
    return listing


def read_listing(folder: Path) -> Listing:
    """The list of files of a saved image. Raises as `read_list`."""
    others = (oci_layout.SUMS, oci_layout.INDEX, oci_layout.MARKER)
    return read_list(folder, oci_layout.LISTING, Listing, others, "`image save -o`")


def check_saved(folder: Path, progress: Progress) -> Listing:
    """The list of files of the image saved in `folder`, each checked. Raises as `read_list`."""
    listing = read_listing(folder)
    sums = oci_layout.sums(listing)
    digest = hashlib.sha256(sums).hexdigest()
    own = LayoutFile.model_construct(path=oci_layout.SUMS, size=len(sums), sha256=digest)
    if damages := damaged_files(folder, [*listing.files, own], progress):
        raise DamagedError(folder, damages)
    return listing


def damaged_files(folder: Path, listed: Sequence[LayoutFile], progress: Progress) -> list[Damage]:
    """The files of a folder of which a byte isn't as it is listed."""
    size = sum(file.size for file in listed)

    def found(file: LayoutFile) -> str:
        try:
            return sha256(folder, file)
        except OSError as error:
            return unreadable(error)

    damages = []
    with (
        progress.counted(f"check {len(listed)} files", size) as seen,
        ThreadPoolExecutor(READERS) as readers,
    ):
        for file, actual in zip(listed, readers.map(found, listed), strict=True):
            seen(file.size)
            if actual != file.sha256:
                damages.append(Damage(file.path, file.sha256, actual))
    return damages


def unreadable(error: OSError) -> str:
    """Why a file has no sha256."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    why = str(error.strerror or error)
    return why if isinstance(error, files.ForeignFileError) else f"can't be read: {why}"
