"""The target's laws at the roots and nodes of a step, as the requests sample from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafting.draft import Draft
from engine.kernels.protocol import LawTable
from engine.kernels.transfer import to_device
from engine.plan import Row
from engine.sampling.node_laws import NodePaths, node_laws


def target_laws(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> LawTable:
    """The law of every node, and which node lies below the first i tokens of each chain."""
    device, table = logits_NV.device, draft.nodes
    nodes = NodePaths(
        row_N=table.rows,
        depth_N=table.depths,
        paths=lambda: _paths(draft),
        path_ND=lambda: _tokens_above(rows, draft, device),
    )
    law_NV, _ = node_laws(rows, nodes, logits_NV, draft.parameters.select(table.row))
    return LawTable(law_NV, table.node_CX, draft.parameters.kernels)


def _paths(draft: Draft) -> list[tuple[int, ...]]:
    """The drafted tokens above every node; the trees have their tokens."""
    paths: list[tuple[int, ...]] = []
    for tree in draft.trees:
        of_tree: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            of_tree.append((*of_tree[parent], token))
        paths += of_tree
    return paths


def _tokens_above(rows: Sequence[Row], draft: Draft, device: torch.device) -> Tensor | None:
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
