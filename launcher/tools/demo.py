"""`make demo`: an image from Megatron's source and a training run in it, from nothing."""

from __future__ import annotations

import io
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from launcher.agent.series import has
from launcher.base import files, owned
from launcher.base.errors import EngineError, LauncherError
from launcher.base.screen import Progress, bare
from launcher.base.settings import ROOT, Settings
from launcher.images.builder import downloads
from launcher.images.builder.image import REPOSITORY, BuildRequest, Builds
from launcher.images.engine import acquire, connect
from launcher.images.engine.connect import engine_host, is_private, socket_fault
from launcher.images.engine.private import debian, packages, private
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import sha256_of_pin
from launcher.images.matrix.requirements import pinned_versions
from launcher.images.matrix.schema import Matrix, misfit
from launcher.images.oci.inspection import find_image
from launcher.images.sources import fetch
from launcher.runs.datasets import indexed

if TYPE_CHECKING:
    pass

TAGS = ("cpu-3.13", "cpu")  # the newest Megatron first
END_OF_DOCUMENT = 256
VOCABULARY = 257
HELD_OUT = 0.1  # as `split: 90,10,0` in presets/demo.yaml says
MORE_ITERATIONS = 20

WHAT_COMES = (
    "the first time this downloads about 0.6 GB (an engine or base where there is none, 31 Python "
    "packages)\nand keeps about 4 GB in {cache}; on two cores it takes about 2.5 minutes, "
    "and half a minute from then on"
)
LOSS = re.compile(r"iteration +(\d+)/ *\d+ .*\| lm loss: (\S+)")
HELD_OUT_LOSS = re.compile(r"validation loss at iteration (\d+) .*lm loss value: (\S+)")


class DemoError(LauncherError):
    """The demo ran and did not show what it is there to show."""

    exit_code = 1


@dataclass(frozen=True)
class DemoLosses:
    """What one training run printed: losses by iteration, in nats per token."""

    training: dict[int, float]
    held_out: dict[int, float]


def run(site: Settings) -> None:
    """Build the CPU image, train, save, load, train on. Raises LauncherError where one fails.

    Where no engine can be had, as an ordinary user, the same without a container.
    """
    progress = Progress()
    if not (site.cache / "demo").exists():
        progress.note(WHAT_COMES.format(cache=site.cache))
    with ExitStack() as stack:
        ahead = _base_ahead(site, progress)
        try:
            client = stack.enter_context(acquire.any_engine(site.cache / "engine", progress))
        except EngineError as none:
            if next(connect.endpoints(os.environ)).chosen:
                raise
            progress.note(f"no container engine here, so without a container: {none.problem}")
            _run_locally(site, progress)
            return
        builds = Builds(client, site, progress)
        tag = row_at_hand(builds, progress)
        with _fetching(builds, tag, progress):
            ahead.join()
            found = acquire.bases(client, builds.matrix, tag, site, progress)
        built = builds.build(BuildRequest(tag, base=found.base, builder=found.builder))
        progress.note(f"image {built.names[-1]} {'is there' if built.reused else 'is built'}")
        host, private = engine_host(client), is_private(client)
        os.environ["DOCKER_HOST"] = host
        release = builds.recipe(BuildRequest(tag)).release
        _train(site.cache / "demo", f"Megatron {release}", "--set", f"image={tag}")
    if private:
        print(f"\n{whereabouts(host, site.answer_within)}")


def _base_ahead(site: Settings, progress: Progress) -> threading.Thread:
    """Makes the base while a private engine, which pulls nothing, is fetched and unpacked.

    Where it fails, `acquire.bases` makes it again and says why.
    """
    python = load_matrix(site.matrix).rows[TAGS[-1]].python
    wanted = (None, "", debian.STANDIN_EPOCH, python)

    def make() -> None:
        progress.note(
            "no engine answers; a private one reaches no registry, so its base is made here"
        )
        with suppress(EngineError, OSError):
            debian.debian_base(*wanted, cache=site.cache / "bases", say=progress.note)

    thread = threading.Thread(target=make if _takes_an_engine(site) else None)
    thread.start()
    return thread


def _takes_an_engine(site: Settings) -> bool:
    """Whether a private engine is fetched: none answers, none is named, none was fetched before."""
    if private.unsupported() or (site.cache / "engine/packages" / packages.COMPLETE).exists():
        return False
    try:
        connect.connect().close()
    except EngineError:
        return not next(connect.endpoints(os.environ)).chosen
    return False


@contextmanager
def _fetching(builds: Builds, tag: str, progress: Progress) -> Iterator[None]:
    """Fetch the row's source and packages beside the block, which keeps one processor busy.

    Nothing is where the row's image is there. What can't be fetched is reported by the build,
    which looks for it again. A block that fails or that Ctrl-C ends doesn't wait for it.
    """
    if find_image(builds.client, f"{REPOSITORY}:{tag}"):
        yield
        return
    wanted = builds.recipe(BuildRequest(tag)), BuildRequest(tag)

    def fetch_all() -> None:
        with suppress(Exception):
            silent = Progress(io.StringIO())
            downloads.fetch_all([wanted], builds.matrix, None, builds.site, silent)

    fetching = threading.Thread(target=fetch_all, daemon=True)
    fetching.start()
    yield
    if fetching.is_alive():
        progress.step(f"fetch the source and the packages of {tag}")
        fetching.join()
        progress.close()


def row_at_hand(builds: Builds, progress: Progress) -> str:
    """The first of TAGS whose base is a registry's, or whose packages are here; else the last.

    Where no registry can be reached, CPU torch can't be fetched either, most often.
    """
    for tag in TAGS[:-1]:
        made = builds.recipe(BuildRequest(tag))
        here = all(fetch.cached(sha256_of_pin(pin), builds.site) for pin in made.wheels)
        refused = None if here else acquire.refused(builds.client, made.row.base, builds.site)
        if refused is None:
            return tag
        why = refused.problem.splitlines()[0]
        progress.note(f"{why}: without {tag}, which has Megatron {made.release}")
    return TAGS[-1]


def newest_release(matrix: Matrix, python: str, torch: str) -> str:
    """The newest release at a package index that fits a Python and a torch, and needs no Triton."""
    row = matrix.rows[TAGS[-1]].model_copy(update={"python": python, "torch": torch})
    fit = (
        version
        for version, release in matrix.releases.items()
        if release.sdist
        and misfit(row, version, release) is None
        and not has(version, "Triton is imported")
    )
    return max(fit, key=Version)


def _run_locally(site: Settings, progress: Progress) -> None:
    """Train by `--backend local`, with torch and Megatron from PyPI in an environment of ours."""
    matrix = load_matrix(site.matrix)
    lock = load_lock(site.matrix.with_suffix(".lock"))
    torch = pinned_versions(lock.packages[TAGS[-1]])["torch"]
    release = newest_release(matrix, ".".join(map(str, sys.version_info[:2])), torch)
    runtime = [Requirement(one).name for one in matrix.needs.runtime]
    wanted = [f"torch=={torch}", f"megatron-core=={release}", *runtime]
    beside = ROOT if (ROOT / "tools/bootstrap.py").is_file() else site.cache
    venv = beside / ".venv-demo"
    complete = venv / "complete"
    if not (complete.is_file() and complete.read_text("utf-8") == " ".join(wanted)):
        progress.note(f"installing {' and '.join(wanted[:2])} in {venv}")
        _make_environment(venv, wanted, site)
        files.write(complete, " ".join(wanted))
    os.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    _train(site.cache / "demo", f"Megatron {release}", "--backend", "local")


def _make_environment(venv: Path, wanted: list[str], site: Settings) -> None:
    """Make a virtual environment with packages of pip's, in place of an older one of ours."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    if venv.exists():
        owned.remove_folder(venv.absolute(), venv.parent.absolute())
    owned.make_folder(venv)
    index = ["--extra-index-url", site.torch_index] if site.torch_index else []
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install"]
    for argv in (
        [sys.executable, "-m", "venv", "--without-pip", str(venv)],
        [*pip, "--quiet", "--disable-pip-version-check", *index, *wanted],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise DemoError(
                f"{' '.join(argv[1:3])} ended with exit code {done.returncode}:\n{said}"
            )


def whereabouts(host: str, within: float) -> str:
    """Where the image is, once the demo has left a private engine: others may keep that up."""
    if socket_fault(Path(host.removeprefix("unix://")), within):
        return (
            "The image is in a private engine, which has ended. `launcher engine` "
            "keeps it up\nand prints the DOCKER_HOST with which other commands find it."
        )
    return (
        "The image is in a private engine, which others keep up. Commands find it with\n"
        f"    export DOCKER_HOST={host}"
    )


def _train(folder: Path, release: str, *options: str) -> None:
    """Train on the text, then load the checkpoint and go on; check what the losses say.

    options: of `launcher run`
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        owned.remove_folder(folder, folder.parent)
    owned.make_folder(folder)
    documents = text()
    tokens = indexed.write(folder / "text", documents, VOCABULARY)
    entropy = unigram_entropy(documents[round(len(documents) * (1 - HELD_OUT)) :])
    print(
        f"text: the language reference of Python {platform.python_version()}, {tokens:,} bytes in "
        f"{len(documents)} documents;\n"
        f"its held-out part has a unigram entropy of {entropy:.3f} nats a token"
    )
    first = launch(folder, *options)
    last = max(first.held_out)
    resumed = launch(folder, *options, "--set", f"training.train_iters={last + MORE_ITERATIONS}")
    _check(first, resumed, entropy)
    print(
        f"\n{release}: held-out loss {first.held_out[last]:.3f} after {last} iterations, "
        f"below the unigram entropy of {entropy:.3f};"
        f"\nloaded from the checkpoint and trained on to iteration {max(resumed.held_out)}: "
        f"{resumed.held_out[max(resumed.held_out)]:.3f}"
    )


def text() -> list[list[int]]:
    """Python's language reference as Python ships it, a document a topic, as bytes."""
    from pydoc_data.topics import topics

    return [[*topics[name].encode(), END_OF_DOCUMENT] for name in sorted(topics)]


def unigram_entropy(documents: list[list[int]]) -> float:
    """The entropy in nats a token of the documents' own token frequencies.

    No model that ignores a token's context can have a lower loss on them.
    """
    counts = Counter(token for document in documents for token in document)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def launch(folder: Path, *options: str) -> DemoLosses:
    """Run the demo's preset in `folder` by the command a user would type; show what it prints."""
    command = [sys.executable, "-m", "launcher", "run", "demo.yaml", *options]
    for setting in (f"data.path={folder / 'text'}", f"data.cache={folder / 'index'}"):
        command += ["--set", setting]
    for key in ("save", "load"):
        command += ["--set", f"checkpoint.{key}={folder / 'checkpoints'}"]
    print(f"\n$ {shlex.join(command[2:])}", flush=True)
    training, held_out = {}, {}
    env = os.environ | {"LAUNCHER_RUNS": str(folder / "runs")}  # it's none of the user's runs
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=bare(sys.stdout), flush=True)
            if match := LOSS.search(line):
                training[int(match[1])] = float(match[2])
            if match := HELD_OUT_LOSS.search(line):
                held_out[int(match[1])] = float(match[2])
    if process.returncode:
        raise DemoError(f"the training run ended with exit code {process.returncode}")
    if not training or not held_out:
        raise DemoError("the training run printed no losses")
    return DemoLosses(training, held_out)


def _check(first: DemoLosses, resumed: DemoLosses, entropy: float) -> None:
    """Raise DemoError unless the model learnt from context and went on from its checkpoint."""
    last = max(first.held_out)
    if first.held_out[last] >= entropy:
        raise DemoError(f"held-out loss {first.held_out[last]} is not below {entropy:.3f}")
    if min(resumed.training) <= last:
        raise DemoError("the second run began at the first iteration: no checkpoint was loaded")
    if max(resumed.held_out) != last + MORE_ITERATIONS:
        raise DemoError("the second run did not go on to its last iteration")
