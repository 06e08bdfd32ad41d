"""Shell scripts as run files: whole ones against golden files, and what each form comes to."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.runs.plan import render
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.program import program
from launcher.runs.runfile.config import RunConfig
from launcher.tools.importing import shell
from launcher.tools.importing.shell_script import ImportResult, imported

GOLDEN = Path(__file__).parent / "golden"
IMAGES = {"24.10": ("0.9.0", "0.11.0", "0.12.3"), "24.09": ("0.9.0",), "cpu": ("0.16.1",)}
SCRIPTS = ["arrays", "strings", "container", "plain", "slurm"]


def read(text: str, *positional: str) -> ImportResult:
    return imported(text, "script.sh", IMAGES, tag="24.10", positional=positional)


def told(text: str, *positional: str) -> list[str]:
    return [f"{left.line}: {left.what}" for left in read(text, *positional).told]


def config(text: str, *positional: str) -> RunConfig:
    return yamlfile.parse(read(text, *positional).text, RunConfig, "run.yaml")


def words(text: str, *positional: str) -> list[str]:
    """The words of the last command of a script; what isn't known in < >."""
    command = shell.read_script(text, positional).commands[-1]
    return [f"<{word.unknown}>" if word.unknown else word.text for word in command.words]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("positional", [(), ("/data",)], ids=["bare", "given"])
def test_a_script_as_a_run_file(name: str, positional: tuple[str, ...]) -> None:
    script = GOLDEN / f"import-{name}.sh"
    done = imported(
        script.read_text(encoding="utf-8"), script.name, IMAGES, tag="24.10", positional=positional
    )
    lines = [f"{script.name}:{left.line}: {left.what}" for left in done.told]
    text = "\n".join([done.text, *lines, "", done.wrong]).rstrip() + "\n"
    path = GOLDEN / f"import-{name}{'.given' if positional else ''}.out"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"
    assert "abc123" not in text


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("A=1\nx $A ${A}b 'c $A' \"d $A\" \\$A", ["x", "1", "1b", "c $A", "d 1", "$A"]),
        ("A='a  b'\nx $A \"$A\"", ["x", "a", "b", "a  b"]),
        ("A=(1 '2 3')\nx ${A[@]} \"${A[@]}\"", ["x", "1", "2", "3", "1", "2 3"]),
        ('A=(1)\nA+=(2)\nB="${A[@]}"\nx ${A[@]} $A', ["x", "1", "2", "1"]),
        ("A=()\nx b$A $A", ["x", "b"]),
        ("A=a\nA+=b\nx $A", ["x", "ab"]),
        ("A=\nA+=(${A:=b})\nx ${A[@]}", ["x", "b", "b"]),
        ('A="\n --p 1 \\\n --q $B\n"\nB=2\nx $A', ["x", "--p", "1", "--q", "<$B isn't set"]),
        ('x ${A:-3} ${A:-"$B"}', ["x", "3", "<$B isn't set in the script>"]),
        ("A=\nx ${A:-3}", ["x", "3"]),
        ("A=4\nB=3\nx $(($A*$B)) $(( (A+B)/2 )) $((7 % B)) $((-7/2))", ["x", "12", "3", "1", "-3"]),
        ("x $((1/0)) $((B+1))", ["x", "<$((1/0)) can't be", "<$((B+1)) can't be computed>"]),
        ("x `date` $(ls $A)", ["x", "<`date` is what a", "<$(ls ${A}) is what a command prints>"]),
        ('x $1 "$2"', ["x", "<$1 is given", "<$2 is given on the command line>"]),
        ("x a/${A:-b}/c_$PWD", ["x", "a/b/c_."]),
        ("A=1\nif true; then A=2; fi\nx $A", ["x", "<what A is set to depends on"]),
        ("A=1\nfor A in 1 2; do :; done\nx $A", ["x", "<what A is set to depends on"]),
        ('A=1\n[ -n "$B" ] && A=2\nx $A', ["x", "<what A is set to depends on"]),
        ("A=1\nf() { A=2; }\nx $A", ["x", "<what A is set to depends on"]),
        ("A=1\nread A\nx $A", ["x", "<what A is set to depends on"]),
        ("A=1\n((A=2))\nx $A", ["x", "<what A is set to depends on"]),
        ("A=1\nunset A\nx $A", ["x", "<$A isn't set"]),
        ("A=(1)\nA[0]=2\nx $A", ["x", "<what A is set to depends on"]),
        ("A=b.sh\nx ${A%.sh} ${#A}", ["x", "<${A%.sh} isn't followed>", "<${#A} isn't followed>"]),
        ("x {a,b}", ["x", "<{ isn't understood>"]),
        ("A=<your data>/x\nx $A", ["x", "<<your data> is to be filled in>"]),
        ("x a \\\n  b \\\n  # ${C[@]}\n", ["x", "a", "b"]),
        ("x a \\\n", ["x", "a"]),
        ("A=1\r\nx $A \\\r\n  b\r\n", ["x", "1", "b"]),
        ("true && x a", ["x", "a"]),
        ("{ x a; }", ["x", "a"]),
    ],
)
def test_words_are_as_a_shell_makes_them(script: str, last: list[str]) -> None:
    found = words(script)
    assert len(found) == len(last)
    for one, wanted in zip(found, last, strict=True):
        assert one.startswith(wanted) if wanted.startswith("<") else one == wanted


def test_what_a_condition_adds_is_told_and_the_rest_stays() -> None:
    script = "A=(1)\nif true; then\n  A+=(2)\nfi\nx ${A[@]}"
    assert words(script) == ["x", "1"]
    left = shell.read_script(script).left
    assert [(one.line, one.what) for one in left] == [
        (2, "if up to line 4: not followed, what it adds to A is left out")
    ]


def test_positional_arguments_are_taken_from_the_command_line() -> None:
    assert words('x $1 "$2" $@ "$@"', "a", "b c") == ["x", "a", "b c", *"a b c".split(), "a", "b c"]
    assert words("x $@") == ["x"]


def test_characters_of_every_script_are_kept() -> None:
    script = "# 训练脚本\nA='数据 Zq\u3000é'\nx \"$A\" /路径/$1 ${A%二}\n"
    assert words(script, "😀")[:3] == ["x", "数据 Zq\u3000é", "/路径/😀"]
    assert words(script)[3] == "<${A%二} isn't followed>"


def test_a_word_knows_the_line_it_stands_on() -> None:
    script = 'A="\n --p 1 \\\n --q 2\n"\nB=(\n --r\n)\nx $A ${B[@]} \\\n --s\n'
    found = {word.text: word.line for word in shell.read_script(script).commands[0].words}
    assert found == {"x": 8, "--p": 2, "1": 2, "--q": 3, "2": 3, "--r": 6, "--s": 9}


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1)))
def test_quoted_words_are_read_back(parts: list[str]) -> None:
    assert words(f"x {shlex.join(parts)}") == ["x", *parts]


NAME = st.sampled_from(["A", "B", "C"])
PART = st.one_of(
    st.sampled_from(["x", "--y", "1.5", "/a/b", "_z", "a=b", ".", "b\\ c", "\\$A", "''", '""']),
    st.sampled_from(["'two  words'", "'$A'", '" in "', '"\\"q\\" \\\\"', '"a \\\n b"', '"\n"']),
    NAME.flatmap(lambda n: st.sampled_from([f"${n}", f"${{{n}}}", f'"${n}"', f'"${{{n}}} ${n} "'])),
    NAME.flatmap(lambda n: st.sampled_from([f"${{{n}-}}", f"${{{n}:='p q'}}", f'${{{n}:-"r s"}}'])),
    NAME.flatmap(lambda n: st.sampled_from([f"${{{n}:-3}}", f'"${{{n}:-d e}}"', f"${{{n}[@]}}"])),
    st.sampled_from(["$((2*3+1))", "$(( (7-9)/2 ))", "$((-7 % 3))", "$1", '"$2"', "$@", '"$@"']),
)
WORDS = st.lists(st.lists(PART, min_size=1, max_size=3).map("".join), max_size=4).map(" ".join)
ONE = st.lists(PART, max_size=3).map("".join)
LINE = st.one_of(
    st.builds("{}={}".format, NAME, ONE),
    st.builds("{}+={}".format, NAME, ONE),
    st.builds("{}=({})".format, NAME, WORDS),
    st.builds("{}+=({}) # c".format, NAME, WORDS),
    st.builds("export {}={}".format, NAME, ONE),
    st.just("# A=1"),
)


@given(lines=st.lists(LINE, max_size=5), last=WORDS)
def test_words_are_those_that_bash_makes(lines: list[str], last: str) -> None:
    """Scripts of this test's own making, in a real bash: what is known must be the same."""
    script = "\n".join(["A=a B=b C=c", *lines, f"x {last}"])
    found = words(script, "one", "t w o")
    assume(not any(word.startswith("<") for word in found))
    shown = 'x() { for one in "$@"; do printf "%s\\0" "$one"; done; }\n'
    command = ["bash", "--norc", "-c", shown + script, "bash", "one", "t w o"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found[1:] == done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("line", "gpus", "nodes"),
    [
        ("torchrun pretrain_gpt.py", "1", 1),
        ("torchrun --nproc_per_node 4 pretrain_gpt.py", "4", 1),
        ("torchrun --nproc-per-node=gpu --standalone pretrain_gpt.py", "all", 1),
        ("python -m torch.distributed.launch --nproc_per_node=2 pretrain_gpt.py", "2", 1),
        ("python3 -u -m torch.distributed.run --nproc_per_node 2 a/pretrain_gpt.py", "2", 1),
        ("nohup python pretrain_gpt.py &", "1", 1),
        ("CUDA_VISIBLE_DEVICES=1,3 torchrun --nproc_per_node 2 pretrain_gpt.py", "device=1,3", 1),
        ("torchrun --nproc_per_node 8 --nnodes 2 --master_addr a pretrain_gpt.py", "8", 2),
        ("docker run --gpus 2 -it image python pretrain_gpt.py", "2", 1),
        ("srun -l sh -c 'torchrun --nproc_per_node 3 pretrain_gpt.py'", "3", 1),
        ("./pretrain_gpt.py", "1", 1),
        ("#SBATCH -N2 --ntasks-per-node 8\nsrun python pretrain_gpt.py", "8", 2),
        ("#SBATCH --gpus-per-node=a100:4\nsrun python pretrain_gpt.py", "4", 1),
        ("#SBATCH --gres=gpu:4\npython pretrain_gpt.py", "1", 1),
        (
            "#SBATCH --nodes 3 --gpus-per-node=2\n"
            "torchrun --nproc_per_node $SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES pretrain_gpt.py",
            "2",
            3,
        ),
    ],
)
def test_what_starts_the_program(line: str, gpus: str, nodes: int) -> None:
    found = config(f"{line}\n")
    assert (found.program, found.gpus, found.nodes.count) == ("pretrain_gpt.py", gpus, nodes)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("#SBATCH --gres=gpu", []),
        ("#SBATCH --gres=gpu:tesla:4 # all", ["uses 1: gpus is 1"]),
        ("#SBATCH --gres=gpu:2,lustre:1", ["#SBATCH --gres=gpu:2,lustre:1: not carried over"]),
        ("#SBATCH -N 2", ["2 nodes are asked for, and the script uses 1: nodes.count is 1"]),
        ("#SBATCH --nodes=2-4 -c 8", ["nodes=2-4: not", "-c 8: not"]),
        ("#SBATCH --exclusive -J 'a b", ["exclusive: not", "-J 'a: not"]),
        ("##SBATCH --nodes=2\necho\n#SBATCH --nodes=3", []),
    ],
)
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
    assert "3: #SBATCH --time=nonsense: not carried over" in told(
        f"#!/bin/sh\n{lines}srun python pretrain_gpt.py\n"
    )


def test_what_is_known_of_an_inner_script_is_read_and_the_rest_told_where_it_stands() -> None:
    text = (
        'A=4\nbash -c "\n: $B\n\n  X=$C/x torchrun --nproc_per_node $A pretrain_gpt.py'
        " --split '$D' --save $C/ckpt --lr ${A}e-${A}5\n\"\n"
    )
    found = config(text)
    assert (found.gpus, found.training.lr, found.env) == ("4", 4e-45, {})
    assert told(text) == [
        "5: $D isn't set in the script: data.split is left out (--split)",
        "5: $C isn't set in the script: checkpoint.save is left out (--save)",
        "5: $C isn't set in the script: env.X is left out",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\n", "It takes torchrun"),
        ('srun bash -c "$RUN"\n', "Line 1 starts what isn't known: $RUN isn't set"),
        ("$LAUNCH pretrain.py\n", "Line 1 starts what isn't known: $LAUNCH isn't set"),
        ("\nif true; then A=1; fi\n", "Line 2: if: not followed"),
        ("python -m pip install x\n", "It takes torchrun"),
    ],
)
def test_a_script_that_starts_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert str(caught.value).startswith(
        "script.sh: no command that starts a program of Megatron's\n"
    )
    assert said in str(caught.value)


HYBRID = {**IMAGES, "26.06": ("0.19.0", "0.9.0"), "25.12": ("0.16.1", "0.19.0")}


@pytest.mark.parametrize(
    ("program", "image", "said"),
    [
        (
            "pretrain_hybrid.py",
            '"26.06"',
            "24.10 has no pretrain_hybrid.py, so 26.06 is taken (pretrain_hybrid.py: ",
        ),
        ("pretrain_mamba.py", '"24.10"', ""),
        ("examples/mimo/train.py", '"26.06"', "24.10 has no examples/mimo/train.py"),
        (
            "examples/export/knowledge_distillation/pretrain_gpt_modelopt.py",
            '{tag: "24.10", megatron: "0.11.0"}',
            "pretrain_gpt_modelopt.py: not in Megatron 0.9.0, so 0.11.0 is taken",
        ),
        ("./mine.py", '"24.10"', ""),
    ],
)
def test_the_image_has_the_program(program: str, image: str, said: str) -> None:
    """Every script was given 24.10, without a word."""
    done = imported(f"torchrun {program} --seed 1", "a.sh", HYBRID, tag="24.10", bare={"cpu"})
    assert f"image: {image}\n" in done.text
    assert said in "\n".join(left.what for left in done.told)
    assert bool(said) == bool(done.told)


def test_an_image_without_programs_of_upstreams_is_not_taken_for_one() -> None:
    done = imported("torchrun pretrain_gpt.py", "a.sh", HYBRID, tag="cpu", bare={"cpu"})
    assert 'image: "24.10"\n' in done.text
    assert "cpu has no programs of upstream's" in done.told[0].what
    mine = imported("torchrun ./mine.py", "a.sh", HYBRID, tag="cpu", bare={"cpu"})
    assert "image: cpu\n" in mine.text


@pytest.mark.parametrize(
    "lines",
    [
        "if [ $B -eq 0 ]; then\n{}\nelse\n  srun python train.py\nfi",
        "if a; then\n:\nelif b; then\n{}\nfi",
        "while true; do\n{}\ndone",
        "for i in 1 2; do\n{}\ndone",
        "f() {{\n{}\n}}\nf",
        "case $1 in\na|b)\n{};;\nesac",
        "[ -n $B ] &&\n{}",
        "if a; then if b; then\n{}\nfi; fi",
        "python prepare.py --seed 1\nif a; then\n{}\nfi",
    ],
)
def test_what_starts_the_program_is_found_where_it_depends_on_something(lines: str) -> None:
    """Such scripts were refused: 102 of upstream's 156."""
    started = "torchrun --nproc_per_node 4 examples/multimodal/train.py --num-layers $N --lr 1.0"
    done = read(f"N=12\n{lines.format(started)}\n")
    assert "program: examples/multimodal/train.py\ngpus: 4\n" in done.text
    assert "num_layers: 12\n" in done.text
    followed = r"(if|a function|for|while|case|what stands)\b.*: followed to line \d, where it"
    assert any(re.match(followed, one.what) for one in done.told)


def test_in_a_function_the_scripts_arguments_are_not_its_own() -> None:
    done = told("f() { torchrun pretrain_gpt.py --num-layers $1 $@; }\nf 3\n", "5")
    assert "1: $1 is given on the command line: model.num_layers is left out (--num-layers)" in done


@pytest.mark.parametrize(
    "line",
    [
        "srun python tools/retro/text_generation/retro_text_generation.py --seed 1",
        "uv run --no-sync python -m torch.distributed.run tools/retro/text_generation/"
        "retro_text_generation.py --seed 1",
        "torchrun --nproc-per-node 1 -m tools.retro.text_generation.retro_text_generation --seed 1",
        "python -m tools.retro.text_generation.retro_text_generation --seed 1",
        "$LAUNCH $HERE/retro_text_generation.py --seed 1",
    ],
)
def test_any_of_upstreams_programs_is_taken(line: str) -> None:
    found = config(line)
    assert found.program == "tools/retro/text_generation/retro_text_generation.py"
    assert found.training.seed == 1 or found.megatron_args == {"seed": 1}


def test_options_of_what_is_not_followed_are_named_one_by_one() -> None:
    """Only the name of the array that they are added to was told."""
    lines = ["A=()", "if a; then", "A+=(--swiglu", "--seed 3)", "else B='x--y M*--M-M --bf16'"]
    lines += ["git --version", "fi", "torchrun pretrain_gpt.py ${A[@]}"]
    assert told("\n".join(lines)) == [
        "2: if up to line 7: not followed, what it adds to A is left out",
        "3: --swiglu: stands in what isn't followed, and is left out",
        "4: --seed: stands in what isn't followed, and is left out",
        "5: --bf16: stands in what isn't followed, and is left out",
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("A=x\n" + "A=$A$A\n" * 40, "$A comes to too many characters"),
        ("A=\n" + 'A="$A$A"\n' * 40, "$A comes to too many characters"),
        ("A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40, "$A comes to too many"),
        ("A=(x)\n" + "A+=(${A[@]})\n" * 40, "$A comes to too many characters"),
        ("set -e\nA=" + "${a:-" * 300 + "}" * 300 + "\n", "Line 2: nested deeper than 100 levels"),
        ("true && " * 2000 + "A=1\n", "Line 1: nested deeper than 100 levels"),
        ("A=$((" + "1+" * 3000 + "1))\n", "Line 1: nested deeper than 100 levels"),
        ("#\n" * 20_000, "Line 16385: more than 32768 characters"),
        ("A=Z" + "q" * 20_000 + "é" * 10_000 + "\n", ""),
    ],
)
def test_what_no_person_wrote_is_told_with_its_line(lines: str, said: str) -> None:
    """Forty lines took all memory, and the nested ones were a RecursionError."""
    try:
        found = told(f"{lines}torchrun pretrain_gpt.py --num-layers $A\n")
    except UsageError as error:
        found = [str(error)]
    assert said in "\n".join(found)


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
        (DOCKER.format("-v /data"), "docker's v /data: not carried over"),
        (DOCKER.format("-p 80:80"), "docker's p 80:80: not carried over"),
        (
            DOCKER.format("-v $DIR:/data"),
            "$DIR isn't set in the script: docker's v isn't carried over",
        ),
        (DOCKER.format("--gpus some"), "docker's gpus some: not carried over"),
        ("docker run a:1 python pretrain_gpt.py", "a:1: isn't of the matrix; 24.10 is taken"),
        ("torchrun pretrain_gpt.py --bf16 yes", "--bf16 yes: training.bf16 doesn't take it"),
        ("torchrun a.py --wandb-api-key b", "--wandb-api-key: a secret isn't written down"),
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
        "1: --nothing: Megatron 0.11.0 has no such option",
    ]


def test_the_launcher_sets_device_connections_where_the_model_is_split() -> None:
    text = "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun pretrain_gpt.py"
    assert config(text).env == {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
    assert config(f"{text} --tensor-model-parallel-size 2\n").env == {}


def test_what_belongs_to_the_machine_is_told() -> None:
    text = "export PATH=/x:$PATH RANK=0\ntorchrun pretrain_gpt.py --wandb-api-key abc\n"
    assert config(text).env == {}
    assert told(text) == [
        "1: PATH: belongs to the image, and isn't carried over",
        "2: --wandb-api-key: Megatron 0.9.0 has no such option",
    ]


def test_an_unknown_value_leaves_its_option_out_and_an_unknown_bundle_only_itself() -> None:
    text = "torchrun pretrain_gpt.py --fp16 $EXTRA_ARGS --save $DIR --lr 1e-4\n"
    found = config(text)
    assert (found.training.fp16, found.checkpoint.save, found.training.lr) == (True, None, 1e-4)
    assert told(text) == [
        "1: $EXTRA_ARGS isn't set in the script: what it stands for is left out",
        "1: $DIR isn't set in the script: checkpoint.save is left out (--save)",
    ]


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
