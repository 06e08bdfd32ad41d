"""Runs what a row's Dockerfile compiles, with no engine: for a GPU machine that has only nvcc.

    python3 -m bench.gpu.stages pack TAG --to context.tar.xz [--submodule NAME/PATH=FOLDER]
    python3 -m bench.gpu.stages build context.tar.xz --to FOLDER [--jobs N] [--architectures 90]

`pack` writes the build context as `image build` does, from what `launcher fetch` brings, less the
packages and the Python of the row, and less what no compiler reads; --submodule takes one of an
extension from a folder, as it is. `build` carries out, as root, the COPY, ENV, ARG and RUN lines of
the stages `wheel` and `extensions` of the row's own Dockerfile. What stands for the engine: /build
and /stage are folders of the machine, which mustn't be there before. What stands for the base: the
machine's nvcc, with the headers that torch's packages bring where it has none. What stands for the
row's packages: the torch of the Python that runs this, linked to /opt/packages/lib. It prints what
each step took, and sizes and hashes of the wheels; `--again NAME` compiles that extension a second
time and says whether it is the same. What was made lies in FOLDER/opt, for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BUILD, STAGE, PACKAGES = Path("/build"), Path("/stage"), Path("/opt/packages/lib")
STAGES = ("wheel", "extensions")
LEFT_BEHIND = re.compile(
    r"wheels/packages/.*\.whl$|extensions/[^/]+/source/"
    r"(docs|tests|examples|benchmarks|qa|3rdparty/cutlass/(?!include/|tools/util/include/|cmake/)|"
    r"3rdparty/cudnn-frontend/(?!include/|cmake/)|apex/contrib/(test|examples))"
)
"""Of a context: what the machine has, and what no compiler reads."""


def pack(tag: str, to: Path, given: dict[str, str]) -> None:
    """Write the context of `tag`, of its row's release and extensions.

    given: folders by the extension and the path of a submodule
    """
    from launcher.base.settings import settings
    from launcher.images.builder import context
    from launcher.images.matrix.dockerfile import dockerfile
    from launcher.images.matrix.matrix_file import load_lock, load_matrix, patch_files
    from launcher.images.matrix.recipe import recipe
    from launcher.images.sources import extensions, fetch, megatron_source
    from launcher.images.sources.pins import StartImage

    site = settings()
    matrix, root = load_matrix(site.matrix), site.matrix.parent
    made = recipe(matrix, load_lock(site.matrix.with_suffix(".lock")), tag)
    nobody = StartImage(made.row.base, "", made.row.base, "", pinned=False, platform=made.platform)
    inputs = context.Inputs(
        recipe=made,
        dockerfile=dockerfile(matrix, tag, (root / "Dockerfile.template").read_text()),
        base=nobody,
        builder=nobody,
        source=megatron_source.locked(made, site),
        patches=tuple(patch_files(root, made.named)),
        extensions=tuple(
            extensions.from_git(name, *without(given, name, *pair), site)
            for name, pair in made.extensions.items()
        ),
    )
    here = {group: pins for group, pins in made.pins.items() if group != "packages"}
    wheels = {
        group: fetch.wheels(pins, made.row.python, site, made.platform)
        for group, pins in here.items()
    }
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as whole:
        context.write(inputs, {"packages": [], **wheels}, Path(scratch), whole)
        whole.seek(0)
        with tarfile.open(fileobj=whole) as read, tarfile.open(to, "w:xz", preset=4) as written:
            for member in read:
                if not LEFT_BEHIND.match(member.name):
                    content = read.extractfile(member) if member.isfile() else None
                    written.addfile(member, content)
            for name, folder in given.items():
                extension, _, path = name.partition("/")
                written.add(folder, f"extensions/{extension}/source/{path}")
    print(f"{to}: {to.stat().st_size:,} bytes; SOURCE_DATE_EPOCH={inputs.source.epoch}")


def without(given: Iterable[str], name: str, *pair: Any) -> list[Any]:
    """What is wanted and what is locked of an extension, less the submodules that are given."""
    taken = {path.partition("/")[2] for path in given if path.startswith(f"{name}/")}
    return [
        each.model_copy(
            update={"submodules": {k: v for k, v in each.submodules.items() if k not in taken}}
        )
        for each in pair
    ]


@dataclass
class Dockerfile:
    """The lines of a Dockerfile by its stages, and the values that ENV and ARG set.

    args: in place of the ARG lines' own
    """

    lines: dict[str, list[str]]
    args: dict[str, str]
    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, args: dict[str, str]) -> Dockerfile:
        """The stages by their names."""
        lines: dict[str, list[str]] = {"": []}
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            if word == "FROM":
                lines[rest.partition(" AS ")[2]] = into = []
            elif word and not word.startswith("#"):
                (into if len(lines) > 1 else lines[""]).append(line)
        return cls(lines, args)

    def of(self, stage: str) -> Iterator[tuple[str, list[str]]]:
        """The COPY and RUN lines of a stage, as words; ENV and ARG are taken as they come."""
        for line in self.lines[stage]:
            word, _, rest = line.partition(" ")
            if word in ("ENV", "ARG"):
                name, given, value = rest.partition("=")
                value = self._filled(value.strip('"'))
                if word == "ENV" or given or name in self.args:
                    self.values[name] = self.args.get(name, value) if word == "ARG" else value
            elif word == "RUN":
                yield word, json.loads(rest)
            elif word == "COPY":
                yield word, shlex.split(rest)
            elif word != "WORKDIR":
                sys.exit(f"a line that nothing here stands for: {line}")

    def _filled(self, value: str) -> str:
        """A value with the variables in it, which a shell writes as a Dockerfile does."""
        said = ["sh", "-c", f'printf %s "{value}"']
        env = os.environ | self.values
        return subprocess.run(said, env=env, check=True, capture_output=True, text=True).stdout


def build(
    packed: Path, to: Path, args: dict[str, str], stages: Iterable[str], only: str, again: str
) -> None:
    """Carry out the stages; leave their /stage in `to`."""
    for taken in (BUILD, STAGE):
        if taken.exists() or taken.is_symlink():
            sys.exit(f"{taken} is there already: it would be taken for what is made here")
    context = to / "context"
    context.mkdir(parents=True)
    with tarfile.open(packed) as tar:
        tar.extractall(context, filter="data")
    site = Path(find_spec("torch").origin).parents[1]
    if not PACKAGES.exists():
        PACKAGES.parent.mkdir(parents=True, exist_ok=True)
        PACKAGES.symlink_to(site)
    home = toolkit(site / "nvidia", to / "cuda")
    os.environ |= {"CUDA_HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    read = Dockerfile.parse((context / "Dockerfile").read_text(), args)
    [*read.of("base")]
    for stage in stages:
        run_stage(read, stage, context, only)
        shutil.copytree(STAGE, to, symlinks=True, dirs_exist_ok=True)
        put_away(to, stage)
    if again:
        run_stage(read, "extensions", context, again)
        wheels = [
            *(BUILD / "dist" / again).glob("*"),
            *(to / f"extensions/build/dist/{again}").glob("*"),
        ]
        same = len({hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels}) == 1
        print(f"{again}: two builds are {'identical' if same else 'different'}", flush=True)
        put_away(to, "again")


def put_away(to: Path, stage: str) -> None:
    """Move what a stage has left into `to`, so that the next begins with nothing."""
    (to / stage).mkdir()
    shutil.move(BUILD, to / stage / "build")
    shutil.move(STAGE, to / stage / "stage")


def toolkit(more: Path, to: Path) -> Path:
    """The machine's CUDA toolkit, with the headers and libraries that a base has beside nvcc."""
    own = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")).resolve()
    if (own / "include/cublas_v2.h").exists():
        return own
    shutil.copytree(own, to, symlinks=True)
    for path in (*more.glob("cu13/include/*"), *more.glob("nccl/include/*")):
        if not (to / "include" / path.name).exists():
            (to / "include" / path.name).symlink_to(path)
    for path in (*more.glob("cu13/lib/lib*.so.*"), *more.glob("nccl/lib/lib*.so.*")):
        for name in {path.name, path.name.partition(".so")[0] + ".so"}:
            if not (to / "lib64" / name).exists():
                (to / "lib64" / name).symlink_to(path)
    return to


def run_stage(read: Dockerfile, stage: str, context: Path, only: str = "") -> None:
    """One stage from an empty /build to its /stage; `only` that extension."""
    BUILD.mkdir()
    for word, words in read.of(stage):
        if word == "COPY":
            *sources, target = words
            for name in sources:
                copy(context / name, BUILD / target, whole=name.endswith("/"))
        elif not (only and words[2] == "extension" and words[3] != only):
            words[0] = sys.executable  # the builder's or the base's Python
            before = time.monotonic()
            done = subprocess.run(words, cwd=BUILD, env=os.environ | read.values, check=False)
            print(f"{stage}: {' '.join(words[1:])}: {time.monotonic() - before:.0f} s", flush=True)
            if done.returncode:
                sys.exit(done.returncode)
    for path in sorted((BUILD / "dist").rglob("*.whl")):
        content = path.read_bytes()
        print(f"{path.name}: {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


def copy(source: Path, target: Path, *, whole: bool) -> None:
    """COPY: a folder's content, or a file into a folder."""
    if whole:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def main(argv: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.stages")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("tag")
    packing.add_argument("--submodule", action="append", default=[], metavar="NAME/PATH=FOLDER")
    building = commands.add_parser("build")
    building.add_argument("packed", type=Path)
    building.add_argument("--jobs", default=str(os.cpu_count()))
    building.add_argument("--architectures", default="90")
    building.add_argument("--again", default="", metavar="NAME")
    building.add_argument("--only", default="", metavar="NAME", help="of the extensions")
    building.add_argument("--stage", action="append", choices=STAGES)
    building.add_argument("--epoch", default="1700000000", help="SOURCE_DATE_EPOCH, as pack said")
    for each in (packing, building):
        each.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args(argv)
    if asked.command == "pack":
        pack(asked.tag, asked.to, dict(one.split("=", 1) for one in asked.submodule))
    else:
        args = {"MAX_JOBS": asked.jobs, "CUDA_ARCHITECTURES": asked.architectures}
        args |= {"SOURCE_DATE_EPOCH": asked.epoch}
        build(asked.packed, asked.to, args, asked.stage or STAGES, asked.only, asked.again)


if __name__ == "__main__":
    main(sys.argv[1:])
