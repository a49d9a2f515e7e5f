"""Formats of calls that are known without a response template of the tokenizer's own, in transformers' words for one.

Each begins a region at a tag, which may hold the function's name, and ends it at another; between them are arguments as
JSON or as XML-like parameters, whose types come from the function's schema.
"""

from __future__ import annotations

from typing import Any, Literal

CallFormat = Literal[
    "hermes", "llama3_json", "mistral", "mistral_v11", "qwen3_coder", "deepseek_v3", "deepseek_v31", "response_template"
]

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEXT = {"content": "text", "content_args": {"strip": False}}
_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_MARK = r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?"
_FIRST = r"(?:\s*<｜tool▁calls▁begin｜>\s*)?"
_AFTER = {"open": "<｜tool▁calls▁end｜>", **_TEXT}
"""Behind all calls there is nothing to say."""


def _template(calls: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    fields = {"content": _TEXT, "tool_calls": {"repeats": True, **calls}, **more}
    return {"start_anchor": "<|assistant|>", "fields": fields}


HERMES_TEMPLATE = _template({"open": "<tool_call>", "close": "</tool_call>", **_TEXT})

TEMPLATES: dict[str, dict[str, Any]] = {
    # Mistral's tokenizers up to version 7: one list of calls.
    "mistral": _template(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
            "close_pattern": r"(?<=\])\s*\Z",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        }
    ),
    # From version 11 on: each call has its mark, name and arguments.
    "mistral_v11": _template(
        {
            "open_pattern": rf"{_CALL_MARK}(?=\s*\{{)",
            # The mark alone may be in an argument's text.
            "close_pattern": rf"(?<=\}})\s*(?={_CALL_MARK}\s*\{{)|(?<=\}})\s*\Z",
            "content": "json",
            "transform": _CALL,
        }
    ),
    "qwen3_coder": _template(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _CALL,
        }
    ),
    "deepseek_v3": _template(
        {
            "open_pattern": rf"{_FIRST}{_BEGIN}function{_SEPARATOR}(?P<name>[^\n]+)\n```json\n",
            "close": f"\n```{_END}",
            "content": "json",
            "transform": _CALL,
        },
        after=_AFTER,
    ),
    "deepseek_v31": _template(
        {
            "open_pattern": rf"{_FIRST}{_BEGIN}(?P<name>[^<\n]+){_SEPARATOR}",
            "close": _END,
            "content": "json",
            "transform": _CALL,
        },
        after=_AFTER,
    ),
}


def named_in(chat_template: str) -> str | None:
    """The format whose marks a chat template writes; None where it writes none of these."""
    if "<function=" in chat_template and "<parameter=" in chat_template:
        return "qwen3_coder"
    if "tool▁call▁begin" in chat_template:
        return "deepseek_v3" if "```json" in chat_template else "deepseek_v31"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral_v11" if "[ARGS]" in chat_template else "mistral"
    return None
