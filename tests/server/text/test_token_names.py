"""Names of tokens in `logprobs` of completions, where several tokens have one text."""

from __future__ import annotations

import json

import pytest

from server.text.logprobs import SpelledToken, completion_logprobs

A, B = ("a", b"a", -1.0), ("b", b"b", -2.0)
OTHER_A = ("a", b"\x61", -3.0)
HALF = ("\ufffd", b"\xe2\x82", -4.0)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (SpelledToken("a", b"a", -1.0, (A, B), 0, 0), {"a": -1.0, "b": -2.0}),
        (SpelledToken("c", b"c", -9.0, (A, B), 0), {"a": -1.0, "b": -2.0, "c": -9.0}),
        (SpelledToken("b", b"b", -2.0, (A, B, OTHER_A), 0, 1), {"a": -1.0, "b": -2.0, "bytes:\\x61": -3.0}),
        (SpelledToken("a", b"a", -3.0, (A, B, OTHER_A), 0, 2), {"bytes:\\x61": -1.0, "b": -2.0, "a": -3.0}),
        (SpelledToken("a", b"a", -1.0, (A, HALF), 0, 0), {"a": -1.0, "bytes:\\xe2\\x82": -4.0}),
    ],
)
def test_each_of_the_likeliest_tokens_has_a_name(token: SpelledToken, expected: dict[str, float]) -> None:
    """The emitted token has its text, and another token with this text is named by its bytes."""
    (ranked,) = json.loads(bytes(completion_logprobs([token]).top_logprobs))
    assert ranked == expected
