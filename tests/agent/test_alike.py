"""Nodes that meet before their ranks start: who is missing is named, and what isn't equal."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.checkpoints import lineage
from launcher.agent.ranks import alike, reduction, rendezvous
from launcher.agent.ranks.command_line import MismatchError, free_port, parse
from launcher.agent.ranks.rendezvous import Rendezvous, RendezvousFailure, StopWaiting
from tests.e2e.site import until

from .conftest import SetGpus, nodes


def together(nodes: int, do: Callable[[Rendezvous], Any], seconds: float = 10) -> list[Any]:
    """What `do` gives, or raises, on each node, once all have met."""
    port = free_port()

    def one(node: int) -> Any:
        with closing(Rendezvous(node, nodes, "127.0.0.1", port, print)) as here:
            try:
                here.join(seconds)
                return do(here)
            except RendezvousFailure as failed:
                return str(failed)

    with ThreadPoolExecutor(nodes) as pool:
        return [*pool.map(one, range(nodes))]


def test_each_node_hears_what_each_tells_in_their_order() -> None:
    """Twice, and more than one packet of it: an answer that was cut would be half a line."""

    def told(here: Rendezvous) -> list[Any]:
        return [here.exchange([here.node] * 50_000, list), here.exchange(here.node, sum)]

    for found in together(4, told):
        assert found == [[[node] * 50_000 for node in range(4)], 6]


def test_the_port_is_free_for_the_ranks_once_all_have_met() -> None:
    """The ranks of another node would come to what was about to close."""

    def listens(here: Rendezvous) -> str:
        here.exchange(None, list)
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", here.port)):
            return "it listens still"
        return "free"

    assert together(3, listens) == ["free"] * 3


def test_a_node_that_leaves_is_named_on_all_others() -> None:
    def leave(here: Rendezvous) -> Any:
        return here.node == 1 or here.exchange(None, list)

    host = socket.gethostname()
    first, gone, other = together(3, leave)
    assert gone is True
    assert first == other == f"node 1 ({host}) has left: see what it says there"


def test_a_node_that_hangs_is_named_on_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    def hang(here: Rendezvous) -> Any:
        if here.node == 2:
            return held.wait(20)
        try:
            return here.exchange(None, list, 0.5 if here.node == 0 else 20)
        finally:
            held.set()

    found = together(3, hang)
    assert found[0] == found[1]
    assert f"node 2 ({socket.gethostname()}) hangs, or the link to it is cut" in found[0]


def fails(node: int, nodes: int, port: int, why: str, seconds: float = 0.3) -> None:
    here = Rendezvous(node, nodes, "127.0.0.1", port, print)
    with closing(here), pytest.raises(RendezvousFailure, match=why):
        here.join(seconds)


def test_who_does_not_come_is_named() -> None:
    fails(0, 4, free_port(), r"node 1, 2, 3 didn't come to 127\.0\.0\.1:.*after 0\.3 s")


def test_a_first_node_that_is_not_there_is_told_so() -> None:
    fails(1, 2, free_port(), "nobody listens there")


def test_another_that_listens_is_no_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was left behind keeps the port, and would be waited for."""
    monkeypatch.setattr(rendezvous, "GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        fails(1, 2, port, "is no first node of a run that begins", 0.8)
        fails(0, 2, port, f"node 0 can't listen at port {port}: Address")


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (((0, 2), (1, 3)), "is one of 3 nodes, and node 0 of 2"),
        (((0, 3), (1, 3), (1, 3)), "both say that they are node 1"),
    ],
)
def test_numbers_that_do_not_fit(nodes: Sequence[tuple[int, int]], why: str) -> None:
    """Typed by hand on each node, they would wait for each other for ever."""
    port = free_port()

    def one(node: tuple[int, int]) -> str:
        with (
            closing(Rendezvous(*node, "127.0.0.1", port, print)) as here,
            pytest.raises(RendezvousFailure) as end,
        ):
            here.join(10)
        return str(end.value)

    with ThreadPoolExecutor() as pool:
        assert all(why in found for found in pool.map(one, nodes))


def test_strangers_at_the_port_are_let_go() -> None:
    """A scanner, or a node that ended and begins again, would end the run."""
    port = free_port()

    def one(node: int) -> Any:
        with closing(Rendezvous(node, 3, "127.0.0.1", port, print)) as here:
            here.join(10)
            return here.exchange(node, list)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(one, 0)
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 50_000 + b"\n",
            b'{"node": 7, "nodes": 3, "host": "x"}\n',
            b'{"node": 1, "nodes": 3, "host": "x"}\n',
        ):
            with closing(until(lambda: _connected(port))) as it:
                it.sendall(said)
                time.sleep(0.05)
        others = [pool.submit(one, 1), pool.submit(one, 2)]
        assert [found.result() for found in (first, *others)] == [[0, 1, 2]] * 3


def _connected(port: int) -> socket.socket | None:
    with suppress(ConnectionRefusedError):
        return socket.create_connection(("127.0.0.1", port))
    return None


def test_whoever_waits_can_be_stopped() -> None:
    for node in (0, 1):
        here = Rendezvous(node, 2, "127.0.0.1", free_port(), print, stopped=lambda: True)
        with closing(here), pytest.raises(StopWaiting):
            here.join(60)


def test_who_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", (0.1, 60.0))
    said: list[str] = []
    here = Rendezvous(0, 2, "10.0.0.1", free_port(), said.append)
    with closing(here), pytest.raises(RendezvousFailure):
        here.join(0.6)
    assert said == [f"waiting: node 1 didn't come to 10.0.0.1:{here.port}"]


def known(*each: dict[str, str]) -> list[dict[str, Any]]:
    return [{"host": f"host-{node}", "facts": one} for node, one in enumerate(each)]


def test_what_is_not_equal_is_named_with_its_nodes() -> None:
    """What a node can't tell is no difference."""
    one, other = {"GPUs": "8", "driver": "550.1", "image": ""}, {"GPUs": "8", "driver": ""}
    assert alike.differences(known(one, other, one)) == []
    assert alike.differences(known(one, other | {"GPUs": "4"}, one, one | {"GPUs": "4"})) == [
        "GPUs: 4 on node 1, 3 (host-1, host-3), 8 on node 0"
    ]


def test_data_that_differs_in_one_length_is_other_data(tmp_path: Path) -> None:
    """Small enough, an index is compared whole; what is no data's name is left alone."""
    index, words = tmp_path / "text.idx", ["--split", "9,1", str(tmp_path / "text"), "x" * 300]
    nothing = alike.data_digest(words)
    (tmp_path / "text.bin").write_bytes(b"tokens")
    index.write_bytes(bytes(1_000_000))
    one = alike.data_digest(words)
    index.write_bytes(bytes(700_000) + b"\1" + bytes(299_999))
    assert len({nothing, one, alike.data_digest(words)}) == 3


def test_a_clock_that_is_off_is_named() -> None:
    told = [{"host": host, "time": time} for host, time in (("a", 100.0), ("b", 101.0))]
    assert alike.clocks(told) == []
    off = [{"host": "c", "time": 160.0}, {"host": "d", "time": 40.0}]
    why = "node 0 (a): `timedatectl` says whether it is set by the network"
    assert alike.clocks([*told, *off]) == [
        f"clock: node 2 (c) is 60 s ahead of {why}",
        f"clock: node 3 (d) is 60 s behind {why}",
    ]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Meets the other ranks as training programs do, and says so."""
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\ntorch.distributed.init_process_group('gloo')\n"
        "torch.distributed.barrier()\nprint('ranks', torch.distributed.get_world_size())\n"
        "torch.distributed.destroy_process_group()\n"
    )
    return script


@pytest.mark.long  # in containers, which have the port of their own: e2e/test_train_in_image.py
@pytest.mark.megatron
def test_ranks_meet_at_the_port_where_their_nodes_did(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with nodes([str(program)], 1, 1, cpu=True) as runs:
        pass
    for run in runs:
        assert run.code == 0, run.output
        assert "ranks 2" in run.output


def test_a_node_that_is_refused_ends_the_others(
    gpus: SetGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' ranks would wait for its own until their time-out, half an hour later."""
    gpus(1)
    monkeypatch.setenv("LAUNCHER_CLAIM", f"b anew {tmp_path}")
    lineage.claim(tmp_path, "a", "a")
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "program.py").write_text("print('rank')")
    with nodes([str(tmp_path / "program.py")], 1, 1) as runs:
        pass
    for run in runs:
        assert run.code == 121, run.output
        assert "\nrank\n" not in run.output
        assert re.search(r"not all nodes can start their ranks:\n  node 0 \(.*\): ", run.output)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What two nodes find not alike: with a program's words, a folder of checkpoints, processes."""
    monkeypatch.setattr(reduction, "look", lambda *given, **more: [])

    def seen(
        words: Sequence[Sequence[str]],
        saved: Sequence[Path] = (),
        processes: Sequence[int] = (1, 1),
    ) -> list[str]:
        where = ["--cpu", "--nodes", "2", "--master-addr", "127.0.0.1"]
        where += ["--master-port", str(free_port()), "--node-rank"]

        def one(node: int) -> str:
            own = [str(node), "--processes-per-node", str(processes[node])]
            own += ["--keep", "9", "--checkpoints", str(saved[node])] if saved else []
            ranks = parse([*where, *own, "--", *words[node]], {})
            try:
                linked = alike.look(ranks, {}, 0, lambda: False)
            except MismatchError as unlike:
                return str(unlike)
            assert linked
            linked.rendezvous.close()
            return ""

        with ThreadPoolExecutor() as pool:
            return [*pool.map(one, range(2))]

    return seen


def test_nodes_with_other_processes_or_data_are_not_alike(
    seen: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Another number of processes would be another rank, and a wait for the rest."""
    for folder, size in (("one", 60), ("two", 50)):
        (tmp_path / folder).mkdir()
        for end in (".bin", ".idx"):
            (tmp_path / folder / f"text{end}").write_bytes(bytes(size))
    words = [["x", str(tmp_path / folder / "text")] for folder in ("one", "two")]
    for told in seen(words, processes=(1, 2)):
        assert "\n  processes: 2 on node 1 (" in told
        assert re.search(r"\n  data: 1 files, \w+ on node 1 \(.+\), 1 files, \w+ on", told)


@pytest.mark.parametrize("second", ["one", "two"])
def test_checkpoints_are_on_a_disk_that_all_share(
    second: str, seen: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Else half of each checkpoint is found missing when it is needed."""
    for told in seen([["x"], ["x"]], [tmp_path / "one", tmp_path / second]):
        assert ("  checkpoints: node 1 (" in told) == bool(told) == (second == "two")
    assert [path.name for path in tmp_path.glob("*/.seen*")] == []


@pytest.mark.parametrize("second", ["one", "two", "made"])
def test_the_sample_index_is_on_a_disk_that_all_share(
    second: str, seen: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Rank 0 makes it, and all others would look for it where it isn't."""
    (tmp_path / "text.idx").write_bytes(b"0")
    (tmp_path / "text.bin").write_bytes(b"0")
    (tmp_path / "made/cache").mkdir(parents=True)
    (tmp_path / "made/cache/0-GPTDataset-train-shuffle_index.npy").touch()
    text = str(tmp_path / "text")
    words = [["x", "--data-cache-path", str(tmp_path / one), text] for one in ("one", second)]
    for told in seen(words):
        assert ("  the data's sample index: node 1 (" in told) == bool(told) == (second == "two")
    assert [path.name for path in tmp_path.glob("*/.seen*")] == []


def test_a_node_goes_on_alone_where_one_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no other to send around a ring: the run that went on ended with an IndexError."""
    monkeypatch.setattr(rendezvous, "LAST_CALL_SECONDS", 0)
    where = f"--nodes 2 --fewer 1 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    ranks = parse(["--cpu", "--processes-per-node", "1", *where, "--node-rank", "0", "--", "x"], {})
    linked = alike.look(ranks, {}, 0, lambda: False)
    assert linked
    with closing(linked.rendezvous):
        assert (linked.ranks.nodes, linked.ranks.node_rank) == (1, 0)
