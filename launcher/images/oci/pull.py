"""Follows pushes and pulls; explains why one fails, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from launcher.base.errors import EngineError
from launcher.base.reference import parse_reference
from launcher.base.screen import Progress, size
from launcher.images.oci.inspection import answer_within, engine_errors

if TYPE_CHECKING:
    from docker import DockerClient


class PullCause(Enum):
    """Why a pull failed, in words."""

    UNAUTHORIZED = "the registry refuses access (401 or 403)"
    MISSING = "the registry has no such image (404)"
    RATE_LIMIT = "the registry's pull limit is reached (429)"
    UNREACHABLE = "the registry can't be reached"
    CERTIFICATE = "the registry's certificate isn't trusted by the engine"
    DISK_FULL = "the engine's disk is full"
    DAMAGED = "other bytes came than the digest says"
    OTHER = "the pull failed"


# The first that matches counts: an engine says "denied" in the text of some other faults too.
_SIGNS: list[tuple[PullCause, tuple[str, ...]]] = [
    (PullCause.RATE_LIMIT, ("toomanyrequests", "too many requests", "rate limit", "429")),
    (PullCause.DISK_FULL, ("no space left", "disk quota exceeded")),
    (
        PullCause.DAMAGED,
        ("verification failed", "unexpected commit digest", "digest did not match"),
    ),
    (PullCause.CERTIFICATE, ("x509", "certificate", "server gave http response to https")),
    (
        PullCause.UNREACHABLE,
        (
            *("no such host", "network is unreachable", "no route to host", "connection refused"),
            *("timeout", "timed out", "deadline exceeded", "temporary failure", "proxyconnect"),
            *("server misbehaving", "awaiting headers", "connection reset", "dial tcp", "eof"),
        ),
    ),
    (
        PullCause.MISSING,
        ("manifest unknown", "name unknown", "not found: manifest", "name_unknown"),
    ),
    (
        PullCause.UNAUTHORIZED,
        (
            *("unauthorized", "denied", "authentication required", "forbidden", "401", "403"),
            *("no basic auth credentials", "docker login"),
        ),
    ),
    (PullCause.MISSING, ("not found", "404", "no such image")),
]
_DONE = {"Pushed", "Layer already exists", "Pull complete", "Already exists"}
_MOVING = {"Pushing", "Downloading"}
_DIGEST = re.compile(r"sha256:[0-9a-f]+")  # in which any number can stand


def classify(error: Exception) -> PullCause:
    """Why a pull failed, from the engine's error."""
    explanation = getattr(error, "explanation", None)
    text = _DIGEST.sub("", f"{explanation or ''} {error}".lower())
    return next(
        (fault for fault, signs in _SIGNS if any(s in text for s in signs)), PullCause.OTHER
    )


def describe_pull_failure(reference: str, error: Exception) -> EngineError:
    """The error for a user whose image `reference` can't be pulled."""
    said = str(getattr(error, "explanation", None) or error)
    return refusal(reference, classify(error), said, "the engine")


def refusal(reference: str, fault: PullCause, said: str, who: str = "the registry") -> EngineError:
    """The error for a user who can't have `reference`, with the first line of `who`'s output."""
    lines = said.strip().splitlines()
    detail = f"\n  {who} says: {lines[0]}" if lines else ""
    return EngineError(f"{reference}: {fault.value}{detail}", _remedy(reference, fault))


def unpullable(client: DockerClient, reference: str, within: float = 3.0) -> EngineError | None:
    """Why the engine can't pull `reference` just now, or None where it can; asked in seconds."""
    try:
        with answer_within(client, within):
            client.api.inspect_distribution(reference)
    except engine_errors() as error:
        return describe_pull_failure(reference, error)
    return None


@contextmanager
def registry_errors(reference: str) -> Iterator[None]:
    """What the engine or the registry refuses, as our error."""
    try:
        yield
    except engine_errors() as error:
        raise describe_pull_failure(reference, error) from error


@dataclass
class _Layers:
    """The layers under way: bytes done and in all, by the engine's short ID of each."""

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def see(self, event: Mapping[str, Any]) -> str:
        """A line where a layer has come to its end, else nothing."""
        layer, status = str(event.get("id", "")), str(event.get("status", ""))
        detail = event.get("progressDetail") or {}
        if status in _MOVING and detail.get("current"):
            done, total = int(detail["current"]), int(detail.get("total") or 0)
            self.counts[layer] = done, max(done, total)
        ends = status in _DONE or status.startswith("Mounted from")
        if not layer or not ends or layer in self.ended:
            return ""
        self.ended.add(layer)
        total = self.counts.get(layer, (0, 0))[1]
        return f"{layer}: {status.lower()}" + (f", {size(total)}" if total else "")

    def summary(self) -> str:
        """How far all of them are."""
        done = sum(count for count, _ in self.counts.values())
        total = sum(count for _, count in self.counts.values())
        return f"{size(done)} of {size(total)}" if total else ""


def follow(events: Iterable[Mapping[str, Any]], what: str, progress: Progress) -> str:
    """Show a push or pull layer by layer; the digest that the engine says of it, or nothing."""
    from docker.errors import APIError

    layers, digest = _Layers(), ""
    progress.step(what)
    for event in events:
        if "error" in event:
            progress.fail()
            raise APIError(event["error"], explanation=event["error"])
        digest = str((event.get("aux") or {}).get("Digest") or digest)
        if line := layers.see(event):
            progress.note(f"  {line}")
        progress.show(f"{what} · {layers.summary()}")
    progress.close()
    return digest


def _remedy(reference: str, fault: PullCause) -> str:
    registry = parse_reference(reference).registry
    log_in = f"Log in: docker login {registry}"
    return {
        PullCause.UNAUTHORIZED: f"{log_in}. A private or misspelt name is refused so too."
        if registry != "nvcr.io"
        else f"{log_in}\n    user name: $oauthtoken   (these very characters)\n"
        "    password:  an NGC API key, from https://org.ngc.nvidia.com/setup/api-key",
        PullCause.MISSING: "Check the name and the tag for typing errors; a registry also answers "
        "so for a tag that was withdrawn.",
        PullCause.RATE_LIMIT: f"Wait, or log in for a higher limit: docker login {registry}",
        PullCause.UNREACHABLE: "Check the network and the engine's proxy settings. At an offline "
        "site, name a mirror's copy as the base,\n  or carry the image over: docker save on a "
        f"machine that has {reference}, docker load here.",
        PullCause.CERTIFICATE: "Install the registry's authority in "
        f"/etc/docker/certs.d/{registry}/ca.crt on the engine's machine, and restart nothing: it "
        "is read on each pull.",
        PullCause.DISK_FULL: "Free some: docker system df shows what takes it, docker system prune "
        "removes what nothing uses.",
        PullCause.DAMAGED: "A proxy or a mirror on the way, or the registry itself, has changed "
        "it; nothing was taken from it. Pull it again, or from another mirror.",
        PullCause.OTHER: f"Try it by hand for more: docker pull {reference}",
    }[fault]
