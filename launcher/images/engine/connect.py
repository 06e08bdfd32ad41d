"""Finds a container engine that answers, and the command-line tools that talk to the same one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from launcher.base.errors import AbsentError, EngineError
from launcher.base.settings import settings
from launcher.images.engine.direct import DirectClient

if TYPE_CHECKING:
    from docker import DockerClient

PLUGIN = "usr/libexec/docker/cli-plugins/docker-buildx"
NO_SOCKET = "there is no such socket"


@dataclass(frozen=True)
class Endpoint:
    """Where an engine may answer.

    host: as in DOCKER_HOST; origin: what names it, for messages; chosen: the user named it, so no
    other engine is used in its place; certificates: the folder with ca.pem, cert.pem and key.pem,
    where it takes TLS; verify: whether the engine's own certificate is checked
    """

    host: str
    origin: str
    chosen: bool = False
    certificates: Path | None = None
    verify: bool = True


def connect(timeout: float | None = None, *, direct: bool = False) -> DockerClient:
    """A client of the first engine that answers in the time that the settings say.

    `timeout` is for each of its later answers: other than that time for what builds and carries
    images. `direct`: what a run asks needs no SDK, where the engine has a socket here.
    Raises EngineError, which lists what was tried, where there's none.
    """
    failures: list[tuple[Endpoint, str]] = []
    within = settings().answer_within
    for endpoint in endpoints(os.environ):
        scheme, _, path = endpoint.host.partition("://")
        reason = socket_fault(Path(path), within) if scheme == "unix" else ""
        client = None if reason else _client(endpoint, within, direct=direct)
        if client is not None and not isinstance(client, str):
            client.api.timeout = timeout or within
            return client
        failures.append((endpoint, reason or str(client)))
    raise no_engine(failures)


class Connecting(Thread):
    """Connects, and asks the engine about itself, while this process reads its modules.

    An engine starts programs for that answer, which takes it as long as half a start.
    """

    found: DockerClient | None = None

    def run(self) -> None:
        try:
            self.found = connect(direct=True)
            self.found.api.info()  # which the client keeps
        except Exception as error:
            self.error = error


_begun: list[Connecting] = []


@contextmanager
def connecting() -> Iterator[None]:
    """Connect in a thread meanwhile, for the first `connected`."""
    _begun.append(Connecting(daemon=True))
    _begun[-1].start()
    try:
        yield
    finally:
        _begun.clear()


def connected() -> DockerClient:
    """A client for a run. Raises EngineError where no engine answers."""
    if not _begun:
        return connect(direct=True)
    begun = _begun.pop()
    begun.join()
    if begun.found is None:
        raise begun.error
    return begun.found


def endpoints(env: Mapping[str, str]) -> Iterator[Endpoint]:
    """Where to look, in this order; where one is chosen, nowhere else, if it answers or not."""
    if host := env.get("DOCKER_HOST"):  # with its TLS variables, as the docker command reads them
        verify, named = bool(env.get("DOCKER_TLS_VERIFY")), env.get("DOCKER_CERT_PATH")
        certificates = Path(named or Path.home() / ".docker") if named or verify else None
        yield Endpoint(host, "DOCKER_HOST", True, certificates, verify)
        return
    folder = Path(env.get("DOCKER_CONFIG") or Path.home() / ".docker")
    context = env.get("DOCKER_CONTEXT") or str(
        _json(folder / "config.json").get("currentContext") or ""
    )
    if context not in ("", "default"):
        yield _from_context(folder, context)
        return
    for host, origin in _default_hosts(env):
        yield Endpoint(host, origin)


def engine_host(client: DockerClient) -> str:
    """The DOCKER_HOST with which a command-line tool reaches the engine of `client`."""
    return str(client.api.host)


def cli_environment(client: DockerClient) -> dict[str, str]:
    """The environment in which command-line tools use the engine of `client`, with BuildKit."""
    chosen_otherwise = ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "BUILDX_BUILDER")
    env = {name: value for name, value in os.environ.items() if name not in chosen_otherwise}
    env |= {"DOCKER_HOST": engine_host(client), "DOCKER_BUILDKIT": "1"}
    if client.api.cert:
        env["DOCKER_CERT_PATH"] = str(Path(client.api.cert[0]).parent)
        if client.api.verify:
            env["DOCKER_TLS_VERIFY"] = "1"
    return env


def docker_cli(client: DockerClient) -> str | None:
    """The docker program: the one that belongs to a private engine, else the system's."""
    private = private_file(client, "usr/bin/docker")
    return str(private) if private else shutil.which("docker")


def buildx(client: DockerClient) -> list[str] | None:
    """The beginning of a buildx command line that works on the engine of `client`, or None."""
    if is_podman(client):
        return None
    private, system = private_file(client, PLUGIN), shutil.which("docker")
    found = [[str(private)]] if private else []
    found += [[system, "buildx"]] if system else []
    for argv in found:
        done = ask([*argv, "inspect", "default"], client)
        if done and done.returncode == 0 and "running" in done.stdout.lower():
            return argv
    return None


def buildkit(client: DockerClient) -> list[str] | None:
    """The beginning of a build command line with BuildKit, or None: only the classic builder.

    That is buildx's, or docker's own up to version 22, which has BuildKit built in and takes
    fewer options. Run it in `cli_environment`.
    """
    if prefix := buildx(client):
        return [*prefix, "build"]
    cli = docker_cli(client)
    if cli is None or is_podman(client):
        return None
    done = ask([cli, "version", "--format", "{{.Client.Version}}"], client)
    major = re.match(r"(\d+)\.", done.stdout) if done and done.returncode == 0 else None
    return [cli, "build"] if major and 19 <= int(major[1]) < 23 else None


def podman(client: DockerClient) -> list[str] | None:
    """The beginning of a podman command line that reaches the engine of `client`, or None."""
    program = shutil.which("podman")
    if program is None or not is_podman(client):
        return None
    argv = [program, "--url", engine_host(client)]
    done = ask([*argv, "version", "--format", "{{.Server.Version}}"], client)
    return argv if done and done.returncode == 0 else None


def no_engine(failures: list[tuple[Endpoint, str]]) -> EngineError:
    """The error that says what was tried, why each failed, and what to do."""
    tried = "\n".join(f"  {end.origin} ({end.host}): {why}" for end, why in failures)
    denied = any("permission denied" in why for _, why in failures)
    absent = all(why == NO_SOCKET and not end.chosen for end, why in failures)
    return (AbsentError if absent else EngineError)(
        f"no container engine answers; tried:\n{tried}",
        _REMEDY_DENIED if denied else _remedy_none(failures),
    )


_REMEDY_DENIED = (
    "An engine is there, but this user may not use it. Join the group that owns its socket:\n"
    "    sudo usermod -aG docker $USER && newgrp docker\n"
    "  or run the launcher as root."
)


def _remedy_none(failures: list[tuple[Endpoint, str]]) -> str:
    chosen = [end.origin for end, _ in failures if end.chosen]
    if chosen:
        mend = "docker context use default" if "context" in chosen[0] else f"unset {chosen[0]}"
        return (
            f"Start that engine, or `{mend}` to have another one looked for.\n"
            "  No other is used while one is named, so that nothing runs in the wrong place."
        )
    start = {
        "linux": "Start one: sudo systemctl start docker, or systemctl --user start podman.socket\n"
        "  (to install one on Debian or Ubuntu: sudo apt-get install docker.io).\n"
        "  Or as root there, keep this command running: it starts an engine and installs nothing:\n"
        "    launcher engine",
        "darwin": "Start Docker Desktop, Colima (colima start) or Podman (podman machine start).",
    }.get(sys.platform, "Start Docker Desktop.")
    return (
        f"{start}\n  Or point DOCKER_HOST at an engine elsewhere: DOCKER_HOST=ssh://user@machine\n"
        "  Or train without a container, with torch and Megatron-Core in this environment:\n"
        "    launcher run CONFIG --backend local"
    )


def _from_context(folder: Path, name: str) -> Endpoint:
    """The endpoint of a docker context, from the folder where the docker command keeps them.

    Raises EngineError where it names none.
    """
    key = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    meta = folder / "contexts" / "meta" / key / "meta.json"
    endpoint = {}
    with suppress(KeyError, TypeError):
        endpoint = {**_json(meta)["Endpoints"]["docker"]}
    host = endpoint.get("Host")
    if not isinstance(host, str):
        raise EngineError(
            f"docker context {name!r}: {meta} names no engine",
            "`docker context ls` shows what there is; `docker context use default` leaves it.",
        )
    tls = folder / "contexts" / "tls" / key / "docker"
    verify = not endpoint.get("SkipTLSVerify")
    return Endpoint(host, f"docker context {name}", True, tls if tls.is_dir() else None, verify)


def _json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there's no file. Raises EngineError for another text."""
    try:
        value = json.loads(path.read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EngineError(
            f"{path}: no JSON object, so the docker context isn't known",
            "Mend it, or export DOCKER_HOST to say which engine is meant.",
        )
    return value


def _default_hosts(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The sockets at which engines listen by default, with what each is."""
    if sys.platform == "win32":
        yield "npipe:////./pipe/docker_engine", "default pipe"
        return
    yield "unix:///var/run/docker.sock", "default socket"
    if sys.platform == "darwin":
        yield f"unix://{Path.home()}/.docker/run/docker.sock", "Docker Desktop"
    runtime = env.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    yield f"unix://{runtime}/docker.sock", "rootless docker"
    yield f"unix://{runtime}/podman/podman.sock", "rootless podman"
    yield "unix:///run/podman/podman.sock", "podman"


def socket_fault(path: Path, within: float) -> str:
    """Why nothing answers at a socket, or an empty string: asked before docker is imported."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(within)
            probe.connect(str(path))
    except FileNotFoundError:
        return NO_SOCKET
    except PermissionError:
        return "permission denied"
    except ConnectionRefusedError:
        return "nobody listens at this socket: the engine isn't running"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _client(endpoint: Endpoint, within: float, *, direct: bool) -> DockerClient | str:
    """A client of the engine at `endpoint`, or why there is none."""
    try:
        spoken = _spoken(endpoint.host, within)
    except OSError as error:
        return _reason(error, within)
    if direct and spoken:
        return cast("DockerClient", DirectClient(endpoint.host, spoken, within))
    from docker.errors import DockerException
    from docker.tls import TLSConfig

    from launcher.images.engine.client import Client

    try:
        tls: Any = False
        if folder := endpoint.certificates:
            own = (str(folder / "cert.pem"), str(folder / "key.pem"))
            tls = TLSConfig(own, str(folder / "ca.pem"), verify=endpoint.verify)
        return Client(endpoint.host, tls=tls, timeout=within, use_ssh_client=True, version=spoken)
    except (DockerException, OSError, ValueError) as error:
        return _reason(error, within)


def _spoken(host: str, within: float) -> str | None:
    """The version of its interface that an engine at a socket names; None where that isn't known.

    Then the SDK asks for /version, about which an engine asks its parts first. Raises OSError.
    """
    scheme, _, path = host.partition("://")
    if scheme != "unix":
        return None
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(within)
        asking.connect(path)
        asking.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
        named = re.match(rb"(?s)HTTP/1\.\d 200 .*?\nApi-Version: *(\d+\.\d+)\r", asking.recv(4096))
    return named[1].decode() if named else None


def _reason(error: Exception, within: float) -> str:
    """The innermost cause that says something: the SDK wraps it in several layers of its own."""
    if isinstance(error.__cause__, (TypeError, json.JSONDecodeError)):
        return "what answers there is no container engine"
    text = str(error).removeprefix("Error while fetching server API version: ")
    lowered = text.lower()
    known = {
        "permission denied": "permission denied",
        "name or service not known": "unknown host name",
        "failure in name resolution": "unknown host name",
        "connection refused": "connection refused: the engine isn't running",
        "timed out": f"no answer within {within:g} s",
        "no answer within": f"no answer within {within:g} s",
        "http request to an https server": "it takes TLS only: set DOCKER_TLS_VERIFY",
        "certificate verify failed": "its certificate doesn't match the one expected",
    }
    return next((said for part, said in known.items() if part in lowered), text.splitlines()[0])


def is_private(client: DockerClient) -> bool:
    """Whether the engine is one that the launcher started."""
    return private_file(client, "usr") is not None


def private_file(client: DockerClient, name: str) -> Path | None:
    """A file of a private engine's packages, which lie beside its socket."""
    scheme, _, path = engine_host(client).partition("://")
    file = Path(path).parent / "packages" / name
    return file if scheme == "unix" and file.exists() else None


def is_podman(client: DockerClient) -> bool:
    """True for podman, whose docker-compatible interface has no BuildKit."""
    components = client.version().get("Components") or []
    return any("podman" in str(part.get("Name", "")).lower() for part in components)


def ask(argv: list[str], client: DockerClient) -> subprocess.CompletedProcess[str] | None:
    """Run a short question to a command-line tool; None where it can't be asked."""
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=settings().answer_within,
            env=cli_environment(client),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
