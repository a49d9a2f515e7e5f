"""The weighted race against a plain computation of it, and the optimum."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation import theory
from tests.oracles.node_enumeration import draft_tuples
from tests.speculation.test_node_rules import emitted, random_laws
from tests.wrong import instead

# The package exports the rule under its module's name.
race = importlib.import_module("engine.speculation.verification.weighted_race")
Law = np.ndarray


def rows(*laws: Law) -> torch.Tensor:
    return torch.tensor(np.stack(laws), dtype=torch.float64)


def zipf_laws(seed: int, vocabulary: int, spread: float = 0.7) -> tuple[Law, Law]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocabulary) * 3
    p, q = np.exp(logits), np.exp(logits + rng.normal(size=vocabulary) * spread)
    return p / p.sum(), q / q.sum()


def plain_join_points(a: Law, q: Law, t: Law, reached: Law, n: int) -> Law:
    """Root of 1 - (1 - s)^n = reached + a/q (s - t), Newton from 0."""
    before = np.concatenate([[0.0], t[:-1]])
    slope, s = a / q, np.zeros_like(t)
    for _ in range(200):
        last = s
        value = 1 - (1 - s) ** n - reached - slope * (s - t)
        gain = n * (1 - s) ** (n - 1) - slope
        usable = (value < 0) & (gain > 0)
        s = np.minimum(s + np.where(usable, -value / np.where(usable, gain, 1.0), 0.0), before)
        if np.array_equal(s, last):
            break
    return s


def plain_race(p: Law, q: Law, n: int, order: np.ndarray) -> tuple[Law, Law, np.ndarray, float]:
    """Return (accepted mass, log weights, segments, last log threshold) in this order."""
    p, q = p[order], q[order]
    t, total = np.cumsum(q).clip(max=1.0), np.cumsum(p)
    supply = 1 - (1 - t) ** n
    reflected = np.minimum.accumulate(supply - total).clip(max=0)
    reached = total + reflected
    a = (p + np.diff(reflected, prepend=0.0)).clip(min=0)
    tight = supply - reached <= 1e-13
    starts = np.concatenate([[True], tight[:-1]])
    s = np.where(starts, np.concatenate([[0.0], t[:-1]]), plain_join_points(a, q, t, reached, n))
    end = 1 - (1 - min(reached[-1], 1.0)) ** (1 / n)
    log_weight, current = np.zeros(len(p)), 0.0
    for i in range(len(p)):
        current = 0.0 if starts[i] else current
        log_weight[i] = current
        following = s[i + 1] if i + 1 < len(p) else end
        if not tight[i] and t[i] > s[i]:
            current += np.log(max(t[i] - following, 1e-300) / (t[i] - s[i]))
    met = bool(tight[-1]) or reached[-1] >= 1 - 1e-15
    return a, log_weight, np.cumsum(starts), -np.inf if met else current


def plain_law(p: Law, q: Law, drafted: list[int], order: np.ndarray) -> Law:
    """Return the law of the emitted token; `order` has the racing tokens."""
    if not drafted:
        return p
    accepted, law = np.zeros_like(p), np.zeros_like(p)
    if len(order):
        accepted[order], log_weight, segment, threshold = plain_race(p, q, len(drafted), order)
        place = {token: i for i, token in enumerate(order.tolist())}
        copies = [(place[token], token) for token in drafted if token in place]
        best = min((segment[i] for i, _ in copies), default=0)
        racing = [(log_weight[i], token) for i, token in copies if segment[i] == best]
        top = max((weight for weight, _ in racing), default=0.0)
        weights = [(float(np.exp(weight - top)), token) for weight, token in racing]
        floor = float(np.exp(min(threshold - top, 0.0))) if best == segment[-1] else 0.0
        knots = sorted({floor, *(weight for weight, _ in weights if weight > floor)})
        for low, high in itertools.pairwise(knots):
            above = [(weight, token) for weight, token in weights if weight >= high]
            share = 1 / len(above) * (1 - (low / high) ** len(above))
            share *= np.prod([high / weight for weight, _ in above])
            for _, token in above:
                law[token] += share
    residual = (p - accepted).clip(min=0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    return law + max(1 - law.sum(), 0.0) * residual


def order_of(target: torch.Tensor, draft: torch.Tensor, counts: torch.Tensor) -> list[np.ndarray]:
    """The tokens that race in the table's order, ties as it breaks them."""
    table = race.race_table(target, draft, counts)
    width = table.tight_NW.shape[1]
    return [np.argsort(place, kind="stable")[: (place < width).sum()] for place in table.place_NV.numpy()]


def assert_plain(target: torch.Tensor, draft: torch.Tensor, drafted: list[list[int]], atol: float = 1e-10) -> None:
    """The batched rule, every row with its own number of drafts, equals the plain one."""
    width = max(1, *(len(tokens) for tokens in drafted))
    tokens_NK = torch.zeros((len(drafted), width), dtype=torch.int64)
    present_NK = torch.zeros((len(drafted), width), dtype=torch.bool)
    for i, tokens in enumerate(drafted):
        tokens_NK[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        present_NK[i, : len(tokens)] = True
    plain: dict[tuple[int, bytes], Law] = {}
    for _ in as_anywhere():
        laws = race.weighted_race(target, draft, tokens_NK, present_NK).numpy()
        orders = order_of(target, draft, present_NK.sum(1).clamp(min=1))
        for i, (p, q, tokens, order) in enumerate(zip(target.numpy(), draft.numpy(), drafted, orders, strict=True)):
            share = q[order] / (p[order] + q[order])
            assert (np.diff(share) >= -1e-14).all()
            key = i, order.tobytes()
            if key not in plain:
                plain[key] = plain_law(p, q, tokens, order)
            np.testing.assert_allclose(laws[i], plain[key], atol=atol)


def as_anywhere() -> Iterator[None]:
    """Compute as on a CPU, then as on a device, whose numbers the host does not read."""
    yield
    with instead(race, "_is_read", lambda *_: False):
        yield


def draw(q: Law, n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).choice(len(q), size=n, p=q / q.sum()).tolist()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 40),
    st.lists(st.integers(0, 16), min_size=1, max_size=5),
)
def test_equals_the_plain_race(seed: int, vocabulary: int, counts: list[int]) -> None:
    """Zeros, ties, equal, disjoint and one-hot laws, in one batch with different n."""
    pairs = [random_laws(seed + i, vocabulary) for i in range(len(counts))]
    drafted = [draw(q, n, seed + i) for i, ((_, q), n) in enumerate(zip(pairs, counts, strict=True))]
    assert_plain(rows(*(p for p, _ in pairs)), rows(*(q for _, q in pairs)), drafted)


@pytest.mark.sampled
@pytest.mark.parametrize("n", range(1, 17))
def test_equals_the_plain_race_on_many_tokens(n: int) -> None:
    """Flat, peaked, truncated and nearly equal laws, in several blocks."""
    vocabulary = 9_000
    pairs = [zipf_laws(seed, vocabulary, spread) for seed, spread in enumerate((0.1, 0.7, 2.0, 1e-7))]
    peaked = tuple(law**4 / (law**4).sum() for law in pairs[1])
    p, q = zipf_laws(9, vocabulary)
    few = np.where(p >= np.sort(p)[-500], p, 0.0)
    many = np.where(q >= np.sort(q)[-6_000], q, 0.0)
    pairs += [
        (peaked[0], peaked[1]),
        (few / few.sum(), q),
        (p, many / many.sum()),
        (few / few.sum(), many / many.sum()),
    ]
    pairs *= 2
    counts = [n] * len(pairs) if n % 2 else [1 + (n + i) % 16 for i in range(len(pairs))]
    drafted = [draw(q, count, i) for i, ((_, q), count) in enumerate(zip(pairs, counts, strict=True))]
    assert_plain(rows(*(p for p, _ in pairs)), rows(*(q for _, q in pairs)), drafted)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_equals_the_plain_race_on_few_of_many_tokens(n: int) -> None:
    """Truncated laws, in every row other tokens and another number of them."""
    target, draft = [], []
    for seed, kept in enumerate((40, 900, 1)):
        p, q = zipf_laws(seed, 9_000)
        target.append(np.where(p >= np.sort(p)[-kept], p, 0.0))
        draft.append(np.where(q >= np.sort(q)[-2 * kept], q, 0.0))
    target, draft = ([law / law.sum() for law in laws] for laws in (target, draft))
    assert_plain(rows(*target), rows(*draft), [draw(q, n, i) for i, q in enumerate(draft)])


@pytest.mark.parametrize("kind", ["equal", "swapped", "one hot", "disjoint"])
def test_large_vocabularies_with_ties_equal_the_plain_race(kind: str) -> None:
    """All tokens tie, or all but a few."""
    vocabulary = 40_000
    p, q = zipf_laws(1, vocabulary)
    if kind == "equal":
        q = p
    elif kind == "swapped":
        q = p.copy()
        q[[0, 1]] = p[[1, 0]]
    elif kind == "one hot":
        p = np.eye(1, vocabulary, 17)[0]
    else:
        p, q = np.where(np.arange(vocabulary) % 2, p, 0.0), np.where(np.arange(vocabulary) % 2, 0.0, q)
        p, q = p / p.sum(), q / q.sum()
    assert_plain(rows(p, p), rows(q, q), [draw(q, 4, 1), draw(q, 7, 2)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 4))
def test_emits_the_target_law(seed: int, n: int, vocabulary: int) -> None:
    p, q = random_laws(seed, vocabulary)
    for _ in as_anywhere():
        law, acceptance = emitted(race.weighted_race, p, q, draft_tuples("iid", q, n), n)
        np.testing.assert_allclose(law, p, atol=1e-10)
        assert acceptance == pytest.approx(theory.alpha_star_iid(p, q, n), abs=1e-9)


@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_reaches_the_optimum_at_full_vocabularies(vocabulary: int) -> None:
    counts = (1, 2, 3, 4, 8, 16)
    pairs = [zipf_laws(seed, vocabulary, spread) for seed, spread in enumerate((0.05, 0.3, 0.7, 1.0, 1.5, 3.0))]
    table = race.race_table(rows(*(p for p, _ in pairs)), rows(*(q for _, q in pairs)), torch.tensor(counts))
    for (p, q), n, alpha in zip(pairs, counts, table.alpha.tolist(), strict=True):
        assert alpha == pytest.approx(theory.alpha_star_iid(p, q, n), abs=1e-9)
    assert (table.residual_NV >= 0).all()
    assert (table.accepted_NV >= 0).all()


def test_tokens_too_rare_to_race_cost_nothing_that_counts() -> None:
    """They are never accepted and always in the residual; the optimum moves by less than 1e-11."""
    p, q = zipf_laws(4, 1_000)
    p[:100] *= 1e-14
    q[50:200] *= 1e-14
    p, q = p / p.sum(), q / q.sum()
    table = race.race_table(rows(p), rows(q), torch.tensor([4]))
    width = table.tight_NW.shape[1]
    assert width < 1_000
    absent = table.place_NV[0] == width
    assert torch.equal(table.residual_NV[0, absent], rows(p)[0, absent])
    assert float(table.alpha[0]) == pytest.approx(theory.alpha_star_iid(p, q, 4), abs=1e-11)


def test_a_race_of_no_rows_is_empty() -> None:
    empty = torch.zeros((0, 5), dtype=torch.float64)
    none = torch.zeros((0, 2), dtype=torch.int64)
    assert race.weighted_race(empty, empty, none, none.bool()).shape == (0, 5)


@pytest.mark.gpu
def test_runs_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pairs = [zipf_laws(seed, 20_000) for seed in range(3)]
    target, draft = rows(*(p for p, _ in pairs)), rows(*(q for _, q in pairs))
    drafted = draft.multinomial(4, replacement=True)
    present = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    here = race.weighted_race(target, draft, drafted, present)
    there = race.weighted_race(*(x.cuda() for x in (target, draft, drafted, present))).cpu()
    torch.testing.assert_close(there, here, atol=1e-10, rtol=0)
