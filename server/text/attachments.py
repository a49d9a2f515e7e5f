"""Images and files in messages, which no served model reads: placeholders, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.api import RequestError
from server.wire.fields import Message
from server.wire.unsupported_fields import UNSUPPORTED

_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio"),
    "video_url": "video",
}
"""Attachments by the type of a part, in the names of all APIs."""
_WAY_OUT = (
    "send text, or attachment_placeholders: true to leave out what is in results of tools and in earlier turns (the "
    "operator: --attachment-placeholders)"
)


def is_attachment(part_type: Any) -> bool:
    """Whether parts of this type, as a client sent it, are attachments."""
    return isinstance(part_type, str) and part_type in _KINDS


def replace_attachments(messages: Sequence[Message], may_replace: bool) -> list[str]:
    """Replace attachments by placeholders, except the user's after the last answer; return kinds.

    Raises RequestError for an attachment that would be replaced if `may_replace` is false.
    """
    kinds: dict[str, None] = {}
    last_answer = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
    for number, message in enumerate(messages):
        is_answered_now = message.role == "user" and number > last_answer
        if not isinstance(message.content, list) or is_answered_now:
            continue
        for part in filter(lambda part: part.type in _KINDS, message.content):
            if not may_replace:
                raise RequestError(
                    f"messages: parts of type {part.type!r} are not supported; {_WAY_OUT}", "messages", UNSUPPORTED
                )
            kinds[_KINDS[part.type]] = None
            part.text = f"[{_KINDS[part.type]} left out: this model reads text only]"
            part.type = "text"
    return list(kinds)
