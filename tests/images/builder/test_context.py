"""What goes into a build and is done inside: the same bytes whoever builds; patches in full."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from launcher.base.errors import BuildError
from launcher.base.settings import Settings
from launcher.images.builder import compilers, context, stage
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.sources import fetch, megatron_source
from launcher.images.sources.extensions import ExtensionSource

from .conftest import commit_all
from .made import BASE, RECIPE, inputs_of
from .test_megatron_source import ANY


def inputs(checkout: Path) -> context.Inputs:
    pins = {"runtime": ["a==1 --hash=sha256:" + "1" * 64]}
    own = megatron_source.from_path(checkout, "0.9.0", ANY)
    return inputs_of(own, recipe=replace(RECIPE, pins=pins), patches=())


def packed(given: context.Inputs, scratch: Path) -> bytes:
    scratch.mkdir()
    wheel = scratch / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    file = io.BytesIO()
    context.write(given, {"runtime": [wheel]}, scratch, file)
    return file.getvalue()


MODES = st.tuples(st.sampled_from([0o600, 0o644, 0o664, 0o666]), st.sampled_from([0o700, 0o755]))


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=30
)
@hypothesis.given(
    modes=MODES,
    when=st.floats(0, 4e9),
    umask=st.sampled_from([0o000, 0o022, 0o027, 0o077]),
    owner=st.sampled_from([(0, 0), (12345, 23456), (3_000_000, 3_000_000)]),
    linked=st.booleans(),
)
def test_who_has_a_checkout_and_the_launcher_shows_nowhere(
    checkout: Path,
    tmp_path: Path,
    modes: tuple[int, int],
    when: float,
    umask: int,
    owner: tuple[int, int],
    linked: bool,
) -> None:
    """Modes but for the owner's x, times, owners, links and umask of what is packed."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        mine, own = Path(folder, "Megatron-LM"), Path(folder, "launcher")
        shutil.copytree(checkout, mine)
        run = mine / "run.sh"
        run.write_text("echo")
        twin = mine / "twin.py"
        if linked:
            twin.hardlink_to(mine / "setup.py")
        else:
            shutil.copy(mine / "setup.py", twin)
        own.mkdir()
        files = {name: own / name for name in context.own_files()}
        for name, path in context.own_files().items():
            shutil.copyfile(path, files[name])
        for path in [*mine.rglob("*"), *own.rglob("*")]:
            path.chmod(modes[1] if path.is_dir() or path == run else modes[0])
            os.utime(path, (when, when))
            if os.geteuid() == 0:
                os.chown(path, *owner)
        patch.setattr(context, "own_files", lambda: files)
        before = os.umask(umask)
        try:
            found = packed(inputs(mine), Path(folder, "scratch"))
        finally:
            os.umask(before)
    assert hashlib.sha256(found).hexdigest() == expected(checkout, tmp_path)


def expected(checkout: Path, tmp_path: Path) -> str:
    """The hash of the context of the same checkout as it is, with the two files more."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        plain = Path(folder, "Megatron-LM")
        shutil.copytree(checkout, plain)
        (plain / "run.sh").write_text("echo")
        (plain / "run.sh").chmod(0o755)
        shutil.copy(plain / "setup.py", plain / "twin.py")
        return hashlib.sha256(packed(inputs(plain), Path(folder, "scratch"))).hexdigest()


def test_each_input_is_in_the_key_and_in_the_context(checkout: Path, tmp_path: Path) -> None:
    """A field of Inputs that no key has would give one image's key to another."""
    given, matrix, lock = inputs(checkout), load_matrix(), load_lock()
    patch = tmp_path / "01.patch"
    patch.write_text("x")
    helpers = given.recipe.named.model_copy(update={"extension": "other"})
    name = next(iter(lock.extensions))
    compiled = ExtensionSource(name, matrix.extensions[name], lock.extensions[name], {})
    changes: dict[str, list[object]] = {
        "recipe": [
            replace(given.recipe, pins={}),
            replace(given.recipe, named=helpers),
            replace(given.recipe, platform="linux/arm64"),
        ],
        "dockerfile": ["FROM other\n"],
        "base": [replace(BASE, digest="sha256:other")],
        "builder": [replace(BASE, digest="sha256:other")],
        "source": [
            replace(given.source, identity="other"),
            replace(given.source, epoch=1),
            replace(given.source, release="0.9.5"),
        ],
        "patches": [(patch,)],
        "interpreter": [Path("/cache/sha256/python.tar.zst")],
        "extensions": [(compiled,)],
        "architectures": ["90"],
        "labels": [{"a": "b"}],
    }
    assert [*changes] == [each.name for each in fields(context.Inputs)]
    others = [
        replace(given, **{name: value})  # type: ignore[arg-type]
        for name, values in changes.items()
        for value in values
    ]
    with tarfile.open(fileobj=io.BytesIO(packed(given, tmp_path / "one"))) as tar:
        names = set(tar.getnames())
    assert {"Dockerfile", "stage.py", "source.json", "source/setup.py"} <= names
    assert {"wheels/runtime/requirements.txt", context.OWN[-1]} <= names
    assert not [name for name in names if name.startswith("launcher")]  # no edit there changes it
    keys = {given.key(), *(other.key() for other in others)}
    assert len(keys) == 1 + len(others)
    assert inputs(checkout).key() == given.key()
    here = replace(given, base=replace(BASE, id="sha256:as-this-engine-numbers-it"))
    assert here.key() == given.key()  # another engine's number of the same image


PATCH = """\
Says what for.

--- a/setup.py
+++ b/setup.py
@@ -1,3 +1,3 @@
 first
-second
+changed
 third
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    (path / "setup.py").write_text("first\nsecond\nthird\n")
    return path


@pytest.fixture
def patches(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "0.9.0"
    folder.mkdir()
    (folder / "01-change.patch").write_text(PATCH)
    return [folder / "01-change.patch"]


def test_it_applies_wherever_it_lies_and_once(tree: Path, patches: list[Path]) -> None:
    commit_all(tree.parent)  # within another repository
    for _ in range(2):
        context.apply_patches(patches, tree)
        assert (tree / "setup.py").read_text() == "first\nchanged\nthird\n"


@pytest.mark.parametrize("there", ["first\nelse\nthird\n", None])
def test_one_that_does_not_match_fails_by_name(
    tree: Path, patches: list[Path], there: str | None
) -> None:
    file = tree / "setup.py"
    file.write_text(there) if there else file.unlink()
    with pytest.raises(BuildError, match=r"0\.9\.0/01-change\.patch doesn't apply"):
        context.apply_patches(patches, tree)
    assert (file.read_text() if there else None) == there


@pytest.mark.parametrize(
    "setting", ["core.autocrlf=true", "apply.whitespace=fix", "apply.whitespace=error"]
)
def test_a_user_s_git_settings_do_not_change_what_a_patch_makes(
    setting: str, tree: Path, patches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    patches[0].write_text(PATCH.replace("+changed", "+changed  "))
    key, _, value = setting.partition("=")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", key)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
    context.apply_patches(patches, tree)
    assert (tree / "setup.py").read_bytes() == b"first\nchanged  \nthird\n"


# What a .pyc of Python 3.10 keeps in the order of the seed: a frozenset, and names in one.
SOURCE = "def known(name):\n    return name in {names}\n"


def runs(program: str) -> bool:
    """Whether there is such a Python: a version manager's stand-in may be there without one."""
    found = shutil.which(program)
    return bool(found) and not subprocess.run([str(found), "-V"], capture_output=True).returncode


def compiled(python: str, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Byte-compile a folder as a build does: the hash of each .pyc."""
    for old in folder.rglob("*.pyc"):
        old.unlink()
    code = f"import stage, pathlib; stage.compile_python(pathlib.Path({str(folder)!r}))"
    at = str(Path(stage.__file__).parent)
    subprocess.run([python, "-c", code], cwd=at, env={**os.environ, **env}, check=True)
    found = {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.rglob("*.pyc")
    }
    assert len(found) == 8
    return found


@pytest.mark.parametrize("python", [sys.executable, "python3.10"])
def test_compiled_files_are_the_same_for_every_seed_and_number_of_processors(
    python: str, tmp_path: Path
) -> None:
    if not runs(python):
        pytest.skip(f"there is no {python}")
    for number in range(8):
        names = "{" + ", ".join(repr(f"name{number}{place}") for place in range(9)) + "}"
        (tmp_path / f"module{number}.py").write_text(SOURCE.format(names=names))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/module8.py").touch()  # which isn't compiled
    one = compiled(python, tmp_path, {"PYTHONHASHSEED": "1"})
    other = compiled(python, tmp_path, {"PYTHONHASHSEED": "2", "PYTHONWARNINGS": "error"})
    assert one == other
    # Alone on a single processor, if the system has a way to say so.
    if hasattr(os, "sched_setaffinity"):
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(own)})
        try:
            assert compiled(python, tmp_path, {"PYTHONHASHSEED": "1"}) == one
        finally:
            os.sched_setaffinity(0, own)


def test_a_build_s_own_python_runs_with_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 3.10 the seed decides what a frozenset in a .pyc looks like."""
    seen: list[Mapping[str, str]] = []

    def run(
        argv: list[str], env: Mapping[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setattr(stage.subprocess, "run", run)
    stage.compile_python(Path("folder"))
    assert len(seen) == stage.SHARES
    assert {env["PYTHONHASHSEED"] for env in seen} == {"0"}


def test_no_folders_name_begins_that_of_its_metadata(tmp_path: Path) -> None:
    for name in ("einops", "einops-0.8.2.dist-info", "six-1.17.0.dist-info", "PyYAML-6.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "six.py").touch()
    info = tmp_path / "einops-0.8.2.dist-info/METADATA"
    info.write_text("Metadata-Version: 2.1\nName: einops\nVersion: 0.8.2\n")
    stage.set_apart(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("Einops-0.8.2.dist-info", "PyYAML-6.dist-info", "einops", "six-1.17.0.dist-info"),
        "six.py",
    ]
    (found,) = metadata.distributions(name="einops", path=[str(tmp_path)])
    assert found.version == "0.8.2"


@pytest.fixture
def building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Settings) -> Path:
    """A build's folder on this machine, with the locked tools, in place of /build in a builder."""
    pins = load_lock().needs["cp311"].build
    tools = tmp_path / "wheels/build"
    tools.mkdir(parents=True)
    for one in fetch.wheels(pins, "3.11", site):
        shutil.copy(one, tools)
    (tools / "requirements.txt").write_text("\n".join(pins) + "\n")
    monkeypatch.setattr(stage, "BUILD", tmp_path)
    monkeypatch.setattr(stage, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(stage, "DIST", tmp_path / "dist")
    monkeypatch.setattr(stage.os, "chown", lambda *_, **__: None)  # which root alone may
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    stage.tools()
    return tmp_path


def test_what_lies_beside_modules_is_in_the_wheel(building: Path) -> None:
    """The text server's page was 404; a CUDA kernel that is compiled at run time was missing."""
    source = building / "source"
    files = (
        "core/__init__.py",
        "core/k/a.cu",
        "inference/server.py",
        "inference/static/index.html",
    )
    for name in (*files, "core/left.so", "core/left.o", "core/left.pyc"):
        path = source / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "megatron-core"\nversion = "1"\n'
        '[tool.setuptools.packages.find]\ninclude = ["megatron.*"]\n'
    )
    built = stage.compile_wheel()
    names = zipfile.ZipFile(built).namelist()
    assert {name for name in names if "dist-info" not in name} == {f"megatron/{n}" for n in files}
    stage.check_files(built, names)
    (source / "megatron/rl").mkdir()
    for number in range(7):
        (source / f"megatron/rl/{number}.py").touch()
    told = r"lacks 7 files that the source has: megatron/rl/0\.py, .*megatron/rl/4\.py, …$"
    with pytest.raises(SystemExit, match=told):
        stage.check_files(built, names)


SAID = yaml.safe_load(Path(__file__).with_name("compilers.yaml").read_text())


@pytest.mark.parametrize(("told", "said"), SAID.items(), ids=SAID)
def test_why_an_extension_does_not_compile(
    told: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(compilers, "run_told", lambda args, extra: (1, said))
    with pytest.raises(SystemExit, match=re.escape(told)):
        compilers.run_compiler(["-c", "said"])


def test_compilers_that_are_killed_for_memory_are_fewer_at_the_next_try(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else hours of it are lost, and the person has to know the number."""
    monkeypatch.setenv("MAX_JOBS", "8")
    code = (
        "import os, sys\nif int(os.environ['MAX_JOBS']) > 2:\n"
        "    print('c++: fatal error: Killed signal terminated program cc1plus')\n    sys.exit(1)"
    )
    compilers.run_compiler(["-c", code])
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("stage: ")]
    assert told == [
        f"stage: too little memory: compiling again, {jobs} at a time" for jobs in (4, 2)
    ]


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ("-gencode arch=compute_75,code=sm_75 -c a.cu -gencode=arch=compute_87,code=sm_87", True),
        ("--generate-code arch=compute_62,code=sm_62 -arch=sm_53 -c a.cu", True),
        ("-c a.cu", False),
        ("-V", False),
    ],
)
def test_nvcc_compiles_for_the_gpus_that_were_asked_for_alone(args: str, given: bool) -> None:
    """causal-conv1d and mamba-ssm name nine GPUs of their own, whatever is asked for."""
    found = compilers.for_gpus(args.split(), ["80", "90a"])
    gpus = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in ("80", "90a")]
    rest = "-c a.cu" if "a.cu" in args else "-V"
    assert found == [*rest.split(), *(gpus if given else [])]


@pytest.mark.parametrize("jobs", [1, 3, 8, 32])
def test_compilers_of_modules_at_once_are_as_many_as_asked_for(jobs: int) -> None:
    """Else four modules would start four times the compilers that there is memory for."""
    told = compilers.divided(jobs, "AT_ONCE")
    assert 0 < int(told["AT_ONCE"]) * int(told["MAX_JOBS"]) <= jobs
    assert compilers.divided(jobs, "") == {"MAX_JOBS": str(jobs)}
