"""Contents of messages as texts or as lists of parts, as the chat template shows them.

Templates of SmolVLM, Idefics and LLaVA show parts alone, others the parts of one role. The form is
found once, by rendering, and is the last change before a template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.text.chat_variants import Messages

_WORD, _THOUGHT = "Polydraft-word", "Polydraft-thought"
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {}}}
_THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
_BEFORE: dict[str, Messages] = {
    "user": [],
    "system": [],
    "assistant": [{"role": "user", "content": "Hello"}],
    "tool": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
}


@dataclass(frozen=True)
class ContentForm:
    """Roles whose contents are lists of parts."""

    roles: frozenset[str] = frozenset()
    has_thought_parts: bool = False

    def of(self, messages: Messages) -> Messages:
        """Return the messages in this form."""
        if not self.roles:
            return messages
        return [self._formed(message) for message in messages]

    def _formed(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        has_thought = self.has_thought_parts and "thinking" in message
        if message["role"] not in self.roles or content is None:
            return message
        if self.has_thought_parts and message["role"] == "assistant" and not has_thought:
            return message
        parts = [{"type": "text", "text": content}]
        if has_thought:
            parts.insert(0, {"type": "thinking", "thinking": message["thinking"]})
        return {**message, "content": parts}


def content_form(render: Callable[[Messages, Any, Any], str]) -> ContentForm:
    """Return the form in which the template shows the content of each role."""
    form = ContentForm()
    for role, before in _BEFORE.items():
        more = {"tool_call_id": _CALL["id"]} if role == "tool" else {}
        messages = [*before, {"role": role, "content": _WORD, **more}]
        if role == "system":
            messages.append({"role": "user", "content": "Hello"})
        with_parts = ContentForm(form.roles | {role})
        if not _shows(render, form.of(messages), _WORD) and _shows(render, with_parts.of(messages), _WORD):
            form = with_parts
    thoughtful = [*_BEFORE["assistant"], {"role": "assistant", "content": _WORD, **_THOUGHTS}]
    with_thoughts = ContentForm(form.roles | {"assistant"}, has_thought_parts=True)
    if "assistant" in form.roles or _shows(render, form.of(thoughtful), _THOUGHT):
        return form
    if _shows(render, with_thoughts.of(thoughtful), _WORD, _THOUGHT):
        return with_thoughts
    return form


def _shows(render: Callable[[Messages, Any, Any], str], messages: Messages, *words: str) -> bool:
    try:
        text = render(messages, (), ())
    except Exception:  # templates raise jinja2's errors and any others
        return False
    return all(word in text for word in words) and "'type'" not in text and '"type"' not in text
