"""From a run file to a run that is started, with its texts and files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher import api
from launcher.agent.checkpoints import folders, lineage
from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.base.errors import EngineError, UsageError
from launcher.base.names import LABEL
from launcher.runs.follow import from_record as again_of
from launcher.runs.follow import launch, run_files
from launcher.runs.follow.assemble import PlannedRun, assemble
from launcher.runs.follow.live import OutputDetail
from launcher.runs.follow.run_files import Caller
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import Backend
from launcher.runs.plan.plan import Plan, Stamp
from launcher.runs.records import owner, provenance, record
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import Data
from launcher.runs.runfile.origins import RunRequest
from launcher.tools.data.data_text import TokenizedRun, tokenized
from tests.agent.test_folders import distributed
from tests.cli.test_cli import run
from tests.plans import load, request
from tests.runs.conftest import RUN, FakeJob


@pytest.fixture
def save(tmp_path: Path, runs: Path) -> Path:
    """A folder with an interrupted save in it."""
    (tmp_path / "save").mkdir()
    lineage.claim(tmp_path / "save", RUN, RUN)
    (tmp_path / "save/iter_0000010.partial").mkdir()
    return tmp_path / "save"


def checkpoints(save: Path) -> list[str]:
    return [path.name for path in save.glob("iter_*")]


def asked(save: Path, **sections: Any) -> RunRequest:
    return request(str(save), **{"checkpoint": {"save": str(save)}} | sections)


def job(run: str, save: Path) -> Any:
    """A run that goes on and saves there."""
    return FakeJob(run=run, labels={f"{LABEL}checkpoints": str(save)})


Recorder = Callable[[str, RunRequest], None]


@pytest.fixture
def recorded(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Keeps the record of a run, while no job goes on."""

    def recorded(run: str, wanted: RunRequest) -> None:
        made = replace(plan("gpt2-tiny.yaml"), run=run)
        record.write(record.record_of(made, wanted, "docker"))

    monkeypatch.setattr(launch.find, "jobs", list)
    return recorded


HERE: Any = None
"""A backend that isn't asked."""


@pytest.fixture
def again(
    save: Path, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Plan]]:
    """Makes the second attempt while other jobs go on; the plans that were started."""

    def again(wanted: RunRequest, *jobs: Any, seen: bool = True) -> list[Plan]:
        made = replace(plan("gpt2-tiny.yaml"), run=RUN, checkpoints=str(save))
        labels = {**dict(made.labels), f"{LABEL}run": RUN, f"{LABEL}checkpoints": str(save)}
        if wanted.config.nodes.count > 1:
            labels[f"{LABEL}node"] = str(wanted.config.nodes.rank)
        made = replace(made, labels=tuple(labels.items()))
        monkeypatch.setattr(launch, "assemble", lambda *_: PlannedRun(made, ImageFacts()))
        monkeypatch.setattr(launch.find, "jobs", lambda: [(None, one) for one in jobs])
        started: list[Plan] = []
        chosen: Any = SimpleNamespace(
            start=lambda plan, attach: started.append(plan), shares_files=seen, contained=True
        )
        launch.Attempts(wanted, chosen, Stamp(RUN, ""), None)(1)
        return started

    return again


def test_another_run_that_took_the_folder_in_the_pause_is_left_alone(
    save: Path, again: Callable[..., list[Plan]]
) -> None:
    with pytest.raises(UsageError, match="is being saved to by run ffffffff"):
        again(asked(save), job("ffffffff", save))
    assert checkpoints(save) == ["iter_0000010.partial"]
    assert len(again(asked(save), job(RUN, save), job("ffffffff", save / "other"))) == 1


@pytest.mark.parametrize(("rank", "left"), [(0, "incomplete"), (1, "partial")])
def test_of_several_nodes_the_first_tidies(
    save: Path, again: Callable[..., list[Plan]], rank: int, left: str
) -> None:
    again(asked(save, nodes={"count": 2, "rank": rank, "master_addr": "first"}))
    assert checkpoints(save) == [f"iter_0000010.{left}"]


def test_checkpoints_of_another_machine_are_left_to_the_program(
    save: Path, again: Callable[..., list[Plan]]
) -> None:
    assert len(again(asked(save), job("ffffffff", save), seen=False)) == 1
    assert checkpoints(save) == ["iter_0000010.partial"]
    from_elsewhere = asked(save, checkpoint={"save": str(save), "load": "/pretrained"})
    with pytest.raises(UsageError, match="can't be seen from here"):
        again(from_elsewhere, seen=False)


def test_a_run_that_does_not_start_leaves_no_record(save: Path, plan: Callable[..., Plan]) -> None:
    record.make(RUN)

    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("no")

    chosen: Any = SimpleNamespace(start=refuse, contained=True, shares_files=True)
    first = launch.FirstAttempt(replace(plan("gpt2-tiny.yaml"), run=RUN), ExitStack())
    with pytest.raises(EngineError):
        launch.Attempts(asked(save), chosen, Stamp(RUN, ""), first)(0)
    assert not record.folder(RUN).exists()


def test_nothing_is_set_aside_before_all_that_refuses_a_run(
    save: Path, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an array, the first task's were, and then the second task's checks refused it."""
    made = replace(plan("gpt2-tiny.yaml"), run=RUN, checkpoints=str(save), mounts=())
    made = replace(made, labels=((f"{LABEL}run", RUN), (f"{LABEL}checkpoints", str(save))))
    monkeypatch.setattr(launch.find, "jobs", list)
    chosen: Any = SimpleNamespace(
        start=lambda plan, attach: plan, scheduled=False, shares_files=True, contained=True
    )
    launch.prepare(PlannedRun(made, cast(Any, None)), chosen, preflight=False)
    assert checkpoints(save) == ["iter_0000010.partial"]
    launch.begin(chosen, made, attach=False)
    assert checkpoints(save) == ["iter_0000010.incomplete"]


def test_a_run_without_a_record_here_is_only_looked_at(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = job(RUN, runs)
    monkeypatch.setattr(launch.find, "job", lambda text: ("engine", theirs))
    seen: list[dict[str, Any]] = []

    def supervise(*_: Any, **how: Any) -> Any:
        seen.append(how)
        return SimpleNamespace(code=3)

    monkeypatch.setattr(launch, "supervise", supervise)
    assert launch.attach(RUN) == 3
    assert seen == [{"job": theirs, "guest": True, "shown": OutputDetail.USUAL}]
    assert f"run {RUN} has no record here" in capsys.readouterr().err


def test_a_run_that_a_launcher_is_about_to_start_again_is_not_resumed(
    save: Path, recorded: Recorder
) -> None:
    recorded(RUN, asked(save))
    with owner.following(RUN), pytest.raises(UsageError, match=f"run {RUN} still goes on"):
        again_of.resumed(RUN, HERE, [])
    found, notes = again_of.resumed(RUN, HERE, [])
    assert found.config.checkpoint.load == str(save)
    assert found.payload_digest == ""  # today's, and it is said
    assert "it continues with this launcher's runner and trainer, not with its own" in notes


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_the_same_is_the_same_though_it_saves_elsewhere_and_is_tied_or_has_a_secret(
    save: Path, monkeypatch: pytest.MonkeyPatch, *, tie: bool, began: bool
) -> None:
    checkpoint = CheckpointFolder(10, save / "iter_0000010")
    monkeypatch.setattr(folders, "newest_complete", lambda root: checkpoint if began else None)
    chosen: Any = NO_GPUS
    folder = {"save": str(save), "load": str(save)}
    wanted = asked(save, program="./own.py", env={"API_KEY": "x"}, checkpoint=folder)
    wanted = replace(wanted, tie=tie)
    plan = assemble(wanted, chosen, Stamp(RUN, "")).plan
    record.write(record.record_of(plan, wanted, "docker"))
    provenance.write_facts(plan, provenance.facts_of(plan, wanted, chosen, None))
    monkeypatch.setenv("API_KEY", "x")
    found, notes = again_of.repeated(RUN, chosen, force=False)
    assert notes == [f"it saves to {save}-rerun"]
    assert found.config.checkpoint.load == (str(save) if began else f"{save}-rerun")


ANOTHER = "aaaaaaaa"


@pytest.mark.parametrize("error", [PermissionError("no"), UsageError("no")])
@pytest.mark.parametrize("fails", ["facts_of", "write_facts"])
def test_a_run_whose_facts_can_not_be_kept_leaves_no_record(
    save: Path,
    plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    error: Exception,
) -> None:
    """`runs` listed it as unknown for ever, as one that may go on."""

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(launch, "with_lineage", lambda plan, *_: plan)
    monkeypatch.setattr(launch, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(provenance, "facts_of", lambda *_: {})
    monkeypatch.setattr(provenance, fails, refuse)
    assembled: Any = PlannedRun(replace(plan("gpt2-tiny.yaml"), run=RUN), ImageFacts())
    chosen: Any = SimpleNamespace(name="docker")
    with pytest.raises(type(error)):
        launch.record_plan(assembled, asked(save), chosen, preflight=False)
    assert not record.folder(RUN).exists()


@pytest.fixture
def theirs(save: Path) -> Path:
    """A folder with another run's checkpoints in it, complete at 3 and 6, cut short at 9."""
    for each in save.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    lineage.claim(save, ANOTHER, ANOTHER)
    for iteration in (3, 6):
        distributed(folders.partial(save, iteration))
        folders.publish(save, iteration)
    folders.folder(save, 9).mkdir()
    lineage.settle(save)
    return save


def plan_of(wanted: RunRequest) -> Plan:
    """Its plan, looked at as before a start."""
    chosen: Any = NO_GPUS
    return launch.with_lineage(assemble(wanted, chosen, Stamp(RUN, "")).plan, wanted, chosen)


@pytest.mark.parametrize("finetune", [False, True])
def test_a_folder_with_another_runs_checkpoints_is_refused(theirs: Path, finetune: bool) -> None:
    """It was saved into without a word, and the other's newest was told as one's own."""
    load = {"load": str(theirs), "finetune": True} if finetune else {}
    wanted = asked(theirs, program="./own.py", checkpoint={"save": str(theirs), **load})
    with pytest.raises(UsageError, match="iter_0000009 is run aaaaaaaa's") as refused:
        plan_of(wanted)
    assert ("finetune" if finetune else "checkpoint.load=") in refused.value.remedy
    with pytest.raises(UsageError, match="iter_0000009 is run aaaaaaaa's"):
        launch.check_start(wanted, cast(Any, NO_GPUS), detach=False, preflight=False)


def test_what_names_the_folder_to_load_from_goes_on(theirs: Path, tmp_path: Path) -> None:
    """Under another name of it, too."""
    (tmp_path / "link").symlink_to(theirs)
    for path in (theirs, tmp_path / "link"):
        folder = {"save": str(theirs), "load": str(path)}
        plan = plan_of(asked(theirs, program="./own.py", checkpoint=folder))
        assert dict(plan.labels)[f"{LABEL}line"] == ANOTHER
        assert [mount.target for mount in plan.mounts if mount.source == str(theirs)] == [
            "/checkpoints"
        ]
    launch.tidy(plan, cast(Any, NO_GPUS))
    newest = launch.find.newest(dict(plan.labels))
    assert newest is not None
    assert newest.iteration == 6
    assert "iter_0000009.incomplete" in checkpoints(theirs)
    nodes = {"count": 2, "rank": 1, "master_addr": "first"}  # whose launcher doesn't know its id
    plan = plan_of(asked(theirs, program="./own.py", nodes=nodes))
    newest = launch.find.newest(dict(plan.labels))
    assert newest is not None
    assert newest.iteration == 6


def test_what_the_file_allows_is_saved_among_others_which_stay(theirs: Path) -> None:
    folder = {"save": str(theirs), "save_overwrite": True}
    plan = plan_of(asked(theirs, program="./own.py", checkpoint=folder))
    launch.tidy(plan, cast(Any, NO_GPUS))
    assert sorted(checkpoints(theirs)) == ["iter_0000003", "iter_0000006", "iter_0000009"]
    assert launch.find.newest(dict(plan.labels)) is None
    assert "--save-overwrite" not in plan.argv


def test_a_run_whose_folder_another_has_gone_over_is_not_resumed_from_that(
    theirs: Path, recorded: Recorder
) -> None:
    recorded(ANOTHER, asked(theirs))
    again_of.resumed(ANOTHER, HERE, [])
    lineage.claim(theirs, RUN, RUN, overwrite=True)
    distributed(folders.partial(theirs, 12))
    folders.publish(theirs, 12)
    with pytest.raises(UsageError, match=f"iter_0000012 is run {RUN}'s"):
        again_of.resumed(ANOTHER, HERE, [])


def test_a_run_that_has_finished_says_so_and_how_it_goes_on(
    theirs: Path, recorded: Recorder
) -> None:
    """It was started, loaded its last checkpoint, and ended, with a new record for nothing."""
    recorded(ANOTHER, asked(theirs, training={"train_iters": 6}))
    with pytest.raises(UsageError) as caught:
        again_of.resumed(ANOTHER, HERE, [])
    assert caught.value.problem.endswith("/iter_0000006 is iteration 6 of 6")
    assert caught.value.remedy.endswith(f"resume {ANOTHER} --set training.train_iters=12")
    more = [origins.parse_set("training.train_iters=10")]
    assert again_of.resumed(ANOTHER, HERE, more)[0].config.training.train_iters == 10


Write = Callable[[str], str]
HEAD = "name: a\nimage: cpu\ngpus: {gpus}\n"
TINY = (
    "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64}\n"
    "training: {micro_batch_size: 1, train_iters: 10, lr: 0.1}\n"
    "data: {mock: true, vocab_size: 256}\n"
)


class Engine(Backend):
    """An engine with one image or without, or none at all."""

    name = "docker"
    shares_files = True  # type: ignore[assignment]

    def __init__(
        self, facts: ImageFacts | None, *, lost: bool = False, gpus: int | None = None
    ) -> None:
        self.known = facts
        self.lost = lost
        self.gpus = gpus

    def facts(self, image: str) -> ImageFacts | None:
        if self.lost:
            raise EngineError("no engine answers")
        return self.known

    def identity(self, image: str) -> dict[str, str]:
        return {"name": image, "id": "sha256:aa"}

    def rootless(self) -> bool:
        return False

    def count_gpus(self) -> int | None:
        return self.gpus


NO_IMAGE = Engine(None)
NO_ENGINE = Engine(None, lost=True)
NO_GPUS = Engine(ImageFacts("0.16.1", False))


def assembled(write: Write, text: str, engine: Engine) -> Any:
    chosen: Any = engine
    return assemble(RunRequest(*load(write(text)), "/"), chosen, Stamp(RUN, ""))


@pytest.mark.parametrize("engine", [NO_IMAGE, NO_ENGINE])
def test_what_is_wrong_with_the_file_is_told_before_image_and_engine(
    write: Write, engine: Engine
) -> None:
    text = HEAD.format(gpus=2) + TINY + "parallel: {tensor_model_parallel_size: 3}\n"
    with pytest.raises(UsageError, match="2 processes aren't divisible by tensor 3"):
        assembled(write, text, engine)
    with pytest.raises(UsageError, match=r"no tag '24\.11'"):
        assembled(write, text.replace("cpu", '"24.11"'), engine)
    with pytest.raises(UsageError, match="takes no --attention-backend"):
        assembled(
            write,
            HEAD.format(gpus=0) + TINY.replace("{num", "{attention_backend: flash, num"),
            engine,
        )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (NO_IMAGE, "no image megatron:cpu"),
        (NO_ENGINE, "no engine answers"),
        (NO_GPUS, "no GPUs found"),
    ],
)
@pytest.mark.parametrize(
    "rest",
    [
        TINY + "parallel: {tensor_model_parallel_size: 4}\n",
        TINY + "nodes: {count: 2, rank: 0, master_addr: a}\n",
        "program: ./mine.py\n",
        'image: "24.10"\nprogram: examples/run_simple_mcore_train_loop.py\n',
    ],
)
def test_of_a_right_file_on_all_gpus_what_is_missing_is_told(
    write: Write, rest: str, engine: Engine, said: str
) -> None:
    text = HEAD.format(gpus="all") + rest
    text = text.replace("image: cpu\n", "") if "image" in rest else text
    with pytest.raises(EngineError, match=said.replace("cpu", r"(cpu|24\.10)")):
        assembled(write, text, engine)


def test_with_an_image_the_plan_is_made_of_what_is_there(write: Write) -> None:
    made = assembled(
        write, HEAD.format(gpus="all") + TINY, Engine(ImageFacts("0.16.1", False), gpus=3)
    )
    assert made.plan.processes_per_node == 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("Hello world\n")
    return path


def given(name: str, text: Path, *settings: str, release: str | None = None) -> TokenizedRun:
    config, origin = load(name, f"data.text={text}", *settings)
    return tokenized(config, origin, text.parent / "cache", lambda: release)


def data(name: str, text: Path, *settings: str) -> Data:
    return given(name, text, *settings).config.data


@pytest.mark.parametrize("name", ["gpt2-tiny.yaml", "demo.yaml", "gpt2.yaml"])
def test_a_presets_own_data_gives_way(text: Path, name: str) -> None:
    found = given(name, text)
    assert found.text
    assert found.config.data.path == str(found.text.prefix)
    assert (found.config.data.text, found.config.data.vocab_size) == (None, 50257)


def test_what_does_not_fit_the_text_is_refused(text: Path) -> None:
    with pytest.raises(UsageError) as caught:
        data("gpt2-tiny.yaml", text, "data.vocab_size=50256")
    assert "=50256: data.vocab_size: 50256 is too small: GPT2BPE" in str(caught.value)
    assert "give at least 50257" in str(caught.value)
    own = text.with_name("own.yaml")
    own.write_text("name: a\nimage: cpu\ndata:\n  vocab_size: 256\n")
    with pytest.raises(UsageError, match=r"own\.yaml:4: data\.vocab_size: 256 is too small"):
        data(str(own), text)
    assert data(str(own), text, "data.vocab_size=null").vocab_size == 50257
    assert data(str(own), text, "data.vocab_size=50304").vocab_size == 50304
    with pytest.raises(UsageError, match=r"data\.text and data\.path"):
        data("demo.yaml", text, "data.path=a")
    with pytest.raises(UsageError, match="--tokenizer-model: GPT2BPETokenizer doesn't read it"):
        data("gpt2-tiny.yaml", text, "data.tokenizer_model=tokenizer.json")


def test_the_image_says_whose_tokens_they_are(text: Path) -> None:
    """Other tokens lie elsewhere; the same, of another release, are taken."""
    releases = (None, "0.9.0", "0.14.0", "0.16.1", "0.19.0")
    found = [given("gpt2-tiny.yaml", text, release=release) for release in releases]
    prefixes = [one.config.data.path for one in found]
    assert [prefixes.index(one) for one in prefixes] == [0, 0, 0, 3, 3]


def test_a_dry_run_says_that_the_text_will_be_tokenized(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    command = ["gpt2-tiny.yaml", "--dry-run", "--set", f"data.text={text}"]
    prefix = given("gpt2-tiny.yaml", text, release="0.16.1").text  # the release of the image
    assert prefix
    code, out, err = run(tmp_path, *command)
    assert code == 0, err
    assert "--vocab-size 50257" in out
    told = f"launcher: data.text: it will be tokenized first, to {prefix.prefix}.bin\n"
    assert err.startswith(f"{told}forecast for ")
    assert not (tmp_path / "cache").exists()
    prefix.make(lambda done: None)
    assert "data.text" not in run(tmp_path, *command)[2]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--detach", "--tie"), "--detach and --tie contradict each other"),
        (("--detach", "--max-restarts", "1"), "with --detach, no launcher can restart the run"),
        (("--detach", "--set", "guard.on_nan=rewind"), "no launcher can rewind the run"),
        ((), "save is being saved to by run aaaaaaaa"),
    ],
)
def test_a_run_that_is_refused_is_so_before_hours_of_tokenizing(
    text: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    """These came after the data was made."""
    save = text.parent / "save"
    made = list[TokenizedRun]()

    def make(data: TokenizedRun) -> None:
        made.append(data)

    monkeypatch.setattr(TokenizedRun, "make", make)
    theirs = job(ANOTHER, save)
    monkeypatch.setattr(launch.find, "jobs", lambda: [(HERE, theirs)])
    settings = (f"data.text={text}", f"checkpoint.save={save}", "checkpoint.save_interval=5")
    monkeypatch.setattr(api, "backend", lambda name: NO_GPUS)
    command = ["gpt2-tiny.yaml", "--no-preflight", "--gpus", "0", *options]
    code, _, err = run(text.parent, *command, *(f"--set={each}" for each in settings))
    assert (code, told in err) == (2, True), err
    assert not made


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, as sudo gives it")


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables as sudo sets them."""
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "23456")


@needs_root
@pytest.mark.usefixtures("sudo")
def test_under_sudo_it_is_the_user_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run wrote, and the folders made for it, were root's."""
    assert run_files.caller() == Caller(12345, 23456)
    (tmp_path / "old").mkdir()
    run_files.make_folder(tmp_path / "old/new/er")
    owners = [(tmp_path / name).stat().st_uid for name in ("old", "old/new", "old/new/er")]
    assert owners == [os.getuid(), 12345, 12345]
    for gid in ("nonsense", "0"):
        monkeypatch.setenv("SUDO_UID", "0")
        monkeypatch.setenv("SUDO_GID", gid)
        assert run_files.caller() == Caller(0, 0)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("os.getgid", lambda: 100)
    monkeypatch.setattr("os.getgroups", lambda: [110, 100, 44])
    assert run_files.caller() == Caller(1000, 100, (44, 110))


@needs_root
def test_the_tracker_stays_whose_the_folder_is(tmp_path: Path) -> None:
    """Where root's launcher had set one aside, the caller's run could write it no more."""
    os.chown(tmp_path, 12345, 23456)
    folders.partial(tmp_path, 3).mkdir()
    folders.publish(tmp_path, 3)
    told = (tmp_path / folders.TRACKER).stat()
    assert (told.st_uid, told.st_gid) == (12345, 23456)
