"""Builds an image again from the lock, and reports whether and where the two differ."""

from __future__ import annotations

import io
import json
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

from launcher.base import owned
from launcher.base.errors import BuildError, UsageError
from launcher.base.names import LABEL
from launcher.base.screen import Progress, printable
from launcher.base.settings import Settings, settings
from launcher.images.builder import beside
from launcher.images.builder.image import OCI, BuildRequest, Builds, BuiltImage
from launcher.images.carry import compare, image_lookup
from launcher.images.carry.compare import ABSENT, Difference
from launcher.images.matrix.schema import Matrix
from launcher.images.oci.image_layers import LayerEntries, read_layers
from launcher.images.oci.inspection import container_of, copy_out, find_image, layers_of, tags_of
from launcher.images.sources.pins import is_standin

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

REPOSITORY = "megatron-verify"
MOST_LISTED = 10  # of paths and settings that differ
MOST_SHOWN = 50  # of files that diffoscope is given
DIFFOSCOPE_WITHIN = 60  # seconds, where nobody asked for it
SETTINGS = (
    *("Env", "Entrypoint", "Cmd", "User", "WorkingDir", "Labels", "ExposedPorts", "Volumes"),
    *("StopSignal", "Shell", "Healthcheck", "OnBuild"),
)
"""What an image sets for its containers, by the OCI image specification and Docker's."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Departures:
    """What an image was built with that its labels don't name in full: see `BuildRequest`."""

    checkout: Path | None = None
    base: str | None = None
    builder: str | None = None


@dataclass(frozen=True)
class RebuildSubject:
    """An image as the engine has it.

    layers: diff IDs, lowest first; created: ISO 8601; settings: for its containers
    history: its steps, first to last; times: when each was made, seconds since 1970
    """

    id: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    created: str
    settings: dict[str, Any]
    history: list[dict[str, str]]
    times: list[int]

    @property
    def labels(self) -> dict[str, str]:
        return self.settings["Labels"] or {}

    def is_on(self, base: RebuildSubject) -> bool:
        """Whether its lowest layers are those of `base`."""
        return self.layers[: len(base.layers)] == base.layers

    def by_buildkit(self, base: RebuildSubject) -> bool:
        """Whether BuildKit made what it adds to `base`, or another builder."""
        own = self.history[len(base.history) if self.is_on(base) else 0 :]
        return any("buildkit" in step["Comment"] for step in own)


@dataclass(frozen=True)
class RebuildClaims:
    """What two builds from the same inputs have in common, by the builders that made them.

    Wheel, settings and the files that are added always; `layers`: their bytes as well; `image`:
    and the image's ID. `because` says what stands against the rest.
    """

    layers: bool = True
    image: bool = True
    because: str = ""


def subject(client: DockerClient, image: str) -> RebuildSubject:
    """The image of this ID."""
    found = client.api.inspect_image(image)
    steps = client.api.history(image)[::-1]
    settings = {key: found["Config"].get(key) for key in SETTINGS}
    return RebuildSubject(
        id=found["Id"],
        names=tuple(tags_of(found)),
        layers=layers_of(found),
        created=found.get("Created") or "",
        settings=settings | {key: found.get(key) for key in ("Architecture", "Os", "Variant")},
        history=[{key: step[key] or "" for key in ("CreatedBy", "Comment")} for step in steps],
        times=[step["Created"] for step in steps],
    )


def request(
    name: str, labels: dict[str, str], departures: Departures, matrix: Matrix
) -> BuildRequest:
    """What to build to get an image with these labels again.

    Raises BuildError for an image that says no row, or one that isn't in the matrix; UsageError
    where it was built from a checkout and none is given.
    """
    tag = labels.get(f"{LABEL}row")
    release = labels.get(f"{LABEL}rules") or labels.get(f"{LABEL}megatron")
    if not tag or not release:
        raise BuildError(
            f"{name}: can't be rebuilt: it has no label {LABEL}row to say what it is",
            "It isn't an image that `launcher image build` made.",
        )
    if tag not in matrix.rows or release not in matrix.releases:
        what = f"row {tag!r}" if tag not in matrix.rows else f"release {release!r}"
        raise BuildError(
            f"{name}: can't be rebuilt: it is of {what}, which the matrix doesn't have",
            "Set LAUNCHER_MATRIX to the matrix.yaml that it was built from.",
        )
    if labels.get(f"{LABEL}source") == "path" and departures.checkout is None:
        revision = labels.get(f"{OCI}revision", "unknown")
        raise UsageError(
            f"{name}: was built from a checkout (revision {revision!r}), not from a release",
            "Name that checkout: --source PATH",
        )
    return BuildRequest(
        tag,
        release,
        departures.checkout,
        departures.base and departures.base.replace("{tag}", tag),
        departures.builder,
        no_cache=True,
        architectures=labels.get(f"{LABEL}architectures"),
        extras=tuple(labels.get(f"{LABEL}extras", "").split()),
    )


def unnamed(
    labels: dict[str, str], named: Departures | BuildRequest, base: str = ""
) -> dict[str, str]:
    """Base and builder in the labels that differ from the row's, and that no option named."""
    at = {"base": f"{OCI}base.name", "builder": f"{LABEL}builder"}
    said = {key: labels.get(label, "") for key, label in at.items() if getattr(named, key) is None}
    return {key: name for key, name in said.items() if name not in ("", base)}


def notes(
    image: RebuildSubject, base: RebuildSubject, now: dict[str, str], key: str
) -> Iterator[str]:
    """What is known to be different before anything is built.

    base: what it is built on now; now: the labels it would get; key: of the inputs it would have
    """
    if not image.is_on(base):
        shared = sum(one == other for one, other in zip(image.layers, base.layers, strict=False))
        yield (
            f"it lies on another base than {now[f'{OCI}base.name']} {base.id}: it has {shared} of "
            f"that one's {len(base.layers)} layers"
        )
    if image.labels.get(f"{LABEL}key") == key:
        return
    yield "it was built from other inputs than it would be now: what differs may come from there"
    for name in sorted({**now, f"{OCI}base.digest": ""}):
        said, said_now = image.labels.get(name, ABSENT), now.get(name, ABSENT)
        if said != said_now:
            yield f"{name}: {said}, now {said_now}"


def claims(
    image: RebuildSubject, rebuilt: RebuildSubject, base: RebuildSubject, epoch: int
) -> RebuildClaims:
    """What is claimed of two images; epoch: seconds since 1970, the time that a build has to write.

    BuildKit and podman write it, each in its own way. The classic builder doesn't, nor into the
    layers; nor does BuildKit of engines before 23 into an image that can't be mended afterwards.
    """
    told = datetime.fromtimestamp(epoch, timezone.utc).isoformat()[:19]
    builders, exact = zip(
        *((one.by_buildkit(base), one.created.startswith(told)) for one in (image, rebuilt)),
        strict=True,
    )
    if len({*builders}) > 1 or (not any(builders) and len({*exact}) > 1):
        return RebuildClaims(False, False, "the two were made by different builders")
    if not exact[1]:
        return RebuildClaims(builders[1], False, "the builder here writes the time of the build")
    return RebuildClaims()


def verdict(same: bool, claimed: RebuildClaims) -> str:
    """The last line of the report."""
    what = "wheel, added layers and image" if claimed.image else "wheel and added layers"
    if not claimed.layers:
        what = "wheel and added files (content, modes, owners)"
    more = f"; no more is claimed: {claimed.because}" if claimed.because else ""
    if same:
        return f"identical: {what}{more}"
    return f"differs from what the lock gives; compared: {what}{more}"


@dataclass(frozen=True)
class Verification:
    """Builds images of one matrix again and compares; `say` takes the report line by line."""

    client: DockerClient
    site: Settings
    progress: Progress
    say: Tell = print

    def tell(self, line: str) -> None:
        """Names and labels of an image may hold anything."""
        self.say(printable(line))

    def verify(
        self, name: str, departures: Departures, keep: bool = False, diffoscope: bool = False
    ) -> bool:
        """Whether an image is what the lock gives, as far as its builders let it be claimed.

        What is built for it is removed afterwards, or kept under the name that is printed. Raises
        BuildError, UsageError or EngineError where it can't be built again.
        """
        if diffoscope and not shutil.which("diffoscope"):
            raise UsageError("there is no diffoscope here", "Install it: apt install diffoscope")
        own = f"{REPOSITORY}-{secrets.token_hex(4)}"  # so that nobody's name is taken away
        builds = Builds(self.client, self.site, self.progress, own)
        image = subject(self.client, image_lookup.find(self.client, name).id)
        standins = self._standins(image, departures)
        wanted = request(name, image.labels, replace(departures, **standins), builds.matrix)
        wanted = replace(wanted, platform="{Os}/{Architecture}".format(**image.settings))
        said = [image.labels.get(LABEL + key, ABSENT) for key in ("megatron", "source")]
        self.tell("{}: row {}, Megatron {} from {}".format(name, wanted.tag, *said))
        if version := image.labels.get(f"{LABEL}version"):
            self.tell(
                f"note: launcher {version} built it, with its own runner: that one rebuilds it"
            )
        for key, standin in standins.items():
            self.tell(f"note: its {key} is {standin}, which stands in for the row's")
        if others := unnamed(image.labels, wanted, builds.matrix.rows[wanted.tag].base):
            what = " and ".join(f"its {key} is {name}" for key, name in others.items())
            options = " ".join(f"--{key} {name}" for key, name in others.items())
            self.tell(f"note: it says that {what}; for that: {options}")
        inputs = builds.inputs(wanted)
        base = subject(self.client, inputs.base.id)
        for note in notes(image, base, inputs.labels, inputs.key()):
            self.tell(f"note: {note}")
        built = builds.build(wanted)
        try:
            rebuilt = subject(self.client, built.id)
            claimed = claims(image, rebuilt, base, inputs.source.epoch)
            with (
                container_of(self.client, image.id) as one,
                container_of(self.client, built.id) as other,
            ):
                boxes = (one, other)
                pair = Comparison(image, rebuilt, base, claimed, boxes, self.progress, self.tell)
                return pair.compare(diffoscope)
        finally:
            if keep or (built.id == image.id and not image.names):
                self.tell(f"kept: {built.names[0]}")
            else:
                self._remove(built)

    def _standins(self, image: RebuildSubject, departures: Departures) -> dict[str, Any]:
        """The stand-ins that the image was made with, where they are here and none was named.

        They hold none but the distribution's packages, so the image is taken at its word.
        """
        said = unnamed(image.labels, departures)
        found = {key: find_image(self.client, name) for key, name in said.items()}
        return {key: said[key] for key, image in found.items() if image and is_standin(image)}

    def _remove(self, built: BuiltImage) -> None:
        """Take an image's names away; it goes with them, with its documents, if it has no other."""
        from docker.errors import ImageNotFound

        for name in built.names:
            with suppress(ImageNotFound):
                self.client.api.remove_image(name)
        if image_lookup.id_of(self.client, built.id) is None:
            beside.remove(built.id, self.site)


@dataclass(frozen=True)
class Comparison:
    """An image and the one that was built again, with a container of each to read files from."""

    image: RebuildSubject
    rebuilt: RebuildSubject
    base: RebuildSubject
    claimed: RebuildClaims
    boxes: tuple[Container, Container]
    progress: Progress
    tell: Tell

    def compare(self, diffoscope: bool) -> bool:
        """Print how the two compare; whether all that is claimed is the same."""
        added = self._added()
        both = (self.image, self.rebuilt)
        wheels = [_wheel(box) for box in self.boxes]
        self._pair("inputs", [one.labels.get(f"{LABEL}key", ABSENT) for one in both])
        self._pair("wheel", wheels)
        for number, pair in enumerate(zip_longest(*added, fillvalue=ABSENT), start=1):
            self._pair(f"layer {number} above the base", pair, self.claimed.layers)
        self._pair("image", [one.id for one in both], self.claimed.image)
        found = self._files(added, diffoscope) if added[0] != added[1] else []
        set_in = [dict(one.settings) for one in both]
        for each, one in zip(set_in, both, strict=True):
            each |= {"step": one.history} if self.claimed.layers else {}
            each |= {"time of step": one.times} if self.claimed.image else {}
        changed = compare.values(*set_in)
        for name, *values in changed[:MOST_LISTED]:
            self._pair(name, values)
        same = (
            self.image.is_on(self.base)
            and wheels[0] == wheels[1]
            and not found
            and not changed
            and (added[0] == added[1] or not self.claimed.layers)
            and (self.image.id == self.rebuilt.id or not self.claimed.image)
        )
        self.tell(verdict(same, self.claimed))
        return same

    def _added(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers above the base; on another base, as many of the highest."""
        ours = self.rebuilt.layers[len(self.base.layers) :]
        lowest = len(self.base.layers) if self.image.is_on(self.base) else -len(ours)
        return self.image.layers[lowest:], ours

    def _pair(self, what: str, values: Sequence[str], claimed: bool = True) -> None:
        """Whether two values are the same, and both of them."""
        same = "same" if values[0] == values[1] else "differs"
        self.tell(f"{what}: {same}" + ("" if claimed else ", not claimed"))
        self.tell(f"  image    {values[0]}")
        self.tell(f"  rebuilt  {values[1]}")

    def _files(
        self, added: tuple[Sequence[str], Sequence[str]], diffoscope: bool
    ) -> list[Difference]:
        """Print where the added layers part, by file; all differences in what is claimed."""
        read: dict[str, LayerEntries] = {}
        for image, layers in zip((self.image, self.rebuilt), added, strict=True):
            read |= self._read(image, {*layers} - {*read})
        one, other = ([read[layer] for layer in layers] for layers in added)
        found = compare.differences(one, other, times=self.claimed.layers)
        if found:
            self.tell(f"first difference, of {len(found)}: {found[0].path}")
            for line in found[0].told():
                self.tell(f"  {line}")
            for more in found[1 : MOST_LISTED + 1]:
                self.tell(f"also {more.path}: {', '.join(more.names)}")
            self._look_inside(found, None if diffoscope else DIFFOSCOPE_WITHIN)
        elif self.claimed.layers:
            self.tell("no file differs: layers have them in another order, or in other layers")
        return found

    def _read(self, image: RebuildSubject, wanted: set[str]) -> dict[str, LayerEntries]:
        """The wanted layers of an image by diff ID."""
        if not wanted:
            return {}
        self.progress.step(f"read what {image.id[:19]} adds, from what the engine saves of it")
        with closing(self.boxes[0].client.api.get_image(image.id)) as stream:
            read = read_layers(stream, image.layers, {*image.layers} - wanted)
        self.progress.close()
        if lost := wanted - {*read}:
            raise BuildError(
                f"{image.id}: its layer {min(lost)} can't be read from what the engine saves",
                "Only layers in plain tar or packed by gzip, zstd, bzip2 or xz can be.",
            )
        return read

    def _look_inside(self, found: list[Difference], within: int | None) -> None:
        """Have diffoscope, where it is installed, compare what differs; within: seconds."""
        if not shutil.which("diffoscope"):
            return
        if len(found) > MOST_SHOWN:
            self.tell(f"diffoscope is given the first {MOST_SHOWN} of {len(found)}")
        self.progress.step("diffoscope")
        with owned.scratch(settings().cache) as folder:
            for box, side in zip(self.boxes, ("image", "rebuilt"), strict=True):
                (Path(folder) / side).mkdir()
                for path in (one.path for one in found[:MOST_SHOWN]):
                    target = Path(folder) / side / path.strip("/").replace("/", "%")
                    with target.open("wb") as file:
                        there = copy_out(box, path, file)
                    if not there:
                        owned.remove_file(target, Path(folder))
            # Modes and owners are ours; times are those of the copies made here.
            command = ["diffoscope", "--exclude-directory-metadata=recursive", "--text", "-"]
            command += ["image", "rebuilt"]
            with subprocess.Popen(command, cwd=folder, stdout=PIPE, stderr=PIPE) as process:
                try:
                    output, errors = process.communicate(timeout=within)
                except subprocess.TimeoutExpired:
                    process.terminate()  # so that it removes its own files
                    self.progress.fail()
                    self.tell(f"diffoscope takes more than {within} s: --diffoscope waits for it")
                    return
        self.progress.close()
        shown = output if process.returncode in (0, 1) else errors
        for line in shown.decode(errors="replace").splitlines():
            self.tell(f"  {line}")


def _wheel(container: Container) -> str:
    """The name and the sha256 of the wheel in an image, as it has them."""
    record = io.BytesIO()
    try:
        copy_out(container, beside.RECORD, record, beside.LARGEST)
        wheel = json.loads(record.getvalue())["wheel"]
        return f"{wheel['sha256']} {wheel['name']}"
    except (ValueError, KeyError, TypeError, tarfile.TarError):
        return f"{ABSENT}: {beside.RECORD} can't be read"
