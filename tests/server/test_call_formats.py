"""Calls in the formats of Mistral, Qwen3-Coder and DeepSeek, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import RequestError
from server.call_formats import TEMPLATES
from server.protocol import Function, Tool
from server.tool_calls import ToolCalls
from server.tools import HERMES, ToolUse, format_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = tuple(Tool(type="function", function=Function(name=name, parameters=PARAMETERS)) for name in ("weather", "add"))
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
Call = tuple[str, dict[str, Any]]


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def qwen3_coder(calls: list[Call]) -> str:
    def spell(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(spell(*call) for call in calls)


def deepseek_v3(calls: list[Call]) -> str:
    spelled = (f"{BEGIN}function{SEPARATOR}{name}\n```json\n{json.dumps(values)}\n```{END}" for name, values in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(spelled) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    spelled = (f"{BEGIN}{name}{SEPARATOR}{json.dumps(values)}{END}" for name, values in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(spelled) + "<｜tool▁calls▁end｜>"


SPELL = {spell.__name__: spell for spell in (mistral, mistral_v11, qwen3_coder, deepseek_v3, deepseek_v31)}
PARIS: Call = ("weather", {"city": 'Par }"]< is', "days": 3})
BOTH: list[Call] = [PARIS, ("add", {})]


def read(form: str, pieces: list[str], parallel: bool = True) -> tuple[str, list[Call]]:
    """(text, calls) of an answer."""
    reader = ToolCalls(ToolUse(TOOLS, form, parallel, forced=False), None)
    parts: list[Any] = []
    for number, piece in enumerate(pieces, start=1):
        parts += reader.feed(piece, number == len(pieces))
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, json.loads(call.arguments)) for call in reader.calls]


def test_every_format_is_tested() -> None:
    assert SPELL.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("form", SPELL)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_text_and_calls_are_told_apart(form: str, data: st.DataObject) -> None:
    """Arguments have the types of the function's schema, also where the format has none."""
    answer = "Let me see." + SPELL[form](BOTH)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(form, pieces) == ("Let me see.", BOTH)


@pytest.mark.parametrize("form", SPELL)
def test_what_is_no_call_stays_text(form: str) -> None:
    for answer in ("Just text, 1 < 2 [and] {so} on.", SPELL[form]([("rm", {})])):
        # The mark behind all calls is no text in any case.
        assert read(form, list(answer)) == (answer.removesuffix("<｜tool▁calls▁end｜>"), [])


@pytest.mark.parametrize("form", SPELL)
def test_what_is_no_call_is_said_once(form: str) -> None:
    """Also when text or a call stands behind it, which the parser has seen when it ends."""
    for behind, calls in (("done", []), (SPELL[form]([PARIS]), [PARIS])):
        if form == "mistral" and calls:
            continue  # one list is the whole answer
        answer = SPELL[form]([("rm", {})]).removesuffix("<｜tool▁calls▁end｜>") + behind
        text = answer.removesuffix(behind) if calls else answer
        if form == "mistral_v11" and not calls:
            continue  # text behind arguments makes no call of them in any case
        assert read(form, list(answer)) == (text, calls)
        assert read(form, [answer]) == (text, calls)


@pytest.mark.parametrize("form", SPELL)
def test_a_call_that_is_cut_is_no_call(form: str) -> None:
    """Half a call must not be made: the length cut it, or the client's stop string."""
    answer = SPELL[form]([PARIS]).removesuffix("<｜tool▁calls▁end｜>")
    for length in range(answer.index("weather") + 7, len(answer.rstrip())):
        text, calls = read(form, list(answer[:length]))
        assert not calls or calls == [PARIS], length
        assert not calls or answer[length:].strip() in (">", END, f"```{END}"), length
        assert calls or text.strip() == answer[:length].strip(), length


def test_a_mark_in_an_argument_is_text() -> None:
    call: Call = ("weather", {"city": "x [TOOL_CALLS] y"})
    assert read("mistral_v11", list(mistral_v11([call, ("add", {})]))) == ("", [call, ("add", {})])


@pytest.mark.parametrize("form", SPELL)
def test_one_call_alone(form: str) -> None:
    text, calls = read(form, list(SPELL[form](BOTH)), parallel=False)
    assert (text, calls) == ("", [PARIS])


@pytest.mark.parametrize("form", SPELL)
def test_such_calls_cannot_be_forced(form: str) -> None:
    with pytest.raises(RequestError, match="neither forced nor strict"):
        ToolUse(TOOLS, form, True, forced=True).structure()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("[TOOL_CALLS] {{ calls }}", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral_v11"),
        ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder"),
        (BEGIN + "{{ type }}" + SEPARATOR + "{{ name }}\n```json\n", "deepseek_v3"),
        (BEGIN + "{{ name }}" + SEPARATOR, "deepseek_v31"),
        ("<tool_call>{{ call }}</tool_call>", HERMES),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_seen_in_the_template(template: str, form: str | None) -> None:
    assert format_of("auto", template, None) == form
    assert format_of("llama3_json", template, None) == "llama3_json"
