"""Calls of functions, and readers of them, for tests of every format."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from server.text.call_pieces import Piece
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.call_spellings import BEGIN, CALLS_END, END, RESPONSE_TEMPLATE, SEPARATOR, SPELL, Call

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}},
}
TOOLS = tuple(Tool(type="function", function=Function(name=name, parameters=PARAMETERS)) for name in ("weather", "add"))
PARIS: Call = ("weather", {"city": 'Par }"]< is', "days": 3})
BOTH: list[Call] = [PARIS, ("add", {})]
BEFORE = {form: "" if form == "llama3_json" else "Let me see." for form in SPELL}
"""Text before the calls, in formats that have some."""
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=add>", "</function>", "<parameter=x>",
    "</parameter>", "<arg_key>x</arg_key>", "<arg_value>", "<|tool_call|>", BEGIN, SEPARATOR, END, CALLS_END, "\n```",
    "</call>", "<call name=add>", "<think>", "; ",
    "{", "}", "[", "]", '"', "\\", "\n", "<", ">", "/",
)  # fmt: skip
LISTING = """def read(text):
    if "<tool_call>" in text and text.endswith("</tool_call>"):
        return text[len('[TOOL_CALLS] [{"name": "add"}]'):]  # </function>
    return f"```json\\n{text}\\n```" + "</call>" + "\\u2581" + '\\\\'
"""


def pieces_of(
    form: str, pieces: list[str], parallel: bool = True, tools: tuple[Tool, ...] = TOOLS
) -> tuple[str, ToolCalls]:
    """(text, reader) of an answer in pieces; the pieces of calls add up to the calls."""
    reader = ToolCalls(ToolUse(tools, form, parallel, forced=False), RESPONSE_TEMPLATE)
    text, streamed = "", []
    for number, piece in enumerate(pieces, start=1):
        for part in reader.feed(piece, number == len(pieces)):
            if isinstance(part, Piece):
                streamed += [[part.name, ""]] if part.name is not None else []
                assert part.index == len(streamed) - 1
                streamed[-1][1] += part.arguments
            else:
                text += part
    assert [[call.name, call.arguments] for call in reader.calls] == streamed
    return text, reader


def read(
    form: str, pieces: list[str], parallel: bool = True, tools: tuple[Tool, ...] = TOOLS
) -> tuple[str, list[Call]]:
    """(text, calls) of an answer."""
    text, reader = pieces_of(form, pieces, parallel, tools)
    return text, [(call.name, json.loads(call.arguments)) for call in reader.calls]


CASES: dict[str, list[Call]] = {
    "one call": [PARIS],
    "several calls": [*BOTH, ("weather", {"city": "Rome"})],
    "no arguments": [("add", {})],
    "marks in strings": [("weather", {"city": f"x {mark} y"}) for mark in MARKS],
    "marks alone": [("weather", {"city": mark}) for mark in MARKS if mark not in ("\n", "</parameter>")],
    "code": [("weather", {"code": LISTING, "days": 1}), ("add", {"code": LISTING})],
    "other letters": [("weather", {"city": "Zürich, 東京, 😀, \u2028"})],
}
DEFINITIONS: dict[str, Any] = {
    "Whole": {"type": "integer"},
    "Name": {"type": "string"},
    "Unit": {"enum": ["C", "5", True]},
    "Node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}},
    "a/b~c": {"type": "boolean"},
}
PLAIN_SCHEMAS = st.sampled_from(
    [{"type": name} for name in ("string", "integer", "number", "boolean", "null", "array", "object")]
    + [{"$ref": f"#/$defs/{name}"} for name in ("Whole", "Name", "Unit", "Node", "a~1b~0c")]
    + [{}, {"enum": [1, "x"]}, {"enum": ["7", None]}, {"const": "true"}, {"const": 4}]
    + [{"type": ["integer", "string"]}, {"type": ["boolean", "null"]}]
)
SCHEMAS = st.recursive(
    PLAIN_SCHEMAS,
    lambda inner: st.builds(
        lambda name, some: {name: some}, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=4,
)
FORM_OF = {
    "hermes": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama3_one_call": "llama3_json",
    "mistral": "mistral",
    "mistral_v11": "mistral_v11",
    "qwen3_coder": "qwen3_coder",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "response_template": "response_template",
    "families/glm4": "glm",
    "families/glm47": "glm",
    "families/deepseek_r1_distill": "deepseek_v3",
}
"""Formats by template."""
