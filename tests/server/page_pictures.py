"""Makes the pictures of docs/clients.md: `python -m tests.server.page_pictures`.

It asks a daemon with the demonstration pair, and needs Chromium and Pillow.
"""

from __future__ import annotations

import argparse
import shutil
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

SIZES = ((340, 860, False), (680, 860, True), (1300, 860, True))
"""Width, height, and whether drafts are drawn, of each window."""
MESSAGES = ("I would like to book a table for two tonight.", "In Paris, please.", "Seven o'clock.")
MARGIN, GROUND = 18, "#c9d1d9"


def main() -> None:
    """Write a picture of each colour scheme."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.page_pictures")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    asked = parser.parse_args()
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in schemes:
            windows = [window(browser, asked.url, scheme, *size) for size in SIZES]
            together(windows).save(asked.folder / f"live-page-{scheme}.webp", quality=80)


def window(
    browser: Browser, url: str, scheme: Literal["light", "dark"], width: int, height: int, with_drafts: bool
) -> Image.Image:
    """A window after a conversation."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    expect(page.locator("#status")).to_have_text("ready")
    page.click("#settings summary")
    page.fill("#temperature", "0.7")
    page.fill("#seed", "3")
    page.click("#settings summary")
    page.set_checked("#show-drafts", with_drafts)
    for number, message in enumerate(MESSAGES):
        page.fill("#message", message)
        page.press("#message", "Enter")
        expect(page.locator(".assistant")).to_have_count(number + 1)
        expect(page.locator("#send")).to_have_text("Send")
    page.wait_for_timeout(1500)
    picture = Image.open(BytesIO(page.screenshot()))
    page.close()
    return picture


def together(windows: list[Image.Image]) -> Image.Image:
    """Windows side by side."""
    width = sum(one.width for one in windows) + MARGIN * (len(windows) + 1)
    canvas = Image.new("RGB", (width, max(one.height for one in windows) + 2 * MARGIN), GROUND)
    left = MARGIN
    for one in windows:
        canvas.paste(one, (left, MARGIN))
        left += one.width + MARGIN
    return canvas


if __name__ == "__main__":
    main()
