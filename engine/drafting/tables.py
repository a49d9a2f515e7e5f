"""Draws all chains of a step from tables of logits that one pass has computed (`models.heads.samplers.Tables`).

The distributions are computed once for all chains: one call draws all tokens if they do not depend on each other, and
otherwise one call those of a depth.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafting.draft import Layout
from engine.heads.samplers import Tables
from engine.kernels.protocol import ProbsTable
from engine.kernels.transfer import to_device
from engine.needs import ALONE, TEXT
from engine.plan import Plan
from engine.sampling.distribution import DistributionParameters, distribution


class DraftRows(NamedTuple):
    """Draft rows of a layout: those of a row follow each other, and a row that drafts nothing has none."""

    first_R: Tensor
    """The first draft row of each row that drafts."""
    row_S: Tensor
    """The sampling row of each draft row."""
    draft_row_CL: Tensor
    """The draft row that drafts each token of the chains; beyond a chain's end, any."""
    leader_LC: Tensor | None
    """`Layout.leader_LC`."""


def may_draw_at_once(plan: Plan, layout: Layout) -> bool:
    """Whether the distributions depend on logits, temperature and filters alone, and all draws are independent."""
    return (
        layout.max_length > 0
        and not any(row.needs & (TEXT | ALONE) for row in plan.sampling_rows)
        and layout.are_independent
    )


@lru_cache(maxsize=128)  # the number of layouts that are cached
def draft_rows_of(layout: Layout) -> DraftRows:
    """Return the draft rows of a layout."""
    device = layout.request.device
    firsts_C = np.flatnonzero(layout.rank_C == 0)
    length_R = layout.length_C[firsts_C]
    first_R = np.cumsum(length_R) - length_R
    depth_CL = np.minimum(np.arange(layout.max_length), np.maximum(layout.length_C - 1, 0)[:, None])
    draft_row_CL = np.minimum(first_R[layout.request_C][:, None] + depth_CL, length_R.sum() - 1)
    return DraftRows(
        to_device(first_R[length_R > 0], device),
        to_device(np.repeat(np.arange(len(length_R)), length_R), device),
        to_device(draft_row_CL, device),
        layout.leader_LC,
    )


def draw_from(
    tables: Tables, draft_rows: DraftRows, parameters: DistributionParameters, uniform_LC: Tensor, vocab_size: int
) -> tuple[Tensor, ProbsTable]:
    """Return [C, L] the tokens of all chains, and the distributions they were drawn from.

    Chains that share a node use the random number of the first of them.
    """
    num_previous, num_tokens = tables.logits_SPX.shape[1:]
    row_N = draft_rows.row_S.repeat_interleave(num_previous)
    probs_NX = distribution(tables.logits_SPX.reshape(-1, num_tokens), parameters.select(row_N))
    kernels, draft_row_CL = parameters.kernels, draft_rows.draft_row_CL
    if draft_rows.leader_LC is not None:
        uniform_LC = uniform_LC.gather(1, draft_rows.leader_LC)
    if tables.token_SX is None:
        token_CL = kernels.draw(probs_NX, draft_row_CL.flatten(), uniform_LC.T.flatten()).view(draft_row_CL.shape)
        return token_CL, ProbsTable(probs_NX, draft_row_CL, kernels)
    place_C = torch.zeros_like(draft_row_CL[:, 0])
    rows, places = [], []
    for draft_row_C, uniform_C in zip(draft_row_CL.T, uniform_LC, strict=True):
        rows.append(draft_row_C * num_previous + place_C)
        place_C = kernels.draw(probs_NX, rows[-1], uniform_C)
        places.append(place_C)
    token_CX = tables.token_SX[draft_row_CL.flatten()]
    probs_CV = probs_NX.new_zeros((len(token_CX), vocab_size)).scatter_(
        1, token_CX, probs_NX[torch.stack(rows, 1).flatten()]
    )
    token_CL = token_CX.gather(1, torch.stack(places, 1).view(-1, 1)).view(draft_row_CL.shape)
    return token_CL, ProbsTable(
        probs_CV, torch.arange(len(token_CX), device=draft_row_CL.device).view(draft_row_CL.shape), kernels
    )
