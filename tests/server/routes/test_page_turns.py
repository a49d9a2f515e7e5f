"""Turns of the live page in a browser: branches, conversations, thoughts, calls, formulas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.server.browsing import bodies_of, let_answer, opened, send, set_up
from tests.server.daemon_process import Daemon

pytestmark = pytest.mark.slow
WINDOWS = [pytest.param((1440, "light"), id="desktop"), pytest.param((390, "dark"), id="phone")]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(params=WINDOWS)
def page(request: pytest.FixtureRequest, browser: Browser, daemon: Daemon) -> Iterator[Page]:
    """The page in a window; it may note nothing in its console and ask no other host."""
    width, scheme = request.param
    found, noted = opened(browser, daemon.url, width=width, scheme=scheme)
    expect(found.locator("#status")).to_have_text("ready")
    yield found
    assert [line for line in noted if not line.startswith("blob:")] == []
    found.close()


def stream(page: Page, *deltas: dict[str, Any]) -> None:
    """Let requests be answered with these deltas."""
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/**", answer)


def texts(page: Page) -> list[str]:
    """The texts of the shown branch."""
    return page.locator(".turn .text:not(.thought)").all_text_contents()


def conversations(page: Page) -> list[str]:
    """Show the list of conversations, and return their names."""
    if page.is_visible("#tabs"):
        page.click("#tabs [data-tab=talks]")
    return page.locator("#talks-list button").all_text_contents()


def test_regenerated_answers_and_changed_messages_are_branches(page: Page) -> None:
    let_answer(page, "first")
    send(page, "hello")
    let_answer(page, "second")
    page.click("text=Regenerate")
    expect(page.locator(".versions")).to_have_text(["", "<2 / 2>"])
    expect(page.locator("#send")).to_have_text("Send")
    assert texts(page) == ["hello", "second"]
    page.get_by_label("previous version").click()
    assert texts(page) == ["hello", "first"]
    expect(page.get_by_label("next version")).to_be_focused()
    bodies = bodies_of(page)
    page.click("text=Edit")
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)
    page.click("text=Edit")
    page.get_by_label("changed message").fill("goodbye")
    page.click(".edit >> text=Send")
    expect(page.locator(".user .versions")).to_have_text("<2 / 2>")
    expect(page.locator("#send")).to_have_text("Send")
    assert texts(page) == ["goodbye", "second"]
    assert [message["content"] for message in bodies[0]["messages"]] == ["goodbye"]
    page.locator(".user").get_by_label("previous version").click()
    assert texts(page) == ["hello", "second"]
    page.reload()
    expect(page.locator(".user .versions")).to_have_text("<1 / 2>")


def test_conversations_have_names_and_files(page: Page, tmp_path: Path) -> None:
    let_answer(page, "yes")
    send(page, "The first of them")
    conversations(page)
    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    assert page.title() == "Polydraft"
    send(page, "The second of them")
    page.fill("#name", "renamed: a/b")
    page.press("#name", "Enter")
    expect(page).to_have_title("renamed: a/b · Polydraft")
    page.reload()
    expect(page).to_have_title("renamed: a/b · Polydraft")
    assert conversations(page) == ["renamed: a/b", "The first of them"]
    for button, name in (("#save-json", "renamed-a-b.json"), ("#save-markdown", "renamed-a-b.md")):
        with page.expect_download() as download:
            page.click(button)
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
    saved = json.loads((tmp_path / "renamed-a-b.json").read_text())
    assert [turn["text"] for turn in saved["turns"]] == ["The second of them", "yes"]
    markdown = "# renamed: a/b\n\n## You\n\nThe second of them\n\n## Model\n\nyes\n"
    assert (tmp_path / "renamed-a-b.md").read_text() == markdown
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    expect(page.locator("#talks-list button")).to_have_text(["The first of them"])
    page.click("text=The first of them")
    expect(page.locator(".turn .text:not(.thought)")).to_have_text(["The first of them", "yes"])
    page.reload()
    assert conversations(page) == ["The first of them"]


def test_two_tabs_lose_no_turn_of_a_conversation(page: Page) -> None:
    """The tab that stores last makes a copy."""
    let_answer(page, "yes")
    send(page, "hello")
    with page.context.expect_page() as popup:
        page.evaluate("open('dashboard')")
    other = popup.value
    expect(other.locator("#status")).to_have_text("ready")
    conversations(other)
    other.locator("#talks-list button").click()
    expect(other.locator(".turn")).to_have_count(2)
    for one in (other, page):
        let_answer(one, "more")
        send(one, "again")
    other.reload()
    expect(other.locator(".turn")).to_have_count(4)
    conversations(other)
    expect(other.locator("#talks-list button")).to_have_count(2)


def test_a_stopped_answer_and_its_conversation_stay(page: Page) -> None:
    set_up(page, length="1800")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    expect(page.locator(".assistant .text [title]").first).to_be_visible()
    conversations(page)
    page.click("#new")
    expect(page.locator("#send")).to_have_text("Send")
    conversations(page)
    page.locator("#talks-list button").click()
    expect(page.locator(".summary")).to_have_text("stopped")


def test_thoughts_fold_when_the_answer_begins(page: Page) -> None:
    stream(page, {"reasoning_content": "Let me see."}, {"content": "It is so."})
    send(page, "why?")
    thoughts = page.locator("details.fold")
    expect(thoughts).not_to_have_attribute("open", "")
    thoughts.locator("summary").click()
    expect(page.locator(".thought")).to_be_visible()
    assert texts(page) == ["why?", "It is so."]


def test_calls_are_shown_and_their_results_sent(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"place": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    stream(page, {"tool_calls": [call]}, {"tool_calls": [rest]})
    bodies = bodies_of(page)
    set_up(page, tools=json.dumps([TOOL]))
    send(page, "weather?")
    expect(page.locator(".call summary")).to_have_text("Call of look")
    expect(page.locator(".call pre")).to_have_text('{\n  "place": "Paris"\n}')
    page.fill(".call textarea", "sunny")
    stream(page, {"content": "It is sunny."})
    send(page, "")
    assert bodies[0]["tools"] == [TOOL]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    page.reload()
    page.uncheck("#markdown")
    expect(page.locator(".call textarea")).to_have_value("sunny")
    set_up(page, tools="[")
    page.fill("#message", "again")
    page.press("#message", "Enter")
    expect(page.locator("#problem")).to_contain_text('"Tools" in the settings is not JSON')


def test_formulas_are_drawn_and_prices_are_not(page: Page) -> None:
    text = "So $a^2$ and \\(b_1\\):\n\n$$\n\\frac{1}{2}\n$$\n\n\\[\nx = \\sqrt{y}\n\\]\n\nIt costs $5 or $6, `$c$`."
    stream(page, {"content": text})
    send(page, "hello")
    assert page.locator("math").count() == 4
    expect(page.locator("math[display=block] mfrac")).to_be_visible()
    assert page.locator(".formula").last.get_attribute("title") == "\\[\nx = \\sqrt{y}\n\\]"
    expect(page.locator(".assistant .text").last).to_contain_text("It costs $5 or $6, $c$.")
