"""Extras: packages and named sets that an image is given beside Megatron. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError

if TYPE_CHECKING:
    from launcher.images.matrix.schema import Matrix, Row

PROTECTED = frozenset(
    {"torch", "numpy", "triton", "flash-attn", "transformer-engine", "apex"}
    | {"torchvision", "torchaudio", "torchcodec", "torchtext"}
)
"""What is a base's alone: built for its CUDA, for its torch, or what those were built with."""
OWN_WHEEL = (
    "Make a wheel where the row's Python is: pip wheel --no-deps -w wheels '{}'. "
    "Then build with PIP_FIND_LINKS=$PWD/wheels."
)
"""What mends that a package has no wheel."""
SPELLING = (
    'Separate names by spaces, with none inside: EXTRAS="hf peft>=0.10,<1 ray[default]". '
    "Of a wheel write the package's name, and build with PIP_FIND_LINKS=FOLDER."
)
LONGEST = 60
"""Characters of a part of an image's tag, which has at most 128."""


@dataclass(frozen=True)
class Extras:
    """What is added to an image, with the named sets replaced by what they are.

    asked: the names beyond the row's own; names: all of them; packages: requirements;
    extensions: names of the matrix's, each with what it is compiled for
    """

    asked: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


NO_EXTRAS = Extras()


def extras_of(matrix: Matrix, row: Row, asked: Sequence[str]) -> Extras:
    """The extras of a row and those that are asked for beside them.

    Raises UsageError for what is neither a set of the matrix nor a requirement, for a version of a
    set, and for a set that is compiled for GPUs on a row without CUDA.
    """
    own, more = normalised(row.extras), normalised(asked)
    names = tuple(sorted({*own, *more}))
    for name in names:
        one = matrix.extras.get(base := re.split(r"[^a-z0-9-]", name)[0])
        if one and base not in (name, *one.packages):
            raise UsageError(
                f"extras: {name!r}: {base} is a set of matrix.yaml, which has no versions",
                f"Ask for {base}, or for its packages: {' '.join(one.packages)}",
            )
    sets = [matrix.extras[name] for name in names if name in matrix.extras]
    packages = {name for name in names if name not in matrix.extras}
    packages |= {package for one in sets for package in normalised(one.packages)}
    extensions = [name for one in sets for name in one.extensions]
    if extensions and not row.cuda:
        raise UsageError(
            f"extras: {extensions[0]} is compiled for GPUs, and the row has no CUDA",
            "Take a row with CUDA, or leave it out.",
        )
    return Extras(
        asked=more,
        names=names,
        packages=tuple(sorted(packages)),
        extensions=tuple(dict.fromkeys([*row.extensions, *extensions])),
        architectures=tuple(
            row.architectures or dict.fromkeys(gpu for one in sets for gpu in one.architectures)
        ),
    )


def normalised(names: Sequence[str]) -> tuple[str, ...]:
    """Extras sorted, each once, spelt as package indexes do. Raises UsageError for what is none."""
    if not names:
        return ()
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    found = set()
    for name in names:
        try:
            one = Requirement(name)
        except InvalidRequirement:
            one = None
        if one is None or one.url or one.marker or name.endswith(".whl"):
            url = next((one for one in names if "://" in one), "")
            mend = f"{OWN_WHEEL.format(url)} The extra is then its name." if url else SPELLING
            raise UsageError(
                f"extras: {name!r} is neither a set of matrix.yaml nor a package", mend
            )
        options = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        found.add(f"{canonicalize_name(one.name)}{options}{one.specifier}")
    return tuple(sorted(found))


def suffix(names: Sequence[str]) -> str:
    """What the tag of an image with these extras ends in: -hf-wandb; "" without any.

    Versions can't stand in a tag, so a hash takes the place of names that have one.
    """
    wanted = normalised(names)
    text = "-".join(wanted)
    if len(text) > LONGEST or any(not one.replace("-", "").isalnum() for one in wanted):
        text = f"extras-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:10]}"
    return f"-{text}" if text else ""
