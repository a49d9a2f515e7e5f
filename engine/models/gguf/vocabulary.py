"""Reads a GGUF file's vocabulary: tokens, types, and roles.

Types and roles are corrected by tokens' texts as in llama.cpp (llama-vocab.cpp), because
many files have wrong ones: texts that end answers, and marks of infilling, are control
tokens. Not for: splitting texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gguf import TokenType

from engine.errors import ConfigError

_PREFIX = "tokenizer.ggml."
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)
"""Texts of tokens that end an answer in any file."""
_INFILLING = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
"""Texts of tokens for infilling by role, for files that do not name the token of the role."""
_FORMER_ROLES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_INFILLING_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_CALLS, _RETURNS = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
"""In a vocabulary with a text of each set, <|end|> ends a message and no answer."""


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """Tokens of a GGUF file."""

    tokens: tuple[str, ...]
    """Texts by id."""
    types: tuple[int, ...]
    """`gguf.TokenType` by id, as the file states it."""
    scores: tuple[float, ...]
    """Score by id; empty if the file has none."""
    merges: tuple[tuple[str, str], ...]
    """Pairs of texts in the order of their merging; empty if the file has none."""
    roles: Mapping[str, int]
    """Id of each role in the file: `bos`, `eos`, `eot`, `eom`, `fim_pre` ..."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each text."""
        return {token: number for number, token in enumerate(self.tokens)}

    @cached_property
    def controls(self) -> frozenset[int]:
        """Tokens that texts contain only if special tokens are read: control and unknown tokens."""
        by_type = (i for i, kind in enumerate(self.types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN))
        return frozenset(by_type) | self._ids(_ENDS) | frozenset().union(*self._infilling.values())

    @cached_property
    def user_defined(self) -> frozenset[int]:
        """Tokens that are found in a text before it is split, and that are no control tokens."""
        defined = (i for i, kind in enumerate(self.types) if kind == TokenType.USER_DEFINED)
        return frozenset(defined) - self.controls

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer, in their order."""
        named = {self.roles[role] for role in ("eos", "eot", "eom", *_INFILLING_ENDS) if role in self.roles}
        texts = set(_ENDS)
        if self._ids(_CALLS) and self._ids(_RETURNS):
            texts.discard("<|end|>")
        if "<|tool_response>" in self.ids:
            texts.discard("</s>")
        infilling = frozenset().union(*(self._infilling[role] for role in _INFILLING_ENDS))
        return tuple(sorted(named | self._ids(texts) | infilling))

    @cached_property
    def _infilling(self) -> dict[str, frozenset[int]]:
        """Tokens of each role of infilling that the file does not name, found by their texts."""
        return {
            role: frozenset() if role in self.roles else self._ids(texts.split()) for role, texts in _INFILLING.items()
        }

    def _ids(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset(self.ids[text] for text in texts if text in self.ids)

    def text(self, role: str) -> str | None:
        """Return the text of a role's token, or None if the file names none."""
        return self.tokens[self.roles[role]] if role in self.roles else None


def read_vocabulary(metadata: Mapping[str, Any], default_roles: Mapping[str, int]) -> GgufVocabulary:
    """Read a file's vocabulary; raise ConfigError for one that cannot be used.

    default_roles: ids of roles that the file does not name.
    """
    stored = metadata.get(f"{_PREFIX}tokens")
    if stored is None or not len(stored):
        raise ConfigError(f"{_PREFIX}tokens is missing: the file has no vocabulary; name a folder with --tokenizer")
    tokens = tuple(str(token) or f"[EMPTY_{number}]" for number, token in enumerate(stored))
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ConfigError(f"{_PREFIX}tokens has {twice!r} twice; convert the model again")
    types = _numbers(metadata, "token_type", len(tokens)) or [int(TokenType.NORMAL)] * len(tokens)
    return GgufVocabulary(
        tokens=tokens,
        types=tuple(map(int, types)),
        scores=tuple(map(float, _numbers(metadata, "scores", len(tokens)))),
        merges=_merges(metadata, frozenset(tokens)),
        roles=_roles(metadata, len(tokens), default_roles),
    )


def _numbers(metadata: Mapping[str, Any], key: str, least: int) -> list[float]:
    """Return a list with a number for each token; empty if the file has none."""
    stored = metadata.get(_PREFIX + key)
    if stored is None:
        return []
    if len(stored) < least:
        raise ConfigError(f"{_PREFIX}{key} has {len(stored)} entries for {least} tokens; convert the model again")
    return list(stored[:least])


def _merges(metadata: Mapping[str, Any], tokens: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return the merges; of two equal merges the first counts."""
    merges: dict[tuple[str, str], None] = {}
    for merge in metadata.get(f"{_PREFIX}merges", ()):
        cut = str(merge).find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        missing = [text for text in (left, right, left + right) if text not in tokens]
        if cut < 0 or missing:
            raise ConfigError(f"{_PREFIX}merges has {merge!r}, which does not join tokens; convert the model again")
        merges.setdefault((left, right))
    return tuple(merges)


def _roles(metadata: Mapping[str, Any], num_tokens: int, defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the id of each named role; ids outside the vocabulary count as not named."""
    named = dict(defaults)
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding", *_INFILLING):
        for name in (role, _FORMER_ROLES.get(role, role)):
            number = metadata.get(f"{_PREFIX}{name}_token_id")
            if number is not None and int(number) < num_tokens:
                named[role] = int(number)
    return {role: number for role, number in named.items() if number < num_tokens}
