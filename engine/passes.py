"""Between the plan and the models: what enters the target's pass, and which K/V stays after it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.tensors import KVMoves
from engine.drafters.draft import Draft
from engine.drafters.model import ModelDrafter
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput
from engine.plan import Plan
from engine.verifying import Winner


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


def moves_of(
    plan: Plan, draft: Draft | None, winners: Sequence[Winner], block_size: int
) -> tuple[list[KVMoves], list[KVMoves]]:
    """What makes the K/V of accepted paths contiguous, by row: in the target's storage, and in the draft model's."""
    target_moves: list[KVMoves] = []
    draft_moves: list[KVMoves] = []
    if draft is None:
        return target_moves, draft_moves
    for row, tree, winner in zip(plan.sampling_rows, draft.trees, winners, strict=True):

        def slot(index: int, blocks: Sequence[int] = row.block_ids) -> int:
            return blocks[index // block_size] * block_size + index % block_size

        path = tree.paths[winner.rank]
        of_target, of_draft = [], []
        for depth in range(1, len(winner.emission.accepted) + 1):
            to = row.end + depth - 1
            of_target.append((row.end + path[depth] - 1, to))
            if depth <= winner.emission.num_draft_kept:
                of_draft.append((ModelDrafter.node_index(row, winner.rank, depth), to))
        for moves, found in ((target_moves, of_target), (draft_moves, of_draft)):
            moves.append([(slot(source), slot(to)) for source, to in found if source != to])
    return target_moves, draft_moves
