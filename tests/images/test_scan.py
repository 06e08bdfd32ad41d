"""What is known of packages, from a stand-in for OSV's API and from a file as OSV publishes it."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from launcher.build.sbom import sbom
from launcher.cli import main
from launcher.errors import UsageError
from launcher.images import scan
from launcher.images.scan import Package
from tests.build.made import made

EINOPS = Package("einops", "0.8.2")
TORCH = Package("torch", "2.13.0")


def record(id: str, name: str, events: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A record of the OSV schema that affects one range of one package."""
    part = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": events}],
    }
    return {"id": id, "summary": f"{name} is broken", "affected": [part], **more}


BROKEN = record(
    "PYSEC-1", "Torch", [{"introduced": "0"}, {"fixed": "2.13.1"}], aliases=["CVE-1", "GHSA-1"]
)
SAME = record("GHSA-1", "torch", [{"introduced": "0"}, {"fixed": "2.13.1"}], aliases=["CVE-1"])
MENDED = record("PYSEC-2", "einops", [{"introduced": "0"}, {"fixed": "0.8.0"}])
WITHDRAWN = record("PYSEC-3", "einops", [{"introduced": "0"}], withdrawn="2024-01-01T00:00:00Z")
RECORDS = [BROKEN, SAME, MENDED, WITHDRAWN]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A file as OSV publishes it."""
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as file:
        for one in RECORDS:
            file.writestr(f"{one['id']}.json", json.dumps(one))
    return path


class Osv(BaseHTTPRequestHandler):
    """OSV's API as far as it is asked; it answers in pages of one ID."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"results": [self.page(query) for query in asked["queries"]]})

    def do_GET(self) -> None:
        wanted = self.path.removeprefix("/v1/vulns/")
        self.answer(next(one for one in RECORDS if one["id"] == wanted))

    def page(self, query: dict[str, Any]) -> dict[str, Any]:
        package = Package(query["package"]["name"], query["version"])
        hits = [one for one in RECORDS if scan._hit(one, [package])]
        at = int(query.get("page_token", 0))
        more = {"next_page_token": str(at + 1)} if at + 1 < len(hits) else {}
        return {"vulns": [{"id": one["id"]} for one in hits[at : at + 1]], **more}

    def answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


class Broken(Osv):
    """One that answers, but nothing of use."""

    def answer(self, content: dict[str, Any]) -> None:
        super().answer({"error": "none"})


class Failing(Osv):
    """One that has an error of its own."""

    def answer(self, content: dict[str, Any]) -> None:
        self.send_error(500)


class Dripping(Osv):
    """One whose answer comes byte by byte, slower than anybody waits."""

    def answer(self, content: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(15):
                self.wfile.write(b" ")
                time.sleep(0.1)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of the handler that the test names; its URL."""
    handler = getattr(request, "param", Osv)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_of_records_gives_each_vulnerability_once(archive: Path) -> None:
    (found,) = scan.scan([EINOPS, TORCH], str(archive))
    assert found.package == TORCH
    assert found.id == "GHSA-1"
    assert set(found.aliases) | {found.id} >= {"GHSA-1", "CVE-1"}
    assert found.fixed == ("2.13.1",)
    assert found.summary == "torch is broken"


def test_a_withdrawn_record_hides_no_other_of_the_same_vulnerability() -> None:
    gone = record("A-1", "torch", [{"introduced": "0"}], aliases=["CVE-1"], withdrawn="2024-01-01")
    (found,) = scan.findings({TORCH: [gone, BROKEN]})
    assert found.id == "PYSEC-1"


def test_the_api_gives_the_same_as_the_file(archive: Path, served: str) -> None:
    assert scan.scan([EINOPS, TORCH], served + "/") == scan.scan([EINOPS, TORCH], str(archive))


@pytest.mark.parametrize(
    ("served", "said"),
    [(Broken, "answers otherwise"), (Failing, "500"), (Dripping, "no answer within 0.3 s")],
    indirect=["served"],
)
def test_an_api_without_an_answer_of_use_is_told(
    served: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SECONDS", 0.3)
    with pytest.raises(UsageError, match=said) as caught:
        scan.scan([TORCH], served)
    assert "Nothing was checked" in caught.value.remedy


def test_an_api_out_of_reach_is_told_with_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match="can't be reached") as caught:
        scan.scan([TORCH], "http://127.0.0.1:1")
    assert "--database all.zip" in caught.value.remedy


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_a_file_that_is_none_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "all.zip"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"all\.zip: can't be read as OSV's file"):
        scan.scan([TORCH], str(path))


@pytest.mark.parametrize(
    "spoilt",
    [
        [],
        {"affected": [{"package": {"ecosystem": "PyPI"}}]},
        {key: value for key, value in BROKEN.items() if key != "id"},
        BROKEN | {"affected": [{**BROKEN["affected"][0], "ranges": [{"events": []}]}]},
    ],
)
def test_a_record_that_is_none_is_told(tmp_path: Path, spoilt: Any) -> None:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("PYSEC-1.json", json.dumps(spoilt))
    with pytest.raises(UsageError, match=r"all\.zip") as caught:
        scan.scan([TORCH], str(path))
    assert "Nothing was checked" in caught.value.remedy


@pytest.mark.parametrize(
    ("events", "hit", "missed"),
    [
        ([{"introduced": "0"}], ["0.1", "99"], []),
        ([{"introduced": "1.0"}, {"fixed": "1.2"}], ["1.0", "1.1.9"], ["0.9", "1.2", "1.3"]),
        ([{"introduced": "1"}, {"last_affected": "2"}], ["1", "2"], ["0.9", "2.0.1"]),
        ([{"fixed": "2"}, {"introduced": "0"}], ["1"], ["2"]),  # in any order
        (
            [{"introduced": "0"}, {"fixed": "1"}, {"introduced": "2"}, {"fixed": "3"}],
            ["0.5", "2.5"],
            ["1.5", "3"],
        ),
    ],
)
def test_a_range_holds_what_its_events_say(
    events: list[dict[str, str]], hit: list[str], missed: list[str]
) -> None:
    affected = {"ranges": [{"type": "ECOSYSTEM", "events": events}]}
    assert all(scan.is_affected(version, affected) for version in hit)
    assert not any(scan.is_affected(version, affected) for version in missed)


VERSIONS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda v: f"{v[0]}.{v[1]}")


@given(VERSIONS, VERSIONS, VERSIONS)
def test_a_range_is_half_open(introduced: str, fixed: str, version: str) -> None:
    events = [{"introduced": introduced}, {"fixed": fixed}]
    within = Version(introduced) <= Version(version) < Version(fixed)
    if Version(introduced) < Version(fixed):
        affected = {"ranges": [{"type": "ECOSYSTEM", "events": events}]}
        assert scan.is_affected(version, affected) == within


def test_listed_versions_count_and_ranges_of_git_do_not() -> None:
    assert scan.is_affected("1.0", {"versions": ["1.0.0", "not a version"]})
    git = {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}], "versions": ["2.0"]}
    assert not scan.is_affected("1.0", git)


def test_packages_are_named_as_records_name_them() -> None:
    pins = ["Typing_Extensions==4.1 --hash=sha256:0", "torch==2.13.0+cpu --hash=sha256:0"]
    assert scan.of_pins([*pins, pins[1]]) == [TORCH, Package("typing-extensions", "4.1")]


def test_a_bill_of_materials_gives_its_packages_alone() -> None:
    found = scan.of_sbom(json.loads(sbom(made())))
    assert found == [EINOPS, Package("megatron-core", "0.9.0"), TORCH]


def test_what_a_record_says_is_no_command_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("A.json", json.dumps(BROKEN | {"summary": "\x1b[2J gone\nmore"}))
    assert main(["image", "scan", "cpu", "--database", str(path)]) == 1
    assert capsys.readouterr().out.endswith("  \\x1b[2J gone\n")


def test_a_row_is_scanned_as_the_lock_has_it(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine is needed, and the exit code says what was found."""
    assert main(["image", "scan", "cpu", "--database", str(archive)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("torch 2.13.0  GHSA-1 CVE-1  fixed in 2.13.1  torch is broken")
    assert "1 known" in printed.err
    nothing = tmp_path / "none.zip"
    zipfile.ZipFile(nothing, "w").close()
    assert main(["image", "scan", "24.10", "--database", str(nothing)]) == 0
    assert "7 packages, no known vulnerability" in capsys.readouterr().err
    assert main(["image", "scan", "24.10", "--database", "http://127.0.0.1:1"]) == 2
    assert "Nothing was checked" in capsys.readouterr().err
