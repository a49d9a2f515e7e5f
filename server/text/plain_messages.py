"""Encodes chats in which clients' text never becomes control tokens.

Before a chat is rendered, each spelling of a control token in the client's text gets a break inside
it, which no client can guess. In the rendered prompt, spellings without a break are the template's
own. They get other names, which a copy of the tokenizer knows in their place, and the breaks are
removed. So one encoding of the whole prompt turns the template's marks into control tokens and the
same words of clients into ordinary text.

Control tokens are special tokens, and other added tokens with signs that the chat template
contains, such as Qwen's <tool_call>. Not for: raw prompts of completions, which belong to the
client as a whole.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.api import ConfigError


class PlainMessages:
    """Breaks in the texts of messages, and the encoder of prompts with such breaks."""

    def __init__(self, backend: Any, chat_template: str) -> None:
        """Raises ConfigError for a tokenizer that cannot write a control token as text."""
        added = backend.get_added_tokens_decoder()
        self._controls: dict[str, int] = {}
        for number, token in added.items():
            text = token.content
            is_mark = text in chat_template and not text.strip().isalnum()
            if text.strip() and (token.special or is_mark):
                self._controls[text] = number
        secret = secrets.token_hex(8)
        self._break = f"\ufdd0{secret}\ufdd1"
        self._breaks = (self._break, json.dumps(self._break)[1:-1])
        self._names = {text: f"\ufdd2{secret}{number}\ufdd3" for text, number in self._controls.items()}
        self._find = re.compile(_pattern([*self._controls]) or r"(?!)")
        self._beginnings = {text[:length] for text in self._controls for length in range(1, len(text))}
        self._longest = max(map(len, self._controls), default=1)
        texts = {number: token.content for number, token in added.items()}
        self._copy, self._numbers = self._renamed(backend, texts)
        self._check(backend)

    def escaped(self, value: Any) -> Any:
        """Return a client's value with breaks in spellings of control tokens."""
        if isinstance(value, str):
            return self._escaped_text(value)
        if isinstance(value, Mapping):
            return {self.escaped(key): self.escaped(element) for key, element in value.items()}
        if isinstance(value, list | tuple):
            return [self.escaped(element) for element in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        named = self._find.sub(lambda match: self._names[match[0]], text)
        (encoded,) = self._copy.encode_batch_fast([self.without_breaks(named)], add_special_tokens=False)
        return [self._numbers.get(number, number) for number in encoded.ids]

    def without_breaks(self, text: str) -> str:
        """Return a rendered prompt without breaks, also without those written in JSON."""
        for spelling in self._breaks:
            text = text.replace(spelling, "")
        return text

    def _escaped_text(self, text: str) -> str:
        broken = self._find.sub(lambda match: match[0][:1] + self._break + match[0][1:], text)
        # The text after it, of the template or of another part, could complete a control token.
        body = broken.rstrip()
        if any(body[-length:] in self._beginnings for length in range(1, self._longest)):
            broken = body + self._break + broken[len(body) :]
        return broken

    def _renamed(self, backend: Any, added: Mapping[int, str]) -> tuple[Any, dict[int, int]]:
        """Return a copy with other names of control tokens, and the number of each number."""
        description = json.loads(backend.to_str())
        for token in description["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        copy = Backend.from_str(json.dumps(description))
        names = {number: self._names.get(text, text) for number, text in added.items()}
        numbers = {copy.token_to_id(name): number for number, name in names.items()}
        return copy, {copied: number for copied, number in numbers.items() if copied is not None}

    def _check(self, backend: Any) -> None:
        """Raise ConfigError if the copy encodes a control token in another way."""
        controls = frozenset(self._controls.values())
        for text in self._controls:
            around = f"a{text}b"
            right = backend.encode(around, add_special_tokens=False).ids
            spelled = [self.encode(self._escaped_text(spelling)) for spelling in (text, around)]
            if self.encode(around) != right or not all(map(controls.isdisjoint, spelled)):
                raise ConfigError(
                    f"--special-tokens-in-messages text: this tokenizer cannot write {text!r} as text; leave it out"
                )


def _pattern(words: Sequence[str]) -> str:
    """Return a regular expression for the longest of some words."""
    rests: dict[str, list[str]] = {}
    for word in filter(None, words):
        rests.setdefault(word[0], []).append(word[1:])
    if not rests:
        return ""
    choices = "|".join(re.escape(first) + _pattern(rest) for first, rest in rests.items())
    is_optional = "" in words
    return f"(?:{choices})?" if is_optional else f"(?:{choices})"
