"""`launcher data tokenize`: text to .bin and .idx, as tools/preprocess_data.py makes them."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.data import inputs, vocabularies

HELP = "make .bin and .idx of jsonl, csv, parquet or plain text, packed or not"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments; the names are upstream's where it has them."""
    inputs.arguments(parser)
    vocabularies.arguments(parser)
    add = parser.add_argument
    add("--output-prefix", metavar="P", required=True, help="P_KEY_document.bin, .idx")
    add("--append-eod", action="store_true", help="end each document with the token for it")
    add("--workers", metavar="N", type=int, help="processes (as many as CPUs, at most 8)")
    add("--shard", metavar="I/N", help="only part I of N, for `data merge`")
    add("--partitions", metavar="N", type=int, help="upstream's; the order stays the inputs'")
    add("--keep-sequential-samples", action="store_true", help="upstream's; they are, always")
    add("--log-interval", metavar="N", type=int, help="upstream's; a line each five seconds")


def main(args: argparse.Namespace) -> int:
    """Tokenize, and say what was written."""
    from launcher.data import tokenize
    from launcher.data.bar import Bar

    shard, prefix = _shard(args.shard, inputs.target("--output-prefix", args.output_prefix))
    job = tokenize.Job(
        inputs=inputs.inputs(args),
        prefix=prefix,
        reading=inputs.reading(args, shard),
        tokenizer=vocabularies.chosen(args),
        append_eod=args.append_eod,
        workers=_workers(args.workers),
        leniency=inputs.leniency(args),
    )
    made = [f"{prefix}.bin" for prefix in tokenize.outputs(job)]
    with Bar() as bar:
        done = tokenize.run(job, bar)
        bar.end(done, made + ([f"{job.prefix}.rejects.jsonl"] if done.rejected else []))
    return 0


def _workers(given: int | None) -> int:
    """Raises UsageError for fewer than one."""
    from launcher.data import workers
    from launcher.errors import UsageError

    if given is not None and given < 1:
        raise UsageError(f"--workers {given}: at least one is needed")
    return given or workers.usual()


def _shard(given: str | None, prefix: Path) -> tuple[tuple[int, int], Path]:
    """The part, from 0, of how many; and its own prefix. Raises UsageError for no part."""
    from launcher.errors import UsageError

    if given is None:
        return (0, 1), prefix
    part, slash, parts = given.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UsageError(f"--shard {given}: no part", "--shard 1/8, and so on to --shard 8/8")
    name = f"{prefix.name}.{int(part):0{len(parts)}}-of-{parts}"
    return (int(part) - 1, int(parts)), prefix.with_name(name)
