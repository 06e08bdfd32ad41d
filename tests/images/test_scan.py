"""What is known of packages, from a stand-in for OSV's API."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from launcher.build.sbom import sbom
from launcher.cli import main
from launcher.errors import UsageError
from launcher.images import scan
from launcher.images.scan import Finding, Package
from tests.build.made import made
from tests.images.osv import Osv, record, serving

EINOPS = Package("einops", "0.8.2")
TORCH = Package("torch", "2.13.0")
BROKEN = record("PYSEC-1", "Torch", "2.13.1", aliases=["CVE-1", "GHSA-1"])
SAME = record("GHSA-1", "torch", "2.13.1", aliases=["CVE-1"])
WITHDRAWN = record("PYSEC-3", "einops", withdrawn="2024-01-01T00:00:00Z")


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


def test_each_vulnerability_is_told_once() -> None:
    with serving(Osv, BROKEN, SAME, WITHDRAWN) as api:
        found = scan.scan([EINOPS, TORCH], api)
    names = ("CVE-1",)
    assert found == [Finding(TORCH, "GHSA-1", names, "torch is broken", ("2.13.1",))]


def test_a_withdrawn_record_hides_no_other_of_the_same_vulnerability() -> None:
    gone = record("A-1", "torch", aliases=["CVE-1"], withdrawn="2024-01-01")
    (found,) = scan.findings({TORCH: [gone, BROKEN]})
    assert found.id == "PYSEC-1"


@pytest.mark.parametrize(
    ("handler", "said"),
    [(Broken, "answers otherwise"), (Failing, "500"), (Dripping, "no answer within 0.3 s")],
)
def test_an_api_without_an_answer_of_use_is_told(
    handler: type[Osv], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SECONDS", 0.3)
    with serving(handler, BROKEN) as api, pytest.raises(UsageError, match=said) as caught:
        scan.scan([TORCH], api)
    assert "Nothing was checked" in caught.value.remedy


@pytest.mark.parametrize(
    "spoilt",
    [
        {"affected": [{"package": {"ecosystem": "PyPI"}}]},
        {key: value for key, value in BROKEN.items() if key not in ("summary", "affected")}
        | {"summary": 3},
        BROKEN | {"affected": [{**BROKEN["affected"][0], "ranges": [{"events": []}]}]},
    ],
)
def test_a_record_that_is_none_is_told(spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_ids", lambda *_: {TORCH: {"PYSEC-1"}})
    told = {"id": "PYSEC-1", **spoilt}
    with serving(Osv, told) as api, pytest.raises(UsageError, match="otherwise") as caught:
        scan.scan([TORCH], api)
    assert "Nothing was checked" in caught.value.remedy


def test_a_bill_of_materials_gives_its_packages_alone() -> None:
    found = scan.of_sbom(json.loads(sbom(made())))
    assert found == [EINOPS, Package("megatron-core", "0.9.0"), TORCH]


def test_a_row_is_scanned_as_the_lock_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is needed, the exit code says what was found, a record commands no terminal."""
    escaping = BROKEN | {"summary": "\x1b[2J gone\nmore"}
    with serving(Osv, escaping) as api:
        assert main(["image", "scan", "cpu", "--database", f"{api}/"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "torch 2.13.0  PYSEC-1 CVE-1 GHSA-1  fixed in 2.13.1  \\x1b[2J gone\n"
    assert "1 known" in printed.err
    with serving(Osv) as api:
        assert main(["image", "scan", "24.10", "--database", api]) == 0
    assert "7 packages, no known vulnerability" in capsys.readouterr().err
    assert main(["image", "scan", "24.10", "--database", "http://127.0.0.1:1"]) == 2
    assert "can't be reached\nNothing was checked" in capsys.readouterr().err.replace("  ", "")
