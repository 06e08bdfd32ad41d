"""Images pushed and pulled, with what is said of them and their documents, by a registry."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from launcher.build import beside
from launcher.cli.transfer import pull as pull_command
from launcher.errors import EngineError, UsageError
from launcher.images import images, referrers, remote
from launcher.images.remote import Carried
from launcher.matrix.schema import LockedImage, LockedPlatform
from launcher.oci.layout import sha256
from launcher.oci.registry import BLOB, Resolved
from launcher.screen import Progress
from launcher.settings import Settings
from tests.build.made import IMAGE, WHEEL, made
from tests.oci import fake_registry
from tests.oci.fake_registry import OCI_INDEX, OCI_MANIFEST, Fake

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
NAME = "registry.example:5000/team/megatron:24.10"
PUSHED = [
    {"status": "The push refers to repository [x]"},
    {"status": "Preparing", "id": "111111111111"},
    {"status": "Pushing", "id": "111111111111", "progressDetail": {"current": 5, "total": 2000000}},
    {"status": "Pushing", "id": "111111111111", "progressDetail": {"current": 2500000}},
    {"status": "Layer already exists", "id": "222222222222"},
    {"status": "Pushed", "id": "111111111111"},
    {"status": f"24.10: digest: {A} size: 1"},
    {"aux": {"Tag": "24.10", "Digest": A, "Size": 1}},
]


class Engine:
    """Of arm64. Pushes and pulls what it is told to; the registry has `there` under every name.

    asks: it can ask registries for a digest, which Podman can't
    """

    def __init__(self, events: list[dict[str, Any]], there: str, asks: bool = True) -> None:
        self.there, self.events = there, events
        self.tags: list[tuple[str, str]] = []
        self.pulled: list[tuple[str, str]] = []
        self.api = SimpleNamespace(
            tag=lambda image, repository, tag: self.tags.append((repository, tag)),
            push=lambda *args, **more: iter(self.events),
            pull=self._pull,
            inspect_distribution=self._ask,
            inspect_image=lambda name: {"Id": C, "Os": "linux", "Architecture": "arm64"},
            timeout=60,
        )
        self.asks = asks

    def version(self) -> dict[str, str]:
        return {"Os": "linux", "Arch": "arm64"}

    def _ask(self, name: str) -> dict[str, Any]:
        if not self.asks:
            raise APIError("x", explanation="dial tcp: connection refused")
        return {"Descriptor": {"digest": self.there}}

    def _pull(self, repository: str, tag: str, **more: object) -> Iterator[dict[str, Any]]:
        self.pulled.append((repository, tag))
        return iter(self.events)


class Registry:
    """What is asked of it: each name, and the platform. It has A, for arm64 alone, or nothing."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.asked: list[tuple[str, str]] = []

    def resolve(self, reference: str, platform: str = "linux/amd64") -> Resolved:
        self.asked.append((reference, platform))
        if self.empty or platform != "linux/arm64":
            raise EngineError("nothing here")
        return Resolved(A, B, C)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, where it is asked directly."""
    asked = Registry()
    monkeypatch.setattr("launcher.oci.registry.resolve", asked.resolve)
    return asked


def test_a_push_after_which_the_registry_has_another_image_is_told_with_both_digests() -> None:
    with pytest.raises(remote.OtherImageError) as caught:
        remote.push(Engine(PUSHED, B), C, NAME, Progress(io.StringIO()))
    assert A in str(caught.value)
    assert B in str(caught.value)


def test_what_an_engine_cannot_ask_is_asked_of_the_registry(registry: Registry) -> None:
    podman = Engine([], A, asks=False)
    assert remote.push(podman, C, NAME, Progress(io.StringIO())).digest == A
    assert remote.pull(podman, NAME, Progress(io.StringIO()), [A]).digest == A
    assert registry.asked == 2 * [(NAME, "linux/arm64")]


@pytest.mark.parametrize("expected", [A, B, C])
def test_a_pull_takes_any_digest_that_the_image_is_known_by(
    registry: Registry, expected: str
) -> None:
    """What is compared is what is pulled: that digest, wherever the tag is by now."""
    engine = Engine([], A)
    pulled = remote.pull(engine, NAME, Progress(io.StringIO()), [expected], "megatron:24.10")
    assert pulled == remote.Carried(NAME, A, C)
    assert engine.pulled == [("registry.example:5000/team/megatron", A)]
    assert engine.tags == [("registry.example:5000/team/megatron", "24.10"), ("megatron", "24.10")]
    by_digest = (f"registry.example:5000/team/megatron@{A}", "linux/arm64")
    assert registry.asked == ([] if expected == A else [by_digest])


@pytest.mark.parametrize("move", [partial(remote.push, image=C, remote=NAME), None])
@pytest.mark.parametrize(
    ("events", "asks", "said"),
    [
        (
            [{"error": "denied: requested access to the resource is denied"}],
            True,
            "docker login re",
        ),
        ([{"error": "filesystem layer verification failed for digest"}], True, "verification fai"),
        ([], False, "can't be reached"),
    ],
)
def test_what_engine_or_registry_refuse_is_told_and_a_pull_names_nothing(
    registry: Registry, move: Any, events: list[dict[str, Any]], asks: bool, said: str
) -> None:
    registry.empty, engine = True, Engine(events, A, asks)
    with pytest.raises(EngineError) as caught:
        (move or partial(remote.pull, remote=NAME))(client=engine, progress=Progress(io.StringIO()))
    assert said in str(caught.value)
    assert move or not engine.tags


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("prefix", [None, "registry.example/team"])
def test_a_locked_image_comes_from_its_mirror_or_from_the_registry_that_is_named(
    monkeypatch: pytest.MonkeyPatch, moves: bool, prefix: str | None
) -> None:
    name = "nvcr.io/nvidia/pytorch:24.10-py3"
    locked = LockedImage(digest=C, platforms={"linux/amd64": LockedPlatform(manifest=B, config=A)})
    matrix = SimpleNamespace(rows={}, moving=[name] if moves else [])
    asked: list[tuple[str, list[str], str | None]] = []

    def pull(
        client: object, there: str, progress: Progress, expected: Sequence[str], own: str | None
    ) -> remote.Carried:
        asked.append((there, list(expected), own))
        return remote.Carried(there, A, C)

    monkeypatch.setattr("launcher.matrix.load.load_matrix", lambda: matrix)
    monkeypatch.setattr(
        "launcher.matrix.load.load_lock", lambda path: SimpleNamespace(images={name: locked})
    )
    monkeypatch.setattr("launcher.engine.connect.connect", lambda timeout: None)
    monkeypatch.setattr(remote, "pull", pull)
    monkeypatch.setattr("launcher.images.referrers.pull", lambda *arguments: None)
    monkeypatch.setenv("LAUNCHER_IMAGE_MIRRORS", "nvcr.io=mirror.example/nvcr")
    pull_command(Namespace(image=name, registry=prefix, digest=None))
    mirror = "mirror.example/nvcr/nvidia/pytorch"
    by_default = f"{mirror}@{C}" if moves else f"{mirror}:24.10-py3"
    assert asked == [(f"{prefix}/{name}" if prefix else by_default, [C, A, B], name)]


@pytest.mark.parametrize(
    ("name", "prefix", "there"),
    [
        ("megatron:24.10", "registry.example/team/", "registry.example/team/megatron:24.10"),
        ("registry.example/x:1", None, "registry.example/x:1"),
        ("localhost/x:1", None, "localhost/x:1"),
        ("megatron:24.10", None, None),  # Docker Hub is never meant by default
        ("team/megatron:24.10", None, None),
    ],
)
def test_a_name_at_a_registry(name: str, prefix: str | None, there: str | None) -> None:
    with nullcontext() if there else pytest.raises(UsageError, match="names no registry"):
        assert remote.remote_name(name, prefix) == there
    assert images.digest("a" * 64) == images.digest(A) == A
    with pytest.raises(UsageError, match="isn't a digest"):
        images.digest("sha256:12")


fake = fake_registry.fake
OURS = [{"CreatedBy": "COPY /stage/ / # buildkit"}]
"""The history of an image that we built."""


class Named:
    """Has the image."""

    def __init__(self, history: list[dict[str, str]]) -> None:
        self.api = SimpleNamespace(history=lambda image: history)


@pytest.fixture
def documents(empty_site: Settings) -> dict[str, bytes]:
    """What a build has put beside the image; it isn't there any more."""
    beside.keep(made(), empty_site)
    found = beside.texts(IMAGE, empty_site)
    for title in found:
        (beside.folder(IMAGE, empty_site) / title).unlink()
    return found


@pytest.fixture(autouse=True)
def _record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"wheel": {"sha256": WHEEL}}
    monkeypatch.setattr(beside, "record", lambda client, image, name: record)


def carried(fake: Fake) -> Carried:
    """An image that the registry has."""
    manifest = json.dumps({"schemaVersion": 2, "config": {"digest": IMAGE}}).encode()
    digest = fake.add("manifests", manifest, "1", of_type=OCI_MANIFEST)
    return Carried(f"{fake.reference}:1", digest, IMAGE)


def push(image: Carried, documents: dict[str, bytes]) -> str:
    shown = io.StringIO()
    referrers.push(image, documents, Progress(shown))
    return shown.getvalue()


def pull(image: Carried, site: Settings, history: list[dict[str, str]] = OURS) -> str:
    shown = io.StringIO()
    referrers.pull(Named(history), image, site, Progress(shown))  # type: ignore[arg-type]
    return shown.getvalue()


@pytest.mark.parametrize("token", ["", "for all"])
@pytest.mark.parametrize("lists", [False, True])
def test_documents_are_put_beside_the_image_and_come_with_it(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes], lists: bool, token: str
) -> None:
    fake.lists, fake.token = lists, token
    if token:  # an upload's place may be told in full
        fake.uploads = f"http://{fake.address}/uploads/1"
    image = carried(fake)
    assert push(image, {}) == pull(image, empty_site, [{"CreatedBy": "RUN make"}]) == ""
    assert fake.seen == []  # without documents, or of an image that we did not build
    assert push(image, documents) == "  with provenance.json, sbom.cdx.json\n"
    assert beside.texts(IMAGE, empty_site) == {}
    assert pull(image, empty_site) == "  with provenance.json, sbom.cdx.json\n"
    assert beside.texts(IMAGE, empty_site) == documents
    tag = f"team/base/manifests/{image.digest.replace(':', '-')}"
    assert (tag in fake.files) is not lists


def test_each_is_an_artifact_of_the_specification(fake: Fake, documents: dict[str, bytes]) -> None:
    image = carried(fake)
    push(image, documents)
    index = json.loads(fake.files[f"team/base/manifests/{image.digest.replace(':', '-')}"])
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    subject = fake.files[f"team/base/manifests/{image.digest}"]
    for descriptor, (title, content) in zip(index["manifests"], documents.items(), strict=True):
        manifest = fake.files[f"team/base/manifests/{descriptor['digest']}"]
        assert descriptor["size"] == len(manifest)
        assert json.loads(manifest) == {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": descriptor["artifactType"],
            "config": {
                "mediaType": "application/vnd.oci.empty.v1+json",
                "digest": sha256(b"{}"),
                "size": 2,
            },
            "layers": [
                {
                    "mediaType": descriptor["artifactType"],
                    "digest": sha256(content),
                    "size": len(content),
                    "annotations": {"org.opencontainers.image.title": title},
                }
            ],
            "subject": {"mediaType": OCI_MANIFEST, "digest": image.digest, "size": len(subject)},
            "annotations": {"org.opencontainers.image.title": title},
        }
    assert [one["artifactType"] for one in index["manifests"]] == [
        "application/vnd.in-toto+json",
        "application/vnd.cyclonedx+json",
    ]


@pytest.mark.parametrize("lists", [False, True])
def test_the_same_once_more_changes_nothing_and_others_stay_listed(
    fake: Fake, documents: dict[str, bytes], lists: bool
) -> None:
    fake.lists = lists
    image, tag = carried(fake), "team/base/manifests/{}"
    foreign = {"digest": sha256(b"?"), "artifactType": "application/vnd.signature", "size": 1}
    index = {"mediaType": OCI_INDEX, "manifests": [foreign]}
    name = image.digest.replace(":", "-")
    fake.add("manifests", json.dumps(index).encode(), name, of_type=OCI_INDEX)
    push(image, documents)
    files, asked = dict(fake.files), len(fake.seen)
    push(image, documents)
    assert fake.files == files
    methods = [method for method, *_ in fake.seen[asked:]]
    assert (methods.count("POST"), methods.count("PUT")) == (0, 2)
    listed = json.loads(fake.files[tag.format(name)])["manifests"]
    assert listed[0] == foreign
    assert len(listed) == (1 if lists else 3)


@pytest.mark.parametrize(
    "uploads",
    [
        "https://elsewhere.example/uploads/1",
        "http://elsewhere.example/uploads/1",
        "//elsewhere.example/uploads/1",
        "http://user@{}/uploads/1",
        "http://[x/",
    ],
)
def test_no_upload_goes_to_another_place(
    fake: Fake, documents: dict[str, bytes], uploads: str
) -> None:
    image = carried(fake)
    fake.uploads = uploads.format(fake.address)
    said = push(image, documents)
    assert "the image without its documents" in said
    assert "wants an upload to" in said
    assert "PUT" not in {method for method, *_ in fake.seen}
    fake.takes, fake.uploads = False, Fake.uploads
    said = push(image, documents)
    assert "the image without its documents" in said
    assert "refuses access" in said


def test_a_second_token_is_asked_for_without_showing_the_first(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes]
) -> None:
    fake.token, fake.push_token = "for reading", "for writing"
    image = carried(fake)
    assert push(image, documents) == "  with provenance.json, sbom.cdx.json\n"
    tokens = [shown for _, path, shown in fake.seen if path.startswith("/token")]
    assert tokens == ["", ""]
    assert pull(image, empty_site) == "  with provenance.json, sbom.cdx.json\n"


@pytest.mark.parametrize(
    ("of_type", "listing"),
    [
        (OCI_INDEX, b'{"manifests": null}'),
        (OCI_INDEX, b'{"manifests": {"a": 1}}'),
        (OCI_INDEX, b"[]"),
        (OCI_INDEX, b"<html>"),
        (OCI_MANIFEST, b'{"manifests": []}'),
        (OCI_MANIFEST, b'{"schemaVersion": 2}'),
    ],
)
def test_what_is_no_list_is_told_and_stays(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes], of_type: str, listing: bytes
) -> None:
    image = carried(fake)
    fake.files[listed_at(image)], fake.types[listed_at(image)] = listing, of_type
    assert "the image without its documents" in push(image, documents)
    assert fake.files[listed_at(image)] == listing
    *told, last = pull(image, empty_site).splitlines()
    assert "the registry" in " ".join(told)
    assert last == "  without provenance or SBOM"


def listed_at(image: Carried) -> str:
    """Where the list is that clients keep."""
    return f"team/base/manifests/{image.digest.replace(':', '-')}"


def put(fake: Fake, image: Carried, title: str, content: bytes, **other: Any) -> None:
    """Refer to the image, or as `other` says."""
    of_type = referrers.TYPES[title]
    layer = {"mediaType": of_type, "digest": fake.add("blobs", content, of_type=BLOB)}
    layer["annotations"] = {referrers.TITLE: title}  # type: ignore[assignment]
    manifest = {
        "mediaType": OCI_MANIFEST,
        "artifactType": of_type,
        "layers": [layer],
        "subject": {"digest": image.digest},
        "annotations": {},
    }
    digest = fake.add("manifests", json.dumps(manifest | other).encode(), of_type=OCI_MANIFEST)
    list_too(fake, image, {"digest": digest, "artifactType": of_type})


def list_too(fake: Fake, image: Carried, entry: object) -> None:
    """Add an entry to the list that clients keep."""
    name = listed_at(image)
    before = json.loads(fake.files.get(name, b'{"manifests": []}'))["manifests"]
    fake.files[name] = json.dumps({"manifests": [*before, entry]}).encode()
    fake.types[name] = OCI_INDEX


def test_what_is_not_about_the_image_is_not_taken(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes]
) -> None:
    image = carried(fake)
    about_another = documents["provenance.json"].replace(IMAGE[7:].encode(), b"0" * 64)
    assert about_another != documents["provenance.json"]
    for content in (about_another, b"[]", b"no JSON", b"{}", b"[" * 100_000, b"\xff"):
        put(fake, image, "provenance.json", content)
        put(fake, image, "sbom.cdx.json", content)
    right = documents["provenance.json"]
    put(fake, image, "provenance.json", right, subject={"digest": sha256(b"another")})
    put(fake, image, "provenance.json", right, layers=[])
    put(fake, image, "provenance.json", right, artifactType="application/vnd.cyclonedx+json")
    assert pull(image, empty_site) == "  without provenance or SBOM\n"
    assert beside.texts(IMAGE, empty_site) == {}
    put(fake, image, "provenance.json", right)
    assert pull(image, empty_site) == "  with provenance.json\n"
    assert beside.texts(IMAGE, empty_site) == {"provenance.json": right}
    sbom = documents["sbom.cdx.json"]
    put(fake, image, "sbom.cdx.json", sbom)
    fake.files[f"team/base/blobs/{sha256(sbom)}"] += b" "
    assert "sends other bytes than it says" in pull(image, empty_site)
    assert beside.texts(IMAGE, empty_site).keys() == {"provenance.json"}


@pytest.mark.parametrize(
    "entry",
    [
        1,
        {"digest": "sha256:12", "artifactType": "application/vnd.in-toto+json"},
        {"digest": f"sha512:{'1' * 128}", "artifactType": "application/vnd.in-toto+json"},
        {"digest": sha256(b"gone"), "artifactType": "application/vnd.in-toto+json"},
        {"digest": sha256(b"?"), "artifactType": None, "annotations": None},
    ],
)
def test_an_entry_that_is_no_good_hides_no_other(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes], entry: object
) -> None:
    image = carried(fake)
    list_too(fake, image, entry)
    push(image, documents)
    assert json.loads(fake.files[listed_at(image)])["manifests"][0] == entry
    name = f"team/base/referrers/{image.digest}"  # who knows no lists may answer anything
    fake.files[name], fake.types[name] = b"<html>", "text/html"
    assert pull(image, empty_site).endswith("  with provenance.json, sbom.cdx.json\n")
    assert beside.texts(IMAGE, empty_site) == documents


def test_what_this_machine_wrote_stays(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes]
) -> None:
    """Who may push can say falsely of an image what it is made of."""
    image = carried(fake)
    push(image, documents | {"sbom.cdx.json": documents["sbom.cdx.json"] + b" "})
    beside.put({"sbom.cdx.json": documents["sbom.cdx.json"]}, IMAGE, empty_site)
    assert pull(image, empty_site) == "  with provenance.json\n"
    assert beside.texts(IMAGE, empty_site) == documents
    asked = len(fake.seen)
    assert pull(image, empty_site) == ""
    assert len(fake.seen) == asked


def test_documents_of_an_image_without_a_record_are_told(
    fake: Fake, empty_site: Settings, documents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's, whose last step is like ours."""

    def none(client: object, image: str, name: str) -> None:
        raise UsageError(f"{name}: has no record", "")

    monkeypatch.setattr(beside, "record", none)
    image = carried(fake)
    assert pull(image, empty_site) == "  without provenance or SBOM\n"
    push(image, documents)
    said = pull(image, empty_site)
    assert "has no record" in said
    assert said.endswith("  without provenance or SBOM\n")
