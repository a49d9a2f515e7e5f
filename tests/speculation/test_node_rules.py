"""Node rules are exact and as good as they should be: every draft enumerated, golden vectors at 1e-9."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation import theory
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.kseq import kseq, solve_rho
from engine.speculation.verification.node import NodeRule
from engine.speculation.verification.nss import nss
from engine.speculation.verification.rrs import rrs, rrs_without_replacement
from engine.speculation.verification.weighted_race import race_table, weighted_race

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "golden.json").read_text())
TOKEN_CASES = GOLDEN["token"]
Drafts = dict[tuple[int, ...], float]


def drafts_iid(q: np.ndarray, n: int) -> Drafts:
    tuples = itertools.product(np.flatnonzero(q > 0).tolist(), repeat=n)
    return {drafted: float(np.prod(q[list(drafted)])) for drafted in tuples}


def drafts_without_replacement(q: np.ndarray, n: int) -> Drafts:
    result: Drafts = {}
    support = np.flatnonzero(q > 0).tolist()
    for drafted in itertools.permutations(support, min(n, len(support))):
        probability, left = 1.0, 1.0
        for i, token in enumerate(drafted):
            left = sum(q[x] for x in support if x not in drafted[:i])
            probability *= q[token] / left
        result[drafted] = float(probability)
    return result


def drafts_greedy(q: np.ndarray, n: int) -> Drafts:
    top = theory.top_tokens(q, n - 1).tolist()
    rest = q.copy()
    rest[top] = 0
    if rest.sum() <= 0:
        return {tuple(top): 1.0} if top else {}
    rest /= rest.sum()
    return {(*top, x): float(rest[x]) for x in np.flatnonzero(rest > 0).tolist()}


def drafts_spechub(q: np.ndarray, n: int) -> Drafts:
    hub = int(q.argmax())
    others = [x for x in np.flatnonzero(q > 0).tolist() if x != hub]
    if n == 1:
        return drafts_iid(q, 1)
    if not others:
        return {(hub,): 1.0}
    pairs = {(x, hub): float(q[x]) for x in others}
    return {**pairs, **{(hub, x): float(q[hub] * q[x] / (1 - q[hub])) for x in others}}


RULES: dict[str, tuple[NodeRule, Callable[[np.ndarray, int], Drafts], str]] = {
    "nss": (nss, drafts_iid, "nss_iid"),
    "nss without replacement": (nss, drafts_without_replacement, "nss_swor"),
    "rrs": (rrs, drafts_iid, "rrs_iid"),
    "rrs_without_replacement": (rrs_without_replacement, drafts_without_replacement, "rrswor_swor"),
    "rrs_without_replacement of i.i.d.": (rrs_without_replacement, drafts_iid, "rrs_dedupe_wor_iid"),
    "kseq": (kseq, drafts_iid, "kseq_iid"),
    "spechub": (spechub, drafts_spechub, "spechub"),
    "greedy": (greedy, drafts_greedy, "greedy"),
    "weighted_race": (weighted_race, drafts_iid, "weighted_race_iid"),
}


def conditional_laws(rule: NodeRule, p: np.ndarray, q: np.ndarray, drafts: Drafts, width: int) -> np.ndarray:
    """[drafts, V] the rule's law for every tuple of drafts, in one batch."""
    rows = len(drafts)
    drafted = torch.zeros((rows, width), dtype=torch.int64)
    present = torch.zeros((rows, width), dtype=torch.bool)
    for i, tokens in enumerate(drafts):
        drafted[i, : len(tokens)] = torch.tensor(tokens)
        present[i, : len(tokens)] = True
    target, draft = (torch.tensor(law, dtype=torch.float64).expand(rows, -1) for law in (p, q))
    return rule(target, draft, drafted, present).numpy()


def emitted(rule: NodeRule, p: np.ndarray, q: np.ndarray, drafts: Drafts, width: int) -> tuple[np.ndarray, float]:
    """(law of the emitted token, probability that it is a draft)."""
    laws = conditional_laws(rule, p, q, drafts, width)
    weights = np.array(list(drafts.values()))
    accepted = [law[list(set(drafted))].sum() for law, drafted in zip(laws, drafts, strict=True)]
    return weights @ laws, float(weights @ np.array(accepted))


# SpecHub drafts two tokens.
GOLDEN_PAIRS = [(case, name) for case in TOKEN_CASES for name in RULES if name != "spechub" or case["n"] == 2]


@pytest.mark.parametrize(
    ("case", "name"), GOLDEN_PAIRS, ids=[f"V{c['V']}n{c['n']}-{c['kind']}-{name}" for c, name in GOLDEN_PAIRS]
)
def test_golden_vectors(case: dict, name: str) -> None:
    rule, draw, key = RULES[name]
    p, q = np.array(case["p"]), np.array(case["q"])
    law, acceptance = emitted(rule, p, q, draw(q, case["n"]), case["n"])
    np.testing.assert_allclose(law, p, atol=1e-9)
    if key in case["accept"]:
        assert acceptance == pytest.approx(case["accept"][key], abs=1e-9)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda c: f"V{c['V']}n{c['n']}-{c['kind']}")
def test_golden_conditional_laws(case: dict) -> None:
    p, q = np.array(case["p"]), np.array(case["q"])
    rules = {"rrs": rrs, "kseq": kseq, "weighted_race": weighted_race, "rrs_dedupe_wor": rrs_without_replacement}
    for stored in case["conditional_laws_iid"]:
        for key, rule in rules.items():
            if key in stored:
                found = conditional_laws(rule, p, q, {tuple(stored["drafts"]): 1.0}, case["n"])[0]
                np.testing.assert_allclose(found, stored[key], atol=1e-9, err_msg=key)
    stored = case["conditional_law_swor"]
    found = conditional_laws(rrs_without_replacement, p, q, {tuple(stored["drafts"]): 1.0}, case["n"])[0]
    np.testing.assert_allclose(found, stored["rrswor"], atol=1e-9)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda c: f"V{c['V']}n{c['n']}-{c['kind']}")
def test_golden_theory(case: dict) -> None:
    p, q, n = np.array(case["p"]), np.array(case["q"]), case["n"]
    optimum = {
        "iid": theory.alpha_star_iid(p, q, n),
        "swor": theory.alpha_star_without_replacement(p, q, n),
        "greedy": theory.alpha_star_greedy(p, q, n),
    }
    for method, value in optimum.items():
        assert value == pytest.approx(case["alpha_star"][method], abs=1e-9), method
    closed_forms = {
        "nss_iid": theory.accept_nss,
        "rrs_iid": theory.accept_rrs,
        "kseq_iid": theory.accept_kseq,
        "score_race_iid": theory.accept_score_race,
        "single": theory.accept_token,
    }
    for key, acceptance in closed_forms.items():
        if key in case["accept"]:
            assert acceptance(p, q, n) == pytest.approx(case["accept"][key], abs=1e-9), key
    count = torch.tensor([float(n)], dtype=torch.float64)
    target, draft = (torch.tensor([case[law]], dtype=torch.float64) for law in ("p", "q"))
    rho = solve_rho(target, draft, count)
    if not np.array_equal(p, q):  # equal laws: every rho just above 1 serves
        assert float(rho) == pytest.approx(case["kseq_rho"], abs=1e-9)
    table = race_table(target, draft, count)
    np.testing.assert_allclose(table.accepted_NV[0].numpy(), case["race"]["a"], atol=1e-9)


def random_laws(seed: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws with zeros, ties, equal and disjoint rows, one-hot rows."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocabulary, rng.choice([0.3, 1.0, 4.0])), size=2)
    kind = rng.integers(6)
    if kind == 1:
        q = p.copy()
    elif kind == 2:
        p[rng.random(vocabulary) < 0.4] = 0
        q[rng.random(vocabulary) < 0.4] = 0
    elif kind == 3:
        half = vocabulary // 2
        p[:half], q[half:] = 0, 0
    elif kind == 4:
        p = np.eye(vocabulary)[rng.integers(vocabulary)]
    elif kind == 5:
        p = np.round(p, 1) + 1e-3
        q = np.round(q, 1)
    for law in (p, q):
        if law.sum() == 0:
            law[0] = 1
        law /= law.sum()
    return p, q


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 5), st.sampled_from(sorted(RULES)))
def test_every_rule_emits_the_target_law(seed: int, n: int, vocabulary: int, name: str) -> None:
    rule, draw, _ = RULES[name]
    n = min(n, 2) if name == "spechub" else n
    p, q = random_laws(seed, vocabulary)
    law, acceptance = emitted(rule, p, q, draw(q, n), n)
    np.testing.assert_allclose(law, p, atol=1e-10)
    optimum = {
        drafts_iid: theory.alpha_star_iid,
        drafts_without_replacement: theory.alpha_star_without_replacement,
        drafts_greedy: theory.alpha_star_greedy,
        drafts_spechub: theory.alpha_star_greedy,
    }[draw](p, q, n)
    assert acceptance <= optimum + 1e-9
    if name in ("weighted_race", "greedy", "spechub"):
        assert acceptance == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_absent_chains_change_nothing(name: str) -> None:
    """Chains that have died leave holes between those alive; the law is that of the drafts that are left."""
    rule, draw, _ = RULES[name]
    p, q = random_laws(6, 4)
    for n in (1, 2):
        drafts = draw(q, n)
        plain = conditional_laws(rule, p, q, drafts, n)
        drafted = torch.tensor([[3, *(x for token in drawn for x in (token, 1))][:5] for drawn in drafts])
        present = torch.tensor([[False, True, False, True, False][: 2 * n + 1]] * len(drafts))
        target, draft = (torch.tensor(law, dtype=torch.float64).expand(len(drafts), -1) for law in (p, q))
        if name == "spechub" and n == 2:
            continue  # the two chains of SpecHub part at once
        holes = rule(target, draft, drafted, present[:, : drafted.shape[1]])
        np.testing.assert_allclose(holes.numpy(), plain, atol=1e-12)


def test_skipping_duplicates_in_rrs_is_caught() -> None:
    def skipping(target, draft, drafted, present):  # type: ignore[no-untyped-def]
        seen_before = torch.stack(
            [(drafted[:, :k] == drafted[:, k : k + 1]).any(1) for k in range(drafted.shape[1])], dim=1
        )
        return rrs(target, draft, drafted, present & ~seen_before)

    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    law, _ = emitted(skipping, p, q, drafts_iid(q, 3), 3)
    assert np.abs(law - p).sum() / 2 > 1e-2


@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_large_vocabularies_reach_the_optimum(vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=vocabulary) * 3
    p, q = (np.exp(logits + rng.normal(size=vocabulary) * spread) for spread in (0.0, 0.7))
    p, q = p / p.sum(), q / q.sum()
    target, draft = torch.tensor(p).unsqueeze(0), torch.tensor(q).unsqueeze(0)
    for n in (2, 4, 8):
        table = race_table(target, draft, torch.tensor([n]))
        assert float(table.alpha[0]) == pytest.approx(theory.alpha_star_iid(p, q, n), abs=1e-9)
        assert theory.accept_rrs(p, q, n) <= theory.accept_kseq(p, q, n) + 1e-12
        assert theory.accept_kseq(p, q, n) <= theory.alpha_star_iid(p, q, n) + 1e-9


def test_float32_rows_at_the_edges() -> None:
    """Rows that miss 1, tiny and huge ratios: laws stay laws and never leave the target's support."""
    target = torch.rand(6, 40).softmax(-1) * (1 + 3e-7)
    draft = torch.rand(6, 40).softmax(-1) * (1 - 3e-7)
    target[0, 5:] = 0
    target[0] /= target[0].sum()
    draft[1] = 1e-22
    draft[1, 7] = 1
    target[2] = draft[2]
    target[3], draft[3] = torch.eye(40)[3], torch.eye(40)[4]
    drafted = draft.multinomial(4, replacement=True, generator=torch.Generator().manual_seed(1))
    present = torch.ones_like(drafted, dtype=torch.bool)
    for rule in (rrs, rrs_without_replacement, kseq, weighted_race, greedy, spechub):
        law = rule(target.double(), draft.double(), drafted, present)
        assert torch.isfinite(law).all()
        assert (law >= 0).all()
        torch.testing.assert_close(law.sum(1), torch.ones(6, dtype=torch.float64), atol=2e-6, rtol=0)
        assert (law[target == 0] <= 1e-12).all()
