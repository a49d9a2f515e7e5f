"""`StopCut` against a reference that sees the whole text at once."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Request
from server.serving.choice import Choice
from server.serving.filters import TextOptions
from server.text.stops import StopCut
from server.text.tokenizer import Tokenizer
from tests.server.step_results import outcome, stats
from tests.server.tiny_models import TOKENIZER

# Few letters, so that stop strings begin, break off and overlap all the time.
TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str], include: bool, num_early: int = 0) -> tuple[str, bool]:
    """Return (the answer, whether a stop string ended it), cut at the first moment.

    num_early: first characters, in which none ends.
    """
    for end in range(num_early + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            start = end - max(len(stop) for stop in complete)
            return text[: end if include else start], True
    return text, False


HIDDEN = "<x>"
WITH_HIDDEN = st.lists(st.one_of(st.text("ab", max_size=3), st.just(HIDDEN)), max_size=16)
STOPS_WITH_HIDDEN = st.lists(
    st.lists(st.sampled_from(["a", "b", HIDDEN]), min_size=1, max_size=4).map("".join), max_size=4
)


def reference_with_hidden(
    words: list[str], stops: list[str], include: bool, hidden: frozenset[str]
) -> tuple[str, int | None]:
    """The answer, and the number of the word that completed a stop string; None if none did.

    Words in `hidden` are left out of the answer. Stop strings that spell one are looked for in
    the text with them.
    """
    full = shown = ""
    places: list[int] = []
    for number, word in enumerate(words):
        for letter in word:
            full += letter
            if word not in hidden:
                shown += letter
                places.append(len(full) - 1)
            complete = []
            for stop in stops:
                spells = any(text in stop for text in hidden)
                if spells and full.endswith(stop):
                    complete.append((len(full) - len(stop), stop))
                if not spells and word not in hidden and shown.endswith(stop):
                    complete.append((places[len(shown) - len(stop)], stop))
            if complete:
                start, stop = min(complete)
                before = sum(place < start for place in places)
                return shown[:before] + (stop if include else ""), number
    return shown, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """`text` in pieces, some of them empty."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[first:last] for first, last in pairwise(borders)]


@settings(deadline=None)
@example(text="aab", stops=["b", "ab"], cuts=[], include=False).via("two stop strings that end together")
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=12), include=st.booleans())
def test_any_split_gives_the_cut_of_the_whole_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """What is released is the reference's answer, and never more on the way."""
    expected, is_cut = reference(text, stops, include)
    cut = StopCut(stops, include)
    released = ""
    for piece in pieces_of(text, cuts):
        released += cut.feed(piece)
        assert expected.startswith(released)
    released += cut.finish()
    assert released == expected
    assert cut.is_cut == is_cut
    if is_cut:
        assert cut.feed("ab") + cut.finish() == ""


@settings(deadline=None)
@given(early=TEXT, text=TEXT, stops=STOPS, hidden=st.sampled_from([[], ["a"]]))
def test_a_stop_string_may_begin_before_min_tokens(early: str, text: str, stops: list[str], hidden: list[str]) -> None:
    """A stop string that is complete there ends nothing. hidden: as if it spelt a special token."""
    expected, is_cut = reference(early + text, stops, False, len(early))
    cut = StopCut(stops, hidden=hidden)
    released = "".join(cut.feed(letter, looks=False) for letter in early)
    assert expected.startswith(released)
    released += "".join(map(cut.feed, text)) + cut.finish()
    assert (released, cut.is_cut) == (expected, is_cut)


@settings(deadline=None)
@given(words=WITH_HIDDEN, stops=STOPS_WITH_HIDDEN, include=st.booleans())
def test_hidden_tokens_end_an_answer_if_a_stop_string_spells_them(
    words: list[str], stops: list[str], include: bool
) -> None:
    """Alone, within other text, and with stop strings that cross them in the text without them."""
    expected, ended_by = reference_with_hidden(words, stops, include, frozenset([HIDDEN]))
    cut, released, last = StopCut(stops, include, [HIDDEN]), "", None
    for number, word in enumerate(words):
        released += cut.feed("", hidden=word) if word == HIDDEN else cut.feed(word)
        assert expected.startswith(released)
        if cut.is_cut:
            last = number
            break
    assert (released + cut.finish(), last) == (expected, ended_by)


@settings(deadline=None)
@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    """The text held back is the beginning of a stop string."""
    cut = StopCut(stops)
    released = ""
    for end, letter in enumerate(text, start=1):
        released += cut.feed(letter)
        if cut.is_cut:
            return
        held = text[len(released) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


NAMES = ["a", "b", "ab", "ba", "aab", "\u00e9", "\u6f22", "\U0001f600", " ", "\n"]
SPECIAL = ["<|user|>", "<|system|>"]


def random_case(random: Random, tokenizer: Tokenizer) -> tuple[list[int], list[str], bool]:
    """Return (tokens, stop strings, whether they are included)."""
    text = "".join(random.choices(NAMES + random.choice([[], SPECIAL]), k=random.randint(1, 12)))
    tokens = tokenizer.encode(text, False)
    if random.random() < 0.3:
        # The first bytes of a character, and then something else.
        cut = random.randrange(len(tokens) + 1)
        tokens[cut:cut] = tokenizer.encode("\U0001f600", False)[: random.randint(1, 3)]
    whole = tokenizer.decode(tokens)
    stops = []
    for _ in range(random.randint(0, 4)):
        start = random.randrange(len(whole))
        found = whole[start : start + random.choice([1, 2, 3, 4, 9, 10])]
        stops.append("".join(random.choices(NAMES, k=random.randint(1, 3))) if random.random() < 0.4 else found)
    return tokens, stops, random.random() < 0.3


@pytest.mark.slow
def test_ten_thousand_answers_are_cut_where_a_reference_cuts_them() -> None:
    """Text, reason and count agree with the cut of `Choice`."""
    random, tokenizer = Random(5), Tokenizer(str(TOKENIZER))
    num_cut = num_by_special = 0
    for _ in range(10_000):
        tokens, stops, include = random_case(random, tokenizer)
        choice = Choice(Request(request_id="x", prompt_token_ids=(1,)), tokenizer, TextOptions(stops, include))
        left, released = list(tokens), ""
        while left and choice.finish_reason is None:
            count = random.randint(1, 6)
            run, left = left[:count], left[count:]
            reason = None if left else "length"
            parts, *_ = choice.add(replace(outcome(1, 0), token_ids=run, finish_reason=reason), stats())
            released += "".join(str(part) for part in parts)
        # The reference decodes token by token and looks at the whole text after each.
        detokenizer = tokenizer.detokenizer()
        words = [
            detokenizer.step(token) or (tokenizer.token_text(token) if tokenizer.is_special(token) else "")
            for token in tokens
        ]
        answer, ended_by = reference_with_hidden(words, stops, include, tokenizer.special_texts())
        expected = (answer, "length", len(tokens)) if ended_by is None else (answer, "stop", ended_by + 1)
        assert (released, choice.finish_reason, choice.num_tokens) == expected
        num_cut += ended_by is not None
        num_by_special += ended_by is not None and any(text in (choice.stop_string or "") for text in SPECIAL)
    assert 3000 < num_cut < 9500
    assert num_by_special > 50
