"""Reads answers of several messages, each between a header and an end mark (Solar Open, Kimi K3).

Thoughts and texts lose their marks. Calls keep the header, for the reader of calls. Not for:
harmony, whose headers have channels and recipients (`harmony.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.text.reasoning import CallEnd, CallHeader, Thought
from server.text.stops import num_held


@dataclass(frozen=True)
class MessageFormat:
    """Marks around messages."""

    thought: tuple[str, str]
    """Header and end."""
    text: tuple[str, str]
    call: tuple[str, str]
    ignored: tuple[str, ...] = ()
    """Texts between messages."""

    def headers(self) -> Mapping[str, tuple[str, str]]:
        """Return the messages by their header."""
        return {message[0]: message for message in (self.thought, self.text, self.call)}


MESSAGE_FORMATS = {
    "solar_open": MessageFormat(
        ("<|think|>", "<|end|>"), ("<|content|>", "<|end|>"), ("<|tool_calls|>", "<|calls|>"), ("<|begin|>assistant",)
    ),
    "kimi_k3": MessageFormat(
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ("<|close|>message<|sep|>", "<|end_of_msg|>"),
    ),
}


class TaggedMessages:
    """Parser of one answer's text, in pieces of any size. Text without a header is text."""

    holds_call = False
    has_called = False

    def __init__(self, form: MessageFormat, prompt_end: str) -> None:
        """prompt_end: last part of the prompt, which may have opened a message."""
        self._form = form
        self._headers = form.headers()
        end = prompt_end.rstrip()
        self._open = next((message for header, message in self._headers.items() if end.endswith(header)), None)
        self._is_blank = True
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""
        return self._open is self._form.thought

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""
        self._held += text
        parts: list[str | Thought] = []
        while self._held and self._advance(parts):
            pass
        if is_last:
            self._release(len(self._held), parts)
        return parts

    def _advance(self, parts: list[str | Thought]) -> bool:
        """Read a header or the text of a message. Returns whether more can be read."""
        if self._open is None:
            return self._read_header(parts)
        mark = self._open[1]
        if self._open is self._form.text and self._form.thought[1] in self._held.partition(mark)[0]:
            mark = self._form.thought[1]  # a grammar takes an opened text for thoughts
        end = self._held.find(mark)
        if end < 0:
            marks = [mark, self._form.thought[1]] if self._open is self._form.text else [mark]
            sure = self._held[: len(self._held) - num_held(self._held, marks)].rstrip()
            self._release(len(sure), parts)
            return False
        if self._open is self._form.call:
            self._release(end + len(mark), parts)
            parts.append(CallEnd(""))
        else:
            self._release(len(self._held[:end].rstrip()), parts)
            self._held = self._held.lstrip()[len(mark) :]
        self._open = None
        return True

    def _read_header(self, parts: list[str | Thought]) -> bool:
        start = self._held.lstrip()
        marks = [*self._headers, *self._form.ignored]
        mark = next((mark for mark in marks if start.startswith(mark)), None)
        if mark is None and any(one.startswith(start) for one in marks):
            return False
        if mark is None:
            self._open = self._form.text
            return True
        self._held = start.removeprefix(mark)
        self._open = self._headers.get(mark)
        self._is_blank = True
        if self._open is self._form.call:
            parts.append(CallHeader(mark))
        return True

    def _release(self, length: int, parts: list[str | Thought]) -> None:
        text = self._held[:length]
        self._held = self._held[length:]
        if self._is_blank:
            text = text.lstrip()
        if text:
            self._is_blank = False
            parts.append(Thought(text) if self.is_inside else text)
