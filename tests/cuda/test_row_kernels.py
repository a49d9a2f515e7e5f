"""Kernels over rows of the vocabulary give the plain operations' numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

row_kernels = pytest.importorskip("engine.cuda.row_kernels")

from engine.cuda.kernels import TritonKernels  # noqa: E402
from engine.cuda.row_kernels import Subtracted  # noqa: E402
from engine.kernels.draw import categorical  # noqa: E402
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable  # noqa: E402
from engine.kernels.torch_block import residual  # noqa: E402
from engine.kernels.torch_kernels import TORCH, Kernels  # noqa: E402
from engine.request import Sampling  # noqa: E402
from engine.sampling.distribution import DistributionParameters, distribution  # noqa: E402
from engine.speculation.verification.chain_rules import verify_race, verify_token  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402
from tests.wrong import calls_of, instead  # noqa: E402

DEVICE = tiny.DEVICE
KERNELS = TritonKernels()
# More than two tiles of a row, and no whole number of them.
WIDTH = 2 * row_kernels.TILE + 77


def random_distribution(chance: np.random.Generator, num_rows: int, spread: float = 3.0) -> Tensor:
    logits = torch.from_numpy(spread * chance.standard_normal((num_rows, WIDTH))).float()
    return logits.softmax(1).to(DEVICE)


@pytest.mark.sole("kernels of rows")
@pytest.mark.parametrize("dtype", grid([torch.float32, torch.bfloat16, torch.float16], {torch.bfloat16}))
def test_distributions_are_those_of_the_plain_path(dtype: torch.dtype) -> None:
    """Masked tokens, a tiny temperature, a masked tile, rows with gaps between them."""
    chance = np.random.default_rng(1)
    width = 2 * row_kernels.SOFTMAX_TILE + 77
    logits = torch.from_numpy(9 * chance.standard_normal((6, width + 3))).to(DEVICE, dtype)[:, :width]
    logits[1, ::2] = -torch.inf
    logits[2, : row_kernels.SOFTMAX_TILE] = -torch.inf
    logits[3, row_kernels.SOFTMAX_TILE :] = -torch.inf
    logits[5, -1] = 50.0
    samplings = [Sampling(temperature=t, top_p=p) for t, p in ((1, 1), (1, 1), (0.7, 1), (1e-3, 1), (5, 1), (0.3, 0.9))]
    parameters = DistributionParameters.of(samplings, DEVICE, KERNELS)
    found = distribution(logits, parameters)
    assert torch.allclose(found, distribution(logits, replace(parameters, kernels=TORCH)), rtol=2e-5, atol=1e-9)
    assert found[5, -1] > 0.99
    separate = KERNELS.softmax(logits.T.contiguous().T, parameters.temperature_N)
    assert torch.equal(separate, KERNELS.softmax(logits, parameters.temperature_N)), "rows that do not lie in one piece"


def test_filters_of_logits_need_no_softmax() -> None:
    logits = torch.randn(1, 50, device=DEVICE)
    with calls_of(TritonKernels, "softmax") as calls:
        for sampling in (Sampling(top_k=3), Sampling(min_p=0.1)):
            found = distribution(logits, DistributionParameters.of([sampling], DEVICE, KERNELS))
            assert found.sum() == pytest.approx(1.0, abs=1e-5)
    assert not calls


@pytest.mark.slow
def test_a_greedy_row_leaves_the_others_to_the_kernels() -> None:
    logits = torch.from_numpy(np.random.default_rng(8).standard_normal((3, WIDTH))).float().to(DEVICE)
    samplings = [Sampling(temperature=0), Sampling(temperature=0.7), Sampling(temperature=1.2, top_p=0.5)]
    parameters = DistributionParameters.of(samplings, DEVICE, KERNELS)
    with calls_of(row_kernels, "softmax") as calls:
        found = distribution(logits, parameters)
    assert torch.allclose(found, distribution(logits, replace(parameters, kernels=TORCH)), rtol=2e-5, atol=1e-9)
    assert len(calls) == 1
    assert found[0].max() == found[0, logits[0].argmax()] == 1


@pytest.mark.slow
def test_draws_are_the_inverse_of_the_cumulative_sum() -> None:
    """Numbers over a whole row: each token's share of draws is its probability."""
    distributions = random_distribution(np.random.default_rng(2), 3)
    count = 40
    uniform = (torch.arange(count, device=DEVICE, dtype=torch.float64) + 0.5) / count
    for row in range(3):
        rows = torch.full((count,), row, device=DEVICE)
        drawn, expected = row_kernels.draw(distributions, rows, uniform), categorical(distributions[rows], uniform)
        # Sums of another order may put a border on the other side of a number of the grid.
        assert (drawn != expected).sum() <= 1
        assert (drawn[1:] >= drawn[:-1]).all()


def test_draws_at_the_edges_of_rows_and_tiles_have_mass() -> None:
    """All mass in the last token, none in a tile, numbers next to 0 and 1, no surplus."""
    distributions = torch.zeros(3, WIDTH, device=DEVICE)
    distributions[0, -1] = 1.0
    distributions[1, [5, WIDTH - 2]] = 0.5
    distributions[2, row_kernels.TILE - 1 : row_kernels.TILE + 1] = torch.tensor([1e-38, 1.0], device=DEVICE)
    ends = torch.tensor([2.0**-54, 1 - 2.0**-53], dtype=torch.float64, device=DEVICE)

    def draw(row: int, less: Subtracted | None = None) -> list[int]:
        rows = torch.full((2,), row, device=DEVICE)
        drawn: list[int] = row_kernels.draw(distributions, rows, ends, less).tolist()
        return drawn

    assert draw(0) == [WIDTH - 1] * 2
    assert draw(1) == [5, WIDTH - 2]
    assert draw(2)[1] == row_kernels.TILE
    one = torch.ones(2, dtype=torch.float64, device=DEVICE)
    same = Subtracted(distributions, one.long(), one, one.bool())
    assert draw(1, same) == [5, WIDTH - 2], "without a surplus the target's distribution is drawn from"
    assert draw(0, same) == [WIDTH - 1] * 2


def chains_of(
    chance: np.random.Generator, num_requests: int, num_chains: int, length: int
) -> tuple[Chains, ProbsTable]:
    """Chains of several lengths, one empty, whose acceptance is common."""
    count = num_requests * num_chains
    length_C = torch.from_numpy(chance.integers(1, length + 1, count)).to(DEVICE)
    length_C[-1] = 0
    draft_row_CL = torch.arange(count * length, device=DEVICE).view(count, length)
    target_row_CX = torch.arange(count * (length + 1), device=DEVICE).view(count, length + 1)
    draft = ProbsTable(random_distribution(chance, count * length, 1.0), draft_row_CL, KERNELS)
    target_NV = random_distribution(chance, count * (length + 1), 1.0)
    target_NV[target_row_CX[:, :-1].flatten()] += 2 * draft.probs_NV
    target = ProbsTable(target_NV / target_NV.sum(1, keepdim=True), target_row_CX, KERNELS)
    uniform = torch.from_numpy(chance.random(count * length)).to(DEVICE)
    tokens_CL = categorical(draft.probs_NV, uniform).view(count, length)
    request_C = torch.arange(num_requests, device=DEVICE).repeat_interleave(num_chains)
    return Chains(tokens_CL, length_C, request_C, draft, (num_requests, num_chains)), target


@pytest.mark.slow
def test_token_verification_decides_the_same() -> None:
    """The race is compared in `test_block_kernels.py`."""
    chance = np.random.default_rng(3)
    chains, target = chains_of(chance, 12, 1, 3)
    numbers = torch.from_numpy(chance.random((9, chains.num_chains))).to(DEVICE)
    noise = ChainNoise(numbers[:3].T, numbers[3], numbers[4], numbers[5:8].T, numbers[8])
    plain = verify_token(chains, replace(target, kernels=TORCH), noise)
    parts = ("chain_B", "accepted_B", "next_token_B")
    found = verify_token(chains, target, noise)
    assert all(torch.equal(getattr(found, part), getattr(plain, part)) for part in parts)
    # The wrong variant leaves the draft distribution out.
    with instead(row_kernels, "draw", lambda right, *operands: right(*operands[:3])):
        assert not torch.equal(verify_token(chains, target, noise).next_token_B, plain.next_token_B)
    assert 0 < int(plain.accepted_B.sum()) < int(chains.length_C.sum())


def test_residuals_are_those_of_the_plain_path() -> None:
    """Residuals of every weight and depth; chains of the whole length draw from the target."""
    chance = np.random.default_rng(5)
    chains, target = chains_of(chance, 8, 1, 3)
    chains = replace(chains, length_C=torch.full_like(chains.length_C, 3))
    depth_C = torch.arange(8, device=DEVICE) % 4
    weight_C = torch.linspace(0.3, 1, 8, dtype=torch.float64, device=DEVICE)
    uniform_C = torch.from_numpy(chance.random(8)).to(DEVICE)

    def residuals(kernels: Kernels) -> Tensor:
        return kernels.draw_residual(chains, target, depth_C, weight_C, uniform_C)

    assert residual(chains, target, depth_C, weight_C).dtype == target.probs_NV.dtype
    assert torch.equal(residuals(KERNELS), residuals(TORCH))


def test_rows_that_do_not_speculate_draw_from_their_distribution() -> None:
    distributions = random_distribution(np.random.default_rng(4), 2)
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    number = torch.arange(2, device=DEVICE)
    draft = ProbsTable(distributions[:0], nothing, KERNELS)
    chains = Chains(nothing, torch.zeros_like(number), number, draft, (2, 1))
    uniform = torch.tensor([0.2, 0.8], dtype=torch.float64, device=DEVICE)
    empty = nothing.double()
    noise = ChainNoise(empty, uniform, uniform, empty, uniform)
    found = verify_race(chains, ProbsTable(distributions, number.unsqueeze(1), KERNELS), noise)
    assert torch.equal(found.next_token_B, categorical(distributions, uniform))


def test_a_row_is_drawn_from_by_the_kernels_or_without_them() -> None:
    """Rows may come in another order; those that are not contiguous use no kernels."""
    distributions = random_distribution(np.random.default_rng(6), 3)
    rows = torch.tensor([2, 0, 2, 1], device=DEVICE)
    uniform = torch.tensor([0.2, 0.8, 0.5, 0.4], dtype=torch.float64, device=DEVICE)
    expected = categorical(distributions[rows], uniform)
    with calls_of(row_kernels, "draw") as calls:
        assert torch.equal(KERNELS.draw(distributions, rows, uniform), expected)
        assert torch.equal(KERNELS.draw(distributions.T.contiguous().T, rows, uniform), expected)
    assert len(calls) == 1


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper() -> None:
    """Down to an H100's machine code, without a device; no tile spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = Counter(line.split(":")[0] for line in done.stdout.splitlines())
    assert kernels == {
        "_divide": 4,
        "_attend": 29,
        "_merge": 6,
        "_keep": 7,
        "_norm": 3,
        "_rotate_and_write": 6,
        "_gate": 3,
        "_round_rows": 1,
        "_multiply_turns": 4,
        "_walk_turns": 5,
        "_sum_exponentials": 2,
        "_softmax": 2,
        "_narrow": 2,
        "_edge": 1,
        "sum_tiles": 2,
        "_draw": 2,
        "_walk": 1,
        "_decide": 1,
        "_race": 1,
    }
