"""Exactness with everything at once, and wrong variants that show only then.

The distribution is still the target's; and a wrong variant of what only shows then is found out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection

import pytest

from engine.request import Limits, Request, Sampling, Speculation
from engine.start.loading import LoadedModel, adopt
from engine.step.engine import Engine
from tests.engine import tiny
from tests.engine.test_adaptive import Restless
from tests.engine.test_output_distribution import ALPHA, NUM_TOKENS, PROMPT, drafts, exact_distribution, g_test, pair
from tests.grid import grid

__all__ = ["pair"]

KINDS: dict[str, Speculation] = {
    "off": tiny.OFF,
    "adaptive": Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True),
    "fixed": drafts("bv_race", 2),
    "tree": drafts("traversal", 4, tree=(2, 2)),
    "block": drafts("block", 1),
    "text drafts": Speculation(rule="bv_race", num_drafts=2, draft_length=2, drafters=("model", "prompt_lookup")),
}


def build(pair: tuple[LoadedModel, LoadedModel], draft_window: int, num_blocks: int = 50) -> Engine:
    # Packing gives the plain weights up.
    own = [adopt(copy.deepcopy(loaded.model), loaded.name) for loaded in pair]
    engine = tiny.build(
        *own,
        max_model_len=20,
        max_draft_length=3,
        max_num_seqs=48,
        budget=150,
        num_blocks=num_blocks,
        block_size=4,
        max_copied_tokens=4,
        draft_window=draft_window,
    )
    engine.scheduler.controller = Restless()
    return engine


def answers(
    engine: Engine, num_answers: int, kinds: Collection[str] = tuple(KINDS), enough: int | None = None
) -> dict[str, Counter[tuple[int, ...]]]:
    """First tokens of the answers, by kind of request; kinds, priorities and lengths are mixed."""
    requests = [
        Request(
            request_id=f"{number} {kind}",
            prompt_token_ids=PROMPT,
            sampling=Sampling(seed=number),
            limits=Limits(max_tokens=NUM_TOKENS + 1 + number % 7),
            speculation=speculation,
            priority=number % 2,
        )
        for number in range(num_answers)
        for kind, speculation in KINDS.items()
        if kind in kinds
    ]
    counts: dict[str, Counter[tuple[int, ...]]] = {kind: Counter() for kind in kinds}
    for name, tokens in tiny.run(engine, requests, enough).tokens.items():
        counts[name.split(maxsplit=1)[1]][tuple(tokens[:NUM_TOKENS])] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("draft_window", grid([0, 3], {3}))
def test_answers_have_the_target_distribution_with_everything_on(
    pair: tuple[LoadedModel, LoadedModel], draft_window: int
) -> None:
    engine = build(pair, draft_window)
    distribution = exact_distribution(pair[0], {"temperature": 1.0})
    counts = answers(engine, 300)
    assert engine.scheduler.num_preemptions > 10
    assert engine.scheduler.num_cache_hits > 500
    for kind, found in counts.items():
        assert g_test(found, distribution) > ALPHA, kind


@pytest.mark.slow  # test_output_distribution.py and test_adaptive.py reject wrong drafts and choices in the gate
def test_drafting_from_another_distribution_is_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The wrong variant: drafts are drawn at one temperature and verified as drawn at another."""

    with tiny.with_drafts_of_another_distribution():
        counts = answers(build(pair, 0), 1500, ("off", "block", "adaptive"), NUM_TOKENS)
    distribution = exact_distribution(pair[0], {"temperature": 1.0})
    assert g_test(counts["off"], distribution) > ALPHA
    assert g_test(counts["block"], distribution) < ALPHA
    assert g_test(counts["adaptive"], distribution) < ALPHA


def test_a_window_over_everything_changes_nothing(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Same drafts, same answers; a narrow one changes the drafts."""
    accepted = {}
    requests = [tiny.request(str(i), prompt, KINDS["fixed"], 10) for i, prompt in enumerate(tiny.prompts(4, [8] * 20))]
    for window in (0, 20, 3):
        engine = tiny.build(*pair, max_model_len=24, block_size=4, draft_window=window)
        run = tiny.run(engine, requests)
        accepted[window] = (run.tokens, [o.num_accepted for outcomes in run.outcomes.values() for o in outcomes])
    assert accepted[0] == accepted[20]
    assert accepted[0][0] == accepted[3][0], "greedy answers depend on no draft"
    assert accepted[0][1] != accepted[3][1]
