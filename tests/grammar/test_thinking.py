"""Masks of thoughts for every answer and path, against the same by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import regex

from engine.grammar.thinking import ThinkingGrammar
from engine.request import Thinking

VOCABULARY, OPENS, CLOSES, END = 5, 3, 2, 4
# A config may name an end that is no token of the model.
FACTS: Any = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=[END, VOCABULARY])


class Alternating:
    """A grammar of 0 and 1 in turn, from 0; after two tokens only an end."""

    def __init__(self) -> None:
        self.emitted: list[int] = []

    def check_answer(self, emitted: Sequence[int]) -> None:
        self.emitted += emitted

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[Any]]:
        return lambda: [alternating((*answer, *path)) for path in paths]


def alternating(answer: tuple[int, ...]) -> np.ndarray | None:
    if END in answer:
        return None
    mask = np.zeros(VOCABULARY, dtype=bool)
    mask[END if len(answer) > 1 else len(answer)] = True
    return mask


def by_hand(thinking: Thinking, text: tuple[int, ...], has_grammar: bool) -> np.ndarray:
    """[V] what may follow a text, in the plainest way."""
    free = np.ones(VOCABULARY, dtype=bool)
    begun = thinking.is_begun or text[:1] == (OPENS,)
    if begun and CLOSES not in text:
        length = len(text) - (0 if thinking.is_begun else 1)
        if thinking.budget is not None and length >= thinking.budget:
            return np.arange(VOCABULARY) == CLOSES
        return np.arange(VOCABULARY) != END if has_grammar else free
    if not has_grammar:
        return free
    mask = alternating(text[text.index(CLOSES) + 1 :] if begun else text)
    if mask is not None and not text:
        mask[OPENS] = True
    return free if mask is None else mask


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 1, 2])
@pytest.mark.parametrize("has_grammar", [True, False])
def test_masks_equal_the_ones_by_hand(is_begun: bool, budget: int | None, has_grammar: bool) -> None:
    """Every answer of up to three tokens, and every path of up to two below it, in one call."""
    thinking = Thinking(opens=(OPENS,), closes=CLOSES, is_begun=is_begun, budget=budget, may_end=not has_grammar)
    paths = [path for size in range(3) for path in itertools.product(range(VOCABULARY), repeat=size)]
    for size in range(4):
        for answer in itertools.product(range(VOCABULARY), repeat=size):
            followed = ThinkingGrammar(thinking, FACTS, Alternating() if has_grammar else None)
            for path, mask in zip(paths, followed.masks(answer, paths)(), strict=True):
                expected = by_hand(thinking, (*answer, *path), has_grammar)
                got = np.ones(VOCABULARY, dtype=bool) if mask is None else mask
                assert got.dtype == bool
                assert (got == expected).all(), (answer, path)


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 1, 2])
@pytest.mark.parametrize("has_grammar", [True, False])
def test_tokens_that_the_masks_of_thoughts_exclude_are_found(
    is_begun: bool, budget: int | None, has_grammar: bool
) -> None:
    """A step emits them if other masks exclude the rest."""
    thinking = Thinking(opens=(OPENS,), closes=CLOSES, is_begun=is_begun, budget=budget, may_end=not has_grammar)
    for text in itertools.product(range(VOCABULARY), repeat=4):
        for place in range(4):
            followed = ThinkingGrammar(thinking, FACTS, Alternating() if has_grammar else None)
            followed.masks(text[:place], [()])()
            thoughts = [at for at in range(place, 4) if CLOSES not in text[:at] and (is_begun or text[:1] == (OPENS,))]
            if not is_begun:
                # The first token is the grammar's, or an answer's.
                thoughts = [at for at in thoughts if at]
            expected = all(by_hand(thinking, text[:at], has_grammar)[text[at]] for at in thoughts)
            assert followed.allows(text[place:]) == expected, (text, place)


@pytest.mark.parametrize(
    ("is_begun", "steps", "seen"),
    [
        (True, [(0, 1), (1, CLOSES), (0, 1), (END,)], [0, 1, END]),
        (True, [(1, CLOSES, 0), (1, END)], [0, 1, END]),
        (False, [(OPENS,), (1, 1, CLOSES, 0), (1,)], [0, 1]),
        (False, [(0, 1), (END,)], [0, 1, END]),
        (True, [(0, 1, 1)], []),
    ],
)
def test_the_grammar_is_asked_about_what_comes_after_the_thoughts(
    is_begun: bool, steps: list[tuple[int, ...]], seen: list[int]
) -> None:
    grammar = Alternating()
    followed = ThinkingGrammar(Thinking(opens=(OPENS,), closes=CLOSES, is_begun=is_begun), FACTS, grammar)
    answer: tuple[int, ...] = ()
    for emitted in steps:
        followed.masks(answer, [()])()
        followed.check_answer(emitted)
        answer += emitted
    assert grammar.emitted == seen


def test_an_answer_may_be_checked_before_masks_were_asked_for() -> None:
    grammar = Alternating()
    followed = ThinkingGrammar(Thinking(opens=(OPENS,), closes=CLOSES, is_begun=True), FACTS, grammar)
    followed.check_answer((1, CLOSES, 0))
    assert grammar.emitted == [0]
    ThinkingGrammar(Thinking(opens=(OPENS,), closes=CLOSES, is_begun=True), FACTS).check_answer((1, CLOSES))


CHANNELS = Thinking(opens=(0, 1), closes=2, between=(3,), lead=(0, 4), is_begun=False, may_end=False)
"""Thoughts as `01...2`, a 3 before more of them or before the lead `04`; 5 ends."""
CHANNEL_FACTS: Any = SimpleNamespace(vocab_size=6, eos_token_ids=[5])
DEPTH = 6


class Letters:
    """A grammar that allows 1 alone."""

    def check_answer(self, emitted: Sequence[int]) -> None:
        assert set(emitted) <= {1}

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[Any]]:
        return lambda: [np.arange(6) == 1 for _ in paths]


def in_channels(text: str, budget: int | None) -> bool:
    """Return whether a text is thoughts within their budget, the lead and the grammar."""
    whole = regex.fullmatch("(?:01(?P<thought>[14]*)2(?:3|$))*041*", text, partial=True)
    if whole is None:
        return False
    before = text if not (lead := regex.search("(?:^|3)04", text)) else text[: lead.start()]
    blocks = regex.findall("01([14]*)", before)
    counts = [sum(map(len, blocks[:number])) for number in range(len(blocks))]
    return budget is None or (sum(map(len, blocks)) <= budget and all(count < budget for count in counts))


@pytest.mark.sampled
@pytest.mark.parametrize("budget", [None, 0, 1, 2])
def test_channels_lead_to_the_answer(budget: int | None) -> None:
    """All texts that the masks allow, against a regular expression."""
    thinking = msgspec.structs.replace(CHANNELS, budget=budget)
    allowed: list[tuple[int, ...]] = [()]
    for text in allowed:
        if len(text) == DEPTH:
            continue
        for place in (0, len(text)):
            followed = ThinkingGrammar(thinking, CHANNEL_FACTS, Letters())
            (mask,) = followed.masks(text[:place], [text[place:]])()
            mask = np.ones(6, dtype=bool) if mask is None else mask
            assert all(followed.allows((*text[place:], int(token))) for token in np.flatnonzero(mask))
        allowed += [(*text, int(token)) for token in np.flatnonzero(mask)]
    expected = {
        text
        for size in range(DEPTH + 1)
        for text in itertools.product(range(6), repeat=size)
        if in_channels("".join(map(str, text)), budget)
    }
    assert set(allowed) == expected


def test_thoughts_of_channels_have_a_budget_in_any_answer() -> None:
    """Without a grammar, other channels are free, and thoughts that begin anywhere count."""
    followed = ThinkingGrammar(msgspec.structs.replace(CHANNELS, budget=1, may_end=True), CHANNEL_FACTS)
    for answer, only in (((0, 1), None), ((0, 1, 4), 2), ((0, 5, 1, 2, 3, 0, 1, 1), 2), ((5, 0, 1, 4), 2)):
        (mask,) = followed.masks(answer, [()])()
        assert mask is None if only is None else np.flatnonzero(mask).tolist() == [only]
    for answer in ((0, 1, 4, 2, 3, 0), (0, 1, 4, 2, 5, 0), (0, 1, 4, 2, 3, 5, 2, 3, 0)):
        (mask,) = followed.masks(answer, [()])()
        assert mask is not None
        assert np.flatnonzero(~mask).tolist() == [1]
    (mask,) = followed.masks((0, 1, 4, 2, 3, 0, 4, 0), [()])()
    assert mask is None
