"""Draw every row's chains, level by level, from the distributions of a drafter's logits.

Below the root the nodes are ordered level by level, and within a level in the order of their
chains. Equal tokens are not merged here: every drawn node has a separate place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafting.draft import ChainShape, Draft, Layout, Level, layout_of, trees_of
from engine.drafting.drafter import ChainSource, Drafter
from engine.drafting.numbers import drafting_numbers, draw_numbers
from engine.kernels.protocol import Chains, ProbsTable, TargetShifts
from engine.kernels.torch_kernels import Kernels
from engine.kernels.transfer import to_device, to_device_at_once
from engine.plan import Plan, Row
from engine.sampling.distribution import DistributionParameters
from engine.sampling.node_distributions import NodePaths, node_distributions
from engine.speculation.drafting import children
from engine.speculation.rule_facts import MOST_LIKELY


@torch.inference_mode()
def draw_chains(
    plan: Plan,
    drafter: ChainSource | None,
    vocab_size: int,
    device: torch.device,
    kernels: Kernels,
    most_unmerged: int = 0,
) -> Draft | None:
    """Draft the plan's chains; return None if no row emits.

    drafter: None if nothing is drawn; rows then have one chain of length
    0. most_unmerged: see `trees_of`.
    """
    rows = plan.sampling_rows
    if not rows:
        if drafter is not None:
            drafter.begin(plan)
        return None
    layout = layout_of(tuple(map(ChainShape.of, rows)), device)
    seed_C = np.array([row.sampling.seed for row in rows], dtype=np.int64)[layout.request_C]
    end_C = np.array([row.end for row in rows], dtype=np.int64)[layout.request_C]
    host_numbers = draw_numbers(kernels, seed_C, end_C, layout.rank_C, layout.max_length)
    numbers = to_device(host_numbers, device)
    uniform_LC = drafting_numbers(numbers, layout.max_length)
    parameters = DistributionParameters.of([row.sampling for row in rows], device, kernels)
    if drafter is None:
        tokens_CL, distributions = _nothing_drawn(layout, vocab_size, kernels)
    else:
        tokens_CL, distributions = drafter.draw(plan, layout, parameters, uniform_LC)
    chains = Chains(
        tokens_CL,
        layout.length,
        layout.request,
        distributions,
        layout.shape,
        layout.leads_CL,
        _shifts(rows, layout, device),
    )
    trees, tokens_M = trees_of(plan, layout, tokens_CL, most_unmerged)
    return Draft(layout, chains, trees, tokens_M, parameters, numbers)


def draw_by_level(
    drafter: Drafter, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
) -> tuple[Tensor, ProbsTable]:
    """Let a drafter catch up, and draw the plan's chains.

    Returns ([C, L] the tokens, the distributions that they were drawn from).
    """
    assert drafter.runner is not None
    root_NV = drafter.begin(plan)
    probs_NV = torch.empty((layout.num_probs, drafter.runner.vocab_size), device=uniform_LC.device)
    rows = plan.sampling_rows
    tokens_CL = draw_levels(rows, layout, parameters, uniform_LC, root_NV, drafter.below, probs_NV)
    return tokens_CL, ProbsTable(probs_NV, layout.probs_row_CL, parameters.kernels)


def _nothing_drawn(layout: Layout, vocab_size: int, kernels: Kernels) -> tuple[Tensor, ProbsTable]:
    """Return the tokens and distributions of chains of length 0."""
    device = layout.request.device
    tokens_CL = torch.zeros((layout.num_chains, 0), dtype=torch.int64, device=device)
    probs_NV = torch.empty((0, vocab_size), device=device)
    return tokens_CL, ProbsTable(probs_NV, layout.probs_row_CL, kernels)


def draw_levels(
    rows: Sequence[Row],
    layout: Layout,
    parameters: DistributionParameters,
    uniform_LC: Tensor,
    logits_NV: Tensor,
    below: Callable[[int, Tensor], Tensor] | None,
    probs_NV: Tensor,
) -> Tensor:
    """Draw all chains level by level; return [C, L] the tokens.

    rows: the sampling rows; may be empty if every distribution depends on logits and parameters
    alone. logits_NV: below the root of every row that draws; below: `Drafter.below`; probs_NV:
    output, the distributions from which the tokens were drawn.
    """
    size = (layout.num_chains, layout.max_length)
    tokens_CL = torch.zeros(size, dtype=torch.int64, device=uniform_LC.device)
    probs_parameters = parameters.select(layout.probs_row_of_N)
    for depth, level in enumerate(layout.levels):
        if depth > 0:
            assert below is not None
            # Tokens stay on the device.
            logits_NV = below(depth, tokens_CL[level.chain_N, depth - 1])
        nodes = _parents(level, tokens_CL, depth)
        level_parameters = probs_parameters.select(level.distributions)
        level_probs_NV = probs_NV[level.distributions]
        below_NV, order_NV = node_distributions(rows, nodes, logits_NV, level_parameters, level_probs_NV)
        tokens_C = tokens_CL[:, depth]
        for draw in level.draws:
            weights_NV = order_NV if draw.method == MOST_LIKELY else below_NV
            if draw.parent_N is not None:
                weights_NV = weights_NV[draw.parent_N]
            uniform_NK = draw.child_values(uniform_LC[depth])
            tokens_NK = children(parameters.kernels, draw.method, weights_NV, uniform_NK)
            draw.set_children(tokens_C, tokens_NK)
        if level.leader_C is not None:
            tokens_C.copy_(tokens_C[level.leader_C])
    return tokens_CL


def _parents(level: Level, tokens_CL: Tensor, depth: int) -> NodePaths:
    """Return the nodes below which the tokens of a level are drawn."""
    return NodePaths(
        row_N=level.row_N,
        depth_N=np.full(len(level.row_N), depth),
        paths=lambda: tokens_CL[level.chain_N, :depth].tolist(),
        path_ND=lambda: tokens_CL[level.chain_N, :depth] if depth else None,
    )


def _shifts(rows: Sequence[Row], layout: Layout, device: torch.device) -> TargetShifts | None:
    """Return the rows' pending target shifts, by chain."""
    most = max(len(row.shifts) for row in rows)
    if not most:
        return None
    remaining_RM = np.zeros((len(rows), most), dtype=np.int64)
    count_RM = np.ones((len(rows), most), dtype=np.int64)
    state_RM4 = np.zeros((len(rows), most, 4))
    for i, row in enumerate(rows):
        for j, shift in enumerate(row.shifts):
            remaining_RM[i, j] = shift.remaining
            count_RM[i, j] = shift.num_chains
            state_RM4[i, j] = shift.state
    by_chain = [array[layout.request_C] for array in (remaining_RM, state_RM4, count_RM)]
    return TargetShifts(*to_device_at_once(by_chain, device))
