"""Chain rules are exact: by enumeration at 1e-12, against golden vectors at 1e-9, in float32 at the edges."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.draw import categorical
from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification import RULES
from tests.speculation import exact
from tests.speculation.exact import Model

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "golden.json").read_text())
BLOCK_CASES = GOLDEN["block"]


def golden_model(case: dict) -> Model:
    def rows(which: str) -> dict:
        return {
            tuple(int(token) for token in prefix.split(",") if token): row[which]
            for prefix, row in case["rows"].items()
        }

    return Model(rows("p"), rows("q"), case["V"], case["L"])


def random_model(seed: int, vocabulary: int = 3, length: int = 2, kind: str = "any") -> Model:
    """Laws with the corners that matter: zeros, ties, equal laws, disjoint supports, one-hot rows."""
    rng = np.random.default_rng(seed)

    def row() -> np.ndarray:
        weights = rng.dirichlet(np.full(vocabulary, rng.choice([0.3, 1.0, 5.0])))
        if rng.random() < 0.25:
            weights = weights * (rng.random(vocabulary) < 0.6)
        if rng.random() < 0.1 or weights.sum() == 0:
            weights = np.eye(vocabulary)[rng.integers(vocabulary)]
        return weights / weights.sum()

    target, draft = {}, {}
    for depth in range(length + 1):
        for prefix in itertools.product(range(vocabulary), repeat=depth):
            target[prefix], draft[prefix] = row(), row()
            if kind == "equal" or rng.random() < 0.15:
                draft[prefix] = target[prefix]
    return Model(target, draft, vocabulary, length)


def dense_model(seed: int) -> Model:
    """Laws without zeros or ties, target and draft unlike each other."""
    rng = np.random.default_rng(seed)
    prefixes = [p for depth in range(3) for p in itertools.product(range(3), repeat=depth)]
    target, draft = ({prefix: rng.dirichlet(np.ones(3)) for prefix in prefixes} for _ in range(2))
    return Model(target, draft, 3, 2)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}-{c['kind']}")
def test_golden_block_law_and_expected_length(case: dict) -> None:
    model = golden_model(case)
    one_chain = exact.block_outcomes(model)
    found = {
        "bv": one_chain,
        "bv_race": exact.race([one_chain] * case["K"]),
    }
    for name, outcomes in found.items():
        assert exact.expected_accepted(outcomes) == pytest.approx(case["E_tau"][name], abs=1e-9)
        law = exact.first_block_law(outcomes)
        for key, probability in case["first_block_law"][name].items():
            assert law.get(key, 0.0) == pytest.approx(probability, abs=1e-9), (name, key)
        assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    token = exact.expected_accepted(exact.token_outcomes(model))
    assert token == pytest.approx(case["E_tau"]["token_single_chain"], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.sampled_from(["any", "equal"]))
def test_every_rule_emits_the_target_law(seed: int, num_chains: int, kind: str) -> None:
    model = random_model(seed, kind=kind)
    block = exact.block_outcomes(model)
    assert exact.distance_from_target(model, block) < 1e-12
    assert exact.distance_from_target(model, exact.token_outcomes(model)) < 1e-12
    assert exact.distance_from_target(model, exact.race([block] * num_chains)) < 1e-11


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_race_of_unlike_chains_emits_the_target_law(seed: int) -> None:
    """Chains from different draft models may race each other."""
    model = random_model(seed)
    other = Model(model.target, random_model(seed + 1).draft, model.vocabulary, model.length)
    short = Model(model.target, other.draft, model.vocabulary, 1)
    outcomes = exact.race([exact.block_outcomes(m) for m in (model, other, short)])
    assert exact.distance_from_target(model, outcomes) < 1e-11


def test_wrong_variants_are_caught() -> None:
    """The enumeration finds rules that are nearly right: it is a test that can fail."""
    model = dense_model(11)
    block = exact.block_outcomes(model)
    assert exact.distance_from_target(model, exact.race([block] * 2)) < 1e-12

    def wrong_by(outcomes: list[exact.Outcome]) -> float:
        return exact.distance_from_target(model, outcomes)

    # The residual of token verification after block acceptance.
    assert wrong_by(exact.block_outcomes(model, weights=torch.ones_like)) > 1e-3
    # A score that does not stop at the next token's ceiling.
    assert wrong_by(exact.race([[replace(o, lower=0.0) for o in block]] * 2)) > 1e-3
    # The longest accepted chain wins.
    by_length = [replace(o, lower=2.0 - len(o.accepted), upper=3.0 - len(o.accepted)) for o in block]
    assert wrong_by(exact.race([by_length] * 2)) > 1e-3
    # The draft law of another temperature: verified with rows the tokens were not drawn from.
    hotter = {prefix: np.sqrt(row) / np.sqrt(row).sum() for prefix, row in model.draft.items()}
    verified = exact.block_outcomes(replace(model, draft=hotter))
    assert wrong_by(exact.redrawn(verified, hotter, model)) > 1e-3


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_float32_edges(name: str, uniform: float) -> None:
    """u = 0, u just below 1, zero rows, sums that miss 1, ratios of e^50: a valid token, never one of mass zero."""
    torch.manual_seed(0)
    vocabulary, length = 50, 4
    target_NV = torch.rand(length + 1, vocabulary).softmax(-1) * (1 + 3e-7)
    draft_NV = torch.rand(length, vocabulary).softmax(-1) * (1 - 3e-7)
    target_NV[:, 7] = 0
    target_NV[1] = 0
    target_NV[1, 3] = 1
    draft_NV[2] = target_NV[2]
    draft_NV[3] = 1e-22
    draft_NV[3, 5] = 1
    tokens_CL = torch.tensor([[1, 3, 4, 5], [7, 3, 4, 5], [1, 2, 4, 9]])
    if RULES[name].max_drafts == 1:
        tokens_CL = tokens_CL[:1]
    count = len(tokens_CL)
    steps = torch.arange(length + 1).expand(count, -1)
    chains = Chains(
        tokens_CL,
        torch.full((count,), length),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
        LawTable(draft_NV, steps[:, :length]),
    )
    target = LawTable(target_NV, steps)
    full = torch.full((count,), uniform, dtype=torch.float64)
    noise = ChainNoise(full.unsqueeze(1).expand(count, length), full, full)
    verdict = RULES[name].verify(chains, target, noise)
    accepted, token = int(verdict.accepted_B[0]), int(verdict.next_token_B[0])
    chain = tokens_CL[int(verdict.chain_B[0])]
    for depth in range(accepted):
        assert target_NV[depth, chain[depth]] > 0
    assert target_NV[accepted, token] > 0


def test_ragged_chains_ignore_what_lies_beyond_their_end() -> None:
    """A chain of length 0 is plain decoding; garbage beyond a chain's end changes nothing."""
    torch.manual_seed(1)
    target_NV, draft_NV = torch.rand(8, 6).softmax(-1), torch.rand(8, 6).softmax(-1)
    noise = ChainNoise(torch.rand(2, 3, dtype=torch.float64), *torch.rand(2, 2, dtype=torch.float64))

    def verdict(beyond: int) -> tuple[list[int], list[int]]:
        chains = Chains(
            torch.tensor([[1, beyond, beyond], [beyond, beyond, beyond]]),
            torch.tensor([1, 0]),
            torch.tensor([0, 1]),
            torch.tensor([0, 0]),
            LawTable(draft_NV, torch.tensor([[0, beyond, beyond], [beyond] * 3])),
        )
        target = LawTable(target_NV, torch.tensor([[0, 1, beyond, beyond], [2, beyond, beyond, beyond]]))
        result = RULES["bv_race"].verify(chains, target, noise)
        return result.accepted_B.tolist(), result.next_token_B.tolist()

    assert verdict(2) == verdict(5)
    accepted, tokens = verdict(0)
    assert accepted[1] == 0
    assert tokens[1] == int(categorical(target_NV[2:3], noise.residual_C[1:2]))


def test_golden_monte_carlo() -> None:
    """The whole batched rule, noise included, on the largest golden case."""
    case = max(BLOCK_CASES, key=lambda c: c["V"] ** c["L"] * c["K"])
    model, count = golden_model(case), 60_000
    rng = np.random.default_rng(5)
    prefixes = {prefix: i for i, prefix in enumerate(model.target)}
    target_NV = torch.tensor([list(row) for row in model.target.values()], dtype=torch.float32)
    draft_NV = torch.tensor([list(row) for row in model.draft.values()], dtype=torch.float32)
    child = torch.tensor([[prefixes.get((*p, t), 0) for t in range(model.vocabulary)] for p in prefixes])
    num_chains = count * case["K"]
    node = torch.zeros(num_chains, dtype=torch.int64)
    nodes, tokens = [node], []
    for _ in range(model.length):
        token = categorical(draft_NV[node], torch.from_numpy(rng.random(num_chains)))
        node = child[node, token]
        tokens.append(token)
        nodes.append(node)
    node_CX = torch.stack(nodes, 1)
    chains = Chains(
        torch.stack(tokens, 1),
        torch.full((num_chains,), model.length),
        torch.arange(count).repeat_interleave(case["K"]),
        torch.arange(case["K"]).repeat(count),
        LawTable(draft_NV, node_CX[:, : model.length]),
    )
    noise = ChainNoise(*(torch.from_numpy(rng.random(s)) for s in ((num_chains, model.length), num_chains, num_chains)))
    verdict = RULES["bv_race"].verify(chains, LawTable(target_NV, node_CX), noise)
    mean = float(verdict.accepted_B.double().mean())
    error = float(verdict.accepted_B.double().std()) / count**0.5
    assert mean == pytest.approx(case["E_tau"]["bv_race"], abs=4 * error)
