"""The live page and the API's description in a real browser, on a real daemon."""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.browsing import add_to_bodies, bodies_of, let_answer, opened, send, set_up
from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon

pytestmark = pytest.mark.slow
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
MARKDOWN = """# Title of *it*

One **bold** word, `a < b`, a [link](https://example.org/a "t") and https://example.org/b.

- first
  - inner
- [x] second

3. three

> quoted

| left | right |
| --- | ---: |
| `x` | |

```py
if a < b:
    print("<b>")
```
"""
HOSTILE_MARKDOWN = [
    "[a](javascript:alert(1)) [b](data:text/html,x) <javascript:alert(2)> [c](/docs) [d](vbscript:x) [e](//evil.org)",
    "![i](https://evil.example/x.png) <img src=https://evil.example/y onerror=alert(3)> <a href='javascript:x'>z</a>",
    "<script>\nalert(4)\n</script>\n\n<svg onload=alert(5)>\n\n<style>* { display: none }</style>",
    r"$\href{javascript:alert(8)}{x} \includegraphics{https://evil.example/z.png} \class{card}{y}$",
    "```<script>alert(6)</script>\n</code></pre><script>7</script>\n```\n\n| <b onclick=x>1</b> |\n|--|\n| &lt; |",
]


class Link(NamedTuple):
    """Address of a link."""

    href: str
    protocol: str


def links_of(page: Page) -> list[Link]:
    """The links of all turns."""
    found = page.locator("#turns a").evaluate_all("links => links.map(link => [link.href, link.protocol])")
    return [Link(*one) for one in found]


@pytest.mark.parametrize("width", [360, 1440])
def test_a_conversation_survives_a_reload(browser: Browser, daemon: Daemon, width: int) -> None:
    """The second request has the first turn, the system prompt and the seed."""
    page, noted = opened(browser, daemon.url, width=width)
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#about")).to_contain_text("bv_race, up to 4 drafts of 5 tokens")
    bodies = bodies_of(page)
    defaults = httpx.get(f"{daemon.url}/dashboard/state").json()["about"]["sampling"]
    for name, value in defaults.items():
        expect(page.locator(f"#{name}")).to_have_attribute("placeholder", f"{value:g}")
    set_up(page, system="Be brief.", seed="7", length="12", chains="3", depth="3", top_p="0.9")
    first = send(page, "hello")
    page.press("#message", "Enter")  # of an empty message
    second = send(page, "and then?")
    assert first
    assert second
    assert len(bodies) == 2
    assert bodies[1]["seed"] == 7
    assert bodies[1]["top_p"] == 0.9
    assert not {"temperature", "top_k", "min_p", "repetition_penalty"} & set(bodies[1]), "the model's own defaults"
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
    expect(page.locator(".assistant")).to_have_count(2)
    assert page.inner_text("#turns") == shown
    assert page.input_value("#system") == "Be brief."
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
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
        "[...document.querySelectorAll('.assistant .text [title]')].map(s => s.textContent).join('')"
    )
    assert coloured == answer
    marked = page.locator(".assistant .text [class]").evaluate_all("spans => spans.map(span => span.className)")
    assert all(name.startswith("draft-") for name in marked), "the target's own tokens are plain"
    expect(page.locator(".figure")).to_have_text(re.compile(r"^[1-4]\.\d tokens per pass$"))
    page.focus(".figure")
    expect(page.locator("#tip")).to_contain_text("in passes with drafts")
    expect(page.locator("#tip")).to_contain_text("the target's own: ")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    expect(page.locator("#count-length")).to_contain_text("mean of ")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == answer
    assert noted == []
    page.close()


def test_an_answer_of_markup_stays_text(browser: Browser, daemon: Daemon) -> None:
    """A model that writes scripts writes text, in the answer, in the drafts, and after a reload."""
    page, noted = opened(browser, daemon.url)
    let_answer(page, HOSTILE)
    page.check("#show-drafts")
    assert send(page, HOSTILE) == HOSTILE
    for _ in range(2):
        expect(page.locator(".assistant .foot")).to_be_visible()
        assert page.locator(".user .text").text_content() == HOSTILE
        assert page.locator(".assistant .text:not(.thought)").text_content() == HOSTILE
        assert page.locator("#turns script, #turns img").count() == 0
        assert page.title() == "<script>alert(1)</script><img src=x onerror=aler · Polydraft"
        page.reload()
    assert noted == []
    page.close()


@pytest.mark.parametrize("text", HOSTILE_MARKDOWN)
def test_markdown_runs_nothing_and_loads_nothing(browser: Browser, daemon: Daemon, text: str) -> None:
    """Links lead to web pages alone; images, scripts and styles are never elements."""
    page, noted = opened(browser, daemon.url)
    let_answer(page, text)
    send(page, "hello")
    for _ in range(2):
        expect(page.locator(".assistant .foot")).to_be_visible()
        assert page.locator("#turns :is(script, img, style, svg:not(.step svg), [onclick], [onload], b)").count() == 0
        assert {link.protocol for link in links_of(page)} <= {"https:"}
        page.reload()
    page.uncheck("#markdown")
    assert page.locator(".assistant .text:not(.thought)").text_content() == text
    assert noted == []
    page.close()


def test_an_answer_is_shown_as_markdown(browser: Browser, daemon: Daemon) -> None:
    """Letters keep their origins, and the switch shows the text as written."""
    page, noted = opened(browser, daemon.url)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    let_answer(page, MARKDOWN)
    send(page, "hello")
    answer = page.locator(".assistant .text:not(.thought)")
    for selector, text in {
        "h1 em": "it",
        "strong": "bold",
        "p > code": "a < b",
        "ul ul li": "inner",
        "ul > li > span": "☑ second",
        "ol[start='3'] li": "three",
        "blockquote": "quoted",
        "td.left code": "x",
        "td.right": "",
        "pre": 'if a < b:\n    print("<b>")',
        ".code-bar > span": "py",
    }.items():
        assert (answer.locator(selector).first.text_content() or "").strip() == text, selector
    assert [link.href for link in links_of(page)] == ["https://example.org/a", "https://example.org/b"]
    expect(answer.locator(".tok-keyword")).to_have_text("if")
    expect(answer.locator(".tok-string [title]")).not_to_have_count(0)
    origins = answer.locator("pre code [title]").all_text_contents()
    assert "".join(origins) == answer.locator("pre code").text_content()
    answer.locator(".copy-code").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == 'if a < b:\n    print("<b>")'
    page.uncheck("#markdown")
    assert answer.text_content() == MARKDOWN
    page.reload()
    expect(answer).to_have_count(1)
    assert answer.text_content() == MARKDOWN
    page.select_option("#kind", "text", force=True)
    assert send(page, "hello") == MARKDOWN
    page.check("#markdown")
    assert answer.first.locator("h1").count() == 1
    assert answer.last.text_content() == MARKDOWN, "a plain text that was continued is no Markdown"
    assert noted == []
    page.close()


SELECT_FIRST = """() => new MutationObserver(() => {
  const items = document.querySelectorAll('.assistant li');
  if (window.chosen || items.length < 2) return;
  window.chosen = items[0];
  window.numItems = items.length;
  getSelection().selectAllChildren(items[0]);
}).observe(document.getElementById('turns'), {childList: true, subtree: true, characterData: true})"""


def test_a_selection_stays_while_the_answer_grows(browser: Browser, daemon: Daemon) -> None:
    """Within the block that grows, and after the blocks that have followed it."""
    page, noted = opened(browser, daemon.url)
    let_answer(page, "".join(f"- item **{number}** of the list\n" for number in range(12)) + "\nend\n\nof it")
    page.evaluate(SELECT_FIRST)
    send(page, "hello")
    assert page.evaluate("window.numItems") < 12, "the list was still growing"
    assert page.locator(".assistant li").count() == 12
    assert page.evaluate("window.chosen.isConnected")
    assert page.evaluate("getSelection().toString()").strip() == "item 0 of the list"
    assert noted == []
    page.close()


def test_finished_answer_stays_visible(browser: Browser, daemon: Daemon) -> None:
    """Without drafts its tokens have no colours."""
    page, noted = opened(browser, daemon.url)
    bodies = bodies_of(page)
    add_to_bodies(page, ignore_eos=True, max_tokens=130)
    page.check("#show-drafts")
    page.fill("#message", "hello")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("you")
    assert page.input_value("#message") == "hello\nyou"
    for number in (1, 2):
        send(page, "hello\nyou")
        expect(page.locator(".step").last).not_to_be_in_viewport()
        expect(page.locator(".figure").nth(number - 1)).to_be_in_viewport()
        page.click("#settings summary")
        page.uncheck("#speculate")
        page.click("#settings summary")
    assert all("max_tokens" not in body for body in bodies), "an answer may use the room in the context"
    assert bodies[1]["messages"][0]["content"] == "hello\nyou"
    expect(page.locator(".figure").last).to_have_text("no drafts: they are switched off in the settings")
    assert page.locator(".assistant").last.locator("[class^=draft]").count() == 0
    page.wait_for_timeout(1500)
    expect(page.locator("#tile-rate")).not_to_have_text("0")
    assert not page.is_visible("#demo-note"), "of another model"
    assert noted == []
    page.close()


def test_a_refused_message_can_be_sent_again(browser: Browser, daemon: Daemon) -> None:
    """The message is in its field again; a stopped answer stays."""
    page, _ = opened(browser, daemon.url)
    set_up(page, chains="1000")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    expect(page.locator("#problem")).to_contain_text("num_drafts")
    assert page.input_value("#message") == "hello"
    assert page.locator(".turn").count() == 0
    set_up(page, chains="2", length="1800")
    add_to_bodies(page, ignore_eos=True)
    page.press("#message", "Enter")
    expect(page.locator(".assistant .text [class]").first).to_be_visible()
    expect(page.locator("#send")).to_have_text("Stop")
    page.press("#message", "Enter")
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".summary")).to_contain_text("stopped")
    assert page.locator(".assistant .text:not(.thought)").text_content()
    page.close()


def test_a_wrong_key_is_named(browser: Browser, one_seat: Daemon) -> None:
    """A missing key and a wrong one differ; the right one is kept for the tab."""
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
