"""1,000 mutated run files: each is a plan or an error that tells, soon, and nothing is written."""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import pytest

from launcher.cli.start import run
from launcher.errors import LauncherError
from tests.attacks.conftest import bounded
from tests.conftest import ROOT

FILES = 1000
VALUES = (
    *("", "~", "null", "true", "{}", "[]", "[[]]", "{a: {b: c}}", "0", "-1", "1.5", "1e400"),
    *(".nan", "-.inf", "1_000", "0x10", "0o17", "0100", "1:30", "2024-01-01", "9" * 400, "1e-4"),
    *(
        "'\\0'",
        '"\\0"',
        '"\\e[2J"',
        '"\\ud800"',
        "!!python/object/apply:os.system [id]",
        "!!binary x",
    ),
    *(
        "*nowhere",
        "&a [*a]",
        "<<: x",
        "|",
        ">",
        "- x",
        "? x",
        "../../etc",
        "/",
        "~root",
        "~nobody/x",
    ),
    *(
        "--privileged",
        "-v/:/host",
        "$(id)",
        "`id`",
        "a\tb",
        "é",
        "\u202e",
        "x" * 5000,
        "%",
        "@",
        "'",
    ),
    *("[" * 300, "{a: " * 300, "[1, 2, 3, 4]", "[a, 1, b]", "[-1, 0, 1]", "all", "device=0,0"),
)
KEYS = (
    *("name", "image", "gpus", "nodes", "program", "source", "env", "secrets", "mounts"),
    *("resources", "watchdog", "max_restarts", "processes", "megatron_args", "model", "training"),
    *("parallel", "data", "checkpoint", "logging", "mount", "''", "1", "null", "<<", "__class__"),
)
ARGS = (
    *("eod_mask_loss", "recompute_num_layers", "num_experts", "expert_tensor_parallel_size"),
    *("num-layers", "--x", "lr_wsd_decay_iters", "decoder_first_pipeline_num_layers", "save", ""),
)


def originals() -> list[str]:
    """The presets, README's run file, and one that names most keys."""
    found = [path.read_text("utf-8") for path in sorted((ROOT / "launcher/presets").glob("*.yaml"))]
    readme = (ROOT / "README.md").read_text("utf-8")
    found += re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    assert len(found) > 5
    return [*found, *(one.replace("program: gpt\n", "program: pretrain_gpt.py\n") for one in found)]


def mutated(chance: random.Random, original: str) -> str:
    """The file with a change or more."""
    lines = original.splitlines()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(lines) or 1)
        line = lines[at] if lines else ""
        match chance.randrange(9):
            case 0 | 1 | 2:  # another value
                lines[at : at + 1] = [f"{line.partition(':')[0]}: {chance.choice(VALUES)}"]
            case 3:
                lines[at : at + 1] = []
            case 4:
                lines.insert(at, line)
            case 5:
                lines.insert(at, f"{chance.choice(KEYS)}: {chance.choice(VALUES)}")
            case 6:
                lines[at : at + 1] = [" " * chance.randint(0, 6) + line.lstrip()]
            case 7:  # a key of a section written on one line, or its value
                inner = f"{chance.choice(KEYS + ARGS)}: {chance.choice(VALUES)}"
                lines[at : at + 1] = [re.sub(r"\{[^,}]*", lambda _: "{" + inner, line, count=1)]  # noqa: B023
            case _:
                inner = f"{chance.choice(ARGS)}: {chance.choice(VALUES)}"
                lines.append(f"megatron_args: {{{inner}}}")
    return "\n".join(lines) + chance.choice(
        ("\n",) * 40 + ("", "\n...\n", "\n---\na: b\n", "\0", "\ufeff")
    )


def dry_run(path: str) -> int:
    """`launcher run PATH --dry-run`, in this process."""
    parser = argparse.ArgumentParser()
    run.declare(parser)
    return run(parser.parse_args([path, "--dry-run"], argparse.Namespace(rest=[])))


def test_mutated_run_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other error than one of ours, none slow or large, and nothing but the file written."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    chance = random.Random(13)  # noqa: S311 - the same files every time
    files, path, planned = originals(), tmp_path / "run.yaml", 0
    for number in range(FILES):
        content = mutated(chance, chance.choice(files))
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        try:
            with bounded():
                dry_run(str(path))
                planned += 1
        except LauncherError as error:
            assert error.problem, content
        except Exception as error:
            raise AssertionError(f"file {number}: {error!r}\n{content}") from error
        capsys.readouterr()
        assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]
    assert FILES / 10 < planned < FILES  # some are plans still, and not all
