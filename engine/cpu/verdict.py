"""The verdict of a step in one compiled call (`Kernels.decide`), for rows whose rule is a race or at temperature 0.

`step.verify` computes what it computes, in separate operations, for any rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from engine.cpu.kernels import takes
from engine.drafting.draft import Draft
from engine.kernels.protocol import TextNodes
from engine.needs import DISTRIBUTION_NEEDS, LOSSY, RULE
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.speculation.verification.text_drafts import edges_of, walk_to
from engine.step.report import broken_rows
from engine.step.verify import emission_below, emitted, walk_numbers

_UNMET = DISTRIBUTION_NEEDS | LOSSY | RULE
"""Needs that the call does not meet."""
_UNMET_AT_0 = _UNMET & ~RULE
"""The same at temperature 0, where every rule accepts the same tokens."""


def verify_at_once(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict | None:
    """Return what each sampling row emits; None for rows or logits that need `verify_chains`."""
    rows = plan.sampling_rows
    if draft is None or draft.tokens_M is not None or not takes(logits_NV):
        return None
    parameters, nodes = draft.parameters, draft.nodes
    if not parameters.kernels.decides or not all(map(_is_decided, rows)):
        return None
    texts = _text_nodes(rows, draft)
    verdict, largest_N = parameters.kernels.decide(
        logits_NV,
        parameters.temperature_N,
        parameters.filters,
        nodes.starts,
        draft.chains,
        nodes.node_CX,
        draft.numbers,
        texts,
    )
    emissions = emitted(rows, draft, *verdict[:3].tolist())
    if texts is not None:
        emissions = _with_text_drafts(rows, draft, emissions, verdict.tolist())
    return StepVerdict(tuple(emissions), broken=broken_rows(plan, draft, largest_N))


def _is_decided(row: Row) -> bool:
    """Whether the call can verify a row."""
    return not row.needs & (_UNMET_AT_0 if row.sampling.is_greedy else _UNMET)


def _text_nodes(rows: Sequence[Row], draft: Draft) -> TextNodes | None:
    """Return the nodes of text drafts among those of a step; None if there are none."""
    if not any(row.text_drafts for row in rows):
        return None
    starts = draft.starts.tolist()
    nodes = TextNodes.none(starts[-1], len(rows))
    numbers_BL = np.zeros((len(rows), max(row.longest_chain for row in rows)))
    for number, row in enumerate(rows):
        if not row.text_drafts:
            continue
        tree, start = draft.trees[number], starts[number]
        for parent, children in edges_of(tree, row.first_text_draft).items():
            for child in children:
                nodes.parent_N[start + child] = parent
                nodes.token_N[start + child] = tree.tokens[child - 1]
        numbers_BL[number, : row.longest_chain] = walk_numbers(row)
    return replace(nodes, number_BL=numbers_BL)


def _with_text_drafts(
    rows: Sequence[Row], draft: Draft, emissions: Sequence[Emission], verdict: Sequence[Sequence[int]]
) -> list[Emission]:
    """Return the emissions with what text drafts contributed; verdict: of `Kernels.decide`."""
    completed = []
    for row, tree, emission, *decided in zip(rows, draft.trees, emissions, *verdict, strict=True):
        if row.text_drafts:
            chain, accepted, token, node = decided
            walk = walk_to(tree, row.first_text_draft, node)
            rank = int(draft.layout.rank_C[chain])
            path = tree.paths[rank]
            goes_on = path[: walk.depth + 1] == walk.path and len(path) > walk.depth + 1
            emission = emission_below(row, tree, walk, goes_on, rank, accepted, token)
        completed.append(emission)
    return completed
