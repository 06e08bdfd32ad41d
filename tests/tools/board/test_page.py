"""The page of runs in a real browser: lists, draws, compares, and asks for nothing elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base.settings import settings
from launcher.tools.board import board, server
from tests.runs.record_samples import HOSTILE, keep, several, steps
from tests.tools.trials import browser

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SHOWN = "[...document.querySelectorAll('.cell')].map(c => c.id.slice(4))"
CURVES = "document.querySelectorAll('#plot .curve').length"
NEWEST = ["dddd0001", "cccc0001", "bbbb0001", "aaaa0003", "aaaa0002", "aaaa0001"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """One for all of them."""
    with browser.browser(settings().cache, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def runs(folder: Path) -> Path:
    """Some records."""
    several(folder)
    return folder


@pytest.fixture
def page(tab: browser.Page, runs: Path, tmp_path: Path) -> Iterator[browser.Page]:
    """The page as a file. Whatever is done to it, it asks for nothing, and nothing goes wrong."""
    board.write(tmp_path / "runs.html")
    address = (tmp_path / "runs.html").as_uri()
    tab.size(1280)
    tab.open("about:blank")
    tab.events.clear()
    tab.open(address)
    yield tab
    asked = {
        one["request"]["url"].partition("#")[0] for one in tab.told("Network.requestWillBeSent")
    }
    assert {one for one in asked if not one.startswith("blob:")} - {"about:blank"} == {address}
    went_wrong(tab)


def went_wrong(tab: browser.Page) -> None:
    """Nothing may be thrown, refused by the policy, or complained of."""
    for wrong in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
        assert tab.told(wrong) == []


def test_runs_are_listed_filtered_and_sorted(page: browser.Page) -> None:
    assert page.ask(SHOWN) == NEWEST
    page.press("/", *"gpt2 sigkill")
    assert page.ask(SHOWN) == ["aaaa0001"]
    assert page.ask("document.querySelector('#shown').textContent") == "1 of 6"
    page.press("Escape")
    page.click("[data-state=failed]")
    assert page.ask(SHOWN) == ["cccc0001", "aaaa0001"]
    page.click("[data-state=failed]")
    page.click("[data-sort=loss]")
    assert page.ask(SHOWN)[-1] == "cccc0001"  # which has none
    page.click("[data-sort=loss]")
    assert page.ask(SHOWN)[0] == "bbbb0001"
    assert page.ask(SHOWN)[-1] == "cccc0001"
    page.press("/", *"nowhere")
    assert page.ask("document.querySelector('#nothing').checkVisibility()") is True


def test_text_stays_text(page: browser.Page) -> None:
    assert page.ask("document.title") == "Runs"
    page.click("#run-cccc0001 summary .what")
    page.becomes("document.querySelectorAll('.because').length", 1)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert page.ask("document.querySelector('#run-cccc0001 b').textContent") == shown
    assert page.ask("document.querySelector('.because').innerText").count(shown) == 2
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert page.ask("document.scripts.length") == 1
    assert page.ask("document.title") == "Runs"


def test_a_resumed_run_is_one_curve(page: browser.Page) -> None:
    """Steps that were trained again would be drawn twice, and the curve would go back."""
    page.click("#none")
    page.click("#run-aaaa0003 .pick")
    assert page.ask(CURVES) == 1
    path = page.ask("document.querySelector('#plot .curve').getAttribute('d')")
    xs = [float(point.split()[0]) for point in path[1:].split("L")]
    assert xs == sorted(xs)
    assert len(xs) == 400  # iterations 5 to 2000, each once
    assert page.ask("[...document.querySelectorAll('#plot title')].map(t => t.textContent)") == [
        "resumed", "resumed", "spike: rose",
    ]  # fmt: skip
    for by in ("tokens", "hours"):
        page.ask(f"(() => {{ const x = document.querySelector('#x'); x.value = '{by}';"
                 "x.dispatchEvent(new Event('change')); })()")  # fmt: skip
        path = page.ask("document.querySelector('#plot .curve').getAttribute('d')")
        xs = [float(point.split()[0]) for point in path[1:].split("L")]
        assert (len(xs), xs) == (400, sorted(xs))


def test_runs_are_compared_and_the_address_keeps_it(page: browser.Page) -> None:
    page.click("#run-bbbb0001 .pick")
    page.press("j")
    page.press("x")
    assert page.ask(CURVES) == 3
    assert page.ask("document.querySelectorAll('#legend li').length") == 3
    before = page.ask("document.querySelector('#plot .curve').getAttribute('d')")
    page.press("l")
    assert page.ask("document.querySelector('#log').checked") is True
    assert page.ask("document.querySelector('#plot .curve').getAttribute('d')") != before
    page.ask("(() => { const s = document.querySelector('#smooth'); s.value = 0.9;"
             "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert page.ask("document.querySelectorAll('#plot .faint').length") == 3
    address = page.ask("location.href")
    page.open("about:blank")
    page.open(address)
    assert page.ask(CURVES) == 6
    assert page.ask("document.querySelector('#log').checked") is True
    colours = "[...document.querySelectorAll('#legend .swatch')].map(s => s.style.color)"
    _, *others = page.ask(colours)
    page.click("#legend button")
    assert page.ask(colours) == others  # each keeps its own
    tinted = "document.querySelector('#run-bbbb0001 .pick').style.accentColor"
    assert page.ask(tinted) in others


def test_values_are_read_with_a_mouse_and_with_keys(page: browser.Page) -> None:
    page.ask("document.querySelector('#plot').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    first = page.ask("document.querySelector('#tip').textContent")
    assert "mixtral dddd0001: " in first
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert page.ask("document.querySelector('#tip').textContent") != first
    x, y = page.ask("(() => { const box = document.querySelector('#plot').getBoundingClientRect();"
                    "return [box.x + box.width / 2, box.y + 50]; })()")  # fmt: skip
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.becomes("/^iteration 14\\d\\n/.test(document.querySelector('#tip').textContent)", True)


def test_a_run_opens_with_what_failed_and_its_files(page: browser.Page, runs: Path) -> None:
    page.press("j", "j", "j", "j", "j", "j", "Enter")
    page.becomes("document.querySelector('.cell .body')?.parentElement.id", "run-aaaa0001")
    text = page.ask("document.querySelector('.cell[open]').innerText")
    assert "cure: a smaller micro-batch" in text
    assert "launcher resume aaaa0001" in text
    assert str(runs / "aaaa0001") in text
    links = page.ask("[...document.querySelectorAll('.cell[open] a[target]')].map(a => a.href)")
    assert (runs / "aaaa0001/log").as_uri() in links
    page.click(".cell[open] a[href='#chosen=aaaa0001']")
    page.becomes("document.querySelector('#legend').innerText.includes('aaaa0001')", True)
    assert page.ask("document.querySelectorAll('#legend li').length") == 1
    page.click(".cell[open] a[href='#run=aaaa0002']")
    page.becomes("document.activeElement.parentElement.id", "run-aaaa0002")
    page.becomes("document.querySelectorAll('.cell .body').length", 2)


def test_the_chart_is_saved_as_it_looks(page: browser.Page) -> None:
    page.ask("URL.createObjectURL = blob => { window.saved = blob.text(); return 'blob:null/x'; }")
    page.ask("HTMLAnchorElement.prototype.click = function () { window.name = this.download; }")
    page.click("#save")
    text = page.ask("window.saved")
    assert text.startswith("<svg")
    assert "var(" not in text.partition("style=")[2].partition(">")[0]
    assert page.ask("window.name") == "loss.svg"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_it_fits_and_can_be_read(page: browser.Page, width: int, scheme: str) -> None:
    page.size(width)
    page.prefer(scheme)
    page.ask("document.querySelectorAll('.cell').forEach(one => { one.open = true; })")
    page.becomes("document.querySelectorAll('.cell .body').length", 6)
    assert page.ask("document.documentElement.scrollWidth") <= width
    cut = (
        "[...document.querySelectorAll('.number, .badge, .chip, .bar *')].filter(part =>"
        "part.scrollWidth > part.clientWidth + 1 && part.clientWidth).map(part => part.outerHTML)"
    )
    assert page.ask(cut) == []


def test_thousands_of_runs_open_at_once(tab: browser.Page, tmp_path: Path, folder: Path) -> None:
    """A row of each would take the browser many seconds; rows come as they are scrolled to."""
    lines = steps(range(50, 2050, 50))
    for number in range(5000):
        keep(folder, f"{number:08x}", f"run-{number}", 1 + number % 28, steps=lines)
    board.write(tmp_path / "many.html")
    tab.size(1280)
    tab.open((tmp_path / "many.html").as_uri())
    timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    tab.becomes(f"{timing} > 0", True)
    taken = tab.ask(timing)
    print(f"opened in {taken:.0f} ms")
    assert taken < 8000  # 700 ms on a machine that does nothing else
    assert tab.ask(f"{SHOWN}.length") <= 300
    tab.press("/", *"run-4321")
    assert tab.ask(SHOWN) == [f"{4321:08x}"]
    tab.press("Escape")
    tab.ask("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    tab.becomes(f"{SHOWN}.length > 100", True)


def test_the_served_page_shows_what_is_new(
    tab: browser.Page, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REFRESH", 0.2)
    tab.size(1280)
    tab.events.clear()
    with server.BoardServer(0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            tab.open(served.address)
            assert tab.ask(SHOWN) == NEWEST
            tab.click("#run-bbbb0001 summary .what")
            keep(runs, "eeee0001", "new", 8, steps=steps([10]))
            with (runs / "bbbb0001/metrics.jsonl").open("a") as file:
                file.write(json.dumps(steps([1600])[0]) + "\n")
            tab.becomes(SHOWN, ["eeee0001", *NEWEST])
            tab.becomes("document.querySelector('#run-bbbb0001 .at').textContent", "1600 / 2000")
            assert tab.ask("document.querySelector('#run-bbbb0001').open") is True
            link = "document.querySelector('#run-bbbb0001 a[target]').href"
            assert tab.ask(link).startswith(f"{served.address}runs/bbbb0001/")
            went_wrong(tab)
        finally:
            tab.open("about:blank")
            served.shutdown()
            thread.join()
