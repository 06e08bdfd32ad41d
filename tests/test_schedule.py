"""bench.gpu.schedule: who runs on which GPU, and what is kept of one that fails."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.schedule import HERE, Job, Schedule, load


def test_jobs_have_gpus_of_their_own_and_outlive_a_failed_one(tmp_path: Path) -> None:
    """Two on one GPU ran out of memory; one that failed took those behind it along."""
    jobs = [
        Job("fails", gpus=2, seconds=20, argv="json.tool /nowhere"),
        Job("after it", seconds=20, argv="this", after=["fails"]),
        Job("one", seconds=20, argv="this"),
        Job("other", seconds=20, argv="this"),
        Job("too many", gpus=3, seconds=20, argv="this"),
    ]
    values = {"work": str(tmp_path / "work")}
    made = Schedule(jobs, ["4", "7"], tmp_path, values, cpu=True)
    made.run(60)
    found = {name: (told.get("rc"), told.get("gpus")) for name, told in made.results.items()}
    assert found["fails"] == (2, "4,7")
    assert {found["one"], found["other"]} == {(0, "4"), (0, "7")}
    assert found["after it"] == found["too many"] == (None, None)
    assert "No such file" in made.results["fails"]["tail"]
    assert "better than ugly" in (tmp_path / "logs.txt").read_text()


def test_the_list_has_each_name_once_and_waits_for_jobs_that_are_there() -> None:
    jobs = load(HERE / "jobs.yaml", [])
    names = [job.name for job in jobs]
    assert len({*names}) == len(names)
    assert {name for job in jobs for name in job.after} <= {*names}
    assert [job.name for job in load(HERE / "jobs.yaml", ["long"])] == ["cp2-32k", "one-32k"]
