"""Checks a checkpoint for missing or truncated files, without torch or its code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.agent.checkpoints import pickles
from launcher.base import files

DESCRIPTION = "metadata.json"
"""Of Megatron's distributed checkpoints: which formats the rest is in; it is written last."""

INDEX = ".metadata"
"""Of torch's: a pickle that says which bytes of which file hold what."""

LONGEST = 1 << 20
"""Bytes of the description."""

COMMON = "common.pt"
COMMON_STATE = b"common_state/shard_"
RANK = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"


class _IncompleteFile(Exception):
    """Something is missing or cut short; the text says what."""


def problem(folder: Path) -> str:
    """What is wrong with the checkpoint in `folder`, or "" where nothing is.

    Knows Megatron's distributed format (`torch_dist`, and that of torch alone, `torch_dcp`) and
    the one from before, a folder a rank. Of others, such as zarr, only what they share with
    these is looked at.
    """
    try:
        ranks = sorted(path for path in folder.glob("mp_rank_*") if path.is_dir())
        if ranks:
            _check_ranks(ranks)
        else:
            _check_distributed(folder)
    except _IncompleteFile as cut:
        return str(cut)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename or folder} can't be read: {error.strerror}"
    return ""


def _check_distributed(folder: Path) -> None:
    description, index = folder / DESCRIPTION, folder / INDEX
    if description.exists() or (folder / COMMON).exists() or not _is_of_torch_alone(index):
        with _legible(description, "cut short"):
            text = files.read_regular(description, LONGEST)
            named = json.loads(text)
            common, sharded = named.get("common_backend"), named.get("sharded_backend")
        if common:  # from 0.19 on there is none: what all ranks have alike is among the rest
            _check_archive(folder / COMMON)
        if sharded != "torch_dist":
            return
    with files.open_regular(index) as stream, _legible(index, "cut short"):
        for name, size in pickles.look(stream, "storage").items():
            if (there := (folder / name).stat().st_size) < size:
                raise _IncompleteFile(f"{name} has {there} of {size} bytes")


def _is_of_torch_alone(index: Path) -> bool:
    """Whether there is an index, and none of Megatron's: from 0.19 on that has a common state."""
    if not index.exists():
        return False
    with files.open_regular(index) as stream:
        return COMMON_STATE not in stream.read(pickles.ROOM)


def _check_ranks(ranks: list[Path]) -> None:
    """Every rank's folder, by what the first says of the layout and the optimizer."""
    for rank in ranks:
        _check_archive(rank / RANK)
    with (
        _legible(ranks[0] / RANK, "damaged"),
        files.open_regular(ranks[0] / RANK) as file,
        zipfile.ZipFile(file) as archive,
    ):
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as stream:  # upstream notes its command line
            arguments = pickles.look(stream, "arguments")
    needed = 1
    for kind in ("tensor", "pipeline", "expert"):
        needed *= arguments.get(f"{kind}_model_parallel_size", 1)
    if len(ranks) < needed:
        raise _IncompleteFile(f"there are {len(ranks)} of {needed} folders mp_rank_…")
    if arguments.get("use_distributed_optimizer") and not arguments.get("no_save_optim"):
        for rank in ranks:
            _check_archive(rank / OPTIMIZER)


def _check_archive(path: Path) -> None:
    """A file that torch saved is a zip archive, whose directory stands at its end."""
    with files.open_regular(path) as file:
        if not zipfile.is_zipfile(file):
            raise _IncompleteFile(f"{path.name} is cut short")


@contextmanager
def _legible(path: Path, lack: str) -> Iterator[None]:
    """Whatever an unpickler or a parser makes of the bytes of `path`, that is what it lacks."""
    try:
        yield
    except (OSError, _IncompleteFile):
        raise
    except Exception:
        raise _IncompleteFile(f"{path.name} is {lack}") from None
