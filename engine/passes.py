"""Between the plan and the models: what enters the target's pass, and which K/V stays after it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.tensors import KVMoves, slot_moves
from engine.drafters.draft import Draft
from engine.drafters.drafter import KeptPath
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput
from engine.plan import Plan, Winner


def target_inputs(plan: Plan, draft: Draft | None) -> list[SequenceInput]:
    """The target's pass: logits at the root and the nodes of every sampling row, and at prompt tokens if asked for."""
    trees = iter(draft.trees if draft is not None else ())
    parts = []
    for row in plan.rows:
        nodes, wanted = NO_NODES, slice(0, 0)
        if row.emits:
            tree = next(trees)
            if tree.num_nodes:
                nodes = Nodes(tree.tokens, tree.depths, (), tree.ancestry())
            wanted = slice(len(row.input_ids) - 1, None)
        if row.prompt_next:
            wanted = slice(0, None)
        parts.append(SequenceInput(row.input_ids, row.first_index, row.block_ids, nodes, wanted))
    return parts


def target_moves(plan: Plan, draft: Draft | None, winners: Sequence[Winner], block_size: int) -> list[KVMoves]:
    """What makes the target's K/V of accepted paths contiguous, by row."""
    if draft is None:
        return []
    moves = []
    for row, tree, winner in zip(plan.sampling_rows, draft.trees, winners, strict=True):
        path = tree.paths[winner.rank][1 : len(winner.emission.accepted) + 1]
        pairs = [(row.end + node - 1, row.end + depth) for depth, node in enumerate(path)]
        moves.append(slot_moves(pairs, row.block_ids, block_size))
    return moves


def kept_paths(winners: Sequence[Winner]) -> list[KeptPath]:
    """What the drafter may keep, by sampling row."""
    return [KeptPath(winner.rank, winner.emission.num_draft_kept) for winner in winners]
