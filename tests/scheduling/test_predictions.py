"""The place of an answer in its prediction, token by token."""

from __future__ import annotations

import pytest

from engine.scheduling.text_drafters.prediction import PredictionDrafter

PROMPT = "prompt:"
TWICE = "the cat and the dog."


def places(prediction: str, answer: str) -> list[tuple[str, int] | None]:
    """Return what is drafted after each token of the answer, with the matched tokens.

    None for no draft. A character is a token.
    """
    drafter = PredictionDrafter([ord(token) for token in prediction], len(PROMPT))
    found: list[tuple[str, int] | None] = []
    for end in range(1, len(answer) + 1):
        candidates = drafter.candidates([ord(token) for token in PROMPT + answer[:end]])
        if not candidates:
            found.append(None)
            continue
        (candidate,) = candidates
        assert candidate.stop == len(prediction)
        found.append((prediction[candidate.place :], candidate.evidence))
    return found


def test_an_answer_that_follows_its_prediction_is_drafted_to_the_end() -> None:
    assert places("abcd", "abcd") == [("bcd", 1), ("cd", 2), ("d", 3), ("", 4)]


def test_after_a_long_match_a_token_may_be_replaced() -> None:
    assert places("abcdef", "abcXef")[3:] == [("ef", 0), ("f", 1), ("", 2)]


def test_after_a_short_match_three_tokens_must_agree_again() -> None:
    assert places("abcdef", "aXbcde")[1:] == [None, None, None, ("ef", 3), ("f", 4)]


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("Xthe", " cat and the dog."),  # the first place from where the answer was
        ("the cat, the", " dog."),  # the next place after the answer has left
        ("the cat and the Xthe", " cat and the dog."),  # no place is left below, so the first one
    ],
)
def test_an_answer_that_comes_back_is_followed_from_the_next_place(answer: str, rest: str) -> None:
    place = places(TWICE, answer)[-1]
    assert place is not None
    assert place[0] == rest


def test_a_token_more_of_a_repeated_token_keeps_the_place() -> None:
    assert places("aaab aaac", "aaaa")[-1] == ("b aaac", 3)


def test_emitted_tokens_are_compared_with_the_prediction() -> None:
    drafter = PredictionDrafter([1, 2, 3, 4], 2)
    assert drafter.num_predicted([8, 9], [1, 2, 7]) == 2
    assert drafter.num_predicted([8, 9, 1], [2, 3, 4, 5]) == 3
    assert drafter.num_predicted([8, 9, 1, 7], [2]) == 0
