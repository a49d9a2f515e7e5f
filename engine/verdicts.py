"""Brings to the host, in one copy, what a step has found on the device.

Every copy waits until the device has done all work before it, and the device then waits for the host's next work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.drafters.draft import Draft, with_tokens
from engine.plan import TargetShift
from engine.speculation.verification import ChainVerdict
from engine.transfer import to_host

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HostVerdict:
    """A `ChainVerdict` on the host, by request."""

    chains: list[int]
    accepted: list[int]
    next_tokens: list[int]
    bias: list[float]
    shifts: list[tuple[TargetShift, ...]]


def largest_numbers(draft: Draft, logits_NV: Tensor) -> Tensor:
    """[N + M] maximum of each node's target logits, then of each draft law; NaN where one of the numbers is NaN.

    logits_NV: of the sampling rows' nodes. The maximum ignores minus infinity, the logit of tokens that cannot come.
    """
    drafted_MV = draft.chains.draft.law_NV
    return torch.cat([logits_NV.amax(1), drafted_MV.amax(1)]) if len(drafted_MV) else logits_NV.amax(1)


def read_verdicts(
    draft: Draft, verdicts: Sequence[ChainVerdict], largest: Tensor
) -> tuple[Draft, list[HostVerdict], Floats]:
    """(the draft with its tokens, the verdicts, the largest numbers): here a step waits for the device."""
    tensors = [largest, *([] if draft.tokens_M is None else [draft.tokens_M])]
    for one in verdicts:
        tensors += [one.chain_B, one.accepted_B, one.next_token_B, *([] if one.bias_B is None else [one.bias_B])]
        if one.shifts is not None:
            tensors += [one.shifts.remaining_CM, one.shifts.state_CM4, one.shifts.num_chains_CM]
    found = iter(to_host(tensors))
    largest_N = next(found)
    if draft.tokens_M is not None:
        draft = with_tokens(draft, next(found).tolist())
    read = []
    for one in verdicts:
        chains, accepted, next_tokens = (next(found).tolist() for _ in range(3))
        bias = [0.0] * len(chains) if one.bias_B is None else next(found).tolist()
        shifts: list[tuple[TargetShift, ...]] = [()] * len(chains)
        if one.shifts is not None:
            shifts = list(map(_shifts, *(next(found).tolist() for _ in range(3))))
        read.append(HostVerdict(chains, accepted, next_tokens, bias, shifts))
    return draft, read, largest_N


def _shifts(
    remaining: Sequence[int], states: Sequence[Sequence[float]], counts: Sequence[int]
) -> tuple[TargetShift, ...]:
    """The shifts of one request that still hold."""
    return tuple(
        TargetShift(left, (a, b, c, d), count)
        for left, (a, b, c, d), count in zip(remaining, states, counts, strict=True)
        if left > 0
    )
