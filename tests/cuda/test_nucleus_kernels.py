"""Edges without sorting are those of sorting."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch

nucleus_kernels = pytest.importorskip("engine.cuda.nucleus_kernels")

from engine.cuda.kernels import TritonKernels  # noqa: E402
from engine.cuda.row_kernels import SOFTMAX_TILE  # noqa: E402
from engine.kernels.protocol import Filters  # noqa: E402
from engine.kernels.torch_kernels import TORCH  # noqa: E402
from engine.request import Sampling  # noqa: E402
from engine.sampling.distribution import DistributionParameters, distribution  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402
from tests.wrong import instead  # noqa: E402

WIDTH = nucleus_kernels.TILE + 69


def fewer_digits(rounds: int) -> AbstractContextManager[Any]:
    """Take the edge that was known before the last rounds."""

    def wrong(searched: Any, *operands: Any, **named: Any) -> Any:
        lowest, sums = searched(*operands, **named)
        lowest[-1] = lowest[rounds]
        return lowest, sums

    return instead(nucleus_kernels, "_searched", wrong)


def distributions() -> torch.Tensor:
    """Flat and steep ones, ties, certainty, tokens with little or no mass."""
    generator = torch.Generator().manual_seed(1)
    rows = [(spread * torch.randn(WIDTH, generator=generator)).softmax(0) for spread in (0.1, 3.0, 9.0)]
    rows.append(torch.randint(1, 4, (WIDTH,), generator=generator).float())
    rows.append(torch.zeros(WIDTH).index_fill_(0, torch.tensor([WIDTH - 1]), 1.0))
    rows.append(torch.where(torch.arange(WIDTH) % 3 == 0, rows[1], 0.0))
    rows.append(rows[1] * 1e-30)
    rows[-1][7] = 1.0
    rows.append(torch.full((WIDTH,), 0.5 / (WIDTH - 1)).index_fill_(0, torch.tensor([100]), 0.5))
    probs_NV = torch.stack(rows)
    return (probs_NV / probs_NV.sum(1, keepdim=True)).to(tiny.DEVICE)


@pytest.mark.sole("kernels of filters")
@pytest.mark.parametrize("top_p", grid([1e-6, 0.5, 0.95], {0.5}))
def test_top_p_equals_sorting(top_p: float) -> None:
    probs_NV = distributions()
    top_p_N = torch.full((len(probs_NV),), top_p, device=tiny.DEVICE)
    found, expected = nucleus_kernels.nucleus(probs_NV, top_p_N), TORCH.nucleus(probs_NV.cpu(), top_p_N.cpu())
    assert torch.equal(found.cpu() > 0, expected > 0)
    assert torch.allclose(found.cpu(), expected, rtol=1e-6)
    assert torch.allclose(found.sum(1), torch.ones(len(probs_NV), device=tiny.DEVICE))


@pytest.mark.slow
def test_rows_have_their_own_filters() -> None:
    probs_NV = distributions()[[1, 5, 0]]
    top_p_N = torch.tensor([0.3, 0.8, 1.0], device=tiny.DEVICE)
    whole = nucleus_kernels.nucleus(probs_NV, top_p_N)
    assert torch.equal(nucleus_kernels.nucleus(probs_NV[1:2], top_p_N[1:2])[0], whole[1])
    assert nucleus_kernels.nucleus(probs_NV[:0], top_p_N[:0]).shape == (0, WIDTH)


@pytest.mark.slow
def test_rows_with_gaps_between_them() -> None:
    probs_NV = distributions()
    top_p_N = torch.full((len(probs_NV),), 0.8, device=tiny.DEVICE)
    apart_NV = torch.cat([probs_NV, probs_NV], 1)[:, :WIDTH]
    assert torch.equal(nucleus_kernels.nucleus(apart_NV, top_p_N), nucleus_kernels.nucleus(probs_NV, top_p_N))


def test_edge_with_fewer_digits_is_rejected() -> None:
    """In a flat row, of which the wrong edge keeps 314 other tokens."""
    probs_NV = distributions()[:1]
    top_p_N = torch.full((1,), 0.5, device=tiny.DEVICE)
    expected = TORCH.nucleus(probs_NV.cpu(), top_p_N.cpu())
    with fewer_digits(3):
        found = nucleus_kernels.nucleus(probs_NV, top_p_N).cpu()
        assert not torch.equal(found > 0, expected > 0)


def rows_with_ties() -> torch.Tensor:
    """Return nine logits in several tiles of each row, with ties of every size.

    Also masked tokens, and neighbours one unit apart that a temperature may make equal.
    """
    one = torch.tensor(3.0)
    near = [one]
    for _ in range(8):
        near.append(torch.nextafter(near[-1], -one))
    rows = [
        [2, 2, 2, 1, 1, 0, 0, 0, -5],
        [0] * 9,
        [3, 1, 4, 1, 5, 9, 2, 6, 5],
        [1, -torch.inf, 1, -torch.inf, 0, 0, 2, 2, 2],
    ]
    apart = [torch.tensor(4.0), *near[:8]]  # distances from the first differ in their last bits
    some = torch.cat([torch.tensor(rows, dtype=torch.float32), torch.stack(near)[None], torch.stack(apart)[None]])
    logits_NV = torch.full((len(some), SOFTMAX_TILE + 1), -torch.inf)
    logits_NV[:, :: SOFTMAX_TILE // 8] = some
    return logits_NV


def every_k(step: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return every row with every k (or some), in turns at other temperatures and min-p."""
    logits_NV = rows_with_ties()
    cases = list(product(range(len(logits_NV)), range(11)))[::step]
    row, top_k = zip(*cases, strict=True)
    temperature_N = torch.tensor([0.6, 1.0, 1.7, 0.9]).repeat(len(row))[: len(row)]
    min_p_N = torch.tensor([0.0, 0.2, 0.0, 1.0, 0.0]).repeat(len(row))[: len(row)]
    return logits_NV[list(row)], temperature_N, min_p_N, torch.tensor(top_k)


@pytest.mark.slow
@pytest.mark.parametrize("step", grid([9, 1], {9}))
def test_top_k_and_min_p_keep_what_sorting_keeps(step: int) -> None:
    """All k of rows of nine tokens, with ties (or every ninth)."""
    logits_NV, temperature_N, min_p_N, top_k_N = every_k(step)
    expected = TORCH.truncated(logits_NV, temperature_N, Filters(min_p_N, top_k_N, most_k=99))
    logits_NV, temperature_N, *edges = (one.to(tiny.DEVICE) for one in (logits_NV, temperature_N, min_p_N, top_k_N))
    found = nucleus_kernels.truncated(logits_NV, temperature_N, Filters(*edges, most_k=99)).cpu()
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6)
    kept = (expected > 0).sum(1)
    assert ((kept > top_k_N) & (top_k_N > 0)).any(), "ties at the edge are kept"


@pytest.mark.slow
def test_all_filters_of_a_request_together() -> None:
    """Qwen3's sampling (0.6, 20, 0.95): top-p counts the mass that the others leave."""
    logits_NV = rows_with_ties()[:5]
    wishes = [(0.6, 3, 0.95, 0.0), (1.0, 4, 0.5, 0.0), (0.6, 5, 0.9, 0.1), (2.0, 0, 0.7, 0.0), (0.0, 3, 0.9, 0.0)]
    rows = [Sampling(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in wishes]
    expected = distribution(logits_NV, DistributionParameters.of(rows, torch.device("cpu"), TORCH))
    found = distribution(logits_NV.to(tiny.DEVICE), DistributionParameters.of(rows, tiny.DEVICE, TritonKernels())).cpu()
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", grid(["distances are approximate", "fewer digits", "one token more"], {"distances are approximate"})
)
def test_wrong_edges_are_rejected(wrong: str) -> None:
    # Rows of neighbours, whose edges differ in the last bits.
    logits_NV, temperature_N, min_p_N, top_k_N = (one[-3:] for one in every_k(step=7))
    expected = TORCH.truncated(logits_NV, temperature_N, Filters(min_p_N, top_k_N, most_k=99))
    if wrong == "distances are approximate":
        logits_NV = logits_NV.half().float()
    elif wrong == "one token more":
        top_k_N = torch.where(top_k_N > 0, top_k_N + 1, 0)
    logits_NV, temperature_N, *edges = (one.to(tiny.DEVICE) for one in (logits_NV, temperature_N, min_p_N, top_k_N))
    with fewer_digits(5) if wrong == "fewer digits" else nullcontext():
        found = nucleus_kernels.truncated(logits_NV, temperature_N, Filters(*edges, most_k=99)).cpu()
    assert not torch.equal(found > 0, expected > 0)


def test_unfiltered_rows_equal_softmax_to_the_bit() -> None:
    """Their distribution must not depend on what another request of the step asks for."""
    logits_NV = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)).to(tiny.DEVICE)
    temperature_N, top_k_N = (torch.tensor(one, device=tiny.DEVICE) for one in ([0.7, 1.0, 1.3], [0, 5, 0]))
    found = nucleus_kernels.truncated(logits_NV, temperature_N, Filters(None, top_k_N, most_k=5))
    alone = TritonKernels().softmax(logits_NV, temperature_N)
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert int((found[1] > 0).sum()) == 5
