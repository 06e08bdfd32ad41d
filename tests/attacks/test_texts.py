"""Files that a person hands us, changed at random: each is taken or refused in words, and soon."""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.cli.run import run
from tests.attacks.conftest import bounded
from tests.conftest import ROOT

NAMES = (
    *("--upload-pack=touch x;", "ext::sh -c x", "ssh://-oProxyCommand=x/y", "-v/:/host", "-u"),
    *("../../etc/passwd", "a/../b", "/etc", ".", "a b", "a\\nb", "https://-x/y", "file:///etc"),
    *("git@host:-x", "a@sha256:0", "24.10", "core.lock", "x" * 20_000, "a-" * 10_000, "", "é"),
    *("~nosuchuser/x", "~", "/proc/self/mem", "https://me:hunter2@host", "hunter2@host", "$(id)"),
    *("https://[::1", "nvcr.io=a.b/c", "=a.b", "a=b=c", ",,,", "[::1]:1=a.b", "nan", "1e400"),
    *("0", "-1", "0x10", "1_0", "3600.1", "--privileged", "device=0,0", "<<", "__class__", "all"),
)
"""What goes on to git, pip, the engine or the file system, and what can't."""
VALUES = (
    *(f'"{name}"' for name in NAMES),
    *("", "~", "true", "{}", "[]", "[[hunter2]]", "{a: {b: c}}", "0", "-1", "1.5", "1e400", ".nan"),
    *("-.inf", "24.10", "1_000", "0o17", "0100", "1:30", "2024-01-01", "2024-13-45", "9" * 400),
    *('"\\0"', '"a\\0b"', '"\\ud800"', '"\\e[2J"', '"\\u202e"', "!!binary x", "*nowhere", "a\tb"),
    *("!!python/object/apply:os.system [id]", "&a [*a]", "|", "<<: x", "- x", "? [a]: b", "@", "'"),
    *(
        "[" * 300,
        "{a: " * 300,
        "[a, 1, b]",
        "[-1, 0, 1]",
        "{nvcr.io: 5}",
        "{nvcr.io: a, nvcr.io: b}",
    ),
    *('">=2,<1"', '"numpy; os_name"', '"a @ file:///etc"', "[-e, .]"),
)
ENDS = (*["\n"] * 20, "", "\n...\n", "\n---\na: b\n", "\0", "\ufeff", "\n\t")


def mutated(chance: random.Random, text: str) -> str:
    """A YAML text with one or two changes."""
    lines = text.splitlines()
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(lines))
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        match chance.randrange(9):
            case 0 | 1:  # another value
                lines[at] = f"{line.partition(': ')[0]}: {chance.choice(VALUES)}"
            case 2 | 3 | 4:  # of several on a line, or in a list
                places = [*re.finditer(r"(?<=[:,-] )[^,\]}{\[]+|(?<=\[)[^,\]]+", line)]
                if places:
                    place, value = chance.choice(places), chance.choice(VALUES)
                    lines[at] = line[: place.start()] + value + line[place.end() :]
            case 5:  # another key
                lines[at] = f'{indent}"{chance.choice(KEYS)}": {line.partition(": ")[2]}'
            case 6:
                value = f"{chance.choice(KEYS)}: {chance.choice(VALUES)}"
                lines.insert(at, chance.choice((line, indent + value)))
            case 7:
                lines[at : at + (len(lines) > 1)] = []
            case _:
                lines[at] = " " * chance.randint(0, 6) + line.lstrip()
    changed = "\n".join(lines) + chance.choice(ENDS)
    return changed if chance.randrange(20) else changed[: chance.randrange(len(changed) + 1)]


KEYS = (
    *("name", "image", "gpus", "nodes", "program", "source", "env", "secrets", "mounts", "model"),
    *("resources", "watchdog", "max_restarts", "processes", "megatron_args", "training", "data"),
    *("parallel", "checkpoint", "logging", "mount", "1", "null", "<<", "eod_mask_loss", "--x"),
    *("recompute_num_layers", "num_experts", "expert_tensor_parallel_size", "num-layers", "save"),
    *("lr_wsd_decay_iters", "decoder_first_pipeline_num_layers", ""),
)


@pytest.mark.parametrize("count", [200, pytest.param(800, marks=pytest.mark.long)])
def test_a_run_file(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The presets and README's: each is a plan or an error, and nothing but the file is written."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    chance = random.Random(13)  # noqa: S311 - the same files every time
    files = [path.read_text("utf-8") for path in sorted((ROOT / "launcher/presets").glob("*.yaml"))]
    readme = (ROOT / "README.md").read_text("utf-8")
    files += re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    files += [one.replace("program: gpt\n", "program: pretrain_gpt.py\n") for one in files]
    path, planned = tmp_path / "run.yaml", 0
    parser = argparse.ArgumentParser()
    run.declare(parser)
    asked = parser.parse_args([str(path), "--dry-run"], argparse.Namespace(rest=[]))
    for number in range(count):
        text = mutated(chance, chance.choice(files))
        if not chance.randrange(4):
            text += f"megatron_args: {{{chance.choice(KEYS)}: {chance.choice(VALUES)}}}\n"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            with bounded():
                run(asked)
                planned += 1
        except LauncherError as error:
            assert error.problem, text
        except Exception as error:
            raise AssertionError(f"file {number}: {error!r}\n{text}") from error
        capsys.readouterr()
        assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]
    assert count / 14 < planned < count  # some are plans still, and not all
