"""Seed-stable tokens are the same for any drafts and rules."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.noise import Purpose, hash_words, uniform
from engine.request import Request, Speculation
from engine.sampling.stable import race, uniform_rows, winners_only
from tests.engine import tiny
from tests.wrong import instead

TARGET = tiny.llama(seed=1)
DRAFT = tiny.perturbed(TARGET, seed=2, amount=0.05)
SHAPES = {
    "token": Speculation(rule="token", num_drafts=1, draft_length=4),
    "block": Speculation(rule="block", num_drafts=1, draft_length=5),
    "greedy_block": Speculation(rule="greedy_block", num_drafts=1, draft_length=4),
    "bv_race": Speculation(rule="bv_race", num_drafts=4, draft_length=3),
    "spectr_gbv": Speculation(rule="spectr_gbv", num_drafts=3, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1)),
    "text drafts": Speculation(rule="bv_race", num_drafts=2, draft_length=3, drafters=("model", "prompt_lookup")),
    "text drafts alone": Speculation(drafters=("prompt_lookup",)),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "edited": {"frequency_penalty": 0.7, "logit_bias": ((5, 2.0),), "bad_words": ((9,),)},
}


def tokens_of(speculation: Speculation, num_seeds: int = 6, **sampling: Any) -> tuple[dict[str, list[int]], float]:
    """(tokens by seed, tokens per step)."""
    prompt = tiny.prompts(101, [12])[0]
    wishes = [
        tiny.request(str(seed), prompt, speculation, 40, **{"temperature": 1.0, "seed": seed, **sampling})
        for seed in range(num_seeds)
    ]
    run = tiny.run(tiny.build(TARGET, DRAFT, max_copied_tokens=16), wishes)
    return run.tokens, sum(map(len, run.tokens.values())) / run.num_outcomes


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_seed_decides_the_tokens(shape: str, sampling: str) -> None:
    stable = {**SAMPLINGS[sampling], "seed_stable": True}
    plain, _ = tokens_of(tiny.OFF, **stable)
    drafted, per_step = tokens_of(SHAPES[shape], **stable)
    assert drafted == plain
    assert len({tuple(tokens) for tokens in plain.values()}) == len(plain), "seeds do not matter"
    if shape not in ("text drafts", "text drafts alone"):
        assert per_step > 1.2, "the drafts are not coupled to the target"


def test_unstable_seeds_depend_on_drafts() -> None:
    """Otherwise the tests above would show nothing."""
    assert tokens_of(tiny.OFF)[0] != tokens_of(SHAPES["bv_race"])[0]


def test_clocks_of_the_step_instead_of_the_place_are_found_out() -> None:
    """The wrong variant: clocks named by where the step began."""
    from engine.sampling import node_distributions

    def by_step(race: Any, probs_NV: torch.Tensor, samplings: Any, indices: Any) -> torch.Tensor:
        return race(probs_NV, samplings, [min(indices)] * len(indices))

    plain, _ = tokens_of(tiny.OFF, seed_stable=True)
    with instead(node_distributions, "race", by_step):
        assert tokens_of(SHAPES["block"], seed_stable=True)[0] != plain


def test_rows_of_noise_are_the_one_noise() -> None:
    """On the device as on the host, for every part of the 64 bits."""
    seeds, places = [0, -1, 2**63 - 1, 12345], [0, 7, 2**31, 3]
    begun = torch.from_numpy(hash_words(seeds, places, int(Purpose.CLOCK), 0).view(np.int64))
    rows = uniform_rows(begun.to(tiny.DEVICE), 50).cpu().numpy()
    expected = uniform(np.array(seeds)[:, None], np.array(places)[:, None], Purpose.CLOCK, 0, np.arange(50))
    assert (rows == expected).all()


def test_a_race_never_gives_an_impossible_token() -> None:
    distribution = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1e-38, 0.0, 1.0]]).repeat(300, 1)
    samplings = [tiny.request(str(i), (1,)).sampling for i in range(900)]
    samplings = [msgspec.structs.replace(one, seed=i) for i, one in enumerate(samplings)]
    found = race(distribution, samplings, list(range(900)))
    winners = found.argmax(1)
    assert winners_only(found).gather(1, winners.unsqueeze(1)).eq(1).all()
    assert winners_only(found).sum(1).eq(1).all()
    assert bool((distribution.gather(1, winners.unsqueeze(1)) > 0).all())
    assert 50 < int((winners[1::3] == 0).sum()) < 250


def test_lossy_acceptance_is_refused() -> None:
    lossy = Speculation(rule="token", num_drafts=1, draft_length=2, over_acceptance=0.1)
    wish = tiny.request("x", (1, 2), lossy, temperature=1.0, seed_stable=True)
    engine = tiny.build(TARGET, DRAFT, max_over_acceptance=0.5)
    with pytest.raises(RequestError, match="seed_stable"):
        engine.submit(wish)
    assert isinstance(wish, Request)
