"""Kernels give the verdicts of plain block verification and of the plain race."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from engine.cpu.compiled import block_loops
from engine.cpu.kernels import NumbaKernels
from engine.cuda import block_kernels
from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.speculation.verification.chain_rules import verify_race
from tests.engine import tiny
from tests.grid import grid
from tests.start.test_choosing import kernels_of
from tests.wrong import calls_of

DEVICE = tiny.DEVICE
WIDTH = 1100
Case = tuple[Chains, ProbsTable, ChainNoise]


def case(counts: list[int], length: int, seed: int, spread: float = 1.5, ends: bool = False) -> Case:
    """Return chains of requests, `counts` of each; some tokens are impossible for the target.

    ends: all random numbers are at the ends of [0, 1).
    """
    chance = np.random.default_rng(seed)
    count = sum(counts)

    def distribution(rows: int) -> torch.Tensor:
        logits = torch.from_numpy(spread * chance.standard_normal((rows, WIDTH)))
        # A few likely tokens, so that drafts are accepted now and then.
        logits[:, :6] += 5
        return logits

    draft = distribution(count * length)
    target = distribution(count * (length + 1))
    target_row_CX = torch.arange(count * (length + 1)).view(count, length + 1)
    target[target_row_CX[:, :-1].flatten()] += draft
    target[:, 3] = -torch.inf
    target[::5, 1:40] = -torch.inf
    draft_NV = draft.softmax(1).float()
    uniform = torch.from_numpy(chance.random(count * length))
    tokens_CL = categorical(draft_NV, uniform).view(count, length)
    request_C = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    # Numbers of requests need not follow each other.
    chains = Chains(
        tokens_CL.to(DEVICE),
        torch.from_numpy(chance.integers(0, length + 1, count)).to(DEVICE),
        (2 * request_C + 1).to(DEVICE),
        ProbsTable(draft_NV.to(DEVICE), torch.arange(count * length, device=DEVICE).view(count, length), TORCH),
        shape=(len(counts), max(counts)),
    )
    numbers = torch.from_numpy(chance.random((count, 2 * length + 3))).to(DEVICE)
    if ends:
        numbers = torch.where(numbers < 0.5, 0.0, 1 - 2.0**-53)
    noise = ChainNoise(
        numbers[:, :length], numbers[:, -3], numbers[:, -2], numbers[:, length : 2 * length], numbers[:, -1]
    )
    return chains, ProbsTable(target.softmax(1).float().to(DEVICE), target_row_CX.to(DEVICE), TORCH), noise


def filtered() -> Case:
    """Distributions of which filters leave a few tokens."""
    chains, target, noise = case([3] * 10, 4, 7)
    draft_NV = chains.draft.probs_NV
    draft_NV = torch.where(draft_NV >= draft_NV.topk(5, 1).values[:, -1:], draft_NV, 0.0)
    draft = ProbsTable(draft_NV / draft_NV.sum(1, keepdim=True), chains.draft.row_CX, TORCH)
    tokens_CL = categorical(draft.probs_NV, noise.accept_CL.flatten().roll(3)).view(chains.tokens_CL.shape)
    return replace(chains, draft=draft, tokens_CL=tokens_CL), target, noise


CASES = {
    "filtered": filtered,
    "several chains": lambda: case([4, 4, 4, 4, 4], 5, 1),
    "one chain each": lambda: case([1] * 24, 3, 2),
    "as many as they are": lambda: case([1, 3, 2, 5, 1, 1], 4, 3),
    "one token": lambda: case([3] * 8, 1, 4),
    "close distributions": lambda: case([2] * 10, 6, 5, spread=0.3),
    "ends of the numbers": lambda: case([3] * 8, 3, 6, ends=True),
}


@pytest.fixture(params=grid(["Triton", "Numba"], ["Numba"]))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Kernels of a compiler."""
    kernels: Kernels = kernels_of(request.param)()
    return kernels


def verdict(verify: Any, case: Case, kernels: Kernels) -> list[list[int]]:
    """Return the verdict of these kernels."""
    chains, target, noise = case
    found: ChainVerdict = verify(chains, replace(target, kernels=kernels), noise)
    return [part.tolist() for part in (found.chain_B, found.accepted_B, found.next_token_B)]


def of_compilers(names: Iterable[str], of_triton: Container[str]) -> list[ParameterSet]:
    """(compiler, name) of all cases: of Triton, whose interpreter is slow, the gate runs some."""
    cases = [(compiler, name) for compiler in ("Triton", "Numba") for name in names]
    return grid(cases, [case for case in cases if case[0] == "Numba" or case[1] in of_triton])


@pytest.mark.sole("kernels of verdicts")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kernels", "name"), of_compilers(CASES, ("filtered", "as many as they are")), indirect=["kernels"]
)
def test_verdicts_are_those_of_the_plain_race(name: str, kernels: Kernels) -> None:
    expected = verdict(verify_race, CASES[name](), TORCH)
    assert verdict(verify_race, CASES[name](), kernels) == expected
    assert len(set(expected[1])) > 1 or name in ("one token", "ends of the numbers")


def test_verdicts_are_those_of_plain_block_verification(kernels: Kernels) -> None:
    expected = verdict(verify_race, CASES["one chain each"](), TORCH)
    assert verdict(verify_race, CASES["one chain each"](), kernels) == expected


WRONG: dict[str, Callable[[Chains, ProbsTable, ChainNoise], Case]] = {
    "one number for two decisions": lambda c, t, n: (c, t, replace(n, residual_C=n.score_C)),
    "the score of another chain": lambda c, t, n: (c, t, replace(n, score_C=n.score_C.roll(1))),
    "chains as long as the longest": lambda c, t, n: (replace(c, length_C=c.length_C * 0 + c.max_length), t, n),
    "distributions of the next prefix": lambda c, t, n: (c, replace(t, row_CX=t.row_CX.roll(1, 1)), n),
    "drafts of another chain": lambda c, t, n: (replace(c, tokens_CL=c.tokens_CL.roll(1, 0)), t, n),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kernels", "wrong"), of_compilers(WRONG, ("one number for two decisions",)), indirect=["kernels"]
)
def test_wrong_variants_fail_the_comparison(wrong: str, kernels: Kernels) -> None:
    right = CASES["several chains"]()
    expected = verdict(verify_race, right, TORCH)
    assert verdict(verify_race, WRONG[wrong](*right), kernels) != expected


def test_unsupported_inputs_stay_plain(kernels: Kernels) -> None:
    """Chains without tokens, and distributions that do not lie in one piece."""
    chains, target, noise = CASES["several chains"]()
    module = block_loops if isinstance(kernels, NumbaKernels) else block_kernels
    with calls_of(module, "race") as races:
        kernels.race(chains, target, noise)
        assert len(races) == 1
        nothing = replace(chains, tokens_CL=chains.tokens_CL[:, :0], length_C=0 * chains.length_C)
        kernels.race(nothing, target, replace(noise, accept_CL=noise.accept_CL[:, :0]))
        if isinstance(kernels, NumbaKernels):
            kernels.race(chains, replace(target, probs_NV=target.probs_NV.double()), noise)
            kernels.race(chains, replace(target, probs_NV=target.probs_NV.T.contiguous().T), noise)
        assert len(races) == 1


def test_a_shape_of_other_requests_is_found() -> None:
    kernels = kernels_of("Numba")()
    chains, target, noise = CASES["several chains"]()
    for count in (4, 6):
        with pytest.raises(AssertionError, match="as many requests"):
            kernels.race(replace(chains, shape=(count, 4)), target, noise)


@pytest.mark.sampled
def test_token_without_draft_probability_is_rejected(kernels: Kernels) -> None:
    chains, target, noise = CASES["several chains"]()
    draft_NV = chains.draft.probs_NV.clone()
    draft_NV[chains.draft.row_CX[:, 1], chains.tokens_CL[:, 1]] = 0
    never = replace(chains, draft=ProbsTable(draft_NV, chains.draft.row_CX, TORCH))
    accepted = verdict(verify_race, (never, target, noise), kernels)[1]
    assert max(accepted) == 1
    assert verdict(verify_race, (never, target, noise), TORCH)[1] == accepted


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_request_whose_scores_are_not_numbers_reads_no_memory_of_others(whose: str, kernels: Kernels) -> None:
    """Its verdict is not used, but it is a chain of the request, a length and a token."""
    chains, target, noise = case([2, 3, 1], 3, seed=5)
    broken = chains.request_C == 3
    target_NV, draft_NV = target.probs_NV.clone(), chains.draft.probs_NV.clone()
    if whose == "target":
        target_NV[target.row_CX[broken].flatten()] = torch.nan
    else:
        draft_NV[chains.draft.row_CX[broken].flatten()] = torch.nan
    chains = replace(chains, draft=replace(chains.draft, probs_NV=draft_NV))
    found = kernels.race(chains, replace(target, probs_NV=target_NV), noise)
    assert 2 <= int(found.chain_B[1]) < 5
    assert 0 <= int(found.accepted_B[1]) <= 3
    assert 0 <= int(found.next_token_B[1]) < WIDTH
    right = kernels.race(*case([2, 3, 1], 3, seed=5))
    assert found.chain_B[[0, 2]].tolist() == right.chain_B[[0, 2]].tolist()
