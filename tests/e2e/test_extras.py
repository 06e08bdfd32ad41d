"""Extras in a real image: on a stand-in base that has packages and limits as NGC's have."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
import tokenizers

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder import beside, verify
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.connect import engine_host
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.sources.fetch import wheels
from tests.conftest import NAMES
from tests.e2e.command import (
    built,
    in_image,
    launched,
    launcher,
    layers,
    matrix_folder,
    refused,
)
from tests.e2e.site import Site
from tests.e2e.test_source_path import CHECKOUT
from tests.e2e.test_transfer import NOWHERE

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytestmark = pytest.mark.engine

THERE = {"numpy": "1.26.4", "packaging": "23.2", "regex": "2023.12.25"}
LIMIT = b"urllib3<2.3\nnumpy==1.26.0\n"
INSTALL = "python3 -m pip install --no-index --no-deps --break-system-packages /wheels/*.whl"
WHERE = "import {0}; print({0}.__file__)"


@pytest.fixture(scope="module")
def base(
    engine: DockerClient, python_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A base with numpy 1.26, packaging, regex and a constraint file."""
    folder = tmp_path_factory.mktemp("wheels")
    wanted = [f"{name}=={version}" for name, version in THERE.items()]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted]
    subprocess.run(command, check=True)
    files = {f"wheels/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files["constraint.txt"], name = LIMIT, "launchpad-test:as-ngc"
    limited = f"FROM {python_image}\nCOPY constraint.txt /etc/pip/\n"
    built(engine, f"{limited}COPY wheels /wheels\nRUN {INSTALL}\n", name, files)
    yield name
    engine.images.remove(name, force=True)


@pytest.fixture(scope="module")
def builds(
    engine: DockerClient, site: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builds]:
    """Row 24.10 with this base's Python, and locks of its own."""
    row = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    folder = tmp_path_factory.mktemp("matrix")
    own = replace(site, matrix=matrix_folder(folder, {"24.10": row}), extras=folder / "locks")
    made = Builds(engine, own, Progress(), f"{NAMES}-extras")
    yield made
    for image in engine.images.list(f"{NAMES}-extras"):
        engine.images.remove(image.id, force=True)


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.long)])
def test_extras_change_nothing_of_the_base_and_give_one_image(
    engine: DockerClient, builds: Builds, base: str, bases: BaseNames, twice: bool
) -> None:
    """What we added stood before NVIDIA's own packaging; no image could have the rest."""
    wanted = BuildRequest("24.10", base=base, builder=bases.builder, extras=("tiktoken",))
    first = builds.build(wanted)
    assert first.names[-1].endswith(":24.10-tiktoken")
    if twice:
        assert builds.build(replace(wanted, no_cache=True)).id == first.id
    seen = [verify.look(engine, image, image).packages for image in (base, first.id)]
    assert seen[1].items() >= seen[0].items() >= THERE.items()
    assert seen[1]["urllib3"].startswith("2.2.")  # by the constraint file
    for package, place in (("packaging", "dist-packages"), ("einops", "/opt/megatron/lib")):
        assert place in in_image(engine, first.id, "python3", "-c", WHERE.format(package))
    assert "/opt/extras/lib" in in_image(
        engine, first.id, "python3", "-c", WHERE.format("tiktoken")
    )
    assert len(layers(engine, first.id)) == len(layers(engine, base)) + 2

    record = beside.record(engine, first.id)
    assert record["of_base"] == {name: THERE[name] for name in ("packaging", "regex")}
    listed = {one["name"] for one in beside.kept(first.id, builds.site).sbom["components"]}  # type: ignore[index]
    assert {"tiktoken", "urllib3", "einops"} <= listed
    assert not listed & {"packaging", "regex", "numpy"}

    labels = engine.api.inspect_image(first.id)["Config"]["Labels"]
    assert labels["megatron-launchpad.extras"] == "tiktoken"
    assert builds.build(replace(wanted, extras=())).id != first.id


def test_what_clashes_is_refused_before_anything_is_built(
    builds: Builds, base: str, bases: BaseNames
) -> None:
    instead = ("--base", base, "--builder", bases.builder)
    env = {"LAUNCHER_MATRIX": str(builds.site.matrix), "LAUNCHER_EXTRAS": str(builds.site.extras)}
    done = launcher("image", "build", "24.10", *instead, "--extras", "numpy>=2", **env)
    refused(done, 122, "this asks for numpy>=2, and the base has numpy 1.26.4")
    assert "build [" not in done.stderr


def test_an_image_with_extras_goes_into_a_bundle_with_their_lock(
    builds: Builds, base: str, bases: BaseNames, tmp_path: Path
) -> None:
    """Else a machine without a network would have to resolve them anew."""
    instead = ("--base", base, "--builder", bases.builder, "--extras", "tiktoken")
    env = {"LAUNCHER_MATRIX": str(builds.site.matrix), "LAUNCHER_EXTRAS": str(builds.site.extras)}
    there, cache = str(tmp_path / "bundle"), str(tmp_path / "cache")
    refused(
        launcher("fetch", "24.10", *instead, "--no-images", **{**env, "LAUNCHER_EXTRAS": cache}),
        122,
    )
    builds.build(BuildRequest("24.10", base=base, builder=bases.builder, extras=("tiktoken",)))
    launched("fetch", "24.10", *instead, "--no-images", "--bundle", there, **env)
    elsewhere = {**env, "LAUNCHER_CACHE": cache, "LAUNCHER_EXTRAS": str(tmp_path / "extras")}
    taken = launched("fetch", "--from", there, **elsewhere)
    assert "wants what" not in taken.stderr
    (lock,) = (tmp_path / "extras").rglob("*.yaml")
    assert lock.read_text() == (builds.site.extras / "24.10" / lock.name).read_text()
    assert json.loads((Path(there) / "bundle.json").read_text())["rows"][0]["extras"] == [
        "tiktoken"
    ]


@pytest.mark.long
def test_what_was_fetched_builds_an_image_with_extras_where_nothing_can_be(
    builds: Builds, base: str, bases: BaseNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fetch` could leave out the wheels of extras, and the build would look for an index."""
    wanted = BuildRequest("24.10", base=base, builder=bases.builder, extras=("tiktoken",))
    first, cache = builds.build(wanted), tmp_path / "cache"
    env = {"LAUNCHER_MATRIX": str(builds.site.matrix), "LAUNCHER_EXTRAS": str(builds.site.extras)}
    instead = ("--base", base, "--builder", bases.builder, "--extras", "tiktoken")
    launched("fetch", "24.10", *instead, "--no-images", **env, LAUNCHER_CACHE=str(cache))
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    again = replace(wanted, no_cache=True)
    with pytest.raises(BuildError):
        replace_cache(builds, tmp_path / "empty").build(again)
    assert replace_cache(builds, cache).build(again).id == first.id


def replace_cache(builds: Builds, cache: Path) -> Builds:
    """Builds into another cache, which has only what was fetched into it."""
    return replace(builds, site=replace(builds.site, cache=cache))


@pytest.mark.long
def test_an_image_with_extras_goes_thin_to_an_engine_that_has_its_base(
    engine: DockerClient,
    elsewhere: DockerClient,
    builds: Builds,
    base: str,
    bases: BaseNames,
    tmp_path: Path,
) -> None:
    """Two layers of ours lie on the base, not one; each of them has to go along."""
    wanted = BuildRequest("24.10", base=base, builder=bases.builder, extras=("tiktoken",))
    made, folder = builds.build(wanted), str(tmp_path / "thin")
    launched("image", "save", made.names[-1], "--thin", "-o", folder)
    there = {"DOCKER_HOST": engine_host(elsewhere)}
    refused(launcher("image", "load", "--all-tags", folder, **there), 125, base)
    elsewhere.api.load_image(engine.api.get_image(base))
    launched("image", "load", "--all-tags", folder, **there)
    assert elsewhere.api.inspect_image(made.names[-1])["Id"] == made.id
    assert "/opt/extras/lib" in in_image(
        elsewhere, made.id, "python3", "-c", WHERE.format("tiktoken")
    )
    sbom = json.loads((tmp_path / "thin/documents" / beside.SBOM).read_text())
    assert "tiktoken" in {one["name"] for one in sbom["components"]}


TORCH = load_matrix().rows["cpu"].torch
RELEASE = "0.12.3"


@pytest.fixture
def trainable(
    engine: DockerClient, base: str, bases: BaseNames, site: Settings, tmp_path: Path
) -> Iterator[str]:
    """An image with three packages that most add, and all of Megatron; built twice from nothing.

    Its base is the one above with the cpu row's torch. Of newer releases, megatron.training needs
    Triton, which CPU torch hasn't.
    """
    checkout = tmp_path / "Megatron-LM"
    clone = ["git", "clone", "--quiet", f"--branch=core_v{RELEASE}", CHECKOUT, str(checkout)]
    subprocess.run(clone, check=True)
    own = [one for one in load_lock().packages["cpu"] if one.partition("==")[0] not in THERE]
    files = {f"wheels/{one.name}": one.read_bytes() for one in wheels(own, "3.11", site)}
    with_torch = f"{NAMES}:as-ngc-with-torch"
    built(engine, f"FROM {base}\nCOPY wheels /wheels\nRUN {INSTALL}\n", with_torch, files)
    row = {"python": "3.11", "torch": TORCH, "megatron": RELEASE}
    matrix = matrix_folder(tmp_path, {"24.10": row})
    builds = Builds(
        engine, replace(site, matrix=matrix, extras=tmp_path / "locks"), Progress(), NAMES
    )
    asked = BuildRequest(
        "24.10",
        checkout=checkout,
        base=with_torch,
        builder=bases.builder,
        extras=("transformers", "wandb", "sentencepiece"),
        no_cache=True,
    )
    first, second = builds.build(asked), builds.build(asked)
    assert first.id == second.id
    seen = [verify.look(engine, image, image).packages for image in (with_torch, first.id)]
    assert seen[1].items() >= seen[0].items() >= {**THERE, "torch": TORCH}.items()
    yield first.id
    for image in (first.id, with_torch):
        engine.images.remove(image, force=True)


def vocabularies(texts: list[str], folder: Path) -> dict[str, Path]:
    """A tokenizer of Hugging Face and one of SentencePiece, made of texts, by Megatron's names."""
    (hf := folder / "hf").mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet
        ),
    )
    made.save(str(hf / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "spm"),
        vocab_size=400,
        max_sentence_length=1 << 20,
        minloglevel=2,
    )
    return {"HuggingFaceTokenizer": hf, "GPTSentencePieceTokenizer": folder / "spm.model"}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_CHECKOUT names no Megatron-LM repository")
def test_upstreams_program_trains_by_a_tokenizer_of_extras_and_wandb_writes_offline(
    here: Site, trainable: str
) -> None:
    """What ten of ten public Dockerfiles add, to be used without any of them."""
    texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    text = here.folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    size = {"seq_length": 64, "max_position_embeddings": 64, "transformer_impl": "local"}
    config: dict[str, Any] = {
        "image": {"name": trainable},
        "program": "pretrain_gpt.py",
        "gpus": 0,
        "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, **size},
        "training": {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 6, "lr": 1e-2},
        "logging": {"log_interval": 1, "eval_interval": 100, "eval_iters": 1, "wandb_project": "p"},
        "megatron_args": {
            "no_persist_layer_norm": True,
            "no_gradient_accumulation_fusion": True,
        },
        "env": {"WANDB_MODE": "offline"},
        "resources": {"network": "none"},
    }
    for kind, model in vocabularies(texts, here.folder).items():
        data = {"text": [str(text)], "tokenizer_type": kind, "tokenizer_model": str(model)}
        own = {"data": {**data, "split": "90,10,0"}}
        logging = {"logging": {**config["logging"], "wandb_save_dir": f"wandb-{kind}"}}
        here.write({**config, **own, **logging})
        done = here.done("run", "run.yaml")
        assert done.ends() == 0, done
        losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+) ", done.out)]
        assert len(losses) == 6
        assert losses[0] == pytest.approx(math.log(400), abs=0.6)
        assert losses[5] < losses[0]
        (run,) = (here.folder / f"wandb-{kind}").rglob("offline-run-*/*.wandb")
        assert b"lm loss" in run.read_bytes()
