"""The live page in a real browser, on a real daemon."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon

WIDTHS = [360, 1440]


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


def opened(browser: Browser, daemon: Daemon, width: int = 1440) -> tuple[Page, list[str]]:
    """The page, and what its console says from then on, requests to other places included."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: request.url.startswith(daemon.url) or told.append(request.url))
    page.goto(f"{daemon.url}/dashboard")
    return page, told


@pytest.mark.parametrize("width", WIDTHS)
def test_a_person_asks_and_sees_the_drafts(browser: Browser, daemon: Daemon, width: int) -> None:
    """An answer of twelve tokens in plain text: the tokens of the steps, read in their order, are the answer."""
    page, told = opened(browser, daemon, width)
    expect(page.locator("#status")).to_have_text("ready")
    assert page.inner_text("#model") == MODEL
    page.select_option("#kind", "text")
    page.fill("#message", "hello")
    for name, value in (("length", "12"), ("chains", "2"), ("depth", "3"), ("temperature", "1")):
        page.fill(f"#{name}", value)
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    expect(page.locator("#summary")).to_contain_text("tokens per step")
    answer = page.text_content("#answer")
    steps = page.evaluate(
        """[...document.querySelectorAll('.step')].reverse().map(step => {
             const kept = [...step.querySelectorAll('.chain')].map(chain =>
               [...chain.querySelectorAll('.kept, .own')].map(token => token.textContent));
             return kept.reduce((best, one) => one.length > best.length ? one : best, []);
           })"""
    )
    assert sum(len(step) for step in steps) >= 10
    assert answer
    assert answer in "".join(token for step in steps for token in step)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    assert told == []
    page.close()


def test_what_a_page_shows_of_a_request_is_never_text(browser: Browser, daemon: Daemon) -> None:
    """A request of another client: in the table while it runs, in the rate afterwards."""
    page, told = opened(browser, daemon)
    with daemon.client() as client:
        call = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=call) as stream:
            lines = stream.iter_lines()
            next(lines)
            state = client.get("/dashboard/state").json()
            for _ in lines:
                pass
        assert "hello" not in str(state)
        assert state["num_requests"] == 1
        assert state["requests"][0]["num_prompt_tokens"] > 0
        assert client.get("/dashboard/state").json()["requests"] == []
    expect(page.locator("#tile-length")).to_have_text(re.compile(r"[1-9]\.[0-9]+"))
    assert told == []
    page.close()


def test_the_page_asks_for_the_key(browser: Browser, one_seat: Daemon) -> None:
    """Nothing is shown without a key; with it, the state."""
    page, _ = opened(browser, one_seat)
    page.wait_for_selector("#key")
    assert page.inner_text("#model") == ""
    page.fill("#key", KEYS[0])
    page.click("text=Use key")
    expect(page.locator("#status")).to_have_text("ready")
    assert not page.is_visible("#key")
    page.close()


def test_markup_in_a_token_stays_text(browser: Browser, daemon: Daemon) -> None:
    """What a model writes cannot become a part of the page."""
    page, told = opened(browser, daemon)
    page.evaluate("drawStep(1, {chains: [['<img src=x onerror=alert(1)>']], num_accepted: 0, tokens: ['<b>bold</b>']})")
    assert page.query_selector("#steps img, #steps b") is None
    assert told == []
    page.close()


def test_only_the_page_itself_may_run(http: httpx.Client) -> None:
    """Its policy names the hashes of its own script and style, and no other place."""
    answer = http.get("/dashboard")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert re.search(r"script-src 'sha256-[^' ]+'; style-src 'sha256-[^' ]+'$", policy)
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import", answer.text)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_leads_to_the_page(http: httpx.Client, method: str) -> None:
    """A browser and a probing agent both end at the page."""
    first = http.request(method, "/")
    assert (first.status_code, first.headers["location"]) == (307, "dashboard")
    last = http.request(method, "/", follow_redirects=True)
    assert (last.status_code, last.url.path) == (200, "/dashboard")
    assert bool(last.text) == (method == "GET")
