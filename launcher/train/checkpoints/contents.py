"""What is missing or cut short in a checkpoint, found without torch and running nothing of it."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

DESCRIPTION = "metadata.json"
"""Of Megatron's distributed checkpoints: which formats the rest is in; it is written last."""

INDEX = ".metadata"
"""Of torch's: a pickle that says which bytes of which file hold what."""

COMMON = "common.pt"
RANK = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"


class _Cut(Exception):
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
    except _Cut as cut:
        return str(cut)
    except OSError as error:
        return f"{error.filename or folder} can't be read: {error.strerror}"
    return ""


def _check_distributed(folder: Path) -> None:
    described = (folder / DESCRIPTION).exists()
    if not described and not (folder / INDEX).exists():
        raise _Cut(f"{DESCRIPTION} is missing")
    if described or (folder / COMMON).exists():
        _check_archive(folder / COMMON)
        if _description(folder / DESCRIPTION).get("sharded_backend") != "torch_dist":
            return
    for name, needed in _extents(folder / INDEX).items():
        found = _size(folder / name)
        if found < needed:
            raise _Cut(f"{name} has {found} of {needed} bytes")


def _check_ranks(ranks: list[Path]) -> None:
    """Every rank's folder, by what the first says of the layout and the optimizer."""
    for rank in ranks:
        _check_archive(rank / RANK)
    arguments = _arguments(ranks[0] / RANK)
    needed = 1
    for kind in ("tensor", "pipeline", "expert"):
        needed *= int(getattr(arguments, f"{kind}_model_parallel_size", 1))
    if len(ranks) < needed:
        raise _Cut(f"there are {len(ranks)} of {needed} folders mp_rank_…")
    distributed = getattr(arguments, "use_distributed_optimizer", False)
    if distributed and not getattr(arguments, "no_save_optim", None):
        for rank in ranks:
            _check_archive(rank / OPTIMIZER)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise _Cut(f"{path.name} is missing") from None


def _check_archive(path: Path) -> None:
    """A file that torch saved is a zip archive, whose directory stands at its end."""
    _size(path)
    if not zipfile.is_zipfile(path):
        raise _Cut(f"{path.name} is cut short")


def _description(path: Path) -> dict[str, Any]:
    _size(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        raise _Cut(f"{path.name} is cut short") from None


def _extents(index: Path) -> dict[str, int]:
    """How many bytes each file must have at least, as torch's index has it."""
    _size(index)
    needed: dict[str, int] = {}
    with index.open("rb") as stream:
        try:
            for item in _read(stream).storage_data.values():
                end = int(item.offset) + int(item.length)
                needed[item.relative_path] = max(end, needed.get(item.relative_path, 0))
        except OSError:
            raise
        except Exception:  # whatever bytes make of an unpickler
            raise _Cut(f"{index.name} is cut short") from None
    return needed


def _arguments(path: Path) -> Any:
    """What upstream noted of its command line; None where it isn't there."""
    try:
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(name) as stream:
                return _read(stream).get("args")
    except OSError:
        raise
    except Exception:  # whatever bytes make of an unpickler
        raise _Cut(f"{path.name} is damaged") from None


class _Inert:
    """Stands in for whatever a pickle names: it keeps attributes, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments are of no interest."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def _ignore(self, *args: Any) -> None:
        """What a pickle puts into a container that isn't a plain one is left out."""

    append = extend = add = __setitem__ = _ignore


class _Reader(pickle.Unpickler):
    """Reads a pickle's structure; nothing that it names is imported or called."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> None:
        """A tensor's storage, which stands elsewhere."""


def _read(stream: IO[bytes]) -> Any:
    return _Reader(stream).load()
