"""An image of an engine as what clusters start: enroot's .sqsh, Apptainer's .sif, an OCI bundle.

The engine lays the layers over each other, so no whiteout is left to be carried out here. Its tar
goes on as it comes: into a .sqsh nothing is unpacked.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from launcher import files
from launcher.errors import EngineError, UsageError
from launcher.oci.container import container_of
from launcher.oci.layout import compact
from launcher.oci.parts import BLOCK, Stream
from launcher.oci.saved import stream_errors
from launcher.screen import Progress
from launcher.trust import require_trusted

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.images import Image

TOOLS = {
    "sqsh": ("sqfstar", "It comes with squashfs-tools, from 4.5 on: apt install squashfs-tools"),
    "sif": ("apptainer", "Apptainer's own pages tell how to install it."),
}
OURS = ("etc/environment", "etc/rc")
"""What enroot reads of an image's configuration: its variables, and what it starts."""

END = bytes(2 * tarfile.BLOCKSIZE)
NOT_KEPT = (".dockerenv",)
AGAIN = "Run the export again: nothing is left of this one. The engine's disk may be full."


def export(client: DockerClient, image: Image, target: Path, form: str, progress: Progress) -> None:
    """Write `image` as `target`: all of it, or nothing.

    form: `sqsh` or `sif`, which are files, or `oci`, a folder. Raises UsageError where something is
    there already or the form's tool isn't, EngineError where the engine or the tool fails.
    """
    if os.path.lexists(target):
        raise UsageError(f"{target} is there already", "Remove it, or name another one.")
    tool, remedy = TOOLS.get(form, ("", ""))
    if tool and not shutil.which(tool):
        raise UsageError(f"--format {form}: there is no {tool} here", remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    require_trusted(target)
    config = client.api.inspect_image(image.id)["Config"]
    progress.step(f"export {target.name}")
    with files.scratch(target.parent.absolute()) as scratch, stream_errors(image.id, AGAIN):
        made = scratch / "made"
        if form == "sif":
            archive = scratch / "image.tar"
            with open(files.open_own(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.writelines(client.api.get_image(image.id, chunk_size=BLOCK))
            argv = ["apptainer", "build", "--disable-cache", str(made), f"docker-archive:{archive}"]
            _fed(argv, lambda _: None, APPTAINER_TMPDIR=str(scratch))
        else:
            with _files_of(client, image) as tar:
                if form == "oci":
                    bundle(tar, config, made)
                else:
                    how = "-comp zstd -root-mode 0755 -no-progress -quiet".split()
                    _fed(
                        ["sqfstar", *how, str(made)], lambda to: with_configuration(tar, config, to)
                    )
        if os.path.lexists(target):
            raise UsageError(f"{target} has come meanwhile", "Name another one.")
        files.sync_tree(made) if made.is_dir() else files.sync(made)
        files.rename(made, target)


@contextmanager
def _files_of(client: DockerClient, image: Image) -> Iterator[tarfile.TarFile]:
    """All files of an image, as a container would have them."""
    with container_of(client, image.id) as container:
        chunks = Stream(_whole(container.export(chunk_size=BLOCK)))
        with tarfile.open(fileobj=cast(IO[bytes], chunks), mode="r|", bufsize=BLOCK) as tar:
            yield tar


def _whole(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A tar as it comes. Raises EOFError where it has no end, which tarfile takes for one."""
    last = b""
    for chunk in chunks:
        last = (last + chunk)[-len(END) :]
        yield chunk
    if last != END:
        raise EOFError("it has no end")


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """What is in a tar that is a stream, without keeping it."""
    for member in tar:
        tar.members.clear()  # type: ignore[attr-defined] # grows with every entry
        if member.name.removeprefix("./") not in NOT_KEPT:
            yield member


def with_configuration(tar: tarfile.TarFile, config: Mapping[str, Any], to: IO[bytes]) -> None:
    """Copy a tar, with an image's configuration in it as enroot reads it."""
    # A variable with a line's end in it can't be told there.
    variables = "".join(f"{one}\n" for one in config.get("Env") or () if "\n" not in one)
    told = dict(zip(OURS, (variables, _start(config)), strict=True))
    with tarfile.open(fileobj=to, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as new:
        for member in members(tar):
            if member.name.removeprefix("./") not in told:
                new.addfile(member, tar.extractfile(member) if member.isreg() else None)
                new.members.clear()  # type: ignore[attr-defined]
        for name, text in told.items():
            member, content = tarfile.TarInfo(name), text.encode()
            member.size, member.mode = len(content), 0o755
            new.addfile(member, io.BytesIO(content))


def _start(config: Mapping[str, Any]) -> str:
    """What starts in the image: its entrypoint, with what is asked for or its own command."""
    entry = shlex.join(config.get("Entrypoint") or ())
    command = shlex.join(config.get("Cmd") or ["/bin/sh"])
    where = shlex.quote(config.get("WorkingDir") or "/")
    asked = f'[ "$#" -gt 0 ] || set -- {command}'
    return f'cd -- {where} || exit 1\n{asked}\nexec {entry} "$@"\n'


def _fed(argv: Sequence[str | Path], feed: Callable[[IO[bytes]], None], **env: str) -> None:
    """Run a program on what `feed` writes. Raises EngineError with its last words if it fails."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=said, stderr=said, env=os.environ | env
        )
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin:  # it has ended, and says why
                feed(process.stdin)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
        said.seek(0)
        last = said.read().decode(errors="replace").strip()[-2000:]
    if code:
        raise EngineError(f"{argv[0]} failed with exit code {code}: {last}")


def bundle(tar: tarfile.TarFile, config: Mapping[str, Any], made: Path) -> None:
    """Unpack an image's files into a folder with the config.json that runc and its like read.

    Whoever reaches the folder could start what is in it on the machine itself, so no device is made
    and nothing that gives another user's rights. Raises Refused for what leads out of it.
    """
    root = files.make_folder(made) / "rootfs"
    root.mkdir()
    tar.extraction_filter = lambda member, _: member
    times: list[tuple[Path, float]] = []
    for member in members(tar):
        at = _place(root, member.name)
        if at == root or member.ischr() or member.isblk():
            continue
        if os.path.lexists(at):  # it may be a link, which would be written through
            raise files.Refused(at, "isn't written: the image has it twice")
        if member.islnk():  # of what is there, and with its owner, mode and time
            os.link(_place(root, member.linkname), at, follow_symlinks=False)
            continue
        member.name, member.mode = str(at.relative_to(root)), member.mode & 0o777
        if member.isdir():
            member.mode |= 0o700
            times.append((at, member.mtime))
        tar.extract(member, root, numeric_owner=True)
    for at, time in reversed(times):  # what was written into it gave it another
        os.utime(at, (time, time))
    files.write(made / "config.json", compact(configuration(config)))


def _place(root: Path, name: str) -> Path:
    """Where a member lies below `root`. Raises Refused where a link or a .. leads there."""
    at = root / name.lstrip("/").removeprefix("./")
    if at != root:
        files.real_folder(at.parent, root.parent, make=False)
    return at


def configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """A runtime's configuration of a bundle (opencontainers/runtime-spec, config.md).

    The network is the machine's, as between nodes.
    """
    keep = ["nosuid", "noexec", "nodev"]
    told = [
        ("/proc", "proc", keep),
        ("/dev", "tmpfs", ["nosuid", "mode=755"]),
        ("/dev/pts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
        ("/dev/shm", "tmpfs", [*keep, "mode=1777"]),  # noqa: S108 - inside
        ("/tmp", "tmpfs", ["nosuid", "nodev", "mode=1777"]),  # noqa: S108
        ("/sys", "sysfs", [*keep, "ro"]),
    ]
    mounts = [
        {"destination": at, "type": kind, "source": kind, "options": how} for at, kind, how in told
    ]
    argv = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": argv or ["/bin/sh"],
            "env": list(config.get("Env") or ()),
            "cwd": config.get("WorkingDir") or "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": one} for one in ("pid", "ipc", "uts", "mount")]},
    }
