"""Reads the tokens that grammars refer to from a tokenizer's file.

A token is either text or special. Text of a grammar, such as a word in a schema, is spelled with
text tokens only: special tokens (`special: true`, ends of answers) never stand for their name.
Added tokens that are not special, such as Qwen's `<tool_call>`, are text, because answers are read
as text. A grammar refers to a special token by its number in Lark, `<[2]>`.

Not for: following grammars (`grammar_process.py`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer

from engine.config import GrammarConfig
from engine.models.files import model_file

if TYPE_CHECKING:  # only the process that follows grammars needs the library
    from llguidance import LLTokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """To the process: vocabulary and limits of its children."""

    tokenizer: str
    """Folder with tokenizer.json, or a hub name."""
    revision: str | None
    vocab_size: int
    eos_token_ids: list[int]
    limits: GrammarConfig
    """Each child exits if it reads its grammar for longer."""


def read_vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    """Read the tokens that masks refer to; raise whatever llguidance raises."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    file = model_file(vocabulary.tokenizer, "tokenizer.json", vocabulary.revision)
    if file is None:
        raise FileNotFoundError("there is none")
    description = file.read_text(encoding="utf-8")
    size = max(vocabulary.vocab_size, LLTokenizer(description).vocab_size)
    # The library takes all added tokens of the form <...> for special tokens.
    named = LLTokenizer(description, n_vocab=size, eos_token=vocabulary.eos_token_ids or None)
    tokens = GrammarTokens(description, named)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=size, eos_token=named.eos_tokens)


class GrammarTokens:
    """Tokens of a vocabulary as llguidance reads them: bytes, special tokens, and an encoder."""

    def __init__(self, description: str, named: LLTokenizer) -> None:
        """description: contents of tokenizer.json; named: the same file as read by the library."""
        self._named = named
        without_space = _without_prefix_space(json.loads(description))
        self._encoder: Any = Tokenizer.from_str(json.dumps(without_space))
        self._encoder.encode_special_tokens = True
        added = self._encoder.get_added_tokens_decoder()
        added_text = {token for token, content in added.items() if not content.special}
        text_tokens = added_text - {*named.eos_tokens}
        self.eos_token_id = named.eos_token
        self.bos_token_id = None
        vocabulary = range(named.vocab_size)
        self.tokens = [named.decode_bytes([token]) for token in vocabulary]
        special = [token for token in vocabulary if named.is_special_token(token)]
        self.special_token_ids = [token for token in special if token not in text_tokens]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Return a text's tokens by the model's tokenizer, without a space before it.

        Raises TypeError for bytes, which the library tries.
        """
        tokens: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        is_same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        if is_same and self._special.isdisjoint(tokens):
            return tokens
        return self._named.greedy_tokenize(text)


def _without_prefix_space(part: Any) -> Any:
    """Return the description of a tokenizer that inserts no space before a text."""
    if isinstance(part, list):
        return [_without_prefix_space(element) for element in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changed = dict(part)
    for key, value in part.items():
        if key not in ("model", "added_tokens"):
            changed[key] = _without_prefix_space(value)
    if "add_prefix_space" in part:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in part:
        changed["prepend_scheme"] = "never"
    return changed
