"""Drafts that are drawn outside a recorded step, and copied into its buffers before the target's pass.

So the rest of a step is recorded whatever the drafter is. It gets the random numbers and parameters of an eager step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafting.chains import draw_plan
from engine.drafting.draft import ChainShape, Layout, layout_of
from engine.drafting.drafter import Drafter
from engine.kernels.protocol import Chains
from engine.kernels.transfer import to_device
from engine.plan import Plan
from engine.sampling.distribution import DistributionParameters


class _Places(NamedTuple):
    """Origin of what the chains of a recorded step hold, in the chains of a plan, whose arrays are [C, L]."""

    chain_C: Tensor
    """Chain of the recorded step that each chain becomes."""
    token_CL: Tensor
    """Flat index of each token of the recorded step; 0 if it is not drafted."""
    parent_N: Tensor
    """Flat index of a token that is drawn from each distribution of the recorded step; 0 if there is none."""
    unused_N1: Tensor | None
    """Whether nothing is drawn from it; None if all are in use."""


def draft_into(buffers: Chains, recorded: Layout, uniform_LC: Tensor, plan: Plan, drafter: Drafter) -> None:
    """Draft a plan's chains, and copy their tokens and distributions to the chains of a recorded step.

    buffers, recorded, uniform_LC: chains of the step, their layout, and the numbers for drafting them.
    """
    rows, (probs_NV, kernels) = plan.sampling_rows, (buffers.draft.probs_NV, buffers.draft.kernels)
    layout = layout_of(tuple(map(ChainShape.of, rows)), probs_NV.device)
    places = _places_of(layout, recorded)
    parameters = DistributionParameters.of([row.sampling for row in rows], probs_NV.device, kernels)
    own_LC = uniform_LC[: layout.max_length].index_select(1, places.chain_C)
    tokens_CL, drawn_from = draw_plan(plan, drafter, layout, parameters, own_LC, probs_NV.shape[1])
    torch.take(tokens_CL, places.token_CL, out=buffers.tokens_CL)
    torch.index_select(drawn_from.probs_NV, 0, drawn_from.row_CX.take(places.parent_N), out=probs_NV)
    if places.unused_N1 is not None:
        # What another request has may not be finite.
        probs_NV.masked_fill_(places.unused_N1, 1 / probs_NV.shape[1])


@lru_cache(maxsize=256)
def _places_of(layout: Layout, recorded: Layout) -> _Places:
    """Return the places for a plan's layout. In the recorded one all requests have equally many chains, which share
    the distribution below their root.
    """
    device = layout.request.device
    chain_C = layout.request_C * recorded.shape[1] + layout.rank_C
    chain, depth = np.nonzero(np.arange(layout.max_length) < layout.length_C[:, None])
    origin = chain * layout.max_length + depth
    token_CL = np.zeros((recorded.num_chains, recorded.max_length), dtype=np.int64)
    token_CL[chain_C[chain], depth] = origin
    starts_L = np.array([level.distributions.start for level in recorded.levels])
    parent_N = np.full(recorded.num_probs, -1)
    parent_N[starts_L[depth] + np.where(depth == 0, layout.request_C[chain], chain_C[chain])] = origin
    unused_N = parent_N < 0
    return _Places(
        to_device(chain_C, device),
        to_device(token_CL, device),
        to_device(parent_N.clip(min=0), device),
        to_device(unused_N[:, None], device) if unused_N.any() else None,
    )
