"""Formats in which models write calls, except those described by a tokenizer's response template.

Most formats write a call's arguments as JSON between marks (`JsonFormat`, read by `json_calls.py`).
Others write each argument between tags, as plain text (`XmlFormat`, read by `xml_calls.py`), or as
literals (`LiteralFormat`, read by `literal_calls.py`).

Not for: finding a model's format (`dialogue.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CallFormat = Literal[
    "hermes", "llama3_json", "mistral", "mistral_v11", "tool_call_list", "qwen3_coder", "glm", "deepseek_v3",
    "deepseek_v31", "harmony", "response_template", "falcon_h1", "nemotron_v2", "kimi_k2", "solar_open", "minimax_m2",
    "minimax_m3", "deepseek_v32", "deepseek_v4", "hy3", "hy3_opensource", "gemma4", "lfm2", "pythonic", "kimi_k3",
]  # fmt: skip
HERMES, LLAMA3_JSON, HARMONY, RESPONSE_TEMPLATE = "hermes", "llama3_json", "harmony", "response_template"
GEMMA4, LFM2, PYTHONIC, KIMI_K3 = "gemma4", "lfm2", "pythonic", "kimi_k3"
LFM2_MARK = "<|tool_call_start|>"

_SPACE = r"\s{0,99}"
_FUNCTION = r"[\w.-]{1,128}"
_NAME = rf"(?P<name>{_FUNCTION})"
CALL_LIST, LIST_MARK = "tool_call_list", "<|tool_call|>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
KIMI_K2, KIMI_BEGIN, KIMI_END = "kimi_k2", "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
"""Marks of the published form, and of one that models write, too."""
SOLAR, SOLAR_BEGIN, SOLAR_NAME = "solar_open", "<|tool_call:begin|>", "<|tool_call:name|>"
DSML = "｜DSML｜"
MINIMAX = "]<]minimax[>["
"""Text with which every tag of MiniMax M3 begins."""
_HARMONY_NAME = rf"(?:functions\.)?{_NAME}"
_HARMONY_TYPE = r"\s{0,9}(?:<\|constrain\|>)?\s{0,9}\w{0,32}<\|message\|>" + _SPACE + r"\{"


@dataclass(frozen=True)
class JsonFormat:
    """Marks around a call's JSON. Patterns are matched at the end of the previous part."""

    opens: Mapping[str, str]
    """Marks that begin a call, each with the pattern up to the object's first bracket."""
    after: str = ""
    """Pattern after the object; the group `more` ends at the next object's bracket."""
    close: str | None = None
    """Mark that ends a call whose JSON is invalid."""
    last: tuple[str, ...] = ()
    """Marks after all calls."""
    is_named: bool = field(default=False)
    """Whether the opening pattern has the function's name, and the object only arguments."""
    has_ids: bool = False
    """Whether the name is a part of the call's id."""


def _deepseek(head: str, before_end: str) -> JsonFormat:
    opens = {CALLS_BEGIN: f"{_SPACE}{BEGIN}{head}", BEGIN: head}
    return JsonFormat(opens, f"{_SPACE}{before_end}{END}", END, (CALLS_END,), is_named=True)


def _list(begin: str, end: str) -> JsonFormat:
    """Return a format with one list of calls between two marks; the last one may be missing."""
    after = rf"{_SPACE}(?:(?P<more>,{_SPACE}\{{)|\])"
    return JsonFormat({begin: rf"{_SPACE}\[{_SPACE}\{{"}, after, last=(end,))


def _kimi() -> JsonFormat:
    head = rf"{_SPACE}(?P<name>[^<>\s]{{1,200}}){_SPACE}<\|tool_call_argument_begin\|>{_SPACE}\{{"
    begin = r"<\|tool_call_begin\|>"
    sections = dict.fromkeys(KIMI_SECTIONS, f"{_SPACE}{begin}{head}")
    return JsonFormat(
        {**sections, KIMI_BEGIN: head},
        rf"{_SPACE}<\|tool_call_end\|>",
        KIMI_END,
        ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        is_named=True,
        has_ids=True,
    )


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
    # Phi-4-mini and Granite 3 write one list of calls, as Nemotron Nano v2 and Falcon-H1 do.
    CALL_LIST: _list(LIST_MARK, "<|/tool_call|>"),
    "nemotron_v2": _list("<TOOLCALL>", "</TOOLCALL>"),
    "falcon_h1": _list("<tool_call>", "</tool_call>"),
    KIMI_K2: _kimi(),
    SOLAR: JsonFormat(
        {
            "<|tool_calls|>": rf"{_SPACE}{re.escape(SOLAR_BEGIN)}\w{{0,99}}{re.escape(SOLAR_NAME)}{_SPACE}{_NAME}"
            rf"{_SPACE}<\|tool_call:args\|>{_SPACE}\{{",
            SOLAR_BEGIN: rf"\w{{0,99}}{re.escape(SOLAR_NAME)}{_SPACE}{_NAME}{_SPACE}<\|tool_call:args\|>{_SPACE}\{{",
        },
        rf"{_SPACE}<\|tool_call:end\|>",
        "<|tool_call:end|>",
        ("<|calls|>",),
        is_named=True,
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
    """Tags around a call's arguments, as regular expressions."""

    mark: str
    """Text with which a call begins."""
    opens: str
    """Begin of a call; the group `function` is its name."""
    parameter: str
    """Begin of an argument's value; the group `key` is its name."""
    value_end: str
    closes: str
    """End of a call."""
    padding: str = ""
    """Text at both ends of a value that is not a part of it."""
    last: str = ""
    """Text after all calls."""
    ends_twice: bool = False
    """Whether models write the end of a value for the end of a call."""
    body: Literal["", "json", "nested"] = ""
    """Form of arguments that stand in a call without tags, or in nested tags."""


_NEVER = "(?!)"
_TAG = re.escape(MINIMAX)
_KEY_TAG = r"[^<>\"\n]{1,200}"


def _invokes(outer: str, mark: str, attributes: str, tag: str = "") -> XmlFormat:
    """Return a format of calls with attributes.

    outer: tag around all calls. mark: with which they begin. attributes: pattern after a
    parameter's name. tag: text at the beginning of each tag's name.
    """
    return XmlFormat(
        mark=mark,
        opens=rf'(?:<{tag}{outer}>{_SPACE})?<{tag}invoke name="(?P<function>[^<>"\n]{{1,200}})">',
        parameter=rf'<{tag}parameter name="(?P<key>{_KEY_TAG})"{attributes}>',
        value_end=f"</{tag}parameter>",
        closes=f"</{tag}invoke>",
        last=f"</{tag}{outer}>",
        body="json",
    )


def _dsml(outer: str) -> XmlFormat:
    is_string = r'(?: string="(?P<is_string>true|false)")?'
    return _invokes("(?:function_calls|tool_calls|calls)", f"<{DSML}{outer}>", is_string, f"{DSML} ?")


def _hy3(suffix: str) -> XmlFormat:
    s = re.escape(suffix)
    return XmlFormat(
        mark=f"<tool_calls{suffix}>",
        opens=rf"(?:<tool_calls{s}>{_SPACE})?<tool_call{s}>{_SPACE}(?P<function>{_FUNCTION}){_SPACE}<tool_sep{s}>",
        parameter=rf"<arg_key{s}>(?P<key>[^<>\n]{{1,200}})</arg_key{s}>{_SPACE}<arg_value{s}>",
        value_end=f"</arg_value{s}>",
        closes=f"</tool_call{s}>",
        last=f"</tool_calls{s}>",
        ends_twice=True,
    )


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
    "minimax_m2": _invokes("minimax:tool_call", "<minimax:tool_call>", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "hy3": _hy3(""),
    "hy3_opensource": _hy3(":opensource"),
    "kimi_k3": XmlFormat(
        mark="<|open|>tools<|sep|>",
        opens=rf"(?:<\|open\|>tools<\|sep\|>{_SPACE})?<\|open\|>call tool="
        rf'"(?P<function>{_FUNCTION})"[^<>]{{0,40}}<\|sep\|>',
        parameter=r'<\|open\|>argument key="(?P<key>[^"<>\n]{1,200})"(?: type="(?P<is_string>\w{1,9})")?<\|sep\|>',
        value_end=r"<\|close\|>argument<\|sep\|>",
        closes=r"<\|close\|>call<\|sep\|>",
        last=r"<\|close\|>tools<\|sep\|>",
        body="json",
    ),
    "minimax_m3": XmlFormat(
        mark=f"{MINIMAX}<tool_call>",
        opens=rf'(?:{_TAG}<tool_call>{_SPACE})?{_TAG}<invoke name="(?P<function>{_FUNCTION})">',
        parameter=rf"(?P<key>{_NEVER})",
        value_end=_NEVER,
        closes=f"{_TAG}</invoke>",
        last=f"{_TAG}</tool_call>",
        body="nested",
    ),
}


_MARKS = {
    LLAMA3_JSON: ("{",),
    PYTHONIC: ("<|python_start|>", "["),
    GEMMA4: ("<|tool_call>",),
    LFM2: (LFM2_MARK,),
    KIMI_K3: ("<|open|>tools",),
}
END_MARKS = {GEMMA4: "<|tool_response>"}
"""Tokens with which a model ends an answer that has calls."""


def last_mark(form: str) -> str:
    """Return the pattern of the marks after all calls of a format; "" if there are none."""
    if form in JSON_FORMATS:
        return "|".join(map(re.escape, JSON_FORMATS[form].last))
    return XML_FORMATS[form].last if form in XML_FORMATS else ""


def call_marks(form: str | None) -> tuple[str, ...]:
    """Return the texts with which a format's calls may begin, the outermost first."""
    if form == HARMONY:
        return ("<|start|>assistant to=",)
    if form == SOLAR:
        return ()  # text next to calls is a message
    if form in JSON_FORMATS:
        return tuple(JSON_FORMATS[form].opens)
    if form in XML_FORMATS:
        return (XML_FORMATS[form].mark,)
    return _MARKS.get(form or "", ())
