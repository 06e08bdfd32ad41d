"""Options of what reads text: which inputs, what is in them, and what becomes of bad records."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.data.ledger import Leniency
    from launcher.data.sources import Reading


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="*", help="files, 'patterns*', - for standard input")
    add(
        "--input",
        metavar="INPUT",
        dest="more",
        nargs="+",
        action="extend",
        default=[],
        help="the same; read after those",
    )
    add("--json-keys", metavar="KEY", nargs="+", default=["text"], help="keys or columns: text")
    add("--format", choices=("jsonl", "csv", "parquet", "txt"), help="else by the file's name")
    add("--csv-columns", metavar="A,B", help="names of the columns, where row 1 is data")
    add("--csv-delimiter", metavar="CHARACTER", help="else a comma; .tsv: tabs, no quotations")
    add("--encoding", default="utf-8", help="of csv and txt: gb18030 (utf-8)")
    add(
        "--document",
        choices=("line", "paragraph", "file"),
        default="line",
        help="what of plain text is a document (%(default)s)",
    )
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad record: write nothing, or list it in *.rejects.jsonl (%(default)s)",
    )
    add("--max-errors", metavar="N", type=int, help="how many may be skipped (any number)")
    add("--max-record", metavar="MB", type=int, help="how large a record may be (64)")


def inputs(args: argparse.Namespace) -> tuple[str, ...]:
    """All inputs. Raises UsageError where there is none."""
    from launcher.errors import UsageError

    if not (found := (*args.inputs, *args.more)):
        raise UsageError(
            "no input",
            "Name files, or - for standard input: before --json-keys, which takes what follows it.",
        )
    return found


def target(option: str, given: str) -> Path:
    """The file that an option names, or the beginning of its name.

    Raises UsageError where that is a folder's, or standard output, which can't be taken back.
    """
    from launcher.errors import UsageError
    from launcher.settings import expanded

    if given == "-" or os.path.basename(given) in ("", ".", ".."):
        raise UsageError(
            f"{option} {shlex.quote(given)}: no name of a file",
            f"{option} {os.path.join('data' if given == '-' else given, 'corpus')}",
        )
    return expanded(given)


def reading(args: argparse.Namespace, shard: tuple[int, int] = (0, 1)) -> Reading:
    """How they are read. Raises UsageError for options that can't be."""
    from launcher.data.sources import Reading
    from launcher.errors import UsageError

    delimiter = "\t" if args.csv_delimiter == r"\t" else args.csv_delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n"'):
        raise UsageError(f"--csv-delimiter {delimiter}: not one character", r"--csv-delimiter '\t'")
    if len({*args.json_keys}) < len(args.json_keys):
        raise UsageError("--json-keys has a key twice")
    if foreign := [key for key in args.json_keys if key != key.encode(errors="ignore").decode()]:
        raise UsageError(f"--json-keys {foreign[0]!a}: not UTF-8")
    return Reading(
        keys=tuple(args.json_keys),
        format=args.format,
        columns=tuple(args.csv_columns.split(",")) if args.csv_columns else (),
        delimiter=delimiter,
        encoding=args.encoding,
        unit=args.document,
        shard=shard,
        largest=_largest(args.max_record),
    )


def _largest(given: int | None) -> int:
    """Bytes of a record at most. Raises UsageError for fewer than are read at a time."""
    from launcher.data.sources import BLOCK, LARGEST
    from launcher.errors import UsageError

    if given is not None and given << 20 < BLOCK:
        raise UsageError(f"--max-record {given}: at least {BLOCK >> 20} are read at a time")
    return LARGEST if given is None else given << 20


def leniency(args: argparse.Namespace) -> Leniency:
    """What becomes of bad records. Raises UsageError for a limit of what isn't skipped."""
    from launcher.data.ledger import Leniency
    from launcher.errors import UsageError

    if args.max_errors is not None and args.on_error != "skip":
        raise UsageError("--max-errors without --on-error skip")
    if args.max_errors is not None and args.max_errors < 0:
        raise UsageError(f"--max-errors {args.max_errors}: fewer than none")
    return Leniency(args.on_error == "skip", args.max_errors)
