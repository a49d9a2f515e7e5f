"""Shapes that depend on drafted tokens, and trees with a stem, by enumeration.

docs/speculation-rules.md proves both. No stem is served, because none was predicted to pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.torch_block import blocks, residual
from tests.oracles.bounds import race_acceptance
from tests.oracles.enumeration import (
    EveryChain,
    Path,
    RuleOutcome,
    TabularModel,
    block_outcomes,
    expected_accepted,
    joint,
    race,
    rule_outcomes,
    token_outcomes,
)
from tests.speculation.exact import distance_from_target, from_prefix, random_model

LENGTH = 3
STEMS = [(1, 2), (2, 3), (1, 4)]
"""(tokens of the stem, branches below it)."""


def lowest_score(weight: float, num_branches: int) -> float:
    """Return the score below which the smallest of this many lies with probability `weight`."""
    return float(1 - (1 - weight) ** (1 / num_branches))


def below_a_stem(
    model: TabularModel, stem: int, num_branches: int, limit: Callable[[float, int], float] = lowest_score
) -> list[RuleOutcome]:
    """Enumerate a stem whose last test uses the smallest score of the branches.

    limit: the score up to which the winner of the branches is emitted, given the weight of
    the stem's last token.
    """
    every = EveryChain.of(replace(model, length=stem))
    known = blocks(every.chains, every.target)
    outcomes = []
    for number, path in enumerate(every.paths):
        drafted = joint(model.draft, path)
        if drafted == 0:
            continue
        most = limit(float(known.weight_CL1[number, stem]), num_branches)
        won = won_below(from_prefix(model, path, model.length - stem), num_branches, most)
        outcomes += [replace(o, accepted=(*path, *o.accepted), probability=drafted * o.probability) for o in won]
        left = drafted * (1 - sum(o.probability for o in won))
        for tau in reversed(range(stem)):
            accept = float(known.accept_CL[number, tau - 1]) if tau else 1.0
            weights = residual(every.chains, every.target, every.depth(tau), known.weight_CL1[:, tau])[number]
            law = (weights / weights.sum()).tolist()
            outcomes += [RuleOutcome(path[:tau], token, left * accept * p) for token, p in enumerate(law)]
            left *= 1 - accept
    return outcomes


def won_below(model: TabularModel, num_chains: int, most: float) -> list[RuleOutcome]:
    """Return the winner's outcomes whose score is at most `most`; the other scores are uniform."""
    won = []
    for outcome in block_outcomes(EveryChain.of(model)):
        upper, span = min(outcome.upper, most), outcome.upper - outcome.lower
        if span == 0 and outcome.upper <= most:
            share = num_chains * (1 - outcome.upper) ** (num_chains - 1)
        elif upper > outcome.lower:
            share = ((1 - outcome.lower) ** num_chains - (1 - upper) ** num_chains) / span
        else:
            continue
        won.append(replace(outcome, probability=outcome.probability * share))
    return won


def closed_form(model: TabularModel, fanout: tuple[int, ...]) -> float:
    """Return the expected accepted length by `race_acceptance`."""
    paths = [path for path in model.paths(model.length) if joint(model.target, path) > 0]
    ratio_BL = [
        [
            float(np.asarray(model.draft[path[:i]])[x] / np.asarray(model.target[path[:i]])[x])
            for i, x in enumerate(path)
        ]
        for path in paths
    ]
    accepted_B = race_acceptance(np.array(ratio_BL), fanout).sum(1)
    return float(np.array([joint(model.target, path) for path in paths]) @ accepted_B)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(STEMS), st.sampled_from(["any", "equal", "dense"]))
def test_the_race_below_a_stem_emits_the_target_law(seed: int, shape: tuple[int, int], kind: str) -> None:
    model, (stem, num_branches) = random_model(seed, length=LENGTH, kind=kind), shape
    outcomes = below_a_stem(model, stem, num_branches)
    assert distance_from_target(model, outcomes) < 1e-11
    fanout = (*(1,) * stem, num_branches, *(1,) * (LENGTH - stem - 1))
    assert expected_accepted(outcomes) == pytest.approx(closed_form(model, fanout), abs=1e-9)


def test_a_stem_is_tested_with_the_score_of_the_race_and_not_of_a_chain() -> None:
    """The smallest score itself is not uniform, so a stem tested with it is kept too often."""
    models = [random_model(seed, length=LENGTH, kind="dense") for seed in range(3)]
    assert np.mean([distance_from_target(m, below_a_stem(m, 1, 2, lambda weight, _: weight)) for m in models]) > 0.03


def test_the_race_below_a_stem_accepts_more_than_traversal() -> None:
    models = [random_model(seed, length=LENGTH, kind="dense") for seed in range(2)]
    gains = [
        expected_accepted(below_a_stem(model, 1, 2))
        - expected_accepted(rule_outcomes("traversal", model, (1, 2, 1), "iid"))
        for model in models
    ]
    assert np.mean(gains) > 0.01


def first_unlikely(model: TabularModel, path: Path, least: float = 0.3) -> int:
    """Return the tokens up to the first after which the draft is improbable."""
    return next((n for n in range(1, len(path)) if joint(model.draft, path[:n]) < least), len(path))


def cut(model: TabularModel, dropped: int = 0) -> EveryChain:
    """Return every path cut after its first unlikely prefix; dropped: tokens before it."""
    every = EveryChain.of(model)
    lengths = [max(0, first_unlikely(model, path) - dropped) for path in every.paths]
    return replace(every, chains=replace(every.chains, length_C=torch.tensor(lengths)))


CUT_RULES: dict[str, Callable[[EveryChain], list[RuleOutcome]]] = {
    "token": token_outcomes,
    "block": block_outcomes,
    "bv_race": lambda every: race([block_outcomes(every)] * 2),
}


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(sorted(CUT_RULES)), st.sampled_from(["any", "dense"]))
def test_chains_may_end_where_their_own_tokens_say(seed: int, rule: str, kind: str) -> None:
    """Whether a node has a child may depend on the node's path."""
    model = random_model(seed, length=LENGTH, kind=kind)
    assert distance_from_target(model, CUT_RULES[rule](cut(model))) < 1e-11


@pytest.mark.parametrize("rule", CUT_RULES)
def test_a_token_must_not_decide_whether_it_is_verified(rule: str) -> None:
    """The token's draft distribution is no longer the one assumed."""
    models = [random_model(seed, length=LENGTH, kind="dense") for seed in range(3)]
    assert min(distance_from_target(model, CUT_RULES[rule](cut(model, dropped=1))) for model in models) > 1e-3
