"""The verdict in one compiled call (`Kernels.decide`), for races and greedy rows.

`step.verify` computes the same in separate operations, for any rows.
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
from engine.step.results import broken_rows
from engine.step.verify import emission_below, emitted, walk_numbers

_UNMET = DISTRIBUTION_NEEDS | LOSSY | RULE
"""Needs of rows that the call does not meet."""
_UNMET_AT_0 = _UNMET & ~RULE
"""Unmet needs at temperature 0, where every rule accepts the same tokens."""


def verify_at_once(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict | None:
    """Return what each sampling row emits; None if a plan needs `verify_chains`.

    It does if the call does not support a row, the numbers of the logits, or the kernels, or if the
    host does not have the drafted tokens. Engines on a CPU have kernels that decide, and tokens.
    """
    rows = plan.sampling_rows
    if draft is None or draft.tokens_M is not None or not takes(logits_NV):
        return None
    parameters = draft.parameters
    nodes = draft.nodes
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
    if row.sampling.is_greedy:
        return not row.needs & _UNMET_AT_0
    return not row.needs & _UNMET


def _text_nodes(rows: Sequence[Row], draft: Draft) -> TextNodes | None:
    """Return the nodes of text drafts among a step's nodes, or None."""
    if not any(row.text_drafts for row in rows):
        return None
    starts = draft.starts.tolist()
    nodes = TextNodes.none(starts[-1], len(rows))
    numbers_BL = np.zeros((len(rows), max(row.longest_chain for row in rows)))
    for number, row in enumerate(rows):
        if not row.text_drafts:
            continue
        tree = draft.trees[number]
        start = starts[number]
        for parent, children in edges_of(tree, row.first_text_draft).items():
            for child in children:
                nodes.parent_N[start + child] = parent
                nodes.token_N[start + child] = tree.tokens[child - 1]
        numbers_BL[number, : row.longest_chain] = walk_numbers(row)
    return replace(nodes, number_BL=numbers_BL)


def _with_text_drafts(
    rows: Sequence[Row], draft: Draft, emissions: Sequence[Emission], verdict: Sequence[Sequence[int]]
) -> list[Emission]:
    """Return the emissions with accepted text drafts; verdict: of `Kernels.decide`."""
    completed = []
    for row, tree, emission, *row_verdict in zip(rows, draft.trees, emissions, *verdict, strict=True):
        if not row.text_drafts:
            completed.append(emission)
            continue
        chain, accepted, token, node = row_verdict
        walk = walk_to(tree, row.first_text_draft, node)
        rank = int(draft.layout.rank_C[chain])
        path = tree.paths[rank]
        goes_on = path[: walk.depth + 1] == walk.path and len(path) > walk.depth + 1
        completed.append(emission_below(row, tree, walk, goes_on, rank, accepted, token))
    return completed
