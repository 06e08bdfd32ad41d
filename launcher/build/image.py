"""From a matrix row to a checked, tagged image."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import __version__
from launcher.build import builders, context, fetch, patch, source, verify
from launcher.build.source import MegatronSource
from launcher.errors import BuildError, LauncherError, UsageError
from launcher.matrix.load import find_release, find_row, load_lock, load_matrix
from launcher.matrix.render import dockerfile
from launcher.matrix.schema import Lock, Matrix
from launcher.progress import Progress
from launcher.settings import Settings

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "megatron"
LABEL = "megatron-launchpad."


@dataclass(frozen=True)
class Request:
    """What is asked for: a row, and what departs from it.

    megatron: another release than the row's; checkout: a Megatron-LM folder in place of the
    release's own source; base, builder: images in place of the row's, such as a mirror's.
    """

    tag: str
    megatron: str | None = None
    checkout: Path | None = None
    base: str | None = None
    builder: str | None = None
    no_cache: bool = False


@dataclass(frozen=True)
class Built:
    """An image: its names, its ID, and whether it was there already."""

    names: list[str]
    id: str
    reused: bool


class Builds:
    """Builds images of one matrix on one engine; what several rows share is done once."""

    def __init__(self, client: DockerClient, site: Settings, progress: Progress) -> None:
        self.client = client
        self.site = site
        self.progress = progress
        self.matrix: Matrix = load_matrix(site.matrix)
        self.lock: Lock = load_lock(site.matrix.with_suffix(".lock"))
        self._facts: dict[str, verify.Facts] = {}
        self._sources: dict[tuple[str, str], MegatronSource] = {}

    def build(self, request: Request) -> Built:
        """Build, check and tag one image, or return the one that has the same inputs.

        Raises BuildError, UsageError or EngineError; then nothing is tagged.
        """
        inputs = self._inputs(request)
        names = self._names(request, inputs.source.release)
        key = inputs.key()
        if not request.no_cache and (found := self._with_key(key)):
            self._tag(found, names)
            return Built(names, found, reused=True)
        base = self._check_base(request, inputs)
        image = self._build(inputs, request, self._labels(request, inputs, key))
        try:
            self._check(image, base, inputs)
        except LauncherError:
            self.client.api.remove_image(image, force=True)
            raise
        self._tag(image, names)
        return Built(names, image, reused=False)

    def _inputs(self, request: Request) -> context.Inputs:
        """Resolve a request to exact inputs: image IDs, source, patches, pins, Dockerfile."""
        row = find_row(self.matrix, request.tag)
        at = self._source(request)
        release = find_release(self.matrix, row, at.release)
        root = self.site.matrix.parent
        needs = self.lock.needs[row.abi]
        pins = {"build": needs.build, "runtime": needs.runtime}
        if row.packages:
            pins["packages"] = self.lock.packages[request.tag]
        template = (root / "Dockerfile.template").read_text(encoding="utf-8")
        return context.Inputs(
            tag=request.tag,
            dockerfile=dockerfile(self.matrix, request.tag, template),
            base=self._image_id(request.base or row.base),
            builder=self._image_id(request.builder or self.matrix.builders[row.abi]),
            source=at,
            extension=release.extension,
            patches=tuple(patch.patch_files(root / "patches" / release.patches)),
            pins=pins,
        )

    def _source(self, request: Request) -> MegatronSource:
        """The Megatron source of a request, resolved once for all rows that share it."""
        row = find_row(self.matrix, request.tag)
        if request.checkout is not None:
            version = source.release_of(
                request.checkout, self.matrix, request.megatron, row.megatron
            )
            resolve = partial(source.from_path, request.checkout, version)
            kind = str(request.checkout)
        else:
            version = request.megatron or row.megatron
            release = find_release(self.matrix, row, version)
            kind = row.source if row.source == "git" or release.sdist else "git"
            resolve = {
                "git": partial(source.from_git, version, release, site=self.site),
                "sdist": partial(source.from_sdist, version, site=self.site),
            }[kind]
        if (kind, version) not in self._sources:
            if version not in self.lock.releases:
                raise UsageError(f"matrix.lock has no Megatron {version}", "Run `make lock`.")
            self.progress.step(f"source: Megatron {version} from {kind}")
            self._sources[kind, version] = resolve(locked=self.lock.releases[version])
        return self._sources[kind, version]

    def _image_id(self, reference: str) -> str:
        """The ID of a local image, pulled where it isn't there."""
        from docker.errors import APIError, ImageNotFound

        from launcher.engine.pull import describe_pull_failure

        try:
            return str(self.client.api.inspect_image(reference)["Id"])
        except ImageNotFound:
            self.progress.step(f"pull {reference}")
        try:
            for event in self.client.api.pull(reference, stream=True, decode=True):
                if "error" in event:
                    raise APIError(event["error"], explanation=event["error"])
                self.progress.output(f"{event.get('status', '')} {event.get('progress', '')}")
            return str(self.client.api.inspect_image(reference)["Id"])
        except APIError as error:
            self.progress.fail()
            raise describe_pull_failure(reference, error) from error

    def _check_base(self, request: Request, inputs: context.Inputs) -> verify.Facts:
        """Look into the base, once for each image, and refuse one that isn't the row's."""
        name = request.base or self.matrix.rows[request.tag].base
        if inputs.base not in self._facts:
            self.progress.step(f"look into {name}")
            self._facts[inputs.base] = verify.look(self.client, inputs.base)
            self.progress.close()
        facts = self._facts[inputs.base]
        config = self.client.api.inspect_image(inputs.base)["Config"]
        standin = f"{LABEL}standin" in (config.get("Labels") or {})
        verify.check_base(facts, self.matrix.rows[request.tag], name, standin)
        return facts

    def _build(self, inputs: context.Inputs, request: Request, labels: dict[str, str]) -> str:
        """Write the context and have the engine build it."""
        from launcher.engine.connect import buildkit, cli_environment

        row = self.matrix.rows[request.tag]
        self.progress.step(f"fetch {sum(map(len, inputs.pins.values()))} Python packages")
        wheels = {
            group: fetch.wheels(pins, row.python, self.site) for group, pins in inputs.pins.items()
        }
        self.progress.step(f"patch Megatron {inputs.source.release}")
        args = {
            "BASE_IMAGE": request.base or row.base,
            "BUILDER_IMAGE": request.builder or self.matrix.builders[row.abi],
            "SOURCE_DATE_EPOCH": str(inputs.source.epoch),
        }
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as tar:
            context.write(inputs, wheels, Path(scratch), tar)
            tar.seek(0)
            self.progress.close()
            if command := buildkit(self.client):
                drive = partial(builders.buildkit, command, cli_environment(self.client))
            else:
                drive = partial(builders.classic, self.client)
            return drive(tar, args, labels, self.progress, request.no_cache)

    def _check(self, image: str, base: verify.Facts, inputs: context.Inputs) -> None:
        """Look into the new image and compare it with its base."""
        self.progress.step("check the image")
        facts = verify.look(self.client, image, inputs.extension)
        pins = [pin for group, pins in inputs.pins.items() if group != "build" for pin in pins]
        added = {re.sub(r"[-_.]+", "-", fetch.name_of_pin(pin)).lower() for pin in pins}
        verify.check_image(base, facts, added | {"megatron-core"}, inputs.source.whole)
        self.progress.close()

    def _labels(self, request: Request, inputs: context.Inputs, key: str) -> dict[str, str]:
        return {
            f"{LABEL}row": request.tag,
            f"{LABEL}megatron": inputs.source.release,
            f"{LABEL}source": inputs.source.kind,
            f"{LABEL}whole": str(inputs.source.whole).lower(),
            f"{LABEL}key": key,
            f"{LABEL}version": __version__,
            "org.opencontainers.image.revision": inputs.source.revision,
        }

    def _names(self, request: Request, release: str) -> list[str]:
        """The names an image gets: row and release, and the row alone for its default release."""
        names = [f"{REPOSITORY}:{request.tag}-{release}"]
        if release == self.matrix.rows[request.tag].megatron:
            names.append(f"{REPOSITORY}:{request.tag}")
        return names

    def _with_key(self, key: str) -> str | None:
        """The ID of the image built from the same inputs, or None."""
        found = self.client.api.images(filters={"label": f"{LABEL}key={key}"})
        return str(found[0]["Id"]) if found else None

    def _tag(self, image: str, names: list[str]) -> None:
        for name in names:
            self.client.api.tag(image, *name.split(":"))


def build_all(
    builds: Builds, requests: list[Request]
) -> tuple[list[Built], list[tuple[Request, BuildError]]]:
    """Build every request; a row that fails doesn't keep the others from being built."""
    built, failed = [], []
    for request in requests:
        try:
            built.append(builds.build(request))
        except BuildError as error:
            failed.append((request, error))
    return built, failed
