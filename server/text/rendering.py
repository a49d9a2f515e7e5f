"""Renders a conversation with a chat template, and checks that no part of it is lost.

Templates differ in what they accept: arguments as an object or as text, ids of nine letters and
digits, one call per message, no text next to thoughts and calls. The first variant that the
template accepts is used. Then a copy of the conversation, with a marker word in each part, shows
which parts the template omits or shows out of order. A system prompt that is omitted, refused or
moved by later turns moves into the user's first message, and one between turns becomes the user's
in its place: a prompt only grows at its end. Calls after the first get messages of their turn, and
omitted calls are rendered without content. Text next to calls that is omitted or follows them moves
before the calls, and any other omitted part is refused by name.

Not for: thoughts. Most templates omit the thoughts of earlier turns on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from engine.api import TEMPLATE_FAILED, RequestError
from server.text.chat_variants import (
    CALL_TEXTS,
    Messages,
    num_leading_system_prompts,
    refusal,
    text_of,
    variants,
    with_arguments_as_text,
    with_calls_alone,
    with_calls_as_text,
    with_late_system_prompts_in_user,
    with_named_ids,
    with_one_call_a_turn,
    with_system_in_user,
    with_texts_before_calls,
)

log = logging.getLogger("polydraft.rendering")

Objects = Sequence[dict[str, Any]]
Render = Callable[[Messages, Objects, Objects], str]

_MARKER = re.compile(r"Word\d{6}")
_PYTHON_KEY = re.compile(r"\{'(Word\d{6})': ")


def render_conversation(
    render: Render, messages: Objects, tools: Objects, documents: Objects, marks: Sequence[str]
) -> str:
    """Return the prompt of a conversation.

    Raises RequestError for parts that the template refuses or omits, with the code TEMPLATE_FAILED
    for a mistake in the template. marks: texts with which the model's calls may begin; text before
    calls is inserted before them.
    """
    said = _with_system_prompts_in_place(render, messages)
    chat = _Chat(render, tools, documents)
    chat.take_any(said)
    if chat.missing("tools"):
        chat.render = partial(_with_tools_in_system, render)
        chat.take_any(said)
    _show_calls(chat, marks)
    if chat.missing("python"):
        chat.take([with_arguments_as_text(chat.messages)])
    if misplaced := {*chat.missing("order")}:
        chat.take(with_calls_alone(chat.messages, misplaced, content) for content in ("", None))
    system = [number for number in chat.missing("content") if chat.messages[number]["role"] == "system"]
    if system:
        chat.take([with_system_in_user(chat.messages, system)])
    if not marks and any(chat.messages[number].get("tool_calls") for number in chat.missing("content")):
        chat.take([with_texts_before_calls(chat.messages, {*chat.missing("content")})])
    before_calls = [number for number in chat.missing("content") if chat.messages[number].get("tool_calls")]
    for kind, number in chat.parts_missing:
        if kind != "content" or number not in before_calls or not marks:
            raise refusal(kind, number)
    if not before_calls:
        return chat.prompt
    return chat.prompt_with_texts(before_calls, marks)


def _with_system_prompts_in_place(render: Render, messages: Objects) -> Messages:
    """Return the conversation with those system prompts in a user's message that would move."""
    said = list(messages)
    is_late = any(message["role"] == "system" for message in said[num_leading_system_prompts(said) :])
    if is_late and not _shows_late_system_prompts(render):
        said = with_late_system_prompts_in_user(said)
    leading = range(num_leading_system_prompts(said))
    has_user = any(message["role"] == "user" for message in said)
    if leading and has_user and _moves_system_prompts(render):
        said = with_system_in_user(said, leading)
    return said


def _show_calls(chat: _Chat, marks: Sequence[str]) -> None:
    """Take variants of calls until the template shows them all, or no variant is left."""
    if chat.missing("tool_calls"):
        chat.take_named_ids()
    has_texts = len(marks) == 1 and marks[0] in CALL_TEXTS
    if not has_texts and any(len(chat.messages[number]["tool_calls"]) > 1 for number in chat.missing("tool_calls")):
        chat.take([with_one_call_a_turn(chat.messages)])
    if chat.missing("tool_calls"):
        chat.take_calls_alone()
    if chat.missing("tool_calls") and has_texts:
        chat.take_any(with_calls_as_text(chat.messages, marks[0]))


class _Chat:
    """Conversation in the variant that the template has accepted last."""

    def __init__(self, render: Render, tools: Objects, documents: Objects) -> None:
        self.render = render
        self.messages: Messages = []
        self.prompt = ""
        self.parts_missing: list[tuple[str, int]] = []
        """(type, number) of the parts that the template omits."""
        self._tools = tools
        self._documents = documents

    def missing(self, kind: str) -> list[int]:
        """Return the numbers of omitted parts of a type."""
        return [number for missing_kind, number in self.parts_missing if missing_kind == kind]

    def take(self, candidates: Iterable[Messages]) -> None:
        """Take the first variant that the template accepts; raises RequestError."""
        errors: list[Exception] = []
        for variant in candidates:
            try:
                prompt = self.render(variant, self._tools, self._documents)
                prompt.encode()
            except Exception as error:  # templates raise jinja2's errors and any others
                errors.append(error)
            else:
                self.messages = variant
                self.prompt = prompt
                self.parts_missing = self._parts_missing()
                return
        intended = next((error for error in errors if _failed_line(error) is None), None)
        if intended is not None:
            raise RequestError(f"the chat template refuses these messages: {intended}", "messages") from intended
        message = f"the chat template of this model fails ({_fault(errors[0])}); the operator has to correct it"
        raise RequestError(message, "messages", TEMPLATE_FAILED) from errors[0]

    def take_any(self, messages: Messages) -> None:
        """Take the first variant that is accepted, or one in which the user says the system."""
        try:
            self.take(variants(messages))
        except RequestError as error:
            system = range(num_leading_system_prompts(messages))
            has_user = any(message["role"] == "user" for message in messages)
            if error.code == TEMPLATE_FAILED or not system or not has_user:
                raise
            with contextlib.suppress(RequestError):
                self.take(variants(with_system_in_user(messages, system)))
                return
            raise

    def take_calls_alone(self) -> None:
        """Take messages with a content of None in place of omitted calls, if accepted."""
        with contextlib.suppress(RequestError):
            self.take(variants(with_calls_alone(self.messages, set(self.missing("tool_calls")))))

    def take_named_ids(self) -> None:
        """Take messages whose ids of calls have the function's name, if they show the calls."""
        before = (self.messages, self.prompt, self.parts_missing)
        with contextlib.suppress(RequestError):
            self.take([with_named_ids(self.messages)])
        if self.missing("tool_calls"):
            self.messages, self.prompt, self.parts_missing = before

    def prompt_with_texts(self, numbers: Sequence[int], marks: Sequence[str]) -> str:
        """Return the prompt with some texts inserted before their calls."""
        marked = copy.deepcopy(self.messages)
        names: dict[str, str] = {}
        digest = hashlib.sha256(repr(self.messages).encode()).hexdigest()
        words = [f"Word{digest}{number:06d}" for number in numbers]
        for number, word in zip(numbers, words, strict=True):
            call = marked[number]["tool_calls"][0]
            names[word] = call["function"]["name"]
            _rename(call, word)
        prompt = self.render(marked, self._tools, self._documents)
        for number, word in zip(numbers, words, strict=True):
            before, _, after = prompt.partition(word)
            begins = [begin for mark in marks if (begin := before.rfind(mark)) >= 0]
            if not begins:
                raise refusal("content", number)
            text = text_of(self.messages[number])
            # Some templates repeat the name before the result.
            shown = before[begins[0] :] + word + after
            prompt = before[: begins[0]] + text + shown.replace(word, names[word])
        return prompt

    def _parts_missing(self) -> list[tuple[str, int]]:
        """Return (type, number) of omitted parts; empty if the copy is refused."""
        copies = _MarkedCopies(self.messages, self._tools, self._documents)
        try:
            text = self.render(copies.messages, copies.tools, copies.documents)
        except Exception:  # the template depends on the content
            return []
        # One pass over the text, because there is a word for each of thousands of messages.
        shown: dict[str, int] = {}
        for marker in _MARKER.finditer(text):
            shown.setdefault(marker[0], marker.start())
        missing = [
            (part.kind, part.number) for part in copies.parts if part.words and shown.keys().isdisjoint(part.words)
        ]
        missing += [("order", number) for number in copies.misplaced(shown)]
        python_keys = set(_PYTHON_KEY.findall(text))
        if any(part.words[0] in python_keys for part in copies.parts if part.kind == "tool_calls"):
            # The template writes the object in Python's syntax.
            missing.append(("python", 0))
        return [(kind, number) for kind, number in missing if kind != "name" or _distinguishes(self.messages, number)]


class _MarkedPart(NamedTuple):
    """Part of a conversation, and its marker words; one in the prompt proves it is shown."""

    kind: str
    number: int
    words: list[str]


class _MarkedCopies:
    """Copy of a conversation with a marker word in each part."""

    def __init__(self, messages: Messages, tools: Objects, documents: Objects) -> None:
        self._words = (f"Word{number:06d}" for number in itertools.count())
        self.parts: list[_MarkedPart] = []
        self.messages = [self._message(message, number) for number, message in enumerate(messages)]
        self.tools = [{**tool, "function": {**tool["function"], "name": self._word("tools", 0)}} for tool in tools]
        self.documents = [self._document(document, number) for number, document in enumerate(documents)]

    def _word(self, kind: str, number: int) -> str:
        word = next(self._words)
        self.parts.append(_MarkedPart(kind, number, [word]))
        return word

    def misplaced(self, places: Mapping[str, int]) -> list[int]:
        """Return the numbers of messages whose text follows their calls.

        Raises RequestError for a result before its call. places: of the words that are shown.
        """
        texts: dict[int, int] = {}
        calls: dict[int, int] = {}
        for part in self.parts:
            place = min((places[word] for word in part.words if word in places), default=None)
            if place is not None and part.kind == "content":
                texts[part.number] = place
            elif place is not None and part.kind == "tool_calls":
                calls[part.number] = min(place, calls.get(part.number, place))
        late = [number for number, place in calls.items() if texts.get(number, -1) > place]
        last_call = -1
        for number, message in enumerate(self.messages):
            last_call = calls.get(number, last_call)
            if message["role"] == "tool" and texts.get(number, last_call) < last_call:
                raise refusal("order", number)
        return late

    def _message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        marked = dict(message)
        if str(message.get("content") or "").strip():
            marked["content"] = self._word("content", number)
        elif text_of(message).strip():
            self._word("content", number)
        if "name" in message and message["role"] != "tool":
            marked["name"] = self._word("name", number)
        if "tool_calls" in message:
            marked["tool_calls"] = [self._call(call, number) for call in message["tool_calls"]]
        return marked

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        marked = {**call, "function": dict(call["function"])}
        _rename(marked, self._word("tool_calls", number))
        function = marked["function"]
        if isinstance(function["arguments"], str):
            function["arguments"] = json.dumps({"x": self._word("tool_calls", number)})
        elif function["arguments"]:
            key = self._word("tool_calls", number)
            function["arguments"] = {key: self._word("tool_calls", number)}
        return marked

    def _document(self, document: dict[str, Any], number: int) -> dict[str, Any]:
        words: list[str] = []
        marked = dict(document)
        for key, value in document.items():
            if isinstance(value, str):
                words.append(next(self._words))
                marked[key] = words[-1]
        self.parts.append(_MarkedPart("documents", number, words))
        return marked


def _rename(call: dict[str, Any], name: str) -> None:
    old = call["function"]["name"]
    call["function"]["name"] = name
    call["id"] = call["id"].replace(f"functions.{old}:", f"functions.{name}:")


def _shows_late_system_prompts(render: Render) -> bool:
    """Return whether a system prompt between turns is shown in its place, in one conversation."""
    roles = ("user", "assistant", "system", "user", "assistant", "user")
    words = [f"Word{number:06d}" for number in range(len(roles))]
    probe = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    try:
        before, _, _ = render(probe[:2], (), ()).partition(words[1])
        prompt = render(probe, (), ())
    except Exception:  # templates raise jinja2's errors and any others
        return False
    return prompt.startswith(before) and _MARKER.findall(prompt) == words


def _moves_system_prompts(render: Render) -> bool:
    """Return whether the template shows a system prompt in another place after a further turn."""
    roles = ("system", "user", "assistant", "user")
    words = [f"Word{number:06d}" for number in range(len(roles))]
    probe = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    try:
        places = _MARKER.findall(render(probe, (), ()))
    except Exception:  # templates raise jinja2's errors and any others
        return False
    return words[0] in places and places.index(words[0]) > 0


def _with_tools_in_system(render: Render, messages: Messages, tools: Objects, documents: Objects) -> str:
    system = {"role": "system", "content": ""}
    rest = messages
    if messages and messages[0]["role"] == "system":
        system = messages[0]
        rest = messages[1:]
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return render([{**system, "tools": listed}, *rest], (), documents)


def log_failure(error: BaseException | None, messages: Objects, tools: Objects) -> None:
    """Log a mistake in the template, and the conversations that it refuses, without their texts."""
    kinds: dict[str, None] = {}
    for message in messages:
        kinds[message["role"] + (" with calls" if "tool_calls" in message else "")] = None
    if tools:
        kinds["with tools"] = None
    log.warning(
        "the chat template fails (%s) for messages of %s, and such chats are refused; correct it, or choose another "
        "by --chat-template",
        _fault(error),
        ", ".join(kinds),
    )


def _fault(error: BaseException | None) -> str:
    """Return the type and place of a mistake. Its message may quote the conversation."""
    return f"{type(error).__name__} on line {_failed_line(error)}"


def _failed_line(error: BaseException | None) -> int | None:
    """Return the line of a mistake in the template; None for its intended errors."""
    if type(error) is TemplateError:
        return None
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    if error is None:
        return None
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


def _distinguishes(messages: Messages, number: int) -> bool:
    """Return whether a name distinguishes participants of the same role."""
    role = messages[number]["role"]
    names = {message["name"] for message in messages if message["role"] == role and "name" in message}
    return len(names) > 1
