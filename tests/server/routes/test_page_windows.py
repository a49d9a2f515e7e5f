"""The live page in windows of both sizes and schemes: layout, theme, first screen, axe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.browsing import add_to_bodies, opened, send, set_up
from tests.server.daemon_process import MODEL, Daemon

pytestmark = pytest.mark.slow
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Browser, daemon: Daemon) -> Iterator[Page]:
    """The page in a window; it may note nothing in its console and ask no other host."""
    size, scheme = request.param
    found, noted = opened(browser, daemon.url, width=SIZES[size][0], scheme=scheme)
    found.set_viewport_size({"width": SIZES[size][0], "height": SIZES[size][1]})
    expect(found.locator("#status")).to_have_text("ready")
    yield found
    assert noted == []
    found.close()


def background(page: Page) -> str:
    """The colour of the ground."""
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def test_the_composer_is_at_the_bottom_and_nothing_is_empty(page: Page) -> None:
    """A first screen has no chart; on a phone facts fold, and figures are behind a tab."""
    height = page.viewport_size["height"] if page.viewport_size else 0
    is_phone = page.is_visible("#tabs")
    page.route("**/dashboard/state", lambda route: route.fulfill(json=IDLE))
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    page.wait_for_function("document.querySelector('#model').textContent === 'idle'")
    for selector in ("#figures", "#running", "#legend", "#problem"):
        assert not page.is_visible(selector), selector
    assert page.is_visible("#theme") != is_phone
    assert page.is_visible("#no-figures") != is_phone
    page.unroute("**/dashboard/state")
    expect(page.locator("#model")).to_have_text(MODEL)
    set_up(page, length="8")
    for _ in range(3):
        send(page, "hello\n" * 5)
        box = page.locator("#ask").bounding_box()
        assert box
        assert height - 30 < box["y"] + box["height"] < height
    assert page.evaluate("document.documentElement.scrollHeight") <= height
    if is_phone:
        page.click("#tabs [data-tab=now]")
        expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#chart-rate path").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"


IDLE: dict[str, Any] = {
    "model": "idle",
    "status": "ready",
    "about": None,
    "time_s": 1.0,
    "num_running": 0,
    "num_waiting": 0,
    "kv_cache_usage": 0.0,
    "totals": {"tokens": 0, "passes": 0, "spec_steps": 0, "spec_tokens": 0, "resting": 0},
    "timing": {},
    "requests": [],
    "num_requests": 0,
}


def test_the_theme_is_chosen_and_stays(page: Page) -> None:
    system = background(page)
    if page.is_visible("#facts summary"):
        page.click("#facts summary")
    seen = []
    for theme in ("light", "dark"):
        page.select_option("#theme", theme)
        seen.append(background(page))
    assert len(set(seen)) == 2
    assert system in seen
    page.reload()
    assert background(page) == seen[1]


def test_the_keyboard_reaches_everything(page: Page) -> None:
    """A message, its answer's buttons and figure, by keys alone; Escape stops an answer."""
    set_up(page, length="8")
    page.focus("#message")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".figure")).to_be_visible()
    reached = []
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert {"Edit", "Copy", "Regenerate"} <= set(reached)
    assert any("tokens per pass" in text for text in reached)
    add_to_bodies(page, ignore_eos=True, max_tokens=1800)
    page.focus("#message")
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant").last.locator("[title]").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".summary").last).to_have_text("stopped")


def test_axe_finds_nothing_serious(page: Page) -> None:
    """Neither on a first screen nor with answers, their drafts, settings and the other tabs."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check() -> None:
        found = axe.run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious] == []

    check()
    set_up(page, length="24", chains="3")
    send(page, "hello")
    page.check("#show-drafts")
    page.focus(".figure")
    page.click("#settings summary")
    check()
    if page.is_visible("#tabs"):
        page.click("#facts summary")
        for tab in ("talks", "now"):
            page.click(f"#tabs [data-tab={tab}]")
            check()
