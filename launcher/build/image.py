"""From a matrix row to a checked, tagged image."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from launcher import __version__
from launcher.build import (
    attest,
    beside,
    builders,
    context,
    extensions,
    fetch,
    patch,
    pins,
    source,
    verify,
)
from launcher.build.source import MegatronSource
from launcher.errors import BuildError, EngineError, LauncherError, UsageError
from launcher.matrix.load import find_release, find_row, load_lock, load_matrix
from launcher.matrix.render import dockerfile
from launcher.matrix.schema import (
    Lock,
    LockedNeeds,
    Matrix,
    Needs,
    Row,
    caution,
    outdated,
    pinned_versions,
)
from launcher.names import LABEL
from launcher.progress import Progress
from launcher.settings import Settings

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "megatron"
OCI = "org.opencontainers.image."  # its annotations: the OCI image specification
ARCHITECTURE = re.compile(r"\d{2,3}[af]?")  # 90 is compute capability 9.0


@dataclass(frozen=True)
class Request:
    """What is asked for: a row, and what departs from it.

    megatron: another release than the row's; checkout: a Megatron-LM folder in place of the
    release's own source; base, builder: images in place of the row's, such as a mirror's;
    architectures, jobs: of a row with extensions, the GPUs they are compiled for (80 90), and how
    many compilers run at a time.
    """

    tag: str
    megatron: str | None = None
    checkout: Path | None = None
    base: str | None = None
    builder: str | None = None
    no_cache: bool = False
    architectures: str | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Built:
    """An image: its names, its ID, and whether it was there already."""

    names: list[str]
    id: str
    reused: bool


class Builds:
    """Builds images of one matrix on one engine; what several rows share is done once.

    `repository` is the part of the images' names before the colon.
    """

    def __init__(
        self,
        client: DockerClient,
        site: Settings,
        progress: Progress,
        repository: str = REPOSITORY,
    ) -> None:
        self.client = client
        self.site = site
        self.progress = progress
        self.repository = repository
        self.matrix: Matrix = load_matrix(site.matrix)
        self.lock: Lock = load_lock(site.matrix.with_suffix(".lock"))
        self.images = pins.Images(client, site, progress, self.lock.images, self.matrix.moving)
        self._facts: dict[str, verify.Facts] = {}
        self._sources: dict[tuple[str, str], MegatronSource] = {}

    def check_request(self, request: Request) -> None:
        """Raise UsageError for what matrix and lock don't have; no engine is asked."""
        with _told(self.progress):
            self._locked("releases", self._release(request))
            self._architectures(request)
            if self.matrix.rows[request.tag].packages:
                self._packages(request)

    def build(self, request: Request) -> Built:
        """Build, check and tag one image, or return the one that has the same inputs.

        Raises BuildError, UsageError or EngineError; then nothing is tagged.
        """
        with _told(self.progress):
            return self._build_or_reuse(request)

    def inputs(self, request: Request) -> context.Inputs:
        """What a request would be built from. Raises as `build` does."""
        with _told(self.progress):
            return self._inputs(request)

    def _build_or_reuse(self, request: Request) -> Built:
        inputs = self._inputs(request)
        names = self._names(request, inputs.source.release)
        key = inputs.key()
        if not request.no_cache and (found := self._with_key(key)):
            self._tag(found, names)
            if not beside.is_kept(found, self.site):
                self._document(request, inputs, found)
            return Built(names, found, reused=True)
        self._caution(request, inputs.source.treated_as)
        base = self._check_base(request, inputs)
        image = self._build(inputs, request, {**inputs.labels, f"{LABEL}key": key})
        try:
            self._check(request, image, base, inputs)
            self._document(request, inputs, image)
        except BaseException:
            self._discard(image)
            raise
        self._tag(image, names)
        return Built(names, image, reused=False)

    def _inputs(self, request: Request) -> context.Inputs:
        """Resolve a request to exact inputs: image IDs, source, patches, pins, Dockerfile."""
        row = find_row(self.matrix, request.tag)
        at = self._source(request)
        release = self.matrix.releases[at.treated_as]
        root = self.site.matrix.parent
        base = self._base(request)
        platform = self._platform(request)
        needs = self._locked("needs", row.compiled_by(platform))
        check_needs(self.matrix.needs, needs)
        packages = {"build": needs.build, "runtime": needs.runtime}
        if row.packages:
            packages["packages"] = self._packages(request)
        if row.extensions:
            packages["extensions"] = needs.extensions
        template = (root / "Dockerfile.template").read_text(encoding="utf-8")
        compiles = self.matrix.builders[row.compiled_by(platform)]
        builder = self._builder(request)
        inputs = context.Inputs(
            dockerfile=dockerfile(self.matrix, request.tag, template),
            base=base.id,
            base_digest=self._origin(request.base, row.base, base.id).digest,
            builder=builder.id,
            builder_digest=self._origin(request.builder, compiles, builder.id).digest,
            source=at,
            extension=release.extension,
            version=at.release if at.kind == "path" else release.version or at.release,
            patches=tuple(patch.patch_files(root / "patches" / release.patches)),
            pins=packages,
            platform=platform,
            interpreter=self._interpreter(row),
            extensions=tuple(self._extension(name) for name in row.extensions),
            architectures=self._architectures(request),
        )
        return replace(inputs, labels=self._labels(request, inputs))

    def _locked(self, part: str, key: str) -> Any:
        """An entry of matrix.lock, which may be older than the row that asks for it."""
        entries = getattr(self.lock, part)
        if key not in entries:
            raise UsageError(f"matrix.lock has no {part} of {key}", "Run `make lock`.")
        return entries[key]

    def _packages(self, request: Request) -> list[str]:
        """The pins of what a base lacks."""
        pins: list[str] = self._locked("packages", request.tag)
        check_pins(request.tag, self.matrix.rows[request.tag], pins)
        return pins

    def _release(self, request: Request) -> str:
        """The release that a request is for. Raises UsageError for one that doesn't fit the row."""
        row = find_row(self.matrix, request.tag)
        version = request.megatron or row.megatron
        if request.checkout is not None:
            version = source.release_of(
                request.checkout, self.matrix, request.megatron, row.megatron
            )
        find_release(self.matrix, row, version)
        return version

    def _source(self, request: Request) -> MegatronSource:
        """The Megatron source of a request, resolved once for all rows that share it."""
        row, version = self.matrix.rows[request.tag], self._release(request)
        release = self.matrix.releases[version]
        if request.checkout is not None:
            resolve = partial(source.from_path, request.checkout, version)
            kind = str(request.checkout)
        else:
            kind = row.source if row.source == "git" or release.sdist else "git"
            resolve = {
                "git": partial(source.from_git, version, release, site=self.site),
                "sdist": partial(source.from_sdist, version, site=self.site),
            }[kind]
        if (kind, version) not in self._sources:
            locked = self._locked("releases", version)
            what = f"Megatron {version} from {kind}" if request.checkout is None else kind
            self.progress.step(f"source: {what}")
            self._sources[kind, version] = found = resolve(locked=locked)
            self.progress.close()
            if found.rules:
                said = f"Megatron {found.release}, built by the rules of {found.rules}"
                self.progress.note(f"{found.at}: {said}")
        return self._sources[kind, version]

    def _base(self, request: Request) -> pins.Image:
        """The image that Megatron is added to."""
        return self.images.find(self.matrix.rows[request.tag].base, request.base)

    def _builder(self, request: Request) -> pins.Image:
        """The image that compiles."""
        return self.images.find(self._compiles(request), request.builder)

    def _compiles(self, request: Request) -> str:
        """The matrix's name of the image that compiles, on the base's platform."""
        key = self.matrix.rows[request.tag].compiled_by(self._platform(request))
        return self.matrix.builders[key]

    def _platform(self, request: Request) -> str:
        """The platform of the base that the engine has. Raises BuildError for none of the row's."""
        image = self.client.api.inspect_image(self._base(request).id)
        row = self.matrix.rows[request.tag]
        platform = f"{image['Os']}/{image['Architecture']}"
        verify.check_platform(platform, row, request.base or row.base)
        return platform

    def _interpreter(self, row: Row) -> Path | None:
        """The archive of the Python that the base lacks."""
        if row.interpreter is None:
            return None
        self.progress.step(f"fetch Python {row.interpreter}")
        found = fetch.archive(self.matrix.interpreters[row.interpreter], self.site)
        self.progress.close()
        return found

    def _extension(self, name: str) -> extensions.ExtensionSource:
        """The source of an extension, resolved."""
        self.progress.step(f"source: {name} from git")
        locked = self._locked("extensions", name)
        found = extensions.from_git(name, self.matrix.extensions[name], locked, self.site)
        self.progress.close()
        return found

    def _architectures(self, request: Request) -> str:
        """The GPUs that extensions are compiled for. Raises UsageError where there are none."""
        row = self.matrix.rows[request.tag]
        if not row.extensions and (request.architectures or request.jobs):
            raise UsageError(
                f"{request.tag}: nothing is compiled for GPUs in this row",
                "Leave out --architectures and --jobs: the base has its own extensions.",
            )
        wanted = (request.architectures or " ".join(row.architectures)).split()
        if wrong := [one for one in wanted if not ARCHITECTURE.fullmatch(one)]:
            raise UsageError(
                f"--architectures: {wrong[0]} is no compute capability",
                'Write 9.0 as 90, and several in quotes: --architectures "80 90".',
            )
        return " ".join(wanted)

    def _caution(self, request: Request, version: str) -> None:
        """Say what is known to be wrong with the release on this row's torch."""
        row = self.matrix.rows[request.tag]
        if because := caution(row, self.matrix.releases[version]):
            self.progress.note(f"Megatron {version} on torch {row.torch}: {because}")

    def _check_base(self, request: Request, inputs: context.Inputs) -> verify.Facts:
        """Look into the base, once for each image, and refuse one that isn't the row's."""
        name = request.base or self.matrix.rows[request.tag].base
        row = self.matrix.rows[request.tag]
        if row.interpreter:
            return verify.Facts(row.python, {})
        if inputs.base not in self._facts:
            self.progress.step(f"look into {name}")
            self._facts[inputs.base] = verify.look(self.client, inputs.base, name)
            self.progress.close()
        facts = self._facts[inputs.base]
        verify.check_base(facts, row, name, self._is_standin(inputs.base))
        return facts

    def _is_standin(self, base: str) -> bool:
        """Whether a base stands in for another in tests, without its torch."""
        return is_standin(self.client.api.inspect_image(base))

    def _build(self, inputs: context.Inputs, request: Request, labels: dict[str, str]) -> str:
        """Write the context and have the engine build it."""
        row = self.matrix.rows[request.tag]
        self.progress.step(f"fetch {sum(map(len, inputs.pins.values()))} Python packages")
        wheels = {
            group: fetch.wheels(some, row.python, self.site, inputs.platform)
            for group, some in inputs.pins.items()
        }
        self.progress.step(f"patch Megatron {inputs.source.release}")
        args = {
            "BASE_IMAGE": self._base(request).name,
            "BUILDER_IMAGE": self._builder(request).name,
            "SOURCE_DATE_EPOCH": str(inputs.source.epoch),
        }
        if inputs.extensions:
            args["CUDA_ARCHITECTURES"] = inputs.architectures
        if request.jobs:
            args["MAX_JOBS"] = str(request.jobs)
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as tar:
            context.write(inputs, wheels, Path(scratch), tar)
            tar.seek(0)
            self.progress.close()
            wanted = builders.Build(tar, args, labels, request.no_cache)
            return builders.build(self.client, wanted, self.progress)

    def _check(
        self, request: Request, image: str, base: verify.Facts, inputs: context.Inputs
    ) -> None:
        """Look into the new image and compare it with its base and its row."""
        self.progress.step("check the image")
        of_base, of_image = (
            self.client.api.inspect_image(one)["RootFS"]["Layers"] for one in (inputs.base, image)
        )
        verify.check_layers(of_base, of_image)
        facts = verify.look(self.client, image, "the image", inputs.extension)
        added: set[str] = {canonicalize_name(fetch.name_of_pin(pin)) for pin in inputs.added}
        verify.check_image(base, facts, added | {"megatron-core"}, inputs.source.whole)
        verify.check_torch(facts, self.matrix.rows[request.tag], self._is_standin(inputs.base))
        verify.check_extensions(facts, [one.wanted.package for one in inputs.extensions])
        self.progress.close()

    def _labels(self, request: Request, inputs: context.Inputs) -> dict[str, str]:
        """Labels of ours, and of the OCI image specification; none has a clock or a host in it."""
        at = inputs.source
        base = self._origin(request.base, self.matrix.rows[request.tag].base, inputs.base)
        builder = self._origin(request.builder, self._compiles(request), inputs.builder)
        return {
            f"{LABEL}row": request.tag,
            f"{LABEL}megatron": at.release,
            **({f"{LABEL}rules": at.rules} if at.rules else {}),
            f"{LABEL}source": at.kind,
            f"{LABEL}whole": str(at.whole).lower(),
            f"{LABEL}version": __version__,
            f"{OCI}title": f"Megatron-LM {at.release} on {request.tag}",
            f"{OCI}version": at.release,
            f"{OCI}source": self.matrix.releases[at.treated_as].git.url,
            f"{OCI}revision": at.revision,
            f"{OCI}created": datetime.fromtimestamp(at.epoch, timezone.utc).isoformat(),
            f"{OCI}base.name": base.reference,
            **({f"{OCI}base.digest": base.digest} if base.pinned else {}),
            **({} if builder.pinned else {f"{LABEL}builder": builder.reference}),
            **({f"{LABEL}architectures": gpus} if (gpus := inputs.architectures) else {}),
        }

    def _origin(self, asked: str | None, reference: str, image: str) -> attest.Origin:
        """What a base or builder is: the locked image, wherever it was pulled from, or its ID."""
        locked = self.lock.images.get(reference)
        if locked and pins.is_locked(self.client.api.inspect_image(image), locked):
            return attest.Origin(reference, locked.digest, pinned=True)
        return attest.Origin(asked or reference, image, pinned=False)

    def _document(self, request: Request, inputs: context.Inputs, image: str) -> None:
        """Write provenance and SBOM beside the image, the same whatever name it was built under."""
        row = self.matrix.rows[request.tag]
        made = attest.Made(
            name=f"{REPOSITORY}:{_tag(request, inputs.source.release)}",
            id=image,
            row=request.tag,
            url=self.matrix.releases[inputs.source.treated_as].git.url,
            base=self._origin(request.base, row.base, inputs.base),
            builder=self._origin(request.builder, self._compiles(request), inputs.builder),
            inputs=inputs,
            wheel=beside.record(self.client, image)["wheel"],
        )
        beside.keep(made, self.site)

    def _names(self, request: Request, release: str) -> list[str]:
        """The names an image gets: row and release, and the row alone for its default release."""
        names = [f"{self.repository}:{_tag(request, release)}"]
        if release == self.matrix.rows[request.tag].megatron:
            names.append(f"{self.repository}:{request.tag}")
        return names

    def _with_key(self, key: str) -> str | None:
        """The ID of the image built from the same inputs, or None.

        Names are given after the checks, so one without a name may never have been checked. What
        a user made from one of ours has its labels too, and isn't it.
        """
        found = self.client.api.images(filters={"label": f"{LABEL}key={key}"})
        named = (str(image["Id"]) for image in found if _is_named(image["RepoTags"]))
        return next((one for one in named if verify.is_ours(self.client.api.history(one))), None)

    def _discard(self, image: str) -> None:
        """Remove an image that wasn't found right, unless an earlier build gave it a name."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        with suppress(DockerException, RequestException):  # without a name it is never used
            if not _is_named(self.client.api.inspect_image(image)["RepoTags"]):
                self.client.api.remove_image(image, force=True)

    def _tag(self, image: str, names: list[str]) -> None:
        for name in names:
            self.client.api.tag(image, *name.split(":"))


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """End the step under way with the block; what engine or system refused becomes our error."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
        progress.close()
    except (DockerException, RequestException) as error:  # these are OSErrors too
        raise EngineError(f"the engine: {getattr(error, 'explanation', None) or error}") from error
    except OSError as error:
        raise _refused_by_system(error) from error
    finally:
        progress.fail()


def _refused_by_system(error: OSError) -> BuildError:
    """A missing program, a full disk, a folder that can't be written."""
    name = error.filename2 or error.filename  # of a copy, the target
    what = f"{name}: " if name else ""
    if error.errno == errno.ENOENT and "/" not in str(error.filename):
        return BuildError(f"{what}no such program", "Install it: a build needs git and tar.")
    reason = error.strerror or str(error)
    return BuildError(f"{what}{reason}", fetch.remedy_if_full(reason))


def check_needs(needs: Needs, locked: LockedNeeds) -> None:
    """Raise UsageError where the lock of all rows' needs is older than what the matrix asks for."""
    for part, requirements in needs:
        _check_age(f"the matrix's {part} needs", requirements, getattr(locked, part))


def _check_age(what: str, requirements: Sequence[str], pins: Sequence[str]) -> None:
    if wanted := outdated(requirements, pins):
        raise UsageError(
            f"matrix.lock is older than {what}: {', '.join(wanted)}", "Run `make lock`."
        )


def check_pins(tag: str, row: Row, pins: Sequence[str]) -> None:
    """Raise UsageError where the lock of a row's packages is older than what the row asks for."""
    _check_age(f"the packages of {tag}", row.packages, pins)
    torch = pinned_versions(pins).get("torch", row.torch)
    if not torch.startswith(row.torch):
        raise UsageError(
            f"{tag}: the row says torch {row.torch}, and matrix.lock has {torch}",
            "Name the same torch in the row's `packages`, then run `make lock`.",
        )


def _tag(request: Request, release: str) -> str:
    """Row and release as a tag, in which a local version, 0.13.0+mine, has no plus."""
    return f"{request.tag}-{release.replace('+', '-')}"


def is_standin(image: dict[str, Any]) -> bool:
    """Whether an inspected image is one that stands in where no registry is in reach."""
    return f"{LABEL}standin" in (image["Config"].get("Labels") or {})


def _is_named(names: list[str] | None) -> bool:
    return any(name != "<none>:<none>" for name in names or [])


def build_all(
    builds: Builds, requests: list[Request]
) -> tuple[list[Built], list[tuple[Request, LauncherError]]]:
    """Build every request; a row that fails doesn't keep the others from being built.

    Raises UsageError, before anything is built, where one of them can't be.
    """
    built: list[Built] = []
    failed: list[tuple[Request, LauncherError]] = []
    for request in requests:
        builds.check_request(request)
    for request in requests:
        try:
            built.append(builds.build(request))
        except LauncherError as error:
            failed.append((request, error))
    return built, failed
