"""Grammars and masks that allow nothing more end their request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import DEAD_END, NOTHING_LEFT, SERVER_FAULTS, RequestError
from engine.grammar.grammar_queue import GrammarQueue
from engine.request import GRAMMAR, Limits, Request, Sampling, Speculation, Thinking
from tests.engine import tiny

VOCABULARY = 32


class OneToken:
    """A grammar of token 7 for the first tokens, and then nothing, not even an end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failure: RequestError | None = None
        self.num_emitted = 0

    def start(self, grammar: str) -> OneToken:
        return OneToken(self.most)

    def is_ready(self) -> bool:
        return True

    def seconds_read(self) -> float:
        return 0.0

    def check_answer(self, emitted: Sequence[int]) -> None:
        self.num_emitted += len(emitted)
        if self.num_emitted > self.most:
            self.failure = RequestError("nothing is allowed", GRAMMAR, DEAD_END)

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[np.ndarray]]:
        def mask(depth: int) -> np.ndarray:
            allowed = np.zeros(VOCABULARY, dtype=bool)
            allowed[7] = depth < self.most
            return allowed

        return lambda: [mask(len(answer) + len(path)) for path in paths]

    def end(self) -> None:
        pass


@pytest.mark.parametrize(("most", "allowed"), [(0, ()), (1, (7,)), (3, ()), (6, (7,))])
@pytest.mark.parametrize("drafts", [False, True])
def test_no_token_after_a_dead_end_is_sent(most: int, allowed: tuple[int, ...], drafts: bool) -> None:
    """The grammar is the cause, also if other masks exclude the token that is drawn there."""
    target = replace(tiny.llama(1, VOCABULARY), eos_token_ids=frozenset({VOCABULARY - 1}))
    draft = replace(tiny.perturbed(target, 2, 0.05), eos_token_ids=target.eos_token_ids) if drafts else None
    engine = tiny.build(target, draft)
    engine.grammar_queue = GrammarQueue(OneToken(most), 4)  # type: ignore[arg-type]
    speculation = Speculation(num_drafts=2, draft_length=2) if drafts else Speculation()
    engine.submit(
        Request(
            request_id="a",
            prompt_token_ids=(3, 4, 5),
            sampling=Sampling(grammar="any", seed=1, allowed_token_ids=allowed),
            limits=Limits(max_tokens=20),
            speculation=speculation,
        )
    )
    sent: list[int] = []
    failed: list[tuple[str, RequestError]] = []
    engine.queue_followed()
    for _ in range(30):
        if not engine.scheduler.has_work:
            break
        result = engine.run_step()
        sent += [token for outcome in result.outcomes for token in outcome.token_ids]
        failed += result.failed
    assert [(name, error.code) for name, error in failed] == [("a", DEAD_END)]
    assert failed[0][1].code in SERVER_FAULTS
    assert set(sent) <= {7}
    assert len(sent) <= most
    if not drafts:
        assert len(sent) == most
    engine.scheduler.check_invariants()


MASKS: dict[str, tuple[Sampling, Limits]] = {
    # 7 and 8 in turn, until their third pair would be complete.
    "bad words": (Sampling(allowed_token_ids=(7, 8), bad_words=((7, 7), (8, 8), (7, 8, 7, 8), (8, 7, 8, 7))), Limits()),
    "ends held back": (
        Sampling(allowed_token_ids=(7, 31), bad_words=((7, 7, 7),)),
        Limits(max_tokens=20, min_tokens=10),
    ),
    "words below the prompt": (Sampling(allowed_token_ids=(7,), bad_words=((4, 5, 7, 7),)), Limits()),
    # The token that closes the thoughts is not allowed when their budget is spent.
    "budget of thoughts": (
        Sampling(allowed_token_ids=tuple(range(9)), thinking=Thinking(opens=(9,), closes=10, is_begun=True, budget=3)),
        Limits(),
    ),
}


def test_thoughts_that_cannot_be_closed_end_before_their_grammar() -> None:
    """The grammar is not asked, because it comes after the thoughts."""
    target = replace(tiny.llama(1, VOCABULARY), eos_token_ids=frozenset({VOCABULARY - 1}))
    engine = tiny.build(target, None)
    engine.grammar_queue = GrammarQueue(OneToken(1), 4)  # type: ignore[arg-type]
    thinking = Thinking(opens=(9,), closes=10, is_begun=True, budget=2)
    sampling = Sampling(grammar="any", thinking=thinking, bad_words=((10,),))
    engine.submit(Request(request_id="a", prompt_token_ids=(3, 4, 5), sampling=sampling, limits=Limits(max_tokens=20)))
    engine.queue_followed()
    results = [engine.run_step() for _ in range(3)]
    assert [len(result.outcomes) for result in results] == [1, 1, 0]
    assert [(name, error.code) for name, error in results[2].failed] == [("a", NOTHING_LEFT)]
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", [False, True])
def test_no_token_that_the_masks_exclude_is_sent(name: str, temperature: float, drafts: bool) -> None:
    """Every answer ends with the error, after allowed texts."""
    sampling, limits = MASKS[name]
    target = replace(tiny.llama(1, VOCABULARY), eos_token_ids=frozenset({VOCABULARY - 1}))
    draft = replace(tiny.perturbed(target, 2, 0.05), eos_token_ids=target.eos_token_ids) if drafts else None
    engine = tiny.build(target, draft)
    speculation = Speculation(num_drafts=2, draft_length=2) if drafts else Speculation()
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=(3, 4, 5),
            sampling=replace_sampling(sampling, temperature=temperature, seed=seed),
            limits=limits,
            speculation=speculation,
        )
        for seed in range(8)
    ]
    engine.submit(*requests)
    sent: dict[str, list[int]] = {request.request_id: [] for request in requests}
    failed: dict[str, RequestError] = {}
    while engine.scheduler.has_work:
        result = engine.run_step()
        for outcome in result.outcomes:
            sent[outcome.request_id] += outcome.token_ids
        failed.update(result.failed)
    assert {error.code for error in failed.values()} == {NOTHING_LEFT}
    assert set(failed) == set(sent)
    for answer in sent.values():
        assert all(token in allowed_by(requests[0], answer[:place]) for place, token in enumerate(answer))
        if not drafts:
            assert not allowed_by(requests[0], answer), "an answer that could go on was ended"
    engine.scheduler.check_invariants()


def allowed_by(request: Request, answer: Sequence[int]) -> set[int]:
    """The tokens that may come after an answer, by the words of the fields."""
    sampling, text = request.sampling, [*request.prompt_token_ids, *answer]
    allowed = set(sampling.allowed_token_ids)
    allowed -= {word[-1] for word in sampling.bad_words if text[1 - len(word) :] == list(word[:-1])}
    if sampling.thinking is not None and len(answer) == sampling.thinking.budget:
        allowed &= {sampling.thinking.closes}
    return allowed - ({VOCABULARY - 1} if len(answer) < request.limits.min_tokens else set())


def test_an_end_that_is_due_is_no_dead_end() -> None:
    """Tokens dropped after an end are not checked, nor is an end that may come."""
    target = replace(tiny.llama(1, VOCABULARY), eos_token_ids=frozenset({VOCABULARY - 1}))
    engine = tiny.build(target, replace(tiny.perturbed(target, 2, 0.05), eos_token_ids=target.eos_token_ids))
    sampling = Sampling(allowed_token_ids=(7, 31), bad_words=((7, 7, 7), (31, 31), (31, 7)), logit_bias=((31, -2.0),))
    for seed in range(20):
        request = Request(
            request_id=str(seed),
            prompt_token_ids=(3, 4, 5),
            sampling=replace_sampling(sampling, seed=seed),
            limits=Limits(max_tokens=2 + seed % 2),
            speculation=Speculation(num_drafts=2, draft_length=3),
        )
        engine.submit(request)
    reasons: dict[str, str | None] = {}
    while engine.scheduler.has_work:
        result = engine.run_step()
        assert not result.failed
        reasons.update({outcome.request_id: outcome.finish_reason for outcome in result.outcomes})
    assert set(reasons.values()) == {"stop", "length"}


def replace_sampling(sampling: Sampling, **changes: Any) -> Sampling:
    return msgspec.structs.replace(sampling, **changes)
