"""What a build starts from, leaves and reuses, and what it says when engine or system refuse."""

from __future__ import annotations

import errno
import io
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound, NotFound
from requests.exceptions import ReadTimeout

from launcher.base.errors import BuildError, EngineError, LauncherError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import attest, image, sbom, verify
from launcher.images.builder.image import BuildRequest, Builds, build_all
from launcher.images.matrix.locked import LockedImage, LockedPlatform
from launcher.images.matrix.matrix_file import find_release, load_matrix
from launcher.images.matrix.recipe import recipe
from launcher.images.matrix.schema import AMD64
from launcher.images.oci import registry
from launcher.images.oci.registry import ImageDigests
from launcher.images.sources import pins
from launcher.tools.trials.cell import Stages
from tests.images.builder.conftest import INFO
from tests.images.builder.made import BASE, SOURCES, inputs_of, made, sha

pytestmark = pytest.mark.usefixtures("no_registry")


INDEX, MANIFEST, CONFIG, OTHER = sha("a"), sha("b"), sha("c"), sha("d")


@dataclass
class Engine:
    """An engine's images by ID, and the registry that it pulls from: digests by name.

    derived: the images that somebody made from one of ours
    """

    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    registry: dict[str, str] = field(default_factory=dict)
    pulled: list[str] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    timeout: int = 60

    def has(self, id: str, *tags: str, digests: tuple[str, ...] = ()) -> Engine:
        self.held[id] = {"Id": id, "RepoTags": [*tags], "RepoDigests": [*digests]}
        return self

    def inspect_image(self, name: str) -> dict[str, Any]:
        if " " in name:
            raise APIError("invalid reference format", explanation="invalid reference format")
        for one in self.held.values():
            if name in (one["Id"], *one["RepoTags"], *one["RepoDigests"]):
                return one
        raise ImageNotFound(name)

    def inspect_distribution(self, name: str) -> dict[str, Any]:
        if name not in self.registry:
            raise NotFound("404", explanation="manifest unknown")
        return {"Descriptor": {"digest": self.registry[name]}}

    def pull(self, name: str, stream: bool, decode: bool) -> list[dict[str, str]]:
        self.pulled.append(name)
        repository, _, digest = name.partition("@")
        if not digest and name in self.registry:
            digest = self.registry[name]
            self.has(OTHER, name, digests=(f"{repository.rpartition(':')[0]}@{digest}",))
        elif digest in self.registry.values():
            self.has(CONFIG if digest == INDEX else OTHER, digests=(name,))
        else:
            return [{"error": "manifest unknown"}]
        return [{"status": "Pull complete"}]

    def tag(self, id: str, repository: str, tag: str) -> None:
        for one in self.held.values():
            one["RepoTags"] = [n for n in one["RepoTags"] if n != f"{repository}:{tag}"]
        self.held[id]["RepoTags"].append(f"{repository}:{tag}")

    def images(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        return list(self.held.values())

    def history(self, image: str) -> list[dict[str, Any]]:
        last = "RUN pip install more" if image in self.derived else "COPY /stage/ / # buildkit"
        return [{"CreatedBy": last}, {"CreatedBy": "COPY /stage/ / # buildkit"}]

    def remove_image(self, image: str, force: bool) -> None:
        del self.held[image]


def builds(site: Settings, engine: Engine) -> Builds:
    return Builds(SimpleNamespace(api=engine), site, Progress(io.StringIO()))


def test_an_image_without_a_name_or_made_from_ours_is_not_reused(empty_site: Settings) -> None:
    """A build that ended before its checks left it."""
    engine = Engine().has("sha256:a").has("sha256:b", "<none>:<none>").has("sha256:c")
    engine.held["sha256:c"]["RepoTags"] = None
    assert builds(empty_site, engine)._with_key("key") is None
    engine.has("sha256:d", "megatron:cpu")
    assert builds(empty_site, engine)._with_key("key") == "sha256:d"
    engine = Engine().has("sha256:a", "mine:1").has("sha256:b", "megatron:cpu")
    engine.derived = {"sha256:a"}
    assert builds(empty_site, engine)._with_key("key") == "sha256:b"
    engine.derived = {"sha256:a", "sha256:b"}
    assert builds(empty_site, engine)._with_key("key") is None


@pytest.mark.parametrize("end", [KeyboardInterrupt(), BuildError("not right")])
def test_an_image_whose_check_did_not_end_is_removed(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    engine = Engine().has("sha256:new")
    building = builds(empty_site, engine)

    def check(*_: object) -> None:
        raise end

    inputs = inputs_of(SOURCES["git"])
    monkeypatch.setattr(building, "inputs", lambda request: inputs)
    monkeypatch.setattr(building, "_look_into_base", lambda *_: verify.BuildFacts("3.10", {}))
    monkeypatch.setattr(verify, "check_base", lambda *_: None)
    monkeypatch.setattr(building, "_build", lambda *_: "sha256:new")
    monkeypatch.setattr(building, "_check", check)
    with pytest.raises(type(end)):
        building.build(BuildRequest("cpu"))
    assert engine.held == {}
    engine.has("sha256:new", "megatron:cpu")  # an earlier build has named it
    building._discard("sha256:new")
    assert engine.held


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.12.1+cpu", None])
@pytest.mark.parametrize("standin", [True, False])
def test_the_torch_of_a_built_image_is_compared_with_its_row_s(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, torch: str | None, standin: bool
) -> None:
    engine = Engine().has("i").has(BASE.id)
    for one in engine.held.values():
        one["RootFS"] = {"Layers": ["a"]}
    building = builds(empty_site, engine)
    facts = verify.BuildFacts("3.11", {"torch": torch} if torch else {})
    monkeypatch.setattr(verify, "look", lambda *_: facts)
    cpu = recipe(building.matrix, building.lock, "cpu")
    inputs = inputs_of(SOURCES["sdist"], recipe=cpu, base=replace(BASE, standin=standin))
    right = torch == "2.13.0+cpu" or (torch is None and standin)
    said = re.escape(f"the image has torch {torch or 'missing'}, and the row says 2.13.0+cpu")
    with nullcontext() if right else pytest.raises(BuildError, match=said):
        building._check("i", verify.BuildFacts("3.11", {}), inputs)
    facts = replace(facts, unimported=["megatron.core", "ModuleNotFoundError: nowhere"])
    with pytest.raises(BuildError, match="can't be imported" if right else said):
        building._check("i", verify.BuildFacts("3.11", {}), inputs)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (APIError("x", explanation="conflict"), EngineError, "conflict"),
        (ReadTimeout("no answer"), EngineError, "no answer"),
        (FileNotFoundError(errno.ENOENT, "No such file", "git"), BuildError, "needs git and tar"),
        (OSError(errno.ENOSPC, "No space left on device"), BuildError, "TMPDIR"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), BuildError, "/cache: Perm"),
    ],
)
def test_what_engine_or_system_refuse_is_told_and_ends_the_step(
    error: Exception, kind: type[Exception], said: str
) -> None:
    out = io.StringIO()
    progress = Progress(out)

    def refuse() -> None:
        with image._told(progress):
            progress.step("patch")
            raise error

    with pytest.raises(kind, match=said):
        refuse()
    progress.step("next")
    assert out.getvalue() == "patch: failed\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("the registry has no such image (404)"), 125),
        (UsageError("X: not an image's name"), 2),
    ],
)
def test_a_row_that_fails_does_not_keep_others_from_being_built(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    building = builds(empty_site, Engine())
    made = image.BuiltImage(["megatron:cpu"], "sha256:a", reused=False)

    def build(request: BuildRequest) -> image.BuiltImage:
        if request.tag == "24.02":
            raise error
        return made

    monkeypatch.setattr(building, "build", build)
    built, failed = build_all(building, [BuildRequest("24.02"), BuildRequest("cpu")])
    assert built == [made]
    assert [(request.tag, one.exit_code) for request, one in failed] == [("24.02", code)]


def test_nothing_is_built_where_one_of_several_rows_cannot_be(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = builds(empty_site, Engine())
    asked: list[BuildRequest] = []
    monkeypatch.setattr(building, "build", asked.append)
    with pytest.raises(UsageError, match=r"Megatron 0\.16\.1 requires"):
        build_all(building, [BuildRequest("cpu", "0.16.1"), BuildRequest("24.02", "0.16.1")])
    with pytest.raises(UsageError, match=r"9\.0 is no compute capability"):
        build_all(
            building, [BuildRequest("cuda-12.4"), BuildRequest("cuda-12.4", architectures="9.0")]
        )
    building.lock = building.lock.model_copy(update={"packages": {}})
    with pytest.raises(UsageError, match=r"matrix\.lock has no packages of cpu"):
        build_all(building, [BuildRequest("24.10"), BuildRequest("cpu")])
    assert not asked


def test_a_release_that_is_none_is_told_so_of_a_checkout_too(
    empty_site: Settings, tmp_path: Path
) -> None:
    """A bare repository is of any release."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "HEAD").touch()
    building = builds(empty_site, Engine())
    with pytest.raises(UsageError, match=r"no Megatron release '0\.9\.9' in the matrix"):
        building.recipe(BuildRequest("cpu", "0.9.9", tmp_path))


def test_a_checkout_of_another_patch_release_is_written_as_what_it_is(
    empty_site: Settings, tmp_path: Path
) -> None:
    """Image, labels, build.json, provenance and SBOM said 0.13.1 of a checkout of 0.13.0."""
    checkout = tmp_path / "Megatron-LM"
    (checkout / "megatron/core").mkdir(parents=True)
    (checkout / "megatron/core/package_info.py").write_text(INFO.format(minor=13, patch=0))
    said = io.StringIO()
    building = Builds(SimpleNamespace(), empty_site, Progress(said))
    building.images = SimpleNamespace(find=lambda *_: BASE, platform=lambda _: BASE.platform)
    inputs = building.inputs(BuildRequest("cpu", checkout=checkout))
    assert f"{checkout}: Megatron 0.13.0, built by the rules of 0.13.1" in said.getvalue()
    assert [path.parent.name for path in inputs.patches] == ["0.13.1", "0.13.1"]
    assert building._names(inputs) == ["megatron:cpu-0.13.0"]
    own = replace(inputs, source=replace(inputs.source, release="0.13.0+mine"))
    assert building._names(own) == ["megatron:cpu-0.13.0-mine"]
    told = {name.rpartition(".")[2]: value for name, value in inputs.labels.items()}
    assert (told["megatron"], told["rules"], told["version"]) == ("0.13.0", "0.13.1", "0.13.0")
    assert told["title"] == "Megatron-LM 0.13.0 on cpu"
    record = inputs.record()
    assert (record["release"], record["version"], record["rules"]) == ("0.13.0", "0.13.0", "0.13.1")
    image = made("path", inputs=inputs, name="megatron:cpu-0.13.0")
    documents = json.dumps(attest.provenance(image)), sbom.sbom(image)
    for document in documents:
        assert "0.13.0" in document
        left = document.replace("patches/0.13.1/", "").replace("rules of 0.13.1", "")
        assert "0.13.1" not in left.replace('"rules": "0.13.1"', "")


@pytest.mark.parametrize(
    ("word", "nearest"), [("0.13.0", "0.13.1"), ("0.12.1", "0.12.3"), ("0.9.1", "0.9.0")]
)
def test_the_nearest_release_is_of_the_same_series(word: str, nearest: str) -> None:
    """0.19.0 was offered in place of 0.13.0."""
    matrix = load_matrix()
    with pytest.raises(UsageError, match=f"Did you mean '{nearest}'"):
        find_release(matrix, matrix.rows["cpu"], word)


NGC = "nvcr.io/nvidia/pytorch:24.10-py3"
REPOSITORY = "nvcr.io/nvidia/pytorch"


LOCKED = LockedImage(
    digest=INDEX, platforms={"linux/amd64": LockedPlatform(manifest=MANIFEST, config=CONFIG)}
)


@dataclass
class Found:
    """What a search gave and said."""

    image: pins.StartImage
    said: str


def shown(image: pins.StartImage) -> tuple[str, str]:
    return image.name, image.id


def client(engine: Engine) -> Any:
    return SimpleNamespace(api=engine, version=lambda: {"Os": "linux", "Arch": "amd64"})


def find(
    engine: Engine,
    site: Settings,
    chosen: str | None = None,
    locked: LockedImage | None = LOCKED,
    moving: bool = False,
    reference: str = NGC,
    platform: str = AMD64,
) -> Found:
    out = io.StringIO()
    images = pins.StartImages(
        client(engine),
        site,
        Progress(out),
        {reference: locked} if locked else {},
        [reference] if moving else [],
    )
    first = images.find(reference, chosen, platform)
    pulled = len(engine.pulled)
    assert images.find(reference, chosen, platform) == first
    assert len(engine.pulled) == pulled
    return Found(first, out.getvalue())


@pytest.mark.parametrize("id", [INDEX, MANIFEST, CONFIG])
def test_the_locked_image_in_the_engine_is_used_as_it_is(empty_site: Settings, id: str) -> None:
    """Loaded from a file: no digest. An ID is the configuration's, or containerd's store's."""
    engine = Engine().has(id, NGC)
    found = find(engine, empty_site)
    assert shown(found.image) == (NGC, id)
    assert not engine.pulled
    assert found.said == ""
    digests = (f"mirror/x@{sha('e')}", f"{REPOSITORY}@{INDEX}")  # one that was pulled is named so
    pulled = find(Engine().has(OTHER, NGC, digests=digests), empty_site)
    assert shown(pulled.image) == (f"{REPOSITORY}@{INDEX}", OTHER)


def test_a_moving_tag_s_image_loaded_without_a_name_gets_one(empty_site: Settings) -> None:
    engine = Engine().has(CONFIG).has(OTHER, NGC)
    found = find(engine, empty_site, moving=True)
    assert shown(found.image) == (f"{REPOSITORY}:locked-cccccccccccc", CONFIG)
    assert engine.inspect_image(found.image.name)["Id"] == CONFIG


def test_an_image_that_nobody_has_is_told_as_a_pull_s_failure(empty_site: Settings) -> None:
    for locked in (LOCKED, None):
        with pytest.raises(EngineError, match=r"no such image \(404\)"):
            find(Engine(), empty_site, locked=locked)
    with pytest.raises(UsageError, match="Foo Bar: not an image's name"):
        find(Engine(), empty_site, chosen="Foo Bar")


def test_without_a_lock_the_tag_decides_and_that_is_told(empty_site: Settings) -> None:
    for engine in (Engine().has(OTHER, NGC), Engine(registry={NGC: OTHER})):
        found = find(engine, empty_site, locked=None)
        assert shown(found.image) == (NGC, OTHER)
        assert f"UNPINNED {NGC}: matrix.lock has no digest of it" in found.said
        assert found.said.count("UNPINNED") == 1
        assert OTHER in found.said
        assert "make lock" in found.said


def test_a_name_with_a_digest_in_it_is_pinned_by_itself(empty_site: Settings) -> None:
    reference = f"{REPOSITORY}@{INDEX}"
    engine = Engine(registry={NGC: INDEX})
    found = find(engine, empty_site, locked=None, reference=reference)
    assert shown(found.image) == (reference, CONFIG)
    assert "UNPINNED" not in found.said


def test_a_user_s_own_choice_is_taken_and_told_unless_it_is_the_locked_image(
    empty_site: Settings,
) -> None:
    engine = Engine().has(OTHER, "own:1")
    found = find(engine, empty_site, chosen="own:1")
    assert found.image == pins.StartImage("own:1", OTHER, "own:1", OTHER, pinned=False)
    assert "UNPINNED own:1: not the locked image" in found.said
    assert "hold it" not in found.said  # no registry has it, as far as the engine knows
    engine = Engine().has(OTHER, "own:1", digests=(f"own@{OTHER}",))
    found = find(engine, empty_site, chosen="own:1")
    assert f"To hold it, name it by its digest: own@{OTHER}" in found.said
    engine = Engine().has(OTHER, "mirror/x:1", digests=(f"mirror/x@{INDEX}",))
    found = find(engine, empty_site, chosen="mirror/x:1")
    assert found.image == pins.StartImage(f"mirror/x@{INDEX}", OTHER, NGC, INDEX, pinned=True)
    assert found.said == ""


ARM64 = "linux/arm64"


@dataclass
class TwoPlatforms(Engine):
    """A registry that has the second image for arm64, by its own digest."""

    def has(self, id: str, *tags: str, digests: tuple[str, ...] = ()) -> Engine:
        super().has(id, *tags, digests=digests)
        self.held[id]["Architecture"] = "arm64" if id == OTHER else "amd64"
        return self

    def resolve(self, reference: str, platform: str) -> ImageDigests:
        assert (reference.partition("@")[0].rpartition(":")[0] or REPOSITORY) == REPOSITORY
        assert platform == ARM64
        return ImageDigests(INDEX, MANIFEST, OTHER)


@pytest.mark.parametrize("locked", [None, LOCKED])
@pytest.mark.parametrize("there", [False, True])
def test_an_image_for_another_platform_stands_beside_the_engines_own(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, locked: LockedImage | None, there: bool
) -> None:
    """`docker pull --platform` had moved the tag, and the next build for this machine took it."""
    engine = TwoPlatforms(registry={NGC: INDEX, "manifest": MANIFEST})
    if there:
        engine.has(CONFIG, NGC, digests=(f"{REPOSITORY}@{INDEX}",))
    both = {AMD64: LockedPlatform(manifest=sha("f"), config=CONFIG)}
    both[ARM64] = LockedPlatform(manifest=MANIFEST, config=OTHER)
    whole = locked and LockedImage(digest=INDEX, platforms=both)
    monkeypatch.setattr(registry, "resolve", engine.resolve)
    found = find(engine, empty_site, locked=whole, platform=ARM64).image
    assert engine.pulled == [f"{REPOSITORY}@{MANIFEST}"]
    assert (found.id, found.platform) == (OTHER, ARM64)
    assert engine.inspect_image(found.name)["Id"] == OTHER
    assert engine.inspect_image(f"{NGC}-arm64")["Id"] == OTHER
    monkeypatch.setattr(registry, "resolve", None)  # it is needed no more
    assert find(engine, empty_site, locked=whole, platform=ARM64).image == found
    assert len(engine.pulled) == 1
    if there:
        own = find(engine, empty_site, locked=whole).image
        assert (own.id, own.platform) == (CONFIG, AMD64)


def test_a_row_for_another_machine_is_refused_before_its_base_is_pulled(
    empty_site: Settings,
) -> None:
    """20 GB were pulled first."""
    engine = Engine(registry={NGC: INDEX})
    there = {"Os": "linux", "Arch": "arm64"}
    grace: Any = SimpleNamespace(api=engine, version=lambda: there)
    building = Builds(grace, empty_site, Progress(io.StringIO()))
    with pytest.raises(BuildError, match=r"is for linux/arm64, and the row is for linux/amd64"):
        building._start(BuildRequest("24.10"))
    assert not engine.pulled


STANDIN = "megatron-standin-base:cp311"


@pytest.mark.parametrize(
    ("tag", "there", "labelled", "chosen", "taken"),
    [
        ("cpu", True, True, None, True),
        ("cpu", False, True, None, False),
        ("cpu", True, False, None, False),  # somebody else's, of that name
        ("cpu", True, True, "mine:1", False),
        ("24.10", True, True, None, False),  # its torch is the base's
    ],
)
def test_the_base_that_the_demo_made_stands_in_for_one_that_nobody_can_pull(
    empty_site: Settings, tag: str, there: bool, labelled: bool, chosen: str | None, taken: bool
) -> None:
    """`image build cpu` failed on the machine on which `make demo` had just built that image."""
    engine, out = Engine(), io.StringIO()
    row = load_matrix().rows[tag]
    if there:
        engine.has(OTHER, f"megatron-standin-base:{row.abi}")
        labels = {"megatron-launchpad.standin": "debian-bookworm"} if labelled else {}
        engine.held[OTHER]["Config"] = {"Labels": labels}
    building = Builds(client(engine), empty_site, Progress(out), standin=True)
    if not taken:
        hint = tag == "cpu" and chosen is None
        with pytest.raises(EngineError) as caught:
            building._start(BuildRequest(tag, base=chosen))
        assert ("`make demo`" in caught.value.remedy) == hint
        return
    base, builder = building._start(BuildRequest(tag))
    assert (base.name, builder.name) == (STANDIN, STANDIN)
    assert base.standin
    assert f"{row.base}: " in out.getvalue()
    assert f"{STANDIN}, which `make demo` made, stands in for it" in out.getvalue()
    demo = building._start(BuildRequest(tag, base=STANDIN, builder=STANDIN))
    assert demo == (base, builder)  # so the image is the demo's
    building.standin = False  # as in `image verify`, which compares with what it was built from
    with pytest.raises(EngineError):
        building._start(BuildRequest(tag))


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [(Engine().has(OTHER, NGC), None), (Engine(), None), (Engine(), "Foo Bar")],
    ids=["moved", "unreachable", "no-name"],
)
def test_an_image_that_is_not_found_is_none_of_the_source_s_faults(
    empty_site: Settings, engine: Engine, chosen: str | None
) -> None:
    """A build has resolved its source by then, and `matrix compat` tells the stage that fails."""
    progress = Stages(lambda told: None, io.StringIO())
    progress.step("source: Megatron 0.9.0 from git")
    assert progress.stage == "fetch"
    images = pins.StartImages(client(engine), empty_site, progress, {NGC: LOCKED}, [])
    with pytest.raises(LauncherError):
        images.find(NGC, chosen, AMD64)
    assert progress.stage == "pull"
    for word, stage in (("patch", "patch"), ("build [wheel 2/3]", "compile"), ("check", "import")):
        progress.step(word)
        assert progress.stage == stage
