"""Calls are read out of answers the same, however the text is cut into pieces."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Limits, Request
from server.serving.choice import CallPiece, Choice
from server.serving.filters import TextOptions
from server.text.answer_parts import part_reader
from server.text.call_formats import HERMES, LLAMA3_JSON, RESPONSE_TEMPLATE
from server.text.call_pieces import Piece
from server.text.thought_marks import MARKS
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server import call_spellings
from tests.server.step_results import outcome, stats
from tests.server.tiny_models import TOKENIZER

TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("weather", "add"))
TEMPLATE = {**call_spellings.RESPONSE_TEMPLATE, "start_anchor": "<|assistant|>"}
PARIS, SUM = '{"city": "Par\\"}is"}', '{"a": [1, {"b": 2}], "c": "}{"}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


UNKNOWN = "<call name=rm>{}</call>"
HALF = '{"a": "\\ud800"}'
BOTH = [("weather", PARIS), ("add", SUM)]
# (format, answer, its text, its calls)
# ... stands for the answer itself.
CASES: list[tuple[str, str, Any, list[tuple[str, str]]]] = [
    (HERMES, "Just text, 1 < 2.", "Just text, 1 < 2.", []),
    (HERMES, "Let me see. " + hermes("weather", PARIS), "Let me see. ", [BOTH[0]]),
    (HERMES, hermes("weather", PARIS) + "\n" + hermes("add", SUM), "", BOTH),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>', "", [("add", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "", [("add", "{}")]),
    (HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (HERMES, hermes("rm", "{}"), hermes("rm", "{}"), []),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
    (HERMES, '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (HERMES, "It begins <tool_ca", "It begins <tool_ca", []),
    (LLAMA3_JSON, "Just text {not json}.", "Just text {not json}.", []),
    (LLAMA3_JSON, llama("weather", PARIS), "", [BOTH[0]]),
    (LLAMA3_JSON, "\n<|python_tag|>" + llama("weather", PARIS) + "; " + llama("add", SUM), "", BOTH),
    (LLAMA3_JSON, llama("rm", "{}"), llama("rm", "{}"), []),
    (LLAMA3_JSON, '{"answer": 42} is it', ..., []),
    (LLAMA3_JSON, '{"a": 1}\n\nHere is; more', ..., []),
    (LLAMA3_JSON, '{"a": 1}; {"b": 2}', ..., []),
    (LLAMA3_JSON, '\n {"a": 1} ', ..., []),
    (LLAMA3_JSON, '{"a": 1}; ' + llama("add", SUM), ..., []),
    (LLAMA3_JSON, llama("add", SUM) + "; and more", "; and more", [("add", SUM)]),
    (HERMES, hermes("add", SUM) + "\n Hello big  world", "\n Hello big  world", [("add", SUM)]),
    (HERMES, '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>', ..., []),
    (HERMES, "<tool_call>" + "[" * 3000 + "</tool_call>", ..., []),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": "\\ud800"}')],
    ),
    (LLAMA3_JSON, '{"x":[' * 2000, ..., []),
    (RESPONSE_TEMPLATE, "hi <call name=add>5</call> so", ..., []),
    (
        RESPONSE_TEMPLATE,
        f"<call name=rm>{{}}</call> <call name=add>{SUM}</call>",
        "<call name=rm>{}</call> ",
        [("add", SUM)],
    ),
    (RESPONSE_TEMPLATE, "hi <call name=add>{bad json}</call> bye", ..., []),
    (RESPONSE_TEMPLATE, "<call name=add>" + "[" * 3000 + "</call>", ..., []),
    (LLAMA3_JSON, llama("add", SUM)[:-4], "", [("add", SUM[:-3])]),
    (LLAMA3_JSON, "<|pyth", "<|pyth", []),
    (RESPONSE_TEMPLATE, f"Hm. <call name=add>{SUM}</call>", "Hm. ", [("add", SUM)]),
    (RESPONSE_TEMPLATE, "<call name=add>{no</call> so", "<call name=add>{no</call> so", []),
]


def read(form: str, pieces: list[str], parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return (text, calls) of an answer in pieces, which must be the calls themselves."""
    reader = ToolCalls(ToolUse(TOOLS, form, parallel, forced=False), TEMPLATE)
    text, streamed = "", []
    for number, piece in enumerate(pieces):
        for part in reader.feed(piece, number == len(pieces) - 1):
            if isinstance(part, str):
                text += part
                continue
            if part.name is not None:
                assert part.index == len(streamed)
                streamed.append([part.name, ""])
            streamed[part.index][1] += part.arguments
    assert [[call.name, call.arguments] for call in reader.calls] == streamed
    return text, [(name, arguments) for name, arguments in streamed]


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
@settings(deadline=None)
@given(data=st.data())
def test_an_answer_in_any_pieces_has_the_same_text_and_calls(
    form: str, answer: str, text: str, calls: list[tuple[str, str]], data: Any
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    found_text, found_calls = read(form, pieces)
    text = answer if text is ... else text
    assert found_text == text
    if form == RESPONSE_TEMPLATE:
        assert [(name, json.loads(arguments)) for name, arguments in found_calls] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]
    else:
        assert found_calls == calls


def test_arguments_come_before_the_call_is_whole() -> None:
    reader = ToolCalls(ToolUse(TOOLS, HERMES, True, forced=False), None)
    assert not reader.feed('<tool_call>\n{"name": "add", "arg', False)
    assert reader.feed('uments": {"a"', False) == [Piece(0, "add", '{"a"')]
    assert reader.feed(": 1", False) == [Piece(0, None, ": 1")]
    assert reader.feed("}}\n</tool_call> Hello", False) == [Piece(0, None, "}"), " Hello"]


def test_one_call_ends_an_answer_that_may_have_one() -> None:
    reader = ToolCalls(ToolUse(TOOLS, HERMES, False, forced=False), None)
    reader.feed(hermes("add", "{}")[:-3], False)
    assert not reader.is_over
    reader.feed(hermes("add", "{}")[-3:], False)
    assert reader.is_over
    for form, spell in ((HERMES, hermes), (LLAMA3_JSON, llama)):
        reader = ToolCalls(ToolUse(TOOLS, form, False, forced=False), None)
        parts = reader.feed(spell("add", "{}") + "\n" + spell("weather", "{}") + " and more", False)
        assert [part.name for part in parts if isinstance(part, Piece)].count(None) == len(parts) - 1
        assert len(reader.calls) == 1
        assert reader.is_over


@pytest.mark.parametrize("behind", ["", "\n", "\n<tool_call>", ' and <tool_call>\n{"name": "nope"', " and more"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_text_after_the_only_call_is_dropped(form: str, behind: str) -> None:
    """However much of it comes with the call's last piece."""
    call = (hermes if form == HERMES else llama)("add", "{}")
    for cut in range(1, len(call) + 1):
        reader = ToolCalls(ToolUse(TOOLS, form, False, forced=False), None)
        parts = [
            *reader.feed("Well. " * (form == HERMES) + call[:cut], False),
            *reader.feed(call[cut:] + behind, False),
        ]
        assert "".join(part for part in parts if isinstance(part, str)) == "Well. " * (form == HERMES)
        assert "".join(part.arguments for part in parts if isinstance(part, Piece)) == "{}"
        assert reader.is_over


@pytest.mark.parametrize(("form", "spell"), [(HERMES, hermes), (LLAMA3_JSON, llama)])
def test_an_only_call_of_invalid_json_ends_the_answer(form: str, spell: Any) -> None:
    reader = ToolCalls(ToolUse(TOOLS, form, False, forced=False), None)
    parts = reader.feed(spell("add", '{"a": none}') + "; and more", False)
    assert reader.is_over
    assert all(isinstance(part, Piece) for part in parts)


def test_a_call_that_the_length_has_cut_has_not_ended() -> None:
    reader = ToolCalls(ToolUse(TOOLS, HERMES, False, forced=False), None)
    reader.feed(hermes("add", SUM)[:-30], True)
    assert reader.calls
    assert not reader.is_over


@pytest.mark.parametrize("tokens_a_step", [1, 2, 3, 100])
@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_tokens_behind_the_one_call_do_not_count(form: str, tokens_a_step: int) -> None:
    """Usage, token ids and metrics are of the answer, which ends with its call."""
    tokenizer = Tokenizer(str(TOKENIZER))
    call = (hermes if form == HERMES else llama)("add", "{}")
    own, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (call, "\n and much more"))
    tokens = [*own, *behind]
    use = ToolUse(TOOLS, form, False, forced=False)
    # A stop string that the call's end might begin holds its text back.
    options = TextOptions(stops=("}}} or </tool_call>!",), tools=use, reports_token_ids=True)
    request = Request(request_id="x", prompt_token_ids=(1,), limits=Limits(max_tokens=len(tokens)))
    choice = Choice(request, tokenizer, options)
    for begin in range(0, len(tokens), tokens_a_step):
        step = tokens[begin : begin + tokens_a_step]
        reason = "length" if begin + tokens_a_step >= len(tokens) else None
        choice.add(replace(outcome(1, 0), token_ids=step, finish_reason=reason), stats())
        if choice.finish_reason is not None:
            break
    assert choice.finish_reason == "tool_calls"
    assert choice.text == ""
    assert [(one.name, one.arguments) for one in choice.calls] == [("add", "{}")]
    assert choice.num_tokens == len(own)
    assert choice.token_ids == own
    tokenizer.close()


MESSAGES = {
    "harmony": (
        "<|channel|>commentary to=functions.add<|message|>CALL<|call|><|start|>assistant"
        "<|channel|>analysis<|message|>So.<|call|><|start|>assistant<|channel|>final<|message|>Done.",
        "CALL",
    ),
    "solar_open": (
        "<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>add<|tool_call:args|>CALL<|calls|><|begin|>assistant"
        "<|content|>Done.",
        "CALL<|calls|>",
    ),
}


@pytest.mark.parametrize("arguments", ['{"a": "1', '{"a": [1', '{"a": none}'])
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("form", MESSAGES)
def test_a_call_ends_with_its_message(form: str, is_parallel: bool, arguments: str) -> None:
    """Invalid JSON ends, too. An only call ends the answer."""
    text, shown = (part.replace("CALL", arguments) for part in MESSAGES[form])
    tokenizer = Tokenizer(str(TOKENIZER))
    use = ToolUse(TOOLS, form, is_parallel, forced=False)
    options = TextOptions(tools=use, thoughts=partial(part_reader, MARKS[form], "", False))
    choice = Choice(Request(request_id="x", prompt_token_ids=(1,)), tokenizer, options)
    parts: list[Any] = []
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for number, token in enumerate(tokens, start=1):
        reason = "length" if number == len(tokens) else None
        parts += choice.add(replace(outcome(1, 0), token_ids=[token], finish_reason=reason), stats())[0]
        if choice.finish_reason is not None:
            break
    assert [(one.name, one.arguments) for one in choice.calls] == [("add", shown)]
    later = [part for part in parts if not isinstance(part, CallPiece)]
    assert parts[len(parts) - len(later) :] == later
    assert (choice.text, choice.finish_reason) == (("Done.", "length") if is_parallel else ("", "stop"))
    tokenizer.close()
