"""A bundle: all inputs of some rows in one folder, checked as a whole before use.

`sha256/HASH/NAME` is a file of the cache, `git/COMMIT.pack` a source's commit, `images/ID` an image
as `image save` writes it. `bundle.json` lists every file, and is written last. The same inputs give
the same bytes.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from launcher.base import files, owned
from launcher.base.errors import BuildError, EngineError, UsageError
from launcher.base.reference import parse_reference
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder.downloads import Commit, RowDownloads
from launcher.images.carry import image_lookup, load, save
from launcher.images.carry.check import Damage, DamagedError, damaged_files, read_list, read_listing
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe
from launcher.images.matrix.schema import AMD64, GitUrl, Package, Release, Tag
from launcher.images.oci import oci_layout
from launcher.images.oci.archive import hex_of
from launcher.images.oci.blocks import is_whole, read_listed
from launcher.images.oci.inspection import name_image
from launcher.images.oci.oci_layout import Digest, Listing, Reference
from launcher.images.sources import extras_lock, fetch, megatron_source

if TYPE_CHECKING:
    from docker import DockerClient

INDEX = "bundle.json"
FOLDERS = ("sha256", "git", "images")
PLACE = (
    r"^(sha256/[0-9a-f]{64}/\w[\w.+!-]*|git/[0-9a-f]{40}\.pack|images/[0-9a-f]{64}/"
    rf"({oci_layout.PLACE}|{oci_layout.LISTING}|{oci_layout.SUMS}))$"
)


class BundleFile(oci_layout.LayoutFile):
    """A file of the bundle."""

    path: Annotated[str, Field(pattern=PLACE)]


class PackedRow(oci_layout.StrictLayout):
    """A row whose inputs are in the bundle; extras: what was asked for beside its own."""

    tag: Tag
    megatron: Release
    platform: str = AMD64
    extras: tuple[Package, ...] = ()


class PackedCommit(oci_layout.StrictLayout):
    """A commit of the repository at `url`, as a pack without history."""

    url: GitUrl
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]

    @property
    def path(self) -> str:
        return f"git/{self.commit}.pack"


class PackedImage(oci_layout.StrictLayout):
    """An image: its ID in the engine that it was saved from, and the names it gets back."""

    id: Digest
    names: tuple[Reference, ...]

    @property
    def path(self) -> str:
        return f"images/{hex_of(self.id)}"


class BundleIndex(oci_layout.FileList):
    """What is in a bundle."""

    format: Literal[3] = 3
    rows: tuple[PackedRow, ...]
    commits: tuple[PackedCommit, ...]
    images: tuple[PackedImage, ...]
    files: tuple[BundleFile, ...]

    @model_validator(mode="after")
    def _lists_agree(self) -> BundleIndex:
        for path, file in self.listed.items():
            if path.startswith("sha256/") and path.split("/")[1] != file.sha256:
                raise ValueError(f"{path} is not named by its sha256")
        for commit in self.commits:
            if commit.path not in self.listed:
                raise ValueError(f"{commit.path} is not among the files")
        return self


def write_bundle(
    folder: Path, fetched: Sequence[RowDownloads], client: DockerClient | None, progress: Progress
) -> tuple[int, str]:
    """Write the bundle of some rows into `folder`; its bytes, and the sha256 of its list.

    What is right in it stays. Raises UsageError for a folder with something else in it, BuildError
    for a file of the cache whose bytes are others than its name says, EngineError for an image that
    isn't given whole.
    """
    save.take_folder(folder, {INDEX, *FOLDERS})
    progress.step(f"pack {folder}")
    with files.folder_lock(folder):
        for each in FOLDERS:
            owned.real_folder(folder / each, folder)
        owned.remove_file(folder / INDEX, folder, missing_ok=True)
        named: dict[str, set[str]] = {}
        for name, id in (item for one in fetched for item in one.images.items()):
            named.setdefault(id, set()).add(name)
        cached = {path for one in fetched for path in one.files}
        commits = {commit.commit: commit for one in fetched for commit in one.commits}
        there = [_put_file(folder, path, progress) for path in cached]
        there += [_put_commit(folder, commit, progress) for commit in commits.values()]
        saved = []
        for id, names in sorted(named.items()):
            assert client is not None  # or there would be no images
            image = replace(image_lookup.find(client, id), names=_with_tag(names))
            packed = PackedImage(id=id, names=tuple(sorted(names)))
            listing = save.save(client, image, folder / packed.path, progress)
            saved.append(packed)
            there += _files_of(packed, listing)
        recipes = [one.recipe for one in fetched]
        rows = {(made.tag, made.release, made.platform, made.extras.asked) for made in recipes}
        index = BundleIndex(
            rows=tuple(
                PackedRow(tag=t, megatron=m, platform=p, extras=e) for t, m, p, e in sorted(rows)
            ),
            commits=tuple(
                PackedCommit(url=one.url, commit=id) for id, one in sorted(commits.items())
            ),
            images=tuple(saved),
            files=tuple(sorted(there, key=lambda file: file.path)),
        )
        text = oci_layout.render(index)
        save.write(folder / INDEX, text)
        _remove_others(folder, index)
    progress.close()
    return index.size, oci_layout.sha256(text)


def _files_of(image: PackedImage, listing: Listing) -> list[BundleFile]:
    """The files of a saved image as the bundle lists them, with its own lists among them."""
    lists = {
        oci_layout.LISTING: oci_layout.render(listing),
        oci_layout.SUMS: oci_layout.sums(listing),
    }
    found = [(name, len(text), hex_of(oci_layout.sha256(text))) for name, text in lists.items()]
    found += [(file.path, file.size, file.sha256) for file in listing.files]
    return [BundleFile(path=f"{image.path}/{path}", size=n, sha256=own) for path, n, own in found]


def _put_file(folder: Path, path: Path, progress: Progress) -> BundleFile:
    """Put a file of the cache, which lies in a folder named by its sha256, into the bundle."""
    digest, size = path.parent.name, path.stat().st_size
    file = BundleFile(path=f"sha256/{digest}/{path.name}", size=size, sha256=digest)
    if not is_whole(folder, file):
        progress.output(path.name)
        fetch.check_sha256(path, digest)
        target = folder / file.path
        owned.real_folder(target.parent, folder)
        with files.named(target), path.open("rb") as content, files.PendingFile(target) as new:
            shutil.copyfileobj(content, new.file)
            new.publish()
    return file


def _put_commit(folder: Path, one: Commit, progress: Progress) -> BundleFile:
    """Add a commit and its tree as a pack, made anew: what a server sent is another each time."""
    progress.output(one.url)
    asked = ("--objects", "--no-object-names", "--no-walk", "--end-of-options", one.commit)
    listed = megatron_source.git(one.repository, "rev-list", *asked)
    command = ["git", "-C", str(one.repository), "pack-objects", "--stdout", "-q", "--threads=1"]
    command += ["--no-reuse-delta", "--no-reuse-object", "--window=0", "--compression=6"]
    env = megatron_source.git_environment()
    done = subprocess.run(command, input=listed.encode(), env=env, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise BuildError(f"{one.repository}: git can't pack {one.commit}:\n  {said}")
    path = PackedCommit(url=one.url, commit=one.commit).path
    save.write(folder / path, done.stdout)
    return BundleFile(
        path=path, size=len(done.stdout), sha256=hex_of(oci_layout.sha256(done.stdout))
    )


def _with_tag(names: Iterable[str]) -> tuple[str, ...]:
    """The names that an engine takes: no digests."""
    parsed = (parse_reference(name) for name in sorted(names) if "@" not in name)
    return tuple(f"{one.name}:{one.target}" for one in parsed)


def _remove_others(folder: Path, index: BundleIndex) -> None:
    """Remove what an earlier bundle in this folder had, and this one hasn't."""
    kept = {image.path for image in index.images}
    for path in (folder / "images").iterdir():
        if path.relative_to(folder).as_posix() not in kept and owned.is_ours(path):
            owned.remove_folder(path, folder)
    for path in [*folder.glob("sha256/*/*"), *folder.glob("git/*")]:
        if path.relative_to(folder).as_posix() not in index.listed:
            owned.remove_file(path, folder)


def check_bundle(folder: Path, progress: Progress) -> BundleIndex:
    """The list of the bundle in `folder`, every file of which is as it was written.

    Raises UsageError for a folder without one, DamagedError, which names all that is damaged.
    """
    index = read_list(folder, INDEX, BundleIndex, FOLDERS, "`launcher fetch --output`")
    if damages := damaged_files(folder, index.files, progress):
        raise DamagedError(folder, damages)
    return index


def take_bundle(folder: Path, index: BundleIndex, site: Settings, progress: Progress) -> None:
    """Put a checked bundle's files and commits into the cache, locks of extras where they lie."""
    with owned.scratch(site.cache) as scratch:
        for file in index.files:
            name = file.path.rpartition("/")[2]
            if file.path.startswith("sha256/") and fetch.cached(file.sha256, site) is None:
                progress.output(name)
                at = fetch.store(_copy(folder, file, scratch / name), site)
                if name.endswith(".yaml"):
                    extras_lock.take(at, site)
        for commit in index.commits:  # git fetches it from a repository made of its pack
            progress.output(commit.url)
            there = Path(tempfile.mkdtemp(dir=scratch))
            megatron_source.git(there, "init", "--bare", "--quiet")
            pack = _copy(folder, index.listed[commit.path], there / "objects/pack/bundle.pack")
            megatron_source.git(there, "index-pack", str(pack))
            (there / "shallow").write_text(f"{commit.commit}\n", encoding="ascii")
            megatron_source.git(there, "update-ref", "refs/heads/bundle", commit.commit)
            megatron_source.repository(commit.url, commit.commit, site, at=f"file://{there}")


def _copy(folder: Path, file: oci_layout.LayoutFile, target: Path) -> Path:
    with target.open("wb") as copy:
        copy.writelines(read_listed(folder, file.path, file.size))
    return target


def load_images(folder: Path, index: BundleIndex, client: DockerClient, progress: Progress) -> None:
    """Load a checked bundle's images into an engine, and give them their names.

    Raises EngineError where the engine refuses one, makes another image of it, or has another under
    one of its names: that stays.
    """
    for image in index.images:
        own = image_lookup.id_of(client, image.id)
        if own is None:
            place = folder / image.path
            listing = read_listing(place)
            for file in _files_of(image, listing):  # what was checked, and nothing else
                checked = index.listed.get(file.path)
                if checked != file:
                    expected = checked.sha256 if checked else "not listed"
                    raise DamagedError(folder, [Damage(file.path, expected, file.sha256)])
            own = load.load_checked(client, place, listing, progress)
        names = _with_tag(image.names)
        for name in names:
            if (there := image_lookup.id_of(client, name)) not in (None, own):
                raise EngineError(
                    f"{name}: the engine has {there} under that name, and the bundle has {own}",
                    f"If that one may lose its name: docker rmi {shlex.quote(name)}",
                )
        name_image(client, own, *names)


def unmet(index: BundleIndex, site: Settings) -> list[tuple[str, str]]:
    """Rows of the bundle for which the lock here names something else, and what that is."""
    matrix, lock = load_matrix(site.matrix), load_lock(site.matrix.with_suffix(".lock"))
    hashes = {file.sha256 for file in index.files}
    commits = {one.commit for one in index.commits}
    found = []
    for row in index.rows:
        try:
            here = recipe(matrix, lock, row.tag, row.megatron, row.platform, row.extras)
            if own := extras_lock.find_lock(here, matrix, site):
                here = extras_lock.with_lock(here, own)
            lacks = ", ".join(here.lacks(hashes, commits))
        except UsageError as error:
            lacks = error.problem
        if lacks:
            found.append((row.tag, lacks))
    return found
