"""Block verification and the score race by kernels, where there are any: `triton_block.py` on CUDA, `numba_block.py` on
a CPU.

On every device they are tried once on made-up chains, beside the plain operations. Not for: the rules themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from engine.kernels import Compiler, usable
from engine.sampling import fused
from engine.sampling.draw import categorical
from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification.rule import ChainVerdict

MOST_CHAINS = 1024
"""A race on CUDA looks at all chains of a step in each of its programs."""

_WHAT = "chains are verified"
Race = Callable[[Chains, LawTable, ChainNoise], ChainVerdict]


def compiler_for(chains: Chains, law_NV: Tensor) -> Compiler | None:
    """Whose kernels verify these chains, if any do: the host must know whose they are, and something be drafted."""
    if chains.shape is None or chains.max_length == 0:
        return None
    compiler = fused.compiler_for(law_NV)
    if compiler is None or (compiler == "Triton" and chains.num_chains > MOST_CHAINS):
        return None
    return compiler if work_on(law_NV.device, compiler) else None


def work_on(device: torch.device, compiler: Compiler) -> bool:
    """Whether the kernels of a compiler give the right verdicts on a device."""
    return usable(_WHAT, find_fault, device, compiler, compiler=compiler)


def takes_logits(logits_NV: Tensor) -> bool:
    """Whether `numba_block.decide` makes laws of these logits and decides by them."""
    return fused.compiler_for(logits_NV) == "Numba" and work_on(logits_NV.device, "Numba")


def prepare(device: torch.device) -> None:
    """Compile and try the kernels of laws and verdicts on a device, so that no request waits for that."""
    compiler = fused.compiler_for(torch.empty((1, 1), device=device))
    if compiler is not None:
        work_on(device, compiler)


def race_of(compiler: Compiler) -> Race:
    """`verify_bv_race` by kernels; with one chain for each request it is `verify_block`."""
    if compiler == "Numba":
        from engine.speculation.verification import numba_block  # Numba is there where its kernels are used

        return numba_block.race
    from engine.speculation.verification import triton_block  # so is Triton

    return triton_block.race


def winners(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    """`triton_block.winners`."""
    from engine.speculation.verification import triton_block

    return triton_block.winners(chains, score_C, accepted_C, next_token_C)


def find_fault(device: torch.device, compiler: Compiler) -> str | None:
    """What is wrong with a compiler's kernels on a device; None where they give the plain operations' verdicts."""
    from engine.speculation.verification.race import race_plainly

    chains, target, noise = made_up(device)
    found, expected = race_of(compiler)(chains, target, noise), race_plainly(chains, target, noise)
    for name in ("chain_B", "accepted_B", "next_token_B"):
        if not torch.equal(getattr(found, name), getattr(expected, name)):
            return f"{name.removesuffix('_B')} differs"
    return _fault_of_logits(device) if compiler == "Numba" else None


def _fault_of_logits(device: torch.device) -> str | None:
    """What is wrong with `numba_block.decide`, which must give the verdicts of `race`."""
    from engine.speculation.verification import numba_block

    chains, target, noise = made_up(device)
    assert chains.shape is not None
    logits_NV, num_requests = target.law_NV.log(), chains.shape[0]
    starts = np.linspace(0, len(logits_NV), num_requests + 1).astype(np.int64)
    temperature_B = torch.linspace(0.5, 1.5, num_requests, device=device)
    temperature_N = temperature_B.repeat_interleave(len(logits_NV) // num_requests)
    law = LawTable(fused.softmax(logits_NV, temperature_N), target.row_CX)
    numbers = torch.zeros((6, *noise.accept_CL.shape), dtype=torch.float64, device=device)
    numbers[1], numbers[3], numbers[4] = noise.accept_CL, noise.residual_C[:, None], noise.score_C[:, None]
    found, _ = numba_block.decide(logits_NV, temperature_B, starts, chains, target.row_CX, numbers)
    expected = numba_block.race(chains, law, noise)
    expected_3B = torch.stack([expected.chain_B, expected.accepted_B, expected.next_token_B])
    return None if np.array_equal(found, expected_3B.numpy()) else "verdicts by logits differ"


def made_up(device: torch.device, width: int = 2500) -> tuple[Chains, LawTable, ChainNoise]:
    """Three chains of up to four tokens for each of eight requests, the same every time; some prefixes are dead."""
    num_requests, num_chains, length = 8, 3, 4
    count = num_requests * num_chains

    def numbers(salt: int, *shape: int) -> torch.Tensor:
        place = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64, device=device)
        return (place * (0.754877666 + salt * 0.1)).frac().view(shape)

    draft_NV = (3 * numbers(1, count * length, width)).exp().float()
    draft_NV /= draft_NV.sum(1, keepdim=True)
    draft_row_CL = torch.arange(count * length, device=device).view(count, length)
    target_row_CX = torch.arange(count * (length + 1), device=device).view(count, length + 1)
    target_NV = (3 * numbers(2, count * (length + 1), width)).exp().float()
    target_NV /= target_NV.sum(1, keepdim=True)
    target_NV[target_row_CX[:, :-1].flatten()] += 2 * draft_NV
    target_NV[:, ::7] = 0
    target_NV /= target_NV.sum(1, keepdim=True)
    tokens_CL = categorical(draft_NV, numbers(3, count * length).flatten()).view(count, length)
    request_C = torch.arange(num_requests, device=device).repeat_interleave(num_chains)
    length_C = torch.arange(count, device=device) % (length + 1)
    draft = LawTable(draft_NV, draft_row_CL)
    chains = Chains(tokens_CL, length_C, request_C, draft, shape=(num_requests, num_chains))
    shapes = {"accept_CL": (count, length), "chosen_accept_CL": (count, length)}
    drawn = {
        one.name: numbers(4 + salt, *shapes.get(one.name, (count,))) for salt, one in enumerate(fields(ChainNoise))
    }
    return chains, LawTable(target_NV, target_row_CX), ChainNoise(**drawn)
