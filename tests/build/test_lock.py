"""matrix.lock: complete, stable, without URLs; what can't be reached keeps its pin."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.build import lock
from launcher.errors import BuildError, EngineError
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.schema import (
    GitSource,
    Lock,
    LockedImage,
    LockedPlatform,
    LockedRelease,
)
from launcher.oci import registry
from launcher.oci.registry import Resolved
from launcher.progress import Progress
from launcher.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_covers_the_matrix() -> None:
    matrix, locked = load_matrix(), load_lock()
    assert set(locked.images) <= set(matrix.images)
    assert set(locked.needs) == set(matrix.builders)
    assert set(locked.packages) == {tag for tag, row in matrix.rows.items() if row.packages}
    assert set(locked.extensions) == set(matrix.extensions)
    for version, release in matrix.releases.items():
        git = locked.releases[version].git
        assert git is not None
        assert (git.commit, git.ref) == (release.git.commit, release.git.ref)
        assert (locked.releases[version].sdist is not None) == release.sdist


def test_it_holds_versions_and_hashes_and_no_urls() -> None:
    text = (ROOT / "matrix.lock").read_text()
    assert "://" not in text
    assert text == lock.dump(load_lock())


def test_needs_never_hold_what_belongs_to_the_base() -> None:
    for needs in load_lock().needs.values():
        names = {pin.partition("==")[0] for pin in needs.runtime}
        assert names.isdisjoint({"torch", "numpy", "transformer-engine", "apex"})


RESOLVING = ("_needs", "_resolve", "_lock_git", "_lock_sdist", "_lock_extension")


def test_an_extension_that_no_row_compiles_is_not_locked(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    for name in RESOLVING:
        monkeypatch.setattr(lock, name, unreachable)
    matrix = load_matrix()
    rows = {tag: row for tag, row in matrix.rows.items() if tag != "cuda-12.8"}
    found = lock.lock(
        matrix.model_copy(update={"rows": rows}), load_lock(), site, Progress(io.StringIO())
    )
    assert list(found.extensions) == ["transformer-engine-1.13", "apex-24.10"]


def unreachable(*_: object) -> None:
    raise BuildError("nothing can be reached")


@pytest.fixture(autouse=True)
def _no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(reference: str, platform: str) -> Resolved:
        raise EngineError(f"{reference}: the registry can't be reached")

    monkeypatch.setattr(registry, "resolve", resolve)


def test_what_cannot_be_reached_keeps_its_pin_and_is_named(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    for name in RESOLVING:
        monkeypatch.setattr(lock, name, unreachable)
    out = io.StringIO()
    locked = lock.lock(load_matrix(), load_lock(), site, Progress(out))
    assert locked == load_lock()
    assert "\nneeds of cp310 keeps its old pin: nothing can be reached\n" in out.getvalue()
    assert "\n0.9.0 from git keeps its old pin" in out.getvalue()


def test_without_an_old_pin_it_fails(monkeypatch: pytest.MonkeyPatch, site: Settings) -> None:
    monkeypatch.setattr(lock, "_needs", unreachable)
    with pytest.raises(BuildError, match="nothing can be reached"):
        lock.lock(load_matrix(), None, site, Progress(io.StringIO()))


def test_changed_needs_are_not_kept(monkeypatch: pytest.MonkeyPatch, site: Settings) -> None:
    monkeypatch.setattr(lock, "_needs", unreachable)
    matrix = load_matrix()
    needs = matrix.needs.model_copy(update={"runtime": [*matrix.needs.runtime, "zarr"]})
    with pytest.raises(BuildError):
        lock.lock(
            matrix.model_copy(update={"needs": needs}), load_lock(), site, Progress(io.StringIO())
        )


@pytest.mark.parametrize("packages", [["numpy", "torch==2.14.0+cpu"], ["numpy", "scipy"]])
def test_packages_that_were_changed_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, site: Settings, packages: list[str]
) -> None:
    for name in RESOLVING:
        monkeypatch.setattr(lock, name, unreachable)
    matrix = load_matrix()
    row = matrix.rows["cpu"].model_copy(update={"packages": packages})
    changed = matrix.model_copy(update={"rows": {**matrix.rows, "cpu": row}})
    with pytest.raises(BuildError, match="nothing can be reached"):
        lock.lock(changed, load_lock(), site, Progress(io.StringIO()))


def test_a_release_whose_commit_was_changed_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    data = yaml.safe_load((ROOT / "matrix.lock").read_text())
    data["releases"]["0.9.0"]["git"]["commit"] = "0" * 40
    for name in RESOLVING:
        monkeypatch.setattr(lock, name, unreachable)
    with pytest.raises(BuildError):
        lock.lock(load_matrix(), Lock.model_validate(data), site, Progress(io.StringIO()))


def sha(letter: str) -> str:
    return f"sha256:{letter * 64}"


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Resolved]) -> list[str]:
    """Have registries answer so; what they were asked for amd64, in the end."""
    asked: list[str] = []

    def resolve(reference: str, platform: str) -> Resolved:
        if platform == "linux/amd64":
            asked.append(reference)
        if reference not in answers:
            raise EngineError(f"{reference}: the registry can't be reached\n  more", "Mend it.")
        return answers[reference]

    monkeypatch.setattr(registry, "resolve", resolve)
    return asked


def test_each_base_and_builder_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    matrix = load_matrix()
    answers = {name: Resolved(sha("a"), sha("b"), sha("c")) for name in matrix.images}
    asked = answering(monkeypatch, answers)
    out = io.StringIO()
    images = lock._lock_images(matrix, None, site, Progress(out))
    for_amd64 = [name for name in matrix.images if "linux/amd64" in matrix.platforms(name)]
    assert sorted(asked) == sorted(for_amd64)
    assert list(images) == list(matrix.images)
    assert len(out.getvalue().splitlines()) == 1
    platform = LockedPlatform(manifest=sha("b"), config=sha("c"))
    for name, image in images.items():
        platforms = dict.fromkeys(matrix.platforms(name), platform)
        assert image == LockedImage(digest=sha("a"), platforms=platforms)


def test_an_image_is_locked_for_each_platform_that_it_is_used_on() -> None:
    matrix = load_matrix()
    both = ["linux/amd64", "linux/arm64"]
    assert matrix.platforms("nvcr.io/nvidia/pytorch:26.06-py3") == both
    assert matrix.platforms("nvcr.io/nvidia/pytorch:24.10-py3") == ["linux/amd64"]
    assert matrix.platforms("quay.io/pypa/manylinux_2_28_x86_64:latest") == ["linux/amd64"]
    assert matrix.platforms("quay.io/pypa/manylinux_2_28_aarch64:latest") == ["linux/arm64"]


def test_a_tag_that_moves_between_two_platforms_is_not_locked(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    def resolve(reference: str, platform: str) -> Resolved:
        return Resolved(sha("a" if platform == "linux/amd64" else "b"), sha("c"), sha("d"))

    monkeypatch.setattr(registry, "resolve", resolve)
    out = io.StringIO()
    images = lock._lock_images(load_matrix(), None, site, Progress(out))
    assert "nvcr.io/nvidia/pytorch:24.10-py3" in images
    assert "nvcr.io/nvidia/pytorch:26.06-py3" not in images
    assert "26.06-py3: was moved while it was asked" in out.getvalue()


def test_row_by_row_what_cannot_be_reached_keeps_its_pin_or_has_none(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    matrix = load_matrix()
    there, gone, never = (matrix.rows[tag].base for tag in ("24.02", "24.03", "24.04"))
    answering(monkeypatch, {there: Resolved(sha("a"), sha("b"), sha("c"))})
    platform = LockedPlatform(manifest=sha("e"), config=sha("f"))
    before = LockedImage(digest=sha("d"), platforms={"linux/amd64": platform})
    old = load_lock().model_copy(update={"images": {there: before, gone: before, "left:1": before}})
    out = io.StringIO()
    images = lock._lock_images(matrix, old, site, Progress(out))
    assert images[there].digest == sha("a")
    assert images[gone] == before
    assert set(images) == {there, gone}
    lines = {line.partition(":")[0]: line for line in out.getvalue().splitlines()}
    assert lines["base of 24.03 keeps its old pin"]
    assert never in lines["base of 24.04 has no pin, so builds go by its tag"]
    assert sum("can't be reached" in line for line in lines.values()) == len(matrix.images) - 1


def test_a_mirror_is_asked_and_does_not_show_in_the_lock(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    own = replace(site, image_mirrors={"nvcr.io": "mirror.example/nvcr"})
    at = "mirror.example/nvcr/nvidia/pytorch:24.10-py3"
    answering(monkeypatch, {at: Resolved(sha("a"), sha("b"), sha("c"))})
    images = lock._lock_images(load_matrix(), None, own, Progress(io.StringIO()))
    assert list(images) == ["nvcr.io/nvidia/pytorch:24.10-py3"]


@given(
    st.dictionaries(
        st.sampled_from(sorted(load_matrix().images)),
        st.tuples(*[st.sampled_from("0123456789abcdef")] * 3),
    )
)
def test_a_lock_reads_back_and_is_written_the_same_in_any_order(
    found: dict[str, tuple[str, str, str]],
) -> None:
    images = {
        name: LockedImage(
            digest=sha(digest),
            platforms={"linux/amd64": LockedPlatform(manifest=sha(manifest), config=sha(config))},
        )
        for name, (digest, manifest, config) in found.items()
    }
    locked = load_lock().model_copy(update={"images": images})
    backwards = locked.model_copy(update={"images": dict(reversed(images.items()))})
    text = lock.dump(locked)
    assert text == lock.dump(backwards)
    assert Lock.model_validate(yaml.safe_load(text)) == locked


def test_a_lock_of_before_images_were_locked_is_read() -> None:
    data = yaml.safe_load((ROOT / "matrix.lock").read_text())
    del data["images"]
    assert Lock.model_validate(data).images == {}


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A wheel with nothing in it but what it needs."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("python", ["3.10", "3.13"])
@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_what_is_needed_on_a_condition_is_what_the_row_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Settings, python: str, platform: str
) -> None:
    """Whatever Python and machine pip runs on: these tests' is another than some of the rows'."""
    wheel(
        tmp_path,
        *("root", "1.0", 'backport; python_version < "3.11"', 'nvidia; platform_machine=="x86_64"'),
        *('numbers<2; python_full_version < "3.11"', "numbers", 'windows; os_name == "nt"'),
        'extra; extra == "more"',
    )
    wheel(tmp_path, "backport", "1.0", "deeper")
    for name in ("deeper", "nvidia", "windows", "extra"):
        wheel(tmp_path, name, "1.0")
    wheel(tmp_path, "numbers", "1.0")
    wheel(tmp_path, "numbers", "2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    pins = lock._resolve(["root"], python, replace(site, torch_index=""), platform=platform)
    old, amd64 = python == "3.10", platform == "linux/amd64"
    assert [pin.partition(" ")[0] for pin in pins] == sorted(
        [
            *("root==1.0", "numbers==1.0" if old else "numbers==2.0"),
            *(("backport==1.0", "deeper==1.0") if old else ()),
            *(("nvidia==1.0",) if amd64 else ()),
        ]
    )


def test_a_pip_that_would_resolve_for_its_own_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    wheel(tmp_path, "root", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(lock, "PIP", lock.PIP.replace("markers.default_environment", "other"))
    with pytest.raises(BuildError, match="resolves for this Python alone"):
        lock._resolve(["root"], "3.10", site)


def test_resolving_runs_nothing_that_a_wheel_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    """A dependency may be an address, and pip builds what is there whatever --only-binary says."""
    project = tmp_path / "evil"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    )
    (project / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    wheel(tmp_path, "root", "1.0", f"evil @ {project.as_uri()}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BuildError, match="without a wheel is not built"):
        lock._resolve(["root"], "3.10", replace(site, torch_index=""))
    assert not (tmp_path / "ran").exists()


def test_a_file_of_which_an_index_has_no_sha256_is_told() -> None:
    item = {
        "metadata": {"name": "six", "version": "1.17.0"},
        "download_info": {"archive_info": {"hashes": {"md5": "a" * 32}}},
    }
    with pytest.raises(BuildError, match=r"no sha256 of six 1\.17\.0"):
        lock._pin(item)


def test_a_branch_is_locked_with_its_name_and_another_one_keeps_no_pin(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    named = GitSource(url="https://github.com/x/y.git", ref="core_r0.9.0")
    monkeypatch.setattr(lock.source, "commit_of", lambda url, ref, site: "a" * 40)
    monkeypatch.setattr(lock.source, "repository", lambda url, commit, site: Path(url))
    monkeypatch.setattr(lock.source, "git", lambda *_: f"{'b' * 40} 1700000000\n")
    found = lock._lock_git(named, site)
    assert (found.commit, found.ref) == ("a" * 40, "core_r0.9.0")
    old = load_lock().model_copy(update={"releases": {"0.9.0": LockedRelease(git=found)}})
    assert lock._old_git(old, "0.9.0", named) == found
    assert lock._old_git(old, "0.9.0", GitSource(url=named.url, ref="core_r0.10.0")) is None
    assert lock._old_git(old, "0.9.0", GitSource(url=named.url, commit="a" * 40)) is None


def test_a_lock_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "matrix.lock"
    path.write_text("old")
    monkeypatch.setattr(lock, "dump", lambda locked: "new")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        lock.write(load_lock(), path)
    assert path.read_text() == "old"
