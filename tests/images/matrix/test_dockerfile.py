"""The rendered Dockerfiles: as committed, the same bytes every time, and of the promised shape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.base.errors import UsageError
from launcher.images.matrix import dockerfile
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = (ROOT / "Dockerfile.template").read_text()
MATRIX, LOCK = load_matrix(), load_lock()


def stages(text: str) -> list[str]:
    """The stages of a Dockerfile, each from its FROM on."""
    return re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]


def instructions(stage: str) -> list[str]:
    """The first words of a stage's lines."""
    return [line.split()[0] for line in stage.splitlines() if line and not line.startswith("#")]


def test_what_is_committed_is_what_is_rendered() -> None:
    assert dockerfile.drift(dockerfile.render_all(MATRIX, LOCK, ROOT), ROOT) == []


def test_what_a_new_release_a_patch_or_a_wheel_changes_is_shown() -> None:
    """The Dockerfile alone says `stage.py wheel`, whatever is in it."""
    before = recipe(MATRIX, LOCK, "24.10")
    text = dockerfile.inputs([before], {"0.9.0/01.patch": "1" * 64})
    data = yaml.safe_load(text)
    assert data["megatron"]["commit"] == MATRIX.releases["0.9.0"].git.commit
    assert data["megatron"]["patches"] == {"0.9.0/01.patch": "1" * 64}
    assert data["wheels"]["linux/amd64"]["runtime"] == LOCK.needs["cp310"].runtime
    moved = {"runtime": [*before.pins["runtime"][:-1], f"six==9 --hash=sha256:{'0' * 64}"]}
    others = [
        dockerfile.inputs([recipe(MATRIX, LOCK, "24.10", "0.10.0")], {"0.9.0/01.patch": "1" * 64}),
        dockerfile.inputs([before], {"0.9.0/01.patch": "2" * 64}),
        dockerfile.inputs(
            [replace(before, pins={**before.pins, **moved})], {"0.9.0/01.patch": "1" * 64}
        ),
    ]
    assert len({text, *others}) == 4
    assert (
        dockerfile.inputs([recipe(MATRIX, LOCK, "cpu")], {}).count("sdist: megatron-core==0.16.1")
        == 1
    )
    for name in ("cuda-12.4", "26.06"):
        found = yaml.safe_load((ROOT / f"images/{name}/inputs.yaml").read_text())
        assert {*found["wheels"]} == {*MATRIX.rows[name].platforms}
        assert {*found.get("extensions", ())} == {*MATRIX.rows[name].extensions}


def test_drift_finds_an_edit_and_an_orphan(tmp_path: Path) -> None:
    files = {tmp_path / "images/a/Dockerfile": "one\n", tmp_path / "images/b/Dockerfile": "two\n"}
    dockerfile.write(files, tmp_path)
    assert dockerfile.drift(files, tmp_path) == []
    (tmp_path / "images/a/Dockerfile").write_text("edited\n")
    (tmp_path / "images/old").mkdir()
    (tmp_path / "images/old/Dockerfile").write_bytes(dockerfile.HEADER + b"\nleft over\n")
    found = [path.relative_to(tmp_path).as_posix() for path in dockerfile.drift(files, tmp_path)]
    assert found == ["images/a/Dockerfile", "images/old/Dockerfile"]
    (tmp_path / "images/notes.txt").write_text("mine")  # of the user's, who hears of it
    dockerfile.write(files, tmp_path)
    assert dockerfile.drift(files, tmp_path) == [tmp_path / "images/notes.txt"]
    assert not (tmp_path / "images/old").exists()


@pytest.mark.parametrize("tag", MATRIX.rows)
def test_a_dockerfile_has_the_promised_shape(tag: str) -> None:
    text = dockerfile.dockerfile(MATRIX, tag, TEMPLATE)
    assert text == dockerfile.dockerfile(MATRIX, tag, TEMPLATE)
    assert instructions(stages(text)[-1]) == ["FROM", "COPY", "ENV"]
    assert "ENTRYPOINT" not in text
    assert text.startswith("# Generated ")
    row = MATRIX.rows[tag]
    assert f"ARG BASE_IMAGE={row.base}\n" in text  # a mirror can replace both images
    assert f"ARG BUILDER_IMAGE={MATRIX.builders[row.abi]}\n" in text
    for word in ("--mount", "<<", "# syntax"):  # the classic builder can read it
        assert word not in text
    path = "ENV CUDNN_PATH=/opt/packages/lib/nvidia/cudnn\n"
    assert text.count(path) == bool(row.extensions)
    if row.extensions:  # compiled with torch's cuDNN, which they load
        base, compiles, below, fitted = stages(text)[-5:-1]
        assert base.startswith("FROM ${BASE_IMAGE} AS base\n")
        assert path in base
        assert compiles.startswith("FROM base AS extensions\n")
        assert below.startswith("FROM base AS below\n")
        assert fitted.startswith("FROM below AS fitted\n")


def test_the_rows_of_one_abi_share_the_wheel_stage_letter_for_letter() -> None:
    found: dict[str, set[str]] = {}
    for tag, row in MATRIX.rows.items():
        first = stages(dockerfile.dockerfile(MATRIX, tag, TEMPLATE))[0]
        found.setdefault(row.abi, set()).add(first.partition("\n\n")[0])
    assert {abi: len(texts) for abi, texts in found.items()} == dict.fromkeys(found, 1)


def test_the_table_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{dockerfile.BEGIN}\nold\n{dockerfile.END}\nafter\n")
    once = dockerfile.between_markers(page, "new\n")
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    page.write_text(once)
    assert dockerfile.between_markers(page, "new\n") == once
    page.write_text("no markers")
    with pytest.raises(UsageError, match=r"page\.md"):
        dockerfile.between_markers(page, "new")
    lines = dockerfile.table(MATRIX).splitlines()
    status = {line.split(" | ")[0][2:]: line.split(" | ")[-1] for line in lines}
    assert (status["26.06"], status["24.02"]) == ("untried |", "runs |")
