"""matrix.lock: complete, stable, without URLs; what holds or can't be reached keeps its pin."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.base.errors import BuildError, EngineError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.matrix.locked import Lock, LockedImage, LockedPlatform, LockedRelease
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.schema import GitSource, Matrix
from launcher.images.oci import registry
from launcher.images.oci.registry import ImageDigests
from launcher.images.sources import index, lock, uv
from launcher.images.sources.lock import LockRequest
from launcher.images.sources.uv import RequirementSet, ResolvedSet

from .conftest import wheel
from .made import sha

pytestmark = pytest.mark.usefixtures("no_registry")

ROOT = Path(__file__).resolve().parents[3]
OFFLINE = LockRequest(offline=True)


def test_the_lock_covers_the_matrix() -> None:
    matrix, locked = load_matrix(), load_lock()
    assert set(locked.images) <= set(matrix.images)
    assert set(locked.needs) == set(matrix.builders)
    assert set(locked.packages) == {tag for tag, row in matrix.rows.items() if row.packages}
    assert set(locked.extensions) == set(matrix.extensions)
    for version, release in matrix.releases.items():
        git = locked.releases[version].git
        assert git is not None or not release.git.is_named
        assert git is None or git.is_of(release.git)
        assert (locked.releases[version].sdist is not None) == release.sdist
    for needs in locked.needs.values():  # never what belongs to the base
        names = {pin.partition("==")[0] for pin in needs.runtime}
        assert names.isdisjoint({"torch", "numpy", "transformer-engine", "apex"})
    for name, extension in matrix.extensions.items():
        own = locked.extensions[name]
        assert set(own.submodules) == set(extension.submodules)
        assert all(git.commit == own.links[path] for path, git in own.submodules.items())
    one, other = locked.needs["cp312"].runtime, locked.needs["cp312-arm64"].runtime
    assert [pin.split()[0] for pin in one] == [pin.split()[0] for pin in other]
    assert one != other  # compiled wheels have other hashes


def test_it_holds_versions_and_hashes_and_no_urls() -> None:
    text, locked = (ROOT / "matrix.lock").read_text(), load_lock()
    assert "://" not in text
    assert text == lock.dump(locked)
    one = LockedImage(
        digest=sha("a"),
        platforms={"linux/amd64": LockedPlatform(manifest=sha("b"), config=sha("c"))},
    )
    images = {"b": one, "a": one.model_copy(update={"digest": sha("d")})}
    mine = locked.model_copy(update={"images": images})
    text = lock.dump(mine)
    assert Lock.model_validate(yaml.safe_load(text)) == mine
    images = dict(reversed(images.items()))  # written the same in any order
    assert lock.dump(locked.model_copy(update={"images": images})) == text


def locking(
    matrix: Matrix, old: Lock | None, site: Settings, asking: LockRequest
) -> tuple[Lock, str]:
    """What is locked, and what is said meanwhile."""
    out = io.StringIO()
    return lock.lock(matrix, old, site, Progress(out), asking), out.getvalue()


def packed() -> list[str]:
    """The rows with packages of their own, in the matrix's order."""
    return [tag for tag, row in load_matrix().rows.items() if row.packages]


def unreachable(*_: object, **__: object) -> None:
    raise BuildError("nothing can be reached")


def test_offline_all_pins_stay_and_what_was_not_asked_is_named(empty_site: Settings) -> None:
    locked, said = locking(load_matrix(), load_lock(), empty_site, OFFLINE)
    assert locked == load_lock()
    named = [line.partition(":")[0] for line in said.splitlines() if "as --offline says" in line]
    rows = [f"packages of {tag} keeps its old pin" for tag in packed()]
    assert named[: len(rows)] == rows
    assert "base of 24.10 has no pin, so builds go by its tag" in named
    assert not any("needs of" in line or "0.9.0" in line for line in named)  # known to hold


def test_what_is_asked_and_cannot_be_reached_keeps_its_pin_and_is_named(
    monkeypatch: pytest.MonkeyPatch, empty_site: Settings
) -> None:
    for name in ("resolve", "_lock_git", "_lock_sdist"):
        monkeypatch.setattr(lock, name, unreachable)
    locked, said = locking(load_matrix(), load_lock(), empty_site, LockRequest(upgrade=()))
    assert locked == load_lock()
    for what in ("needs of cp310", "packages of cpu", "0.9.0 from git", "0.10.0 as sdist"):
        assert f"\n{what} keeps its old pin: nothing can be reached\n" in f"\n{said}"


def needing(matrix: Matrix) -> Matrix:
    more = {"runtime": [*matrix.needs.runtime, "zarr"]}
    return matrix.model_copy(update={"needs": matrix.needs.model_copy(update=more)})


def taking(*packages: str) -> Callable[[Matrix], Matrix]:
    def change(matrix: Matrix) -> Matrix:
        row = matrix.rows["cpu"].model_copy(update={"packages": [*packages]})
        return matrix.model_copy(update={"rows": {**matrix.rows, "cpu": row}})

    return change


def releasing(**git: str) -> Callable[[Matrix], Matrix]:
    def change(matrix: Matrix) -> Matrix:
        named = GitSource(url=matrix.releases["0.9.0"].git.url, **git)
        release = matrix.releases["0.9.0"].model_copy(update={"git": named})
        return matrix.model_copy(update={"releases": {**matrix.releases, "0.9.0": release}})

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (needing, "needs of cp310"),
        (taking("numpy", "torch==2.14.0+cpu"), "packages of cpu"),
        (taking("numpy", "scipy"), "packages of cpu"),
        (releasing(commit="0" * 40), "0.9.0 from git"),
        (releasing(ref="core_r0.9.0"), "0.9.0 from git"),
    ],
)
def test_what_the_matrix_has_changed_keeps_no_pin_and_a_first_one_cannot_be_missing(
    empty_site: Settings, change: Callable[[Matrix], Matrix], what: str
) -> None:
    with pytest.raises(BuildError, match=f"^{what}: it is not asked for"):
        locking(change(load_matrix()), load_lock(), empty_site, OFFLINE)
    with pytest.raises(BuildError, match=r"^needs of cp310: "):
        locking(load_matrix(), None, empty_site, OFFLINE)


def test_an_extension_that_no_row_or_set_compiles_is_not_locked(empty_site: Settings) -> None:
    """Those of a set of extras were not, and a build with it said that the lock has none."""
    matrix = load_matrix()
    rows = {tag: row for tag, row in matrix.rows.items() if tag in ("cuda-12.4", "cpu")}
    sets = {"mamba": matrix.extras["mamba"]}
    for extras, more in (({}, []), (sets, sets["mamba"].extensions)):
        part = matrix.model_copy(update={"rows": rows, "extras": extras})
        found, _ = locking(part, load_lock(), empty_site, OFFLINE)
        assert list(found.extensions) == ["transformer-engine-1.13", "apex-24.10", *more]


@pytest.mark.parametrize(
    ("upgrade", "of_all_needs", "names"),
    [(None, 0, set()), (["networkx"], 0, {"networkx"}), (["regex", "0.9.0"], 1, {"regex"})],
)
def test_what_is_to_be_upgraded_is_asked_for_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
    empty_site: Settings,
    upgrade: list[str] | None,
    of_all_needs: int,
    names: set[str],
) -> None:
    """`make lock` moved markdown, networkx and numpy, of which nobody had said a word."""
    asked: list[RequirementSet] = []
    git: list[str | None] = []

    def resolve(wanted: RequirementSet, site: Settings) -> ResolvedSet:
        asked.append(wanted)
        return ResolvedSet([*wanted.before], {})

    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.setattr(
        lock, "_lock_git", lambda named, _: git.append(named.commit) or unreachable()
    )
    locked, _ = locking(load_matrix(), load_lock(), empty_site, LockRequest(upgrade))
    assert locked == load_lock()
    needs = of_all_needs * len(locked.needs)
    assert sum("--no-deps" in one.options for one in asked) == 3 * needs
    assert len(asked) == 3 * needs + len(packed())
    assert len(git) == ("0.9.0" in (upgrade or ()))
    options = {one for wanted in asked for one in wanted.options} - {"--no-deps"}
    assert options == {f"--upgrade-package={name}" for name in names}


def test_what_is_not_locked_cannot_be_upgraded(empty_site: Settings) -> None:
    with pytest.raises(UsageError, match="nothing that is locked is nunpy") as caught:
        locking(load_matrix(), load_lock(), empty_site, LockRequest(["nunpy"]))
    assert "'numpy'" in caught.value.remedy


ANSWER = ImageDigests(sha("a"), sha("b"), sha("c"))


def images(
    monkeypatch: pytest.MonkeyPatch,
    site: Settings,
    answers: dict[str, ImageDigests],
    before: dict[str, LockedImage],
    upgrade: list[str] | None = None,
) -> tuple[dict[str, LockedImage], list[str], list[str]]:
    """What is locked where registries answer so, what is said, and what was asked for amd64."""
    asked: list[str] = []

    def resolve(reference: str, platform: str, **_: bool) -> ImageDigests:
        if platform == "linux/amd64":
            asked.append(reference)
        if reference not in answers:
            raise EngineError(f"{reference}: the registry can't be reached\n  more", "Mend it.")
        return answers[reference]

    monkeypatch.setattr(registry, "resolve", resolve)
    monkeypatch.setattr(lock, "resolve", unreachable)
    old = load_lock().model_copy(update={"images": before})
    found, said = locking(load_matrix(), old, site, LockRequest(upgrade))
    return found.images, said.splitlines(), asked


def test_each_base_and_builder_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, empty_site: Settings
) -> None:
    matrix = load_matrix()
    found, _, asked = images(monkeypatch, empty_site, dict.fromkeys(matrix.images, ANSWER), {})
    assert sorted(asked) == sorted(n for n in matrix.images if "linux/amd64" in matrix.platforms(n))
    platform = LockedPlatform(manifest=sha("b"), config=sha("c"))
    assert found == {
        name: LockedImage(
            digest=sha("a"), platforms=dict.fromkeys(matrix.platforms(name), platform)
        )
        for name in matrix.images
    }
    assert images(monkeypatch, empty_site, {}, found)[::2] == (found, [])
    name = matrix.rows["24.10"].base
    _, said, asked = images(monkeypatch, empty_site, {}, found, [name])
    assert asked == [name]
    assert any(line.startswith("base of 24.10 keeps its old pin") for line in said)
    mirrored = replace(empty_site, image_mirrors={"nvcr.io": "mirror.example/nvcr"})
    asked = images(monkeypatch, mirrored, {}, found, [name])[2]
    assert asked == [name.replace("nvcr.io", "mirror.example/nvcr")]


def test_a_tag_that_moves_between_two_platforms_is_not_locked(
    monkeypatch: pytest.MonkeyPatch, empty_site: Settings
) -> None:
    def resolve(reference: str, platform: str, **_: bool) -> ImageDigests:
        return ImageDigests(sha("a" if platform == "linux/amd64" else "b"), sha("c"), sha("d"))

    monkeypatch.setattr(registry, "resolve", resolve)
    monkeypatch.setattr(lock, "resolve", unreachable)
    found, said = locking(load_matrix(), load_lock(), empty_site, LockRequest())
    assert "nvcr.io/nvidia/pytorch:24.10-py3" in found.images
    assert "nvcr.io/nvidia/pytorch:26.06-py3" not in found.images
    assert "26.06-py3: was moved while it was asked" in said


def test_row_by_row_what_cannot_be_reached_keeps_its_pin_or_has_none(
    monkeypatch: pytest.MonkeyPatch, empty_site: Settings
) -> None:
    matrix = load_matrix()
    there, gone, never = (matrix.rows[tag].base for tag in ("24.02", "24.03", "24.04"))
    platform = LockedPlatform(manifest=sha("e"), config=sha("f"))
    before = LockedImage(digest=sha("d"), platforms={"linux/amd64": platform})
    old = {there: before, gone: before, "left:1": before}
    found, said, _ = images(monkeypatch, empty_site, {there: ANSWER}, old, [there, gone])
    assert found[there].digest == sha("a")
    assert found[gone] == before
    assert set(found) == {there, gone}
    lines = {line.partition(":")[0]: line for line in said}
    assert lines["base of 24.03 keeps its old pin"]
    assert never in lines["base of 24.04 has no pin, so builds go by its tag"]
    assert sum("registry can't be reached" in line for line in said) == len(matrix.images) - 1


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which pip's configuration alone names; pip is asked for it once."""
    folder = tmp_path / "links"
    folder.mkdir()
    # A pip that knows no index is asked for its help as well.
    text = f"[global]\nno-index = true\nindex-url = http://none\nfind-links = {folder}\n"
    (tmp_path / "pip.conf").write_text(text)
    asked, known = index.Pip.configured, dict[str, index.Pip]()

    def once(site: Settings) -> index.Pip:
        return known.get(repr(site)) or known.setdefault(repr(site), asked(site))

    monkeypatch.setattr(index.Pip, "configured", once)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return folder


def versions(pins: list[str]) -> list[str]:
    return [pin.partition(" ")[0] for pin in pins]


@pytest.mark.parametrize("python", ["3.10", "3.13"])
@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_what_is_needed_on_a_condition_is_what_the_row_needs(
    links: Path, empty_site: Settings, python: str, platform: str
) -> None:
    """Whatever Python and machine it runs on: these tests' is another than some of the rows'."""
    wheel(
        links,
        *("root", "1.0", 'backport; python_version < "3.11"', 'nvidia; platform_machine=="x86_64"'),
        *('numbers<2; python_full_version < "3.11"', "numbers", 'windows; os_name == "nt"'),
        'extra; extra == "more"',
    )
    wheel(links, "backport", "1.0", "deeper")
    for name in ("deeper", "nvidia", "windows", "extra"):
        wheel(links, name, "1.0")
    wheel(links, "numbers", "1.0")
    wheel(links, "numbers", "2.0")
    pins = uv.resolve(RequirementSet(["root"], python, platform=platform), empty_site).pins
    old, amd64 = python == "3.10", platform == "linux/amd64"
    assert versions(pins) == sorted(
        [
            *("root==1.0", "numbers==1.0" if old else "numbers==2.0"),
            *(("backport==1.0", "deeper==1.0") if old else ()),
            *(("nvidia==1.0",) if amd64 else ()),
        ]
    )


def test_a_pin_that_holds_stays_until_it_is_upgraded_or_ruled_out(
    links: Path, empty_site: Settings
) -> None:
    for name in ("one", "some_thing"):
        wheel(links, name, "1.0")
    both = ["one", "some-thing"]
    before = uv.resolve(RequirementSet(both, "3.12"), empty_site).pins
    spelt = [pin.replace("some-thing", "some_thing") for pin in before]  # as pip's metadata has it
    for name in ("one", "some_thing", "third"):
        wheel(links, name, "2.0")

    def again(requirements: list[str], *options: str) -> list[str]:
        return uv.resolve(RequirementSet(requirements, "3.12", spelt, options), empty_site).pins

    assert again(both) == spelt
    assert versions(again([*both, "third"])) == ["one==1.0", "some_thing==1.0", "third==2.0"]
    assert versions(again(both, "--upgrade-package=one")) == ["one==2.0", "some_thing==1.0"]
    assert versions(again(["one>1", "some-thing"])) == ["one==2.0", "some_thing==1.0"]
    assert versions(again(both, "--upgrade")) == ["one==2.0", "some-thing==2.0"]


def test_resolving_runs_nothing_that_a_wheel_asks_for(
    links: Path, tmp_path: Path, empty_site: Settings
) -> None:
    """A dependency may be an address, of which a build would be run to learn what it needs."""
    project = tmp_path / "evil"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    )
    (project / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    wheel(links, "root", "1.0", f"evil @ {project.as_uri()}")
    with pytest.raises(BuildError, match="uv can't resolve it"):
        uv.resolve(RequirementSet(["root"], "3.10"), empty_site)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_which_an_index_has_no_sha256_is_told() -> None:
    text = '[[packages]]\nname="six"\nversion="1.17.0"\nwheels=[{hashes={md5="a"}}]\n'
    with pytest.raises(BuildError, match=r"no sha256 of six 1\.17\.0"):
        uv._read(text, RequirementSet(["six"], "3.10"))


def test_a_branch_is_locked_with_its_name_and_holds_as_long_as_it_is_named(
    monkeypatch: pytest.MonkeyPatch, empty_site: Settings
) -> None:
    monkeypatch.setattr(lock.megatron_source, "commit_of", lambda url, ref, site: "a" * 40)
    monkeypatch.setattr(lock.megatron_source, "repository", lambda url, commit, site: Path(url))
    monkeypatch.setattr(lock.megatron_source, "git", lambda *_: f"{'b' * 40} 1700000000\n")
    found = lock._lock_git(GitSource(url="https://github.com/x/y.git", ref="r"), empty_site)
    assert (found.commit, found.ref) == ("a" * 40, "r")
    own = load_lock()
    old: dict[str, Any] = {**own.releases, "0.9.0": LockedRelease(git=found)}
    held = own.model_copy(update={"releases": old})
    matrix = releasing(ref="r")(load_matrix())
    assert locking(matrix, held, empty_site, OFFLINE)[0].releases["0.9.0"].git == found
    for other in (releasing(ref="s"), releasing(commit="a" * 40)):
        with pytest.raises(BuildError, match=r"^0\.9\.0 from git"):
            locking(other(load_matrix()), held, empty_site, OFFLINE)
