"""What a name is at its registry, how it is followed, and what is in a container."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from docker.errors import APIError

from launcher.base.errors import EngineError
from launcher.base.reference import parse_reference
from launcher.images.oci import inspection as containers
from launcher.images.oci import registry
from launcher.images.oci.inspection import container_of, copy_out
from launcher.images.oci.oci_layout import sha256
from launcher.images.oci.pull import classify, describe_pull_failure, unpullable
from launcher.images.oci.registry import PLATFORM, address_of, resolve
from launcher.images.sources.pins import digest_at
from tests.e2e.site import program
from tests.images.oci import fake_registry
from tests.images.oci.fake_registry import (
    LIST,
    MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Fake,
    holding,
)

fake = fake_registry.fake


def log_in(folder: Path, registry: str, entry: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {registry: entry}}))


@pytest.mark.parametrize(
    ("reference", "registry", "repository", "target", "host"),
    [
        ("python", "docker.io", "library/python", "latest", "https://registry-1.docker.io"),
        ("pypa/x:1", "docker.io", "pypa/x", "1", "https://registry-1.docker.io"),
        ("docker.io/library/python:3", "docker.io", "library/python", "3", "https://registry-1."),
        ("nvcr.io/nvidia/pytorch:24.10-py3", "nvcr.io", "nvidia/pytorch", "24.10-py3", "https://n"),
        ("mirror:5000/a/b", "mirror:5000", "a/b", "latest", "https://mirror:5000/"),
        ("localhost:5000/a:1", "localhost:5000", "a", "1", "http://localhost:5000/"),
        ("127.1.2.3:5000/a:1", "127.1.2.3:5000", "a", "1", "http://127.1.2.3:5000/"),
        (f"a.b/c:1@sha256:{'0' * 64}", "a.b", "c", f"sha256:{'0' * 64}", "https://a.b/v2/c"),
    ],
)
def test_a_name_s_parts(
    reference: str, registry: str, repository: str, target: str, host: str
) -> None:
    found = parse_reference(reference)
    assert (found.registry, found.repository, found.target) == (registry, repository, target)
    assert address_of(found).startswith(host)
    assert reference.startswith(found.name)


@pytest.mark.parametrize("of_type", [OCI_INDEX, LIST])
def test_of_an_index_amd64_is_taken(fake: Fake, of_type: str) -> None:
    image = fake.index("1", of_type=of_type, archs=("arm64", "amd64"))
    assert resolve(f"{fake.reference}:1") == image
    assert len({image.digest, image.manifest, image.config}) == 3
    alone = fake.image("2", of_type={OCI_INDEX: OCI_MANIFEST, LIST: MANIFEST}[of_type])
    assert resolve(f"{fake.reference}:2") == alone
    assert resolve(f"{fake.reference}@{alone.digest}") == alone


@pytest.mark.parametrize("lie", ["manifest", "config", "layer"])
def test_a_size_that_is_a_lie_is_refused(fake: Fake, lie: str) -> None:
    """It was locked, and no engine could pull it."""
    wrong = {each: 1 if each == lie else 0 for each in ("manifest", "config", "layer")}

    def named(kind: str, content: bytes, of: str) -> dict[str, Any]:
        digest = fake.add(kind, content)
        return {"digest": digest, "size": len(content) + wrong[of]}

    config = b'{"os": "linux", "architecture": "amd64"}'
    manifest = {
        "mediaType": OCI_MANIFEST,
        "config": named("blobs", config, "config"),
        "layers": [named("blobs", b"layer", "layer")],
    }
    entry = named("manifests", json.dumps(manifest).encode(), "manifest")
    entry["platform"] = {"os": "linux", "architecture": "amd64"}
    index = {"mediaType": OCI_INDEX, "manifests": [entry]}
    fake.add("manifests", json.dumps(index).encode(), "1")
    with pytest.raises(EngineError, match=r"has \d+ bytes of sha256:.*, \d+ were announced"):
        resolve(f"{fake.reference}:1", layers=True)
    if lie == "layer":
        resolve(f"{fake.reference}:1")


def test_another_platform_is_refused_by_name(fake: Fake) -> None:
    fake.index("1", archs=("arm64", "s390x"))
    with pytest.raises(EngineError, match=f"has no {PLATFORM}, only .*linux/arm64, linux/s390x"):
        resolve(f"{fake.reference}:1")
    fake.image("2", arch="arm64")
    with pytest.raises(EngineError, match="is for linux/arm64"):
        resolve(f"{fake.reference}:2")


def test_an_anonymous_token_is_fetched_where_the_registry_wants_one(fake: Fake) -> None:
    """As Docker Hub and nvcr.io do; ~/.netrc doesn't take its place."""
    image, fake.token = fake.image("1"), "secret"
    Path.home().joinpath(".netrc").write_text("machine 127.0.0.1 login me password mine\n")
    assert resolve(f"{fake.reference}:1") == image
    (asked,) = [seen for seen in fake.seen if seen[1].startswith("/token")]
    assert parse_qs(urlsplit(asked[1]).query) == {
        "service": ["registry"],
        "scope": ["repo:x:pull"],
    }
    assert asked[2] == ""


def test_a_registry_that_takes_name_and_password(fake: Fake, tmp_path: Path) -> None:
    fake.image("1")
    fake.token, fake.challenge = "never", 'Basic realm="here"'
    with pytest.raises(EngineError, match="refuses access"):
        resolve(f"{fake.reference}:1")
    login = base64.b64encode(b"me:mine").decode()
    log_in(tmp_path, fake.address, {"auth": login})
    with pytest.raises(EngineError, match="refuses access"):
        resolve(f"{fake.reference}:1")
    assert fake.seen[-1][2] == f"Basic {login}"


def test_credentials_are_those_of_docker_s_configuration_or_of_a_helper(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, fake.token = fake.image("1"), "secret"
    login = base64.b64encode(b"$oauthtoken:key").decode()
    log_in(tmp_path, fake.address, {"auth": login})
    assert resolve(f"{fake.reference}:1") == image
    (shown,) = (shown for _, path, shown in fake.seen if path.startswith("/token"))
    assert shown == f"Basic {login}"
    log_in(tmp_path, fake.address, {"identitytoken": "long"})  # it is traded for a token
    assert resolve(f"{fake.reference}:1") == image
    assert any("refresh_token=long" in path for verb, path, _ in fake.seen if verb == "POST")
    said = '#!/bin/sh\necho \'{"Username": "me", "Secret": "mine"}\'\n'
    program(tmp_path / "docker-credential-ours", said)
    (tmp_path / "config.json").write_text('{"credsStore": "ours"}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert resolve(f"{fake.reference}:1") == image
    basic = f"Basic {base64.b64encode(b'me:mine').decode()}"
    assert basic in [shown for _, path, shown in fake.seen if path.startswith("/token")]


def test_a_password_never_goes_to_a_service_without_tls(fake: Fake, tmp_path: Path) -> None:
    fake.image("1")
    fake.token, fake.challenge = "secret", 'Bearer realm="http://auth.example/token"'
    with pytest.raises(EngineError, match=r"http://auth\.example/token.*isn't HTTPS"):
        resolve(f"{fake.reference}:1")


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "refuses access"), (404, "no such image"), (429, "pull limit"), (500, "pull failed")],
)
def test_a_refusal_is_told_in_the_words_of_a_pull(fake: Fake, status: int, said: str) -> None:
    fake.status = status
    with pytest.raises(EngineError, match=said) as caught:
        resolve(f"{fake.reference}:1")
    assert f"the registry says: {status}" in caught.value.problem
    assert "no such thing" in caught.value.problem
    assert caught.value.remedy


def test_nobody_there(fake: Fake) -> None:
    with pytest.raises(EngineError, match="can't be reached") as caught:
        resolve("127.0.0.1:1/team/base:1")
    assert "refused" in caught.value.problem
    assert "0x" not in caught.value.problem


def test_other_bytes_than_the_digest_says_are_refused_with_both(fake: Fake) -> None:
    image = fake.index("1", archs=("amd64",))
    path = f"team/base/manifests/{image.manifest}"
    changed = fake.files[path].replace(b"2", b"3", 1)
    fake.files[path] = changed
    with pytest.raises(EngineError) as caught:
        resolve(f"{fake.reference}:1")
    assert image.manifest in caught.value.problem
    assert sha256(changed) in caught.value.problem
    fake.image("2")
    fake.called = "sha256:" + "0" * 64  # by a header
    with pytest.raises(EngineError, match="other bytes than it announced"):
        resolve(f"{fake.reference}:2")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>", "sends no JSON"),
        (b"[]", "sends no object"),
        (b'{"mediaType": "text/x"}', "answers with text/x"),
        (b"{}", "answers with something else"),
        (f'{{"mediaType": "{MANIFEST}"}}'.encode(), "sends something else: config"),
        (f'{{"mediaType": "{MANIFEST}", "config": {{"digest": "md5:1"}}}}'.encode(), "a digest"),
        (f'{{"mediaType": "{LIST}", "manifests": []}}'.encode(), f"has no {PLATFORM}"),
        (b" " * (registry.LARGEST + 2), "more than"),
    ],
)
def test_what_no_registry_should_answer(fake: Fake, content: bytes, said: str) -> None:
    fake.add("manifests", content, "1")
    with pytest.raises(EngineError, match=said):
        resolve(f"{fake.reference}:1")


NVIDIA = "nvcr.io/nvidia/pytorch:24.10-py3"


SAID = yaml.safe_load(Path(__file__).with_name("pulls.yaml").read_text())


@pytest.mark.parametrize(("cause", "text"), [(one, text) for one in SAID for text in SAID[one]])
def test_classify(cause: str, text: str) -> None:
    assert classify(APIError("500 Server Error", explanation=text)).name == cause
    assert classify(APIError(text)).name == cause


def test_every_fault_has_a_remedy() -> None:
    for text in ("429", "x509", "no space left", "no such host", "denied", "404", "?"):
        remedy = describe_pull_failure("debian:12", APIError(text)).remedy
        assert remedy
        assert ("login" in remedy) == (text in ("429", "denied"))
    error = describe_pull_failure(NVIDIA, APIError("", explanation="unauthorized: 401"))
    assert error.exit_code == 125
    assert error.problem.startswith(f"{NVIDIA}: the registry refuses access")
    assert all(word in error.remedy for word in ("docker login nvcr.io", "$oauthtoken", "API key"))


def test_unpullable_asks_briefly_and_restores_the_timeout() -> None:
    seen = []

    def refuse(reference: str) -> None:
        seen.append((reference, client.api.timeout))
        raise APIError("", explanation="manifest unknown")

    client = SimpleNamespace(api=SimpleNamespace(timeout=60, inspect_distribution=refuse))
    error = unpullable(client, "debian:99")
    assert error is not None
    assert "no such image" in error.problem
    assert seen == [("debian:99", 3.0)]
    assert client.api.timeout == 60
    client.api.inspect_distribution = lambda reference: {}
    assert unpullable(client, "debian:12") is None


def test_an_engine_has_the_seconds_of_the_settings_to_ask_a_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow registry was given up after 30 s, whatever `answer_within` said."""
    seen = []

    def digest(reference: str) -> dict[str, dict[str, str]]:
        seen.append(client.api.timeout)
        return {"Descriptor": {"digest": "sha256:1"}}

    client: Any = SimpleNamespace(api=SimpleNamespace(timeout=10, inspect_distribution=digest))
    for seconds in ("5", "90"):
        monkeypatch.setenv("LAUNCHER_ANSWER_WITHIN", seconds)
        assert digest_at(client, "debian:12", "linux/amd64") == "sha256:1"
    assert seen == [30, 90]


def test_a_regular_file_is_copied_and_nothing_else() -> None:
    kinds = {"folder": (b"", tarfile.DIRTYPE), "link": (b"", tarfile.SYMTYPE)}
    container = holding(a=(b"content" * 500, tarfile.REGTYPE), **kinds)
    copy = io.BytesIO()
    assert copy_out(container, "a", copy)
    assert copy.getvalue() == b"content" * 500
    assert not any(copy_out(container, path, copy) for path in ("folder", "link", "none"))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        copy_out(container, "a", copy, 10)


def test_the_containers_of_the_dead_are_removed_and_no_others() -> None:
    """A build that was killed left one without a label, and its image couldn't be removed."""
    with subprocess.Popen(["sleep", "0"]) as process:
        pass
    mine = containers._owner()
    owners: dict[str, Any] = {
        "dead": mine | {"pid": process.pid},
        "another has its number": mine | {"began": "1"},
        "living": mine,
        "elsewhere": mine | {"kernel": "another"},
        "in a container": mine | {"space": "pid:[1]", "pid": process.pid},
        "elsewhere, long ago": mine | {"kernel": "another"},
        "foreign": "5",
    }
    there = [
        {
            "Id": name,
            "Created": 0 if "long ago" in name else time.time(),
            "Labels": {containers.OWNER: json.dumps(owner)},
        }
        for name, owner in owners.items()
    ]
    gone = list[str]()
    api = SimpleNamespace(
        containers=lambda **_: there, remove_container=lambda name, **_: gone.append(name)
    )
    containers.sweep_containers(cast(Any, SimpleNamespace(api=api)))
    assert gone == ["dead", "another has its number", "elsewhere, long ago"]


def test_a_container_goes_whatever_happens() -> None:
    gone = []
    container = SimpleNamespace(remove=lambda force, v: gone.append((force, v)))
    client: Any = SimpleNamespace(
        containers=SimpleNamespace(create=lambda *_, **__: container),
        api=SimpleNamespace(containers=lambda **_: []),
    )
    with pytest.raises(KeyboardInterrupt), container_of(client, "image"):
        raise KeyboardInterrupt
    assert gone == [(True, True)]
