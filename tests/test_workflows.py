"""The workflows of .github: linted, and run by act, with stand-ins for what is slow or far away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from launcher import cli
from launcher.images.matrix.matrix_file import load_matrix
from tests import conftest
from tests.tables import table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github/workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yml"))
BIN = Path(sys.executable).parent  # where requirements-dev.txt is installed
ROOTLESS = "a second engine: it needs root"
DIGEST = "sha256:" + "0123456789abcdef" * 4

# Stands for make, python3, docker, git, gh, jq and sudo: notes each call, and does what a later
# step reads. `matrix github` is the real command, unless its place is taken.
PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path

name, args = Path(sys.argv[0]).name, sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([os.environ["GITHUB_JOB"], name, *args]) + "\\n")
command = args[2:4] if name == "python3" else [name]
if command == ["matrix", "github"] and {github!r}:
    print({github!r})
elif command == ["matrix", "github"]:
    os.environ["PYTHONPATH"] = {root!r}
    os.execv(sys.executable, [sys.executable, *args])
if command == ["sudo"]:
    (option, *line) = args
    assert option.startswith("--preserve-env=")
    os.execvp(line[0], line)
if command == ["matrix", "compat"]:
    folder = Path(args[args.index("-o") + 1] if "-o" in args else "compat")
    if "--kept" in args:
        print("| kept |", *sorted(path.name for path in (folder / "cells").iterdir()))
        (folder / "report.html").write_text("a page")
    else:
        (folder / "cells").mkdir(parents=True)
        (folder / "cells" / f"{{args[4]}}-{{args[6]}}.json").write_text("a result")
        sys.exit(args[4] in {failing!r})
if command == ["matrix", "news"]:
    print("apex, git tags  25.09  new: 26.01")
if command == ["git"]:
    Path("matrix.yaml").touch()  # as of a checkout
    sys.exit(" ".join(args[:2]) in {failing!r})
if command == ["image", "push"]:
    owner = args[args.index("--registry") + 1]
    print(owner + "/megatron:cpu-0.16.1 {digest}")
    print(owner + "/megatron:cpu {digest}")
if command == ["image", "inspect"]:
    print(json.dumps({{"provenance": {{"predicate": {{"a": 1}}}}, "sbom": {{"b": 2}}}}))
if command == ["jq"]:
    assert args[0] == "-e"
    found = json.loads(Path(args[2]).read_text())
    for key in args[1].split(".")[1:]:
        found = found[key]
    print(json.dumps(found))
"""

# Stand for GitHub's own actions: what they do with files, in a folder in place of its servers.
ACTIONS = {
    "checkout": "true",
    "upload-artifact": """
        path='${{ inputs.path }}'
        folder=${path%%\\**}  # what is before the first wildcard isn't kept in an artifact
        case $folder in */*) folder=${folder%/*} ;; *) folder=. ;; esac
        mkdir -p "$STORE/${{ inputs.name }}"
        cd "$folder"
        cp --parents ${path#"$folder"/} "$STORE/${{ inputs.name }}"
    """,
    "download-artifact": """
        mkdir -p "${{ inputs.path }}"
        cp "$STORE"/${{ inputs.pattern }}/* "${{ inputs.path }}"
    """,
    "attest": """
        echo "${{ inputs.subject-name }}@${{ inputs.subject-digest }}" \\
          "${{ inputs.predicate-type }}" \\
          $(cat /dev/null ${{ inputs.predicate-path }} ${{ inputs.sbom-path }}) >> "$STORE/attested"
    """,
}


@dataclass(frozen=True)
class Ran:
    """What came of a workflow.

    results: of each job that ran, named by its ID and its row's tag; commands: each with the ID of
    the job that called it; said: the lines of all steps; store: what the actions have kept
    """

    results: Mapping[str, str]
    commands: list[list[str]]
    said: str
    store: Path

    def of(self, job: str) -> list[list[str]]:
        """The commands that the jobs of this ID called."""
        return [command for by, *command in self.commands if by == job]

    def kept(self) -> list[str]:
        """The artifacts' files."""
        files = (path for path in self.store.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.store)) for path in files)


@dataclass(frozen=True)
class Act:
    """Runs workflows of this repository here, in a folder."""

    folder: Path

    def __call__(
        self,
        name: str,
        event: str = "workflow_dispatch",
        inputs: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        failing: tuple[str, ...] = (),
        github: str = "",
        takes: tuple[str, ...] = ("ubuntu-24.04", "mine"),
    ) -> Ran:
        """Run a workflow.

        failing: tags whose cell fails, git's commands that do; github: what `matrix github` prints
        instead; takes: the labels of runners that exist
        """
        log, store, repository = (self.folder / one for one in ("log", "store", "repository"))
        self._programs(log, failing, github)
        store.mkdir()
        workflows = repository / ".github/workflows"
        workflows.mkdir(parents=True)
        text = (FOLDER / f"{name}.yml").read_text()
        (workflows / f"{name}.yml").write_text(text)
        commit(repository)
        origin = "https://github.com/Some-Owner/some-name"
        subprocess.run(["git", "remote", "add", "origin", origin], cwd=repository, check=True)
        options = [f"--platform={label}=-self-hosted" for label in takes]
        for used in sorted(set(re.findall(r"uses: (\S+)", text))):
            options += ["--local-repository", f"{used}={self._action(used, text)}"]
        for option, values in (("--input", inputs), ("--var", variables)):
            options += [f"{option}={key}={value}" for key, value in (values or {}).items()]
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        done = subprocess.run(
            [
                *(BIN / "act", event, "--json", "--no-cache-server", "--no-skip-checkout"),
                *("--concurrent-jobs", "1", "--actor", "someone", "--secret", "GITHUB_TOKEN=token"),
                *("--env", f"PATH={path}", "--env", f"STORE={store}", *options),
            ],
            cwd=repository,
            env={"PATH": path, "HOME": str(self.folder / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        results = {told(one): "success" for one in records if "jobResult" in one}
        # act's own result of a job is that of all which its matrix has made so far
        results |= {told(one): "failure" for one in records if one.get("stepResult") == "failure"}
        assert results, done.stdout + done.stderr
        said = "".join(f"{one['msg']}\n" for one in records if one["level"] != "warning")
        lines = log.read_text().splitlines() if log.exists() else []
        return Ran(results, [json.loads(line) for line in lines], said, store)

    def _programs(self, log: Path, failing: tuple[str, ...], github: str) -> None:
        (self.folder / "bin").mkdir()
        for name in ("make", "python3", "docker", "git", "gh", "jq", "sudo"):
            program = self.folder / "bin" / name
            filled = PROGRAM.format(
                python=sys.executable,
                log=str(log),
                root=str(ROOT),
                failing=failing,
                digest=DIGEST,
                github=github,
            )
            program.write_text(filled)
            program.chmod(0o755)

    def _action(self, used: str, text: str) -> Path:
        """A repository with the stand-in of an action, which takes what the workflow gives it."""
        name = used.partition("@")[0].removeprefix("actions/")
        folder = self.folder / "actions" / name
        folder.mkdir(parents=True)
        given = {
            key
            for job in yaml.safe_load(text)["jobs"].values()
            for step in job["steps"]
            if step.get("uses") == used
            for key in step.get("with", {})
        }
        action = {
            "name": name,
            "description": "a stand-in",
            "inputs": {key: {"required": False} for key in given},
            "runs": {"using": "composite", "steps": [{"shell": "bash", "run": ACTIONS[name]}]},
        }
        (folder / "action.yml").write_text(yaml.safe_dump(action))
        commit(folder)
        return folder


def told(record: Mapping[str, Any]) -> str:
    """The ID of a record's job, with the tag of its row where it has one."""
    return " ".join(filter(None, [record["jobID"], record["matrix"].get("tag")]))


def commit(folder: Path) -> None:
    """Make a git repository of a folder."""
    author = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    for args in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        [*author, "commit", "-q", "-m", "all"],
    ):
        subprocess.run(["git", *args], cwd=folder, check=True)


@pytest.fixture
def act(tmp_path: Path) -> Act:
    """One with a folder of its own."""
    return Act(tmp_path)


def known(command: list[str]) -> bool:
    """Whether make has such a target, or the launcher takes such a line."""
    program, *args = command
    if program == "make":
        done = subprocess.run(["make", "-n", *args], cwd=ROOT, capture_output=True, check=False)
        return done.returncode == 0
    if program == "python3":
        assert args[:2] == ["-m", "launcher"]
        cli.parser(args[2:]).parse_args(args[2:])  # SystemExit for what it doesn't take
        return True
    return program in ("docker", "git", "gh", "jq", "sudo")


def limits(ran: Ran) -> set[str]:
    """The values of --disk of all cells and reports."""
    compat = [command for _, *command in ran.commands if command[3:5] == ["matrix", "compat"]]
    assert compat
    return {command[command.index("--disk") + 1] for command in compat}


def load(name: str) -> dict[str | bool, Any]:
    """A workflow as YAML reads it, which takes its key `on` for true."""
    found: dict[str | bool, Any] = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_make_check_runs_finds_nothing(name: str) -> None:
    options = [f"--shellcheck={BIN / 'shellcheck'}", str(FOLDER / f"{name}.yml")]
    done = subprocess.run(
        [BIN / "jactionlint", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_passes_what_is_rendered() -> None:
    files = sorted((ROOT / "images").glob("*/Dockerfile"))
    assert files
    done = subprocess.run([BIN / "hadolint", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_only_githubs_own_actions_are_used_and_jobs_have_no_rights_but_named_ones(
    name: str,
) -> None:
    workflow = load(name)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        proposes = "pull-requests" in job["permissions"]
        assert job["permissions"].get("contents") == ("write" if proposes else "read")
        runs = [step.get("run", "") for step in job["steps"]]
        assert not proposes or not re.search(r"\b(make|python3?|pip)\b", " ".join(runs))
        for step in job["steps"]:
            assert step.get("uses", "actions/").startswith("actions/")
    writes = {
        right
        for job in workflow["jobs"].values()
        for right, level in job["permissions"].items()
        if level == "write"
    }
    rights = {
        "publish": {"packages", "id-token", "attestations"},
        "news": {"contents", "pull-requests"},
        "site": {"pages", "id-token"},
        "release": {"id-token"},
    }
    assert writes == rights.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_no_list_of_rows_or_releases_is_kept_in_a_job(name: str) -> None:
    matrix = load_matrix()
    for half in ("cpu", "gpu"):  # GitHub refuses an empty matrix, act takes it
        assert load("compat")["jobs"][half]["if"] == f"needs.rows.outputs.{half} != ''"
    words = set(re.findall(r"[\w.-]+", json.dumps(load(name)["jobs"])))
    assert not words & {tag for tag in matrix.rows if tag != "cpu"}  # a kind of job, too
    assert not words & matrix.releases.keys()


@pytest.mark.parametrize("event", ["push", pytest.param("pull_request", marks=pytest.mark.long)])
def test_a_change_is_linted_rendered_again_and_tested(act: Act, event: str) -> None:
    ran = act("check", event)
    assert ran.results == {"lint": "success", "drift": "success", "test": "success"}
    assert [command[:2] for command in ran.of("lint")] == [["make", "lint"]]
    assert [command[:2] for command in ran.of("drift")] == [["make", "drift"]]
    assert [command[:-1] for command in ran.of("test")] == [
        ["sudo", "--preserve-env=CI", "make", "test"],
        ["make", "test"],
    ]
    assert all(known(command) for _, *command in ran.commands)


def test_only_a_tag_reaches_pypi_and_only_a_site_that_was_built_is_published() -> None:
    """No file of PyPI's can be replaced; pages with a broken link would replace those there."""
    publish = load("release")["jobs"]["publish"]
    assert (publish["if"], publish["environment"]) == ("github.ref_type == 'tag'", "pypi")
    assert [load(name)["jobs"]["publish"]["needs"] for name in ("release", "site")] == ["build"] * 2


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [
        ("true", ROOTLESS, "failed"),
        ("true", "no such program", "skipped"),
        ("", ROOTLESS, "skipped"),
    ],
)
def test_a_skip_for_lack_of_root_is_a_failure_in_ci_alone(
    monkeypatch: pytest.MonkeyPatch, ci: str, reason: str, outcome: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report: Any = SimpleNamespace(skipped=True, longrepr=reason, outcome="skipped")
    next(hook := conftest.pytest_runtest_makereport())
    with pytest.raises(StopIteration):
        hook.send(report)
    assert report.outcome == outcome


@pytest.mark.long
@pytest.mark.parametrize(
    ("ci", "told"),
    [("true", "1 failed, 1 passed, 1 skipped"), ("", "1 passed, 2 skipped")],
)
def test_what_is_skipped_for_lack_of_root_fails_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, told: str
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\nimport pytest\nos.geteuid = lambda: 1000\ndef test_runs(): pass\n"
        "def test_root(): pytest.skip('a second engine: it needs root')\n"
        "def test_other(): pytest.skip('there is no such program')\n"
    )
    monkeypatch.setenv("CI", ci)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == bool(ci), done.stdout + done.stderr
    assert told in done.stdout


def test_jobs_of_pull_requests_name_githubs_runner_in_the_workflow() -> None:
    for workflow in map(load, NAMES):
        for job in workflow["jobs"].values() if "pull_request" in workflow[True] else ():
            hosted = "${{ github.event_name == 'pull_request' && 'ubuntu-24.04' || "
            assert job["runs-on"] == "ubuntu-24.04" or job["runs-on"].startswith(hosted)


@pytest.mark.long
def test_each_row_is_built_where_a_runner_takes_it(act: Act) -> None:
    ran = act("images", variables={"CUDA_RUNNER": "mine,big"})
    rows = {tag: row for tag, row in load_matrix().rows.items() if not row.untried}
    assert ran.results == {"rows": "success"} | {f"build {tag}": "success" for tag in rows}
    built = [command for command in ran.of("build") if command[0] == "make"]
    assert sorted(built) == sorted(
        ["make", "image", f"TAG={tag}", f"MEGATRON={row.megatron}"] for tag, row in rows.items()
    )
    assert all(known(command) for _, *command in ran.commands)


@pytest.mark.long
@table("asked", "results", "said")
def test_what_has_no_runner_is_told_or_left_out_and_the_rest_goes_on(
    act: Act, asked: str, results: str, said: str
) -> None:
    name, *words = asked.split()
    inputs = dict(word.replace(",", " ").split("=") for word in words if "=" in word)
    variables = {word: "mine" for word in words if word.isupper()}
    event = "pull_request" if "pull_request" in words else "workflow_dispatch"
    ran = act(name, event, inputs=inputs, variables=variables)
    assert ran.results == {
        job.replace("-", " ").rstrip("!"): "failure" if job.endswith("!") else "success"
        for job in results.split()
    }
    assert said in ran.said
    if "cpu-cpu" in results:
        assert ran.kept() == ["cpu-cpu-0.16.1/cpu-0.16.1.json", "report/compat-cpu/report.html"]
        assert limits(ran) == {inputs.get("disk", "12")}


@pytest.mark.long
@pytest.mark.parametrize("event", ["pull_request", "workflow_dispatch"])
def test_a_pull_requests_own_code_names_no_runner(act: Act, event: str) -> None:
    job = {"tag": "cpu", "megatron": "0.16.1", "platform": "linux/amd64", "runner": ["mine"]}
    told = json.dumps({"include": [job]})
    ran = act("images", event, github=told, takes=("ubuntu-24.04",))
    assert ("build cpu" in ran.results) == (event == "pull_request")


@pytest.mark.long
def test_cells_are_tried_without_a_gpu_and_with_one_and_reported_together(act: Act) -> None:
    runners = {"CUDA_RUNNER": "mine,big", "GPU_RUNNER": "mine,gpu"}
    ran = act("compat", inputs={"tags": "24.09 24.10 cpu"}, variables=runners, failing=("24.09",))
    assert ran.results == {
        "rows": "success",
        "cpu 24.09": "failure",
        "cpu 24.10": "success",
        "cpu cpu": "success",
        "gpu 24.09": "failure",
        "gpu 24.10": "success",
        "report": "success",
    }
    assert all("--gpus" not in command for command in ran.of("cpu"))
    assert all(
        command[-2:] == ["--gpus", "all"] for command in ran.of("gpu") if "compat" in command
    )
    assert ran.kept() == [
        "cpu-24.09-0.9.0/24.09-0.9.0.json",
        "cpu-24.10-0.9.0/24.10-0.9.0.json",
        "cpu-cpu-0.16.1/cpu-0.16.1.json",
        "gpu-24.09-0.9.0/24.09-0.9.0.json",
        "gpu-24.10-0.9.0/24.10-0.9.0.json",
        "report/compat-cpu/report.html",
        "report/compat-gpu/report.html",
    ]
    assert "| kept | 24.09-0.9.0.json 24.10-0.9.0.json cpu-0.16.1.json\n" in ran.said
    assert "| kept | 24.09-0.9.0.json 24.10-0.9.0.json\n" in ran.said
    reported = [command[5:] for command in ran.of("report") if "compat" in command]
    assert reported == [
        ["--kept", "--disk", "60", "--gpus", "0", "-o", "compat-cpu"],
        ["--kept", "--disk", "60", "--gpus", "all", "-o", "compat-gpu"],
    ]
    assert limits(ran) == {"60"}
    assert all(known(command) for _, *command in ran.commands)


@pytest.mark.long
def test_what_is_published_was_built_twice_and_is_attested_by_its_digest(act: Act) -> None:
    ran = act("publish")
    assert ran.results == {"rows": "success", "publish cpu": "success"}
    assert all(known(command) for _, *command in ran.commands)
    commands = ran.of("publish")
    order = [" ".join(one[:2] if one[0] != "python3" else one[3:5]) for one in commands]
    assert [one for one in order if not one.startswith("jq")] == [
        *("make image", "make verify", "docker login"),
        *("image push", "image inspect", "docker logout"),
    ]
    assert not any("token" in word for command in commands for word in command)
    subject = f"ghcr.io/some-owner/megatron@{DIGEST}"
    assert (ran.store / "attested").read_text().splitlines() == [
        f"{subject} ",
        f'{subject} https://slsa.dev/provenance/v1 {{"a": 1}}',
        f'{subject}  {{"b": 2}}',
    ]


@pytest.mark.parametrize(
    ("failing", "results", "opened"),
    [
        ((), "look", False),
        (("diff --quiet", "ls-remote --exit-code"), "look propose", True),
        # The branch is there: it was proposed before.
        pytest.param(("diff --quiet",), "look propose", False, marks=pytest.mark.long),
    ],
)
def test_what_is_new_is_locked_rendered_and_proposed_once(
    act: Act, failing: tuple[str, ...], results: str, opened: bool
) -> None:
    ran = act("news", failing=failing)
    assert ran.results == dict.fromkeys(results.split(), "success"), ran.said
    assert all(known(command) for _, *command in ran.commands)
    assert (["make", "lock", "render"] in ran.of("look")) == bool(failing)
    assert any(command[:3] == ["gh", "pr", "create"] for command in ran.of("propose")) == opened
    assert any(command[:2] == ["git", "push"] for command in ran.of("propose")) == opened
    assert ran.kept() == (["proposal/news.patch", "proposal/news.txt"] if failing else [])
