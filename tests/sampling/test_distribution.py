"""The distribution of a request: reference implementation, filters, ties, edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.kernels.draw import categorical
from engine.kernels.torch_kernels import TORCH
from engine.request import Sampling
from engine.sampling.distribution import DistributionParameters, distribution

CPU = torch.device("cpu")


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution by the book, in float64 with a full sort."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    scaled = (logits - logits.max()) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p * weights.max()] = 0
    if 0 < sampling.top_k < len(logits):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        descending = np.sort(weights)[::-1]
        kept = max(1, int((np.cumsum(descending) - descending < sampling.top_p).sum()))
        weights[weights < descending[kept - 1]] = 0
        weights /= weights.sum()
    return weights


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([0.0, 0.31, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(samplings, min_size=1, max_size=5),
    st.sampled_from([7, 300, 3000]),
    st.sampled_from([0.01, 3.0]),
)
def test_equals_the_reference(seed: int, rows: list[Sampling], vocabulary: int, spread: float) -> None:
    """Peaked distributions, and flat ones whose top-p edge lies far down."""
    logits = np.random.default_rng(seed).normal(size=(len(rows), vocabulary)) * spread
    served = (
        distribution(torch.tensor(logits, dtype=torch.float32), DistributionParameters.of(rows, CPU, TORCH))
        .double()
        .numpy()
    )
    for row, sampling in enumerate(rows):
        assert_is_distribution(served[row], logits[row].astype(np.float32).astype(np.float64), sampling)


def assert_is_distribution(probs: np.ndarray, logits: np.ndarray, sampling: Sampling) -> None:
    """Float32 may put the token at a near top-p edge on the other side."""
    near = (0.0, 1e-6, -1e-6) if 0 < sampling.top_p < 1 else (0.0,)
    by_support = {}
    for moved in near:
        expected = reference(logits, replace(sampling, top_p=sampling.top_p + moved))
        by_support.setdefault(tuple(expected > 0), expected)
    assert tuple(probs > 0) in by_support
    np.testing.assert_allclose(probs, by_support[tuple(probs > 0)], atol=2e-6)


def test_top_p_beyond_the_window_falls_back_to_an_exact_sort() -> None:
    """Flat distributions reach top_p only far down."""
    chance = np.random.default_rng(1)
    samplings = [Sampling(top_p=p) for p in (0.9, 0.5, 1.0, 0.7, 0.0)]
    flat = np.linspace(0, 0.01, 5000)
    rows = [chance.permutation(flat * (900 if i == 1 else 1)) for i in range(len(samplings))]
    logits = np.array(rows, dtype=np.float32)
    served = distribution(torch.from_numpy(logits), DistributionParameters.of(samplings, CPU, TORCH)).double().numpy()
    for row, sampling in enumerate(samplings):
        assert_is_distribution(served[row], logits[row].astype(np.float64), sampling)
    assert [int((row > 0).sum()) for row in served[[2, 4]]] == [5000, 1]


def test_ties_are_kept_so_that_the_distribution_is_a_function_of_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert distribution(logits, DistributionParameters.of([Sampling(top_k=2)], CPU, TORCH))[
        0
    ].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert distribution(logits, DistributionParameters.of([Sampling(temperature=0)], CPU, TORCH))[0].tolist() == [
        0,
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 1e-5, 2.0])
def test_extreme_temperatures_give_a_distribution(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 9.999e3, float("-inf")]])
    row = distribution(logits, DistributionParameters.of([Sampling(temperature=temperature)], CPU, TORCH))[0]
    assert float(row.sum()) == pytest.approx(1)
    assert int(row.argmax()) == 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    rows = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_k=4, top_p=0.5, min_p=0.1)]
    together = distribution(logits, DistributionParameters.of(rows, CPU, TORCH))
    for i, sampling in enumerate(rows):
        alone = distribution(logits[i : i + 1], DistributionParameters.of([sampling], CPU, TORCH))[0]
        torch.testing.assert_close(together[i], alone, atol=1e-7, rtol=1e-6)


def test_parameters_are_selected_by_row() -> None:
    """In another order, some twice: each row's distribution is its own."""
    rows = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_k=4, top_p=0.5), Sampling(min_p=0.2)]
    wanted = [3, 1, 2, 0, 3, 1]
    logits = torch.randn(len(wanted), 50, generator=torch.Generator().manual_seed(1))
    selected = distribution(logits, DistributionParameters.of(rows, CPU, TORCH).select(torch.tensor(wanted)))
    for logit, row, index in zip(logits, selected, wanted, strict=True):
        alone = distribution(logit.unsqueeze(0), DistributionParameters.of([rows[index]], CPU, TORCH))[0]
        torch.testing.assert_close(row, alone, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 1 - 2**-53])
def test_draws_never_return_a_token_of_zero_weight(uniform: float) -> None:
    weights = torch.zeros(4, 100)
    weights[0, 99] = 1e-30
    weights[1, 0] = 1e30
    weights[2, 40:60] = 1e-12
    weights[3, [0, 99]] = 0.5
    drawn = categorical(weights, torch.full((4,), uniform, dtype=torch.float64))
    assert all(weights[i, token] > 0 for i, token in enumerate(drawn.tolist()))


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0])
    uniform = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    drawn = categorical(weights.expand(8000, 4), uniform)
    assert torch.bincount(drawn, minlength=4).tolist() == [1000, 0, 3000, 4000]


def test_sums_of_float32_weights_are_computed_in_float64() -> None:
    """A float32 sum would stay at 2^24, and the last tokens would never be drawn."""
    weights = torch.tensor([[2.0**24, 1.0, 1.0, 1.0]]).expand(3, 4)
    uniform = (2**24 + 0.5 + torch.arange(3, dtype=torch.float64)) / (2**24 + 3)
    assert categorical(weights, uniform).tolist() == [1, 2, 3]


def test_a_number_rounded_to_1_draws_the_last_token_that_has_weight() -> None:
    assert categorical(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), torch.ones(1)).tolist() == [1]


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_draw_some_token(weight: float) -> None:
    drawn = categorical(torch.tensor([[0.5, weight, 0.5]]), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= int(drawn) < 3
