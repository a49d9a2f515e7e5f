"""Bounds of lines: indentation and time, however a text is cut into pieces."""

from __future__ import annotations

import time

import pytest

from server.text.line_bounds import LineBounds


@pytest.mark.parametrize(
    ("text", "min_indent", "released"),
    [
        ("x)\n    y\n  z\n", 4, "x)\n    y\n  "),
        ("x)\n    y\n\n    z\ndef", 4, "x)\n    y\n\n    z\n"),
        ("x)\n    y\n \t  z\r\n\r\n    a\nb", 4, "x)\n    y\n \t  z\r\n\r\n    a\n"),
        ("  first line\n\tx", 2, "  first line\n\t"),
        ("first line\nx", 0, "first line\nx"),
    ],
)
def test_a_line_that_is_indented_too_little_ends_the_answer(text: str, min_indent: int, released: str) -> None:
    for size in (1, 3, len(text)):
        bounds = LineBounds(min_indent)
        parts = [bounds.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(parts) == released
        assert bounds.is_over == (released != text)


def test_time_ends_an_answer_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    bounds = LineBounds(most_s=1.0)
    assert bounds.feed("one line") == "one line"
    now_s = 2.0
    assert bounds.feed(" only") == " only"
    assert not bounds.is_over
    assert bounds.feed("\ntwo") == "\ntwo"
    assert bounds.is_over
    assert bounds.feed("more") == ""
    quick = LineBounds(most_s=1.0)
    assert quick.feed("a\nb") == "a\nb"
    now_s = 2.9
    assert quick.feed("\nc") == "\nc"
    assert not quick.is_over
