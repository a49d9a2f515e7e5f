"""Images and files in messages, which no model here reads: placeholders, or an error that says how.

What the user asks about now is refused in any case. Results of tools and earlier turns may have
placeholders instead, so that one picture does not end a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.api import RequestError
from server.wire.fields import Message, TextPart
from server.wire.unsupported_fields import UNSUPPORTED

_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "file",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
"""Attachments by the type of a part, in the names of all APIs."""


def is_attachment(part_type: Any) -> bool:
    """Whether parts of this type, as a client sent it, are attachments."""
    return isinstance(part_type, str) and part_type in _KINDS


def replace_attachments(messages: Sequence[Message], may_replace: bool) -> list[str]:
    """Replace attachments that the answer is not about by placeholders; return their kinds.

    Raises RequestError for such an attachment if `may_replace` is false.
    """
    kinds: dict[str, None] = {}
    for part in _earlier_parts(messages):
        kind = _KINDS.get(part.type)
        if kind is None:
            continue
        if not may_replace:
            raise RequestError(
                f"messages: parts of type {part.type!r} are not supported; send text, or attachment_placeholders: true "
                "to leave out what is in results of tools and in earlier turns (the operator: "
                "--attachment-placeholders)",
                "messages",
                UNSUPPORTED,
            )
        part.type = "text"
        part.text = f"[{kind} left out: this model reads text only]"
        kinds[kind] = None
    return list(kinds)


def _earlier_parts(messages: Sequence[Message]) -> Iterator[TextPart]:
    """Yield the parts of all messages but those of the user that are answered now."""
    last_answer = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
    for number, message in enumerate(messages):
        is_answered_now = message.role == "user" and number > last_answer
        if isinstance(message.content, list) and not is_answered_now:
            yield from message.content
