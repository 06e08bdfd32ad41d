"""Shell scripts as run files: whole ones against golden files, and what each form comes to."""

from __future__ import annotations

import math
import os
import shlex
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.runs.plan import render
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.program import program
from launcher.runs.runfile.config import RunConfig
from launcher.tools.importing.from_script import import_script
from launcher.tools.importing.shell_script import Images, ImportResult
from tests.tables import table
from tests.tools.importing.conftest import IMAGES, sandbox_here

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = sorted(path.name for path in GOLDEN.glob("*") if path.suffix != ".out")


def read(text: str, *positional: str, images: Images = IMAGES, **given: str) -> ImportResult:
    box = sandbox_here()
    return import_script(Path("script.sh"), text, images, box, arguments=positional, given=given)


once = cache(read)
"""A script that two helpers are asked for runs in one sandbox."""


def told(text: str, *positional: str, **given: str) -> list[str]:
    return [f"{left.line}: {left.what}" for left in once(text, *positional, **given).told]


def config(text: str, *positional: str, **given: str) -> RunConfig:
    return yamlfile.parse(once(text, *positional, **given).text, RunConfig, "run.yaml")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_as_a_run_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole scripts, each with one thing that the reader of earlier versions got wrong."""
    monkeypatch.chdir(GOLDEN)
    box, text = sandbox_here(), (GOLDEN / name).read_text(encoding="utf-8")
    try:
        done = import_script(Path(name), text, IMAGES, box)
    except UsageError as error:
        got = f"{error}\n"
    else:
        lines = [f"{name}:{left.line}: {left.what}" for left in done.told]
        got = "\n".join([done.text, *lines, "", done.wrong]).rstrip() + "\n"
    path = GOLDEN / f"{name}.out"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"
    assert "abc123" not in got


@table("line", "gpus", "nodes")
def test_what_starts_the_program(line: str, gpus: str, nodes: int) -> None:
    found = config(f"{line}\n")
    assert (found.program, found.gpus, found.nodes.count) == ("pretrain_gpt.py", gpus, nodes)


@table("line")
def test_two_dashes_end_a_starters_options(line: str) -> None:
    """What stands behind them was taken for the value of an option without a name."""
    assert told(f"{line}\n") == []
    assert config(f"{line}\n").program == "pretrain_gpt.py"


@table("lines", "said")
def test_what_a_batch_asks_for_is_used_or_told(lines: str, said: list[str]) -> None:
    found = told(f"#!/bin/sh\n{lines}\ntorchrun pretrain_gpt.py\n")
    assert len(found) == len(said)
    for one, wanted in zip(found, said, strict=True):
        assert one.startswith("2: ")
        assert wanted in one


def test_what_a_batch_asks_of_slurm_are_keys_of_its_section() -> None:
    lines = "#SBATCH -p gpu --time=2-12:00:00 --account=abc --requeue\n#SBATCH -t nonsense\n"
    found = config(f"#!/bin/sh\n{lines}srun python pretrain_gpt.py\n")
    asked = found.slurm
    assert (asked.partition, asked.account, asked.requeue) == ("gpu", "abc", True)
    assert asked.time is None
    assert "3: Slurm's time nonsense: not carried over" in told(
        f"#!/bin/sh\n{lines}srun python pretrain_gpt.py\n"
    )


RELEASES = {**IMAGES.releases, "26.06": ("0.19.0", "0.9.0"), "25.12": ("0.16.1", "0.19.0")}
HYBRID = Images(RELEASES, "24.10", {"cpu"})


@table("program", "image", "said")
def test_the_image_has_the_program(program: str, image: str, said: str) -> None:
    """Every script was given 24.10, without a word."""
    done = read(f"torchrun {program} --seed 1", images=HYBRID)
    assert f"image: {image}\n" in done.text
    assert said in "\n".join(left.what for left in done.told)
    assert bool(said) == any(" is taken" in left.what for left in done.told[:1]) or "./" in program


def test_an_image_without_programs_of_upstreams_is_not_taken_for_one() -> None:
    cpu = Images(RELEASES, "cpu", {"cpu"})
    done = read("torchrun pretrain_gpt.py", images=cpu)
    assert 'image: "24.10"\n' in done.text
    assert "cpu has no programs of upstream's" in done.told[0].what
    mine = read("torchrun ./mine.py", images=cpu)
    assert "image: cpu\n" in mine.text


@table("line")
def test_any_of_upstreams_programs_is_taken(line: str) -> None:
    found = config(line)
    assert found.program == "tools/retro/text_generation/retro_text_generation.py"
    assert found.training.seed == 1 or found.megatron_args == {"seed": 1}


def test_a_number_that_yaml_takes_for_another_is_written_as_text() -> None:
    """`00` was written as it stands, which YAML takes for an octal number."""
    found = read("torchrun pretrain_gpt.py --seed 00 --wandb-exp-name 007 --lr 0.1")
    assert 'wandb_exp_name: "007"' in found.text
    assert "lr: 0.1\n" in found.text
    assert "seed" not in found.text
    assert "1: --seed 00: training.seed doesn't take it" in [
        f"{x.line}: {x.what}" for x in found.told
    ]


def test_a_null_byte_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"script.sh:2: a null byte"):
        read("torchrun pretrain_gpt.py\n\0")


def test_an_argument_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="isn't UTF-8 text"):
        read("torchrun pretrain_gpt.py $1\n", b"\xff".decode(errors="surrogateescape"))


DOCKER = "docker run {} nvcr.io/nvidia/pytorch:24.09-py3 python pretrain_gpt.py\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DOCKER.format("-v /data"), "docker's volume /data: not carried over"),
        (DOCKER.format("-p 80:80"), "docker's publish 80:80: not carried over"),
        (
            DOCKER.format("-v $DIR:/data"),
            "DIR: docker's volume isn't carried over",
        ),
        (DOCKER.format("--gpus some"), "docker's gpus some: not carried over"),
        ("docker run a:1 python pretrain_gpt.py", "a:1: isn't of the matrix; 24.10 is taken"),
        ("torchrun pretrain_gpt.py --bf16 yes", "--bf16 yes: training.bf16 doesn't take it"),
        (
            "torchrun pretrain_bert.py --wandb-api-key b",
            "--wandb-api-key: a secret isn't written down",
        ),
    ],
)
def test_what_is_not_carried_over_is_told(text: str, said: str) -> None:
    assert told(text) == [f"1: {said}"]
    assert config(text).image.tag == ("24.09" if "24.09" in text else "24.10")


def test_the_release_is_the_first_that_has_most_of_the_options() -> None:
    assert config("torchrun pretrain_gpt.py --bf16\n").image.megatron is None
    found = config("torchrun pretrain_gpt.py --attention-backend auto\n")
    assert (found.image.tag, found.image.megatron) == ("24.10", "0.11.0")
    assert told("torchrun pretrain_gpt.py --attention-backend auto --nothing\n") == [
        "1: --attention-backend: not in Megatron 0.9.0, so 0.11.0 is taken",
        "1: Megatron 0.11.0 doesn't have an option: --nothing",
    ]


def test_the_launcher_sets_device_connections_where_the_model_is_split() -> None:
    text = "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun pretrain_gpt.py"
    assert config(text).env == {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
    assert config(f"{text} --tensor-model-parallel-size 2\n").env == {}


def test_a_mounted_program_of_the_machine_is_no_start() -> None:
    """Its path was read without its folder, as that of a program with a stand-in is."""
    text = DOCKER.format("-v /usr/bin/docker:/usr/bin/docker")
    assert not [line for line in told(text) if "docker:docker" in line]


def test_what_belongs_to_the_machine_is_told() -> None:
    text = "export PATH=/x:$PATH RANK=0\ntorchrun pretrain_gpt.py --wandb-api-key abc\n"
    assert config(text).env == {}
    assert told(text) == [
        "1: PATH: belongs to the image, and isn't carried over",
        "2: Megatron 0.9.0 doesn't have an option: --wandb-api-key",
    ]


@table("start")
def test_a_start_is_found_however_it_is_written(start: str) -> None:
    """Half of people's scripts start in a way that a reader of bash doesn't know."""
    cmd = "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 3 --lr 1e-4"
    found = config(f'CMD="{cmd}"\n{start}\n')
    assert (found.model.num_layers, found.training.lr, found.gpus) == (3, 1e-4, "2")


@table("lines", "options", "said")
def test_what_a_value_depends_on_is_named(lines: str, options: str, said: str) -> None:
    """A value that isn't known would be written as if it were, or left out without a word."""
    found = told(f"{lines}\ntorchrun pretrain_gpt.py {options}\n")
    assert any(said in one for one in found), found


def test_what_is_given_is_taken() -> None:
    """DATA_PATH=/data/x on the line, and arguments behind --."""
    text = 'S=$1; shift\ntorchrun pretrain_gpt.py --save $S --load "$1" --seed $((A * 2))\n'
    found = config(text, "/a", "/b c", A="4")
    assert (found.checkpoint.save, found.checkpoint.load, found.training.seed) == ("/a", "/b c", 8)
    assert told(text, "/a", "/b c", A="4") == []


def test_what_is_given_fills_what_the_script_leaves_empty() -> None:
    """DATA_PATH="" is there to be filled in, and was "data.path doesn't take it"."""
    text = 'export D=""\nS= # here\nE=\'\'x\ntorchrun a.py --save $S --load "$D" --seed $E\n'
    found = read(text, D="/d d", S="/s", E="3")
    assert "save: /s\n" in found.text
    assert "load: /d d\n" in found.text
    assert "seed: 3" not in found.text


def test_one_of_several_starts_is_chosen_and_the_others_told() -> None:
    text = "for lr in 1e-3 1e-4; do\ntorchrun pretrain_gpt.py --lr $lr\ndone\n"
    assert config(text).training.lr == 1e-3
    assert "2: start 2 of 2, not taken: --lr 1e-4" in told(text)
    box = sandbox_here()
    second = import_script(Path("script.sh"), text, IMAGES, box, number=2)
    assert "lr: 1e-4\n" in second.text
    with pytest.raises(UsageError, match="has 2 starts"):
        import_script(Path("script.sh"), text, IMAGES, box, number=3)


@table("text", "said")
def test_a_script_that_starts_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert str(caught.value).startswith("script.sh: no command that starts a program")
    assert said in str(caught.value)


def test_an_option_of_a_program_of_its_own_keeps_its_underscores() -> None:
    """--task_list was given as --task-list, which such a program doesn't know."""
    found = config("torchrun ./a.py --task_list x --num-layers 3")
    rendered = render.options(found, program(found.program).kind, Layout(1, 1, 1, 1), "0.9.0")
    assert {one.name for one in rendered} >= {"--task_list", "--num-layers"}


def test_options_of_a_fork_are_taken_as_megatron_spells_them() -> None:
    """--num_layers was an option that Megatron doesn't have: no sizes of a whole repository."""
    text = "torchrun pretrain_gpt.py --num_layers 3 --hidden_size=8 --none_such 1\n"
    found = config(text)
    assert (found.model.num_layers, found.model.hidden_size) == (3, 8)
    assert "1: --num_layers, --hidden_size: taken with - for _, as Megatron has them" in told(text)
    assert "1: Megatron 0.9.0 doesn't have an option: --none_such" in told(text)


def test_a_job_is_submitted_from_where_the_launcher_is_started() -> None:
    text = "#SBATCH -N 1\ncd $SLURM_SUBMIT_DIR\nsrun python a.py --save $SLURM_SUBMIT_DIR/x\n"
    assert config(text).checkpoint.save == "./x"


def test_what_the_script_sets_for_itself_is_not_exported() -> None:
    """A placeholder stands in the environment, and what replaces it would seem to be exported."""
    text = ". ./no.sh\n[ -n x ] && declare LAYERS=3\nexport B=1\ntorchrun a.py --x $LAYERS\n"
    assert config(text).env == {"B": 1}


def test_a_job_that_submits_itself_again_is_read_once() -> None:
    """It was read within itself until its time was over, and no value was alike twice."""
    job = "#SBATCH -N 2\nsbatch --dependency=singleton $0 --again\n"
    text = f"{job}srun torchrun --nnodes 2 pretrain_gpt.py --num-layers 2\n"
    assert (config(text).model.num_layers, config(text).nodes.count) == (2, 2)


def test_a_folder_that_is_not_known_is_named() -> None:
    """The stand-in's own name of it was in the message, and the program was taken for known."""
    text = "cd $BASE/code\ntorchrun mine.py --num-layers 2\n"
    assert "@" not in read(text).text
    found = told(text)
    assert any(one.startswith("2: cd /BASE/code: relative paths start there") for one in found)
    assert "2: to be given: BASE (program)" in found


def test_what_only_one_node_has_is_marked() -> None:
    """$SLURM_NODEID is 0 where it is read, and another on each node."""
    text = "#SBATCH -N 2\nexport C=/tmp/$SLURM_NODEID\nsrun python a.py --x c$SLURM_PROCID\n"
    assert "3: to be given: the node's number (megatron_args.x, env.C)" in told(text)


def test_a_job_that_a_script_submits_is_read_with_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its $SLURM_NNODES was empty, and torchrun took the program for it."""
    monkeypatch.chdir(tmp_path)
    job = "#SBATCH -N 4\nsrun torchrun --nproc_per_node 2 --nnodes $SLURM_NNODES a.py --x $Y\n"
    (tmp_path / "job.sbatch").write_text(job)
    (tmp_path / "submit.sh").write_text("sbatch job.sbatch\n")
    text = "sbatch job.sbatch\n"
    done = import_script(Path("submit.sh"), text, IMAGES, sandbox_here())
    assert "nodes: 4\n" in done.text
    assert any("to be given: Y (megatron_args.x)" in left.what for left in done.told)


def test_what_another_script_does_is_told_where_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told with that script's line, and by the words that stand on such a line here."""
    monkeypatch.chdir(tmp_path)
    setup = '\n\n[ "$USER" = me ] || true\npip install x\nfrob y\n'
    (tmp_path / "setup.sh").write_text(setup)
    (tmp_path / "run.sh").touch()
    text = "#\n#\n#SBATCH -N 1\n#\nbash setup.sh\nfrob z; bash -c 'nob x'\ntorchrun a.py --x 1\n"
    done = import_script(Path("run.sh"), text, IMAGES, sandbox_here())
    told = {one.what.removesuffix(": not carried over"): one.line for one in done.told}
    assert (told["pip install x"], told["frob y"], told["frob z"], told["nob x"]) == (5, 5, 6, 6)
    assert not any("SBATCH" in one.what for one in done.told)


MANIFESTS = [
    ("kind: Service\n", "no container that starts something: Service"),
    ("kind: Job\nspec: 3\n", "a Job that isn't written as its documents ask"),
    ("a: {{ .Values.x }}: b\n", "no YAML"),
    ("- 1\n", "no container that starts something"),
]


@pytest.mark.parametrize(("text", "said"), MANIFESTS)
def test_a_manifest_that_starts_nothing_is_refused_in_a_line(text: str, said: str) -> None:
    """It was read as shell."""
    with pytest.raises(UsageError) as caught:
        import_script(Path("x.yaml"), text, IMAGES, sandbox_here())
    assert said in str(caught.value).splitlines()[0]


COMMAND = "[torchrun, --nproc_per_node=4, pretrain_gpt.py, --num-layers=3]"
POD = f"{{containers: [{{name: a, image: b, command: {COMMAND}}}]}}"


@pytest.mark.parametrize(
    "text",
    [
        f"kind: Job\nspec: {{parallelism: 2, template: {{spec: {POD}}}}}\n",
        "kind: JobSet\nspec: {replicatedJobs: [{replicas: 2, template: "
        f"{{spec: {{template: {{spec: {POD}}}}}}}}}]}}\n",
        "kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Master: {replicas: 1, template: "
        f"{{spec: {POD}}}}}, Worker: {{replicas: 1, template: {{spec: {POD}}}}}}}}}\n",
        f"kind: TrainJob\nspec: {{trainer: {{numNodes: 2, image: b, command: {COMMAND}}}}}\n",
    ],
)
def test_a_manifest_is_read_for_what_it_starts_and_where(text: str) -> None:
    done = import_script(Path("x.yaml"), text, IMAGES, sandbox_here())
    found = yamlfile.parse(done.text, RunConfig, "run.yaml")
    assert (found.model.num_layers, found.gpus, found.nodes.count) == (3, "4", 2)


WHOLE = st.integers(1, 10**9).map(str)
REAL = st.floats(0, 1, allow_subnormal=False).map(repr) | st.sampled_from([".01", "1e-4", "6.0e-5"])
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda text: not text.startswith("-") and "<" not in text
)
OPTIONS = {
    "--num-layers": st.tuples(WHOLE),
    "--hidden-size": st.tuples(WHOLE),
    "--rampup-batch-size": st.tuples(WHOLE, WHOLE, WHOLE),
    "--lr": st.tuples(REAL),
    "--hidden-dropout": st.tuples(REAL),
    "--swiglu": st.just(()),
    "--bf16": st.just(()),
    "--split": st.tuples(TEXT),
    "--save": st.tuples(TEXT),
    "--data-path": st.tuples(TEXT) | st.tuples(REAL, TEXT, REAL, TEXT),
    "--vocab-size": st.tuples(WHOLE),
    "--tokenizer-model": st.tuples(TEXT),
    "--moe-aux-loss-coeff": st.tuples(REAL | TEXT),
    "--wandb-exp-name": st.tuples(TEXT | st.sampled_from(["true", "null", "012", "1:30", "24.10"])),
    "--recompute-activations": st.just(()),
    "--fim-data": st.lists(TEXT, min_size=2, max_size=3).map(tuple),
}


@st.composite
def given_options(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, min_size=1))
    return {name: draw(OPTIONS[name]) for name in names}


def as_numbers(values: tuple[str, ...]) -> list[str | float]:
    found: list[str | float] = []
    for value in values:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        found.append(value if math.isnan(number) else number)
    return found


@given(options=given_options(), shape=st.sampled_from(["array", "words", "quoted"]))
def test_a_run_file_renders_the_options_of_its_script(
    options: dict[str, tuple[str, ...]], shape: str
) -> None:
    rows = [shlex.join([name, *values]) for name, values in options.items()]
    script = {
        "array": "A=(\n" + "\n".join(rows) + '\n)\ntorchrun pretrain_x.py "${A[@]}"\n',
        "words": "torchrun pretrain_x.py \\\n" + " \\\n".join(rows) + "\n",
        "quoted": f"bash -c {shlex.quote('torchrun pretrain_x.py ' + ' '.join(rows))}\n",
    }[shape]
    found = config(script)
    rendered = render.options(found, program(found.program).kind, Layout(1, 1, 1, 1), "0.9.0")
    assert {o.name: as_numbers(o.words) for o in rendered if o.where != "data.mock"} == {
        name: as_numbers(values) for name, values in options.items()
    }
    exact = {o.name: o.words for o in rendered if o.where.startswith("megatron_args.")}
    assert exact == {name: options[name] for name in exact}
