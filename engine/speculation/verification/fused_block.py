"""Whether block verification and the score race are done by kernels (`triton_block.py`): on CUDA, where they are right.

On every device they are tried once on made-up chains, beside the plain operations. Not for: the rules themselves.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from engine.kernels import usable
from engine.sampling import fused
from engine.sampling.draw import categorical
from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification.rule import ChainVerdict

MOST_CHAINS = 1024
"""A race looks at all chains of a step in each of its programs."""


def takes(chains: Chains, numbers: Tensor) -> bool:
    """Whether the kernels verify these chains: the host must know whose they are, and something be drafted.

    numbers: any tensor of the verification.
    """
    return (
        chains.shape is not None
        and chains.max_length > 0
        and chains.num_chains <= MOST_CHAINS
        and fused.use_kernels(numbers)
        and work_on(numbers.device)
    )


def work_on(device: torch.device) -> bool:
    """Whether the kernels give the right verdicts on a device."""
    return usable("chains are verified", find_fault, device)


def race(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """`triton_block.race`."""
    from engine.speculation.verification import triton_block  # Triton is there where kernels are used

    return triton_block.race(chains, target, noise)


def winners(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    """`triton_block.winners`."""
    from engine.speculation.verification import triton_block

    return triton_block.winners(chains, score_C, accepted_C, next_token_C)


def find_fault(device: torch.device) -> str | None:
    """What is wrong with the kernels on a device; None where they give the plain operations' verdicts."""
    from engine.speculation.verification.race import race_plainly

    chains, target, noise = made_up(device)
    found, expected = race(chains, target, noise), race_plainly(chains, target, noise)
    for name in ("chain_B", "accepted_B", "next_token_B"):
        if not torch.equal(getattr(found, name), getattr(expected, name)):
            return f"{name.removesuffix('_B')} differs"
    return None


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
