"""Renders a conversation with a chat template, and checks that no part of it is lost.

Templates differ in what they accept: arguments as an object or as text, ids of nine letters and digits, one call per
message, no text next to thoughts and calls. The first variant that the template accepts is used. Then a copy of the
conversation, with a marker word in each part, shows which parts the template omits. A system prompt that is omitted or
refused moves into the user's last message. Calls after the first get messages of their turn, and omitted calls are
rendered without content. Omitted text next to calls moves before the calls, and any other omitted part is refused by
name.

Not for: thoughts. Most templates omit those of earlier turns on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import logging
import re
import string
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from engine.api import TEMPLATE_FAILED, RequestError
from server.text.call_formats import LIST_MARK

log = logging.getLogger("polydraft.rendering")

Messages = list[dict[str, Any]]
Objects = Sequence[dict[str, Any]]
Render = Callable[[Messages, Objects, Objects], str]
"""Renders messages, tools and documents; raises the template's errors."""

_TEXT_BESIDE_CALLS = "text_beside_calls"
"""Key of a message whose content is None: its text, which belongs before its calls."""
_MARKER = re.compile(r"Word\d{6}")
_PYTHON_KEY = re.compile(r"\{'(Word\d{6})': ")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits


def render_conversation(
    render: Render, messages: Objects, tools: Objects, documents: Objects, marks: Sequence[str]
) -> str:
    """Return the prompt of a conversation.

    Raises RequestError for parts that the template refuses or omits, with the code TEMPLATE_FAILED for a mistake in
    the template. marks: texts with which the model's calls may begin; text before calls is inserted before them.
    """
    taken, text = _taken_at_all(render, list(messages), tools, documents)
    missing = _missing(render, taken, tools, documents)
    if any(kind == "tools" for kind, _ in missing):
        render = partial(_with_tools_in_system, render)
        taken, text = _taken_at_all(render, list(messages), tools, documents)
        missing = _missing(render, taken, tools, documents)
    if any(kind == "tool_calls" and len(taken[number]["tool_calls"]) > 1 for kind, number in missing):
        taken, text = _taken(render, [_with_one_call_a_turn(taken)], tools, documents)
        missing = _missing(render, taken, tools, documents)
    if any(kind == "tool_calls" for kind, _ in missing):
        taken, text = _with_calls_alone(render, taken, text, tools, documents)
        missing = _missing(render, taken, tools, documents)
    if any(kind == "tool_calls" for kind, _ in missing) and [*marks] == [LIST_MARK]:
        taken, text = _taken_at_all(render, _with_calls_as_text(taken), tools, documents)
        missing = _missing(render, taken, tools, documents)
    if any(kind == "python" for kind, _ in missing):
        taken, text = _taken(render, [_with_arguments_as_text(taken)], tools, documents)
        missing = _missing(render, taken, tools, documents)
    if system := [number for kind, number in missing if kind == "content" and taken[number]["role"] == "system"]:
        taken, text = _taken(render, [_with_system_in_user(taken, system)], tools, documents)
        missing = _missing(render, taken, tools, documents)
    beside_calls = [number for kind, number in missing if kind == "content" and taken[number].get("tool_calls")]
    for kind, number in missing:
        if kind != "content" or number not in beside_calls or not marks:
            raise _refusal(kind, number)
    return _with_texts(render, taken, tools, documents, beside_calls, marks) if beside_calls else text


def _with_tools_in_system(render: Render, messages: Messages, tools: Objects, documents: Objects) -> str:
    """Render messages with the tools as a text in the system prompt, where Phi-4-mini's template expects them."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return render([{**system, "tools": listed}, *messages[has_system:]], (), documents)


def _with_calls_as_text(messages: Messages) -> Messages:
    """Return the messages with calls in their texts, as models with a list of calls write them (Granite 3, Phi-4-mini),
    for templates that show texts only.
    """
    result: Messages = []
    for message in messages:
        if "tool_calls" in message:
            calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in message["tool_calls"]]
            text = f"{_text_of(message)}{LIST_MARK}{json.dumps(calls, ensure_ascii=False)}"
            message = {"role": message["role"], "content": text}
        result.append(message)
    return result


def _taken_at_all(render: Render, messages: Messages, tools: Objects, documents: Objects) -> tuple[Messages, str]:
    """Return the first variant that the template accepts, and the prompt; if there is none, with the system prompts in
    the user's last message.
    """
    try:
        return _taken(render, _forms(messages), tools, documents)
    except RequestError as error:
        system = [number for number, message in enumerate(messages) if message["role"] == "system"]
        has_user = any(message["role"] == "user" for message in messages)
        if error.code == TEMPLATE_FAILED or not system or not has_user:
            raise
        with contextlib.suppress(RequestError):
            return _taken(render, _forms(_with_system_in_user(messages, system)), tools, documents)
        raise


def _with_calls_alone(
    render: Render, messages: Messages, text: str, tools: Objects, documents: Objects
) -> tuple[Messages, str]:
    """Return the messages, those with calls with a content of None, and the prompt; unchanged if the template refuses
    them.
    """
    alone = [
        {**message, "content": None, _TEXT_BESIDE_CALLS: message["content"]} if "tool_calls" in message else message
        for message in messages
    ]
    try:
        return _taken(render, _forms(alone), tools, documents)
    except RequestError:
        return messages, text


def _text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, also of one whose content is None for the template."""
    return message.get(_TEXT_BESIDE_CALLS) or message["content"] or ""


def _taken(render: Render, forms: Iterable[Messages], tools: Objects, documents: Objects) -> tuple[Messages, str]:
    """Return the messages in the first variant that the template accepts, and the prompt."""
    errors: list[Exception] = []
    for form in forms:
        try:
            text = render(form, tools, documents)
            text.encode()
        except Exception as error:  # templates raise jinja2's errors and any others
            errors.append(error)
        else:
            return form, text
    refused = next((one for one in errors if _failed_line(one) is None), None)
    if refused is not None:
        raise RequestError(f"the chat template refuses these messages: {refused}", "messages") from refused
    told = f"the chat template of this model fails ({_fault(errors[0])}); the operator has to correct it"
    raise RequestError(told, "messages", TEMPLATE_FAILED) from errors[0]


def log_failure(error: BaseException | None, messages: Objects, tools: Objects) -> None:
    """Log a mistake in the template, and the conversations that it refuses, without their texts."""
    kinds = dict.fromkeys(f"{one['role']}{' with calls' if 'tool_calls' in one else ''}" for one in messages)
    with_tools = ", with tools" if tools else ""
    log.warning(
        "the chat template fails (%s) for messages of %s%s, and such chats are refused; correct it, or choose another "
        "by --chat-template",
        _fault(error),
        ", ".join(kinds),
        with_tools,
    )


def _fault(error: BaseException | None) -> str:
    """Return the type and place of a mistake. Its message may quote the conversation."""
    return f"{type(error).__name__} on line {_failed_line(error)}"


def _failed_line(error: BaseException | None) -> int | None:
    """Return the line of a mistake in the template. None for errors that it raises on purpose or that come from
    elsewhere.
    """
    if type(error) is TemplateError:
        return None
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    if error is None:
        return None
    frames = traceback.walk_tb(error.__traceback__)
    return next((line for frame, line in [*frames][::-1] if frame.f_code.co_filename == "<template>"), None)


def _forms(messages: Messages) -> Iterator[Messages]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    ids = [call["id"] for call in calls] + [one["tool_call_id"] for one in messages if "tool_call_id" in one]
    changes: list[Callable[[Messages], Messages]] = []
    if any(not _SHORT_ID.fullmatch(one) for one in ids):
        changes.append(_with_short_ids)
    if calls:
        changes.append(_with_arguments_as_text)
    if any(_has_text_and_thoughts(message) for message in messages):
        changes.append(_with_texts_before_thoughts)
    if any(len(message.get("tool_calls", ())) > 1 for message in messages):
        changes.append(_with_one_call_a_turn)
    if any(message["role"] == "system" for message in messages[1:]):
        changes.append(_with_one_system_prompt)
    if any(message["role"] in ("system", "user") for message in messages[1:]):
        changes.append(_with_alternating_turns)
    for count in range(len(changes) + 1):
        for some in itertools.combinations(changes, count):
            form = messages
            for change in some:
                form = change(form)
            yield form


def _short_id(call_id: str) -> str:
    """Return nine letters and digits for an id, always the same ones."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(9))


def _with_short_ids(messages: Messages) -> Messages:
    def changed(message: dict[str, Any]) -> dict[str, Any]:
        result = dict(message)
        if "tool_call_id" in message:
            result["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            result["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return result

    return [changed(message) for message in messages]


def _with_arguments_as_text(messages: Messages) -> Messages:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _has_text_and_thoughts(message: dict[str, Any]) -> bool:
    return "tool_calls" in message and "thinking" in message and bool(message["content"])


def _with_texts_before_thoughts(messages: Messages) -> Messages:
    """Return the messages with the text next to thoughts and calls in a separate message before them."""
    result: Messages = []
    for message in messages:
        if _has_text_and_thoughts(message):
            result.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        result.append(message)
    return result


def _with_one_call_a_turn(messages: Messages) -> Messages:
    """Return the messages with one call in each, followed by its result."""
    result: Messages = []
    number = 0
    while number < len(messages):
        message = messages[number]
        calls = message.get("tool_calls", ())
        end = number + 1
        while len(calls) > 1 and end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        answers = messages[number + 1 : end]
        for first, call in enumerate(calls) if len(calls) > 1 else ():
            said = message if first == 0 else {"role": message["role"], "content": ""}
            result += [{**said, "tool_calls": [call]}, *(one for one in answers if one["tool_call_id"] == call["id"])]
        known = {call["id"] for call in calls}
        result += [one for one in answers if one["tool_call_id"] not in known] if len(calls) > 1 else [message]
        number = end
    return result


def _with_one_system_prompt(messages: Messages) -> Messages:
    """Return the messages with one system prompt at the beginning; later ones become the user's."""
    begin = next((number for number, one in enumerate(messages) if one["role"] != "system"), len(messages))
    first = [{**messages[0], "content": _joined(one["content"] for one in messages[:begin])}] if begin else []
    later = [{**one, "role": "user"} if one["role"] == "system" else one for one in messages[begin:]]
    return first + later


def _with_alternating_turns(messages: Messages) -> Messages:
    """Return the messages with adjacent texts of one role joined; user text after results of calls joins the last
    result.
    """
    result: Messages = []
    for message in messages:
        last = result[-1] if result else {"role": ""}
        is_text = message.keys() <= {"role", "content"}
        is_more = is_text and last.keys() <= {"role", "content"} and last["role"] == message["role"]
        if is_more or (is_text and last["role"] == "tool" and message["role"] == "user"):
            result[-1] = {**last, "content": _joined([last["content"], message["content"]])}
        else:
            result.append(message)
    return result


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _missing(render: Render, messages: Messages, tools: Objects, documents: Objects) -> list[tuple[str, int]]:
    """Return (type, number) of the parts that the template omits; empty if it refuses the copy."""
    words = (f"Word{number:06d}" for number in itertools.count())
    parts: list[tuple[str, int, list[str]]] = []

    def word(kind: str, number: int) -> str:
        parts.append((kind, number, [next(words)]))
        return parts[-1][2][0]

    copies: Messages = []
    for number, message in enumerate(messages):
        marked = dict(message)
        if str(message.get("content") or "").strip():
            marked["content"] = word("content", number)
        elif _text_of(message).strip():
            word("content", number)
        if "name" in message and message["role"] != "tool":
            marked["name"] = word("name", number)
        if "tool_calls" in message:
            marked["tool_calls"] = [_marked_call(call, number, word) for call in message["tool_calls"]]
        copies.append(marked)
    marked_tools = [{**tool, "function": {**tool["function"], "name": word("tools", 0)}} for tool in tools]
    marked_documents = []
    for number, document in enumerate(documents):
        marked_documents.append(_marked_document(document, words))
        parts.append(("documents", number, [one for one in marked_documents[-1].values() if isinstance(one, str)]))
    try:
        text = render(copies, marked_tools, marked_documents)
    except Exception:  # the template depends on the content
        return []
    # One pass over the text, because there is a word for each of thousands of messages.
    shown, keys = set(_MARKER.findall(text)), set(_PYTHON_KEY.findall(text))
    found = [(kind, number) for kind, number, some in parts if some and shown.isdisjoint(some)]
    if any(some[0] in keys for kind, _, some in parts if kind == "tool_calls"):
        # The template writes the object in Python's syntax.
        found.append(("python", 0))
    return [one for one in found if one[0] != "name" or _tells_apart(messages, one[1])]


def _marked_call(call: dict[str, Any], number: int, word: Callable[[str, int], str]) -> dict[str, Any]:
    function = {**call["function"], "name": word("tool_calls", number)}
    if isinstance(function["arguments"], str):
        function["arguments"] = json.dumps({"x": word("tool_calls", number)})
    elif function["arguments"]:
        function["arguments"] = {word("tool_calls", number): word("tool_calls", number)}
    return {**call, "function": function}


def _marked_document(document: dict[str, Any], words: Iterator[str]) -> dict[str, Any]:
    return {key: next(words) if isinstance(value, str) else value for key, value in document.items()}


def _tells_apart(messages: Messages, number: int) -> bool:
    """Return whether a name distinguishes participants of the same role."""
    role = messages[number]["role"]
    return len({one["name"] for one in messages if one["role"] == role and "name" in one}) > 1


def _with_system_in_user(messages: Messages, system: Sequence[int]) -> Messages:
    """Return the messages with omitted system prompts inserted before the user's last message."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise _refusal("content", system[0])
    texts = [messages[number]["content"] for number in system]
    last = messages[users[-1]]
    result = [{**message} for message in messages]
    result[users[-1]]["content"] = "\n\n".join([*texts, last["content"]])
    return [message for number, message in enumerate(result) if number not in system]


def _with_texts(
    render: Render, messages: Messages, tools: Objects, documents: Objects, numbers: Sequence[int], marks: Sequence[str]
) -> str:
    """Return the prompt with the texts of some messages inserted before their calls, their original position."""
    marked = copy.deepcopy(messages) if numbers else messages
    names: dict[str, tuple[int, str]] = {}
    digest = hashlib.sha256(repr(messages).encode()).hexdigest()
    for number in numbers:
        function = marked[number]["tool_calls"][0]["function"]
        word = f"Word{digest}{number:06d}"
        names[word], function["name"] = (number, function["name"]), word
    text = render(marked, tools, documents)
    for word, (number, name) in names.items():
        before, _, after = text.partition(word)
        begins = [begin for mark in marks if (begin := before.rfind(mark)) >= 0]
        if not begins:
            raise _refusal("content", number)
        text = before[: begins[0]] + _text_of(messages[number]) + before[begins[0] :] + name + after
    return text


def _refusal(kind: str, number: int) -> RequestError:
    no = "the chat template of this model"
    if kind == "tools":
        return RequestError(f"{no} has no place for tools; see --chat-template", "tools")
    if kind == "documents":
        return RequestError(f"{no} has no place for documents; put them into a message", "documents")
    ways_out = {
        "content": "leave the message out, or put its text into another one",
        "tool_calls": "leave the calls and their results out, or see --chat-template",
        "name": "put the name into the content",
    }
    param = f"messages.{number}.{kind}"
    return RequestError(f"{param}: {no} does not show it; {ways_out[kind]}", param)
