"""Node rules are exact and as good as they should be, by enumeration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation import theory
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.kseq import accept_kseq, kseq, solve_rho
from engine.speculation.verification.node import NodeRule
from engine.speculation.verification.ot_lp import ot_lp
from engine.speculation.verification.rrs import nss, rrs, rrs_without_replacement
from engine.speculation.verification.weighted_race import race_table, weighted_race
from tests.oracles.node_enumeration import Tuples, conditional_laws, draft_tuples

GOLDEN = json.loads((Path(__file__).parent.parent / "vectors" / "golden.json").read_text())
TOKEN_CASES = GOLDEN["token"]


RULES: dict[str, tuple[NodeRule, str, str]] = {
    "nss": (nss, "iid", "nss_iid"),
    "nss without replacement": (nss, "without_replacement", "nss_swor"),
    "rrs": (rrs, "iid", "rrs_iid"),
    "rrs_without_replacement": (rrs_without_replacement, "without_replacement", "rrswor_swor"),
    "rrs_without_replacement of i.i.d.": (rrs_without_replacement, "iid", "rrs_dedupe_wor_iid"),
    "kseq": (kseq, "iid", "kseq_iid"),
    "spechub": (spechub, "spechub", "spechub"),
    "greedy": (greedy, "greedy", "greedy"),
    "weighted_race": (weighted_race, "iid", "weighted_race_iid"),
    "ot_lp": (ot_lp, "iid", "weighted_race_iid"),
}


def emitted(rule: NodeRule, p: np.ndarray, q: np.ndarray, drafts: Tuples, width: int) -> tuple[np.ndarray, float]:
    """(law of the emitted token, probability that it is a draft)."""
    laws = conditional_laws(rule, p, q, drafts, width)
    weights = np.array(list(drafts.values()))
    accepted = [law[list(set(drafted))].sum() for law, drafted in zip(laws, drafts, strict=True)]
    return weights @ laws, float(weights @ np.array(accepted))


# SpecHub drafts two tokens.
GOLDEN_PAIRS = [(case, name) for case in TOKEN_CASES for name in RULES if name != "spechub" or case["n"] == 2]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "name"), GOLDEN_PAIRS, ids=[f"V{c['V']}n{c['n']}-{c['kind']}-{name}" for c, name in GOLDEN_PAIRS]
)
def test_golden_vectors(case: dict, name: str) -> None:
    rule, method, key = RULES[name]
    p, q = np.array(case["p"]), np.array(case["q"])
    law, acceptance = emitted(rule, p, q, draft_tuples(method, q, case["n"]), case["n"])
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
                law = conditional_laws(rule, p, q, {tuple(stored["drafts"]): 1.0}, case["n"])[0]
                np.testing.assert_allclose(law, stored[key], atol=1e-9, err_msg=key)
    stored = case["conditional_law_swor"]
    law = conditional_laws(rrs_without_replacement, p, q, {tuple(stored["drafts"]): 1.0}, case["n"])[0]
    np.testing.assert_allclose(law, stored["rrswor"], atol=1e-9)


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
        "kseq_iid": accept_kseq,
        "score_race_iid": theory.accept_score_race,
        "single": theory.accept_token,
    }
    for key, acceptance in closed_forms.items():
        if key in case["accept"]:
            assert acceptance(p, q, n) == pytest.approx(case["accept"][key], abs=1e-9), key
    order = case["swor_Q_prefix"]["order"]
    within = theory.all_drafts_within(q[order], min(n, int((q > 0).sum())))
    np.testing.assert_allclose(within, case["swor_Q_prefix"]["Q"], atol=1e-9)
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
    rule, method, _ = RULES[name]
    n = min(n, 2) if name == "spechub" else n
    p, q = random_laws(seed, vocabulary)
    law, acceptance = emitted(rule, p, q, draft_tuples(method, q, n), n)
    np.testing.assert_allclose(law, p, atol=1e-10)
    optimum = {
        "iid": theory.alpha_star_iid,
        "without_replacement": theory.alpha_star_without_replacement,
        "greedy": theory.alpha_star_greedy,
        "spechub": theory.alpha_star_greedy,
    }[method](p, q, n)
    assert acceptance <= optimum + 1e-9
    if name in ("weighted_race", "ot_lp", "greedy", "spechub"):
        assert acceptance == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_absent_chains_change_nothing(name: str) -> None:
    """Dead chains leave holes between those alive."""
    rule, method, _ = RULES[name]
    p, q = random_laws(6, 4)
    for n in (1, 2):
        drafts = draft_tuples(method, q, n)
        plain = conditional_laws(rule, p, q, drafts, n)
        drafted = torch.tensor([[3, *(x for token in drawn for x in (token, 1))][:5] for drawn in drafts])
        present = torch.tensor([[False, True, False, True, False][: 2 * n + 1]] * len(drafts))
        target, draft = (torch.tensor(law, dtype=torch.float64).expand(len(drafts), -1) for law in (p, q))
        if name == "spechub" and n == 2:
            continue  # the two chains of SpecHub part at once
        holes = rule(target, draft, drafted, present[:, : drafted.shape[1]])
        np.testing.assert_allclose(holes.numpy(), plain, atol=1e-12)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda c: f"V{c['V']}n{c['n']}-{c['kind']}")
def test_golden_vectors_from_float32_laws(case: dict) -> None:
    """A serving engine has float32 rows: within 1e-5 of the exact law and acceptance."""
    p, q = (np.array(case[name], dtype=np.float32).astype(np.float64) for name in ("p", "q"))
    for name, (rule, method, key) in RULES.items():
        if key in case["accept"] and (name != "spechub" or case["n"] == 2):
            law, acceptance = emitted(rule, p, q, draft_tuples(method, q, case["n"]), case["n"])
            np.testing.assert_allclose(law, case["p"], atol=1e-5)
            assert acceptance == pytest.approx(case["accept"][key], abs=1e-5), name


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
        assert theory.accept_rrs(p, q, n) <= accept_kseq(p, q, n) + 1e-12
        assert accept_kseq(p, q, n) <= theory.alpha_star_iid(p, q, n) + 1e-9


def test_float32_rows_at_the_edges() -> None:
    """Rows that miss 1, tiny and huge ratios."""
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


def test_linear_program_of_rows_that_are_scaled_or_cannot_be() -> None:
    """Drafts that q never draws leave the target law, and other rows theirs."""
    p, q = (torch.tensor([law], dtype=torch.float64) for law in ([0.5, 0.3, 0.2, 0.0], [0.1, 0.3, 0.6, 0.0]))
    drafted, present = torch.tensor([[2, 0]]), torch.ones(1, 2, dtype=torch.bool)
    alone = ot_lp(p, q, drafted, present)
    torch.testing.assert_close(ot_lp(p / 4, q * 3, drafted, present), alone)
    rows = [torch.tensor([[1, 1]]), torch.tensor([[3, 3]]), drafted]
    presence = torch.tensor([[False, False], [True, True], [True, True]])
    laws = ot_lp(p.expand(3, -1), q.expand(3, -1), torch.cat(rows), presence)
    torch.testing.assert_close(laws, torch.cat([p, p, alone]))
