"""Docker's compose is found, refused where it is too old, and fetched for an engine of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import EngineError
from launcher.images.engine import compose_plugin
from launcher.images.engine.private import packages, private
from tests.e2e.site import program

CLIENT: Any = None
DOCKER = """#!/bin/sh
test "$1" = compose && {answer}
echo "docker: '$1' is not a docker command." >&2
exit 1
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, on a machine without an engine of ours."""

    def ask(argv: list[str], client: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compose_plugin, "ask", ask)
    monkeypatch.setattr(compose_plugin, "private_file", lambda client, name: None)
    return tmp_path


@pytest.mark.parametrize(
    ("docker", "own", "found"),
    [
        ("{ echo 2.26.1-4; exit 0; }", "exit 1", ["docker", "compose"]),
        ("{ echo v2.40.3; exit 0; }", "exit 1", ["docker", "compose"]),
        ("{ echo 5.0.0; exit 0; }", "exit 1", ["docker", "compose"]),
        ("false", "echo 2.26.1", ["docker-compose"]),
        ("false", "echo 1.29.2", None),
        ("false", "echo no version", None),
        ("false", "exit 1", None),
    ],
)
def test_compose_is_dockers_plugin_or_a_program_from_version_2_on(
    tools: Path, docker: str, own: str, found: list[str] | None
) -> None:
    program(tools / "docker", DOCKER.format(answer=docker))
    program(tools / "docker-compose", f"#!/bin/sh\n{own}\n")
    if found:
        assert compose_plugin.compose(CLIENT) == [str(tools / found[0]), *found[1:]]
        return
    with pytest.raises(EngineError, match="no docker compose here") as caught:
        compose_plugin.compose(CLIENT)
    assert "docker-compose-plugin" in caught.value.remedy


def test_for_our_own_engine_it_is_fetched(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "engine/packages/usr").mkdir(parents=True)
    fetched = []

    def unpack(folder: Path, name: str, suite: str) -> Path:
        fetched.append((folder, name, suite))
        program(folder / compose_plugin.PLUGIN, "#!/bin/sh\necho 2.26.1\n")
        return folder

    def private_file(client: object, name: str) -> Path | None:
        path = tools / "engine/packages" / name
        return path if path.exists() else None

    monkeypatch.setattr(compose_plugin, "private_file", private_file)
    monkeypatch.setattr(packages, "unpack_newer", unpack)
    monkeypatch.setattr(compose_plugin.platform, "freedesktop_os_release", lambda: {"ID": "debian"})
    argv = compose_plugin.compose(CLIENT)
    assert argv == [str(tools / "engine/compose" / compose_plugin.PLUGIN)]
    assert fetched == [(tools / "engine/compose", "docker-compose", "trixie")]
    program(tools / "engine/packages" / compose_plugin.PLUGIN, "#!/bin/sh\necho 2.27.0\n")
    assert compose_plugin.compose(CLIENT) == [
        str(tools / "engine/packages" / compose_plugin.PLUGIN)
    ]
    assert len(fetched) == 1


def test_iptables_is_named_once(tmp_path: Path) -> None:
    private._link_iptables(tmp_path)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "iptables-nft").write_text("")
    for _ in range(2):
        private._link_iptables(tmp_path)
        assert (tmp_path / "iptables").readlink() == Path("iptables-nft")
