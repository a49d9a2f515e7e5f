"""llama.cpp's own tokenizer of a GGUF file, as the reference.

Optional: needs llama-cpp-python. Not for: decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


class LlamaCppVocabulary:
    """Vocabulary of a file, loaded without weights."""

    def __init__(self, path: Path) -> None:
        """Load a vocabulary.

        Raises ConfigError if llama-cpp-python is missing, or does not load it.
        """
        try:
            import llama_cpp
        except ImportError as error:
            raise ConfigError(
                "llama-cpp-python is needed to compare with llama.cpp: pip install llama-cpp-python"
            ) from error
        try:
            self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        except ValueError as error:
            raise ConfigError(f"{path}: llama.cpp does not load this vocabulary ({error})") from error
        self._api: Any = llama_cpp
        self._vocab = self._model._model.vocab
        self.num_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self.pieces = [self._piece(number) for number in range(self.num_tokens)]
        """Bytes of each token, special tokens included."""

    def __enter__(self) -> LlamaCppVocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text.

        add_special: with the tokens that each text begins or ends with. parse_special: control
        tokens that the text spells become tokens.
        """
        content = text.encode()
        room = len(content) + 4
        tokens = (ctypes.c_int32 * room)()
        count = self._api.llama_tokenize(self._vocab, content, len(content), tokens, room, add_special, parse_special)
        assert count >= 0, "a token has at least one byte"
        return list(tokens[:count])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens as llama.cpp's server writes it, token by token."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")

    def facts(self) -> dict[str, Any]:
        """Return the roles of tokens."""
        api, vocab = self._api, self._vocab
        ends = [number for number in range(self.num_tokens) if api.llama_vocab_is_eog(vocab, number)]
        return {
            "ends": ends,
            "begin": int(api.llama_vocab_bos(vocab)),
            "adds_begin": bool(api.llama_vocab_get_add_bos(vocab)),
            "adds_end": bool(api.llama_vocab_get_add_eos(vocab)),
        }

    def _piece(self, token: int) -> bytes:
        room = 512
        text = ctypes.create_string_buffer(room)
        count = self._api.llama_token_to_piece(self._vocab, token, text, room, 0, True)
        assert count >= 0, "tokens have at most 512 bytes"
        return text.raw[:count]
