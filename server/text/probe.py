"""Renders questions and answers with a tokenizer's chat template at start, to see what it does.

Not for: prompts of requests (`rendering.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.api import RequestError
from server.text.tokenizer import Tokenizer
from server.wire.fields import Function, Tool

QUESTION, ANSWER, THOUGHT = "Polydraft-question", "Polydraft-answer", "Polydraft-thought"
NAME = "polydraft_probe"
ARGUMENTS = {"text": 'It is "so".', "count": 3}
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
TOOL = Tool(type="function", function=Function(name=NAME, description="Probe.", parameters=_SCHEMA))
_THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)


class Probe:
    """Prompts of one chat template; None stands for a conversation that it refuses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.plain = self.question()

    def question(
        self, variables: Mapping[str, Any] | None = None, word: str = "", has_tools: bool = False
    ) -> str | None:
        """Return the prompt of a question; word: added to its text."""
        return self._rendered([{"role": "user", "content": QUESTION + word}], variables, has_tools, True)

    def answer(self, has_thoughts: bool = False, has_tools: bool = False, **message: Any) -> str | None:
        """Return a conversation that ends with an answer."""
        thoughts = _THOUGHTS if has_thoughts else {}
        answer = {"role": "assistant", "content": "", **thoughts, **message}
        return self._rendered([{"role": "user", "content": QUESTION}, answer], None, has_tools, False)

    def earlier_answer(self, content: str) -> str | None:
        """Return a conversation with an answer before the last question."""
        user = {"role": "user", "content": QUESTION}
        return self._rendered([user, {"role": "assistant", "content": content}, user], None, False, True)

    def _rendered(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None, has_tools: bool, is_open: bool
    ) -> str | None:
        tools = [TOOL.model_dump(exclude_none=True)] if has_tools else []
        try:
            return self.tokenizer.render_chat(
                messages, add_generation_prompt=is_open, variables=dict(variables or {}), tools=tools
            )
        except RequestError:
            return None


def tail(prompt: str) -> str:
    """Return the text after the last question of a prompt."""
    return prompt.rpartition(QUESTION)[2]


def beyond(text: str, other: str) -> str:
    """Return the part of a text from the first character on in which it differs from another."""
    for place, (character, other_character) in enumerate(zip(text, other, strict=False)):
        if character != other_character:
            return text[place:]
    return text[len(other) :]
