"""What plain bash starts, with the program alone replaced: the truth that `import` is held to.

Nothing of the importer's is in it: no trace, no stand-ins for what isn't the program, no folders
made on the way. All that a script reads is given.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

STUB = r"""#!/bin/bash
case ${0##*/} in
  srun | mpirun | mpiexec | apptainer | singularity | docker | ssh | numactl | nsys | sudo)
    for ((i = 1; i <= $#; i++)); do
      case ${!i##*/} in
        bash | sh | python | python3 | torchrun | deepspeed | env) exec "${!i##*/}" "${@:i+1}" ;;
      esac
    done ;;
  python | python3) case $1 in -c | - | '') exec /usr/bin/python3 "$@" ;; esac ;;
esac
{ printf 'START\0%s\0' "${0##*/}"; printf '%s\0' "$@"; printf '\n'; } >>/tmp/starts
"""
REPLACED = (
    "srun mpirun mpiexec apptainer singularity docker ssh numactl nsys sudo python python3 "
    "torchrun deepspeed accelerate"
)
COMPARED = ("torchrun", "deepspeed", "accelerate", "python", "python3")
QUIET = "wget curl git pip conda module sleep nvidia-smi"


def starts(path: Path, given: Mapping[str, str], arguments: tuple[str, ...]) -> list[list[str]]:
    """The words of each program that bash starts; [] where a folder that it goes to isn't there."""
    inner = (
        f"mkdir -p /stub /tmp {path.parent}; cp -r /from/. {path.parent}; cd {path.parent}; "
        f"printf %s \"$STUB\" >/stub/.s; chmod +x /stub/.s; printf '#!/bin/bash\\n' >/stub/.q; "
        f"chmod +x /stub/.q; for n in {REPLACED}; do ln -s .s /stub/$n; done; "
        f"for n in {QUIET}; do ln -s .q /stub/$n; done; unset STUB; "
        "printf '#!/bin/bash\\necho node-0\\n' >/stub/scontrol; chmod +x /stub/scontrol; "
        'PATH=/stub:$PATH timeout 10 bash "$@" >/dev/null 2>/tmp/err </dev/null; sleep 0.2; '
        "grep -q ' cd: ' /tmp/err || cat /tmp/starts"
    )
    walls = ["bwrap", "--unshare-all", "--die-with-parent", "--tmpfs", "/", "--proc", "/proc"]
    walls += ["--dev", "/dev", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
    walls += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    walls += ["--ro-bind", "/etc/alternatives", "/etc/alternatives"]
    walls += ["--ro-bind", str(path.parent), "/from"]
    base = {"PATH": "/usr/bin:/bin", "HOME": "/home/me", "STUB": STUB, "LANG": "C.UTF-8"}
    done = subprocess.run(
        [*walls, "bash", "-c", inner, "bash", str(path), *arguments],
        env={**base, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    parts = done.stdout.split("START\0")[1:]
    return [part.rstrip("\n").rstrip("\0").split("\0") for part in parts]


def values(text: str, names: list[str], count: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """A value for each variable and each argument: one that the script compares it with, or 8."""
    alias = {number: name for name, number in re.findall(r"(?m)^\s*(\w+)=\"?\$\{?(\d+)", text)}
    given = {name: _compared(text, name) for name in names}
    return given, tuple(_compared(text, alias.get(str(n), "")) for n in range(1, count + 1))


def _compared(text: str, name: str) -> str:
    match = name and re.search(rf"\$\{{?{name}\}}?\"?\s*==?\s*\"?([A-Za-z0-9.]+)", text)
    return match[1] if match else "8"
