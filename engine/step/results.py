"""Copies a step's results to the host, and finds the requests with non-finite numbers.

All results are copied at once: every copy waits until the device has done all work before it, and
the device then waits for the host's next work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.drafting.draft import Draft, with_tokens
from engine.errors import NON_FINITE, RequestError
from engine.kernels.protocol import ChainVerdict
from engine.kernels.transfer import to_host
from engine.plan import Plan, TargetShift

Floats = npt.NDArray[np.float64]

BROKEN = RequestError(
    "the model returned numbers for this request that are not finite (NaN or an overflow), so it "
    "was ended; float32 or bfloat16 weights overflow less easily than float16 (--dtype)",
    code=NON_FINITE,
)


@dataclass(frozen=True)
class HostVerdict:
    """A `ChainVerdict` on the host, by request."""

    chains: list[int]
    accepted: list[int]
    next_tokens: list[int]
    bias: list[float]
    shifts: list[tuple[TargetShift, ...]]


def largest_numbers(draft: Draft, logits_NV: Tensor) -> Tensor:
    """Return [N + M] the maximum of each node's target logits, then of each draft distribution.

    A maximum is NaN if one of its numbers is. It ignores minus infinity, the logit of impossible
    tokens. logits_NV: at the nodes of the sampling rows.
    """
    largest_N = logits_NV.amax(1)
    drafted_MV = draft.chains.draft.probs_NV
    if not len(drafted_MV):
        return largest_N
    return torch.cat([largest_N, drafted_MV.amax(1)])


def read_verdicts(
    draft: Draft, verdicts: Sequence[ChainVerdict], largest: Tensor
) -> tuple[Draft, list[HostVerdict], Floats]:
    """Return (the draft with its tokens, the verdicts, the largest numbers).

    Waits for the device, and copies all tensors at once.
    """
    tensors = [largest]
    if draft.tokens_M is not None:
        tensors.append(draft.tokens_M)
    for verdict in verdicts:
        tensors += [verdict.chain_B, verdict.accepted_B, verdict.next_token_B]
        if verdict.bias_B is not None:
            tensors.append(verdict.bias_B)
        if verdict.shifts is not None:
            shifts = verdict.shifts
            tensors += [shifts.remaining_CM, shifts.state_CM4, shifts.num_chains_CM]
    copies = iter(to_host(tensors))
    largest_N = next(copies)
    if draft.tokens_M is not None:
        draft = with_tokens(draft, next(copies).tolist())
    read = [_host_verdict(verdict, copies) for verdict in verdicts]
    return draft, read, largest_N


def _host_verdict(verdict: ChainVerdict, copies: Iterator[npt.NDArray[Any]]) -> HostVerdict:
    """Return a verdict on the host. copies: of its tensors, in the order of `read_verdicts`."""
    chains = next(copies).tolist()
    accepted = next(copies).tolist()
    next_tokens = next(copies).tolist()
    bias = [0.0] * len(chains)
    if verdict.bias_B is not None:
        bias = next(copies).tolist()
    shifts: list[tuple[TargetShift, ...]] = [()] * len(chains)
    if verdict.shifts is not None:
        remaining_BM, state_BM4, count_BM = (next(copies).tolist() for _ in range(3))
        shifts = list(map(_shifts, remaining_BM, state_BM4, count_BM))
    return HostVerdict(chains, accepted, next_tokens, bias, shifts)


def _shifts(
    remaining: Sequence[int], states: Sequence[Sequence[float]], counts: Sequence[int]
) -> tuple[TargetShift, ...]:
    """Return the shifts of one request that still hold."""
    return tuple(
        TargetShift(left, (a, b, c, d), count)
        for left, (a, b, c, d), count in zip(remaining, states, counts, strict=True)
        if left > 0
    )


def broken_rows(plan: Plan, draft: Draft | None, largest: Floats) -> frozenset[int]:
    """Return the sequence ids of rows for which a model computed NaN or infinity.

    An overflow or wrong weights cause such numbers. The request ends with an error; other requests
    of the step continue. Its K/V is wiped before its blocks are reused: a kernel reads masked keys
    too, and zero times NaN is NaN. largest: result of `largest_numbers`.
    """
    is_finite = np.isfinite(largest)
    if draft is None or is_finite.all():
        return frozenset()
    starts = draft.starts.tolist()
    num_nodes = starts[-1]
    is_finite_target = is_finite[:num_nodes]
    is_finite_draft = is_finite[num_nodes:]
    rows = plan.sampling_rows
    broken = {
        number
        for number, (start, tree) in enumerate(zip(starts, draft.trees, strict=False))
        if not all(is_finite_target[start : start + 1 + tree.num_nodes])
    }
    for chain, row_L in enumerate(draft.chains.draft.row_CX.tolist()):
        number = int(draft.layout.request_C[chain])
        rank = int(draft.layout.rank_C[chain])
        # A recorded step has more chains than its requests draft, and chains of no request.
        is_drafted = number < len(rows) and rank < rows[number].num_drafts
        if is_drafted and not is_finite_draft[row_L[: rows[number].draft_length]].all():
            broken.add(number)
    return frozenset(rows[number].sequence_id for number in broken)
