"""Megatron's source: a git commit, a source distribution, or a checkout on this machine."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote, urlsplit

from packaging.version import InvalidVersion, Version

from launcher.agent import checkout
from launcher.base import files, owned
from launcher.base.errors import BuildError, UsageError
from launcher.base.settings import Settings
from launcher.images.matrix.locked import LockedGit, LockedRelease
from launcher.images.matrix.recipe import Recipe
from launcher.images.matrix.schema import GitSource, Matrix, MegatronRelease
from launcher.images.sources import fetch, index

DAMAGED = "The repository is damaged: remove it to have it fetched again."
AS_COMMITTED = [
    *("-c", "core.autocrlf=false", "-c", "core.eol=lf"),
    *("-c", f"core.attributesFile={os.devnull}"),
]
"""Options that keep a user's settings from changing the lines of files."""
WITHOUT_CLEANING = ["-c", "gc.auto=0", "-c", "maintenance.auto=false"]
"""Options that keep git from removing commits: no branch or tag leads to those of the cache."""
LEFT_OUT = {".git", "__pycache__", "build", "dist", ".venv"}


@dataclass(frozen=True)
class MegatronSource:
    """One Megatron source tree, named so exactly that the name can stand for its content.

    release: of the matrix; of a checkout, its own version; identity: git's tree hash, the sdist's
    sha256, or a hash over a checkout's files; whole: it has megatron.training, pretrain_gpt.py,
    examples/ and tools/; epoch: seconds since 1970, the time given to everything made from it; at:
    the git directory, the archive or the checkout; rules: the release of the matrix that a checkout
    is treated as, where that is another
    """

    kind: Literal["git", "sdist", "path"]
    release: str
    identity: str
    revision: str
    whole: bool
    epoch: int
    at: Path
    rules: str = ""

    def unpack(self, folder: Path) -> None:
        """Write the tree to `folder`, which must not exist.

        Raises BuildError where what is written isn't what `identity` names.
        """
        folder.mkdir(parents=True)
        if self.kind == "git":
            archive(self.at, self.revision, folder)
            check_tree(self.at, self.revision, self.identity, tree_hash(folder))
        elif self.kind == "sdist":
            fetch.check_sha256(self.at, self.identity)
            with self.at.open("rb") as sdist:  # without the one folder that holds it all
                unpack(sdist, folder, "-z", "--strip-components=1")
        else:
            copies = [folder / path.relative_to(self.at) for path in checkout_files(self.at)]
            for copy in copies:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.at / copy.relative_to(folder), copy, follow_symlinks=False)
            if _digest(folder, copies) != self.identity:
                at = f"{self.at}: was edited while it was built from"
                raise BuildError(at, "Build it again.")


def locked(recipe: Recipe, site: Settings) -> MegatronSource:
    """The source that a recipe has. Raises as `from_git` does."""
    if recipe.kind == "sdist":
        return from_sdist(recipe.release, recipe.locked, site)
    return from_git(recipe.release, recipe.named, recipe.locked, site)


def from_git(
    version: str, release: MegatronRelease, locked: LockedRelease, site: Settings
) -> MegatronSource:
    """The release's locked commit, fetched into the cache where it isn't there.

    Raises BuildError for a commit that can't be fetched, a tag or branch that was moved since, a
    tree that isn't the locked one.
    """
    pinned, named = locked.git, release.git
    if pinned is None or not pinned.is_of(named):
        raise UsageError(f"{version}: matrix.lock holds another commit", "Run `make lock`.")
    return _checked(version, locked, locked_repository(version, named, pinned, site))


def _checked(version: str, locked: LockedRelease, repository: Path) -> MegatronSource:
    """The locked commit of a repository that has it, whose tree must be the locked one."""
    found = by_lock("git", version, locked, repository)
    tree = git(repository, "rev-parse", "--verify", f"{found.revision}^{{tree}}").strip()
    check_tree(repository, found.revision, found.identity, tree)
    return found


def locked_repository(name: str, named: GitSource, pinned: LockedGit, site: Settings) -> Path:
    """The cached repository with the locked commit of `name`, a release or an extension.

    Raises BuildError for a commit that can't be fetched, a tag or branch that was moved since.
    """
    locked = pinned.commit
    if named.ref and not _has_commit(folder_of(named.url, site), locked):
        now = commit_of(named.url, named.ref, site)
        if now != locked:
            raise BuildError(
                f"{named.url}: {named.ref} was moved since it was locked\n"
                f"  locked: {locked}\n  now:    {now}",
                f"`make lock UPGRADE={name}` takes the new one. To stay with the locked one, write "
                f"`commit: {locked}` in matrix.yaml in place of `ref: {named.ref}`, then "
                "`make lock`.",
            )
    return repository(named.url, pinned.commit, site)


def repository(url: str, commit: str, site: Settings, at: str | None = None) -> Path:
    """The cached bare repository of `url`, with `commit` fetched where it wasn't there.

    `at` is where it is fetched from, where that is neither `url` nor its mirror.
    """
    folder = folder_of(url, site)
    if not _has_commit(folder, commit):
        _fetch_commit(at or fetch.mirrored(url, site), commit, folder)
    return folder


def commit_of(url: str, ref: str, site: Settings) -> str:
    """The commit that a tag, or else a branch, of `url` names just now. Raises BuildError."""
    names = (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}")
    found = refs(url, site, *names)
    commit = next((found[name] for name in names if name in found), None)
    if commit is None:
        raise BuildError(f"{remote(fetch.mirrored(url, site))[0]}: has no tag and no branch {ref}")
    return commit


def refs(url: str, site: Settings, *patterns: str) -> dict[str, str]:
    """What the tags and branches of `url` that match name just now. Raises BuildError."""
    at, env = remote(fetch.mirrored(url, site))
    done = run_git("ls-remote", "--quiet", "--", at, *patterns, env=env)
    if done.returncode:
        raise BuildError(f"git can't ask {at} for {patterns[-1]}:\n  {done.stderr.strip()}")
    return {name: commit for commit, name in map(str.split, done.stdout.splitlines())}


def folder_of(url: str, site: Settings) -> Path:
    """Where the cache keeps what was fetched from `url`."""
    return site.cache / "git" / re.sub(r"\W+", "-", url)


def from_sdist(version: str, locked: LockedRelease, site: Settings) -> MegatronSource:
    """The release's locked source distribution."""
    if locked.sdist is None:
        raise UsageError(f"{version}: matrix.lock holds no sdist", "Run `make lock`, or use git.")
    pin = f"megatron-core=={version} --hash=sha256:{locked.sdist.sha256}"
    return by_lock("sdist", version, locked, index.sdist(pin, site))


def by_lock(kind: str, version: str, locked: LockedRelease, at: Path) -> MegatronSource:
    """What the lock says of a release's sdist or commit, which lies `at` a path."""
    if kind == "sdist" and locked.sdist:
        sdist, name = locked.sdist, f"megatron-core {version}"
        return MegatronSource("sdist", version, sdist.sha256, name, False, sdist.epoch, at)
    if locked.git is None:
        raise UsageError(f"{version}: matrix.lock holds no commit", "Run `make lock`.")
    git = locked.git
    return MegatronSource("git", version, git.tree, git.commit, True, git.epoch, at)


def from_path(path: Path, version: str, locked: LockedRelease) -> MegatronSource:
    """A checkout as it stands, edits and all; of a bare repository, the release's locked commit.

    version: the release of the matrix that it is treated as. Raises UsageError where `path` isn't
    Megatron or lacks the commit.
    """
    if is_bare(path):
        if locked.git is None or not _has_commit(path, locked.git.commit):
            raise UsageError(f"{path}: a bare repository without the commit of {version}")
        return _checked(version, locked, path)
    like = locked.git or locked.sdist
    assert like is not None
    own = own_version(path)
    return MegatronSource(
        kind="path",
        release=own,
        identity=_digest(path, checkout_files(path)),
        revision=revision(path),
        whole=(path / "megatron/training").is_dir(),
        epoch=like.epoch,
        at=path,
        rules=version if version != own else "",
    )


def release_of(path: Path, matrix: Matrix, wanted: str | None, default: str) -> str:
    """The matrix's release that a checkout is treated as: the one wanted, else by its own version.

    wanted: a release of the matrix, or what the checkout says of itself. Raises UsageError where
    `path` isn't Megatron, or of a minor version that isn't in the matrix or isn't the one wanted.
    """
    if is_bare(path):
        return wanted or default
    own = own_version(path)
    fitting = [v for v in matrix.releases if v.rpartition(".")[0] == ".".join(own.split(".")[:2])]
    if wanted is None and not fitting:
        known = ", ".join(matrix.releases)
        raise UsageError(
            f"{path}: is Megatron {own}, which the matrix doesn't have",
            f"Name the release to treat it as with MEGATRON=…: {known}",
        )
    if fitting and wanted not in (None, own, *fitting):
        raise UsageError(
            f"{path}: is Megatron {own}, and {wanted} was asked for",
            f"Leave MEGATRON out, or check out core_v{wanted} there.",
        )
    if wanted in matrix.releases or not fitting:
        assert wanted is not None
        return wanted
    return own if own in fitting else fitting[-1]


def is_bare(path: Path) -> bool:
    """True where `path` is a git repository without a work tree."""
    return (path / "HEAD").is_file() and (path / "objects").is_dir()


def checkout_files(path: Path) -> list[Path]:
    """The files of a checkout: what git doesn't ignore, or all, less build output."""
    if (path / ".git").exists():
        listed = git(path, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        found = [path / name for name in listed.split("\0") if name]
    else:
        found = [file for file in path.rglob("*") if not file.is_dir()]
    kept = (f for f in found if not LEFT_OUT & set(f.relative_to(path).parts))
    return sorted(f for f in kept if f.is_symlink() or f.is_file())


def own_version(path: Path) -> str:
    """The version in the checkout's package_info.py. Raises UsageError where there is none."""
    info = path / "megatron/core/package_info.py"
    if not info.is_file():
        raise UsageError(
            f"{path}: isn't a Megatron-LM source: no megatron/core/package_info.py",
            "SOURCE is the folder that has megatron/ and setup.py in it.",
        )
    said = checkout.release(path)
    try:
        return str(Version(said))  # as its wheel has it
    except InvalidVersion:
        raise UsageError(f"{info}: {said!r} is no version", "As in 0.13.0 or 0.13.0rc2.") from None


def _digest(folder: Path, files: Iterable[Path]) -> str:
    """A hash over names, executable bits and contents of a checkout's files, all in `folder`."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(folder).as_posix()
        content = file.readlink().as_posix().encode() if file.is_symlink() else file.read_bytes()
        executable = not file.is_symlink() and bool(file.stat().st_mode & 0o100)
        digest.update(f"{name}\0{executable}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def revision(path: Path) -> str:
    """The checkout's commit, with `+edited` where files differ from it."""
    if not (path / ".git").exists():
        return "unversioned"
    commit = git(path, "rev-parse", "HEAD").strip()
    return commit + ("+edited" if git(path, "status", "--porcelain") else "")


def check_tree(repository: Path, commit: str, locked: str, there: str) -> None:
    """Raises BuildError where a commit's tree isn't the locked one."""
    if there != locked:
        raise BuildError(
            f"{repository}: commit {commit} has another tree than the locked one\n"
            f"  locked: {locked}\n  there:  {there}",
            DAMAGED,
        )


def tree_hash(folder: Path, links: Mapping[Path, str] | None = None) -> str:
    """The hash that git gives a folder's tree, from its files: git itself reads objects unhashed.

    The format is git's: `tree SIZE\\0`, then of each entry `MODE NAME\\0` and 20 bytes of hash, in
    the order of the names, a folder's with a slash. A folder without files has no entry, but for
    a submodule: `links` has the commit of each, by its folder.
    """
    links = links or {}

    def entry(path: Path) -> tuple[bytes, bytes]:
        name, mode = os.fsencode(path.name), b"100644"
        if path in links:
            mode, hashed = b"160000", bytes.fromhex(links[path])
        elif path.is_symlink():
            mode, hashed = b"120000", _git_object(b"blob", os.fsencode(path.readlink()))
        elif path.is_dir():
            mode, hashed = b"40000", bytes.fromhex(tree_hash(path, links))
        else:
            mode = b"100755" if path.stat().st_mode & 0o100 else mode
            hashed = _git_object(b"blob", path.read_bytes())
        order = name + b"/" if mode == b"40000" else name
        return order, mode + b" " + name + b"\0" + hashed

    def is_in(path: Path) -> bool:
        if path in links or path.is_symlink() or not path.is_dir():
            return True
        return any(map(is_in, path.iterdir()))

    entries = sorted(entry(path) for path in folder.iterdir() if is_in(path))
    return _git_object(b"tree", b"".join(content for _, content in entries)).hex()


def _git_object(kind: bytes, content: bytes) -> bytes:
    header = kind + b" " + str(len(content)).encode() + b"\0"
    return hashlib.sha1(header + content, usedforsecurity=False).digest()


def _has_commit(repository: Path, commit: str) -> bool:
    """Whether a commit is there with all its files: a fetch that was killed may leave a part."""
    if not repository.is_dir():
        return False
    options = ["--objects", "--no-walk", "--quiet", "--end-of-options"]
    return not run_git("rev-list", *options, commit, at=repository).returncode


def _fetch_commit(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit, without history, into a bare repository, while no other launcher does."""
    repository.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        owned.make_folder(repository)
    command = [*WITHOUT_CLEANING, "fetch", "--quiet", "--depth=1"]
    at, env = remote(url)
    with files.folder_lock(repository):
        for left in repository.glob("*.lock"):  # of a fetch that was killed
            owned.remove_file(left, repository)
        git(repository, "init", "--bare", "--quiet")
        done = run_git(*command, "--", at, commit, at=repository, env=env)
    if done.returncode:
        raise BuildError(
            f"git can't fetch {commit} from {at}:\n  {done.stderr.strip()}",
            "Without access to it, name a mirror in LAUNCHER_GIT_MIRROR; "
            "in place of Megatron-LM itself, SOURCE=path takes a clone from elsewhere.",
        )


def archive(repository: Path, commit: str, folder: Path) -> None:
    """Write the tree of a commit to `folder`."""
    command = ["git", "-C", str(repository), *AS_COMMITTED, "archive", "--format=tar", "--", commit]
    with tempfile.TemporaryFile() as tar:
        done = subprocess.run(
            command, env=git_environment(), stdout=tar, stderr=subprocess.PIPE, check=False
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BuildError(
                f"{repository}: git archive {commit} failed:\n  {said}",
                fetch.remedy_if_full(said) or DAMAGED,
            )
        tar.seek(0)
        unpack(tar, folder)


def unpack(archive: IO[bytes], folder: Path, *options: str) -> None:
    """Have tar write an archive to `folder`. Raises BuildError with what tar says."""
    command = ["tar", "-x", *options, "-f", "-", "-C", str(folder)]
    done = subprocess.run(command, stdin=archive, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        reason = next((line for line in said if fetch.remedy_if_full(line)), said[0])
        raise BuildError(
            f"{folder}: tar can't unpack the source there: {reason}", fetch.remedy_if_full(reason)
        )


def git(repository: Path, *args: str) -> str:
    """What a git command in `repository` prints. Raises BuildError where it fails."""
    done = run_git(*args, at=repository)
    if done.returncode:
        raise BuildError(f"{repository}: git {args[0]} failed: {done.stderr.strip()}")
    return done.stdout


def run_git(
    *args: str, at: Path = Path(), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder; env: as `remote` has it, else `git_environment`."""
    command = ["git", "-C", str(at), *args]
    env = env or git_environment()
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def remote(url: str) -> tuple[str, dict[str, str]]:
    """An address less its name and password, and the environment in which git has them.

    On a command line all users of the machine would see them, as git starts another program with
    the address. It asks nobody for a password.
    """
    env = git_environment() | {"GIT_TERMINAL_PROMPT": "0"}
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at or parts.scheme not in ("http", "https"):
        return url, env
    origin = f"{parts.scheme}://{host}"
    name, colon, password = map(unquote, login.partition(":"))
    key, value = f"credential.{origin}.username", name
    if colon:
        basic = base64.b64encode(f"{name}:{password}".encode()).decode()
        key, value = f"http.{origin}/.extraHeader", f"Authorization: Basic {basic}"
    given = env.get("GIT_CONFIG_COUNT", "")
    number = int(given) if given.isdecimal() else 0
    env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    env["GIT_CONFIG_COUNT"] = str(number + 1)
    return parts._replace(netloc=host).geturl(), env


def git_environment() -> dict[str, str]:
    """This environment less what names another repository, as git sets it for its hooks.

    A repository that git makes in it has hashes of the kind that the lock has.
    """
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
    env = {name: value for name, value in os.environ.items() if name not in named}
    return env | {"GIT_DEFAULT_HASH": "sha1"}
