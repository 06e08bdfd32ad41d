"""The workflows of .github: linted, each step's script run, what it calls parsed for real."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import cli
from launcher.matrix.load import load_matrix

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github/workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yml"))
BIN = Path(sys.executable).parent  # where requirements-dev.txt is installed

# What the expressions in the workflows' steps stand for, where one is run here.
CONTEXT = {
    "inputs.tags": "24.09 24.10 cpu",
    "inputs.releases": "",
    "vars.CUDA_RUNNER": "self-hosted,big",
    "vars.GPU_RUNNER": "self-hosted,gpu",
    "vars.PUBLISH_RUNNER": "self-hosted,big",
    "github.event_name != 'pull_request' && vars.CUDA_RUNNER || ''": "self-hosted,big",
    "github.event_name != 'pull_request' && vars.ARM64_RUNNER || ''": "",
    "secrets.GITHUB_TOKEN": "a token",
}

# What the launcher prints where a later line of a script reads it.
DIGEST = "sha256:" + "0123456789abcdef" * 4
ANSWERS = {
    "image push": f"ghcr.io/some-owner/megatron:24.10-0.9.0 {DIGEST}\n"
    f"ghcr.io/some-owner/megatron:24.10 {DIGEST}\n",
    "matrix compat": "| a table |\n",
    "image inspect": json.dumps({"provenance": {"predicate": {"a": 1}}, "sbom": {"b": 2}}),
}

STUB = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
answers = {answers!r}
if {name!r} == "python3":
    sys.stdout.write(answers.get(" ".join(sys.argv[3:5]), ""))
if {name!r} == "jq":
    assert sys.argv[1] == "-e"
    found = json.load(open(sys.argv[3]))
    for key in sys.argv[2].split(".")[1:]:
        found = found[key]
    print(json.dumps(found))
"""


def load(name: str) -> dict[str, Any]:
    """A workflow; its key `on`, which YAML takes for true, is left alone."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    return found


def evaluated(text: str, context: Mapping[str, Any]) -> str:
    """`text` with its expressions replaced; KeyError for one that isn't in `context`."""
    return re.sub(r"\$\{\{ (.+?) \}\}", lambda found: str(context[found[1]]), text)


def steps(workflow: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The steps that run something: the job's name, the job, the step."""
    for name, job in workflow["jobs"].items():
        yield from ((name, job, step) for step in job["steps"] if "run" in step)


@dataclass(frozen=True)
class Ran:
    """What a step did: the commands it called, each with its arguments, and its outputs."""

    commands: list[list[str]]
    outputs: dict[str, str]
    summary: str
    folder: Path


class Runner:
    """Runs a step's script as GitHub's runner does, with make, python3, docker and jq in its path.

    They note how they were called; where `real` is true, python3 is this Python.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self,
        job: Mapping[str, Any],
        step: Mapping[str, Any],
        context: Mapping[str, Any],
        real: bool,
    ) -> Ran:
        """Raises AssertionError, with what it said, for a script that fails."""
        work, log = self.folder / "work", self.folder / "log"
        for path in (work, self.folder / "bin"):
            path.mkdir(exist_ok=True)
        log.write_text("")
        self._stubs(log, real)
        environment = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(work),
            "PYTHONPATH": str(ROOT),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GITHUB_REPOSITORY_OWNER": "Some-Owner",
            "GITHUB_ACTOR": "someone",
        }
        for more in (job.get("env", {}), step.get("env", {})):
            environment |= {name: evaluated(value, context) for name, value in more.items()}
        (self.folder / "output").write_text("")
        (self.folder / "summary").write_text("")
        script = evaluated(step["run"], context)
        # https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax, `shell`
        options = ["--noprofile", "--norc", "-eo", "pipefail"] if "shell" in step else ["-e"]
        done = subprocess.run(
            ["bash", *options, "-c", script],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        lines = (self.folder / "output").read_text().splitlines()
        return Ran(
            [json.loads(line) for line in log.read_text().splitlines()],
            dict(line.split("=", 1) for line in lines),
            (self.folder / "summary").read_text(),
            work,
        )

    def _stubs(self, log: Path, real: bool) -> None:
        for name in ("make", "python3", "docker", "jq"):
            stub = self.folder / "bin" / name
            stub.unlink(missing_ok=True)
            if real and name == "python3":
                stub.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
            else:
                stub.write_text(
                    STUB.format(python=sys.executable, log=str(log), name=name, answers=ANSWERS)
                )
            stub.chmod(0o755)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """One with a folder of its own."""
    return Runner(tmp_path)


def jobs_of(name: str, runner: Runner, changed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the job `rows` of a workflow puts out, by the real command."""
    workflow = load(name)
    job = workflow["jobs"]["rows"]
    step = next(step for step in job["steps"] if step.get("id") == "rows")
    outputs = runner.run(job, step, CONTEXT | (changed or {}), real=True).outputs
    named = re.findall(r"steps\.rows\.outputs\.(\w+)", json.dumps(job["outputs"]))
    assert set(outputs) <= set(named)
    return {key: json.loads(value) for key, value in outputs.items()}


def test_there_are_workflows_for_checks_images_compat_and_publishing() -> None:
    assert NAMES == ["check", "compat", "images", "publish"]
    assert {"lint", "drift", "test"} == load("check")["jobs"].keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_make_check_runs_finds_nothing(name: str) -> None:
    options = [f"--shellcheck={BIN / 'shellcheck'}", str(FOLDER / f"{name}.yml")]
    done = subprocess.run(
        [BIN / "jactionlint", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("    timeout-minutes: 10\n", "", "missing-timeout"),
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1", "@v7", "unpinned-uses"),
        ("steps.rows.outputs.matrix", "steps.row.outputs.matrix", "undefined-property"),
        ('TAG="$TAG"', "TAG=$TAG", "shellcheck"),
        ('TAG="$TAG"', "TAG=${{ inputs.tags }}", "template-injection"),
        ("needs: rows", "needs: row", "undefined-job-needs"),
    ],
)
def test_the_linter_finds_what_is_made_wrong(
    before: str, after: str, rule: str, tmp_path: Path
) -> None:
    text = (FOLDER / "images.yml").read_text()
    assert before in text
    wrong = tmp_path / "images.yml"
    wrong.write_text(text.replace(before, after))
    done = subprocess.run(
        [BIN / "jactionlint", f"--shellcheck={BIN / 'shellcheck'}", wrong],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"[{rule}]" in done.stdout


def test_hadolint_passes_what_is_rendered_and_finds_what_is_made_wrong(tmp_path: Path) -> None:
    hadolint = BIN / "hadolint"
    files = sorted((ROOT / "images").glob("*/Dockerfile"))
    assert files
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(files[0].read_text() + "RUN cd /tmp && apt-get install curl\n")
    done = subprocess.run([hadolint, wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3003" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_only_githubs_own_actions_are_used_and_jobs_have_no_rights_but_named_ones(
    name: str,
) -> None:
    workflow = load(name)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"].get("contents") == "read"
        for step in job["steps"]:
            assert step.get("uses", "actions/").startswith("actions/")
    writes = {
        right
        for job in workflow["jobs"].values()
        for right, level in job["permissions"].items()
        if level == "write"
    }
    assert writes == ({"packages", "id-token", "attestations"} if name == "publish" else set())


@pytest.mark.parametrize("name", NAMES)
def test_no_list_of_rows_or_releases_is_kept_in_a_job(name: str) -> None:
    matrix = load_matrix()
    words = set(re.findall(r"[\w.-]+", json.dumps(load(name)["jobs"])))
    assert not words & {tag for tag in matrix.rows if tag != "cpu"}  # a kind of job, too
    assert not words & matrix.releases.keys()


@pytest.mark.parametrize("name", ["compat", "images", "publish"])
def test_the_jobs_are_those_of_the_matrix_and_have_all_that_is_asked_of_them(
    name: str, runner: Runner
) -> None:
    found = jobs_of(name, runner)
    for output, matrix in found.items():
        tags = [job["tag"] for job in matrix["include"]]
        assert tags == (["24.09", "24.10"] if output == "gpu" else ["24.09", "24.10", "cpu"])
    jobs = load(name)["jobs"]
    for job in jobs.values():
        if "strategy" not in job:
            continue
        output = re.fullmatch(
            r"\$\{\{ fromJSON\(needs\.rows\.outputs\.(\w+)\) \}\}", job["strategy"]["matrix"]
        )
        assert output is not None
        asked = set(re.findall(r"\bmatrix\.(\w+)", json.dumps(job)))
        for one in found[output[1]]["include"]:
            assert asked <= one.keys()


def test_rows_with_cuda_are_left_out_of_a_pull_request(runner: Runner) -> None:
    key = "github.event_name != 'pull_request' && vars.CUDA_RUNNER || ''"
    found = jobs_of("images", runner, {key: "", "inputs.tags": ""})
    assert [job["tag"] for job in found["matrix"]["include"]] == ["cpu"]


def test_rows_with_cuda_are_published_only_where_that_was_chosen(runner: Runner) -> None:
    chosen = {"vars.PUBLISH_RUNNER": "", "inputs.tags": ""}
    found = jobs_of("publish", runner, chosen)
    assert [job["tag"] for job in found["matrix"]["include"]] == ["cpu"]


def test_without_a_runner_with_gpus_there_is_no_matrix_of_them(runner: Runner) -> None:
    found = jobs_of("compat", runner, {"vars.GPU_RUNNER": ""})
    assert found.keys() == {"cpu"}
    assert load("compat")["jobs"]["gpu"]["if"] == "needs.rows.outputs.gpu != ''"


def test_releases_that_are_asked_for_are_the_jobs(runner: Runner) -> None:
    asked = {"inputs.tags": "24.10 cpu", "inputs.releases": "0.9.0 0.12.3"}
    found = jobs_of("images", runner, asked)
    assert [(job["tag"], job["megatron"]) for job in found["matrix"]["include"]] == [
        ("24.10", "0.9.0"),
        ("24.10", "0.12.3"),
        ("cpu", "0.9.0"),
        ("cpu", "0.12.3"),
    ]


def test_a_tag_that_is_none_fails_the_job(runner: Runner) -> None:
    with pytest.raises(AssertionError, match=r"no tag '24\.11' in the matrix"):
        jobs_of("images", runner, {"inputs.tags": "24.11"})


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_every_step_is_one_that_exists(name: str, runner: Runner) -> None:
    context = CONTEXT | {"matrix.tag": "24.10", "matrix.megatron": "0.9.0"}
    called = [
        command
        for _, job, step in steps(load(name))
        for command in runner.run(job, step, context, real=False).commands
    ]
    assert called
    for command in called:
        assert known(command), command


def known(command: list[str]) -> bool:
    """Whether make has such a target, or the launcher takes such a line."""
    program, *args = command
    if program == "make":
        done = subprocess.run(["make", "-n", *args], cwd=ROOT, capture_output=True, check=False)
        return done.returncode == 0
    if program == "python3":
        assert args[:2] == ["-m", "launcher"]
        cli._parser(args[2:]).parse_args(args[2:])  # SystemExit for what it doesn't take
        return True
    return program in ("docker", "jq")


def test_a_target_or_an_option_that_is_none_is_noticed() -> None:
    assert not known(["make", "imagine", "TAG=24.10"])
    with pytest.raises(SystemExit):
        known(["python3", "-m", "launcher", "matrix", "github", "--gpu-runner", "x"])


def test_publishing_attests_the_digest_that_was_pushed_with_what_was_kept(runner: Runner) -> None:
    job = load("publish")["jobs"]["publish"]
    context = CONTEXT | {"matrix.tag": "24.10", "matrix.megatron": "0.9.0"}
    ran = [runner.run(job, step, context, real=False) for step in job["steps"] if "run" in step]
    outputs = {key: value for one in ran for key, value in one.outputs.items()}
    assert outputs == {"name": "ghcr.io/some-owner/megatron", "digest": DIGEST}
    assert json.loads((ran[-1].folder / "predicate.json").read_text()) == {"a": 1}
    assert json.loads((ran[-1].folder / "sbom.cdx.json").read_text()) == {"b": 2}
    order = [command[:2] for one in ran for command in one.commands]
    assert order.index(["make", "verify"]) < order.index(["docker", "login"])
    assert order[-1] == ["docker", "logout"]
    attested = [step["with"] for step in job["steps"] if "attest" in step.get("uses", "")]
    assert len(attested) == 3
    for given in attested:
        assert given["subject-name"] == "${{ steps.push.outputs.name }}"
        assert given["subject-digest"] == "${{ steps.push.outputs.digest }}"
    assert [given.get("predicate-path", given.get("sbom-path")) for given in attested] == [
        None,
        "predicate.json",
        "sbom.cdx.json",
    ]


def test_reports_go_to_the_summary_of_the_run_and_try_nothing(runner: Runner) -> None:
    job = load("compat")["jobs"]["report"]
    ran = [runner.run(job, step, CONTEXT, real=False) for step in job["steps"] if "run" in step]
    assert [one.summary for one in ran] == ["", "| a table |\n", "| a table |\n"]
    for one, gpus in zip(ran[1:], ("0", "all"), strict=True):
        args = cli._parser(one.commands[0][3:]).parse_args(one.commands[0][3:])
        assert (args.kept, args.gpus, args.tags) == (True, gpus, [])


@pytest.mark.parametrize("step", [{"run": "false\ntrue"}, {"shell": "bash", "run": "false | true"}])
def test_a_script_that_fails_in_the_middle_fails_the_step(
    step: dict[str, str], runner: Runner
) -> None:
    with pytest.raises(AssertionError):
        runner.run({}, step, {}, real=False)
