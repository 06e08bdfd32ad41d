"""Checkpoints and models from elsewhere: none hangs, fills the memory or hands out a secret."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.checkpoints import completeness, folders
from launcher.base import files
from launcher.base.errors import UsageError
from launcher.tools.weights import convert, reader, safetensors
from tests.tools.weights.models import made

from .conftest import TENS, bounded, memory_of, put
from .test_corpora import SPOILS

MOST_MEMORY = 512 << 20


def look(root: Path) -> None:
    """Judge a folder of checkpoints and open its newest, as commands do."""
    for judge in (
        lambda: [*folders.newest_first(root)][::-1],
        lambda: reader.opened(reader.find(root)),
    ):
        with suppress(UsageError, OSError):
            judge()


class Runs:
    """Would run a command where a pickle is really unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['PWNED']}",)


def torch_file(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)


def laughs() -> Any:
    """A list that holds one list twice, 40 times over: 2^40 values."""
    found: list[Any] = ["x"]
    for _ in range(40):
        found = [found, found]
    return found


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Makes something else of a file of the newest checkpoint, or of the tracker beside it."""

    def change(folder: Path) -> None:
        path = folder.parent / name if name == folders.TRACKER else folder / name
        path.unlink(missing_ok=True)
        make(path)

    return change


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 28))


def keys_in_keys() -> bytes:
    """A key of pairs of one pair, 60 deep: its hash asks for 2^60 values."""
    pairs = b"".join(b"h%ch%c\x86q%c0" % (at, at, at + 1) for at in range(60))
    return b"\x80\x02}K\x01q\x000" + pairs + b"h<K\x01s."


def collisions() -> bytes:
    """Keys that are all multiples of what an integer's hash is taken by."""
    keys = ((2**61 - 1) * at for at in range(1, 60_000))
    return (
        b"\x80\x02}("
        + b"".join(b"\x8a\x0a%bK\x01" % key.to_bytes(10, "little") for key in keys)
        + b"u."
    )


def sparse(path: Path) -> None:
    """A file that seems to be large, so that much memory is its due."""
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")
    os.truncate(path, 20 << 30)


HOSTILE = {
    "keys in keys": replaced(completeness.INDEX, lambda path: path.write_bytes(keys_in_keys())),
    "keys in an archive": replaced(
        completeness.COMMON, lambda path: torch_file(path, keys_in_keys())
    ),
    "collisions": replaced(completeness.INDEX, lambda path: path.write_bytes(collisions())),
    "sparse": replaced(completeness.INDEX, sparse),
    "memo": replaced(
        completeness.INDEX, lambda path: path.write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")
    ),
    "command": replaced(completeness.INDEX, lambda path: path.write_bytes(pickle.dumps(Runs()))),
    "laughs": replaced(
        completeness.COMMON, lambda path: torch_file(path, pickle.dumps({"args": laughs()}))
    ),
    "deep": replaced(
        completeness.COMMON,
        lambda path: torch_file(path, b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    ),
    "bomb": replaced(completeness.COMMON, zip_bomb),
    "deep JSON": replaced(completeness.DESCRIPTION, lambda path: path.write_text("[" * 200_000)),
    "tracker": replaced(folders.TRACKER, lambda path: path.write_text("9" * 10_000)),
    "other digits": replaced(folders.TRACKER, lambda path: path.write_text("²")),
    **{
        f"{kind} {name}": replaced(name, partial(put, kind=kind))
        for name in (
            completeness.INDEX,
            completeness.COMMON,
            completeness.DESCRIPTION,
            folders.TRACKER,
        )
        for kind in ("pipe", "endless")
    },
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints with one of iteration 40, which tests change copies of."""
    folder = tmp_path_factory.mktemp("whole")
    convert.import_(made(folder / "theirs", "llama"), folder / "ours")
    (folder / "ours/release").rename(folder / "ours/iter_0000040")
    (folder / "ours" / folders.TRACKER).write_text("40")
    return folder / "ours"


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint of iteration 40."""
    return shutil.copytree(whole, tmp_path / "ours") / "iter_0000040"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_is_judged_at_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It hung, took gigabytes, or ended with a traceback, also before a run started."""
    monkeypatch.setenv("PWNED", str(saved / "pwned"))
    HOSTILE[kind](saved)
    assert memory_of(lambda: look(saved.parent)) < MOST_MEMORY
    assert not (saved / "pwned").exists()


def spoiled(path: Path, chance: random.Random) -> None:
    """Damage a file, or the pickle in an archive, which then has its checksum anew."""
    spoil = chance.choice(SPOILS)
    if not zipfile.is_zipfile(path) or chance.random() < 0.2:
        path.write_bytes(spoil(path.read_bytes(), chance))
        return
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    [name] = [name for name in entries if name.endswith("/data.pkl")]
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in entries.items():
            archive.writestr(each, spoil(content, chance) if each == name else content)


@pytest.mark.parametrize(
    "name", [completeness.INDEX, completeness.COMMON, completeness.DESCRIPTION, "tracker"]
)
@pytest.mark.parametrize("ten", TENS)
def test_a_damaged_checkpoint_is_judged_or_read(saved: Path, name: str, ten: int) -> None:
    path = saved.parent / folders.TRACKER if name == "tracker" else saved / name
    whole = path.read_bytes()
    for number in range(10 * ten, 10 * ten + 10):
        path.write_bytes(whole)
        spoiled(path, random.Random(f"{name} {number}"))  # noqa: S311
        with bounded(), suppress(UsageError, OSError):
            reader.opened(reader.find(saved.parent))


FILES = ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("ten", TENS)
def test_a_damaged_model_is_refused_or_imported(tmp_path: Path, name: str, ten: int) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    if not (theirs / name).exists():
        (theirs / name).write_text('{"eos_token_id": [1, 2], "added_tokens": [{"content": "a"}]}')
    whole = (theirs / name).read_bytes()
    for number in range(10 * ten, 10 * ten + 10):
        chance = random.Random(f"{name} {number}")  # noqa: S311
        header = whole[:2000] if name == FILES[0] else whole
        spoil = chance.choice(SPOILS)
        (theirs / name).write_bytes(spoil(header, chance) + whole[len(header) :])
        with bounded(), suppress(UsageError, OSError):
            convert.import_(theirs, tmp_path / f"ours-{number}")
        shutil.rmtree(tmp_path / f"ours-{number}", ignore_errors=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that only its owner may read."""
    path = tmp_path / "secret"
    path.write_text("canary")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "generation_config.json"])
@pytest.mark.parametrize("way", ["out", "up", "through a folder"])
def test_a_link_in_a_foreign_folder_hands_out_no_file(
    tmp_path: Path, secret: Path, name: str, way: str
) -> None:
    """A secret of root's was copied to where everybody could read it."""
    theirs = made(tmp_path / "theirs", "llama")
    if way == "through a folder":
        (theirs / "more").symlink_to(tmp_path)
    target = {"out": secret, "up": Path("../secret"), "through a folder": Path("more/secret")}[way]
    (theirs / name).symlink_to(target)
    with pytest.raises(files.ForeignFileError, match="leads out of"):
        convert.import_(theirs, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    (theirs / name).unlink()
    convert.import_(theirs, tmp_path / "ours")
    (tmp_path / "ours/tokenizer").mkdir()
    (tmp_path / "ours/tokenizer" / name).symlink_to(secret)
    with pytest.raises(files.ForeignFileError, match="leads out of"):
        convert.export(reader.opened(reader.find(tmp_path / "ours")), tmp_path / "back")


def test_a_link_within_a_folder_or_to_the_blobs_of_a_cache_is_followed(tmp_path: Path) -> None:
    """Hugging Face's cache is links alone. A copy may be read by whom its source may be read."""
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    theirs = made(cache / "snapshots/0123", "llama")
    (cache / "blobs").mkdir()
    for number, path in enumerate([*theirs.iterdir()]):
        path.rename(cache / f"blobs/{number}")
        path.symlink_to(f"../../blobs/{number}")
    (cache / "blobs/tokenizer").write_text("{}")
    (cache / "blobs/tokenizer").chmod(0o640)
    (theirs / "tokenizer.json").symlink_to("../../blobs/tokenizer")
    (theirs / "vocab.json").symlink_to("tokenizer.json")
    convert.import_(theirs, tmp_path / "ours")
    for name in ("tokenizer.json", "vocab.json"):
        copy = tmp_path / "ours/tokenizer" / name
        assert (copy.read_text(), copy.stat().st_mode & 0o777) == ("{}", 0o640)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", safetensors.INDEX])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_model_of_pipes_and_devices_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    (theirs / name).unlink(missing_ok=True)
    put(theirs / name, kind)
    if name == safetensors.INDEX:  # which isn't looked for where it is no file
        convert.import_(theirs, tmp_path / "ours")
        return
    with pytest.raises((files.ForeignFileError, UsageError)):
        convert.import_(theirs, tmp_path / "ours")


def test_a_copy_takes_the_place_of_what_was_just_written(tmp_path: Path) -> None:
    """An export that had written a generation_config.json ended where the import had kept one."""
    theirs = made(tmp_path / "theirs", "llama")
    (theirs / "generation_config.json").write_text('{"kept": 1}')
    convert.import_(theirs, tmp_path / "ours")
    convert.export(reader.opened(reader.find(tmp_path / "ours")), tmp_path / "back")
    assert (tmp_path / "back/generation_config.json").read_text() == '{"kept": 1}'


def test_a_link_in_place_of_the_tokenizers_folder_leads_nowhere(
    tmp_path: Path, secret: Path
) -> None:
    """Only links to single files were looked at."""
    convert.import_(made(tmp_path / "theirs", "llama"), tmp_path / "ours")
    (tmp_path / "private").mkdir(mode=0o700)
    secret.rename(tmp_path / "private/tokenizer.json")
    (tmp_path / "ours/tokenizer").symlink_to(tmp_path / "private")
    with pytest.raises(files.ForeignFileError, match="leads out of"):
        convert.export(reader.opened(reader.find(tmp_path / "ours")), tmp_path / "back")
    assert not (tmp_path / "back").exists()
