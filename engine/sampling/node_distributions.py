"""Distributions at the nodes of a step, for the draft model and for the target.

Combines edits of the logits (`edits.py`), temperature and filters (`distribution.py`), and the race
of seed-stable rows (`stable.py`). Not for: which nodes there are (`engine.drafting.draft`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels.transfer import to_device
from engine.plan import Row
from engine.sampling.distribution import DistributionParameters, distribution
from engine.sampling.edits import NodeContext, edit
from engine.sampling.stable import race, winners_only

Ints = npt.NDArray[np.int64]


class NodePaths(NamedTuple):
    """Nodes that need distributions: after a row's text, or below tokens drafted for it."""

    row_N: Ints
    """Row of each node."""
    depth_N: Ints
    """Drafted tokens above each node."""
    paths: Callable[[], Sequence[Sequence[int]]]
    """These tokens on the host, if masks depend on them."""
    path_ND: Callable[[], Tensor | None]
    """The same on the logits' device, for penalties; None without any."""


def node_distributions(
    rows: Sequence[Row],
    nodes: NodePaths,
    logits_NV: Tensor,
    parameters: DistributionParameters,
    probs_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ([N, V] probabilities, [N, V] scores that order their tokens).

    Scores are edited logits, or the race of seed-stable rows. parameters: one entry per node.
    probs_NV: output tensor, if given.
    """
    contexts = _contexts(rows, nodes)
    if any(contexts):
        logits_NV = edit(logits_NV, contexts, nodes.path_ND())
    probs_NV = distribution(logits_NV, parameters, probs_NV)
    return probs_NV, _race_stable(rows, nodes, probs_NV, logits_NV)


def _contexts(rows: Sequence[Row], nodes: NodePaths) -> list[NodeContext | None]:
    """Return the inputs of each node's distribution besides its logits, for rows that edit them."""
    if not any(row.text for row in rows):
        return []
    numbers: list[int] = nodes.row_N.tolist()
    needed = any(row.needs_path for row in rows)
    paths = nodes.paths() if needed else [()] * len(numbers)
    contexts: list[NodeContext | None] = []
    for number, depth, path in zip(numbers, nodes.depth_N.tolist(), paths, strict=True):
        text = rows[number].text
        contexts.append(None if text is None else NodeContext(rows[number].sampling, text, depth, tuple(path)))
    return contexts


def _race_stable(rows: Sequence[Row], nodes: NodePaths, probs_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """Return the scores of all nodes; set seed-stable rows to 1 for the winner, in place."""
    if not any(row.sampling.seed_stable for row in rows):
        return logits_NV
    numbers = [n for n, row in enumerate(nodes.row_N.tolist()) if rows[row].sampling.seed_stable]
    if not numbers:
        return logits_NV
    stable = [rows[row] for row in nodes.row_N[numbers]]
    places = [row.end + depth for row, depth in zip(stable, nodes.depth_N[numbers].tolist(), strict=True)]
    index_M = to_device(np.array(numbers), probs_NV.device)
    race_MV = race(probs_NV[index_M], [row.sampling for row in stable], places)
    probs_NV[index_M] = winners_only(race_MV)
    order_NV = logits_NV.clone()
    order_NV[index_M] = race_MV.float()
    return order_NV
