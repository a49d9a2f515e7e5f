"""Variants of a conversation for chat templates that do not accept its plain form.

Not for: choosing a variant, or finding out what a template omits (`rendering.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from engine.api import RequestError
from server.text.call_formats import LFM2_MARK, LIST_MARK
from server.text.literal_calls import spelled

Messages = list[dict[str, Any]]

_TEXT_BEFORE_CALLS = "text_before_calls"
"""Key of a message whose text belongs before its calls and is not shown there."""
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits


def with_calls_as_text(messages: Messages, mark: str) -> Messages:
    """Return the messages with calls in their texts; mark: a key of CALL_TEXTS."""
    result: Messages = []
    for message in messages:
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [(function["name"], function["arguments"]) for function in functions]
            message = {"role": message["role"], "content": text_of(message) + CALL_TEXTS[mark](calls)}
        result.append(message)
    return result


def _listed(calls: Sequence[tuple[str, Any]]) -> str:
    return LIST_MARK + json.dumps([{"name": name, "arguments": made} for name, made in calls], ensure_ascii=False)


CALL_TEXTS: dict[str, Callable[[Sequence[tuple[str, Any]]], str]] = {
    LIST_MARK: _listed,
    LFM2_MARK: lambda calls: f"{LFM2_MARK}{spelled(calls)}<|tool_call_end|>",
}


def with_calls_alone(messages: Messages, numbers: Collection[int], content: str | None = None) -> Messages:
    """Return the messages, those with these numbers with another content than their text."""
    result: Messages = []
    for number, message in enumerate(messages):
        if number in numbers:
            message = {**message, "content": content, _TEXT_BEFORE_CALLS: text_of(message)}
        result.append(message)
    return result


def with_texts_before_calls(messages: Messages, numbers: Collection[int]) -> Messages:
    """Return the messages, those with these numbers with their text in a separate message."""
    result: Messages = []
    for number, message in enumerate(messages):
        if number in numbers and "tool_calls" in message:
            said = {key: value for key, value in message.items() if key not in ("tool_calls", _TEXT_BEFORE_CALLS)}
            result.append({**said, "content": text_of(message)})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        result.append(message)
    return result


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, also of one whose content is None for the template."""
    return message.get(_TEXT_BEFORE_CALLS) or message["content"] or ""


def variants(messages: Messages) -> Iterator[Messages]:
    """Yield the messages with no, one and more of the changes that may matter to them."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    ids = [call["id"] for call in calls]
    ids += [message["tool_call_id"] for message in messages if "tool_call_id" in message]
    changes: list[Callable[[Messages], Messages]] = []
    if not all(map(_SHORT_ID.fullmatch, ids)):
        changes.append(_with_short_ids)
    if calls:
        changes.append(with_arguments_as_text)
    if any(_has_text_and_thoughts(message) for message in messages):
        changes.append(_with_texts_before_thoughts)
    if any(len(message.get("tool_calls", ())) > 1 for message in messages):
        changes.append(with_one_call_a_turn)
    if any(message["role"] == "system" for message in messages[1:]):
        changes.append(_with_one_system_prompt)
    if any(message["role"] in ("system", "user") for message in messages[1:]):
        changes.append(_with_alternating_turns)
    for count in range(len(changes) + 1):
        for combination in itertools.combinations(changes, count):
            variant = messages
            for change in combination:
                variant = change(variant)
            yield variant


def _short_id(call_id: str) -> str:
    """Return nine letters and digits for an id, always the same for an id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    letters = ""
    for _ in range(9):
        number, place = divmod(number, len(_LETTERS))
        letters += _LETTERS[place]
    return letters


def _with_short_ids(messages: Messages) -> Messages:
    def changed(message: dict[str, Any]) -> dict[str, Any]:
        result = dict(message)
        if "tool_call_id" in message:
            result["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            result["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return result

    return [changed(message) for message in messages]


def with_named_ids(messages: Messages) -> Messages:
    """Return the messages with ids that name the function and number the call (Kimi)."""
    ids: dict[str, str] = {}
    result: Messages = []
    number = itertools.count()
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                ids[call["id"]] = named_id(call["function"]["name"], next(number))
                calls.append({**call, "id": ids[call["id"]]})
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
        result.append(message)
    return result


def named_id(name: str, number: int) -> str:
    """Return the id of a call for models that show its name there."""
    return f"functions.{name}:{number}"


def with_arguments_as_text(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as JSON text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    result: Messages = []
    for message in messages:
        if "tool_calls" in message:
            message = {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        result.append(message)
    return result


def _has_text_and_thoughts(message: dict[str, Any]) -> bool:
    return "tool_calls" in message and "thinking" in message and bool(message["content"])


def _with_texts_before_thoughts(messages: Messages) -> Messages:
    result: Messages = []
    for message in messages:
        if _has_text_and_thoughts(message):
            result.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        result.append(message)
    return result


def with_one_call_a_turn(messages: Messages) -> Messages:
    """Return the messages with one call in each, followed by its result."""
    result: Messages = []
    number = 0
    while number < len(messages):
        message = messages[number]
        number += 1
        if len(message.get("tool_calls", ())) <= 1:
            result.append(message)
            continue
        answers = list(itertools.takewhile(lambda later: later["role"] == "tool", messages[number:]))
        number += len(answers)
        result += _separate_calls(message, answers)
    return result


def _separate_calls(message: dict[str, Any], answers: Messages) -> Messages:
    result: Messages = []
    turn = message
    for call in message["tool_calls"]:
        result.append({**turn, "tool_calls": [call]})
        result += [answer for answer in answers if answer["tool_call_id"] == call["id"]]
        turn = {"role": message["role"], "content": ""}
    ids = {call["id"] for call in message["tool_calls"]}
    return result + [answer for answer in answers if answer["tool_call_id"] not in ids]


def num_leading_system_prompts(messages: Messages) -> int:
    """Return the number of system prompts before all turns."""
    return sum(1 for _ in itertools.takewhile(lambda message: message["role"] == "system", messages))


def with_late_system_prompts_in_user(messages: Messages) -> Messages:
    """Return the messages with system prompts between turns as the user's."""
    count = num_leading_system_prompts(messages)
    rest = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[count:]]
    return messages[:count] + rest


def _with_one_system_prompt(messages: Messages) -> Messages:
    count = num_leading_system_prompts(messages)
    rest = with_late_system_prompts_in_user(messages)[count:]
    if not count:
        return rest
    text = _joined(message["content"] for message in messages[:count])
    return [{**messages[0], "content": text}, *rest]


def _with_alternating_turns(messages: Messages) -> Messages:
    """Return the messages with adjacent texts of one role joined, and text after results."""
    result: Messages = []
    for message in messages:
        if result and _may_join(result[-1], message):
            text = _joined([result[-1]["content"], message["content"]])
            result[-1] = {**result[-1], "content": text}
        else:
            result.append(message)
    return result


def _may_join(message: dict[str, Any], later: dict[str, Any]) -> bool:
    """Whether adjacent messages are texts of one role, or the user's after a result."""
    if not _is_text(later):
        return False
    if message["role"] == "tool" and later["role"] == "user":
        return True
    return _is_text(message) and message["role"] == later["role"]


def _is_text(message: dict[str, Any]) -> bool:
    return message.keys() <= {"role", "content"}


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def with_system_in_user(messages: Messages, system: Sequence[int]) -> Messages:
    """Return the messages with these system prompts in the user's first message."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise refusal("content", system[0])
    text = _joined(messages[number]["content"] for number in [*system, first])
    result = [*messages[:first], {**messages[first], "content": text}, *messages[first + 1 :]]
    return [message for number, message in enumerate(result) if number not in system]


def refusal(kind: str, number: int) -> RequestError:
    template = "the chat template of this model"
    if kind == "tools":
        return RequestError(f"{template} has no place for tools; see --chat-template", "tools")
    if kind == "documents":
        return RequestError(f"{template} has no place for documents; put them into a message", "documents")
    if kind == "order":
        reason = f"{template} shows its text, calls and results out of order; see --chat-template"
        return RequestError(f"messages.{number}: {reason}", "messages")
    ways_out = {
        "content": "leave the message out, or put its text into another one",
        "tool_calls": "leave the calls and their results out, or see --chat-template",
        "name": "put the name into the content",
    }
    param = f"messages.{number}.{kind}"
    return RequestError(f"{param}: {template} does not show it; {ways_out[kind]}", param)
