"""300 mutated settings, of the file and of variables: taken, or an error tells, and soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.files import Refused
from launcher.settings import Settings, settings
from tests.attacks.conftest import bounded

SETTINGS = 300
ORIGINAL = """\
cache: /big/disk/megatron-launchpad
matrix: mine/matrix.yaml
runs: ~/runs
git_mirror: https://me:hunter2@git.example/mirrors/
index_url: https://me:hunter2@pip.example/simple
torch_index: ""
answer_within: 10
image_mirrors:
  nvcr.io: mirror.example/nvcr
  docker.io: mirror.example:5000/hub
"""
VARIABLES = (
    *("LAUNCHER_CACHE", "LAUNCHER_MATRIX", "LAUNCHER_RUNS", "LAUNCHER_TORCH_INDEX"),
    *("LAUNCHER_GIT_MIRROR", "PIP_INDEX_URL", "LAUNCHER_IMAGE_MIRRORS", "LAUNCHER_ANSWER_WITHIN"),
    *("XDG_CACHE_HOME", "XDG_STATE_HOME"),
)
TEXTS = (
    *("", " ", "-", "--upload-pack=touch x;", "ext::sh -c x ", "ssh://-oProxyCommand=x/", "a b"),
    *("~nosuchuser/x", "~", "/", "..", "../../etc", "/proc/self/mem", "x" * 20_000, "a." * 10_000),
    *("https://me:hunter2@host", "hunter2@host", "https://a\nb", "git@host:", "https://[::1", "é"),
    *("nvcr.io=a.b/c", "nvcr.io", "=a.b", "a=b=c", "a.b=-c", ",,,", "[::1]:1=a.b", "nvcr.io=A.b/C"),
    *(
        "0",
        "-1",
        "nan",
        "inf",
        "1e400",
        "1e-400",
        "0x10",
        "1_0",
        "ten",
        "3600.1",
        "\u202e",
        "\x1b[2J",
    ),
)
VALUES = (
    *("~", "true", "{}", "[]", "[[hunter2]]", "{a: {b: c}}", "0", "-1", "1e400", ".nan", ".inf"),
    *("2024-01-01", "9" * 400, '"\\0"', '"a\\0b"', '"\\ud800"', '"\\e[2J"', "!!binary x", "0100"),
    *("!!python/object/apply:os.system [id]", "*nowhere", "&a [*a]", "|", "? [a]: b", "1:30"),
    *("[" * 300, "{a: " * 300, "'", "{nvcr.io: 5}", "{-x: a.b}", "{nvcr.io: a.b, nvcr.io: c.d}"),
)


def quoted(text: str) -> str:
    """`text` as YAML."""
    return '"' + "".join(f"\\U{ord(one):08x}" for one in text) + '"'


WRITTEN = [*VALUES, *map(quoted, TEXTS)]


def mutated(chance: random.Random) -> str:
    """The file with one or two changes."""
    lines = ORIGINAL.splitlines()
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(lines))
        value = chance.choice(WRITTEN)
        match chance.randrange(6):
            case 0 | 1 | 2:
                lines[at] = f"{lines[at].partition(':')[0]}: {value}"
            case 3:
                lines[at] = f"{chance.choice(WRITTEN)}: x"
            case 4:
                lines.insert(at, lines[at])
            case _:
                del lines[at]
    return "\n".join(lines) + chance.choice(["\n", "", "\n---\na: b\n", "\0", "\ufeff", "\n\t"])


def check(found: Settings) -> None:
    """What is handed on is no option, no command, and names folders in full."""
    for address in (found.git_mirror, found.index_url, found.torch_index):
        assert not address.startswith("-")
        assert "::" not in address.partition("/")[0]
        assert address.isprintable()
    assert all(path.is_absolute() for path in (found.cache, found.matrix, found.runs))
    assert 0 < found.answer_within <= 3600
    for image in ("python:3.11", "nvcr.io/nvidia/pytorch:24.10-py3", "localhost:5000/a"):
        assert not found.mirrored(image).startswith("-")


def test_mutated_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other error than one of ours, no password in any, and nothing but the file written."""
    chance, path, taken = random.Random(13), tmp_path / "settings.yaml", 0  # noqa: S311
    monkeypatch.setenv("LAUNCHER_SETTINGS", str(path))
    for number in range(SETTINGS):
        content = mutated(chance) if chance.randrange(3) else ORIGINAL
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        with monkeypatch.context() as environment:
            given = {name: chance.choice(TEXTS) for name in VARIABLES if not chance.randrange(12)}
            for name, text in given.items():
                environment.setenv(name, text)
            try:
                with bounded():
                    check(settings())
                    taken += 1
            except (LauncherError, Refused) as error:
                assert "hunter2" not in str(error), (number, given, content)
            except BaseException as error:
                raise AssertionError(f"{number}: {error!r}\n{given}\n{content}") from error
    assert [one.name for one in tmp_path.iterdir()] == ["settings.yaml"]
    assert SETTINGS / 20 < taken < SETTINGS / 2  # some are taken still, and not most
