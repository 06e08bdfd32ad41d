"""What a script may do where it is recorded: nothing outside, and not for long."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.tools.importing import from_script, sandbox
from launcher.tools.importing.from_script import import_script
from tests.e2e.site import until
from tests.tools.importing.conftest import IMAGES, Imported, sandbox_here

LINES = (Path(__file__).parent / "hostile.txt").read_text(encoding="utf-8").splitlines()
HOSTILE = [
    pytest.param(line, id=f"line{n}", marks=[pytest.mark.long] if n % 4 != 2 else [])
    for n, line in enumerate(LINES, 1)
]
"""A quarter runs each time; the others, and the fork bombs, load the machine."""

LAST = "torchrun pretrain_gpt.py --num-layers 2\n"


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that a folder holds, with modes and contents."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def machine() -> tuple[object, ...]:
    """What root may change of a machine without a file of its own."""
    modes = [os.stat(path).st_mode for path in ("/dev/null", "/dev/zero")]
    return os.uname().nodename, Path("/proc/sys/kernel/core_pattern").read_text(), modes


@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_script_changes_nothing_and_ends(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that is run could remove, write, send or go on for ever."""
    box = sandbox_here()
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    folder = tmp_path / "scripts"
    folder.mkdir(mode=0o755)
    (folder / "canary").write_text("kept\n")
    script = folder / "train.sh"
    script.write_text(f"#!/bin/bash\nHERE={folder}\n{line}\n{LAST}")
    monkeypatch.chdir(folder)
    before, name = tree(tmp_path), machine()
    begun = time.monotonic()
    try:
        done = import_script(script, script.read_text(), IMAGES, box)
    except UsageError as error:
        assert "train.sh" in str(error)  # it is refused by name
    else:
        assert "pretrain_gpt.py" in done.text or done.told
    assert time.monotonic() - begun < 300
    assert tree(tmp_path) == before
    assert machine() == name
    # The kernel ends what was below a sandbox by and by.
    until(lambda: {*running(str(folder))} <= {os.getpid()})


def running(mark: str) -> list[int]:
    """The processes that have the mark in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_sandbox_has_no_network_no_environment_and_no_other_files(
    imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script could read or reach would be in its output, or gone."""
    monkeypatch.setenv("SECRET_OF_MINE", "abc")
    text = (
        "[ -e /etc/passwd ] && A=--seed || A=\n"
        "ls /sys/class/net 2>/dev/null | grep -qv lo && A=--seed\n"
        "[ -e ../beside.sh ] && A=--seed\n"
        "env | grep SECRET && A=--seed\n"
        '[ "$(id -u)" = 0 ] && A=--seed\n'
        "torchrun pretrain_gpt.py --num-layers 2 $A\n"
    )
    done = imported(text, "far/train.sh", **{"beside.sh": "LAYERS=3\n"})
    assert "num_layers: 2\n" in done.text
    assert "seed" not in done.text


def test_a_socket_beside_a_script_cant_be_reached(imported: Imported, tmp_path: Path) -> None:
    """tmux's or an engine's takes orders also where its folder is read-only: it leads outside."""
    connect = "socket(S, AF_UNIX, SOCK_STREAM, 0) && connect(S, sockaddr_un('/run/beside/s'))"
    text = (
        f'A=$(/usr/bin/perl -MSocket -e "{connect} or print \\$!" 2>&1)\n'
        'torchrun pretrain_gpt.py --num-layers 2 --save "$A"\n'
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")  # its whole path may be too long
        listening.listen(1)
        listening.settimeout(0)
        done = imported(text)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert "Operation not permitted" in done.text


WRITE = "for i in {1..9}; do /usr/bin/head -c 30000000 /dev/zero > /tmp/$i; done"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n" * (2**18 - 100) + LAST, "it can't be read within 3 seconds"),
        ("a(){\n" * 50000 + LAST, "it can't be read within 3 seconds"),
        (
            "torchrun pretrain_gpt.py --num-layers 2 $(/usr/bin/seq 120000)",
            "it can't be read within 3 seconds",
        ),
        (f"{LAST}{WRITE}; read -t 5 < <(/usr/bin/sleep 5)\n", "bytes of memory"),
        (
            f"for i in 1 2 3 4; do torchrun x.py $(/usr/bin/seq 90000); done\n{LAST}",
            "over 300000 words",
        ),
    ],
    ids=[
        *("regular expressions: hours of what bash does at once", "functions", "comparisons"),
        "bubblewrap before 0.8 bounds files in memory by half of the machine's alone",
        "a list of words takes far more memory than their bytes",
    ],
)
def test_what_takes_too_long_or_too_much_is_given_up(
    text: str, said: str, imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "seconds" in said:
        monkeypatch.setattr(from_script, "MOST_SECONDS", 3)
    monkeypatch.setattr(sandbox, "DISK", 2**30)
    monkeypatch.setattr(sandbox, "MEMORY", 150_000_000)
    begun = time.monotonic()
    with pytest.raises(UsageError, match=said):
        imported(text)
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize(
    "text",
    [
        f"echo > $STANDIN_RECORDS/²; echo > $STANDIN_RECORDS/007\n{LAST}",
        f"# {'a' * 300}.sh\n{LAST}",
        "touch a; cp a b; mv b c; ln -s c d; echo 1 | tee e > f; rm a\n"
        "[ -f c ] && [ -L d ] && [ -s e ] && [ ! -e a ] && [ ! -e b ] && L=2 || L=1\n"
        "torchrun pretrain_gpt.py --num-layers $L\n",
    ],
    ids=[
        "a name such as ² or 007 among the records was taken for a number",
        "a script that it names has too long a name for a file",
        "copying was passed over, and a test of the file decided wrongly",
    ],
)
def test_what_a_script_does_ends_no_import(text: str, imported: Imported) -> None:
    assert "num_layers: 2\n" in imported(text).text


def test_a_script_in_the_root_folder_is_refused() -> None:
    """All of the machine would lie beside it."""
    with pytest.raises(UsageError, match="lies in /"):
        import_script(Path("/train.sh"), LAST, IMAGES, sandbox.NoSandbox())


def test_where_there_is_no_sandbox_a_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, a script would be run as it is."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="there is none") as caught:
        sandbox.find_sandbox()
    assert "--trust" in str(caught.value)


def test_with_trust_the_stand_ins_alone_are_between(imported: Imported, tmp_path: Path) -> None:
    """Its stand-ins keep what starts, copies and removes from this machine."""
    text = (
        "rm -rf canary; mkdir new; cp canary b\nX=<x>\n"
        r"find . -name canary -exec rm {} \;; find . -name canary -delete" + "\n"
        "sed -i s/kept/changed/ canary; sed -ne p -i canary\n"
        "python3 -c 'import os; os.system(\"rm canary\")'\n"
        "cd /nowhere/of/it; echo changed > canary; cd ../it && /bin/rm -f canary; cd -\n"
        "srun torchrun a.py --seed 1\n"
    )
    done = imported(text, box=sandbox.find_sandbox(trust=True), canary="kept")
    assert "seed: 1" in done.text
    assert sorted(one.name for one in tmp_path.iterdir()) == ["canary", "train.sh"]
    assert (tmp_path / "canary").read_text() == "kept"
    assert not Path("/nowhere").exists()
