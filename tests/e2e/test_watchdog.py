"""A rank that hangs at a random collective of a real training run is named, with its stack."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.site import Site, Started, script

pytestmark = pytest.mark.engine

HANGS = {
    "sleep": "time.sleep(3600)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "socket": "pair = socket.socketpair(); pair[0].recv(1)",
    "receive": "receive(torch.zeros(1), src=(int(os.environ['RANK']) + 1) % 4)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
}
PROGRAM = """\
# Trains, but for a rank that hangs as it comes to a collective, the Nth that it calls.
import os, signal, socket, sys, threading, time
import torch
import torch.distributed as dist
sys.path.insert(0, "/opt/launchpad")
from launcher.trainer.gpt import __main__ as gpt

COLLECTIVES = "all_reduce all_gather_into_tensor reduce_scatter_tensor broadcast barrier".split()
receive = dist.recv
calls = 0

def hang():
    open("{hung}", "w").close()
    {hang}

def hanging(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == {call} and os.environ["RANK"] == "{rank}" and not os.path.exists("{go}"):
            hang()
        return function(*args, **kwargs)
    return call

for name in COLLECTIVES:
    setattr(dist, name, hanging(getattr(dist, name)))
if __name__ == "__main__":
    sys.exit(gpt.main(sys.argv[1:]))
"""
HANGS_AT = 1 + next(n for n, line in enumerate(PROGRAM.splitlines()) if "{hang}" in line)
GO, HUNG = "/gate/go", "/gate/hung"
WITHIN = 5  # seconds without output
ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


def program(hang: str, rank: int, call: int) -> str:
    filled = PROGRAM.replace("{hang}", hang).replace("{rank}", str(rank)).replace("{go}", GO)
    return filled.replace("{call}", str(call)).replace("{hung}", HUNG)


def training(image: str, processes: int, action: str, within: int = WITHIN) -> dict[str, Any]:
    """A tiny model that logs every step, tensor-parallel, with replicas where ranks suffice."""
    wanted = script(image, processes)
    options = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 60 --lr 1e-2 --log-interval 1 "
        "--eval-iters 1 --mock-data --tensor-model-parallel-size 2"
    ).split()
    return wanted | {
        "watchdog": {"timeout": within, "action": action},
        "mounts": [{"source": "gate", "target": "/gate", "read_only": False}],
        "env": {"OMP_NUM_THREADS": 1},
        "options": options,
    }


def launch(site: Site, config: dict[str, Any], text: str) -> list[str]:
    """The arguments of `launcher run` for that program."""
    options = config.pop("options")
    (site.folder / "gate").mkdir(exist_ok=True)
    (site.folder / "gate/hung").unlink(missing_ok=True)
    site.write(config, text)
    return ["run", "run.yaml", "--", *options]


def stalled(here: Site, image: str, processes: int, text: str) -> tuple[Started, str, Path]:
    """A run that the watchdog ended for a rank that hangs, its conclusion and its folder of stacks.

    On a busy machine an iteration can take longer than the watchdog waits: such a run is repeated
    with more time, until it was silent for three of its iterations.
    """
    within = WITHIN
    while True:
        done = here.done(*launch(here, training(image, processes, "end", within), text))
        told = done.told()
        found = re.fullmatch(r"no output for (\d+) s: (.*)", told[0])
        assert found, done
        assert within <= int(found[1]) <= within + 120, done
        slowest = max(map(float, ITERATION.findall(done.out)), default=0) / 1000
        if (here.folder / HUNG[1:]).exists() and int(found[1]) >= 3 * slowest:
            return done, found[2], Path(told[1].removeprefix("every rank's stack is in "))
        within = max(2 * within, round(4 * slowest))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_rank_that_hangs_is_named_each_time(here: Site, image: str) -> None:
    named = []
    for seed in range(10):
        drawn = random.Random(seed)  # noqa: S311
        kind = sorted(HANGS)[seed % len(HANGS)]
        processes = 4 if kind == "receive" else drawn.choice([2, 4])
        rank, call = drawn.randrange(processes), drawn.randint(40, 300)
        text = program(HANGS[kind], rank, call)
        case = f"seed {seed}: {kind} at collective {call} of rank {rank} among {processes}"
        done, found, kept = stalled(here, image, processes, text)
        stack = (kept / f"rank-{rank}.stack").read_text()
        if kind == "stop":
            is_named = found.startswith(f"rank {rank} doesn't answer: the kernel has it as T")
        else:
            where = rf"\(program\.py:{HANGS_AT}\)|, from program\.py:{HANGS_AT}\b"
            is_named = bool(re.match(rf"rank {rank} (?:isn't|alone).*?(?:{where})", found))
            assert f'program.py", line {HANGS_AT} in hang' in stack, case
        suspects = re.findall(r"\brank \d+ (?:isn't|doesn't|alone|hasn't)", found)
        named.append((f"{case}: {found}", is_named and len(suspects) == 1))
        assert done.process.returncode not in (0, 2), (case, done)
        assert done.told()[-1].endswith(f"stalled, {found}"), (case, done)
    wrong = [case for case, is_named in named if not is_named]
    assert wrong == [], "\n".join(wrong)


def test_a_run_that_is_kept_can_be_asked_again_and_goes_on(here: Site, image: str) -> None:
    wait = f"[time.sleep(0.1) for _ in iter(lambda: os.path.exists('{GO}'), True)]"
    text = program(wait, rank=1, call=60)
    started = here.start(*launch(here, training(image, 2, "keep"), text))
    outside = "rank 1 isn't in a collective, but in function <listcomp>"
    started.said(outside)  # not only slow, as it may be too
    started.said("to end it: ")
    run = here.run()
    asked = here.done("stacks", run)
    assert asked.process.returncode == 0, asked
    *lines, last = asked.out.splitlines()
    assert last.startswith(f"in short: {outside} (program.py:")
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"]
    kept = "every rank's stack is in "
    number = 1 + started.err.count(kept)
    assert asked.told() == [f"{kept}{here.folder}/runs/{run}/stalled-{number}"]
    (here.folder / "gate/go").write_text("")
    assert started.ends() == 0
    assert "finished after iteration 60" in started.out
    told = [line for line in started.told() if outside in line]
    assert len(told) == 1, started  # though it was silent for longer than that
    nobody = here.done("stacks", run)
    assert nobody.process.returncode == 2


@pytest.mark.long
def test_a_run_that_was_ended_for_it_is_started_again(here: Site, image: str) -> None:
    hang = f"open('{GO}', 'w'); time.sleep(3600)"
    # on a busy machine an ending is as long silent
    config = training(image, 2, "end", 3 * WITHIN) | {"max_restarts": 1}
    done = here.done(*launch(here, config, program(hang, rank=0, call=60)))
    assert done.process.returncode == 0, done
    told = done.told()
    assert re.match(r"no output for \d+ s: rank 0 isn't in a collective, but in func", told[0])
    assert told[-1] == "starting it again: 1 of 1 times"
    assert "finished after iteration 60" in done.out


FAILURES = {
    "the port is taken": "if rank == '0': s = socket.socket(); s.bind(('', port)); s.listen()\n"
    "import torch.distributed; torch.distributed.init_process_group('gloo')",
    "shared memory, /dev/shm, is too small": "f = open('/dev/shm/x', 'wb+'); f.truncate(1 << 20)\n"
    "m = mmap.mmap(f.fileno(), 1 << 20)\nfor n in range(0, 1 << 20, 4096): m[n] = 1",
    "a compiled extension is missing": "import amp_C",
    "an index is out of range: a token, a position, a label or another": "import torch\n"
    "torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2))",
}
BEGIN = "import mmap, os, socket\nrank, port = os.environ['RANK'], int(os.environ['MASTER_PORT'])\n"


@pytest.mark.parametrize(
    "cause",
    [
        pytest.param(one, marks=[] if "shared memory" in one else pytest.mark.long)
        for one in FAILURES
    ],
)
def test_a_known_failure_is_told_as_it_happens(here: Site, image: str, cause: str) -> None:
    limits = {"ipc": "private", "shm_size": "64k"}
    done = here.launch(script(image, 1, **limits), BEGIN + FAILURES[cause])
    assert done.ends() not in (0, 2), done
    told = done.told()
    assert told[1].startswith((f"cause: {cause}: ", f"this points to: {cause}: ")), done
    assert told[2].startswith(("cure", "possible causes"))
