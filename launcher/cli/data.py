"""`launcher data`: makes Megatron's data files from text, and shows what is in them."""

from __future__ import annotations

import gc
import io
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.base.screen import printable
from launcher.cli.command import actions, argument, call_action, command, flag

if TYPE_CHECKING:
    from launcher.tools.data.contents import DocumentSizes, IndexedData
    from launcher.tools.data.ledger import Leniency
    from launcher.tools.data.sources import ReadingOptions
    from launcher.tools.data.tokenizers import Tokenizer, TokenizerChoice

WIDTH = 40
"""Columns of the longest bar."""

ALPHABET = """\
vocab.json isn't garbled: its tokens are bytes, and each byte is written as one visible character.
Letters, digits and signs stand for themselves, Ġ is the space, Ċ the line feed, and the bytes of
other scripts look like Ã or ä. A Chinese character has three bytes, so it is up to three tokens."""

TYPES = (
    *("GPT2BPETokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer"),
    *("GPTSentencePieceTokenizer", "TikTokenizer"),
)
TOKENIZER = (
    argument("--tokenizer-type", "the tokenizer (%(default)s)", choices=TYPES, default=TYPES[0]),
    argument("--vocab-file", "GPT2BPETokenizer's vocab.json (default: GPT-2's)", "FILE", type=Path),
    argument("--merge-file", "GPT2BPETokenizer's merges.txt (default: GPT-2's)", "FILE", type=Path),
    argument("--tokenizer-model", "file of any other tokenizer", "FILE", type=Path),
    argument("--eod-token", "end-of-document token (default: tokenizer.json's eos_token)", "TOKEN"),
    argument("--vocab-size", "for TikTokenizer: vocabulary size (131072)", "N", type=int),
    argument("--tiktoken-pattern", "for TikTokenizer (default: v2)", choices=("v1", "v2")),
    argument(
        "--tiktoken-num-special-tokens",
        "for TikTokenizer: number of special tokens (1000)",
        "N",
        type=int,
    ),
    argument("--megatron", "special tokens of this release (0.9.0)", "RELEASE", default="0.9.0"),
)
"""Which tokenizer; the names are upstream's where it has them."""

READ = (
    argument("inputs", "files, patterns ('part-*.csv'), or - (standard input)", "INPUT", nargs="*"),
    argument(
        "--input",
        "further files",
        "INPUT",
        dest="more",
        nargs="+",
        action="extend",
        default=[],
    ),
    argument("--json-keys", "keys or columns to read (text)", "KEY", nargs="+", default=["text"]),
    argument("--format", "jsonl, csv, parquet, arrow or txt (default: by file name)", "FORMAT"),
    argument("--csv-columns", "names of the columns, if the file has no header", "A,B"),
    argument("--csv-delimiter", "sign between columns (a comma; in .tsv a tab)", "CHARACTER"),
    argument("--encoding", "encoding of csv and txt, such as gb18030 (utf-8)", default="utf-8"),
    argument(
        "--document",
        "a document in plain text is a line, paragraph or file (%(default)s)",
        choices=("line", "paragraph", "file"),
        default="line",
    ),
    argument(
        "--on-error",
        "at a bad record, stop, or skip it and list it in *.rejects.jsonl (%(default)s)",
        choices=("stop", "skip"),
        default="stop",
    ),
    argument("--max-errors", "number of records that may be skipped (any number)", "N", type=int),
    argument("--max-record", "size of the largest record, in MB (64)", "MB", type=int),
)
"""What reads text: which inputs, what is in them, and what becomes of bad records."""


def tokenizer(args: Namespace) -> TokenizerChoice:
    """The tokenizer that the options name."""
    from launcher.tools.data.tokenizers import TokenizerChoice

    return TokenizerChoice(
        type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        model=args.tokenizer_model,
        end=args.eod_token,
        vocab_size=args.vocab_size,
        pattern=args.tiktoken_pattern,
        special_tokens=args.tiktoken_num_special_tokens,
        megatron=args.megatron,
    )


def a_path(text: str) -> Path:
    """A path; ~ in it is a home folder."""
    return Path(os.path.expanduser(text))


@command(
    *READ,
    *TOKENIZER,
    argument("--output -o --output-prefix", "write P_KEY_document.bin, .idx", "P", required=True),
    flag("--append-eod", "end each document with the end-of-document token"),
    argument("--workers", "number of processes (default: the CPUs, at most 8)", "N", type=int),
    argument("--shard", "tokenize only part I of N, for `data merge`", "I/N"),
    argument("--slurm", "tokenize in N jobs of a Slurm array, and merge", "N", type=int),
    argument(
        "--sbatch",
        "a further option of sbatch: --sbatch=--partition=cpu",
        "OPTION",
        action="append",
    ),
    argument("--partitions", "no effect (upstream's option)", "N", type=int),
    flag("--keep-sequential-samples", "no effect: samples always stay in order"),
    argument("--log-interval", "no effect (upstream's option)", "N", type=int),
)
def tokenize(args: Namespace) -> int:
    """Make .bin and .idx from JSON, csv, parquet, Arrow or plain text, also compressed."""
    from launcher.tools.data import tokenize, workers
    from launcher.tools.data.bar import Bar

    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers {args.workers}: at least one is needed")
    if args.slurm:
        return _in_parts(args)
    shard, prefix = _shard(args.shard, _target(args.output))
    job = tokenize.TokenizeTask(
        inputs=_inputs(args),
        prefix=prefix,
        reading=_reading(args, shard),
        tokenizer=tokenizer(args),
        append_eod=args.append_eod,
        workers=args.workers or workers.usual(),
        leniency=_leniency(args),
    )
    made = [f"{prefix}.bin" for prefix in tokenize.outputs(job)]
    with Bar() as bar:
        done = tokenize.run(job, bar)
        bar.end(done, made + ([f"{job.prefix}.rejects.jsonl"] if done.rejected else []))
    return 0


def _in_parts(args: Namespace) -> int:
    """Each part as a Slurm job, then all as one. Raises UsageError, EngineError, PartFailure."""
    from launcher.base import owned
    from launcher.runs.datasets import indexed
    from launcher.tools import slurm_array
    from launcher.tools.data import contents

    if args.shard or args.slurm < 1:
        raise UsageError(
            "--slurm N divides the job itself: N is at least 1, and --shard isn't given"
        )
    prefix = _target(args.output).absolute()
    command = [sys.executable, "-m", "launcher", *args.given, "--slurm=0"]

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    slurm_array.run(command, args.slurm, args.sbatch or (), tell)
    shards = [_shard(f"{part}/{args.slurm}", prefix)[1] for part in range(1, args.slurm + 1)]
    for key in args.json_keys:
        parts = [one.with_name(f"{one.name}_{key}_document") for one in shards]
        target = prefix.with_name(f"{prefix.name}_{key}_document")
        made = contents.merge(parts, target)
        contents.open_data(target)
        for path in (path for part in parts for path in indexed.targets(part)):
            owned.remove_file(path, path.parent, missing_ok=True)
        print(f"{made.documents:,} documents, {made.tokens:,} tokens: {target}.bin")
    return 0


@command(*READ, argument("--output -o", "a .jsonl", "FILE", required=True))
def convert(args: Namespace) -> int:
    """Write csv, parquet, plain text or jsonl as one jsonl file."""
    from launcher.tools.data.bar import Bar
    from launcher.tools.data.jsonl import convert

    target, reading = _target(args.output), _reading(args)
    with Bar() as bar:
        done = convert(_inputs(args), target, reading, _leniency(args), bar)
        bar.end(done, [str(target)] + ([f"{target}.rejects.jsonl"] if done.rejected else []))
    return 0


@command(
    argument("prefixes", "a shard's name, P.idx, or a 'pattern*' of them", "P", nargs="+"),
    argument("--output -o --output-prefix", "OUT.bin and OUT.idx", "OUT", required=True),
)
def merge(args: Namespace) -> int:
    """Join .bin and .idx of shards, in the order given."""
    from launcher.tools.data.contents import merge

    target = _target(args.output)
    made = merge([path for given in args.prefixes for path in _named(given)], target)
    print(f"{made.documents:,} documents, {made.tokens:,} tokens: {target}.bin")
    return 0


@command(
    argument("prefix", "the files' name without .bin and .idx", "P", type=a_path),
    argument("--compare", "say whether P2 has the same bytes; 1 if not", "P2", type=a_path),
    argument("--documents", "number of documents to show (3)", "N", type=int, default=3),
    *TOKENIZER,
)
def inspect(args: Namespace) -> int:
    """Check a .bin and .idx, count, show the lengths and the first documents; compare two."""
    from launcher.tools.data import contents, tokenizers
    from launcher.tools.data.tokenizers import TokenizerChoice

    data = contents.open_data(args.prefix)
    if args.compare:
        other = contents.open_data(args.compare)
        said = contents.difference(data, other)
        print(f"they differ in {said}" if said else "the same bytes")
        return 1 if said else 0
    found = contents.sizes(data)
    print("\n".join([*_counts(data, found), "", *_histogram(found)]))
    if shown := range(min(args.documents, data.documents)):
        chosen = tokenizer(args)
        if chosen == TokenizerChoice():  # none is named
            chosen = contents.made_by(data) or chosen
        loaded = tokenizers.load_tokenizer(chosen)
        for number in shown:
            print(f"\ndocument {number}:\n{_shown(loaded, data, number)}")
    return 0


def _counts(data: IndexedData, found: DocumentSizes) -> list[str]:
    mean = data.tokens / data.documents if data.documents else 0
    return [
        f"documents  {data.documents:,}" + (f", {found.empty:,} empty" if found.empty else ""),
        f"sequences  {data.sequences:,}",
        f"tokens     {data.tokens:,} of {data.kind.itemsize} bytes",
        f"lengths    {found.shortest:,} to {found.longest:,} tokens, {mean:,.1f} on average",
        "index      fits the .bin: every entry was checked",
        *_how_made(data),
    ]


def _how_made(data: IndexedData) -> list[str]:
    """The tokenizer and the release whose rule made the tokens, where a record says so."""
    from launcher.tools.data import contents

    if not (said := contents.how_made(data)):
        return []
    chosen = said["tokenizer"]
    rule = printable(f"{chosen['type']}, by the rule of Megatron {chosen['megatron']}")
    return [f"tokenizer  {rule}"]


def _histogram(found: DocumentSizes) -> list[str]:
    """A line for each power of two, from the first that has a document."""
    most = max(found.bars)
    mark = "█" if sys.stdout.encoding.lower().startswith("utf") else "#"
    lines: list[str] = []
    for power, count in enumerate(found.bars):
        if not count and not lines:
            continue
        least = 0 if power == 0 else 1 << (power - 1)
        bar = mark * -(-count * WIDTH // most)
        lines.append(f"{least:>11,}+ {bar:<{WIDTH}} {count:,}")
    return ["tokens       documents", *lines] if lines else []


def _shown(tokenizer: Tokenizer, data: IndexedData, number: int) -> str:
    """A document's beginning as text, or its tokens where the vocabulary can't be theirs."""
    tokens = data.document(number, 100)
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < tokenizer.size:
            return f"{tokens}\n  (token {token}, and the vocabulary has {tokenizer.size})"
    return tokenizer.decode(tokens)


@command(
    argument("texts", "a text to tokenize", "TEXT", nargs="*"),
    argument("--from", "the first token to show (250)", "N", dest="first", type=int, default=250),
    argument("--count", "number of tokens (20)", "N", type=int, default=20),
    *TOKENIZER,
)
def vocab(args: Namespace) -> int:
    """Check vocab.json and merges.txt, and show what their tokens stand for."""
    from launcher.tools.data import tokenizers
    from launcher.tools.data.faults import RecordRefusal

    for option, number in (("--from", args.first), ("--count", args.count)):
        if number < 0:
            raise UsageError(f"{option} {number}: tokens are counted from 0")
    for text in args.texts:
        if text != text.encode(errors="ignore").decode():  # Python puts surrogates for bytes
            raise UsageError(f"{text!a}: not UTF-8", "iconv -t UTF-8 converts a text.")
    chosen = tokenizer(args)
    if not args.texts and chosen.type == "GPT2BPETokenizer":
        _explain(tokenizers.tokenizer_files(chosen), args.first, args.count)
        return 0
    loaded = tokenizers.load_tokenizer(chosen)
    if not args.texts:
        print(f"tokens 0 to {loaded.size - 1}, end of document {loaded.end}")
    for text in args.texts:
        try:
            (tokens,) = tokenizers.encoded(loaded, [text])
        except RecordRefusal as refused:
            raise UsageError(f"{text!r}: {refused}") from None
        for token in map(int, tokens):
            print(f"{token:>7}  {loaded.decode([token])!r}")
    return 0


def _explain(files: Sequence[Path], first: int, count: int) -> None:
    """Check vocab.json and merges.txt, and show what some of the tokens stand for."""
    from launcher.tools.data import vocabulary

    found = vocabulary.load_vocabulary(*files)
    for path, digest in zip(files, found.sha256, strict=True):
        print(f"{path}\n  sha256 {digest}")
    print("GPT-2's genuine vocabulary" if found.genuine else "not GPT-2's own, but consistent")
    print(f"{len(found.ids)} tokens, {len(found.merges)} merges, end of document {found.end}\n")
    print(f"{ALPHABET}\n\n{'token':>7}  {'in vocab.json':<20} stands for")
    names = {number: name for name, number in found.ids.items()}
    for number in range(first, min(first + count, len(names))):
        print(f"{number:>7}  {names[number]:<20} {vocabulary.stands_for(names[number])}")


@command(actions(tokenize, convert, inspect, merge, vocab))
def data(args: Namespace) -> int:
    """Make Megatron's .bin and .idx from text, and inspect them.

    The folder to write to is made, and what it needs is installed first. Raises
    ModuleNotFoundError, upon which the command line goes on in .venv, and UsageError where the
    packages can't be installed.
    """
    from launcher.base.install import install

    if given := getattr(args, "output", None):  # before a minute of installing
        _target(given).parent.mkdir(parents=True, exist_ok=True)
    install()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: there is no algebra to do here
    gc.set_threshold(50_000)  # the start makes much that stays: not worth a look
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts and names have all kinds of characters
        sys.stdout.reconfigure(errors="backslashreplace")
    return call_action(args)


def _inputs(args: Namespace) -> tuple[str, ...]:
    """All inputs. Raises UsageError where there is none."""
    if not (found := (*args.inputs, *args.more)):
        raise UsageError(
            "no input",
            "Name files, or - for standard input: before --json-keys, which takes what follows it.",
        )
    return found


def _target(given: str) -> Path:
    """The file that --output names, or the beginning of its name.

    Raises UsageError where that is a folder's, or standard output, which can't be taken back.
    """
    import shlex

    from launcher.base.settings import expanded

    if given == "-" or os.path.basename(given) in ("", ".", ".."):
        raise UsageError(
            f"--output {shlex.quote(given)}: no name of a file",
            f"--output {os.path.join('data' if given == '-' else given, 'corpus')}",
        )
    return expanded(given)


def _reading(args: Namespace, shard: tuple[int, int] = (0, 1)) -> ReadingOptions:
    """How they are read. Raises UsageError for options that can't be."""
    from launcher.tools.data.sources import BLOCK, LARGEST, ReadingOptions

    if args.max_record is not None and args.max_record << 20 < BLOCK:
        raise UsageError(
            f"--max-record {args.max_record}: at least {BLOCK >> 20} are read at a time"
        )
    delimiter = "\t" if args.csv_delimiter == r"\t" else args.csv_delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n"'):
        raise UsageError(f"--csv-delimiter {delimiter}: not one character", r"--csv-delimiter '\t'")
    if len({*args.json_keys}) < len(args.json_keys):
        raise UsageError("--json-keys has a key twice")
    if foreign := [key for key in args.json_keys if key != key.encode(errors="ignore").decode()]:
        raise UsageError(f"--json-keys {foreign[0]!a}: not UTF-8")
    return ReadingOptions(
        keys=tuple(args.json_keys),
        format=args.format,
        columns=tuple(args.csv_columns.split(",")) if args.csv_columns else (),
        delimiter=delimiter,
        encoding=args.encoding,
        unit=args.document,
        shard=shard,
        largest=LARGEST if args.max_record is None else args.max_record << 20,
    )


def _leniency(args: Namespace) -> Leniency:
    """What becomes of bad records. Raises UsageError for a limit of what isn't skipped."""
    from launcher.tools.data.ledger import Leniency

    if args.max_errors is not None and args.on_error != "skip":
        raise UsageError("--max-errors without --on-error skip")
    if args.max_errors is not None and args.max_errors < 0:
        raise UsageError(f"--max-errors {args.max_errors}: fewer than none")
    return Leniency(args.on_error == "skip", args.max_errors)


def _shard(given: str | None, prefix: Path) -> tuple[tuple[int, int], Path]:
    """The part, from 0, of how many; and its own prefix. Raises UsageError for no part."""
    if given is None:
        return (0, 1), prefix
    part, slash, parts = given.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UsageError(f"--shard {given}: no part", "--shard 1/8, and so on to --shard 8/8")
    name = f"{prefix.name}.{int(part):0{len(parts)}}-of-{parts}"
    return (int(part) - 1, int(parts)), prefix.with_name(name)


def _named(given: str) -> list[Path]:
    """The prefixes that a name or a pattern means, sorted, each once. Raises UsageError."""
    from glob import glob, has_magic

    path = os.path.expanduser(given)
    if os.path.exists(path) or os.path.exists(f"{path}.idx") or not has_magic(path):
        return [Path(path)]
    names = (os.path.splitext(name) for name in glob(path) + glob(f"{path}.idx"))
    if found := {name for name, suffix in names if suffix in (".bin", ".idx")}:
        return [*map(Path, sorted(found))]
    raise UsageError(f"{given}: no such file", "Name each file, or give a pattern that fits.")
