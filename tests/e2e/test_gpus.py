"""GPU requests reach NVIDIA's hook: a stand-in for it, on the PATH of an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base.settings import Settings
from launcher.images.engine.connect import engine_host
from launcher.images.engine.private import private
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from tests.e2e.command import built, launcher

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(private.unsupported()), reason=private.unsupported()),
]

# Does what NVIDIA's prestart hook begins with: it finds the container's bundle and reads its env.
HOOK = """\
#!/usr/bin/python3
import json, pathlib, sys
bundle = pathlib.Path(json.load(sys.stdin)["bundle"])
env = json.loads((bundle / "config.json").read_text())["process"]["env"]
with open("{seen}", "a") as seen:
    seen.writelines(line + "\\n" for line in env if line.startswith("NVIDIA_VISIBLE_DEVICES="))
"""
IMAGE = "launchpad-test:nothing"


@pytest.fixture(scope="module")
def hooked(site: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The host of an engine that has the stand-in hook, and the file in which the hook writes."""
    folder = tmp_path_factory.mktemp("hooked")
    seen = folder / "seen"
    hook = folder / "bin/nvidia-container-runtime-hook"
    hook.parent.mkdir()
    hook.write_text(HOOK.format(seen=seen))
    hook.chmod(0o755)
    if (site.cache / "engine/packages").exists():
        (folder / "packages").symlink_to(site.cache / "engine/packages")
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", str(hook.parent), prepend=":")
    with private.private_engine(folder) as client:
        base = debian_base(client, "launchpad-test:base", STANDIN_EPOCH, cache=site.cache / "bases")
        text = f'FROM {base}\nRUN ["ln", "-sf", "/bin/true", "/usr/local/bin/python3"]\n'
        built(client, text, IMAGE)
        yield engine_host(client), seen
    patch.undo()


@pytest.mark.parametrize(("gpus", "visible"), [("2", "0,1"), ("device=1,2", "1,2")])
def test_the_hook_is_told_which_gpus(hooked: tuple[str, Path], gpus: str, visible: str) -> None:
    host, seen = hooked
    seen.write_text("")
    done = launcher(
        *("run", "gpt2.yaml", "--gpus", gpus, "--set", f"image={IMAGE}"),
        *("--set", "resources.network=none"),
        DOCKER_HOST=host,
    )
    assert done.returncode == 0, done.stderr
    told = set(seen.read_text().splitlines())  # twice where the first start was refused memlock
    assert told == {f"NVIDIA_VISIBLE_DEVICES={visible}"}


def test_on_the_cpu_the_hook_is_not_called(hooked: tuple[str, Path]) -> None:
    host, seen = hooked
    seen.write_text("")
    done = launcher(
        *("run", "gpt2-tiny.yaml", "--set", f"image={IMAGE}"),
        *("--set", "resources.network=none"),
        DOCKER_HOST=host,
    )
    assert done.returncode == 0, done.stderr
    assert seen.read_text() == ""
