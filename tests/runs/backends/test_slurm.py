"""A plan as a Slurm job: the script, which a real cluster runs in tests/e2e/test_slurm.py."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.base.errors import UsageError
from launcher.runs.backends.slurm import slurm, slurm_job, slurm_request
from launcher.runs.backends.slurm.slurm_queue import Queue
from launcher.runs.plan.job import ExitStatus
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Slurm
from tests.e2e.site import living_with, program, until
from tests.plans import HOST, Planner
from tests.tables import table

from .test_docker import GOLDEN, kept

SCRIPT = "name: a\nimage: cpu\ngpus: 0\nprogram: ./train.py\n"
FOLDER = Path("/shared/runs/0a1b2c3d")
TEXT = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=20)


@pytest.fixture
def two(plan: Planner) -> Plan:
    """Two nodes of two GPUs, in a container."""
    text = SCRIPT.replace("gpus: 0", "gpus: 2") + "nodes: 2\nenv: {A: 'b $c'}\n"
    text += "mounts: [{source: /d, target: /data}]\n"
    return plan(text, host=replace(HOST, scheduled=True))


def script(plan: Plan, **keys: object) -> str:
    """The job's script, which bash can read."""
    text = slurm_request.request(plan, Slurm.model_validate(keys), FOLDER).script
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=300)
    return text


SITE: dict[str, object] = {"image": "/shared/cpu.img", "setup": ["module load cuda", "ulimit -c 0"]}
FLAVOURS: dict[str, dict[str, object]] = {
    "none": {"container": "none", "setup": "source /shared/venv/bin/activate\n"},
    "docker": {**SITE, "container": "docker", "gpu_type": "h100", "time": "24:00:00"},
    "podman": {"container": "podman"},
    "pyxis": {**SITE, "container": "pyxis", "requeue": True, "time": "1-0", "signal": 300},
    "apptainer": {
        **SITE,
        "container": "apptainer",
        "array": "0-9%1",
        "options": {"mail-user": "a b"},
    },
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_script(plan: Planner, flavour: str) -> None:
    """A line that an admin didn't expect, or that shellcheck warns of: a word without quotes.

    That without a container is kept whole, of the others what differs from it.
    """
    host = replace(HOST, scheduled=True, contained=flavour != "none")
    more = ["checkpoint.save=/shared/save dir", "env.A='b $c'", "nodes=2", "gpus=2"]
    more += ["env.WANDB_API_KEY=0123456789abcdef"]
    two = plan("gpt2.yaml", *more, host=host)
    told = slurm_request.request(two, Slurm.model_validate(FLAVOURS[flavour]), FOLDER).script
    if flavour == "none":
        kept("slurm-none.txt", told)
    else:
        whole = (GOLDEN / "slurm-none.txt").read_text().splitlines(True)
        lines = difflib.ndiff(whole, told.splitlines(True))
        kept(f"slurm-{flavour}.diff", "".join(line for line in lines if line[0] in "+-"))
    passes_shellcheck(told)


def passes_shellcheck(text: str) -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "make dev installs it"
    words = [found, "--shell=bash", "--norc", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@table("sinfo", "partition", "options")
def test_ranks_get_their_share_of_a_nodes_cpus(
    two: Plan, sinfo: str, partition: str | None, options: list[str]
) -> None:
    """Slurm gives a task one CPU where nodes are shared by cores."""
    asked, sizes = Slurm(partition=partition), slurm_request.node_sizes(sinfo, partition)
    assert {*options} <= {*slurm_request._options(two, asked, FOLDER, sizes)}
    mine = Slurm(partition=partition, options={"cpus-per-task": 3, "mem-per-cpu": 5})
    told = {*slurm_request._options(two, mine, FOLDER, sizes)}
    assert "--cpus-per-task=3" in told
    assert not [line for line in told if line.startswith(("--mem=", "--exclusive"))]


@table("programs", "chosen")
def test_an_image_is_run_in_what_is_there_or_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    programs: dict[str, str],
    chosen: str | None,
) -> None:
    """`image` was ignored, and the nodes' own Python had no torch."""
    for name, text in programs.items():
        program(tmp_path / name, f"#!/bin/sh\n{text}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    config = SimpleNamespace(slurm=Slurm())
    if chosen is None:
        with pytest.raises(UsageError, match="neither pyxis nor Apptainer"):
            slurm.backend().configured(config)  # type: ignore[arg-type]
        return
    found = slurm.backend().configured(config)  # type: ignore[arg-type]
    assert found.asked.container == chosen
    assert f"the image runs by {chosen}" in capsys.readouterr().err
    config = SimpleNamespace(slurm=Slurm(container="none"))
    assert slurm.backend().configured(config).asked.container == "none"  # type: ignore[arg-type]


def test_a_node_looks_for_the_program_too(plan: Planner) -> None:
    """A checkout that the nodes don't see ended in "can't open file"."""
    own = plan(SCRIPT, host=replace(HOST, scheduled=True, contained=False))
    script = next(word for word in own.argv if word.endswith("/train.py"))
    assert {script, own.argv[1]} <= {*slurm_request._paths(own, Slurm())}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, other=TEXT)
def test_no_value_is_a_command(two: Plan, text: str, other: str) -> None:
    """A quote in the account's name would have ended the option."""
    asked = Slurm(account=text, options={"comment": other})
    lines = [*slurm_request._options(two, asked, Path(f"/runs/{other}"))]
    assert [words for line in lines if len(words := shlex.split(line)) != 1] == []
    assert f"--account={text}" in (shlex.split(line)[0] for line in lines)


def test_a_job_that_was_requeued_loads_what_it_saved(plan: Planner) -> None:
    save = "checkpoint.save=/shared/save"
    host = replace(HOST, scheduled=True, contained=False)
    again = '[ "$restart" -eq 0 ] || set -- --load /shared/save\n'
    assert again in script(plan("gpt2.yaml", save, host=host), requeue=True)
    assert again not in script(plan("gpt2.yaml", save, host=host))
    loads = plan("gpt2.yaml", save, "checkpoint.load=/shared/save", host=host)
    assert again not in script(loads, requeue=True)
    both = ("checkpoint.load=/other", "checkpoint.finetune=true", "program=pretrain_gpt.py")
    with pytest.raises(UsageError, match="finetuning"):
        script(plan("gpt2.yaml", save, *both, host=host), requeue=True)


@pytest.mark.parametrize(
    ("srun", "code"),
    [
        ('until [ -e "$folder/failed-0" ]; do sleep 0.1; done', "0\n"),
        ('kill -TERM "$PPID"; sleep 0.7; [ ! -e "$folder/failed-0" ]', None),
    ],
    ids=["not-begun", "requeued"],
)
def test_a_node_that_slurm_could_not_begin_is_told_to_the_others(
    two: Plan, tmp_path: Path, srun: str, code: str | None
) -> None:
    """By srun, here a stand-in: they had waited until their own time was over.

    What an earlier start of the job said counts no more, and who looks for it ends with the script.
    """
    told = slurm_request.request(two, Slurm(container="pyxis", requeue=True), tmp_path).script
    error = "srun: error: n1: task 1: Exited with exit code 1"
    if code:
        srun = f'echo "{error}" >&2; {srun}'
    for name, text in {"srun": srun, "scontrol": "echo n0"}.items():
        program(tmp_path / name, f"#!/bin/bash\n{text}\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "1"}
    with (tmp_path / "slurm.out").open("a") as output:
        output.write(f"{error}\n")
        output.flush()
        subprocess.run(["bash", "-c", told], env=env, stdout=output, stderr=output, timeout=300)
    until(lambda: not living_with(f"PATH={env['PATH']}"), "what it started goes on")
    assert [path.read_text() for path in tmp_path.glob("code")] == ([code] if code else [])


def test_slurm_may_give_fewer_nodes_where_any_number_will_do(plan: Planner) -> None:
    host = replace(HOST, scheduled=True, contained=False)
    sets = ["nodes.count=4", "nodes.min=2", "gpus=0", "training.micro_batch_size=1"]
    told = script(plan("gpt2.yaml", *sets, "training.global_batch_size=12", host=host))
    assert "#SBATCH --nodes=2-4\n" in told
    assert " --fewer 2,3 " in told
    with pytest.raises(UsageError, match=r"may give 3 nodes.*\n.*Set it to 4"):
        script(plan("gpt2.yaml", *sets, "training.global_batch_size=16", host=host))


def test_spare_nodes_are_asked_for_and_their_end_ends_no_others(plan: Planner) -> None:
    """A site's WaitTime ends all others a minute after the first task's end."""
    host = replace(HOST, scheduled=True, contained=False)
    found = plan("gpt2.yaml", "nodes.count=2", "nodes.spare=1", "gpus=2", host=host)
    told = script(found)
    assert "#SBATCH --nodes=2-3\n" in told
    assert "#SBATCH --ntasks-per-node" not in told
    assert "--ntasks-per-node=1 --wait=0 " in told
    assert " --wanted 2 " in told
    assert dict(found.labels)["megatron-launchpad.nodes"] == "3"
    with pytest.raises(UsageError, match="only a scheduler can give more nodes"):
        plan("gpt2.yaml", "nodes.count=2", "nodes.spare=1", "nodes.master_addr=a", "gpus=2")


@pytest.mark.parametrize(
    ("text", "tasks"),
    [(3, [3]), ("0-3%2", [0, 1, 2, 3]), ("1-5:2,9", [1, 3, 5, 9]), ("0-9%1", [])],
)
def test_an_arrays_tasks_are_those_that_slurm_starts(text: object, tasks: list[int]) -> None:
    assert Slurm.model_validate({"array": text}).tasks == tasks


def test_an_arrays_script_starts_each_tasks_own(two: Plan) -> None:
    """shellcheck reads it as well."""
    told = slurm_request.array({3: two}, Slurm(array="3", exclude="n1"), FOLDER.parent)
    own = f"{FOLDER}/job.sh >> {FOLDER}/slurm.out 2>&1"
    assert told.endswith(f"case $SLURM_ARRAY_TASK_ID in\n  3) exec {own} ;;\nesac\n")
    assert "#SBATCH --exclude=n1\n" in told
    passes_shellcheck(told)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        *(({"array": one}, "array") for one in ("5-1", "0-1000", "a", "0-1%0")),
        ({"array": "0-3%1", "requeue": True}, "array"),  # it would go on in two ways at once
        *(({"options": {name: "x"}}, "option") for name in "output array time Upper nodes".split()),
        *(({key: "a\n#SBATCH --wrap=x"}, "single line") for key in ("account", "partition")),
        ({"dependency": "a\n#SBATCH --wrap=x"}, "single line"),
    ],
)
def test_a_wrong_key_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Slurm.model_validate(keys)


def test_a_chain_without_checkpoints_is_refused(two: Plan) -> None:
    """Ten jobs would each have begun anew."""
    with pytest.raises(UsageError, match=r"continues from.*\n.*checkpoint.save"):
        script(two, array="0-9%1")


def test_the_rest_of_a_node_is_read_once_another_launcher_removed_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logs --follow` lost the last lines where `attach` had removed the files before."""
    ended = list[ExitStatus]()
    monkeypatch.setattr(slurm_job.SlurmJob, "ended", lambda _: ended[0] if ended else None)
    job = slurm_job.SlurmJob(tmp_path, "1", {}, queue=Queue())
    monkeypatch.setattr(job.queue, "state", lambda _: ("RUNNING", ""))
    (tmp_path / slurm_request.OUTPUT).touch()
    written = tmp_path / "node-0.out"
    written.write_text("a\n")
    pieces = job.output()
    assert next(pieces).data == b"a\n"
    with written.open("a") as file:
        file.write("b\n")
    for path in (written, tmp_path / slurm_request.OUTPUT):
        path.unlink()
    ended.append(ExitStatus(0))
    assert [piece.data for piece in pieces] == [b"b\n"]
