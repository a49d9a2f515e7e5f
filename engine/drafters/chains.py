"""Draws every row's chains: a drafter gives logits, their laws are made and tokens drawn level by level.

Below the root the nodes lie level by level, and within a level in the order of their chains. Equal tokens are not
merged here: every drawn node has its own place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafters.draft import ChainShape, Draft, Layout, Level, draw_noise, layout_of, trees_of
from engine.drafters.drafter import Drafter
from engine.plan import Plan, Row
from engine.sampling.edits import NodeContext, edit
from engine.sampling.law import LawParameters, law
from engine.sampling.stable import race, winners_only
from engine.speculation.drafting import MOST_LIKELY, Chains, LawTable, TargetShifts, children
from engine.transfer import to_device


@torch.inference_mode()
def draw_chains(
    plan: Plan, drafter: Drafter | None, vocab_size: int, device: torch.device, most_unmerged: int = 0
) -> Draft | None:
    """Let the drafter catch up and draft the plan's chains; None when no row emits.

    drafter: None where nothing is drawn; rows then have one chain of length 0. most_unmerged: see `trees_of`.
    """
    rows = plan.sampling_rows
    root_NV = torch.empty((0, vocab_size), device=device) if drafter is None else drafter.begin(plan)
    if not rows:
        return None
    layout = layout_of(tuple(map(ChainShape.of, rows)), device)
    seed_C = np.array([row.sampling.seed for row in rows], dtype=np.int64)[layout.request_C]
    end_C = np.array([row.end for row in rows], dtype=np.int64)[layout.request_C]
    uniform_LC, noise = draw_noise(seed_C, end_C, layout.rank_C, layout.max_length, device)
    parameters = LawParameters.of([row.sampling for row in rows], device)
    law_NV = torch.empty((layout.num_laws, vocab_size), device=device)
    tokens_CL = _draw_levels(rows, layout, parameters, uniform_LC, root_NV, drafter, law_NV)
    chains = Chains(
        tokens_CL,
        layout.length,
        layout.request,
        LawTable(law_NV, layout.law_row_CL),
        layout.leads_CL,
        _shifts(rows, layout, device),
        layout.shape,
    )
    trees, tokens_M = trees_of(plan, layout, tokens_CL, most_unmerged)
    return Draft(layout, chains, trees, tokens_M, parameters, noise)


def _draw_levels(
    rows: Sequence[Row],
    layout: Layout,
    parameters: LawParameters,
    uniform_LC: Tensor,
    logits_NV: Tensor,
    drafter: Drafter | None,
    law_NV: Tensor,
) -> Tensor:
    """Draw all chains level by level: [C, L] the tokens.

    logits_NV: below the root of every row that draws; law_NV: filled with the laws that the tokens came from.
    """
    tokens_CL = torch.zeros((layout.num_chains, layout.max_length), dtype=torch.int64, device=uniform_LC.device)
    of_law = parameters.select(layout.law_row_of_N)
    for depth, level in enumerate(layout.levels):
        if depth > 0:
            assert drafter is not None
            # Tokens stay on the device.
            logits_NV = drafter.below(depth, tokens_CL[level.chain_N, depth - 1])
        contexts = _contexts(rows, level, tokens_CL, depth)
        logits_NV = edit(logits_NV, contexts, tokens_CL[level.chain_N, :depth] if any(contexts) and depth else None)
        below_NV = law(logits_NV, of_law.select(level.laws), law_NV[level.laws])
        order_NV = _race_stable(rows, level, depth, below_NV, logits_NV)
        tokens_C = tokens_CL[:, depth]
        for draw in level.draws:
            weights_NV = order_NV if draw.method == MOST_LIKELY else below_NV
            weights_NV = weights_NV if draw.parent_N is None else weights_NV[draw.parent_N]
            draw.set_children(tokens_C, children(draw.method, weights_NV, draw.of_children(uniform_LC[depth])))
        if level.leader_C is not None:
            tokens_C.copy_(tokens_C[level.leader_C])
    return tokens_CL


def _contexts(rows: Sequence[Row], level: Level, tokens_CL: Tensor, depth: int) -> list[NodeContext | None]:
    """Where the laws below a level's parents are, for the rows that edit their logits."""
    if not any(row.text for row in rows):
        return []
    numbers: list[int] = level.row_N.tolist()
    paths: list[list[int]] = [[]] * len(numbers)
    if any(row.needs_path for row in rows):
        paths = tokens_CL[level.chain_N, :depth].tolist()
    contexts: list[NodeContext | None] = []
    for number, path in zip(numbers, paths, strict=True):
        text = rows[number].text
        contexts.append(None if text is None else NodeContext(rows[number].sampling, text, depth, tuple(path)))
    return contexts


def _race_stable(rows: Sequence[Row], level: Level, depth: int, law_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """For seed-stable rows: what orders their tokens instead of logits; their laws become the winner's, in place."""
    if not any(row.sampling.seed_stable for row in rows):
        return logits_NV
    numbers = [n for n, row in enumerate(level.row_N.tolist()) if rows[row].sampling.seed_stable]
    if not numbers:
        return logits_NV
    stable = [rows[row] for row in level.row_N[numbers]]
    index_M = to_device(np.array(numbers), law_NV.device)
    race_MV = race(law_NV[index_M], [row.sampling for row in stable], [row.end + depth for row in stable])
    law_NV[index_M] = winners_only(race_MV)
    order_NV = logits_NV.clone()
    order_NV[index_M] = race_MV.float()
    return order_NV


def _shifts(rows: Sequence[Row], layout: Layout, device: torch.device) -> TargetShifts | None:
    """The rows' pending target shifts, by chain."""
    most = max(len(row.shifts) for row in rows)
    if not most:
        return None
    remaining_RM, count_RM = np.zeros((len(rows), most), dtype=np.int64), np.ones((len(rows), most), dtype=np.int64)
    state_RM4 = np.zeros((len(rows), most, 4))
    for i, row in enumerate(rows):
        for j, shift in enumerate(row.shifts):
            remaining_RM[i, j], count_RM[i, j], state_RM4[i, j] = shift.remaining, shift.num_chains, shift.state
    index_C = layout.request_C
    parts = (to_device(array[index_C], device) for array in (remaining_RM, state_RM4, count_RM))
    return TargetShifts(*parts)
