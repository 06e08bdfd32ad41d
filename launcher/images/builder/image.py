"""From a matrix row to a checked, tagged image."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import owned
from launcher.base.errors import BuildError, EngineError, LauncherError, UsageError
from launcher.base.names import LABEL
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import attest, beside, builders, context, verify
from launcher.images.engine.acquire import STANDIN_NAME
from launcher.images.matrix.dockerfile import dockerfile
from launcher.images.matrix.extras import suffix
from launcher.images.matrix.matrix_file import find_row, load_lock, load_matrix, patch_files
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.requirements import pinned_versions
from launcher.images.matrix.schema import Row, caution
from launcher.images.oci.inspection import engine_errors, find_image, layers_of, tags_of
from launcher.images.sources import extensions, extras_lock, fetch, pins
from launcher.images.sources import megatron_source as sources
from launcher.images.sources.megatron_source import MegatronSource

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "megatron"
OCI = "org.opencontainers.image."  # its annotations: the OCI image specification
ARCHITECTURE = re.compile(r"\d{2,3}[af]?")  # 90 is compute capability 9.0


@dataclass(frozen=True)
class BuildRequest:
    """What is asked for: a row, and what departs from it.

    megatron: another release than the row's; checkout: a Megatron-LM folder in place of the
    release's own source; base, builder: images in place of the row's, such as a mirror's;
    architectures, jobs: of a row with extensions, the GPUs they are compiled for (80 90), and how
    many compilers run at a time; extras: packages and named sets beside the row's own; platform:
    where it isn't what the engine's base is for, linux/arm64.
    """

    tag: str
    megatron: str | None = None
    checkout: Path | None = None
    base: str | None = None
    builder: str | None = None
    no_cache: bool = False
    architectures: str | None = None
    jobs: int | None = None
    extras: tuple[str, ...] = ()
    platform: str | None = None


@dataclass(frozen=True)
class BuiltImage:
    """An image: its names, its ID, and whether it was there already."""

    names: list[str]
    id: str
    reused: bool


@dataclass
class Builds:
    """Builds images of one matrix on one engine; what several rows share is done once.

    repository: the part of the images' names before the colon; standin: whether what `make demo`
    made may take the place of a base that can't be had
    """

    client: DockerClient
    site: Settings
    progress: Progress
    repository: str = REPOSITORY
    standin: bool = False

    def __post_init__(self) -> None:
        self.matrix = load_matrix(self.site.matrix)
        self.lock = load_lock(self.site.matrix.with_suffix(".lock"))
        locked = self.lock.images, self.matrix.moving
        self.images = pins.StartImages(self.client, self.site, self.progress, *locked)
        self._facts: dict[str, verify.BuildFacts] = {}
        self._sources: dict[tuple[str, str], MegatronSource] = {}

    def recipe(self, request: BuildRequest, platform: str | None = None) -> Recipe:
        """What matrix and lock say of a request; no engine is asked. Raises UsageError."""
        row, version = find_row(self.matrix, request.tag), request.megatron
        if request.checkout is not None:
            version = sources.release_of(request.checkout, self.matrix, version, row.megatron)
        where = platform or request.platform
        found = recipe(self.matrix, self.lock, request.tag, version, where, request.extras)
        _architectures(request, found)
        return found

    def build(self, request: BuildRequest) -> BuiltImage:
        """Build, check and tag one image, or return the one that has the same inputs.

        Raises BuildError, UsageError or EngineError; then nothing is tagged.
        """
        with _told(self.progress):
            inputs = self.inputs(request)
            names = self._names(inputs)
            key = inputs.key()
            if not request.no_cache and (found := self._with_key(key)):
                self._tag(found, names)
                if not beside.is_kept(found, self.site):
                    self._document(inputs, found, verify.look(self.client, found, names[0]))
                return BuiltImage(names, found, reused=True)
            row = inputs.recipe.row
            if because := caution(row, inputs.recipe.named):
                at = f"Megatron {inputs.recipe.release} on torch {row.torch}"
                self.progress.note(f"{at}: {because}")
            base = self._look_into_base(request, inputs.recipe.row, inputs.base)
            verify.check_base(base, row, request.base or row.base, inputs.base.standin)
            verify.check_needs(base, inputs.recipe.named, request.base or row.base)
            image = self._build(inputs, request, {**inputs.labels, f"{LABEL}key": key})
            try:
                self._document(inputs, image, self._check(image, base, inputs))
            except BaseException:
                self._discard(image)
                raise
            self._tag(image, names)
            return BuiltImage(names, image, reused=False)

    def inputs(self, request: BuildRequest) -> context.Inputs:
        """What a request is built from: images, source, patches, pins. Raises as `build` does."""
        with _told(self.progress):
            at = self._source(request, self.recipe(request))
            root = self.site.matrix.parent
            base, builder = self._start(request)
            made = self._with_extras(request, self.recipe(request, base.platform), base)
            template = (root / "Dockerfile.template").read_text(encoding="utf-8")
            inputs = context.Inputs(
                recipe=made,
                dockerfile=dockerfile(self.matrix, made.tag, template, request.extras),
                base=base,
                builder=builder,
                source=at,
                patches=tuple(patch_files(root, made.named)),
                interpreter=fetch.interpreter(made, self.site, self.progress),
                extensions=extensions.sources(made, self.site, self.progress),
                architectures=_architectures(request, made),
            )
            return replace(inputs, labels=labels_of(inputs))

    def _with_extras(self, request: BuildRequest, made: Recipe, base: pins.StartImage) -> Recipe:
        """The recipe with its extras' pins: those of a lock that holds here, else resolved now."""

        def look() -> extras_lock.Ground:
            return ground(self._look_into_base(request, made.row, base), base, made)

        return extras_lock.settled(made, self.matrix, look, self.site, self.progress)

    def _start(self, request: BuildRequest) -> tuple[pins.StartImage, pins.StartImage]:
        """Base and builder of a request.

        Where a row without CUDA brings its own torch, the Debian that `make demo` made takes the
        place of images that can't be had, unless the user chose one.
        """
        row, own = self.recipe(request).row, (request.base, request.builder)
        try:
            return self._find(request, *own)
        except EngineError as error:
            if not self.standin or any(own) or row.cuda or not row.packages:
                raise
            name = f"{STANDIN_NAME}:{row.abi}"
            if not pins.is_standin(find_image(self.client, name) or {}):
                mend = "Or `make demo` makes a Debian that stands in for it, as root where apt is."
                raise EngineError(error.problem, f"{error.remedy}\n  {mend}") from error
            why = error.problem.splitlines()[0]
            self.progress.note(f"{why}: {name}, which `make demo` made, stands in for it")
            return self._find(request, name, name)

    def _find(
        self, request: BuildRequest, base: str | None, builder: str | None
    ) -> tuple[pins.StartImage, pins.StartImage]:
        row = self.recipe(request).row
        name = base or row.base
        platform = request.platform or self.images.platform(name)
        verify.check_platform(platform, row, name)
        made = self.recipe(request, platform)
        pairs = (row.base, base), (made.builder, builder)
        found, compiling = (self.images.find(*pair, platform) for pair in pairs)
        return found, compiling

    def _source(self, request: BuildRequest, wanted: Recipe) -> MegatronSource:
        """The Megatron source of a request, resolved once for all rows that share it."""
        kind, version = str(request.checkout or wanted.kind), wanted.release
        if (kind, version) not in self._sources:
            what = kind if request.checkout else f"Megatron {version} from {kind}"
            self.progress.step(f"source: {what}")
            if request.checkout is None:
                found = sources.locked(wanted, self.site)
            else:
                found = sources.from_path(request.checkout, version, wanted.locked)
            self._sources[kind, version] = found
            self.progress.close()
            if found.rules:
                said = f"Megatron {found.release}, built by the rules of {found.rules}"
                self.progress.note(f"{found.at}: {said}")
        return self._sources[kind, version]

    def _look_into_base(
        self, request: BuildRequest, row: Row, base: pins.StartImage
    ) -> verify.BuildFacts:
        """What is in the base; looked at once for each image."""
        name = request.base or row.base
        if row.interpreter:
            return verify.BuildFacts(row.python, {})
        if base.id not in self._facts:
            self.progress.step(f"look into {name}")
            self._facts[base.id] = verify.look(self.client, base.id, name)
            self.progress.close()
        return self._facts[base.id]

    def _build(self, inputs: context.Inputs, request: BuildRequest, labels: dict[str, str]) -> str:
        """Write the context and have the engine build it."""
        made = inputs.recipe
        self.progress.step(f"fetch {sum(map(len, made.pins.values()))} Python packages")
        wheels = {
            group: fetch.wheels(pins, made.row.python, self.site, made.platform, made.glibc)
            for group, pins in made.pins.items()
        }
        self.progress.step(f"patch Megatron {inputs.source.release}")
        args = {
            "BASE_IMAGE": inputs.base.name,
            "BUILDER_IMAGE": inputs.builder.name,
            "SOURCE_DATE_EPOCH": str(inputs.source.epoch),
        }
        if inputs.extensions:
            args["CUDA_ARCHITECTURES"] = inputs.architectures
        if request.jobs:
            args["MAX_JOBS"] = str(request.jobs)
        with owned.scratch(self.site.cache) as scratch, tempfile.TemporaryFile() as tar:
            context.write(inputs, wheels, Path(scratch), tar)
            tar.seek(0)
            self.progress.close()
            foreign = made.platform != self.images.own_platform
            where = made.platform if foreign else None
            wanted = builders.ImageBuild(tar, args, labels, request.no_cache, where)
            return builders.build(self.client, wanted, self.progress)

    def _check(
        self, image: str, base: verify.BuildFacts, inputs: context.Inputs
    ) -> verify.BuildFacts:
        """Look into the new image and compare it with its base and its row; what was seen."""
        self.progress.step("check the image")
        both = (inputs.base.id, image)
        verify.check_layers(*(layers_of(self.client.api.inspect_image(one)) for one in both))
        made = inputs.recipe
        facts = verify.look(self.client, image, "the image", made.named.extension)
        added = {*pinned_versions(made.pins.get("packages", ())), "megatron-core"}
        verify.check_image(base, facts, added, inputs.source.whole)
        verify.check_torch(facts, made.row, inputs.base.standin)
        verify.check_extensions(facts, [one.wanted.package for one in inputs.extensions])
        verify.check_needs(facts, made.named, "the image")
        note = verify.check_imports(facts, made.row)
        self.progress.close()
        if note:
            self.progress.note(note)
        return facts

    def _document(self, inputs: context.Inputs, image: str, seen: verify.BuildFacts) -> None:
        """Write the documents beside the image, the same whatever name it was built under."""
        record = beside.record(self.client, image)
        made = attest.ImageRecord(
            name=f"{REPOSITORY}:{_tag(inputs)}",
            id=image,
            inputs=inputs,
            wheel=record["wheel"],
            of_base=tuple(record["of_base"]),
        )
        beside.write_documents(made, seen.packages, self.site)

    def _names(self, inputs: context.Inputs) -> list[str]:
        """An image's names: row, release and extras; without the release for the row's own."""
        made = inputs.recipe
        names = [f"{self.repository}:{_tag(inputs)}"]
        if inputs.source.release == made.row.megatron:
            names.append(f"{self.repository}:{made.tag}{suffix(made.extras.asked)}")
        return names

    def _with_key(self, key: str) -> str | None:
        """The ID of the image built from the same inputs, or None.

        Names are given after the checks, so one without a name may never have been checked. What
        a user made from one of ours has its labels too, and isn't it.
        """
        found = self.client.api.images(filters={"label": f"{LABEL}key={key}"})
        named = (str(image["Id"]) for image in found if tags_of(image))
        return next((one for one in named if verify.is_ours(self.client.api.history(one))), None)

    def _discard(self, image: str) -> None:
        """Remove an image that wasn't found right, unless an earlier build gave it a name."""
        with suppress(*engine_errors()):  # without a name it is never used
            if not tags_of(self.client.api.inspect_image(image)):
                self.client.api.remove_image(image, force=True)

    def _tag(self, image: str, names: list[str]) -> None:
        for name in names:
            self.client.api.tag(image, *name.split(":"))


def ground(seen: verify.BuildFacts, base: pins.StartImage, made: Recipe) -> extras_lock.Ground:
    """What a recipe's extras are put on, by what was seen in its base."""
    return extras_lock.ground(base.digest, seen.packages, seen.limits, seen.glibc, made)


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """End the step under way with the block; what engine or system refused becomes our error."""
    try:
        yield
        progress.close()
    except engine_errors() as error:  # these are OSErrors too
        raise EngineError(f"the engine: {getattr(error, 'explanation', None) or error}") from error
    except OSError as error:
        name = error.filename2 or error.filename  # of a copy, the target
        reason, mend = error.strerror or str(error), fetch.remedy_if_full(str(error.strerror))
        if error.errno == errno.ENOENT and "/" not in str(error.filename):
            reason, mend = "no such program", "Install it: a build needs git and tar."
        raise BuildError(f"{name}: {reason}" if name else reason, mend) from error
    finally:
        progress.fail()


def _architectures(request: BuildRequest, made: Recipe) -> str:
    """The GPUs that extensions are compiled for. Raises UsageError where there are none."""
    if not made.extensions and (request.architectures or request.jobs):
        raise UsageError(
            f"{request.tag}: nothing is compiled for GPUs in this row",
            "Leave out --architectures and --jobs: the base has its own extensions.",
        )
    wanted = (request.architectures or " ".join(made.extras.architectures)).split()
    if wrong := [one for one in wanted if not ARCHITECTURE.fullmatch(one)]:
        raise UsageError(
            f"--architectures: {wrong[0]} is no compute capability",
            'Write 9.0 as 90, and several in quotes: --architectures "80 90".',
        )
    return " ".join(wanted)


def labels_of(inputs: context.Inputs) -> dict[str, str]:
    """Labels of ours, and of the OCI image specification; none has a clock or a host in it."""
    at, made, base = inputs.source, inputs.recipe, inputs.base
    return {
        f"{LABEL}row": made.tag,
        f"{LABEL}megatron": at.release,
        **({f"{LABEL}rules": at.rules} if at.rules else {}),
        f"{LABEL}source": at.kind,
        f"{LABEL}whole": str(at.whole).lower(),
        f"{OCI}title": f"Megatron-LM {at.release} on {made.tag}",
        f"{OCI}version": at.release,
        f"{OCI}source": made.named.git.url,
        f"{OCI}revision": at.revision,
        f"{OCI}created": datetime.fromtimestamp(at.epoch, timezone.utc).isoformat(),
        f"{OCI}base.name": base.reference,
        **({f"{OCI}base.digest": base.digest} if base.pinned else {}),
        **({} if inputs.builder.pinned else {f"{LABEL}builder": inputs.builder.reference}),
        **({f"{LABEL}architectures": gpus} if (gpus := inputs.architectures) else {}),
        **({f"{LABEL}extras": " ".join(names)} if (names := made.extras.names) else {}),
    }


def _tag(inputs: context.Inputs) -> str:
    """Row, release and extras as a tag, in which a local version, 0.13.0+mine, has no plus."""
    made, release = inputs.recipe, inputs.source.release.replace("+", "-")
    return f"{made.tag}-{release}{suffix(made.extras.asked)}"


def build_all(
    builds: Builds, requests: list[BuildRequest]
) -> tuple[list[BuiltImage], list[tuple[BuildRequest, LauncherError]]]:
    """Build every request, also after a failed one. Raises UsageError before the first build."""
    built: list[BuiltImage] = []
    failed: list[tuple[BuildRequest, LauncherError]] = []
    for request in requests:
        builds.recipe(request)
    for request in requests:
        try:
            built.append(builds.build(request))
        except LauncherError as error:
            failed.append((request, error))
    return built, failed
