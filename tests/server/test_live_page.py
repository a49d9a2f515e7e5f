"""The live page and the API's description in a real browser, on a real daemon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon

pytestmark = pytest.mark.slow
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Browser, url: str, path: str = "/", width: int = 1440) -> tuple[Page, list[str]]:
    """The page, and what must stay empty: its console, its errors and its requests to other places."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    noted: list[str] = []
    page.on("console", lambda message: noted.append(message.text))
    page.on("pageerror", lambda error: noted.append(str(error)))
    page.on("request", lambda request: request.url.startswith(url) or noted.append(request.url))
    page.goto(url + path)
    return page, noted


def set_up(page: Page, **values: str) -> None:
    """Fill in fields of the settings."""
    page.click("#settings summary")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#settings summary")


def send(page: Page, text: str) -> str:
    """Send a message by the keyboard, and wait for its answer; the answer's text."""
    before = page.locator(".assistant").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    expect(page.locator(".assistant")).to_have_count(before + 1)
    expect(page.locator("#stop")).to_be_disabled()
    return page.locator(".assistant .text:not(.thought)").last.text_content() or ""


@pytest.mark.parametrize("width", [360, 1440])
def test_a_conversation_survives_a_reload(browser: Browser, daemon: Daemon, width: int) -> None:
    """The second request has the first turn, the system prompt and the seed; after a reload everything is there."""
    page, noted = opened(browser, daemon.url, width=width)
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#about")).to_contain_text("bv_race, up to 4 drafts of 5 tokens")
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(json.loads(request.post_data or "")))
    set_up(page, system="Be brief.", seed="7", length="12", chains="3", depth="3")
    first = send(page, "hello")
    page.press("#message", "Enter")  # of an empty message
    second = send(page, "and then?")
    assert first
    assert second
    assert len(bodies) == 2
    assert bodies[1]["seed"] == 7
    assert [(one["role"], one["content"]) for one in bodies[1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", first),
        ("user", "and then?"),
    ]
    page.check("#show-drafts")
    shown = page.inner_text("#turns")
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    assert page.inner_text("#turns") == shown
    assert page.input_value("#system") == "Be brief."
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    if width == 360:
        page.hover("#table")
        page.mouse.wheel(200, 0)
        expect(page.locator("#table")).not_to_have_js_property("scrollLeft", 0)
    page.click("#clear")
    page.reload()
    assert page.locator(".turn").count() == 0
    assert noted == []
    page.close()


def test_steps_in_reading_order_are_the_answer(browser: Browser, daemon: Daemon) -> None:
    """The emitted tokens of the trees spell the answer, and each of its letters has an origin."""
    page, noted = opened(browser, daemon.url)
    set_up(page, length="24", chains="4", depth="3", seed="1")
    answer = send(page, "hello")
    page.check("#show-drafts")
    emitted = page.evaluate(
        """[...document.querySelectorAll('.step .node.kept title, .step .node.own title')]
             .map(title => JSON.parse(title.textContent.match(/^".*"(?=: )/)[0])).join('')"""
    )
    assert answer in emitted
    rows = page.locator(".step :is(.kept, .own) rect").evaluate_all("boxes => boxes.map(box => box.y.baseVal.value)")
    assert set(rows) == {3}, "what was emitted is the top line"
    coloured = page.evaluate(
        "[...document.querySelectorAll('.assistant .text [class]')].map(s => s.textContent).join('')"
    )
    assert coloured == answer
    expect(page.locator(".summary")).to_contain_text("tokens per pass")
    expect(page.locator("#count-length")).to_contain_text("mean of ")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == answer
    assert noted == []
    page.close()


def test_an_answer_of_markup_stays_text(browser: Browser, daemon: Daemon) -> None:
    """A model that writes scripts writes text, in the answer, in the drafts, and after a reload."""

    def choose(route: Route) -> None:
        body = json.loads(route.request.post_data or "") | {"structured_outputs": {"choice": [HOSTILE]}}
        route.continue_(post_data=json.dumps(body))

    page, noted = opened(browser, daemon.url)
    page.route("**/v1/chat/completions", choose)
    page.check("#show-drafts")
    assert send(page, HOSTILE) == HOSTILE
    for _ in range(2):
        assert page.locator(".user .text").text_content() == HOSTILE
        assert page.locator(".assistant .text:not(.thought)").text_content() == HOSTILE
        assert page.locator("#turns script, #turns img").count() == 0
        page.reload()
    assert noted == []
    page.close()


def test_a_refused_message_can_be_sent_again(browser: Browser, daemon: Daemon) -> None:
    """The server's reason is shown, and the message is in its field again; a stopped answer stays as far as it is."""
    page, _ = opened(browser, daemon.url)
    set_up(page, chains="1000")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    expect(page.locator("#problem")).to_contain_text("num_drafts")
    assert page.input_value("#message") == "hello"
    assert page.locator(".turn").count() == 0
    set_up(page, chains="2", length="1800")
    page.press("#message", "Enter")
    expect(page.locator(".assistant .text [class]").first).to_be_visible()
    page.click("#stop")
    expect(page.locator(".summary")).to_contain_text("stopped")
    assert page.locator(".assistant .text:not(.thought)").text_content()
    page.close()


def test_a_wrong_key_is_named(browser: Browser, one_seat: Daemon) -> None:
    """A missing key and a wrong one have different messages; the right one is kept for the tab alone."""
    page, _ = opened(browser, one_seat.url)
    expect(page.locator("#key-problem")).to_have_text("This server needs an API key.")
    assert page.inner_text("#model") == ""
    page.fill("#key", "schlüssel-€")
    assert page.locator("#key").evaluate("key => key.validity.patternMismatch")
    page.fill("#key", "not-a-key")
    page.click("text=Use key")
    expect(page.locator("#key-problem")).to_have_text("The server refused this API key.")
    page.fill("#key", KEYS[0])
    page.click("text=Use key")
    expect(page.locator("#status")).to_have_text("ready")
    assert not page.is_visible("#key-row")
    assert KEYS[0] not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.close()


def test_the_description_needs_no_other_host(browser: Browser, daemon: Daemon) -> None:
    """Swagger UI draws the API, and calls it."""
    page, noted = opened(browser, daemon.url, "/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    page.click("#operations-default-version_version_get")
    page.click("text=Try it out")
    page.click("text=Execute")
    expect(page.locator(".live-responses-table")).to_contain_text('"version"')
    assert noted == []
    page.close()
