"""Images given to an engine, where what is printed meanwhile can't be."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import docker
import pytest

from launcher.images.oci.archive import load_archive


def test_a_closed_pipe_while_an_image_is_sent_ends_it() -> None:
    """urllib3 took it for the engine's, and waited for the answer to half a request for ever."""

    def chunks() -> Iterator[bytes]:
        yield b"a part"
        raise BrokenPipeError(32, "Broken pipe")

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it listens, and never answers
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        client = docker.DockerClient(base_url=url, version="1.41", timeout=5)
        with pytest.raises(BrokenPipeError):
            load_archive(client, chunks())
        client.close()
