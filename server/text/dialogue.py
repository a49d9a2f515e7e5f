"""Finds out at start how the chat template writes calls and thoughts.

The format of calls is the one that reads a rendered call back. Not for: reading answers
(`tool_calls.py`, `reasoning.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from engine.api import ConfigError
from server.text.call_formats import LLAMA3_JSON, RESPONSE_TEMPLATE, CallFormat, call_marks
from server.text.probe import ANSWER, ARGUMENTS, NAME, TOOL, Probe, beyond
from server.text.shipped_templates import advice_for, advice_without_template
from server.text.thinking_switch import ThinkingSettings, thinking_switch
from server.text.thought_marks import MARKS, ThoughtMarks
from server.text.thought_probe import found_marks, reads_thought, shown_thought
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse

_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class Dialogue:
    """Format of the model's part of a conversation."""

    call_format: str | None
    tools_refusal: str = ""
    """Reason why requests with tools are refused, and the way out; "" if they are served."""
    warnings: tuple[str, ...] = ()
    """Lines for the log about what is not separated from text."""
    thoughts: ThoughtMarks | None = None
    thinking: ThinkingSettings = field(default_factory=ThinkingSettings)
    """Settings of the chat template that turn thoughts on and off."""


def dialogue_of(tokenizer: Tokenizer, call_parser: str, reasoning_parser: str) -> Dialogue:
    """Return how the tokenizer's chat template writes the model's part.

    call_parser, reasoning_parser: the settings of these names. Raises ConfigError for a format of
    calls that the tokenizer does not describe.
    """
    if call_parser == RESPONSE_TEMPLATE and not _describes_calls(tokenizer):
        raise ConfigError(f"--tool-call-parser {call_parser}: the tokenizer has no response_template for calls")
    if not tokenizer.chat_template:
        warning = f"the model has no chat template, so chats are refused; {advice_without_template(tokenizer)}"
        return Dialogue(None, "", (warning,), MARKS.get(reasoning_parser))
    probe = Probe(tokenizer)
    marks = found_marks(reasoning_parser, probe)
    call_format = None if call_parser == "auto" else call_parser
    if probe.plain is None:
        refusal = "this model's chat template fails or refuses a question; see --chat-template"
        return Dialogue(call_format, refusal, (), marks)
    shows_tools = probe.question(has_tools=True) is not None
    call = _call(probe, shows_tools)
    warnings = []
    shown = shown_thought(probe) if reasoning_parser != "none" else None
    if shown is not None and (marks is None or not reads_thought(shown, marks)):
        warnings.append("the chat template shows thoughts in a format that is not read; they are a part of the answers")
    if call is None:
        likely_format = _format_by_token(tokenizer)
    else:
        likely_format = next(_readers_of(tokenizer, call), None)
        if call_parser != "auto" and call_parser not in _readers_of(tokenizer, call):
            warnings.append(_parser_warning(call_parser, likely_format))
    call_format = call_format or likely_format
    refusal = ""
    if not shows_tools:
        refusal = "this model's chat template has no place for tools"
    elif call_format is None and call is None:
        refusal = "this model's chat template does not show calls, so their format is not known"
    elif call_format is None:
        refusal = "this server does not read calls in the format of this model's chat template"
        warnings.append("the chat template shows calls in a format that is not read; requests with tools are refused")
    if refusal:
        refusal += f"; {advice_for(tokenizer, shows_tools, call is not None, likely_format)}"
    return Dialogue(call_format, refusal, tuple(warnings), marks, thinking_switch(probe, marks))


def _parser_warning(call_parser: str, fitting: str | None) -> str:
    warning = f"--tool-call-parser {call_parser} does not read the calls that the chat template shows"
    if fitting is not None:
        warning += f"; {fitting} reads them"
    return warning


def _describes_calls(tokenizer: Tokenizer) -> bool:
    template = tokenizer.response_template
    return template is not None and "tool_calls" in template.get("fields", {})


def _call(probe: Probe, shows_tools: bool) -> str | None:
    shown = probe.answer(tool_calls=[_CALL], has_tools=shows_tools)
    plain = probe.answer(content=ANSWER, has_tools=shows_tools)
    if shown is None or plain is None:
        return None
    return beyond(shown, plain)


def _readers_of(tokenizer: Tokenizer, call: str) -> Iterator[str]:
    """Yield the formats that read a call back."""
    formats = [name for name in get_args(CallFormat) if name != RESPONSE_TEMPLATE]
    if _describes_calls(tokenizer):
        formats.insert(0, RESPONSE_TEMPLATE)
    if f"{NAME}(" in call:
        formats.remove(LLAMA3_JSON)  # it reads calls in Python's syntax, too, as Llama 4 mixes both
    # Formats may read each other's calls. The one whose mark the template writes comes first.
    formats.sort(key=lambda name: not any(mark in call for mark in call_marks(name)))
    for name in formats:
        use = ToolUse((TOOL,), name, parallel=True, forced=False)
        reader = ToolCalls(use, tokenizer.response_template)
        reader.feed(call, True)
        if not reader.are_complete:
            continue
        calls = [(read_call.name, json.loads(read_call.arguments)) for read_call in reader.calls]
        if calls == [(NAME, ARGUMENTS)]:
            yield name


def _format_by_token(tokenizer: Tokenizer) -> str | None:
    names = [name for name in get_args(CallFormat) if _begins_with_token(tokenizer, name)]
    return names[0] if len(names) == 1 else None


def _begins_with_token(tokenizer: Tokenizer, name: str) -> bool:
    marks = call_marks(name)
    return bool(marks) and len(marks[0]) > 1 and tokenizer.token_of(marks[0]) is not None
