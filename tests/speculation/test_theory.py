"""Yin et al.'s theorems and the gap to the optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation import gap, theory
from engine.speculation.gap import acceptance_gap
from engine.speculation.rule_facts import DRAFT_METHODS
from engine.speculation.verification import RULES
from engine.speculation.verification.over_acceptance import accepted_mass, position_bias, redraw_law
from engine.speculation.verification.rrs import nss
from tests.oracles import bounds
from tests.oracles.node_enumeration import conditional_laws, draft_tuples
from tests.speculation.exact import GOLDEN


@pytest.mark.parametrize("case", GOLDEN["yin_chain"], ids=lambda c: f"V{c['V']}T{c['T']}")
def test_expected_rejections_are_the_stored_and_the_enumerated_ones(case: dict) -> None:
    rows = {key: (np.array(row["p"]), np.array(row["q"])) for key, row in case["rows"].items()}

    def laws(prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return rows[str(prefix[-1]) if prefix else ""]

    for batch, stored in case["E_rejections"].items():
        assert bounds.expected_rejections(laws, case["T"], int(batch)) == pytest.approx(stored, abs=1e-9), batch
    for batch, stored in case["brute_force"].items():
        assert bounds.expected_rejections(laws, case["T"], int(batch)) == pytest.approx(stored, abs=1e-9), batch


@pytest.mark.parametrize("case", GOLDEN["yin_bias"], ids=lambda c: f"V{len(c['p'])}-{c['TV']:.3f}")
def test_rejection_and_bias_of_over_acceptance_are_the_stored_ones(case: dict) -> None:
    p, q = np.array(case["p"]), np.array(case["q"])
    target, draft = torch.from_numpy(p[None]), torch.from_numpy(q[None])
    for text, stored in case["eps"].items():
        epsilon = float(text)
        accept = bounds.over_acceptance(p, q, epsilon)
        np.testing.assert_allclose(accept[q > 0], np.array(stored["b"])[q > 0], atol=1e-9)
        ((rejection, bias),) = bounds.pareto_front(p, q, [epsilon])
        assert rejection == pytest.approx(stored["reject"], abs=1e-9)
        assert bias == pytest.approx(stored["loss_opt"], abs=1e-9)
        assert bounds.pareto_bias(p, q, rejection) == pytest.approx(bias, abs=1e-9)
        for residual, name in (("optimal", "OPT"), ("target", "UNO")):
            law = bounds.decoding_law(p, q, accept, residual)
            np.testing.assert_allclose(law, stored[f"law_{name}"], atol=1e-9)
            # What the engine's rule reports for the position.
            mass = accepted_mass(target, draft, epsilon)
            reported = float(position_bias(target, mass, redraw_law(target, mass, residual)))  # type: ignore[arg-type]
            assert reported == pytest.approx(stored[f"TV_{name}"], abs=1e-9)


def random_pair(seed: int, vocabulary: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(vocabulary)), rng.dirichlet(np.ones(vocabulary))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(sorted(RULES)))
def test_no_rule_exceeds_the_optimum_and_optimal_rules_attain_it(seed: int, count: int, rule: str) -> None:
    """Never negative on average over drafts; zero for the rules that are optimal."""
    p, q = random_pair(seed)
    for method in RULES[rule].draft_methods:
        width = min(count, 2 if method == "spechub" else RULES[rule].max_drafts or count)
        gaps = [
            weight * acceptance_gap(rule, method, p, q, drawn)  # type: ignore[operator]
            for drawn, weight in draft_tuples(method, q, width).items()
        ]
        assert sum(gaps) >= -1e-9
        if (
            rule in ("weighted_race", "ot_lp", "greedy", "spechub")
            or (width == 1 and rule not in ("nss",))
            or method == "most_likely"
        ):
            assert sum(gaps) == pytest.approx(0, abs=1e-9)


def test_a_gap_that_would_take_too_long_is_left_out() -> None:
    p = np.full(40_000, 1 / 40_000)
    assert acceptance_gap("traversal", "without_replacement", p, p, [1, 2]) is None
    assert acceptance_gap("weighted_race", "iid", p, p, [1, 2]) == pytest.approx(0, abs=1e-9)


def test_conditional_acceptance_averages_to_the_acceptance() -> None:
    p, q = random_pair(7)
    drafts = draft_tuples("iid", q, 2)
    laws = conditional_laws(nss, p, q, drafts, 2)
    mean = sum(w * law[list(set(d))].sum() for (d, w), law in zip(drafts.items(), laws, strict=True))
    assert mean == pytest.approx(theory.accept_nss(p, q, 2), abs=1e-12)
    assert set(DRAFT_METHODS) == {"iid", "without_replacement", "greedy", "spechub", "most_likely"}


def test_the_gap_of_a_large_vocabulary_is_that_of_its_likeliest_tokens() -> None:
    """Drafted tokens are among them, however unlikely they are."""
    chance = np.random.default_rng(7)
    logits = 3 * chance.standard_normal(50_000)
    p_V = torch.from_numpy(logits).softmax(0)
    q_V = torch.from_numpy(logits + 0.5 * chance.standard_normal(50_000)).softmax(0)
    tokens = [int(p_V.argmin()), int(q_V.argmax()), 17, 17]
    p, q, places = gap.likeliest(p_V, q_V, torch.tensor(tokens))
    assert len(p) == len(q) == gap.MOST_TOKENS
    assert p.sum().item() == pytest.approx(1) == q.sum().item()
    ratio = p[places] / q[places]
    assert torch.allclose(ratio / ratio[0], (p_V[tokens] / q_V[tokens]) / (p_V[tokens[0]] / q_V[tokens[0]]))
    whole = acceptance_gap("bv_race", "iid", p_V.numpy(), q_V.numpy(), tokens)
    assert acceptance_gap("bv_race", "iid", p.numpy(), q.numpy(), tokens) == pytest.approx(whole, abs=2e-3)
    small = torch.tensor([0.5, 0.3, 0.2])
    assert torch.equal(gap.likeliest(small, small, torch.tensor([2]))[0], small / small.sum())
