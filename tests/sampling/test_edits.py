"""Edits of logits against the same by hand, and their edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fixed_edits import FixedEdits, SharedEdits
from engine.kernels.torch_kernels import TORCH
from engine.plan import LogitContext
from engine.request import Sampling
from engine.sampling.distribution import DistributionParameters, distribution
from engine.sampling.edits import Bools, NodeContext, edit, has_dead_end
from engine.text_counts import TextCounts
from tests.wrong import calls_of

VOCABULARY = 12
NOTHING = Sampling()


class Odd:
    """A grammar of odd tokens, which has ended after a path that ends with token 1."""

    failure = None

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[Bools | None]]:
        self.asked.append((tuple(answer), [tuple(path) for path in paths]))
        odd = np.arange(VOCABULARY) % 2 == 1
        return lambda: [None if path and path[-1] == 1 else odd for path in paths]


def by_hand(row: np.ndarray, place: NodeContext) -> np.ndarray:
    """One row in the plainest way, token by token."""
    sampling, text = place.sampling, place.text
    whole = (*text.tokens, *place.path)
    answer = whole[text.num_prompt :]
    edited = row.astype(np.float64)
    for token, added in sampling.logit_bias:
        edited[token] += added
    for token in set(whole):
        factor = sampling.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
        edited[token] -= sampling.frequency_penalty * answer.count(token)
        edited[token] -= sampling.presence_penalty * (token in answer)
    allowed = np.ones(VOCABULARY, dtype=bool)
    if sampling.allowed_token_ids:
        allowed = np.isin(np.arange(VOCABULARY), sampling.allowed_token_ids)
    for word in sampling.bad_words:
        if len(word) == 1 or (len(whole) >= len(word) - 1 and whole[1 - len(word) :] == word[:-1]):
            allowed[word[-1]] = False
    if text.grammar is not None and not (place.path and place.path[-1] == 1):
        allowed &= np.arange(VOCABULARY) % 2 == 1
    if len(answer) < text.min_tokens:
        before = allowed.copy()
        allowed[[token for token in text.ends if 0 <= token < VOCABULARY]] = False
        if text.grammar is not None and place.path[-1:] != (1,) and not allowed.any():
            allowed = before
    return np.where(allowed, edited, -np.inf) if allowed.any() else np.zeros(VOCABULARY)


PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.35}
SAMPLINGS = [
    Sampling(),
    Sampling(**PENALTIES),  # type: ignore[arg-type]
    Sampling(repetition_penalty=0.8),
    Sampling(frequency_penalty=-0.7),
    Sampling(presence_penalty=1.1),
    Sampling(logit_bias=((3, 2.5), (11, -4.0), (0, 1.0))),
    Sampling(logit_bias=((3, 2.5),), **PENALTIES),  # type: ignore[arg-type]
    Sampling(allowed_token_ids=(2, 3, 5)),
    Sampling(bad_words=((5,), (3, 4), (4, 3, 2), (7, 3))),
    Sampling(bad_words=((3, 4), (4, 3, 2)), allowed_token_ids=(1, 2, 3, 4)),
    Sampling(bad_words=((3, 4), (7, 3))),
    Sampling(allowed_token_ids=(4,), bad_words=((4,),)),
    Sampling(allowed_token_ids=(2, 4)),
]


@dataclass(frozen=True)
class Text(LogitContext):
    """A text that knows the tokens that would end it."""

    ends: tuple[int, ...] = ()


def text_of(
    tokens: tuple[int, ...], num_prompt: int, min_tokens: int = 0, ends: tuple[int, ...] = (), sampling: Any = NOTHING
) -> Text:
    return Text(tokens, num_prompt, FixedEdits(sampling, ends), TextCounts(num_prompt), min_tokens, None, ends)


def with_edits(text: Any, sampling: Sampling) -> Any:
    """The same text of a request with these edits, which has counted nothing yet."""
    return replace(text, fixed=FixedEdits(sampling, text.ends), counts=TextCounts(text.num_prompt))


TEXTS = [
    text_of((3, 4, 5, 3), 2),
    text_of((3, 3, 3, 4), 4),
    text_of((9, 1, 4, 3), 1, min_tokens=4, ends=(6, -1, 2**62, 0, VOCABULARY)),
    text_of((2,), 1, min_tokens=1, ends=(0,)),
    text_of((2, 3), 1, min_tokens=3),
    text_of((9, 1, 4, 3), 1, min_tokens=5, ends=(1, 3, 5, 7, 9, 11)),
]
PATHS: list[tuple[int, ...]] = [(), (3,), (4, 3), (9, 9, 1), (7, 7, 7)]


def every_place(texts: Sequence[LogitContext]) -> list[NodeContext]:
    whole = [(sampling, with_edits(text, sampling)) for text in texts for sampling in SAMPLINGS]
    return [NodeContext(sampling, text, len(path), path) for sampling, text in whole for path in PATHS]


def paths_of(places: Sequence[NodeContext | None]) -> torch.Tensor:
    """Padded with a token that is in some texts."""
    paths = [(() if place is None else place.path) for place in places]
    return torch.tensor([(*path, *(3,) * (4 - len(path))) for path in paths])


def with_odd(text: LogitContext) -> LogitContext:
    return replace(text, grammar=Odd())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_rows_equal_the_ones_by_hand(dtype: torch.dtype) -> None:
    """All places in one call, in any order, rows without a place between them."""
    chance = np.random.default_rng(4)
    places: list[NodeContext | None] = [*every_place([*TEXTS, *(with_odd(text) for text in TEXTS)]), *[None] * 40]
    places = [places[i] for i in chance.permutation(len(places))]
    logits = torch.from_numpy(chance.normal(size=(len(places), VOCABULARY)) * 2).to(dtype)
    before = logits.clone()
    edited = edit(logits, places, paths_of(places))
    assert torch.equal(logits, before), "the logits themselves stay"
    assert edited.dtype == torch.float32
    for row, place in enumerate(places):
        expected = logits[row].float().numpy()
        expected = expected if place is None else by_hand(expected, place)
        np.testing.assert_allclose(edited[row].double().numpy(), expected, atol=1e-5, err_msg=str(place))


def test_each_grammar_is_asked_once_for_all_its_places() -> None:
    texts = [with_odd(text) for text in TEXTS[:2]]
    places = [NodeContext(Sampling(), text, len(path), path) for path in PATHS for text in texts]
    edit(torch.zeros(len(places), VOCABULARY), places)
    assert [text.grammar.asked for text in texts] == [[((5, 3), PATHS)], [((), PATHS)]]  # type: ignore[union-attr]


def test_rows_without_edits_are_not_copied() -> None:
    logits = torch.zeros(2, VOCABULARY)
    assert edit(logits, [None, None]) is logits


def test_extreme_values_leave_a_distribution() -> None:
    """Huge logits, the smallest penalty, full bias, everything banned: the result is finite."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 1e37
    sampling = Sampling(repetition_penalty=0.01, logit_bias=((3, 100.0), (4, -100.0)), frequency_penalty=-2)
    nothing = Sampling(allowed_token_ids=(7,), bad_words=((7,),))
    text, other = (text_of((3, 4, 5, 3), 2, 9, (6, -1, 2**62), sampling=one) for one in (sampling, nothing))
    edited = edit(logits, [NodeContext(sampling, text), NodeContext(nothing, other, 2, (1, 2)), None])
    rows = distribution(edited, DistributionParameters.of([sampling, nothing, Sampling()], logits.device, TORCH))
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows.sum(1), torch.ones(3))
    assert rows[0, 6] == 0
    assert torch.equal(edited[2], logits[2])


def test_prepared_edits_of_a_request_equal_new_ones() -> None:
    """To the bit, for all its nodes and steps, and nothing that nodes share is written to."""
    chance = np.random.default_rng(8)
    places = every_place([*TEXTS, *(with_odd(text) for text in TEXTS)])
    logits = torch.from_numpy(chance.normal(size=(len(places), VOCABULARY)) * 2).float()
    unshared = [replace(place, text=with_edits(place.text, place.sampling)) for place in places]
    paths = paths_of(places)
    expected = edit(logits, unshared, paths)
    for _ in range(2):
        assert torch.equal(edit(logits, places, paths), expected)
    one_by_one = [edit(logits[i : i + 1], [place], paths[i : i + 1]) for i, place in enumerate(places)]
    assert torch.equal(torch.cat(one_by_one), expected)


def test_masks_of_a_request_are_made_once() -> None:
    sampling = Sampling(allowed_token_ids=(2, 3, 5), bad_words=((5,), (3, 4)))
    text = with_edits(TEXTS[0], sampling)
    places = [NodeContext(sampling, text, len(path), path) for path in PATHS]
    with calls_of(FixedEdits, "_new_mask") as calls:
        for _ in range(3):
            edit(torch.zeros(len(PATHS), VOCABULARY), places)
    assert [operands[1:] for operands, _ in calls] == [(VOCABULARY, False)]


def test_masks_that_nodes_share_cannot_be_written_to() -> None:
    mask = FixedEdits(Sampling(allowed_token_ids=(2, 3)), ()).mask(VOCABULARY, False)
    assert mask is not None
    with pytest.raises(ValueError, match="read-only"):
        mask[5] = True


def test_edits_of_other_lists_are_never_shared() -> None:
    """Lists are compared by identity: the next list could lie in the same place."""
    shared = SharedEdits()
    made = [shared.of(Sampling(bad_words=((token,),)), ()) for token in range(100)]
    for token, edits in enumerate(made):
        mask = edits.mask(100, False)
        assert mask is not None
        assert np.flatnonzero(~mask).tolist() == [token]


@pytest.mark.parametrize(
    ("emitted", "num_held", "is_dead"),
    [
        ((), 0, False),
        ((2, 3), 0, False),
        ((2, 6), 0, True),
        ((6,), 0, True),
        ((2, 5), 0, False),
        ((2, 5), 1, False),
        ((2, 5), 2, True),
        ((4,), 0, True),
        ((3, 4), 0, True),
        ((2, 4), 0, False),
        ((2, 3, 4), 0, True),
        ((2, 3, 2, 4), 0, False),
    ],
)
def test_a_masked_token_was_emitted_at_a_dead_end(emitted: tuple[int, ...], num_held: int, is_dead: bool) -> None:
    """The end 5 is held back, 6 is never allowed, and 4 not after 3, the text's last."""
    edits = FixedEdits(Sampling(allowed_token_ids=(2, 3, 4, 5), bad_words=((3, 4),)), (5,))
    assert edits.has_dead_end((1, 3), emitted, num_held, VOCABULARY) is is_dead
    assert not FixedEdits(Sampling(), ()).has_dead_end((1, 3), emitted, 0, VOCABULARY)


def test_ends_are_held_back_for_the_rest_of_min_tokens() -> None:
    """Ends of an answer that has begun are masked; a grammar may demand its end before."""
    text = text_of((1, 2, 3, 4), 2, min_tokens=4, ends=(5,))
    assert not has_dead_end(text, (3, 3, 5), VOCABULARY)
    assert has_dead_end(text, (3, 5), VOCABULARY)
    assert has_dead_end(text, (5,), VOCABULARY)
    assert not has_dead_end(replace(text, grammar=Odd()), (5, 3), VOCABULARY)  # type: ignore[arg-type]
    begun = replace(text, fixed=FixedEdits(Sampling(bad_words=((4, 6),)), (5,)))
    assert has_dead_end(begun, (6,), VOCABULARY)
    assert not has_dead_end(begun, (3, 6), VOCABULARY)


def test_a_bad_word_is_seen_from_the_token_before_its_last() -> None:
    edits = FixedEdits(Sampling(bad_words=((3, 4), (4, 3, 2), (7, 3), (9, 9, 9, 8))), ())
    assert edits.barred_after((1, 4, 3), ()) == [4, 2]
    assert edits.barred_after((1, 4), (3,)) == [4, 2]
    assert edits.barred_after((4, 1), (3,)) == [4]
    assert edits.barred_after((9,), (9, 9)) == [8]
    assert edits.barred_after((9,), (9,)) == edits.barred_after((), ()) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=6, max_size=12), st.integers(0, 6), st.sets(st.integers(1, 12), min_size=1))
def test_counts_grow_with_the_text(tokens: list[int], num_prompt: int, cuts: set[int]) -> None:
    """Wherever a text has been counted before, the counts are those of the whole."""
    counts = TextCounts(num_prompt)
    for cut in sorted(cuts):
        counts.of(tuple(tokens[:cut]))
    different, times = counts.of(tuple(tokens))
    answer = tokens[num_prompt:]
    assert different.tolist() == sorted(set(tokens))
    assert times.tolist() == [answer.count(token) for token in different.tolist()]
