"""Formats in which models write calls, except those described by a tokenizer's response template.

Most formats write a call's arguments as JSON between marks (`JsonFormat`, read by `json_calls.py`).
Others write each argument between tags, as plain text (`XmlFormat`, read by `xml_calls.py`).

Not for: finding a model's format (`dialogue.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CallFormat = Literal[
    "hermes", "llama3_json", "mistral", "mistral_v11", "tool_call_list", "qwen3_coder", "glm", "deepseek_v3",
    "deepseek_v31", "harmony", "response_template",
]  # fmt: skip
HERMES, LLAMA3_JSON, HARMONY, RESPONSE_TEMPLATE = "hermes", "llama3_json", "harmony", "response_template"

_SPACE = r"\s{0,99}"
_FUNCTION = r"[\w.-]{1,128}"
_NAME = rf"(?P<name>{_FUNCTION})"
CALL_LIST, LIST_MARK = "tool_call_list", "<|tool_call|>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
_HARMONY_NAME = rf"(?:functions\.)?{_NAME}"
_HARMONY_TYPE = r"\s{0,9}(?:<\|constrain\|>)?\s{0,9}\w{0,32}<\|message\|>" + _SPACE + r"\{"


@dataclass(frozen=True)
class JsonFormat:
    """Marks around a call's JSON: regular expressions after the previous part."""

    opens: Mapping[str, str]
    """Marks that begin a call, with patterns up to the object's first bracket."""
    after: str = ""
    """Pattern after the object; its group `more` leads to the next object's bracket."""
    close: str | None = None
    """Mark that ends a call whose JSON is invalid."""
    last: str | None = None
    """Mark after all calls."""
    is_named: bool = field(default=False)
    """Whether the opening has the function's name, and the object only the arguments."""


def _deepseek(head: str, before_end: str) -> JsonFormat:
    opens = {CALLS_BEGIN: f"{_SPACE}{BEGIN}{head}", BEGIN: head}
    return JsonFormat(opens, f"{_SPACE}{before_end}{END}", END, CALLS_END, is_named=True)


JSON_FORMATS: dict[str, JsonFormat] = {
    HERMES: JsonFormat({"<tool_call>": rf"{_SPACE}\{{"}, f"{_SPACE}</tool_call>", "</tool_call>"),
    # Mistral's tokenizers up to version 7 use one list of calls.
    "mistral": JsonFormat(
        {"[TOOL_CALLS]": rf"{_SPACE}\[{_SPACE}\{{"}, rf"{_SPACE}(?:(?P<more>,{_SPACE}\{{)|\])", is_named=False
    ),
    # From version 11 on each call has its mark, name and arguments.
    "mistral_v11": JsonFormat(
        {"[TOOL_CALLS]": rf"{_SPACE}{_NAME}(?:\[CALL_ID\]\w{{1,99}})?(?:\[ARGS\])?{_SPACE}\{{"}, is_named=True
    ),
    # Phi-4-mini and Granite 3 write one list of calls.
    CALL_LIST: JsonFormat(
        {LIST_MARK: rf"{_SPACE}\[{_SPACE}\{{"},
        rf"{_SPACE}(?:(?P<more>,{_SPACE}\{{)|\](?:{_SPACE}<\|/tool_call\|>)?)",
    ),
    "deepseek_v3": _deepseek(rf"function{SEPARATOR}{_NAME}\n{FENCE}json\n{_SPACE}\{{", f"{FENCE}{_SPACE}"),
    # The recipient comes before or after the channel.
    HARMONY: JsonFormat(
        {
            "<|channel|>": rf"\w{{1,32}}\s{{1,9}}to={_HARMONY_NAME}{_HARMONY_TYPE}",
            " to=": rf"{_HARMONY_NAME}\s{{0,9}}<\|channel\|>\w{{1,32}}{_HARMONY_TYPE}",
        },
        rf"{_SPACE}<\|call\|>",
        is_named=True,
    ),
    "deepseek_v31": _deepseek(rf"{_NAME}{SEPARATOR}{_SPACE}\{{", ""),
}


@dataclass(frozen=True)
class XmlFormat:
    """Tags around a call's arguments, as regular expressions, also of several words."""

    mark: str
    """Text with which a call begins."""
    opens: str
    """Begin of a call; the group `function` is its name."""
    parameter: str
    """Begin of an argument's value; the group `key` is its name."""
    value_end: str
    """Text that ends a value."""
    closes: str
    """End of a call."""
    padding: str = ""
    """Text at both ends of a value that is not a part of it."""


XML_FORMATS: dict[str, XmlFormat] = {
    "qwen3_coder": XmlFormat(
        mark="<tool_call>",
        opens=rf"<tool_call>{_SPACE}<function=(?P<function>[^<>\n]{{1,200}})>",
        parameter=r"<parameter=(?P<key>[^<>\n]{1,200})>",
        value_end="</parameter>",
        closes=rf"</function>{_SPACE}</tool_call>",
        padding="\n",
    ),
    # GLM 4.5 and later.
    "glm": XmlFormat(
        mark="<tool_call>",
        opens=rf"<tool_call>{_SPACE}(?P<function>{_FUNCTION})(?={_SPACE}(?:<arg_key>|</tool_call>))",
        parameter=rf"<arg_key>(?P<key>[^<>\n]{{1,200}})</arg_key>{_SPACE}<arg_value>",
        value_end="</arg_value>",
        closes="</tool_call>",
    ),
}


def call_marks(form: str | None) -> tuple[str, ...]:
    """Return the texts with which calls may begin, outermost first; empty if unknown."""
    if form == HARMONY:
        return ("<|start|>assistant to=",)
    if form in JSON_FORMATS:
        return tuple(JSON_FORMATS[form].opens)
    if form in XML_FORMATS:
        return (XML_FORMATS[form].mark,)
    return ("{",) if form == LLAMA3_JSON else ()
