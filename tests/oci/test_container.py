"""What an engine gives of a container's file."""

from __future__ import annotations

import io
import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import NotFound

from launcher.oci.container import container_of, copy_out


def holding(**members: tuple[bytes, bytes]) -> Any:
    """A container with these: content and type of each entry."""

    def get_archive(path: str) -> Any:
        if path not in members:
            raise NotFound(path)
        file, (content, kind) = io.BytesIO(), members[path]
        with tarfile.open(fileobj=file, mode="w") as tar:
            entry = tarfile.TarInfo(path)
            entry.size, entry.type = len(content), kind
            tar.addfile(entry, io.BytesIO(content))
        return (file.getvalue()[at : at + 700] for at in range(0, len(file.getvalue()), 700)), None

    return SimpleNamespace(get_archive=get_archive)


def test_a_regular_file_is_copied_and_nothing_else() -> None:
    kinds = {"folder": (b"", tarfile.DIRTYPE), "link": (b"", tarfile.SYMTYPE)}
    container = holding(a=(b"content" * 500, tarfile.REGTYPE), **kinds)
    copy = io.BytesIO()
    assert copy_out(container, "a", copy)
    assert copy.getvalue() == b"content" * 500
    assert not any(copy_out(container, path, copy) for path in ("folder", "link", "none"))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        copy_out(container, "a", copy, 10)


def test_a_container_goes_whatever_happens() -> None:
    gone = []
    container = SimpleNamespace(remove=lambda force, v: gone.append((force, v)))
    client: Any = SimpleNamespace(containers=SimpleNamespace(create=lambda *_, **__: container))
    with pytest.raises(KeyboardInterrupt), container_of(client, "image"):
        raise KeyboardInterrupt
    assert gone == [(True, True)]
