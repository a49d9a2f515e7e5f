"""`StopCut` against a reference that sees the whole text at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.stops import StopCut

# Few letters, so that stop strings begin, break off and overlap all the time.
TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The answer, and whether a stop string ended it: cut at the first moment at which one is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            start = end - max(len(stop) for stop in complete)
            return text[: end if include else start], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """`text` in pieces, some of them empty."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[first:last] for first, last in pairwise(borders)]


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=12), include=st.booleans())
def test_any_split_gives_the_cut_of_the_whole_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """However the text arrives, what is released is the reference's answer, and never more on the way."""
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
@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    """What is not released yet is the beginning of a stop string."""
    cut = StopCut(stops)
    released = ""
    for end, letter in enumerate(text, start=1):
        released += cut.feed(letter)
        if cut.is_cut:
            return
        held = text[len(released) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_everything_passes() -> None:
    """Nothing is held back where there is nothing to wait for."""
    cut = StopCut([])
    assert cut.feed("one ") + cut.feed("two") == "one two"
    assert cut.finish() == ""
    assert not cut.is_cut


@pytest.mark.parametrize("include", [False, True])
def test_the_first_complete_stop_string_wins(include: bool) -> None:
    """A short stop string inside a longer one ends the answer before the longer one is complete."""
    cut = StopCut(["abcd", "bc"], include)
    assert cut.feed("xa") == "x"
    assert cut.feed("b") == ""
    assert cut.feed("cd") == ("abc" if include else "a")
    assert cut.is_cut
    assert cut.feed("more") == cut.finish() == ""
