"""Asks a registry over HTTP, with the user's credentials, what an image name stands for.

What is asked and answered is the OCI distribution specification and, for the tokens, the
authentication that Docker's registry documents.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from launcher.base.deadline import within
from launcher.base.errors import EngineError, first_fault
from launcher.base.reference import HUB, ImageName, parse_reference
from launcher.base.settings import settings
from launcher.images.oci.oci_layout import DIGEST, Descriptor, sha256
from launcher.images.oci.pull import PullCause, refusal

if TYPE_CHECKING:
    from requests import Response, Session

PLATFORM = "linux/amd64"
LARGEST = 4 << 20
"""Bytes of a manifest: the distribution specification asks registries to take that much."""

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)

HERE = "this machine"
CLIENT = "megatron-launchpad"
HUB_HOST = "registry-1.docker.io"
_STATUS = {
    401: PullCause.UNAUTHORIZED,
    403: PullCause.UNAUTHORIZED,
    404: PullCause.MISSING,
    429: PullCause.RATE_LIMIT,
}
_NAMED = {"service", "scope"}  # of a challenge, what the token is asked for


Model = TypeVar("Model", bound=BaseModel)


class _Platform(BaseModel):
    os: str = ""
    architecture: str = ""


class _SizedBlob(Descriptor):
    size: Annotated[int, Field(ge=0)] | None = None


class _Entry(_SizedBlob):
    platform: _Platform | None = None


class _Index(BaseModel):
    manifests: list[_Entry]


class _Manifest(BaseModel):
    config: _SizedBlob
    layers: list[_SizedBlob] = []


class _Token(BaseModel):
    token: str = ""
    access_token: str = ""


@dataclass(frozen=True)
class RegistryAnswer:
    """A registry's answer, whole."""

    url: str
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def what(self) -> str:
        """The tag or digest that was asked for."""
        return urlsplit(self.url).path.rpartition("/")[2]

    @property
    def media_type(self) -> str:
        """The type in its header: OCI documents needn't name their own."""
        return str(self.headers.get("Content-Type", "").partition(";")[0].strip())


@dataclass(frozen=True)
class RegistryDocument:
    """A JSON object that came: the digest and size of its bytes, its media type, and itself."""

    digest: str
    size: int
    media_type: str
    value: Mapping[str, Any]


@dataclass(frozen=True)
class ImageDigests:
    """What a reference names at its registry, as digests: sha256:….

    digest: of the index or, where there's no index, of the manifest
    manifest, config: of one platform's image
    """

    digest: str
    manifest: str
    config: str


@dataclass(frozen=True)
class PlatformDocuments:
    """A registry's documents of one platform's image, and the platforms that its name is for.

    named: what the reference names: the index or, where there's none, the manifest
    """

    named: RegistryDocument
    manifest: RegistryDocument
    config: RegistryDocument
    platforms: list[str]


def address_of(where: ImageName) -> str:
    """A repository's address. Plain HTTP is for loopback alone, as engines have it."""
    host = HUB_HOST if where.registry == HUB else where.registry
    return f"{'http' if is_loopback(host) else 'https'}://{host}/v2/{where.repository}"


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this very machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def resolve(reference: str, platform: str = PLATFORM, *, layers: bool = False) -> ImageDigests:
    """What `reference` names at its registry just now, for `platform`.

    Every digest is computed from the bytes that came, and compared with what they were asked by
    and with what the registry calls them; so are the sizes, with `layers` those of the layers too,
    which no engine could pull otherwise. Raises EngineError.
    """
    with talking(reference) as asked:
        found = documents(asked, platform)
        for layer in asked.fitting(_Manifest, found.manifest.value).layers if layers else ():
            asked.look_for(layer)
        return ImageDigests(found.named.digest, found.manifest.digest, found.config.digest)


def documents(asked: RegistrySession, platform: str) -> PlatformDocuments:
    """The documents of a platform's image, each compared as `resolve` says. Raises EngineError."""
    named = manifest = asked.document("manifests", asked.where.target)
    platforms = [platform]
    if named.media_type in INDEXES:
        entries = asked.fitting(_Index, named.value).manifests
        platforms = [_named(entry.platform or _Platform()) for entry in entries]
        if platform not in platforms:
            text = asked.where.text
            raise EngineError(f"{text}: has no {platform}, only {', '.join(platforms)}")
        entry = entries[platforms.index(platform)]
        manifest = asked.document("manifests", entry.digest, entry.size)
    if manifest.media_type not in MANIFESTS:
        raise asked.wrong(f"answers with {manifest.media_type or 'something else'}")
    parts = asked.fitting(_Manifest, manifest.value)
    config = asked.document("blobs", parts.config.digest, parts.config.size)
    found = _named(asked.fitting(_Platform, config.value))
    if found != platform:
        raise EngineError(f"{asked.where.text}: is for {found}, and not for {platform}")
    return PlatformDocuments(named, manifest, config, platforms)


def _named(platform: _Platform) -> str:
    """As engines name it: linux/amd64."""
    return f"{platform.os}/{platform.architecture}"


@contextmanager
def talking(reference: str) -> Iterator[RegistrySession]:
    """Talk to the registry of `reference`; what goes wrong on the way is an EngineError."""
    import requests

    where = parse_reference(reference)
    with requests.Session() as session:
        session.auth = _unchanged
        own = Path("/etc/docker/certs.d", where.registry, "ca.crt")  # where engines look, too
        session.verify = str(own) if own.is_file() else True
        try:
            yield RegistrySession(where, session)
        except requests.exceptions.SSLError as error:
            raise refusal(reference, PullCause.CERTIFICATE, _innermost(error), HERE) from error
        except requests.exceptions.RequestException as error:
            raise refusal(reference, PullCause.UNREACHABLE, _innermost(error), HERE) from error


class RegistrySession:
    """What is asked of a registry about one reference's repository.

    Each method raises EngineError for an answer that no registry should give, and for a refusal.
    """

    def __init__(self, where: ImageName, session: Session) -> None:
        self.where = where
        self.address = address_of(where)
        self.session = session
        self.seconds = settings().answer_within

    def document(self, kind: str, target: str, size: int | None = None) -> RegistryDocument:
        """The JSON object of a manifest or a blob (`kind`, in the plural), of `size` bytes."""
        answer = self.ask("GET", f"{kind}/{target}")
        self._check_digest(answer, target)
        self._compare(target, size, len(answer.content))
        return self.parsed(answer)

    def look_for(self, blob: _SizedBlob) -> None:
        """See that the registry has a blob of the size that is written of it."""
        answer = self.ask("HEAD", f"blobs/{blob.digest}")
        told = answer.headers.get("Content-Length", "")
        self._compare(blob.digest, blob.size, int(told) if told.isdecimal() else None)

    def _compare(self, what: str, written: int | None, found: int | None) -> None:
        if None not in (written, found) and written != found:
            raise self.wrong(f"has {found} bytes of {what}, {written} were announced")

    def parsed(self, answer: RegistryAnswer) -> RegistryDocument:
        """The JSON object in an answer."""
        content = answer.content
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"sends no JSON for {answer.what}: {error}") from error
        if not isinstance(document, dict):
            raise self.wrong(f"sends no object for {answer.what}")
        of_type = str(document.get("mediaType") or answer.media_type)
        return RegistryDocument(sha256(content), len(content), of_type, document)

    def fitting(self, model: type[Model], value: Any) -> Model:
        """What came, in what is read of it."""
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise self.wrong(f"sends something else: {first_fault(error)}") from error

    def _check_digest(self, answer: RegistryAnswer, target: str) -> None:
        """Compare the digest of what came with `target`, and with what the registry calls it."""
        digest = sha256(answer.content)
        called = answer.headers.get("Docker-Content-Digest", digest)
        for expected in {called, target if re.fullmatch(DIGEST, target) else digest}:
            if expected != digest:
                raise self.wrong(
                    f"sends other bytes than it announced\n  announced: {expected}\n"
                    f"  sent: {digest}"
                )

    def ask(self, method: str, path: str) -> RegistryAnswer:
        """An answer about the repository; asked again with a token where the registry wants one."""
        headers = {"Accept": ", ".join((*INDEXES, *MANIFESTS))}
        send = partial(self._whole, method, f"{self.address}/{path}", headers=headers)
        answer = send()
        if answer.status == 401:
            challenge = answer.headers.get("WWW-Authenticate", "")
            self.session.headers.pop("Authorization", None)  # not for who gives the next one
            self.session.headers["Authorization"] = self._authorization(challenge)
            answer = send()
        if answer.status != 200:
            raise self._refused(answer)
        return answer

    def _whole(self, method: str, url: str, **how: Any) -> RegistryAnswer:
        """A whole answer. Raises requests' errors: ReadTimeout where it takes too long."""
        from requests.exceptions import RequestException

        ask = partial(self.session.request, method, url, stream=True, timeout=self.seconds, **how)
        try:
            answer = within(self.seconds, lambda: _read(ask()))
        except RequestException:
            raise
        except ValueError as error:  # of a redirection, or a header
            raise self.wrong(f"names something that can't be asked: {error}") from error
        if len(answer.content) > LARGEST:
            raise self.wrong(f"sends more than {LARGEST} bytes for {answer.what}")
        return answer

    def _authorization(self, challenge: str) -> str:
        """What the registry asks for: a token of the service it names, or name and password."""
        scheme, _, rest = challenge.partition(" ")
        own = _credentials(self.where)
        if scheme.lower() == "basic" and "username" in own:
            login = f"{own['username']}:{own['password']}".encode()
            return f"Basic {b64encode(login).decode()}"
        if scheme.lower() != "bearer":
            raise refusal(self.where.text, PullCause.UNAUTHORIZED, "it takes a name and a password")
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        return f"Bearer {self._token(asked, own)}"

    def _token(self, asked: dict[str, str], own: dict[str, str]) -> str:
        url, fields = asked.get("realm", ""), {key: asked[key] for key in _NAMED & asked.keys()}
        try:
            realm = urlsplit(url)
        except ValueError as error:
            raise self.wrong(f"sends to {url!r} for a token: {error}") from error
        if realm.scheme != "https" and not (realm.scheme == "http" and is_loopback(realm.netloc)):
            raise self.wrong(f"sends to {url!r} for a token, which isn't HTTPS")
        if token := own.get("identitytoken"):
            fields |= {"grant_type": "refresh_token", "client_id": CLIENT, "refresh_token": token}
            answer = self._whole("POST", url, data=fields)
        else:
            login = (own["username"], own["password"]) if own else _unchanged
            answer = self._whole("GET", url, params=fields, auth=login)
        if answer.status != 200:
            raise self._refused(answer)
        found = self.fitting(_Token, self.parsed(answer).value)
        token = found.token or found.access_token
        if not re.fullmatch(r"[ -~]+", token):
            raise self.wrong(f"sends to {realm.netloc}, which gives no token")
        return token

    def _refused(self, answer: RegistryAnswer) -> EngineError:
        """The error for a status that isn't good."""
        said = f"{answer.status} {answer.reason}"
        if message := re.search(rb'"message": ?"([^"]+)"', answer.content):
            said += f": {message[1].decode(errors='replace')}"
        return refusal(self.where.text, _STATUS.get(answer.status, PullCause.OTHER), said)

    def wrong(self, what: str) -> EngineError:
        """The error for an answer that no registry should give."""
        return EngineError(
            f"{self.where.text}: the registry {what}",
            "A proxy or a mirror on the way may have changed it; nothing was taken from it.",
        )


def _unchanged(request: Any) -> Any:
    """Requests as they are: without this, ~/.netrc would take the place of a token."""
    return request


def _credentials(where: ImageName) -> dict[str, str]:
    """The user's name and password, or token, as `docker login` or its helpers keep them."""
    from docker.auth import load_config
    from docker.errors import DockerException

    try:
        found = load_config().resolve_authconfig(where.registry) or {}
    except (DockerException, ValueError) as error:
        raise EngineError(
            f"{where.text}: the credentials for {where.registry} can't be read: {error}",
            f"Try it by hand: docker login {where.registry}",
        ) from error
    found = {key.lower(): value for key, value in found.items()}
    kinds = (("identitytoken",), ("username", "password"))
    return next(({key: found[key] for key in one} for one in kinds if found.get(one[0])), {})


def _read(response: Response) -> RegistryAnswer:
    """All of an answer; of a larger one LARGEST and a few bytes more."""
    content = b""
    with response:
        for block in response.iter_content(1 << 16):
            content += block
            if len(content) > LARGEST:
                break
    told = response.status_code, response.reason, response.headers
    return RegistryAnswer(response.url, *told, content)


def _innermost(error: BaseException) -> str:
    """The reason at the bottom of requests' and urllib3's layers of errors."""
    while (inner := getattr(error, "reason", None) or error.__context__) is not None:
        if not isinstance(inner, BaseException):
            break
        error = inner
    return str(error)
