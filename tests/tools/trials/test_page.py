"""The page in a real browser: it filters, opens and prints, asks for nothing; text stays text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.base.settings import settings
from launcher.tools.trials import html
from tests.tools.trials import browser
from tests.tools.trials.samples import HOSTILE, RESULTS

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SHOWN = "[...document.querySelectorAll('details.cell')].filter(c => !c.hidden).map(c => c.id)"
OPEN = "[...document.querySelectorAll('details.cell[open]')].map(c => c.id)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """One for all of them."""
    with browser.browser(settings().cache, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the page lies."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.as_html(RESULTS), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(tab: browser.Page, address: str) -> Iterator[browser.Page]:
    """The page, opened. Whatever is done to it, it asks for nothing, and nothing goes wrong."""
    tab.size(1280)
    tab.open("about:blank")
    tab.events.clear()
    tab.open(address)
    yield tab
    asked = {one["request"]["url"] for one in tab.told("Network.requestWillBeSent")}
    assert {one.partition("#")[0] for one in asked} - {"about:blank"} == {address}
    for wrong in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
        assert tab.told(wrong) == []


def test_the_filter_shows_what_has_all_the_words(page: browser.Page) -> None:
    assert len(page.ask(SHOWN)) == len(RESULTS)
    page.press("/", *"custom_FWD 24.08")
    assert page.ask(SHOWN) == ["24.08-0.9.0"]
    assert page.ask("document.querySelector('#shown').textContent") == "1 of 8"
    assert page.ask("document.querySelectorAll('.facts tbody tr.out').length") == 6
    page.press(*" nowhere")
    assert page.ask(SHOWN) == []
    assert page.ask("document.querySelector('#none').checkVisibility()") is True
    page.press("Escape")
    assert len(page.ask(SHOWN)) == len(RESULTS)
    assert page.ask("document.querySelector('#none').checkVisibility()") is False
    page.press("/", *"traceback owned")  # a log can be searched
    assert page.ask(SHOWN) == ["24.09-0.9.0"]


def test_verdicts_are_chosen_by_their_chips(page: browser.Page) -> None:
    page.click("[data-verdict=fails]")
    assert page.ask(SHOWN) == ["24.06-0.9.0", "24.09-0.9.0"]
    page.click("[data-verdict='runs with warnings']")
    assert len(page.ask(SHOWN)) == 4
    page.press("/", *"0.12.3")
    assert page.ask(SHOWN) == ["24.10-0.12.3"]
    page.press("Escape")
    page.click("[data-verdict=better]")
    assert page.ask(SHOWN) == ["24.10-0.9.0"]
    assert page.ask("document.querySelector('[data-verdict=better]').ariaPressed") == "true"
    assert page.ask("document.querySelectorAll('button[data-verdict=builds]').length") == 0


def test_a_cell_opens_in_place_with_its_log(page: browser.Page, address: str) -> None:
    cell = "[id='24.09-0.9.0']"
    page.click(f"{cell} > summary")
    assert page.ask(OPEN) == ["24.09-0.9.0"]
    page.becomes("location.href", f"{address}#24.09-0.9.0")
    shown = "document.querySelector(\"[id='24.09-0.9.0'] pre\")"
    assert page.ask(f"{shown}.checkVisibility()") is False
    page.click(f"{cell} .log > summary")
    assert page.ask(f"{shown}.checkVisibility()") is True
    assert "torch" in page.ask(f'document.querySelector("{cell} dl").innerText')
    page.click(f"{cell} > summary")
    assert page.ask(OPEN) == []


def test_text_stays_text(page: browser.Page) -> None:
    page.ask("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    lines = page.ask("document.querySelector(\"[id='24.09-0.9.0'] pre\").textContent").split("\n")
    assert lines[1] == "RuntimeError: <script>document.title = 'owned'</script>"
    assert lines[2] == HOSTILE[2]
    assert "'single' &amp; &lt; {{ 7 * 7 }} {% raw %}" in lines[3]
    assert page.ask("document.title") == "Compatibility"
    assert page.ask("document.scripts.length") == 1
    assert page.ask("document.querySelectorAll('img, b[onclick]').length") == 0
    assert '<b onclick="x">bold</b>' in page.ask("document.querySelector('.lines').textContent")
    assert "<no such host>" in page.ask("document.body.textContent")


def test_a_link_to_a_cell_opens_it(page: browser.Page, address: str) -> None:
    page.open("about:blank")
    page.open(f"{address}#24.10-0.12.3")
    page.becomes(OPEN, ["24.10-0.12.3"])
    page.becomes("document.activeElement.parentElement.id", "24.10-0.12.3")
    page.press("/", *"24.02")
    page.click(".facts tbody tr:not(.out) a")
    page.becomes(OPEN, ["24.02-0.9.0", "24.10-0.12.3"])
    page.ask("location.hash = '24.06-0.9.0'")  # one that the filter hides
    page.becomes(OPEN, ["24.02-0.9.0", "24.06-0.9.0", "24.10-0.12.3"])
    assert len(page.ask(SHOWN)) == len(RESULTS)
    page.open(f"{address}#nowhere%22")


def test_a_link_to_where_the_address_is_opens_the_cell_again(page: browser.Page) -> None:
    cell, follow = "24.06-0.9.0", "document.querySelector(\".tile[href='#24.06-0.9.0']\").click()"
    page.ask(follow)
    page.becomes(OPEN, [cell])
    page.click(f"[id='{cell}'] > summary")
    page.becomes(OPEN, [])
    page.ask(follow)
    page.becomes(OPEN, [cell])
    page.press("/", *"24.02")  # which hides it
    page.ask(follow)
    page.becomes(f"{SHOWN}.length", len(RESULTS))


def test_keys_do_what_a_mouse_does(page: browser.Page) -> None:
    focused = "document.activeElement.closest('details.cell')?.id"
    page.press("j", "j", "j")
    assert page.ask(focused) == "24.06-0.9.0"
    page.press("Enter")
    assert page.ask(OPEN) == ["24.06-0.9.0"]
    page.press("k", "k", "k", "k")
    assert page.ask(focused) == "24.02-0.9.0"
    page.press("Tab")
    assert page.ask(focused) == "24.03-0.9.0"
    assert page.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    reached = set()
    page.ask("document.activeElement.blur()")
    for _ in range(60):
        page.press("Tab")
        reached.add(page.ask("document.activeElement.id || document.activeElement.className"))
    assert {"query", "chip fails", "all", "tile runs", "wide"} <= reached


def test_print_shows_everything_and_leaves_it_as_it_was(page: browser.Page) -> None:
    page.ask("addEventListener('beforeprint', () => { window.printed = document.body.innerText; })")
    assert page.print().startswith(b"%PDF-")
    assert "RuntimeError: <script>" in page.ask("window.printed")
    page.becomes(OPEN, [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_it_fits_and_can_be_read(page: browser.Page, width: int, scheme: str) -> None:
    page.size(width)
    page.prefer(scheme)
    page.ask("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.ask("document.documentElement.scrollWidth") <= width
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(_colour(ground)) < 128 * 3) is (scheme == "dark")


def _colour(css: str) -> tuple[float, ...]:
    """Red, green and blue of rgb(…)."""
    numbers = css[css.index("(") + 1 : -1].split(",")
    return tuple(float(part) for part in numbers[:3])
