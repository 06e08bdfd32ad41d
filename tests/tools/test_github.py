"""The matrix as GitHub's workflows take it: which jobs, on which runners, as which JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import cli
from launcher.base.errors import UsageError
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.matrix.schema import misfit
from launcher.tools import github
from tests.tables import table

MATRIX = load_matrix()
FIT = [v for v, one in MATRIX.releases.items() if misfit(MATRIX.rows["cpu"], v, one) is None]


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, object]]:
    """The jobs that the command prints, as a workflow reads them."""
    assert cli.main(["matrix", "github", *args]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1  # one line, as a step's output takes it
    found = json.loads(out)
    assert found.keys() == {"include"}
    jobs: list[dict[str, object]] = found["include"]
    return jobs


def test_every_tried_row_has_a_job_with_its_own_release(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = printed(capsys, "--cuda-runner", "self-hosted, gpu")
    assert [(job["tag"], job["megatron"]) for job in jobs] == [
        (tag, row.megatron) for tag, row in MATRIX.rows.items() if not row.untried
    ]
    assert jobs[0] == {
        "tag": "24.02",
        "megatron": "0.9.0",
        "platform": "linux/amd64",
        "cuda": True,
        "runner": ["self-hosted", "gpu"],
    }
    assert jobs[-1]["runner"] == ["ubuntu-24.04"]
    for untried in (tag for tag, row in MATRIX.rows.items() if row.untried):
        (job,) = printed(capsys, untried, "--cuda-runner", "gpu")
        assert job["tag"] == untried  # where it is named
    page = (Path(__file__).resolve().parents[2] / "docs/contributing.md").read_text()
    assert cli.main(["matrix", "github", "cpu"]) == 0
    assert f"$ launcher matrix github cpu\n{capsys.readouterr().out}" in page


@table("args", "said")
def test_what_github_would_refuse_is_refused(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["matrix", "github", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["24.10"], "left out, as --cuda-runner names no runner: 24.10\n"),
        (["cpu", "--only-cuda", "--cuda-runner", "x"], ""),
        (["24.10", "cpu", "--megatron", "0.15.3", "--only-cuda", "--cuda-runner", "x"], ""),
    ],
)
def test_nothing_is_printed_for_no_job_where_that_is_allowed(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["matrix", "github", "--allow-none", *args]) == 0
    assert capsys.readouterr() == ("", said)
    assert cli.main(["matrix", "github", "24.09", "24.10", "cpu", "--cuda-runner", ""]) == 0
    out, err = capsys.readouterr()
    assert [job["tag"] for job in json.loads(out)["include"]] == ["cpu"]
    assert err == "left out, as --cuda-runner names no runner: 24.09, 24.10\n"


@pytest.mark.parametrize(
    ("args", "same"),
    [
        (["cpu", "--allow-none"], ["cpu"]),
        (["24.10", "cpu", "--only-cuda", "--cuda-runner", "x"], ["24.10", "--cuda-runner", "x"]),
        (["cpu", "cpu", "--megatron", "0.16.1", "--megatron", "0.16.1"], ["cpu"]),
        (
            ["cpu", "--megatron", "all"],
            ["cpu", *(word for one in FIT for word in ("--megatron", one))],
        ),
    ],
)
def test_what_is_left_out_or_named_twice_changes_nothing_else(
    args: list[str], same: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, *args) == printed(capsys, *same)


def test_more_jobs_than_github_makes_are_refused() -> None:
    most = [{"tag": str(number)} for number in range(github.MOST_JOBS)]
    assert len(github.strategy(most)["include"]) == 256
    with pytest.raises(UsageError, match="257 jobs, and GitHub makes at most 256"):
        github.strategy([*most, {"tag": "one more"}])


def test_a_row_has_a_job_on_each_platform_that_a_runner_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MATRIX.rows["24.10"].model_copy(update={"platforms": ["linux/amd64", "linux/arm64"]})
    matrix = MATRIX.model_copy(update={"rows": {"24.10": row}})
    monkeypatch.setattr("launcher.images.matrix.matrix_file.load_matrix", lambda: matrix)
    jobs = printed(capsys, "--cuda-runner", "big", "--arm64-runner", "self-hosted,ARM64")
    assert [(job["platform"], job["runner"]) for job in jobs] == [
        ("linux/amd64", ["big"]),
        ("linux/arm64", ["self-hosted", "ARM64"]),
    ]
    assert cli.main(["matrix", "github", "--cuda-runner", "big"]) == 0
    out, err = capsys.readouterr()
    assert [job["platform"] for job in json.loads(out)["include"]] == ["linux/amd64"]
    assert err == "left out, as --arm64-runner names no runner: 24.10\n"
