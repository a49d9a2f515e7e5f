"""Finds how the chat template writes calls and thoughts: renders and reads them.

The format of calls is the one that reads them back, whatever words the template has. Not for:
reading answers (`tool_calls.py`, `reasoning.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from engine.api import ConfigError, RequestError
from server.text.call_formats import RESPONSE_TEMPLATE, CallFormat, call_marks
from server.text.harmony import HarmonyMessages
from server.text.reasoning import Reasoning, Thought, ThoughtReader, is_open, thinking_variables
from server.text.shipped_templates import advice_for
from server.text.thought_marks import thought_marks
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Effort, Function, Tool

_NAME = "polydraft_probe"
_ARGUMENTS = {"text": 'It is "so".', "count": 3}
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
_TOOL = Tool(type="function", function=Function(name=_NAME, description="Probe.", parameters=_SCHEMA))
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_ANSWER, _THOUGHT = "Polydraft-answer", "Polydraft-thought"
_USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True)
class Dialogue:
    """Format of the model's part of a conversation."""

    call_format: str | None
    """Format of calls; None if it is not known."""
    tools_refusal: str = ""
    """Reason why requests with tools are refused, and the way out; "" if they are served."""
    warnings: tuple[str, ...] = ()
    """Lines for the log about what is not separated from text."""


def dialogue_of(tokenizer: Tokenizer, call_parser: str, reasoning_parser: str) -> Dialogue:
    """Return how the tokenizer's chat template writes the model's part.

    call_parser, reasoning_parser: the settings of these names. Raises ConfigError for a format of
    calls that the tokenizer does not describe.
    """
    if call_parser == RESPONSE_TEMPLATE and not _describes_calls(tokenizer):
        raise ConfigError(f"--tool-call-parser {call_parser}: the tokenizer has no response_template for calls")
    if not tokenizer.chat_template:
        return Dialogue(None, "", ("the model has no chat template, so chats are refused; see --chat-template",))
    call_format = None if call_parser == "auto" else call_parser
    if _rendered(tokenizer, None) is None:
        return Dialogue(call_format, "this model's chat template fails or refuses a question; see --chat-template")
    shows_tools = _shows_tools(tokenizer)
    call = _call(tokenizer, shows_tools)
    warnings = []
    if reasoning_parser != "none" and not _reads_thoughts(tokenizer, reasoning_parser):
        warnings.append("the chat template shows thoughts in a format that is not read; they are a part of the answers")
    if call is None:
        likely_format = _format_by_token(tokenizer)
    else:
        likely_format = next(_readers_of(tokenizer, call), None)
        if call_parser != "auto" and call_parser not in _readers_of(tokenizer, call):
            warnings.append(_parser_warning(call_parser, likely_format))
    call_format = call_format or likely_format
    if shows_tools and call_format is not None:
        return Dialogue(call_format, "", tuple(warnings))
    if not shows_tools:
        why = "this model's chat template has no place for tools"
    elif call is None:
        why = "this model's chat template does not show calls, so their format is not known"
    else:
        why = "this server does not read calls in the format of this model's chat template"
        warnings.append("the chat template shows calls in a format that is not read; requests with tools are refused")
    return Dialogue(call_format, f"{why}; {advice_for(tokenizer, shows_tools)}", tuple(warnings))


def _parser_warning(call_parser: str, fitting: str | None) -> str:
    """Return the warning about a format that does not read calls; fitting: one that does."""
    warning = f"--tool-call-parser {call_parser} does not read the calls that the chat template shows"
    if fitting is not None:
        warning += f"; {fitting} reads them"
    return warning


def _describes_calls(tokenizer: Tokenizer) -> bool:
    template = tokenizer.response_template
    return template is not None and "tool_calls" in template.get("fields", {})


def has_thinking_switch(tokenizer: Tokenizer) -> bool:
    """Return whether the variables that switch thinking on or off change a prompt."""
    plain = _rendered(tokenizer, None)
    efforts: tuple[Effort, ...] = ("none", "low", "high")
    return any(_rendered(tokenizer, None, variables=thinking_variables(one, None)) != plain for one in efforts)


def _rendered(
    tokenizer: Tokenizer,
    answer: dict[str, Any] | None,
    shows_tools: bool = False,
    variables: dict[str, Any] | None = None,
) -> str | None:
    """Return the prompt of a question and any answer; None if the template refuses it."""
    messages: list[dict[str, Any]] = [_USER]
    if answer is not None:
        messages.append({"role": "assistant", "content": "", **answer})
    tools = []
    if shows_tools:
        tools.append(_TOOL.model_dump(exclude_none=True))
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=answer is None, variables=variables, tools=tools)
    except RequestError:
        return None


def _shows_tools(tokenizer: Tokenizer) -> bool:
    return _rendered(tokenizer, None, shows_tools=True) is not None


def _call(tokenizer: Tokenizer, shows_tools: bool) -> str | None:
    """Return a call as the template shows it, with the text after it, or None."""
    shown = _rendered(tokenizer, {"tool_calls": [_CALL]}, shows_tools)
    plain = _rendered(tokenizer, {"content": _ANSWER}, shows_tools)
    if shown is None or plain is None:
        return None
    return _beyond(shown, plain)


def _beyond(text: str, other: str) -> str:
    """Return the part of a text from the first character on in which it differs from another."""
    for place, (character, other_character) in enumerate(zip(text, other, strict=False)):
        if character != other_character:
            return text[place:]
    return text[len(other) :]


def _readers_of(tokenizer: Tokenizer, call: str) -> Iterator[str]:
    """Yield the formats that read a call back."""
    formats = [name for name in get_args(CallFormat) if name != RESPONSE_TEMPLATE]
    if _describes_calls(tokenizer):
        formats.insert(0, RESPONSE_TEMPLATE)
    for name in formats:
        use = ToolUse((_TOOL,), name, parallel=True, forced=False)
        reader = ToolCalls(use, tokenizer.response_template)
        reader.feed(call, True)
        if not reader.are_complete:
            continue
        calls = [(read_call.name, json.loads(read_call.arguments)) for read_call in reader.calls]
        if calls == [(_NAME, _ARGUMENTS)]:
            yield name


def _format_by_token(tokenizer: Tokenizer) -> str | None:
    """Return the only format whose calls begin with a token of the vocabulary, or None."""
    names = [name for name in get_args(CallFormat) if _begins_with_token(tokenizer, name)]
    return names[0] if len(names) == 1 else None


def _begins_with_token(tokenizer: Tokenizer, name: str) -> bool:
    marks = call_marks(name)
    return bool(marks) and len(marks[0]) > 1 and tokenizer.token_of(marks[0]) is not None


def _reads_thoughts(tokenizer: Tokenizer, setting: str) -> bool:
    """Return whether the thoughts that the template shows are separated."""
    prompt = _rendered(tokenizer, None)
    text = _rendered(tokenizer, {"content": _ANSWER, "reasoning_content": _THOUGHT})
    if prompt is None or text is None or _THOUGHT not in text:
        return True
    marks = thought_marks(setting, tokenizer.chat_template)
    if marks is None:
        return False
    reader: ThoughtReader = HarmonyMessages(prompt) if marks.lead else Reasoning(is_open(prompt, marks), marks)
    parts = reader.feed(_beyond(text, prompt), True)
    return any(isinstance(part, Thought) and part.text == _THOUGHT for part in parts)
