"""Settings: variables before the file before what is usual, and mirrors of images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.settings import GITHUB, ROOT, TORCH_INDEX, Settings, settings
from tests.tables import table

NAMES = "CACHE MATRIX RUNS TORCH_INDEX GIT_MIRROR IMAGE_MIRRORS ANSWER_WITHIN SETTINGS".split()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings file lies for a user with no variables set; it isn't there yet."""
    for name in [f"LAUNCHER_{name}" for name in NAMES] + ["PIP_INDEX_URL", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config/megatron-launchpad/settings.yaml"
    path.parent.mkdir(parents=True)
    return path


def with_mirrors(**mirrors: str) -> Settings:
    return Settings(Path("c"), Path("m"), "", GITHUB, Path("r"), Path("x"), image_mirrors=mirrors)


MIRRORS = with_mirrors(
    **{
        "nvcr.io": "mirror.example/nvcr",
        "nvcr.io/nvidia/pytorch": "fast.example:5000/pytorch",
        "docker.io": "mirror.example/hub",
        "localhost": "other.example",
    }
)


@table("reference", "from_mirror")
def test_an_image_comes_from_the_mirror_with_the_longest_prefix(
    reference: str, from_mirror: str
) -> None:
    assert MIRRORS.mirrored(reference) == from_mirror


PART = st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True)
HOST = st.tuples(PART, PART).map(".".join)


@given(HOST, st.lists(PART, min_size=1, max_size=4), PART, st.integers(0, 4))
def test_what_follows_the_prefix_follows_the_mirror(
    host: str, parts: list[str], tag: str, kept: int
) -> None:
    prefix = "/".join([host, *parts[:kept]])
    rest = "".join(f"/{part}" for part in parts[kept:]) + f":{tag}"
    site = with_mirrors(**{prefix: "mirror.example/x"})
    assert site.mirrored(prefix + rest) == f"mirror.example/x{rest}"
    assert site.mirrored(f"other-{prefix}{rest}") == f"other-{prefix}{rest}"


def test_without_a_file_or_variables_all_is_as_usual(file: Path) -> None:
    found = settings()
    assert found.cache == Path.home() / ".cache/megatron-launchpad"
    assert found.matrix == ROOT / "matrix.yaml"
    assert (found.torch_index, found.git_mirror) == (TORCH_INDEX, GITHUB)
    assert (found.index_url, found.image_mirrors) == ("", {})
    assert found.answer_within == 10


def test_the_file_gives_every_setting_and_variables_win(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "cache: ~/big\nmatrix: mine/matrix.yaml\nruns: /runs\ntorch_index: ''\n"
        "git_mirror: https://git.example\nindex_url: https://pip.example/simple\n"
        "image_mirrors: {nvcr.io: mirror.example/nvcr}\nanswer_within: 30\n"
    )
    found = settings()
    assert found.cache == Path.home() / "big"
    assert found.matrix == file.parent / "mine/matrix.yaml"  # of the file, not where we are
    assert found.runs == Path("/runs")
    assert found.torch_index == ""
    assert found.git_mirror == "https://git.example/"
    assert found.index_url == "https://pip.example/simple"
    assert found.mirrored("nvcr.io/a:1") == "mirror.example/nvcr/a:1"
    assert found.answer_within == 30
    for name, value in {
        "LAUNCHER_CACHE": "/cache",
        "LAUNCHER_MATRIX": "/m.yaml",
        "LAUNCHER_RUNS": "/other",
        "LAUNCHER_EXTRAS": "/extras",
        "LAUNCHER_TORCH_INDEX": "https://torch.example",
        "LAUNCHER_GIT_MIRROR": "git@git.example:",
        "PIP_INDEX_URL": "https://pypi.example",
        "LAUNCHER_IMAGE_MIRRORS": "docker.io=hub.example, quay.io=mirror.example/quay",
        "LAUNCHER_ANSWER_WITHIN": "2.5",
    }.items():
        monkeypatch.setenv(name, value)
    assert settings() == Settings(
        Path("/cache"),
        Path("/m.yaml"),
        "https://torch.example",
        "git@git.example:",
        Path("/other"),
        Path("/extras"),
        "https://pypi.example",
        {"docker.io": "hub.example", "quay.io": "mirror.example/quay"},
        2.5,
    )


def test_another_file_can_be_named_and_must_then_be_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("cache: /one\n")
    monkeypatch.setenv("LAUNCHER_SETTINGS", str(tmp_path / "site.yaml"))
    with pytest.raises(UsageError, match=r"site\.yaml: can't be read: No such file"):
        settings()
    (tmp_path / "site.yaml").write_text("cache: /two\n")
    assert settings().cache == Path("/two")
    monkeypatch.setenv("LAUNCHER_SETTINGS", "/dev/null")
    assert settings().cache == Path.home() / ".cache/megatron-launchpad"


def test_a_change_of_the_file_is_seen(file: Path) -> None:
    file.write_text("# cache: /one\n")
    assert settings().torch_index == TORCH_INDEX
    file.write_text("torch_index: https://torch.example\n")
    os.utime(file, (1, 1))
    assert settings().torch_index == "https://torch.example"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\ncach: /x\n", r"settings\.yaml:2: cach: unknown key\. Did you mean 'cache'\?"),
        ("image_miror:\n  nvcr.io: a.b\n", r":1: image_miror: unknown key\. .*'image_mirrors'"),
        ("cache: 5\n", r"settings\.yaml:1: cache: .*string"),
        ("image_mirrors:\n  nvcr.io: https://a.b/c\n", r":2: image_mirrors\.nvcr\.io: takes a reg"),
        ("image_mirrors:\n  nvcr.io: cache/nvcr\n", r":2: .*as in docker\.io/cache/nvcr"),
        ("image_mirrors:\n  python: a.b/c\n", r":2: .*as in docker\.io/python"),
        ("image_mirrors: nvcr.io=a.b\n", r":1: image_mirrors: takes keys and their values"),
        *(
            (f"answer_within: {value}\n", r":1: answer_within: ")
            for value in ("0", "-1", ".inf", ".nan", "true", "10s")
        ),
        ("cache: [\n", r"settings\.yaml:\d: not YAML"),
        ("cache: ~nosuchuser\n", "~nosuchuser is no user"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_its_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        settings()


def test_a_password_in_the_file_is_not_told(file: Path) -> None:
    file.write_text("index_url: [https://me:hunter2@pip.example]\ngit_mirror: 2\n")
    with pytest.raises(UsageError, match="index_url") as caught:
        settings()
    assert "hunter2" not in str(caught.value)


MIRRORED = ("nvcr.io", "nvcr.io=", "=a.b", "nvcr.io=cache/x", "a b=c.d")
SECONDS = ("0", "-1", "10s", "nan", "inf", "1e9", " ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("IMAGE_MIRRORS", value, "LAUNCHER_IMAGE_MIRRORS: ") for value in MIRRORED),
        *(("ANSWER_WITHIN", n, "LAUNCHER_ANSWER_WITHIN: .* seconds above 0") for n in SECONDS),
        ("RUNS", "~nosuchuser/runs", "~nosuchuser/runs: ~nosuchuser is no user"),  # RuntimeError
    ],
)
def test_a_wrong_variable_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"LAUNCHER_{name}", value)
    with pytest.raises(UsageError, match=said):
        settings()


def test_yaml_is_not_imported_where_there_is_no_file(file: Path) -> None:
    program = (
        "import sys; from launcher.base.settings import settings; settings();"
        "sys.exit(any(name in sys.modules for name in ('yaml', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
    file.write_text("cache: /x\n")
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 1


@table("key", "variable", "value")
def test_an_address_that_would_be_an_option_or_a_command_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, key: str, variable: str, value: str
) -> None:
    """Git and pip are given it as a word; what may be a password isn't told."""
    file.write_text(f'runs: /r\n{key}: "{value}"\n')
    with pytest.raises(UsageError, match=rf"settings\.yaml:2: {key}: doesn't look like") as caught:
        settings()
    assert "hunter2" not in str(caught.value)
    file.write_text("runs: /r\n")
    os.utime(file, (2, 2))
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"{variable}: doesn't look like") as caught:
        settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("variable", ["LAUNCHER_CACHE", "LAUNCHER_RUNS", "LAUNCHER_SETTINGS"])
@pytest.mark.parametrize("above", [False, True])
def test_what_another_user_could_change_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, above: bool
) -> None:
    """root ran an engine that another user had put into a shared cache."""
    path = tmp_path / "shared/mine"
    path.parent.mkdir()
    path.write_text("") if variable == "LAUNCHER_SETTINGS" else path.mkdir()
    monkeypatch.setenv(variable, str(path))
    settings()
    theirs = path.parent if above else path
    os.chown(theirs, 4711, 4711)
    with pytest.raises(files.ForeignFileError, match="belongs to user id 4711") as caught:
        settings()
    assert caught.value.filename == str(theirs)
    monkeypatch.setenv("LAUNCHER_TRUSTED", str(theirs))
    settings()
