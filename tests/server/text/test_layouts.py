"""Every layout is recognised, shows turns in order, and reads its answers back at every cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.api import RequestError
from server.text import rendering
from server.text.answer_parts import part_reader
from server.text.call_formats import call_marks
from server.text.dialogue import Dialogue, dialogue_of
from server.text.reasoning import Thought, is_open
from server.text.thought_calls import ThoughtCalls
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse, template_message, tool_use_of
from server.wire.fields import ChatRequest, Message
from tests.server.call_spellings import Call
from tests.server.daemon_process import ROOT
from tests.server.text.layouts import LAYOUTS, Layout
from tests.server.text.test_turns import called
from tests.wrong import instead

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "number"}},
        "more": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": PARAMETERS}}
    for name in ("weather", "now")
]
CALLS: list[Call] = [
    ("weather", {"city": "Zürich, it's <so>", "days": 3, "parts": [1, 2.5], "more": {"deep": True}}),
    ("now", {}),
]
Known = tuple[Layout, Tokenizer, Dialogue]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def known(request: pytest.FixtureRequest) -> Iterator[Known]:
    layout: Layout = request.param
    tokenizer = layout.tokenizer()
    yield layout, tokenizer, dialogue_of(tokenizer, "auto", "auto")
    tokenizer.close()


def use_of(layout: Layout) -> ToolUse:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS})
    use = tool_use_of(body, layout.calls)
    assert use is not None
    return use


def rendered(known: Known, turns: list[dict[str, Any]], **variables: Any) -> str:
    layout, tokenizer, _ = known
    messages = [template_message(Message.model_validate(turn), number) for number, turn in enumerate(turns)]
    return tokenizer.render_chat(
        messages, variables=variables, tools=TOOLS if layout.shows_tools else (), call_marks=call_marks(layout.calls)
    )


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "First question."}]


def test_a_layout_is_recognised(known: Known) -> None:
    layout, _, dialogue = known
    assert dialogue.warnings == ()
    if layout.shows_tools:
        assert (dialogue.call_format, dialogue.tools_refusal) == (layout.calls, "")
    else:
        assert "no place for tools" in dialogue.tools_refusal


def test_three_turns_are_shown_in_order(known: Known) -> None:
    """Text before calls, results after them, and an end that opens the next answer."""
    layout, _, _ = known
    turns = list(QUESTION)
    if layout.shows_tools:
        turns += called("Let me see.", [(name, json.dumps(made)) for name, made in CALLS])
    turns += [{"role": "assistant", "content": "An answer."}, {"role": "user", "content": "Second question."}]
    prompt = rendered(known, turns)
    shown = ["Be brief.", "First question.", "Let me see.", "result 0", "result 1", "An answer.", "Second question."]
    places = [
        prompt.index(text) for text in shown if layout.shows_tools or ("see" not in text and "result" not in text)
    ]
    assert places == sorted(places)
    assert prompt.rpartition("question.")[2] == rendered(known, QUESTION).rpartition("question.")[2]
    if layout.shows_tools:
        history = prompt.partition("First question.")[2].partition("result 0")[0]
        reader = ToolCalls(use_of(layout), None)
        reader.feed(history, True)
        assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == CALLS


def read(known: Known, prompt: str, pieces: list[str]) -> tuple[str, str, list[Call]]:
    """(thoughts, text, calls) of an answer."""
    layout, _, dialogue = known
    calls = ToolCalls(use_of(layout), None) if layout.calls else None
    parts: list[Any] = []
    if dialogue.thoughts is None:
        parts = list(pieces)
    else:
        reader = part_reader(
            dialogue.thoughts,
            prompt,
            is_open(prompt, dialogue.thoughts),
            lambda: ThoughtCalls(use_of(layout), None),
        )
        for number, piece in enumerate(pieces, start=1):
            parts += reader.feed(piece, number == len(pieces))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    said = "".join(part for part in parts if not isinstance(part, Thought))
    if calls is None:
        return thoughts, said, []
    text = "".join(part for part in calls.feed(said, True) if isinstance(part, str))
    return thoughts, text, [(call.name, json.loads(call.arguments)) for call in calls.calls]


def test_an_answer_is_read_at_every_cut(known: Known) -> None:
    """Thoughts, text and two calls; and calls inside open thoughts between marks."""
    layout, _, dialogue = known
    on = dialogue.thinking.on
    prompt = rendered(known, QUESTION, **(on.variables if on else {}))
    opened = dialogue.thoughts is not None and is_open(prompt, dialogue.thoughts)
    thought = "Hm, <so>?" if dialogue.thoughts else ""
    text = "" if layout.calls == "pythonic" else "Let me see."
    calls = CALLS if layout.calls else []
    answer = layout.answer(dialogue, opened, thought, text, calls)
    for pieces in ([answer], list(answer), *([answer[:cut], answer[cut:]] for cut in range(1, len(answer), 5))):
        assert read(known, prompt, pieces) == (thought, text, calls), pieces
    if dialogue.thoughts is not None and layout.calls and dialogue.thoughts.lead == "":
        inside = answer.replace(dialogue.thoughts.close + text, " ")
        assert read(known, prompt, list(inside)) == (thought, "", calls)


def test_the_table_of_the_documentation_is_this_one(known: Known) -> None:
    layout, _, dialogue = known
    page = (ROOT / "docs" / "models.md").read_text()
    rows = page.partition("| layout |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows[LAYOUTS.index(layout)] == layout.documented(dialogue)
    assert len(rows) == len(LAYOUTS)


def test_ids_of_our_own_lose_kimis_names() -> None:
    """A wrong variant that keeps the ids of a history, whatever server made them."""
    layout = next(layout for layout in LAYOUTS if layout.name == "kimi_k25")
    tokenizer = layout.tokenizer()
    kimi = (layout, tokenizer, dialogue_of(tokenizer, "auto", "auto"))
    turns = [*QUESTION, *called(None, [("weather", '{"days": 3}'), ("now", "{}")])]
    prompt = rendered(kimi, turns)
    assert "functions.weather:0<|tool_call_argument_begin|>" in prompt
    assert "## Return of functions.now:1\nresult 1" in prompt
    with instead(rendering, "with_named_ids", lambda right, messages: messages), pytest.raises(RequestError):
        rendered(kimi, turns)
    tokenizer.close()
