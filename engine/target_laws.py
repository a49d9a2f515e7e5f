"""The target's laws at the roots and nodes of a step, as the requests sample from them.

Each node's law depends on its own path: penalties, masks and grammars see the drafted tokens above it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafters.draft import Draft
from engine.plan import Row
from engine.request import Sampling
from engine.sampling.edits import NodeContext, edit
from engine.sampling.law import law
from engine.sampling.stable import race, winners_only
from engine.speculation.drafting import LawTable
from engine.transfer import to_device


def target_laws(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> LawTable:
    """The law of every node, and which node lies below the first i tokens of each chain."""
    layout, device = draft.layout, logits_NV.device
    node_CX = draft.starts[layout.request_C][:, None].repeat(layout.max_length + 1, axis=1)
    if layout.max_length:
        chain = 0
        for row, tree in zip(rows, draft.trees, strict=True):
            for path in tree.paths[: row.first_copy]:
                node_CX[chain, : len(path)] += path
                chain += 1
    row_N = to_device(np.repeat(np.arange(len(rows)), np.diff(draft.starts)), device)
    edited_NV = edit(logits_NV, _contexts(rows, draft), _paths(rows, draft, device))
    law_NV = law(edited_NV, draft.parameters.select(row_N))
    _race_stable(rows, draft, law_NV)
    return LawTable(law_NV, to_device(node_CX, device))


def _race_stable(rows: Sequence[Row], draft: Draft, law_NV: Tensor) -> None:
    """Seed-stable rows: their laws become the winner's, in place."""
    samplings: list[Sampling] = []
    indices: list[int] = []
    nodes: list[int] = []
    for row, tree, start in zip(rows, draft.trees, draft.starts[:-1].tolist(), strict=True):
        if row.sampling.seed_stable:
            samplings += [row.sampling] * (1 + tree.num_nodes)
            indices += [row.end + depth for depth in (0, *tree.depths)]
            nodes += range(start, start + 1 + tree.num_nodes)
    if nodes:
        node_M = to_device(np.array(nodes), law_NV.device)
        law_NV[node_M] = winners_only(race(law_NV[node_M], samplings, indices))


def _contexts(rows: Sequence[Row], draft: Draft) -> list[NodeContext | None]:
    """Where the law of every node is, for the rows that edit their logits."""
    if not any(row.text for row in rows):
        return []
    contexts: list[NodeContext | None] = []
    for row, tree in zip(rows, draft.trees, strict=True):
        paths: list[tuple[int, ...]] = [()] * (1 + tree.num_nodes)
        if row.needs_path:
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
                paths[node] = (*paths[parent], token)
        contexts += [
            None if row.text is None else NodeContext(row.sampling, row.text, depth, path)
            for depth, path in zip((0, *tree.depths), paths, strict=True)
        ]
    return contexts


def _paths(rows: Sequence[Row], draft: Draft, device: torch.device) -> Tensor | None:
    """[N, D] the drafted tokens above every node, where penalties count them."""
    deepest = max(max(tree.depths, default=0) for tree in draft.trees)
    if deepest == 0 or not any(row.sampling.has_penalties for row in rows):
        return None
    above_ND = np.zeros((draft.starts[-1], deepest), dtype=np.int64)
    first = 0
    for tree, start in zip(draft.trees, draft.starts[:-1].tolist(), strict=True):
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True), start=1):
            above_ND[start + node] = above_ND[start + parent]
            above_ND[start + node, depth - 1] = first + node - 1
        first += tree.num_nodes
    tokens_M = draft.tokens_M
    if tokens_M is None:
        tokens_M = to_device(np.array([token for tree in draft.trees for token in tree.tokens], np.int64), device)
    return tokens_M[to_device(above_ND, device)]
