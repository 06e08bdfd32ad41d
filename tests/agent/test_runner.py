"""The runner: what it refuses, what ranks are given, how their ends come out."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.agent import runner, start
from launcher.agent.checkpoints import folders, lineage
from launcher.agent.ranks import bus, devices, oom
from launcher.agent.ranks.command_line import (
    MismatchError,
    NodeRanks,
    RunnerRefusal,
    free_port,
    parse,
    read_secrets,
)
from launcher.agent.words import ASK, NEEDS, REFUSES, STOPPED
from launcher.runs.explain.failures import explain
from launcher.runs.plan.job import EndCause
from tests.tables import table

from .conftest import SetGpus, going_on, nodes, python, runner_command
from .test_folders import distributed
from .test_lineage import saved


def job(*argv: str, environ: dict[str, str] | None = None) -> NodeRanks:
    return parse(["--processes-per-node", "2", *argv], environ or {})


def test_program_is_all_that_follows_the_dashes() -> None:
    parsed = job("--", "-m", "package.module", "--cpu", "--", "x")
    assert parsed.program == ("-m", "package.module", "--cpu", "--", "x")
    assert not parsed.cpu


@table("argv", "reason")
def test_refusals(argv: list[str], reason: str) -> None:
    with pytest.raises(RunnerRefusal, match=reason):
        job(*argv)


@contextlib.contextmanager
def held(one: NodeRanks, wish: str) -> Iterator[Mapping[str, str]]:
    """The variables of ranks while the folder that is wished for is held."""
    with contextlib.ExitStack() as stack:
        yield runner._hold(one, {lineage.VARIABLE: wish}, pytest.fail, stack)


def test_the_folder_that_is_saved_to_is_claimed_by_the_first_node(tmp_path: Path) -> None:
    """Without that nothing tells another run whose checkpoints these are."""
    several = ["--nodes", "2", "--master-addr", "a", "--master-port", "1"]
    root = tmp_path / "made"
    for rank in ("1", "0"):
        one = job(*several, "--node-rank", rank, "--", "x")
        with held(one, f"aaaaaaaa anew {root}") as variables:
            assert (root / lineage.NOTE).exists() == (rank == "0")
            if rank == "0":
                mine = lineage.saver(variables)
                distributed(folders.partial(root, 3, mine))
                folders.publish(root, 3, mine)
    assert lineage.said(root / "iter_0000003") == "aaaaaaaa"
    assert {path.name for path in root.iterdir()} == {"iter_0000003", folders.TRACKER}
    # Where the launcher can't see them, on an engine of another machine, another run's are refused.
    refused = pytest.raises(MismatchError, match="iter_0000003 is run aaaaaaaa's")
    with refused, held(job("--", "x"), f"bbbbbbbb anew {root}"):
        pytest.fail("another run's checkpoints are there")
    assert not (root / lineage.NOTE).exists()
    for mode in ("on", "anew+over"):
        with held(job("--", "x"), f"bbbbbbbb {mode} {root}"):
            assert (root / lineage.NOTE).exists()
    assert lineage.said(root / "iter_0000003") == "aaaaaaaa"


def test_a_folder_that_a_living_run_saves_to_is_refused(tmp_path: Path) -> None:
    """Two launchers with their own records replaced each other's claims, and signed as theirs."""
    with held(job("--", "x"), f"aaaaaaaa anew {tmp_path}"):
        for wish in ("aaaaaaaa on", "bbbbbbbb anew", "bbbbbbbb anew+over"):
            refused = pytest.raises(
                MismatchError, match=r"is in use: run aaaaaaaa on .* saves there"
            )
            with refused, held(job("--", "x"), f"{wish} {tmp_path}"):
                pytest.fail("another run saves there")
        assert lineage.claimed(tmp_path).run == "aaaaaaaa"  # type: ignore[union-attr]


def test_a_data_file_that_became_shorter_is_blamed_for_sigbus(tmp_path: Path) -> None:
    """Every SIGBUS was told as a /dev/shm that is too small."""
    for ending in (".bin", ".idx"):
        (tmp_path / f"text{ending}").write_bytes(bytes(100))
    before = bus.sizes(["train.py", "--data-path", str(tmp_path / "text"), "--a\0b"])
    assert len(before) == 2
    assert bus.blame(before) == ""
    os.truncate(tmp_path / "text.bin", 40)
    blamed = bus.blame(before)
    assert blamed.endswith("text.bin, which it read, became shorter: 40 of 100 bytes")
    told = f"runner: rank 1 was killed by signal 7 (SIGBUS), exit code 135: {blamed}\n"
    for line, name in ((told, "a data file became"), (told.partition(": /")[0], "shared memory")):
        signs = explain([line.encode()], EndCause.ITSELF).signs
        assert signs[0].failure.name.startswith(name)
    (tmp_path / "text.bin").unlink()
    assert "is there no more" in bus.blame(before)


def test_a_free_port_stays_free_for_who_asked_for_it() -> None:
    """Of twenty runs at once one found its port taken by another's connection."""
    ports = [free_port() for _ in range(50)]
    assert len({*ports}) == 50
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("", port)) as listener:  # with SO_REUSEADDR, as torch's store
            assert listener.getsockname()[1] == port


def test_where_ranks_meet() -> None:
    """A cluster's variables are defaults; one node meets on loopback."""
    found = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234"}
    cluster = {f"PET_{name}": value for name, value in found.items()}
    parsed = job("--master-port", "99", "--", "x", environ=cluster)
    assert (parsed.nodes, parsed.node_rank) == (3, 2)
    assert (parsed.master_addr, parsed.master_port) == ("node-a", 99)
    alone = job("--", "x")
    assert alone.master_addr == "127.0.0.1"
    assert alone.master_port > 0


V100, H100 = [("Tesla V100-SXM2-16GB", (7, 0))], [("NVIDIA H100", (9, 0))]
TOO_OLD = RuntimeError("The NVIDIA driver on your system is too old")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((2 * H100, ["sm_90"]), ""),
        (([], []), "no CUDA device is visible: give --cpu"),
        ((H100, ["sm_90"]), "2 processes on 1 visible"),
        ((2 * V100, ["sm_80", "sm_90"]), r"GPU 0 \(Tesla V100-SXM2-16GB\) .* 7\.0, .* sm_80"),
        (TOO_OLD, "can't be started: The NVIDIA driver"),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, found: Any, reason: str) -> None:
    """One for each process, which torch has code for."""
    monkeypatch.setattr(devices, "look", Mock(side_effect=[found]))
    with pytest.raises(MismatchError, match=reason) if reason else nullcontext() as refused:
        assert job("--", "x").check_devices() == 2
    assert not reason or refused.value.code == 121


def test_a_checkout_comes_before_the_program_and_behind_the_redirection() -> None:
    assert job("--cpu", "--checkout", "/c", "--", "-m", "x").command()[2:] == [
        *(start.__file__, "ranks.stacks"),
        *("-m", "launcher.agent.cpu"),
        *("-m", "launcher.agent.checkout", "/c"),
        *("-m", "x"),
    ]


def test_secrets_are_files_named_like_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "WANDB_API_KEY").write_text("k-123\n")
    (tmp_path / "TWO_LINES").write_text("a\nb\n\n")
    (tmp_path / "ca.crt").write_text("no name of a variable")
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "KEYTAB").write_bytes(b"k-\0")
    (tmp_path / "LONG").write_text("k-" * 65536)
    (tmp_path / "NOWHERE").symlink_to(tmp_path / "nowhere")
    found = read_secrets(tmp_path)
    assert found == {"WANDB_API_KEY": "k-123", "TWO_LINES": "a\nb\n"}
    said = capsys.readouterr().err
    assert [line.split(" is no variable")[0] for line in said.splitlines()] == [
        f"runner: {tmp_path}/KEYTAB",
        f"runner: {tmp_path}/LONG",
    ]
    assert "k-" not in said
    assert read_secrets(tmp_path / "nowhere") == {}


def test_environment_of_a_rank() -> None:
    where = ["--nodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "1"]
    given = job(*where, "--", "x").environment(1, {"OMP_NUM_THREADS": "7"}, cpus=8)
    assert " ".join(f"{name}={value}" for name, value in given.items()) == (
        "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 NODE_RANK=1 GROUP_RANK=1 "
        "MASTER_ADDR=a MASTER_PORT=1 OMP_NUM_THREADS=7 CUDA_DEVICE_MAX_CONNECTIONS=1 "
        "NCCL_DEBUG=WARN"
    )
    on_cpu = job("--cpu", "--", "x").environment(0, {}, cpus=4)
    assert (on_cpu["GLOO_SOCKET_IFNAME"], on_cpu["OMP_NUM_THREADS"]) == ("lo", "2")


SLEEPER = """
import os, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    {rank_1}
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, {handler})
print("ready", rank, flush=True)
while True:  # a signal just before one long sleep would be acted on after it
    time.sleep(0.05)
"""


def sleeper(folder: Path, rank_1: str = "pass", handler: str = "signal.SIG_DFL") -> str:
    script = folder / "sleeper.py"
    script.write_text(SLEEPER.format(rank_1=rank_1, handler=handler))
    return str(script)


def test_a_second_request_leaves_the_ranks_their_time(gpus: SetGpus, tmp_path: Path) -> None:
    gpus(2)
    go = tmp_path / "go"
    wait = f"[time.sleep(0.05) for _ in iter(lambda: os.path.exists({str(go)!r}), True)]"
    handler = f"lambda *_: ({wait}, print('saved', rank, flush=True), sys.exit(0))"
    with going_on(runner_command(2, sleeper(tmp_path, handler=handler), cpu=False)) as ranks:
        ranks.line()
        ranks.line()
        for said in ("asked 2 ranks to stop", "SIGTERM: asked to stop already"):
            ranks.process.send_signal(signal.SIGTERM)
            while said not in ranks.output:
                ranks.line()
        go.touch()
    assert ranks.code == 0, ranks.output
    assert ranks.output.count("saved") == 2


ASKED_EARLY = """
import os, signal, sys
from launcher.agent import runner

start = runner._start

def asked(*arguments):
    ranks = start(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    return ranks

runner._start = asked
runner.main(sys.argv[1:])
"""


def test_a_request_while_the_ranks_are_started_ends_them_and_is_no_crash(
    gpus: SetGpus, tmp_path: Path
) -> None:
    gpus(2)
    (tmp_path / "asked.py").write_text(ASKED_EARLY)
    command = runner_command(2, sleeper(tmp_path), cpu=False)
    done = python(str(tmp_path / "asked.py"), *command[3:])
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("signals", "rank_1", "code", "why"),
    [
        ([signal.SIGTERM, signal.SIGINT], "pass", 137, "interrupted a second time"),
        ([signal.SIGTERM], "pass", 137, "grace period over"),
        ([], "time.sleep(1); sys.exit(3)", 3, "killing rank 0: outlived a failed rank"),
    ],
)
def test_ranks_that_ignore_a_signal_are_killed(
    gpus: SetGpus, tmp_path: Path, signals: list[int], rank_1: str, code: int, why: str
) -> None:
    gpus(2)
    script = sleeper(tmp_path, rank_1, handler="signal.SIG_IGN")
    grace = ["--grace", "1" if len(signals) == 1 else "60"]
    command = runner_command(2, script, options=grace, cpu=False)
    with going_on(command) as ranks:
        for _ in range(2 if signals else 0):
            ranks.line()  # both are ready
        for signum in signals:
            ranks.process.send_signal(signum)
            time.sleep(0.5)
    assert ranks.code == code, ranks.output
    assert why in ranks.output
    assert STOPPED not in ranks.output


SAVER = """
import os, shutil, sys, time
from pathlib import Path
from launcher.agent.checkpoints import folders

if os.environ["NODE_RANK"] == "1":
    sys.exit()
root, source = Path(sys.argv[1]), Path(sys.argv[2])
for iteration in range(1, 6):
    shutil.copytree(source, folders.partial(root, iteration))
    folders.publish(root, iteration)
    if iteration == 3:
        while folders.folder(root, 1).exists():
            time.sleep(0.05)
"""


def test_old_checkpoints_go_while_the_run_goes_on(gpus: SetGpus, tmp_path: Path) -> None:
    """Several nodes share them, and the first one removes."""
    gpus(1)
    root, script = tmp_path / "checkpoints", tmp_path / "saver.py"
    distributed(tmp_path / "source")
    root.mkdir()
    script.write_text(SAVER)
    keep = ["--keep", "2", "--checkpoints", str(root)]
    program = [str(script), str(root), str(tmp_path / "source")]
    with nodes(program, 1, 1, options=keep) as (first, second):
        pass
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert [each.iteration for each in [*folders.newest_first(root)][::-1]] == [4, 5]
    assert first.output.count("runner: removed checkpoints iter_0000001\n") == 1
    assert "removed" not in second.output


def test_who_killed_for_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = iter([oom.Counters(0, False, 5), oom.Counters(1, True, 6)])
    monkeypatch.setattr(oom, "read", lambda: next(counted))
    watch = runner.RankWatch(job("--", "x"), {}, queue.SimpleQueue())
    watch._ended(runner.Exit(1, -9))
    assert capsys.readouterr().err == (
        "runner: rank 1 was killed by signal 9 (SIGKILL), exit code 137: "
        "out of memory (the container's limit)\n"
    )


NO_GPU = "no CUDA device is visible"
ONCE_STARTED = """
import os, time
until = time.monotonic() + 60
while not os.path.exists({file!r}) and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(0.3)  # a rank that ends at once is heard of first
"""


@pytest.mark.parametrize(
    ("there", "then", "code", "lines"),
    [
        (
            1,
            "time.sleep(600)",
            121,
            ["2 processes on 1 visible CUDA", "killing rank 0, 1: "],
        ),
        (0, "sys.exit(3)", 121, [f"{NO_GPU}: give --cpu to run", "killing rank 0: they may not "]),
        (0, "sys.exit(0)", 121, [NO_GPU, "killing rank 0: they may not go on"]),
        (2, "sys.exit(3)", 3, ["rank 1 exited with code 3"]),
        (2, "sys.exit(0)", 0, []),
    ],
)
def test_gpus_are_checked_while_ranks_start(
    gpus: SetGpus, tmp_path: Path, there: int, then: str, code: int, lines: list[str]
) -> None:
    """The check, here as slow as it can be, neither delays the ranks nor comes after their end."""
    started = str(tmp_path / "started")
    gpus(there, ONCE_STARTED.format(file=started))
    first = then if code == 0 else "time.sleep(600)"  # of several any may be the first
    program = "import os, sys, time\nif os.environ['RANK'] == '1':\n"
    program += f"    open({started!r}, 'w').close()\n    {then}\n{first}\n"
    (tmp_path / "program.py").write_text(program)
    before = time.monotonic()
    done = python(*runner_command(2, str(tmp_path / "program.py"), cpu=False)[1:])
    assert time.monotonic() - before < 60, "the ranks waited for the check"
    assert done.returncode == code
    told = done.stderr.splitlines()
    assert len(told) == len(lines), told
    assert all(map(str.startswith, told, [f"runner: {line}" for line in lines])), told


@pytest.mark.parametrize(
    ("there", "nodes", "then", "code"), [(0, 1, "99", 121), (1, 2, "99", 121), (1, 1, "2", 2)]
)
def test_a_run_that_is_refused_changes_no_checkpoint(
    gpus: SetGpus, tmp_path: Path, there: int, nodes: int, then: str, code: int
) -> None:
    """With `keep`, a resume on GPUs that don't fit, here or on another node, removed old ones."""
    gpus(there)
    root, program = tmp_path / "checkpoints", tmp_path / "program.py"
    root.mkdir()
    saved(root, "aaaaaaaa", 1, 2, 3)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    program.write_text(f"import time\ntime.sleep({then} - 2)\nraise SystemExit({then})\n")
    options = ["--keep", "1", "--checkpoints", str(root), "--nodes", str(nodes)]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    with contextlib.ExitStack() as several:
        for node in reversed(range(nodes)):  # the second has a GPU too few
            more = [*options, str(node)]
            command = runner_command(node + 1, str(program), options=more, cpu=False)
            first = several.enter_context(going_on(command))
    assert first.code == code, first.output
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_check_of_gpus_that_a_stop_ends_refuses_no_run(gpus: SetGpus, tmp_path: Path) -> None:
    """scancel's SIGTERM comes to all processes. It was "CUDA can't be started", and 121."""
    checking, started = tmp_path / "checking", tmp_path / "started"
    before = f"open({str(checking)!r}, 'w').write(str(os.getpid()))"
    gpus(1, f"import os, time\n{before}\ntime.sleep(99)\n")
    program = "import signal, sys, time\n"
    program += "signal.signal(signal.SIGTERM, lambda *_: time.sleep(1) or sys.exit())  # saves\n"
    (tmp_path / "program.py").write_text(f"{program}open({str(started)!r}, 'w')\ntime.sleep(99)\n")
    with going_on(runner_command(1, str(tmp_path / "program.py"), cpu=False)) as ranks:
        while not (started.exists() and checking.exists() and checking.read_text()):
            time.sleep(0.02)
        ranks.process.send_signal(signal.SIGTERM)
        os.kill(int(checking.read_text()), signal.SIGTERM)
    assert "CUDA can't be started" not in ranks.output
    assert ranks.code == 0


NSYS = """import os, signal, sqlite3, subprocess, sys
given = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
if sys.argv[1] == "export":
    with sqlite3.connect(given["--output"]) as tables:
        tables.executescript('''
            CREATE TABLE StringIds (id, value);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, demangledName);
            INSERT INTO StringIds VALUES (7, 'sm90_xmma_gemm_bf16'), (8, 'ncclDevKernel_AllReduce');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1e6, 4e6, 7), (4e6, 5e6, 8);
        ''')
else:
    command = [word for word in sys.argv[2:] if not word.startswith("--")]
    command = sys.argv[sys.argv.index(command[0]):]
    started = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: started.terminate() or os._exit(0))
    code = started.wait()
    if code == 3:
        open(given["--output"] + ".nsys-rep", "w").close()
    sys.exit(code)
"""
"""A stand-in for NVIDIA's program: it starts the command, and says what a GPU did.

As that of 2023.4 does, it gives the rank a session of its own, and ends at SIGTERM before the rank.
"""


def test_ranks_run_under_nsys_whose_report_is_told(gpus: SetGpus, tmp_path: Path) -> None:
    """Else it would be asked to begin and to end, and nobody would listen."""
    gpus(2)
    script = tmp_path / "script.py"
    script.write_text("import os\nrank = os.environ['RANK']\nprint(rank)\nexit(3 * int(rank))\n")
    options = ["--profile", str(tmp_path), "--nsys", "1"]
    command = runner_command(2, str(script), options=options, cpu=False)[1:]
    refused = python(*command, PATH=str(tmp_path))
    assert refused.returncode == 121
    assert "nsys isn't in this image" in refused.stderr
    (tmp_path / "nsys").write_text(f"#!{sys.executable}\n{NSYS}")
    (tmp_path / "nsys").chmod(0o755)
    done = python(*command, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 3
    assert sorted(done.stdout.split()) == ["0", "1"]
    told = "profile of rank 1: 4.0 ms: matrix products 75 %, communication 25 %; its trace: "
    assert f"{told}{tmp_path}/rank-1.nsys-rep" in done.stderr
    assert (tmp_path / "rank-1.costs.json").exists()
    assert not (tmp_path / "rank-0.nsys-rep").exists()


SAVES = """import os, signal, sys, time
def saves(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, saves)
print("trains", flush=True)
time.sleep(60)
"""


def test_a_rank_under_nsys_that_is_asked_to_stop_has_its_time(
    gpus: SetGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nsys would end first, and the container with it, while the rank saves."""
    gpus(1)
    (tmp_path / "script.py").write_text(SAVES)
    (tmp_path / "nsys").write_text(f"#!{sys.executable}\n{NSYS}")
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    options = ["--profile", str(tmp_path), "--nsys", "0"]
    command = runner_command(1, str(tmp_path / "script.py"), options=options, cpu=False)
    with going_on(command) as ranks:
        while ranks.line() != "trains\n":
            pass
        ranks.process.send_signal(signal.SIGTERM)
    assert "saved\n" in ranks.output
    assert "profile of rank 0: nsys wrote no report: it saw no traced step\n" in ranks.output
    assert ranks.code == 0


@pytest.mark.parametrize("refused", [True, False])
def test_options_that_megatron_refuses_are_named_once_the_ranks_have_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    refused: bool,
) -> None:
    """On a cluster nobody could ask before the start, and each rank has its own traceback."""
    answer = '{"refused": "no such thing", "where": "megatron/x.py:7"}' if refused else "{}"
    (tmp_path / "validate.py").write_text(f"print({answer!r})")  # a stand-in for the payload's
    (program := tmp_path / "pretrain_gpt.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(start, "__file__", str(tmp_path / "validate.py"))
    ranks = parse(["--cpu", "--processes-per-node", "1", "--", str(program)], {})
    runner._say_refusal(ranks, {**os.environ, ASK: "1"})
    told = capfd.readouterr().err
    assert told == (f"runner: {REFUSES}: no such thing (megatron/x.py:7)\n" if refused else "")
    runner._say_refusal(ranks, dict(os.environ))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("module", "there"), [("json", True), ("nowhere", False), ("no.where", False)]
)
def test_a_run_without_what_its_options_import_starts_no_rank(
    monkeypatch: pytest.MonkeyPatch, module: str, there: bool
) -> None:
    """On a scheduler's machines nobody could look before."""
    monkeypatch.setitem(sys.modules, "torch", sys)  # whatever is there for it
    environ = {NEEDS: json.dumps({module: "run.yaml:3: data.x needs it. EXTRAS=y"})}
    with nullcontext() if there else pytest.raises(MismatchError) as caught:
        job("--", "program.py").check_packages(environ)
    assert not caught or str(caught.value).endswith(
        f"has no {module}: run.yaml:3: data.x needs it. EXTRAS=y"
    )
