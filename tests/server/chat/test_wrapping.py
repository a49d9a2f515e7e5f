"""Lines of a streamed text are broken between words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.chat.wrapping import WordWrap

PIECES = st.lists(st.text(alphabet="ab \n", max_size=12), max_size=20)


@given(pieces=PIECES, num_columns=st.integers(4, 20))
def test_no_word_that_fits_is_broken(pieces: list[str], num_columns: int) -> None:
    """The words are those of the text, whatever the pieces are, and no line is too long."""
    wrap = WordWrap(num_columns)
    printed = [part for number, piece in enumerate(pieces) for part in wrap.feed(str(number), piece)]
    lines = "".join(text for _, text in [*printed, *wrap.flush()]).split("\n")
    words = "".join(pieces).split()
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) <= num_columns for line in lines if all(len(word) <= num_columns for word in line.split()))


def test_a_word_keeps_the_styles_of_its_pieces() -> None:
    wrap = WordWrap(8)
    printed = [*wrap.feed("a", "one tw"), *wrap.feed("b", "o three"), *wrap.flush()]
    assert printed == [("a", "one"), ("a", " "), ("a", "tw"), ("b", "o"), ("", "\n"), ("b", "three")]
