"""Draws all chains of a step from tables of logits of a single pass (`heads.samplers.Tables`).

The distributions are computed once for all chains. One call draws all tokens if the tokens do not
depend on each other; otherwise there is one call for each depth.
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
from engine.needs import SEED_STABLE, TEXT
from engine.plan import Plan
from engine.sampling.distribution import DistributionParameters, distribution


class DraftRows(NamedTuple):
    """Draft rows of a layout.

    Draft rows of a sampling row are contiguous. A row that drafts nothing has no draft row.
    """

    first_R: Tensor
    """First draft row of each row that drafts."""
    row_S: Tensor
    """Sampling row of each draft row."""
    draft_row_CL: Tensor
    """Draft row of each token of the chains; any beyond a chain's end."""
    leader_LC: Tensor | None


def may_draw_at_once(plan: Plan, layout: Layout) -> bool:
    """Whether one call may draw all chains: from tables, or by compiled code (`cpu/drafting.py`).

    Distributions must depend on logits, temperature and filters alone, and draws on no other draw.
    """
    if layout.max_length == 0 or not layout.are_independent:
        return False
    return not any(row.needs & (TEXT | SEED_STABLE) for row in plan.sampling_rows)


@lru_cache(maxsize=128)  # the number of layouts that are cached
def draft_rows_of(layout: Layout) -> DraftRows:
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
    tables: Tables,
    draft_rows: DraftRows,
    parameters: DistributionParameters,
    uniform_LC: Tensor,
    vocab_size: int,
) -> tuple[Tensor, ProbsTable]:
    """Return [C, L] the tokens of all chains, and the distributions they were drawn from.

    Chains that share a node use the random number of the first chain through it.
    """
    num_previous, num_tokens = tables.logits_SPX.shape[1:]
    row_N = draft_rows.row_S.repeat_interleave(num_previous)
    logits_NX = tables.logits_SPX.reshape(-1, num_tokens)
    probs_NX = distribution(logits_NX, parameters.select(row_N))
    kernels = parameters.kernels
    draft_row_CL = draft_rows.draft_row_CL
    if draft_rows.leader_LC is not None:
        uniform_LC = uniform_LC.gather(1, draft_rows.leader_LC)
    if tables.token_SX is None:
        tokens = kernels.draw(probs_NX, draft_row_CL.flatten(), uniform_LC.T.flatten())
        return tokens.view(draft_row_CL.shape), ProbsTable(probs_NX, draft_row_CL, kernels)
    place_C = torch.zeros_like(draft_row_CL[:, 0])
    rows = []
    places = []
    for draft_row_C, uniform_C in zip(draft_row_CL.T, uniform_LC, strict=True):
        row_C = draft_row_C * num_previous + place_C
        place_C = kernels.draw(probs_NX, row_C, uniform_C)
        rows.append(row_C)
        places.append(place_C)
    token_CX = tables.token_SX[draft_row_CL.flatten()]
    drawn_probs_CX = probs_NX[torch.stack(rows, 1).flatten()]
    probs_CV = probs_NX.new_zeros((len(token_CX), vocab_size)).scatter_(1, token_CX, drawn_probs_CX)
    tokens = token_CX.gather(1, torch.stack(places, 1).view(-1, 1))
    probs_row_C = torch.arange(len(token_CX), device=draft_row_CL.device)
    table = ProbsTable(probs_CV, probs_row_C.view(draft_row_CL.shape), kernels)
    return tokens.view(draft_row_CL.shape), table
