"""Log probabilities of an answer's tokens in OpenAI's formats.

They come from the target model's distribution before temperature, filters, bias and penalties. They
do not depend on sampling or on speculation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from engine.api import TokenLogprob
from server.text.tokenizer import Tokenizer
from server.wire.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
    raw_list,
)

_LEAST = -9999.0
"""OpenAI's value for a probability of 0; JSON has no infinity."""
_PER_SLICE = 64
"""Number of tokens (with their alternatives) per call of the encoder."""


@dataclass(frozen=True)
class SpelledToken:
    """Emitted token with its logprob, and the likeliest tokens at its position."""

    text: str
    raw: bytes
    logprob: float | None
    """Log probability; None for the first token of a prompt."""
    top: tuple[tuple[str, bytes, float], ...]
    offset: int
    """Number of characters of the answer before it."""
    rank: int | None = None
    """Index of the token among the likeliest tokens; None if it is not among them."""


def spell(tokenizer: Tokenizer, token: int, scores: TokenLogprob | None, offset: int) -> SpelledToken:
    """Return a token with its text; scores: None for the first token of a prompt."""
    if scores is None:
        return SpelledToken(*tokenizer.spell(token), None, (), offset)
    top = tuple((*tokenizer.spell(other), max(score, _LEAST)) for other, score in scores.top)
    rank = next((index for index, (other, _) in enumerate(scores.top) if other == token), None)
    return SpelledToken(*tokenizer.spell(token), max(scores.logprob, _LEAST), top, offset, rank)


def chat_logprobs(tokens: Sequence[SpelledToken]) -> ChatLogprobs:
    """Return `logprobs` of a chat choice or chunk."""
    entries = (
        ChatTokenLogprob(
            token.text,
            token.logprob if token.logprob is not None else _LEAST,
            list(token.raw),
            [TopLogprob(text, score, list(raw)) for text, raw, score in token.top],
        )
        for token in tokens
    )
    return ChatLogprobs(raw_list(entries, _PER_SLICE))


def completion_logprobs(tokens: Sequence[SpelledToken]) -> CompletionLogprobs:
    """Return `logprobs` of a completion, the emitted token among the likeliest."""
    ranked = (None if token.logprob is None else _ranked(token, token.logprob) for token in tokens)
    return CompletionLogprobs(
        tokens=[_name(token.text, token.raw) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=raw_list(ranked, _PER_SLICE),
        text_offset=[token.offset for token in tokens],
    )


def _ranked(token: SpelledToken, logprob: float) -> dict[str, float]:
    """Return logprobs by name. A token whose text another one has is named by its bytes."""
    token_name = _name(token.text, token.raw)
    ranked: dict[str, float] = {}
    for index, (text, raw, score) in enumerate(token.top):
        name = _name(text, raw)
        if index == token.rank:
            ranked[token_name] = logprob
        elif name == token_name or name in ranked:
            ranked.setdefault(_name_of_bytes(raw), score)
        else:
            ranked[name] = score
    ranked[token_name] = logprob
    return ranked


def _name(text: str, raw: bytes) -> str:
    """Return a token's text, or its bytes if they are a part of a character."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return _name_of_bytes(raw)
    return text


def _name_of_bytes(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Iterable[TokenLogprob], num_top: int
) -> msgspec.Raw:
    """Return `prompt_logprobs` of a choice in vLLM's format."""

    def place_of(token: int, scores: TokenLogprob) -> dict[str, PromptLogprob]:
        place = {}
        for rank, (other, score) in enumerate(scores.top[:num_top], start=1):
            text, _ = tokenizer.spell(other)
            place[str(other)] = PromptLogprob(max(score, _LEAST), text, rank)
        if str(token) not in place:
            text, _ = tokenizer.spell(token)
            place[str(token)] = PromptLogprob(max(scores.logprob, _LEAST), text)
        return place

    places = itertools.starmap(place_of, zip(prompt[1:], logprobs, strict=True))
    return raw_list(itertools.chain([None], places), _PER_SLICE)
