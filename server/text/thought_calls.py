"""Finds a whole, valid call in open thoughts. Such a call ends them; its mark alone does not.

The closing mark of thoughts ends them in any place, as it does for the engine, so no call contains
it. Not for: reading the call (`tool_calls.py`), to which its text is passed on.
"""

from __future__ import annotations

import json
from typing import Any

from server.text.argument_types import follows
from server.text.call_pieces import CallParts, Calls, Piece
from server.text.tool_calls import call_reader
from server.text.tools import ToolUse


class ThoughtCalls:
    """Search in the thoughts of one answer."""

    def __init__(self, use: ToolUse, response_template: dict[str, Any] | None) -> None:
        self._use = use
        self._template = response_template
        self._schemas = {tool.function.name: tool.function.parameters or {} for tool in use.tools}
        self.held = ""
        """Text that may be a call, or its beginning."""
        self._begin()

    def _begin(self) -> None:
        self._calls = Calls(self._use.names)
        self._reader = call_reader(self._calls, self._use, self._template)
        self._has_begun = False

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str | None]:
        """Return the thought in the text, and the text from a whole call on, if there is one."""
        self.held += text
        output = CallParts()
        self._reader.feed(text, output)
        if is_last:
            self._reader.finish(output)
        num_sure = 0
        for part in output.parts():
            self._has_begun = self._has_begun or isinstance(part, Piece)
            if not self._has_begun and isinstance(part, str):
                num_sure += len(part)
        thought = self.held[:num_sure]
        self.held = self.held[num_sure:]
        if self._calls.num_ended and self._is_valid():
            return thought, self._given_back()
        if is_last or self._calls.num_ended or self._calls.num_broken:
            thought += self._given_back()
            self._begin()
        return thought, None

    def close(self) -> str:
        """Return the held text, which is a thought because the thoughts end."""
        return self._given_back()

    def is_in_call(self, text: str) -> bool:
        """Return whether a call is open after further text of the answer."""
        self._reader.feed(text, CallParts())
        return self._reader.is_open

    def _given_back(self) -> str:
        held = self.held
        self.held = ""
        return held

    def _is_valid(self) -> bool:
        call = self._calls.calls[0]
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return False
        return follows(arguments, self._schemas[call.name], is_exact=call.name in self._use.followed)
