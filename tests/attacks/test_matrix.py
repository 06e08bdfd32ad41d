"""300 mutated matrices and locks: each loads, or an error tells what is wrong, and soon."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.schema import Lock, Matrix
from tests.attacks.conftest import bounded
from tests.conftest import ROOT

FILES = 300
NAMES = (
    *("--upload-pack=touch x;", "ext::sh -c x", "ssh://-oProxyCommand=x/y", "-v/:/host", "-u"),
    *("../../etc/passwd", "a/../b", "/etc", ".", "a b", "a\\nb", "https://-x/y", "file:///etc"),
    *("git@host:-x", "a@sha256:0", "24.10", "core.lock", "x" * 20_000, "a-" * 10_000, "", "é"),
)
NAMING = r"url:|base:|patches:|cp3\d+: |3rdparty|- .*(/|==)|(build|runtime|packages): \["
"""Lines that name what goes on to git, pip, the engine or the file system."""
VALUES = (
    *(f'"{name}"' for name in NAMES),
    *("", "~", "true", "{}", "[]", "[[]]", "{a: {b: c}}", "0", "-1", "24.10", "1e400", ".nan"),
    *("2024-01-01", "2024-13-45", "9" * 400, '"\\0"', '"\\ud800"', "!!binary x", "*nowhere"),
    *("!!python/object/apply:os.system [id]", "&a [*a]", "|", "<<: x", "- x", "? [a]: b"),
    *("[" * 300, "{a: " * 300, "'", '">=2,<1"', '"numpy; os_name"', '"a @ file:///etc"', "[-e, .]"),
)


def mutated(chance: random.Random, original: str) -> str:
    """The file with one or two changes."""
    lines = original.splitlines()
    for _ in range(chance.randint(1, 2)):
        named = [at for at, line in enumerate(lines) if re.search(NAMING, line)]
        at = chance.choice([*(named or [0]), chance.randrange(len(lines))])
        key, colon, _ = lines[at].partition(": ")
        match chance.randrange(10):
            case 0:  # another value
                lines[at] = f"{key}: {chance.choice(VALUES)}" if colon else lines[at] + "x"
            case 1 | 2 | 3 | 4 | 5:  # where several stand on a line as well, or in a list
                values = [*re.finditer(r"(?<=[:,-] )[^,\]}{\[]+|(?<=\[)[^,\]]+", lines[at])] or [
                    None
                ]
                if value := chance.choice(values):
                    item = chance.choice(VALUES)
                    lines[at] = lines[at][: value.start()] + item + lines[at][value.end() :]
            case 6:  # another key
                indent = " " * (len(key) - len(key.lstrip()))
                lines[at] = f'{indent}"{chance.choice(NAMES)}": {lines[at].partition(": ")[2]}'
            case 7:
                lines.insert(at, lines[at])
            case 8:
                del lines[at]
            case _:
                lines[at] = " " * chance.randint(0, 6) + lines[at].lstrip()
    text = "\n".join(lines) + chance.choice(["\n", "", "\n...\n", "\n---\na: b\n", "\0", "\ufeff"])
    return text if chance.randrange(20) else text[: chance.randrange(len(text))]


def refused(path: Path) -> bool:
    """Whether the file is refused; of one that isn't, nothing is an option or leads elsewhere."""
    try:
        found = load_matrix(path) if path.name == "matrix.yaml" else load_lock(path)
    except LauncherError as error:
        assert str(path) in error.problem
        return True
    for word in words(found):
        assert not word.startswith("-")
        assert ".." not in word.split("/")
        assert not re.match(r"\w+::", word)
    return False


def words(found: Matrix | Lock) -> list[str]:
    """What goes on to git, pip, the engine and the file system."""
    if isinstance(found, Lock):
        needs = [pin for one in found.needs.values() for pin in (*one.build, *one.runtime)]
        pins = [pin for several in found.packages.values() for pin in several]
        return [*needs, *pins, *found.packages, *found.images, *found.releases, *found.extensions]
    platforms = [one for image in found.images for one in found.platforms(image)]
    patches = [release.patches for release in found.releases.values()]
    needs = [*found.needs.build, *found.needs.runtime, *found.needs.extensions]
    packages = [package for row in found.rows.values() for package in row.packages]
    folders = [folder for one in found.extensions.values() for folder in one.submodules]
    lists = (platforms, patches, needs, packages, folders, found.moving, found.repositories)
    return [*found.rows, *found.releases, *found.images, *(one for each in lists for one in each)]


@pytest.mark.parametrize(("name", "files"), [("matrix.yaml", 2 * FILES // 3), ("matrix.lock", 100)])
def test_mutated_files(tmp_path: Path, name: str, files: int) -> None:
    """No other error than one of ours, none slow or large, and nothing but the file written."""
    chance, path, taken = random.Random(13), tmp_path / name, 0  # noqa: S311 - the same every time
    original = (ROOT / name).read_text("utf-8")
    for number in range(files):
        content = mutated(chance, original)
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        try:
            with bounded():
                taken += not refused(path)
        except BaseException as error:
            (tmp_path / f"{number}").write_text(content, "utf-8", "surrogatepass")
            raise AssertionError(f"file {number}, kept in {tmp_path}: {error!r}") from error
    assert [one.name for one in tmp_path.iterdir()] == [name]
    assert 0 < taken < files / 2  # some are taken still, and not most
