"""Documents at a registry: put there once, listed either way, taken where about the image."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.build import beside
from launcher.errors import UsageError
from launcher.images import referrers
from launcher.images.remote import Carried
from launcher.oci.layout import sha256
from launcher.oci.registry import BLOB
from launcher.screen import Progress
from launcher.settings import Settings
from tests.build.made import IMAGE, WHEEL, made
from tests.oci import fake_registry
from tests.oci.fake_registry import OCI_INDEX, OCI_MANIFEST, Fake

fake = fake_registry.fake
OURS = [{"CreatedBy": "COPY /stage/ / # buildkit"}]
"""The history of an image that we built."""


class Engine:
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
    referrers.pull(Engine(history), image, site, Progress(shown))  # type: ignore[arg-type]
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
