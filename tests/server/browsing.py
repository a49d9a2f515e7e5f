"""The live page in a browser, for its tests."""

from __future__ import annotations

import json
from typing import Any, Literal

from playwright.sync_api import Browser, Page, Route, expect

Scheme = Literal["light", "dark"]
# An answer may take long on a busy machine.
expect.set_options(timeout=30_000)


def opened(
    browser: Browser, url: str, path: str = "/", width: int = 1440, scheme: Scheme = "light"
) -> tuple[Page, list[str]]:
    """Return (the page, its console, errors and requests elsewhere, which must stay empty)."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
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


def add_to_bodies(page: Page, **fields: Any) -> None:
    """Add fields to the requests that the page sends."""

    def changed(route: Route) -> None:
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data or "") | fields))

    page.route("**/v1/**", changed)


def let_answer(page: Page, text: str) -> None:
    """Let the model answer with a text."""
    add_to_bodies(page, structured_outputs={"choice": [text]})


def bodies_of(page: Page) -> list[dict[str, Any]]:
    """Bodies of the requests that the page sends from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(json.loads(request.post_data or "")))
    return bodies


def send(page: Page, text: str) -> str:
    """Send a message by the keyboard, and wait for its answer; the answer's text."""
    before = page.locator(".assistant").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    expect(page.locator(".assistant")).to_have_count(before + 1)
    expect(page.locator("#send")).to_have_text("Send")
    return page.locator(".assistant .text:not(.thought)").last.text_content() or ""
