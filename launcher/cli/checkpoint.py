"""`launcher checkpoint`: what is in a checkpoint, and to and from Hugging Face; `generate`."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.base.errors import UsageError
from launcher.base.screen import size
from launcher.cli.command import actions, argument, call_action, command, count, flag, image, table
from launcher.cli.data import TOKENIZER, TYPES, a_path

if TYPE_CHECKING:
    from launcher.tools.data.tokenizers import TokenizerChoice
    from launcher.tools.weights.convert import Conversion
    from launcher.tools.weights.given import NamedCheckpoint

SOURCE = argument("source", "a run, or a folder with a checkpoint", "RUN|FOLDER")
NAMED = (argument("--tokenizer-type", "if it isn't recorded", choices=TYPES), *TOKENIZER[1:4])
FORMATS = ("torch_dist", "mp_rank")
ABOVE_0 = partial(count, least=1)
BEHIND = "Optimizer states aren't carried over: training continues with the weights alone."


def _size(text: str) -> int:
    """Bytes, at least a million; "5" are gigabytes."""
    if not 0.001 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("at least 0.001")
    return int(number * 1e9)


TO = argument("--output -o --to", "a new or empty folder", "FOLDER", type=a_path, required=True)


@command(SOURCE, flag("--all", "the tensors of every layer and expert, not only of the first"))
def inspect(args: Namespace) -> int:
    """Show a checkpoint's tensors, layout and iteration, and whether it is complete."""
    from launcher.tools.weights import reader
    from launcher.tools.weights.given import named

    saved = reader.opened(named(args.source).folder)
    of = " ".join(f"{kind[0].upper()}P={size}" for kind, size in saved.layout.items())
    elements = sum(tensor.elements for tensor in saved.tensors.values())
    optimizer = size(saved.optimizer) if saved.optimizer else "none that is seen here"
    facts = {
        "checkpoint": f"{saved.folder}: complete",
        "format": f"{saved.format}, saved with {of}",
        "iteration": f"{saved.iteration}",
        "parameters": f"{elements:,} in {len(saved.tensors)} tensors, {saved.layers} layers"
        + (f", {saved.experts} experts" if saved.experts else ""),
        "optimizer": optimizer,
    }
    print(table([*facts.items()]), end="")
    rows = [
        (name, tensor.dtype, "×".join(map(str, tensor.shape)))
        for name, tensor in saved.tensors.items()
        if args.all or not reader.is_later(name)
    ]
    print("\n" + table(rows), end="")
    return 0


@command(
    SOURCE,
    TO,
    argument("--family", "one of several with the same tensors: mistral", "NAME", default=""),
    argument("--shard", "size of a shard (5)", "GB", type=_size),
    *NAMED,
    usage="%(prog)s RUN|FOLDER --output FOLDER [options] [-- ARGS ...]",
    epilog="After --, give arguments of Megatron's that the checkpoint lacks: "
    f"--num-attention-heads 12. {BEHIND}",
)
def export(args: Namespace) -> int:
    """Write a checkpoint's model in Hugging Face's format: config.json, safetensors, tokenizer."""
    from launcher.tools.weights import convert, reader
    from launcher.tools.weights.given import files_of, named, tokenizer

    source = named(args.source)
    chosen = tokenizer(source, _tokenizer(args))
    done = convert.export(
        reader.opened(source.folder),
        args.output,
        convert.given(args.rest),
        name=args.family,
        tokenizer=files_of(chosen) if chosen else {},
        shard=args.shard or convert.SHARD,
    )
    _tell(done, f"{done.shape.family} of {source.folder}")
    if not chosen:
        print("no tokenizer's files: name them with --tokenizer-type and its options")
    print(f"the optimizer's state isn't carried over from {source.folder}")
    return 0


def _tell(done: Conversion, what: str) -> None:
    print(f"{what}: {size(done.bytes)} of weights in {done.folder}")


@command(
    argument("source", "a folder with config.json and safetensors", "FOLDER", type=a_path),
    TO,
    argument("--make-vocab-size-divisible-by", "times TP (128)", "N", type=ABOVE_0, default=128),
    epilog="Any layout of our own program and of Megatron's loads it.",
)
def import_(args: Namespace) -> int:
    """Write a Hugging Face model as a Megatron checkpoint."""
    from launcher.tools.weights import convert

    done = convert.import_(args.source, args.output, args.make_vocab_size_divisible_by)
    _tell(done, f"{done.shape.family} of {args.source}")
    print("the optimizer's state isn't imported: training begins at iteration 0")
    return 0


@command(
    SOURCE,
    TO,
    argument("--format", "mp_rank: a folder for each rank", choices=FORMATS, required=True),
    *(
        argument(f"--{kind}-model-parallel-size", "of mp_rank (1)", "N", type=ABOVE_0, default=1)
        for kind in ("tensor", "pipeline", "expert")
    ),
    epilog=BEHIND,
)
def convert(args: Namespace) -> int:
    """Write a checkpoint's weights in another format or layout."""
    from launcher.tools.weights import convert, reader
    from launcher.tools.weights.given import named

    saved = reader.opened(named(args.source).folder)
    kinds = ("tensor", "pipeline", "expert")
    layout = {kind: getattr(args, f"{kind}_model_parallel_size") for kind in kinds}
    _tell(convert.convert(saved, args.output, args.format, layout), str(saved.folder))
    print(f"the optimizer's state isn't carried over from {saved.folder}")
    return 0


@command(actions(inspect, export, import_, convert))
def checkpoint(args: Namespace) -> int:
    """Show checkpoints, and convert weights to Hugging Face's format and back."""
    if args.action is not inspect:
        _prepare()
    return call_action(args)


def _prepare() -> None:
    """Install what work on tensors and tokens needs: numpy, and tokenizers."""
    from launcher.base.install import install

    install()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@command(
    SOURCE,
    argument("text", "the text to continue"),
    argument("--tokens", "number of tokens (32)", "N", type=ABOVE_0, default=32),
    flag("--ids", "read and print token ids in place of text"),
    image("TAG", "a row, or an image's full name", "--tag", default=None),
    argument("--gpus", "1, or 0 (the CPU)", "WHICH", default="0"),
    argument("--backend", "docker or local", default="docker", choices=("docker", "local")),
    *NAMED,
)
def generate(args: Namespace) -> int:
    """Print the likeliest tokens after a text, by a checkpoint."""
    from launcher.tools.weights import given as weights

    _prepare()
    source = weights.named(args.source)
    chosen = None if args.ids else weights.tokenizer(source, _tokenizer(args))
    if not (chosen or args.ids):
        raise UsageError(
            f"{source.folder} doesn't say its tokenizer",
            "Name it: --tokenizer-type …, or give tokens' numbers with --ids.",
        )
    tag = args.tag or _image(source)
    how = (args.tokens, tag, args.backend, args.gpus)
    if chosen is None:
        try:
            ids = [int(word) for word in args.text.split()]
        except ValueError:
            raise UsageError(f"--ids {args.text!r}: no numbers", "As '464 2068'.") from None
        print(*weights.generate(source, ids, *how))
        return 0
    from launcher.tools.data import tokenizers

    loaded = tokenizers.load_tokenizer(chosen)
    ids = [int(one) for one in tokenizers.encoded(loaded, [args.text])[0]]
    print(loaded.decode([*ids, *weights.generate(source, ids, *how)]))
    return 0


def _image(source: NamedCheckpoint) -> Any:
    """The image of the run that saved it, else the CPU's."""
    return source.config.image.model_dump(exclude_none=True) if source.config else "cpu"


def _tokenizer(args: Namespace) -> TokenizerChoice | None:
    """What the options name, where any is given."""
    from launcher.tools.data.tokenizers import TokenizerChoice

    files = {"vocab_file": args.vocab_file, "merge_file": args.merge_file}
    files |= {"model": args.tokenizer_model}
    if not (args.tokenizer_type or any(files.values())):
        return None
    return TokenizerChoice(type=args.tokenizer_type or TokenizerChoice.type, **files)
