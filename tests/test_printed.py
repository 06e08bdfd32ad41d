"""Each command that README.md and docs/ print is executed here, or named with why it can't be.

Transcripts (`console`) are repeated by test_docs.py; here is every other fence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.test_docs import FENCE, PAGES, ROOT, call, shell, shown, text_of, transcript

__all__ = ["shell"]
PYTHON = os.environ.get("MEGATRON_PYTHON", sys.executable)
"""A Python with torch and Megatron-Core, where this one has none."""
SHOWN = ("yaml", "diff", "toml", "{eval-rst}", "bash")  # no commands of theirs; `bash` is a script
FOLLOWS = re.compile(r"launcher (attach|logs -f|board)\b")  # go on until Ctrl-C
STARTS = re.compile(r"(launcher (?:run|resume)\b.*?)((?: -- .*)?$)")
ELSEWHERE = re.compile(r"launcher (nodes|tune|forecast|runs receipt|run .*tiny.yaml)")
"""Commands whose transcript is another machine's: they are executed, and not compared."""
CODES = {
    "launcher doctor": (0, 121),  # 121 without an engine
    "launcher doctor --tag 24.10": (0, 121),
    "launcher explain RUN": (1,),  # nothing failed
}
CANNOT = {
    r"make (image|images|compat)\b": "NVIDIA's base; tests/e2e builds the row cpu",
    r"\S* ?make image TAG=24.10 EXTRAS=": "NVIDIA's base; tests/e2e/test_extras.py",
    r"launcher image (build|verify|inspect|save|load|probe|ls)\b": "an engine; tests/e2e",
    r"launcher (matrix compat|fetch)\b": "an engine, registries and GitHub; tests/e2e",
    r"launcher image (push|pull)\b|docker login": "a registry; tests/e2e/test_transfer.py",
    r"make (demo|verify)\b|launcher run demo.yaml": "an engine, minutes; tests/tools/test_demo.py",
    r"make lock(?! OFFLINE)": "registries of images",
    r"make (test|test-long|check|bench)$": "these are the tests; .ci/run",
    r"make docs$": "tests/test_docs.py builds the site",
    r"gh attestation": "GitHub",
    r"pip wheel .* git\+https|\S+/pip install .* torch ": "GitHub or PyTorch's index",
    r"enroot |docker save|apptainer ": "a cluster's tools",
    r"launcher data tokenize .* --slurm": "a cluster; tests/e2e/test_slurm.py has a real one",
    r"launcher (shell|exec|doctor --nccl)\b": "a GPU",
    r"launcher run --backend local --gpus 1 gpt2.yaml$|launcher tune .* --gpus 1": "a GPU",
    r"launcher doctor --nodes": "a second machine",
    r"(eval \"\$\()?launcher completion (zsh|fish)\b": "zsh and fish; tests/cli/test_cli.py",
    r"launcher bisect": "upstream's git; tests/tools/bisect",
    r"python3 /opt/launchpad|cd /opt/megatron|torchrun ": "an image; tests/e2e/test_example.py",
}
STARTED = "launcher run gpt2-tiny.yaml --backend local --set logging.log_interval=5"
TINY = f"{STARTED} --set training.train_iters=10"
CORPUS = """for i in $(seq 400); do echo '{"text": "The quick brown fox."}'; done > corpus.jsonl"""
SCENES = {
    "backends.md": """(echo extends: gpt2; echo name: mine
        sed 's/checkpoint: {/checkpoint: {load: null, /' 5.yaml
        echo 'training: {global_batch_size: 128, micro_batch_size: 1}') > mine.yaml""",
    "data.md": f"""{CORPUS}; mkdir corpus; cp corpus.jsonl corpus/a.jsonl
        printf 'content\\nsome text\\n' > part-1.csv; printf '1,text\\n' > old.csv
        launcher data tokenize 'corpus/*.jsonl' -o data/c --append-eod --shard 2/2""",
    "failures.md": "echo 'torch.OutOfMemoryError: CUDA out of memory.' > slurm-4711.out",
    "import.md": "cp 1.bash train.sh",
    "install.md": f"""printf 'import os, signal, time\\nif os.environ["RANK"] == "1":\\n'> die.py
        printf '    os.kill(os.getpid(), signal.SIGKILL)\\ntime.sleep(9)\\n' >> die.py
        {TINY} --set name=mine --set program=./die.py || true""",
    "models.md": f"{CORPUS}; {TINY} --set 'data.text=[corpus.jsonl]' --set checkpoint.save=ckpt",
    "performance.md": f"""{TINY}; printf 'extends: gpt2-tiny\\nname: tiny\\n' > tiny.yaml
        echo 'training: {{train_iters: 14}}' >> tiny.yaml""",
    "runs.md": """mkdir Qwen3-0.6B; echo '{"model_type": "qwen3", "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": true, "hidden_act": "silu", "rope_theta": 1000000}
        ' > Qwen3-0.6B/config.json
        echo 'torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --hidden-size 64
        --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --mock-data
        --micro-batch-size 1 --train-iters 9 --lr 1e-3' | tr '\\n' ' ' > pretrain.sh
        (echo extends: gpt2; echo name: wide) > wide.yaml
        echo 'nodes: {count: 2, master_addr: 10.0.0.1}' >> wide.yaml""",
    "watching.md": f"""{{ echo '[rank17]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB'
        echo '[rank47]: RuntimeError: [gloo/pair.cc] Connection closed by peer [10.0.0.1]:1'
        }} > slurm-4711.out; {TINY}; cp $LAUNCHER_RUNS/*/metrics.jsonl .
        {STARTED} --detach --set name=RUN --set checkpoint.save=ckpt --set training.train_iters=9999
        until launcher logs RUN | grep -q iteration; do sleep 1; done""",
}
"""What a page's commands find in their folder; its yaml and bash fences are there by number."""
TRAIN = ("api.md", "install.md", "models.md", "performance.md", "watching.md")


def printed(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page, but those of its transcripts; with the lines that are shown below."""
    for language, body in FENCE.findall(text_of(path)):
        body = body.replace("\\\n", " ")
        if language == "python":
            yield f"python3 - <<'END'\n{body}END", []
        elif language == "sh":
            yield from ((re.sub(r"\s+# .*", "", line), []) for line in body.splitlines())
        elif language == "text":
            yield from transcript(body)
        else:
            assert language in (*SHOWN, "console"), f"{path.name}: a fence without a kind: {body}"


def typed(command: str) -> str:
    """What is executed for a command: a run that needs more than this machine has is a dry one."""
    if FOLLOWS.match(command):
        return f"timeout -s KILL 20 {command}"
    if ("--backend local" in command and "--gpus" not in command) or "--dry-run" in command:
        return command
    return STARTS.sub(r"\1 --dry-run\2", command)


def codes(command: str) -> tuple[int, ...]:
    """The exit codes that a command may have."""
    return (137, -9) if FOLLOWS.match(command) else CODES.get(command, (0,))


def why_not(command: str) -> list[str]:
    """The rows of CANNOT that a command matches."""
    return [row for row in CANNOT if re.match(row, command)]


def test_what_can_not_be_executed_is_printed_somewhere() -> None:
    """A row that stays after its command has gone would excuse another one."""
    found = {row for path in PAGES for command, _ in printed(path) for row in why_not(command)}
    assert {*CANNOT} - found == set()


@pytest.fixture
def page_folder(shell: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """A copy of this repository's files, changes included, where a page's commands are typed."""
    folder = tmp_path / "work"
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(argv, text=True).split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    shell["PATH"] = os.pathsep.join(
        [str(tmp_path / "bin"), str(Path(PYTHON).parent), shell["PATH"]]
    )
    yield folder
    call("launcher stop --now RUN", folder, shell)


@pytest.mark.long
@pytest.mark.parametrize("path", [p for p in PAGES if [*printed(p)]], ids=lambda path: path.name)
def test_every_command_works_as_it_is_printed(
    path: Path, shell: dict[str, str], page_folder: Path
) -> None:
    """A reader typed a page's commands, and the third was refused: its file was there already."""
    if path.name in TRAIN and sys.executable == PYTHON and missing("torch", "megatron.core"):
        pytest.skip("no torch or megatron.core")
    for number, (language, body) in enumerate(FENCE.findall(text_of(path)), 1):
        (page_folder / f"{number}.{language}").write_text(body, "utf-8")
    code, output = call(f"set -e; {SCENES.get(path.name, 'true')}", page_folder, shell)
    assert code == 0, output
    failed = []
    for command, lines in printed(path):
        if not why_not(command):
            code, output = call(typed(command), page_folder, shell)
            same = typed(command) == command and not ELSEWHERE.match(command)
            found = [any(shown(line).match(one.strip()) for one in output.splitlines())
                     for line in lines if same]  # fmt: skip
            if code not in codes(command) or not all(found):
                failed.append(f"{command}: {code}, {found}\n{output[-2000:]}")
    assert not failed, "\n".join(failed)
