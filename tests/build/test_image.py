"""What a build leaves, reuses and says when the engine or the system refuses."""

from __future__ import annotations

import errno
import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError
from requests.exceptions import ReadTimeout

from launcher.build import attest, image, sbom, verify
from launcher.build.image import Builds, Request, build_all
from launcher.errors import BuildError, EngineError, UsageError
from launcher.matrix.load import find_release, load_matrix
from launcher.matrix.recipe import recipe
from launcher.screen import Progress
from launcher.settings import Settings
from tests.build.conftest import INFO
from tests.build.made import BASE, SOURCES, inputs_of, made


class FakeApi:
    """A stand-in for an engine's API that knows images by ID, with their names."""

    def __init__(self, names: dict[str, list[str] | None]) -> None:
        self.names = names
        self.derived: set[str] = set()

    def images(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        return [{"Id": key, "RepoTags": names} for key, names in self.names.items()]

    def inspect_image(self, image: str) -> dict[str, Any]:
        return {"Id": image, "RepoTags": self.names[image]}

    def history(self, image: str) -> list[dict[str, Any]]:
        last = "RUN pip install more" if image in self.derived else "COPY /stage/ / # buildkit"
        return [{"CreatedBy": last}, {"CreatedBy": "COPY /stage/ / # buildkit"}]

    def remove_image(self, image: str, force: bool) -> None:
        del self.names[image]


def builds(site: Settings, names: dict[str, list[str] | None]) -> tuple[Builds, FakeApi]:
    api = FakeApi(names)
    return Builds(SimpleNamespace(api=api), site, Progress(io.StringIO())), api


def test_an_image_without_a_name_or_made_from_ours_is_not_reused(empty_site: Settings) -> None:
    """A build that ended before its checks left it."""
    nameless = {"sha256:a": None, "sha256:b": [], "sha256:c": ["<none>:<none>"]}
    assert builds(empty_site, nameless)[0]._with_key("key") is None
    named = {**nameless, "sha256:d": ["megatron:cpu"]}
    assert builds(empty_site, named)[0]._with_key("key") == "sha256:d"

    building, api = builds(empty_site, {"sha256:a": ["mine:1"], "sha256:b": ["megatron:cpu"]})
    api.derived = {"sha256:a"}
    assert building._with_key("key") == "sha256:b"
    api.derived = {"sha256:a", "sha256:b"}
    assert building._with_key("key") is None


@pytest.mark.parametrize("end", [KeyboardInterrupt(), BuildError("not right")])
def test_an_image_whose_check_did_not_end_is_removed(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    building, api = builds(empty_site, {"sha256:new": []})

    def check(*_: object) -> None:
        raise end

    inputs = inputs_of(SOURCES["git"])
    monkeypatch.setattr(building, "_inputs", lambda request: inputs)
    monkeypatch.setattr(building, "_check_base", lambda *_: None)
    monkeypatch.setattr(building, "_build", lambda *_: "sha256:new")
    monkeypatch.setattr(building, "_check", check)
    with pytest.raises(type(end)):
        building.build(Request("cpu"))
    assert api.names == {}
    api.names["sha256:new"] = ["megatron:cpu"]  # an earlier build has named it
    building._discard("sha256:new")
    assert api.names


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.12.1+cpu", None])
@pytest.mark.parametrize("standin", [True, False])
def test_the_torch_of_a_built_image_is_compared_with_its_row_s(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, torch: str | None, standin: bool
) -> None:
    building, api = builds(empty_site, {})
    told = {"RootFS": {"Layers": ["a"]}}
    monkeypatch.setattr(api, "inspect_image", lambda image: told)
    facts = verify.Facts("3.11", {"torch": torch} if torch else {})
    monkeypatch.setattr(verify, "look", lambda *_: facts)
    cpu = recipe(building.matrix, building.lock, "cpu")
    inputs = inputs_of(SOURCES["sdist"], recipe=cpu, base=replace(BASE, standin=standin))
    right = torch == "2.13.0+cpu" or (torch is None and standin)
    said = re.escape(f"the image has torch {torch or 'missing'}, and the row says 2.13.0+cpu")
    with nullcontext() if right else pytest.raises(BuildError, match=said):
        building._check("i", verify.Facts("3.11", {}), inputs)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (APIError("x", explanation="conflict"), EngineError, "conflict"),
        (ReadTimeout("no answer"), EngineError, "no answer"),
        (FileNotFoundError(errno.ENOENT, "No such file", "git"), BuildError, "needs git and tar"),
        (OSError(errno.ENOSPC, "No space left on device"), BuildError, "TMPDIR"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), BuildError, "/cache: Perm"),
    ],
)
def test_what_engine_or_system_refuse_is_told_and_ends_the_step(
    error: Exception, kind: type[Exception], said: str
) -> None:
    out = io.StringIO()
    progress = Progress(out)

    def refuse() -> None:
        with image._told(progress):
            progress.step("patch")
            raise error

    with pytest.raises(kind, match=said):
        refuse()
    progress.step("next")
    assert out.getvalue() == "patch: failed\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("the registry has no such image (404)"), 125),
        (UsageError("X: not an image's name"), 2),
    ],
)
def test_a_row_that_fails_does_not_keep_others_from_being_built(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    building, _ = builds(empty_site, {})
    made = image.Built(["megatron:cpu"], "sha256:a", reused=False)

    def build(request: Request) -> image.Built:
        if request.tag == "24.02":
            raise error
        return made

    monkeypatch.setattr(building, "build", build)
    built, failed = build_all(building, [Request("24.02"), Request("cpu")])
    assert built == [made]
    assert [(request.tag, one.exit_code) for request, one in failed] == [("24.02", code)]


def test_nothing_is_built_where_one_of_several_rows_cannot_be(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, _ = builds(empty_site, {})
    asked: list[Request] = []
    monkeypatch.setattr(building, "build", asked.append)
    with pytest.raises(UsageError, match=r"Megatron 0\.16\.1 requires"):
        build_all(building, [Request("cpu", "0.16.1"), Request("24.02", "0.16.1")])
    with pytest.raises(UsageError, match=r"9\.0 is no compute capability"):
        build_all(building, [Request("cuda-12.4"), Request("cuda-12.4", architectures="9.0")])
    building.lock = building.lock.model_copy(update={"packages": {}})
    with pytest.raises(UsageError, match=r"matrix\.lock has no packages of cpu"):
        build_all(building, [Request("24.10"), Request("cpu")])
    assert not asked


def test_a_release_that_is_none_is_told_so_of_a_checkout_too(
    empty_site: Settings, tmp_path: Path
) -> None:
    """A bare repository is of any release."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "HEAD").touch()
    building, _ = builds(empty_site, {})
    with pytest.raises(UsageError, match=r"no Megatron release '0\.9\.9' in the matrix"):
        building.recipe(Request("cpu", "0.9.9", tmp_path))


def test_a_checkout_of_another_patch_release_is_written_as_what_it_is(
    empty_site: Settings, tmp_path: Path
) -> None:
    """Image, labels, build.json, provenance and SBOM said 0.13.1 of a checkout of 0.13.0."""
    checkout = tmp_path / "Megatron-LM"
    (checkout / "megatron/core").mkdir(parents=True)
    (checkout / "megatron/core/package_info.py").write_text(INFO.format(minor=13, patch=0))
    said = io.StringIO()
    building = Builds(SimpleNamespace(), empty_site, Progress(said))
    building.images = SimpleNamespace(find=lambda *_: BASE)
    inputs = building.inputs(Request("cpu", checkout=checkout))
    assert f"{checkout}: Megatron 0.13.0, built by the rules of 0.13.1" in said.getvalue()
    assert [path.parent.name for path in inputs.patches] == ["0.13.1", "0.13.1"]
    assert building._names(inputs) == ["megatron:cpu-0.13.0"]
    own = replace(inputs, source=replace(inputs.source, release="0.13.0+mine"))
    assert building._names(own) == ["megatron:cpu-0.13.0-mine"]
    told = {name.rpartition(".")[2]: value for name, value in inputs.labels.items()}
    assert (told["megatron"], told["rules"], told["version"]) == ("0.13.0", "0.13.1", "0.13.0")
    assert told["title"] == "Megatron-LM 0.13.0 on cpu"
    record = inputs.record()
    assert (record["release"], record["version"], record["rules"]) == ("0.13.0", "0.13.0", "0.13.1")
    image = made("path", inputs=inputs, name="megatron:cpu-0.13.0")
    documents = json.dumps(attest.provenance(image)), sbom.sbom(image)
    for document in documents:
        assert "0.13.0" in document
        left = document.replace("patches/0.13.1/", "").replace("rules of 0.13.1", "")
        assert "0.13.1" not in left.replace('"rules": "0.13.1"', "")


@pytest.mark.parametrize(
    ("word", "nearest"), [("0.13.0", "0.13.1"), ("0.12.1", "0.12.3"), ("0.9.1", "0.9.0")]
)
def test_the_nearest_release_is_of_the_same_series(word: str, nearest: str) -> None:
    """0.19.0 was offered in place of 0.13.0."""
    matrix = load_matrix()
    with pytest.raises(UsageError, match=f"Did you mean '{nearest}'"):
        find_release(matrix, matrix.rows["cpu"], word)
