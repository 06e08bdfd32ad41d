"""The steps of a Dockerfile's build stages; runs inside the builder image, on its Python alone.

    tools     unpack pip and what compiles the wheel
    wheel     compile source/ into a megatron_core wheel and assert what must be in it
    folder    lay out /stage/opt/megatron, which is all that is added to a base
    fit       on the base, take out of it the packages that the base has
    packages  lay out /stage/opt/packages: what a base lacks, such as CPU torch; /stage/opt/python,
              where it has none
    extras    lay out /stage/opt/extras: what was asked for beside Megatron, on the base
    extension compile extensions/NAME into a wheel, on a base whose nvcc it takes, and lay it out in
              /stage/opt/extensions
    compile   byte-compile one share of a folder; started by the others

Reads source.json, which the context's record() wrote. Any failed assertion is one line on stderr
and exit code 1, which fails the build.
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

BUILD = Path("/build")
TOOLS = BUILD / "tools"
DIST = BUILD / "dist"
NATIVE = BUILD / "native"
STAGE = Path("/stage")
MEGATRON = STAGE / "opt/megatron"
PACKAGES = STAGE / "opt/packages"
EXTENSIONS = STAGE / "opt/extensions"
EXTRAS = STAGE / "opt/extras"
EXAMPLE = "megatron_core_training_example.py"
EPOCH_OF_PACKAGES = 315532800  # 1980-01-01, the earliest time a zip file can carry
LEFT_OUT = ("*.py[co]", "*.so", "*.o")  # what an earlier build left in a checkout
TESTS = {"tests", "test"}
SHARES = 4  # that a folder is byte-compiled in, whatever the number of processors

PIP = ["-m", "pip"]  # of the build tools
KEPT = {"PYTHONDONTWRITEBYTECODE": ""}  # pip's modules compile for half of the time of each run
COMPILERS = str(Path(__file__).with_name("compilers.py"))

# Optimised, without debug information, symbols, or the build folder's path in assertions. nvcc's
# objects differ by one symbol alone, the name of a temporary file.
COMPILER = f"-O3 -g0 -ffile-prefix-map={BUILD}=."
FLAGS = {"CFLAGS": COMPILER, "CXXFLAGS": COMPILER, "LDFLAGS": "-Wl,-s"}


# pip's own would name the builder's Python.
TORCHRUN = """#!/usr/bin/env python3
from torch.distributed.run import main

if __name__ == "__main__":
    main()
"""


def tools() -> None:
    """Install the build tools into a folder, by the pip that is among them."""
    pip_wheel = next((BUILD / "wheels/build").glob("pip-*.whl"))
    install(BUILD / "wheels/build", TOOLS, pip=[f"{pip_wheel}/pip"])
    # setup.py calls `python3 -m pybind11`, and that must be this Python.
    (BUILD / "bin").mkdir()
    (BUILD / "bin/python3").symlink_to(sys.executable)


def wheel() -> None:
    """Compile the wheel and assert that it is all of the source's packages, and the extension."""
    print("stage: compiling megatron_core", flush=True)
    built = compile_wheel()
    source = json.loads((BUILD / "source.json").read_text())
    names = zipfile.ZipFile(built).namelist()
    version = built.name.split("-")[1]
    if version != source["version"]:
        fail(f"the source calls itself {version}, and {source['version']} was expected")
    check_extension(built, names, source["extension"])
    if source["whole"] and "megatron/training/__init__.py" not in names:
        fail(f"{built.name} holds no megatron.training: the packaging patch did not take effect")
    check_files(built, names)
    print(f"stage: {built.name} {sha256(built)}", flush=True)


def compile_wheel() -> Path:
    """The wheel of source/, with all that lies beside its modules: a web page, a CUDA kernel.

    Upstream names next to none of it as package data, so the released wheels lack it.
    """
    with (BUILD / "source/MANIFEST.in").open("a") as file:
        file.write(f"\ngraft megatron\nglobal-exclude {' '.join(LEFT_OUT)}\n")
    normalise(BUILD / "source", int(os.environ["SOURCE_DATE_EPOCH"]))  # a wheel keeps modes
    return pip_wheel(BUILD / "source", DIST, **KEPT, **FLAGS)


def pip_wheel(
    source: Path, to: Path, *options: str, at_once: str | None = None, **env: str
) -> Path:
    """The wheel of a source, made in the folder `to` with no network; see `divided`."""
    command = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(to)]
    compiler = [COMPILERS, "run", at_once or "", *PIP, *command, *options, str(source)]
    if subprocess.run([sys.executable, *compiler], env=environment(env), check=False).returncode:
        sys.exit(1)  # it has said why
    return next(to.glob("*.whl"))


def lay_out(built: Path, lib: Path, record: dict[str, object], at: Path) -> None:
    """Install a wheel into a folder of packages, and write a record that names it."""
    options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(lib)]
    run([*PIP, "install", *options, str(built)], **KEPT)
    record["wheel"] = {"name": built.name, "sha256": sha256(built)}
    at.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def check_extension(built: Path, names: list[str], extension: str) -> None:
    """Fail unless the compiled module is in the wheel, loads, and names no build folder."""
    stem = extension.replace(".", "/")
    found = [name for name in names if name.startswith(stem + ".") and name.endswith(".so")]
    if not found:
        fail(f"{built.name} holds no compiled {extension}: see the compiler's messages above")
    unpacked = Path(zipfile.ZipFile(built).extract(found[0], BUILD / "check"))
    if str(BUILD).encode() in unpacked.read_bytes():
        fail(f"{found[0]} holds the path of the build folder")
    spec = importlib.util.spec_from_file_location(extension, unpacked)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        fail(f"{found[0]} does not import: {error}")


def check_files(built: Path, names: list[str]) -> None:
    """Fail unless every file of the source's packages is in the wheel, but for LEFT_OUT."""
    packages = BUILD / "source/megatron"
    there = [path for path in packages.rglob("*") if path.is_file()]
    wanted = {
        path.relative_to(BUILD / "source").as_posix()
        for path in there
        if not any(path.match(pattern) for pattern in LEFT_OUT)
    }
    if missing := sorted(wanted - {*names}):
        listed = ", ".join(missing[:5]) + (", …" if missing[5:] else "")
        fail(f"{built.name} lacks {len(missing)} files that the source has: {listed}")


def folder() -> None:
    """Lay out what is added to a base: wheel, needs, the example, the source's scripts."""
    lib = MEGATRON / "lib"
    install(BUILD / "wheels/runtime", lib)
    record = json.loads((BUILD / "source.json").read_text())
    lay_out(next(DIST.glob("*.whl")), lib, record, MEGATRON / "build.json")
    shutil.copy(BUILD / EXAMPLE, MEGATRON / EXAMPLE)
    shutil.copytree(
        BUILD / "source", MEGATRON / "src", symlinks=True, ignore=only_scripts(BUILD / "source")
    )
    set_apart(lib)
    compile_python(lib)
    normalise(STAGE, int(os.environ["SOURCE_DATE_EPOCH"]))


def fit() -> None:
    """Take what this base has out of the folder, so that its own packages stay in use.

    All that the folder has beside Megatron stands before the base's packages on sys.path. What was
    left out is written into build.json, with the base's versions.
    """
    lib, at = MEGATRON / "lib", MEGATRON / "build.json"
    there = {canonical(one): one.version for one in distributions()}
    left = {}
    for one in distributions(path=[str(lib)]):
        name = canonical(one)
        if name in there and name != "megatron-core":
            left[name] = there[name]
            remove_package(one, lib)
    record = json.loads(at.read_text())
    at.write_text(json.dumps(record | {"of_base": left}, indent=2, sort_keys=True) + "\n")
    normalise(STAGE, int(os.environ["SOURCE_DATE_EPOCH"]))


def canonical(package: Distribution) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()


def remove_package(package: Distribution, lib: Path) -> None:
    """Remove a package from the folder that it was installed in: modules, metadata, byte code."""
    name = canonical(package)
    tops = {path.parts[0] for path in package.files or () if path.parts[0] != ".."}
    for top in tops:
        for path in [lib / top, *(lib / "__pycache__").glob(f"{Path(top).stem}.*.pyc")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for info in lib.glob("*.dist-info"):  # set_apart() gave it another name than its RECORD has
        if canonical(Distribution.at(info)) == name:
            shutil.rmtree(info)


def extras() -> None:
    """Lay out what was asked for beside Megatron, with its commands."""
    install(BUILD / "wheels/extras", EXTRAS / "lib", keep_programs=True)
    commands = EXTRAS / "lib/bin"
    if commands.is_dir():
        commands.rename(EXTRAS / "bin")
    set_apart(EXTRAS / "lib")
    compile_python(EXTRAS / "lib")
    normalise(STAGE, EPOCH_OF_PACKAGES)


def packages() -> None:
    """Lay out the packages a base lacks, and torch's command; a Python, where it has none."""
    interpreter = BUILD / "python.tar.gz"
    if interpreter.is_file():
        unpack_python(interpreter)
    install(BUILD / "wheels/packages", PACKAGES / "lib")
    torchrun = PACKAGES / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    compile_python(PACKAGES / "lib")
    normalise(STAGE, EPOCH_OF_PACKAGES)


def unpack_python(archive: Path) -> None:
    """Lay out the Python in an archive, as /opt/python."""
    (STAGE / "opt").mkdir(parents=True)
    command = ["tar", "-x", "-z", "-f", str(archive), "-C", str(STAGE / "opt")]
    if subprocess.run(command, check=False).returncode:
        fail("tar can't unpack the interpreter")
    python = STAGE / "opt/python"
    if not (python / "bin/python3").exists():
        fail("the interpreter's archive has no python/bin/python3")
    for cache in [*python.rglob("__pycache__")]:  # of other times than the files are given here
        shutil.rmtree(cache)
    compile_python(python / "lib")


def extension(name: str) -> None:
    """Compile one extension with the base's nvcc and torch, and lay it out.

    MAX_JOBS is how many compilers run at a time, which torch's and CMake's builds read; the GPUs
    are in CUDA_ARCHITECTURES: 80 90a. A wheel without the modules that it is for is refused, since
    options that a setup.py doesn't know are ignored.
    """
    folder = BUILD / "extensions" / name
    record = json.loads((folder / "extension.json").read_text())
    print(f"stage: compiling {name}", flush=True)
    install(BUILD / "wheels/extensions", NATIVE, keep_programs=True)
    raise_standard(folder / "source")
    normalise(folder / "source", record["epoch"])
    options = [f"--config-settings=--build-option={option}" for option in record["options"]]
    env, at_once = compiling(record), record["modules_at_once"]
    built = pip_wheel(folder / "source", DIST / name, *options, at_once=at_once, **env)
    check_modules(built, record["modules"])
    record["architectures"] = os.environ["CUDA_ARCHITECTURES"]
    lay_out(built, EXTENSIONS / "lib", record, EXTENSIONS / f"{name}.json")
    compile_python(EXTENSIONS / "lib")
    normalise(STAGE, EPOCH_OF_PACKAGES)
    print(f"stage: {built.name} {record['wheel']['sha256']}", flush=True)


def raise_standard(source: Path) -> None:
    """Have build scripts compile by the C++ that torch's headers ask for, where theirs is older.

    mamba-ssm's setup.py names C++17 up to 2.3.2; torch's headers refuse it from 2.14 on.
    """
    torch = importlib.util.find_spec("torch")
    header = Path(torch.origin or "").parent / "include/ATen/ATen.h" if torch else None
    asked = re.search(r"#error C\+\+(\d+)", header.read_text()) if header else None
    if asked is None:
        return
    least = asked[1].encode()
    for script in filter(Path.is_file, source.rglob("*.py")):
        text = script.read_bytes()
        raised = re.sub(rb"-std=c\+\+(1[147])\b", lambda m: b"-std=c++" + max(m[1], least), text)
        script.write_bytes(raised)


def compiling(record: dict[str, Any]) -> dict[str, str]:
    """The environment of an extension's setup.py: architectures as torch and CMake write them."""
    asked = os.environ["CUDA_ARCHITECTURES"].split()
    dotted = [re.sub(r"(\d)([af]?)$", r".\1\2", one) for one in asked]
    paths = [str(TOOLS), str(NATIVE), os.environ.get("PYTHONPATH", "")]
    return {
        "TORCH_CUDA_ARCH_LIST": ";".join(dotted),
        "NVTE_CUDA_ARCHS": ";".join(asked),
        "PYTORCH_NVCC": f"{sys.executable} {COMPILERS} nvcc",
        "CC": "gcc",
        "CXX": "g++",
        **FLAGS,
        "PYTHONPATH": ":".join(filter(None, paths)),
        "PATH": f"{BUILD / 'bin'}:{NATIVE / 'bin'}:{os.environ['PATH']}",
        "SOURCE_DATE_EPOCH": str(record["epoch"]),  # of the files in the wheel
        **record["environment"],
    }


def check_modules(built: Path, modules: list[str]) -> None:
    """Fail unless all of the compiled modules are in the wheel, in whatever folder of it."""
    names = [name.rpartition("/")[2] for name in zipfile.ZipFile(built).namelist()]
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    if missing := [name for name in modules if name not in compiled]:
        fail(f"{built.name} holds no compiled {', '.join(missing)}: see the messages above")


def set_apart(lib: Path) -> None:
    """Give packages' metadata names that no package's folder begins.

    An engine writes a layer's files folder by folder, or ordered by their whole paths; Docker 20.10
    was seen to do either. By the first `einops-0.8.2.dist-info` comes after all of `einops/`, by
    the second before it, and the layer has another digest. Python finds metadata whatever the case
    of its letters.
    """
    for info in lib.glob("*.dist-info"):
        if (lib / info.name.partition("-")[0]).is_dir():
            info.rename(info.with_name(info.name[0].swapcase() + info.name[1:]))


def only_scripts(source: Path):  # type: ignore[no-untyped-def]  # shutil's own signature
    """What copytree leaves out of src/: what the wheel holds, build output, settings of git."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == source:
            unwanted = ("megatron", "build", "tests", "__pycache__")
            return {n for n in names if n in unwanted or ".egg" in n or n.startswith(".git")}
        return {n for n in names if n == "__pycache__"}

    return ignore


def install(
    wheels: Path, target: Path, pip: list[str] | None = None, keep_programs: bool = False
) -> None:
    """Install every requirement of a wheel folder, checked against its hash, from that folder."""
    options = ["--no-index", "--no-deps", "--require-hashes", "--no-compile", "--find-links"]
    requirements = ["--target", str(target), "-r", str(wheels / "requirements.txt")]
    run([*(pip or PIP), "install", *options, str(wheels), *requirements], **KEPT)
    if not keep_programs:
        shutil.rmtree(target / "bin", ignore_errors=True)


def run(args: list[str], **extra: str) -> None:
    """Run this Python with `args`; its failure is ours."""
    done = subprocess.run([sys.executable, *args], env=environment(extra), check=False)
    if done.returncode:
        fail(f"{args[0]} {args[1]} failed with exit code {done.returncode}")


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Of what is run here; no pip configuration reaches it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"PYTHONPATH": str(TOOLS), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    env |= {"PATH": f"{BUILD / 'bin'}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    env |= {"PIP_NO_CACHE_DIR": "1", "PIP_PROGRESS_BAR": "off", "PYTHONWARNINGS": "ignore"}
    return env | extra


def compile_python(folder: Path) -> None:
    """Byte-compile a folder, to the same bytes at every build.

    Up to Python 3.10 a .pyc depends on the seed of the hashes (the order of a frozenset) and on
    what is alive in the process (marshal marks objects that are referred to more than once). So
    the seed is fixed, and each file is always compiled after the same other files.
    """
    with ThreadPoolExecutor(SHARES) as pool:
        shares = [["compile", str(folder), str(share)] for share in range(SHARES)]
        list(pool.map(lambda share: run([__file__, *share]), shares))


def compile_share(folder: Path, share: int) -> None:
    """Byte-compile every fourth file, with hashes for times: no .pyc then holds a time.

    But for packages' own tests, a fifth of what comes with torch: who imports one compiles it.
    """
    files = (p for p in folder.rglob("*.py") if not TESTS & {*p.relative_to(folder).parts})
    for path in sorted(files)[share::SHARES]:
        compileall.compile_file(
            path,
            stripdir=str(STAGE),
            prependdir="/",
            quiet=2,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


def normalise(folder: Path, epoch: int) -> None:
    """One time, one mode for files and one for folders, one owner, throughout."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if executable else 0o644)
        os.chown(path, 0, 0, follow_symlinks=False)
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fail(reason: str) -> None:
    """End the build with one line."""
    sys.exit(f"stage: {reason}")


if __name__ == "__main__":
    os.umask(0o022)
    if sys.argv[1] == "compile":
        compile_share(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "extension":
        extension(sys.argv[2])
    else:
        {one.__name__: one for one in (tools, wheel, folder, fit, extras, packages)}[sys.argv[1]]()
