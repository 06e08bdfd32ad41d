"""Builds an image again from the lock and tells whether it is the same, and where it isn't."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.build import beside, compare
from launcher.build.compare import Difference, printable
from launcher.build.image import LABEL, OCI, Builds, Built, Request
from launcher.build.layers import Entry, Layer, layers, unpack
from launcher.errors import BuildError, UsageError
from launcher.matrix.schema import Matrix
from launcher.progress import Progress
from launcher.settings import Settings
from launcher.transfer import images

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

REPOSITORY = "megatron-verify"
MOST_LISTED = 10  # of paths that differ
MOST_SHOWN = 50  # of files that diffoscope is given

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Departures:
    """What an image was built with that its labels don't name in full; as in image.Request."""

    checkout: Path | None = None
    base: str | None = None
    builder: str | None = None


@dataclass(frozen=True)
class Subject:
    """An image as the engine has it.

    layers: diff IDs, lowest first; created: ISO 8601; by_buildkit: else by another builder
    config: what it sets for containers; history: its steps; times: when each was made
    """

    id: str
    layers: tuple[str, ...]
    labels: dict[str, str]
    created: str
    by_buildkit: bool
    config: dict[str, Any]
    history: list[dict[str, Any]]
    times: list[Any]


@dataclass(frozen=True)
class Claims:
    """What two builds from the same inputs have in common, by the builders that made them.

    Wheel, configuration and the files that are added always; `layers`: their bytes as well;
    `image`: and the image's ID. `because` says what stands against the rest.
    """

    layers: bool = True
    image: bool = True
    because: str = ""


def subject(client: DockerClient, image: str) -> Subject:
    """The image of this ID."""
    found = client.api.inspect_image(image)
    history = client.api.history(image)
    config = {key: value for key, value in found["Config"].items() if key not in _OF_A_BUILD}
    return Subject(
        id=found["Id"],
        layers=tuple(found["RootFS"].get("Layers") or ()),
        labels=found["Config"].get("Labels") or {},
        created=found.get("Created") or "",
        by_buildkit=any("buildkit" in str(step.get("Comment")) for step in history[:1]),
        config={**config, **{key: found.get(key) for key in ("Architecture", "Os", "Variant")}},
        history=[{key: step.get(key) for key in ("CreatedBy", "Comment")} for step in history],
        times=[step.get("Created") for step in history],
    )


_OF_A_BUILD = ("Image", "Hostname")  # the classic builder leaves these in an image's configuration


def request(name: str, labels: dict[str, str], departures: Departures, matrix: Matrix) -> Request:
    """What to build to get an image with these labels again.

    Raises BuildError for an image that says no row, or one that isn't in the matrix; UsageError
    where it was built from a checkout and none is given.
    """
    tag, release = labels.get(f"{LABEL}row"), labels.get(f"{LABEL}megatron")
    if not tag or not release:
        raise BuildError(
            f"{name}: can't be rebuilt: it has no label {LABEL}row to say what it is",
            "It isn't an image that `launcher image build` made.",
        )
    if tag not in matrix.rows or release not in matrix.releases:
        what = f"row {tag}" if tag not in matrix.rows else f"release {release}"
        raise BuildError(
            f"{name}: can't be rebuilt: it is of {what}, which the matrix doesn't have",
            "Set LAUNCHER_MATRIX to the matrix.yaml that it was built from.",
        )
    if labels.get(f"{LABEL}source") == "path" and departures.checkout is None:
        revision = labels.get(f"{OCI}revision", "unknown")
        raise UsageError(
            f"{name}: was built from a checkout (revision {revision}), not from a release",
            "Name that checkout: --source PATH",
        )
    base = departures.base and departures.base.replace("{tag}", tag)
    return Request(tag, release, departures.checkout, base, departures.builder, no_cache=True)


def notes(image: Subject, base: Subject, now: dict[str, str], key: str) -> Iterator[str]:
    """What is known to be different before anything is built.

    base: what it is built on now; now: the labels it would get; key: of the inputs it would have
    """
    if image.layers[: len(base.layers)] != base.layers:
        shared = sum(one == other for one, other in zip(image.layers, base.layers, strict=False))
        said = image.labels.get(f"{OCI}base.digest", "")
        yield (
            f"another base: it isn't on {now.get(f'{OCI}base.name', '')} {base.id}, of whose "
            f"{len(base.layers)} layers it has {shared}{f'; it says {said}' if said else ''}"
        )
    if image.labels.get(f"{LABEL}key") == key:
        return
    yield "built from other inputs than it would be now: what differs may come from there"
    for name in sorted(now):
        if (said := image.labels.get(name, "nothing")) != now[name]:
            yield f"{name}: it says {said}, now {now[name]}"


def claims(image: Subject, rebuilt: Subject, epoch: int) -> Claims:
    """What is claimed of two images; epoch: seconds since 1970, the time a build is told to write.

    The classic builder writes its own times into layers and image; BuildKit of engines before 23
    into the image alone.
    """
    told = datetime.fromtimestamp(epoch, timezone.utc).isoformat()[:19]
    if image.by_buildkit != rebuilt.by_buildkit:
        return Claims(False, False, "the two images were made by different builders")
    late = next((one for one in (rebuilt, image) if not one.created.startswith(told)), None)
    if late is None:
        return Claims()
    who = "this engine's builder" if late is rebuilt else "the builder that made the image"
    return Claims(image.by_buildkit, False, f"{who} writes the time of the build")


class Verification:
    """Compares an image with one that is built again; `tell` takes the report line by line."""

    def __init__(
        self, client: DockerClient, site: Settings, progress: Progress, tell: Tell = print
    ) -> None:
        self.client = client
        self.site = site
        self.progress = progress
        self.tell = tell

    def verify(
        self, name: str, departures: Departures, keep: bool = False, diffoscope: bool = False
    ) -> bool:
        """Whether the image is what the lock gives, as far as its builders let it be claimed.

        What is built for it is removed afterwards, or kept under the name that is told. Raises
        BuildError, UsageError or EngineError where it can't be built again.
        """
        if diffoscope and not shutil.which("diffoscope"):
            raise UsageError("there is no diffoscope here", "Install it: apt install diffoscope")
        own = f"{REPOSITORY}-{secrets.token_hex(4)}"  # so that nobody's name is taken away
        builds = Builds(self.client, self.site, self.progress, own)
        image = subject(self.client, images.find(self.client, name).id)
        wanted = request(name, image.labels, departures, builds.matrix)
        self.tell(f"{name}: {_origin(image.labels)}")
        said, row = image.labels.get(f"{OCI}base.name"), builds.matrix.rows[wanted.tag]
        if said and not wanted.base and said != row.base:
            self.tell(f"note: its base was {said}, not {row.base}: for that, --base {said}")
        inputs = builds.inputs(wanted)
        base = subject(self.client, inputs.base)
        for note in notes(image, base, inputs.labels, inputs.key()):
            self.tell(f"note: {note}")
        built = builds.build(wanted)
        try:
            rebuilt = subject(self.client, built.id)
            claimed = claims(image, rebuilt, inputs.source.epoch)
            return self._compare(image, rebuilt, base, claimed, diffoscope)
        finally:
            if keep:
                self.tell(f"kept {built.names[0]}")
            else:
                self._remove(built, image.id)

    def _remove(self, built: Built, image: str) -> None:
        """Take the names of an image away, and it with them unless it is the one verified."""
        for name in built.names:
            self.client.api.remove_image(name)
        if built.id != image:
            shutil.rmtree(beside.folder(built.id, self.site), ignore_errors=True)

    def _compare(
        self, image: Subject, rebuilt: Subject, base: Subject, claimed: Claims, diffoscope: bool
    ) -> bool:
        """Tell how the two compare; whether all that is claimed is the same."""
        on_base = image.layers[: len(base.layers)] == base.layers
        ours = rebuilt.layers[len(base.layers) :]
        theirs = image.layers[len(base.layers) if on_base else -len(ours) :]
        wheels = [beside.record(self.client, one.id)["wheel"] for one in (image, rebuilt)]
        keys = [one.labels.get(f"{LABEL}key", "none") for one in (image, rebuilt)]
        self._pair("inputs", keys)
        self._pair("wheel", [one["sha256"] for one in wheels], f"{wheels[1]['name']}")
        for place in range(max(len(theirs), len(ours))):
            pair = [some[place] if place < len(some) else "none" for some in (theirs, ours)]
            self._pair(f"layer {place + 1}", pair, "" if claimed.layers else NOT_CLAIMED)
        self._pair("image", [image.id, rebuilt.id], "" if claimed.image else NOT_CLAIMED)
        changed = _settings(image, rebuilt, claimed)
        for name, one, other in changed:
            self._pair(name, [printable(one), printable(other)])
        found: list[Difference] = []
        if theirs != ours:
            found = self._explain(image, rebuilt, theirs, ours, claimed, diffoscope)
        same = (
            on_base
            and wheels[0] == wheels[1]
            and not found
            and not changed
            and (theirs == ours or not claimed.layers)
            and (image.id == rebuilt.id or not claimed.image)
        )
        self.tell(verdict(same, claimed))
        return same

    def _pair(self, what: str, values: Sequence[str], more: str = "") -> None:
        """Whether two values are the same, and both of them."""
        one, other = values
        self.tell(f"{what:9}{'same' if one == other else 'differs':9}{more}".rstrip())
        self.tell(f"  image    {one}")
        self.tell(f"  rebuilt  {other}")

    def _explain(
        self,
        image: Subject,
        rebuilt: Subject,
        theirs: Sequence[str],
        ours: Sequence[str],
        claimed: Claims,
        diffoscope: bool,
    ) -> list[Difference]:
        """Tell where the added layers part, by file; all differences in what is claimed."""
        read = self._layers(image, theirs, {})
        read = self._layers(rebuilt, ours, read)
        of_image, of_rebuilt = ([read[one] for one in some] for some in (theirs, ours))
        found = compare.differences(
            compare.merge(of_image), compare.merge(of_rebuilt), times=claimed.layers
        )
        if found:
            with _opened(self.client, image.id) as one, _opened(self.client, rebuilt.id) as other:
                self._show(found, one, other, diffoscope)
        elif claimed.layers:
            self.tell("no file differs: " + compare.unlike(of_image, of_rebuilt))
        return found

    def _layers(
        self, image: Subject, wanted: Sequence[str], read: dict[str, Layer]
    ) -> dict[str, Layer]:
        """The wanted layers of an image by diff ID, with those that are read already."""
        missing = [one for one in wanted if one not in read]
        if not missing:
            return read
        known = {*image.layers, *read} - {*missing}
        self.progress.step(f"read what {image.id[:19]} adds, from what the engine saves of it")
        with closing(self.client.api.get_image(image.id)) as stream:
            read = {**read, **layers(stream, image.layers, known)}
        self.progress.close()
        if lost := [one for one in missing if one not in read]:
            raise BuildError(
                f"{image.id}: its layer {lost[0]} can't be read from what the engine saves",
                "Only layers in plain tar or gzip are compared by file.",
            )
        return read

    def _show(
        self, found: list[Difference], one: Container, other: Container, diffoscope: bool
    ) -> None:
        """Tell the first difference in full and the next ones by name."""
        first = found[0]
        self.tell(f"first difference, of {len(found)}: {printable(first.path)}")
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / side for side in ("image", "rebuilt")]
            entries = [
                _fetch(box, first.path, file) for box, file in zip((one, other), files, strict=True)
            ]
            known = (first.image or entries[0], first.rebuilt or entries[1])
            for line in compare.described(*known):
                self.tell(f"  {line}")
            if all(file.exists() for file in files):
                with files[0].open("rb") as ours, files[1].open("rb") as theirs:
                    for line in compare.parted(compare.parting(ours, theirs)):
                        self.tell(f"  {line}")
        for more in found[1 : MOST_LISTED + 1]:
            self.tell(f"also: {printable(more.path)} ({', '.join(more.names)})")
        if len(found) > MOST_LISTED + 1:
            self.tell(f"and {len(found) - MOST_LISTED - 1} more")
        if diffoscope:
            self._diffoscope([one.path for one in found], one, other)
        elif shutil.which("diffoscope"):
            self.tell("with --diffoscope: what is in the files that differ")

    def _diffoscope(self, paths: list[str], one: Container, other: Container) -> None:
        """Have diffoscope compare the files that differ, by its own report."""
        if len(paths) > MOST_SHOWN:
            self.tell(f"diffoscope is given the first {MOST_SHOWN} of {len(paths)}")
        with tempfile.TemporaryDirectory() as folder:
            for box, side in ((one, "image"), (other, "rebuilt")):
                (Path(folder) / side).mkdir()
                for path in paths[:MOST_SHOWN]:
                    _fetch(box, path, Path(folder) / side / path.strip("/").replace("/", "%"))
            done = subprocess.run(
                ["diffoscope", "--text", "-", "image", "rebuilt"],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        for line in (done.stdout if done.returncode in (0, 1) else done.stderr).splitlines():
            self.tell(f"  {printable(line)}")


NOT_CLAIMED = "not claimed"


def verdict(same: bool, claimed: Claims) -> str:
    """The last line of the report."""
    what = "wheel, configuration and added files"
    if claimed.layers:
        what = "wheel, configuration and added layers"
    if claimed.image:
        what = "wheel, added layers and image"
    because = f" ({claimed.because}, so no more is claimed)" if claimed.because else ""
    return f"{'identical' if same else 'differs'}: {what}{because}"


def _origin(labels: dict[str, str]) -> str:
    """What an image's labels say that it was built from."""
    said = {name: labels.get(LABEL + name, "unknown") for name in ("row", "megatron", "source")}
    by = labels.get(f"{LABEL}version", "unknown")
    return f"row {said['row']}, Megatron {said['megatron']} from {said['source']}, launcher {by}"


def _settings(image: Subject, rebuilt: Subject, claimed: Claims) -> list[tuple[str, str, str]]:
    """Where the configurations differ; steps and their times only where they are claimed."""
    pairs: list[tuple[Any, Any]] = [(image.config, rebuilt.config)]
    if claimed.layers:
        pairs.append(({"history": image.history}, {"history": rebuilt.history}))
    if claimed.image:
        pairs.append(({"times": image.times}, {"times": rebuilt.times}))
    return [found for one, other in pairs for found in compare.values(one, other)]


@contextmanager
def _opened(client: DockerClient, image: str) -> Iterator[Container]:
    """A container of an image that never starts: its files can be read."""
    container = client.containers.create(image, ["true"], network_mode="none")
    try:
        yield container
    finally:
        container.remove(force=True, v=True)


def _fetch(container: Container, path: str, file: Path) -> Entry | None:
    """What lies at a path, None where nothing does; a file's content is written to `file`."""
    from docker.errors import NotFound

    try:
        stream, _ = container.get_archive(path)
    except NotFound:
        return None
    return unpack(stream, file)
