"""Why an image can't be pulled: the engines' own words, and what the user is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from docker.errors import APIError

from launcher.oci.pull import Cause, classify, describe_pull_failure, unpullable

NVIDIA = "nvcr.io/nvidia/pytorch:24.10-py3"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("unauthorized: authentication required", Cause.UNAUTHORIZED),
        ("Head https://nvcr.io/v2/x/manifests/y: denied: 403 Forbidden", Cause.UNAUTHORIZED),
        (
            "pull access denied for x, repository does not exist or may require 'docker login': "
            "denied: requested access to the resource is denied",
            Cause.UNAUTHORIZED,
        ),
        ("no basic auth credentials", Cause.UNAUTHORIZED),
        (
            "manifest for nvcr.io/x:y not found: manifest unknown: manifest unknown",
            Cause.MISSING,
        ),
        ("errors: name unknown: repository name not known to registry", Cause.MISSING),
        ("toomanyrequests: You have reached your pull rate limit.", Cause.RATE_LIMIT),
        (
            'Get "https://nvcr.io/v2/": dial tcp: lookup nvcr.io on 10.0.0.1:53: no such host',
            Cause.UNREACHABLE,
        ),
        (
            'Get "https://nvcr.io/v2/": net/http: request canceled while waiting for connection '
            "(Client.Timeout exceeded while awaiting headers)",
            Cause.UNREACHABLE,
        ),
        ("dial tcp 1.2.3.4:443: connect: network is unreachable", Cause.UNREACHABLE),
        ("x509: certificate signed by unknown authority", Cause.CERTIFICATE),
        ("write /var/lib/docker/tmp/x: no space left on device", Cause.DISK_FULL),
        ("filesystem layer verification failed for digest sha256:401", Cause.DAMAGED),
        ("image config verification failed for digest sha256:eof", Cause.DAMAGED),
        ("failed commit on ref: unexpected commit digest sha256:1, expected", Cause.DAMAGED),
        ("Digest did not match, expected sha256:1, got sha256:2", Cause.DAMAGED),
        ("something else", Cause.OTHER),
    ],
)
def test_classify(text: str, fault: Cause) -> None:
    assert classify(APIError("500 Server Error", explanation=text)) is fault
    assert classify(APIError(text)) is fault


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
