"""Two nodes that share nothing, or all, train on real data."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.agent.ranks.job import free_port
from launcher.runs.datasets import indexed
from tests.agent.conftest import TINY, Run, going_on, runner_command, start

pytestmark = pytest.mark.megatron


def nodes(prefixes: list[Path], caches: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    where = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    runs = []
    with ExitStack() as stack:
        for node, (prefix, cache) in enumerate(zip(prefixes, caches, strict=True)):
            data = ["--data-path", str(prefix), "--split", "90,10,0"]
            program = ["-m", "launcher.trainer.gpt", *TINY, *data, "--data-cache-path", str(cache)]
            options = [*where, "--node-rank", str(node)]
            runs.append(stack.enter_context(going_on(runner_command(1, *program, options=options))))
    return runs


def write(prefix: Path, length: int) -> Path:
    prefix.parent.mkdir()
    documents = ([*range(length - 1), 99] for _ in range(99))
    indexed.write(prefix, documents, vocab_size=100)
    return prefix


NODE = """
import os, runpy, sys
caches = [sys.argv.pop(1), sys.argv.pop(1)]
sys.argv += ["--data-cache-path", caches[int(os.environ["RANK"])]]
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": os.environ["RANK"]}
if __name__ == "__main__":
    runpy.run_module("launcher.trainer.gpt", run_name="__main__")
"""
"""Each rank is that of a node of its own."""


@pytest.mark.parametrize("second", [pytest.param("one", marks=pytest.mark.long), "two"])
def test_the_index_is_built_on_each_node_that_has_none(second: str, tmp_path: Path) -> None:
    """Upstream builds it on rank 0 alone: a node with a folder of its own had none."""
    prefix = write(tmp_path / "data/text", 60)
    (tmp_path / "node.py").write_text(NODE)
    data = ["--data-path", str(prefix), "--split", "90,10,0"]
    caches = [str(tmp_path / "one"), str(tmp_path / second)]
    run = start(2, str(tmp_path / "node.py"), *caches, *TINY, *data)
    assert run.code == 0, run.output
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", second)]
    assert names[0]
    assert names[0] == names[1]


def test_other_data_on_a_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write(tmp_path / "first/text", 60), write(tmp_path / "second/text", 50)]
    runs = nodes(prefixes, [tmp_path / "one", tmp_path / "two"], monkeypatch)
    assert [run.code for run in runs] == [121, 121]
    for run in runs:
        assert re.search(r"\n  data: 1 files, \w+ on node 1 \(.+\), 1 files, \w+ on", run.output)
