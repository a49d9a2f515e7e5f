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

from engine.drafting.draft import Draft, with_tokens
from engine.errors import NON_FINITE, RequestError
from engine.kernels.protocol import ChainVerdict
from engine.kernels.transfer import to_host
from engine.plan import Plan, TargetShift

Floats = npt.NDArray[np.float64]

BROKEN = RequestError(
    "the model gave numbers for this request that are not finite (NaN or an overflow), so it was ended; float32 or "
    "bfloat16 weights overflow less easily than float16 (--dtype)",
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


def broken_rows(plan: Plan, draft: Draft | None, largest: Floats) -> frozenset[int]:
    """Sequence ids of the sampling rows for which a model computed NaN or infinity (an overflow, or broken weights).

    Such a request ends with an error; the others of its step go on. Its K/V is wiped before others get its blocks,
    because what an attention kernel reads and weighs with zero would still make NaN of NaN.
    largest: what `largest_numbers` gave.
    """
    is_finite = np.isfinite(largest)
    if draft is None or is_finite.all():
        return frozenset()
    starts = draft.starts.tolist()
    of_target, of_draft = is_finite[: starts[-1]], is_finite[starts[-1] :]
    rows = plan.sampling_rows
    broken = {
        number
        for number, (start, tree) in enumerate(zip(starts, draft.trees, strict=False))
        if not all(of_target[start : start + 1 + tree.num_nodes])
    }
    for chain, row_L in enumerate(draft.chains.draft.row_CX.tolist()):
        number, rank = int(draft.layout.request_C[chain]), int(draft.layout.rank_C[chain])
        # A recorded step has chains that its requests do not draft, and such of no request.
        is_drafted = number < len(rows) and rank < rows[number].num_drafts
        if is_drafted and not all(of_draft[row] for row in row_L[: rows[number].draft_length]):
            broken.add(number)
    return frozenset(rows[number].sequence_id for number in broken)
