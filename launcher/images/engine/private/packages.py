"""Distribution packages, fetched with apt and unpacked in a folder: nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.base import files, owned
from launcher.base.errors import EngineError

COMPLETE = ".complete"
REQUIRED = re.compile(r"^(Essential: yes|Priority: required)$", re.MULTILINE)
NEEDS = re.compile(r"^(?:Pre-)?Depends: (.*)$", re.MULTILINE)
Say = Callable[[str], None]


def unpack(folder: Path, wanted: Sequence[str], optional: Sequence[str] = ()) -> Path:
    """`folder`, holding `wanted` and all that they need beside what every system has.

    That doesn't depend on what is installed here. Of `optional`, what the distribution has comes
    too. A folder that is complete is left alone.
    """
    return _unpack(folder, wanted, lambda scratch: _download(scratch, wanted, optional))


def unpack_newer(folder: Path, name: str, suite: str) -> Path:
    """`folder`, holding the package `name` alone, of another suite of this system's distribution.

    It comes from the mirror that apt is set up with. A folder that is complete is left alone.
    """

    def download(scratch: Path) -> list[Path]:
        options = [*_apt_options(scratch), *_suite_options(scratch, suite)]
        _run(["apt-get", *options, "update"])
        _run(["apt-get", *options, "download", "--", name], cwd=scratch)
        return [*scratch.glob("*.deb")]

    return _unpack(folder, [name], download)


def _unpack(
    folder: Path, wanted: Sequence[str], download: Callable[[Path], Sequence[Path]]
) -> Path:
    """`folder` with what `download` puts into another, in place of an incomplete one of ours."""
    if (folder / COMPLETE).exists():
        return folder
    if missing := [one for one in ("apt-get", "apt-cache", "dpkg-deb") if not shutil.which(one)]:
        raise EngineError(
            f"{', '.join(wanted)}: can't be fetched: this system has no {missing[0]}",
            "Only distributions with apt (Debian, Ubuntu) are supported here: "
            "install a container engine yourself and start it.",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned.scratch(folder.parent) as scratch:
        root = scratch / "root"
        root.mkdir()
        for package in download(scratch):
            _run(["dpkg-deb", "--extract", "--", str(package), str(root)])
        files.write(root / COMPLETE, f"{' '.join(wanted)}\n")
        owned.mark(root)
        with suppress(FileNotFoundError):
            owned.remove_folder(folder, folder.parent)
        files.rename(root, folder)
    return folder


def _suite_options(scratch: Path, suite: str) -> list[str]:
    """Options with which apt knows `suite` alone, on the mirror of the system's own packages."""
    wanted = ["indextargets", "--format", "$(SITE)", "Created-By: Packages", "Component: main"]
    sites = _run(["apt-get", *wanted]).split()
    if not sites:
        raise EngineError("apt is set up with no mirror", "Run apt-get update first.")
    listed = scratch / "sources.list"
    listed.write_text(f"deb {sites[0]} {suite} main\n", encoding="utf-8")
    (scratch / "lists" / "partial").mkdir(parents=True)
    return [
        f"-oDir::Etc::SourceList={listed}",
        f"-oDir::Etc::SourceParts={os.devnull}",
        f"-oDir::State::lists={scratch / 'lists'}",
    ]


def environment(root: Path) -> dict[str, str]:
    """This process's environment, in which what lies under `root` is found before the system's."""
    env = dict(os.environ)
    if root == Path("/"):
        return env
    programs = [root / place for place in ("usr/sbin", "usr/bin", "sbin", "bin")]
    env["PATH"] = ":".join([*map(str, programs), env.get("PATH", os.defpath), "/usr/sbin:/sbin"])
    for variable, places in {
        "LD_LIBRARY_PATH": ("usr/lib/*-linux-*", "lib/*-linux-*"),
        "XTABLES_LIBDIR": ("usr/lib/*-linux-*/xtables",),
        "PERL5LIB": ("usr/share/perl5", "usr/share/perl/5.*.*", "usr/lib/*-linux-*/perl/5.*.*"),
    }.items():
        found = [path for place in places for path in root.glob(place)]
        if found:
            env[variable] = ":".join(filter(None, [*map(str, found), env.get(variable)]))
    return env


def _download(scratch: Path, wanted: Sequence[str], optional: Sequence[str]) -> list[Path]:
    """The .deb files, by the system's package lists, or by fresh private ones if those fail."""
    options = [*_apt_options(scratch), f"-oDir::State::status={_bare_system(scratch)}"]
    try:
        return _install_only_downloads(scratch, options, wanted, optional)
    except EngineError:
        lists = scratch / "lists"
        (lists / "partial").mkdir(parents=True)
        options.append(f"-oDir::State::lists={lists}")
        # One broken third-party source must not stop us: what matters is the step after.
        subprocess.run(["apt-get", *options, "update"], capture_output=True, check=False)
        return _install_only_downloads(scratch, options, wanted, optional)


def _bare_system(scratch: Path) -> Path:
    """A list of installed packages for apt: those of this system that no Debian is without.

    The required ones, with what they need. apt leaves out of a download what it takes for
    installed, and later it may be removed.
    """
    listed = Path("/var/lib/dpkg/status").read_text("utf-8", errors="replace").split("\n\n")
    known = {text.partition("\n")[0].removeprefix("Package: ").strip(): text for text in listed}
    kept = {name for name, text in known.items() if REQUIRED.search(text)}
    new = kept
    while new:
        needs = {
            need for name in new for line in NEEDS.findall(known[name]) for need in _named(line)
        }
        new = (needs & known.keys()) - kept
        kept = kept | new
    path = scratch / "status"
    path.write_text("\n\n".join(known[name].strip() for name in sorted(kept)) + "\n", "utf-8")
    return path


def _named(line: str) -> Iterator[str]:
    """The packages in a line of dependencies: "a (>= 1), b:any | c"."""
    for one in line.replace("|", ",").split(","):
        yield one.strip().partition(" ")[0].partition(":")[0]


def _apt_options(scratch: Path) -> list[str]:
    """Options that keep apt's files, locks and caches in `scratch`, off the system's."""
    (scratch / "cache" / "archives" / "partial").mkdir(parents=True)
    return [
        f"-oDir::Cache={scratch / 'cache'}",
        f"-oDir::Log={scratch}",
        "-oDebug::NoLocking=true",
        f"-oAPT::Sandbox::User={'root' if os.geteuid() == 0 else ''}",
        "-oAPT::Get::List-Cleanup=false",
        "-oAcquire::Retries=2",
        "-oDPkg::Post-Invoke::=",
    ]


def _install_only_downloads(
    scratch: Path, options: list[str], wanted: Sequence[str], optional: Sequence[str]
) -> list[Path]:
    show = ["apt-cache", *options, "show", "--no-all-versions", "--"]
    known = [
        name
        for name in optional
        if not subprocess.run([*show, name], capture_output=True, check=False).returncode
    ]
    install = ["install", "--yes", "--download-only", "--no-install-recommends"]
    _run(["apt-get", *options, *install, "--", *wanted, *known])
    return sorted((scratch / "cache" / "archives").glob("*.deb"))


def _run(argv: list[str], cwd: Path | None = None) -> str:
    """Run a packaging tool, and give what it printed; its last lines are the error's reason."""
    quiet = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=quiet, cwd=cwd)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-4:]
        raise EngineError(
            f"{argv[0]} failed with exit code {done.returncode}: " + " / ".join(said),
            "Check that the distribution's package mirror can be reached (apt-get update).",
        )
    return done.stdout
