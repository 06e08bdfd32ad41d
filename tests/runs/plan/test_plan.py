"""What a plan says, from what a run file says, which is settled once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli
from launcher.base.errors import UsageError
from launcher.runs.follow import assemble, run_files
from launcher.runs.plan import layout, render
from launcher.runs.plan.image_facts import ImageFacts, labelled, planned, reference
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan, without_memlock
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import RunRequest
from launcher.runs.runfile.values import Gpus
from tests.plans import HOST, MINIMAL, STAMP, Planner, load, plan_of, refusal
from tests.tables import table

Write = Callable[[str], str]
UPSTREAM = ("gpus=2", "program=pretrain_gpt.py", "logging.check_replicas_interval=null")


def value(plan: Plan, option: str) -> str:
    """What follows an option of the program."""
    return plan.argv[plan.argv.index(option) + 1]


def mounts(plan: Plan) -> dict[str, tuple[str, bool]]:
    mounted = plan.without_payload().mounts
    return {mount.target: (mount.source, mount.read_only) for mount in mounted}


@table("text", "sets", "told")
def test_what_can_not_be_planned_is_refused(
    plan: Planner, text: str, sets: list[str], told: str
) -> None:
    assert told in refusal(plan, text, *sets)


def test_a_presets_processes_are_for_the_cpu_and_give_way_to_gpus(plan: Planner) -> None:
    assert plan("gpt2-tiny", "gpus=1", "parallel={}").processes_per_node == 1  # 2 in the file


def test_the_number_of_all_must_be_found_first() -> None:
    config, origin = load("gpt2", "gpus=all")
    everything = Gpus(count=4, everything=True)
    made = plan_of(config, origin, ImageFacts(), HOST, STAMP, gpus=everything)
    assert (made.processes_per_node, made.gpus.everything) == (4, True)


def test_an_engine_that_may_not_lock_memory_is_asked_for_the_rest(plan: Planner) -> None:
    made = plan("gpt2", "gpus=2")
    assert without_memlock(made) == replace(made, ulimits=(("stack", 67108864),))
    assert plan("gpt2-tiny").ulimits == (("stack", 67108864),)


@pytest.mark.parametrize(
    ("sets", "ipc", "shm_size"),
    [
        (("gpus=1",), "private", "8g"),
        (("gpus=0", "processes=4"), "private", "8g"),
        (("gpus=1", "nodes={count: 2, master_addr: a}"), "host", None),
        (("gpus=1", "resources.ipc=host"), "host", None),
        (("gpus=2", "resources={ipc: private, shm_size: 1g}"), "private", "1g"),
        (("gpus=2", "resources.ipc=private"), "private", None),
    ],
)
def test_the_hosts_memory_is_shared_by_several_processes_with_gpus_alone(
    plan: Planner, sets: tuple[str, ...], ipc: str, shm_size: str | None
) -> None:
    """A run on the CPU saw, and could change, what the host's processes share."""
    made = plan("gpt2", *sets)
    assert (made.ipc, made.shm_size) == (ipc, shm_size)


def test_the_calling_user_owns_what_the_run_writes(plan: Planner) -> None:
    made = plan("gpt2")
    assert made.user == "1000:100"
    assert dict(made.env)["HOME"] == "/tmp"  # noqa: S108
    assert plan("gpt2", "resources.user=image").user is None
    assert plan("gpt2", 'resources.user="12345:5"').user == "12345:5"
    root = plan("gpt2", host=replace(HOST, uid=0, gid=0))
    assert (root.user, "HOME" in dict(root.env)) == (None, False)
    host = replace(HOST, groups=(44, 110))  # data that a group may read is the run's to read
    assert plan("gpt2", host=host).groups == (44, 110)
    assert plan("gpt2", 'resources.user="12345:5"', host=host).groups == ()
    assert plan("gpt2", host=replace(host, rootless=True)).groups == ()


def test_the_programs_paths_are_those_of_the_container(plan: Planner) -> None:
    made = plan("gpt2", "data.path=../data sets/corpus", "checkpoint.load=~/old")
    assert mounts(made) == {
        "/data/0/corpus.bin": ("/home/user/data sets/corpus.bin", True),
        "/data/0/corpus.idx": ("/home/user/data sets/corpus.idx", True),
        "/data-cache": ("/home/user/.cache/x/data-index", False),
        "/checkpoints": ("/home/user/work/checkpoints/gpt2", False),
        "/checkpoints-from": ("/home/user/old", True),
        "/compiled": ("/home/user/.cache/x/compiled/megatron%3A24.10", False),
    }
    assert value(made, "--data-path") == "/data/0/corpus"
    assert value(made, "--data-cache-path") == "/data-cache"
    assert value(made, "--save") == "/checkpoints"
    assert value(made, "--load") == "/checkpoints-from"
    assert "--mock-data" not in made.argv


def test_saving_can_be_turned_off(plan: Planner) -> None:
    off = plan("gpt2", "checkpoint.save=null", "checkpoint.load=null")
    assert not {"--save", "--load", "--save-interval"} & set(off.argv)


def test_one_folder_to_save_and_load_is_mounted_once(plan: Planner) -> None:
    made = plan("gpt2", "checkpoint.load=checkpoints/../checkpoints/gpt2")
    assert list(mounts(made)) == ["/checkpoints", "/compiled"]
    assert value(made, "--load") == value(made, "--save") == "/checkpoints"


def test_a_blend_keeps_its_weights(plan: Planner) -> None:
    made = plan("gpt2", "data.path=[0.3, /a/x.bin, 0.7, /b/x]")
    at = made.argv.index("--data-path")
    assert made.argv[at + 1 : at + 5] == ("0.3", "/data/1/x", "0.7", "/data/3/x")
    assert mounts(made)["/data/3/x.idx"] == ("/b/x.idx", True)


def test_a_tokenizer_by_name_is_not_a_file(plan: Planner) -> None:
    named = plan("gpt2-tiny", *UPSTREAM, "data.tokenizer_model=some/model")
    assert value(named, "--tokenizer-model") == "some/model"
    filed = plan("gpt2-tiny", *UPSTREAM, "data.tokenizer_model=./t.model")
    assert value(filed, "--tokenizer-model") == "/data/tokenizer_model/t.model"


def test_upstream_wants_grouped_query_attention_said(plan: Planner) -> None:
    sets = ("model.num_attention_heads=8", "model.num_query_groups=4")
    assert "--group-query-attention" in plan("gpt2-tiny", *UPSTREAM, *sets).argv
    assert "--group-query-attention" not in plan("gpt2-tiny", *sets).argv


def test_the_quickstart_needs_a_checkout(plan: Planner) -> None:
    assert "has no scripts" in refusal(plan, "simple", facts=ImageFacts("0.9.0", False))
    assert plan("gpt2-tiny", facts=ImageFacts("0.16.1", False))
    assert plan("gpt2-tiny", "gpus=1", "parallel={}").processes_per_node == 1  # 2 for the CPU


def test_variables_of_the_file_win_and_null_passes_the_launchers_own(plan: Planner) -> None:
    made = plan("gpt2-tiny", "env={PYTHONUNBUFFERED: '', TOKEN: null, FAST: true, N: 3}")
    env = {"PYTHONUNBUFFERED": "", "TOKEN": None, "FAST": "true", "N": "3"}
    assert {name: dict(made.env)[name] for name in env} == env


def test_several_nodes_find_each_other(plan: Planner) -> None:
    made = plan("gpt3-175b", "nodes.rank=3", "nodes.master_addr=10.0.0.1")
    assert [pair for pair in made.env if pair[0].startswith("PET_")] == [
        ("PET_MASTER_ADDR", "10.0.0.1"),
        ("PET_MASTER_PORT", "29500"),
        ("PET_NNODES", "16"),
        ("PET_NODE_RANK", "3"),
    ]
    assert dict(made.labels)["megatron-launchpad.node"] == "3"
    assert made.argv == plan("gpt3-175b", "nodes.master_addr=10.0.0.1").argv
    assert made.network == "host"
    assert plan("gpt2").network is None
    assert plan("gpt2", "resources.network=none").network == "none"


@pytest.mark.parametrize(
    ("sets", "fewer"),
    [
        (["training.global_batch_size=12"], (2, 3)),
        (["training.global_batch_size=24", "training.micro_batch_size=auto"], (2,)),
        (["training.global_batch_size=null"], "change with fewer nodes"),
        (["training.global_batch_size=20", "nodes.min=3"], "none of 3 to 3 nodes"),
        (["nodes.min=5"], "more than all 4"),
    ],
)
def test_with_how_few_nodes_a_run_can_do(plan: Planner, sets: list[str], fewer: Any) -> None:
    """With the same batches: a rank that is missing may leave some that can't be shared out."""
    few = ["nodes={count: 4, min: 2, master_addr: a}", "gpus=1", "training.micro_batch_size=1"]
    if isinstance(fewer, str):
        with pytest.raises(UsageError, match=fewer):
            plan("gpt2", *few, *sets)
        return
    made = plan("gpt2", *few, *sets)
    assert made.fewer == fewer
    assert made.argv[made.argv.index("--fewer") + 1] == ",".join(map(str, fewer))


def test_all_nodes_on_one_machine_know_each_other(plan: Planner) -> None:
    with pytest.raises(UsageError, match=r"--set nodes=2: nodes: .* master_addr") as refused:
        plan("gpt2", "nodes=2")
    assert "--backend compose" in refused.value.remedy
    here = replace(HOST, every_node=True)
    made = plan("gpt2", "nodes=2", "gpus=4", host=here)
    assert dict(made.env)["PET_MASTER_ADDR"] == "node-0"
    assert dict(made.env)["PET_NODE_RANK"] == "0"
    assert made.network is None
    with pytest.raises(UsageError, match=r"nodes\.rank"):
        plan("gpt2", "nodes={count: 2, rank: 1}", "gpus=4", host=here)


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def bare(plan: Planner, *mounted: Mount) -> Plan:
    return replace(plan("gpt2-tiny"), mounts=mounted)


def test_folders_that_are_written_to_are_made_and_others_told(
    plan: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b" / "c"
    run_files.prepare(bare(plan, Mount(str(folder), "/x", False, "checkpoint.save")))
    assert folder.is_dir()
    make_files(tmp_path, "file", "x.bin")
    without = plan("gpt2-tiny", f"data.path={tmp_path}/x").without_payload()
    assert run_files.missing(without) == [f"data.path: no such file or folder: {tmp_path}/x.idx"]
    (tmp_path / "x_text_document.idx").touch()
    with pytest.raises(UsageError, match=r"without \.bin and \.idx\. .* 'x_text_document'\?"):
        run_files.require(without)
    with pytest.raises(UsageError, match=r"checkpoint\.save: can't make the folder"):
        run_files.prepare(bare(plan, Mount(f"{tmp_path}/file/x", "/x", False, "checkpoint.save")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root may write anywhere
    with pytest.raises(UsageError, match="isn't yours to write to"):
        run_files.prepare(bare(plan, Mount("/usr", "/x", False, "checkpoint.save")))


ROW = SimpleNamespace(megatron="0.9.0", source="git")
MATRIX: Any = SimpleNamespace(
    rows={"24.09": ROW, "24.10": ROW}, releases={"0.9.0": None, "0.10.0": None}
)


@pytest.mark.parametrize(
    ("image", "facts", "name"),
    [
        ("tag: 24.10", ImageFacts("0.9.0", True), "megatron:24.10"),
        ("{tag: 24.10, megatron: 0.10.0}", ImageFacts("0.10.0", True), "megatron:24.10-0.10.0"),
        ("{name: 'a/b:1', megatron: 0.10.0}", ImageFacts("0.10.0"), "a/b:1"),
    ],
)
def test_what_the_matrix_knows_of_an_image(
    write: Write, image: str, facts: ImageFacts, name: str
) -> None:
    image = image if image.startswith("{") else f"{{{image}}}"
    config, _ = load(write(f"name: a\nimage: {image}\n"))
    assert planned(config.image, MATRIX, str.upper) == facts
    assert reference(config.image) == name


@pytest.mark.parametrize(
    ("image", "said"),
    [("24.11", "Did you mean '24.10'"), ("{tag: 24.10, megatron: 0.9.9}", "Did you mean '0.9.0'")],
)
def test_what_the_matrix_does_not_know_is_told(write: Write, image: str, said: str) -> None:
    config, _ = load(write(f"name: a\nimage: {image}\n"))
    with pytest.raises(UsageError, match=f"IMAGE.*\n.*{said}"):
        planned(config.image, MATRIX, str.upper)


def test_the_labels_of_an_image_are_facts() -> None:
    labels: dict[str, Any] = {"megatron-launchpad.megatron": "0.9.0"}
    assert labelled(labels) == ImageFacts("0.9.0", None)
    assert labelled(labels | {"megatron-launchpad.whole": "true"}) == ImageFacts("0.9.0", True)
    assert labelled(labels | {"megatron-launchpad.whole": "false"}) == ImageFacts("0.9.0", False)
    assert labelled({}) == ImageFacts(None, None)


def test_what_one_image_compiles_no_other_loads(plan: Planner) -> None:
    """One folder was written to by all images, and what one put there the others loaded."""
    sources = {
        mount.source
        for image in ("a/b:1", "a_b:1", "a/b:2", '"24.10"')
        for mount in plan("gpt2.yaml", f"image={image}", "gpus=1").mounts
        if mount.target == "/compiled"
    }
    assert len(sources) == 4


def test_a_mount_that_opens_the_machine_is_warned_of(plan: Planner) -> None:
    text = "name: a\nimage: cpu\ngpus: 0\nprogram: ./train.py\nmounts:\n"
    text += "- {source: /, target: /host, read_only: false}\n"
    text += "- {source: /var/run/docker.sock, target: /run/docker.sock}\n"
    text += "- {source: /data, target: /data, read_only: false}\n"
    warned = [*assemble._opened(plan(text))]
    assert ["all files" in warned[0], "docker.sock" in warned[1], len(warned)] == [True, True, 2]
    assert not [*assemble._opened(plan(text.replace("read_only: false", "")))][1:]


def test_a_secret_among_the_arguments_is_warned_of(plan: Planner) -> None:
    """It stood in `ps` and in what the engine keeps without a word."""
    text = "name: a\nimage: cpu\ngpus: 0\nprogram: ./train.py\n"
    [told] = assemble._opened(plan(text, rest=("--api-key", "s3cr3t")))
    assert "list of processes" in told
    assert "s3cr3t" not in told
    assert [*assemble._opened(plan(text, rest=("--input-key", "question")))] == []


def test_what_a_megatron_is_taken_for_is_told(write: Write, plan: Planner) -> None:
    asked = RunRequest(*load(write(MINIMAL + 'megatron: {as: "0.19"}\n')), cwd="/")
    facts = assemble._known(asked, ImageFacts("0.31.0", True))
    assert facts.release == "0.19"
    told = [*assemble._unused(plan("gpt2"), facts)]
    assert told == ["Megatron 0.31.0 is treated as 0.19, but may differ from it"]
    assert assemble._known(asked, ImageFacts("0.16.1", True)) == ImageFacts("0.16.1", True)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_clusters_runner_asks_megatron_what_nobody_could_before(
    plan: Planner, scheduled: bool
) -> None:
    made = plan("gpt2", *UPSTREAM, host=replace(HOST, scheduled=scheduled))
    assert ("LAUNCHER_ASK" in dict(made.env)) == scheduled
    assert "LAUNCHER_ASK" not in dict(plan("gpt2", host=replace(HOST, scheduled=scheduled)).env)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a run file was validated, laid out and rendered."""
    found = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for name, function in {"laid out": layout.layout, "rendered": render.options}.items():
        for module in [each for name, each in sys.modules.items() if name.startswith("launcher.")]:
            for key in [key for key, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, key, counting(name, function))
    monkeypatch.setattr(
        RunConfig, "model_validate", counting("validated", RunConfig.model_validate)
    )
    return found


@pytest.mark.parametrize(
    "words",
    ["gpt2 --gpus 2", "llama3-8b --gpus 8 --tag 24.10 --set training.lr=1e-4", "gpt3-175b"],
)
def test_a_dry_run_settles_its_run_file_once(words: str, counted: Counter[str]) -> None:
    """It was validated 7 times, laid out 7 times and rendered 6 times."""
    assert cli.main(["run", *words.split(), "--dry-run"]) == 0
    assert counted == {"validated": 1, "laid out": 1, "rendered": 1}
