"""Verification of a step: the target's distributions at all nodes, each request's rule, and what every row emits.

Tensors of all rows go to the rules of `speculation`, and come back as values for each row. Not for: choosing what is
verified (`scheduling`), or running the models.

Words: a *distribution* has the probabilities of all next tokens. *Chains* are drawn below a row's last token, *text
drafts* are found in texts. A *walk* is the accepted path through a row's text drafts. Rules continue below it with the
chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.drafting.draft import Draft
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.transfer import to_device, to_device_at_once, to_host
from engine.noise import Purpose, uniform
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.request import DrafterCount
from engine.sampling.node_distributions import NodePaths, node_distributions
from engine.speculation.topology import Tree
from engine.speculation.verification import RULES, OverAcceptance, Verify
from engine.speculation.verification.chain_rules import verify_certain, verify_race
from engine.speculation.verification.text_drafts import Walk, below, refuse, walk
from engine.step.report import HostVerdict, broken_rows, largest_numbers, read_verdicts

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_BY_TILES = frozenset(rule.verify for rule in RULES.values() if rule.by_tiles)
"""Rules that on CUDA store a sum for each tile of the vocabulary, instead of arrays [chains, vocabulary]."""


@dataclass(frozen=True)
class _Task:
    """Operands of the rules, and the accepted prefixes of text drafts, which are verified first."""

    chains: Chains
    target: ProbsTable
    noise: ChainNoise
    origin_C: Ints
    """Index, in the draft's layout, of each chain that the rules see."""
    walks: Mapping[int, Walk]
    """Accepted path through the text drafts of each row, by its number."""
    goes_on_R: Bools
    """Whether a rule still verifies sampled chains of the row, below the accepted tokens of text drafts."""


def verify_chains(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
    """Return what each sampling row emits, by the rule that its request asks for. logits_NV: at all roots and nodes.

    Waits for the device once, to read the verdicts. It waits once more before that if there are text drafts. The rules
    `traversal` and `ot_lp` also wait for the device while they verify.
    """
    if draft is None:
        return StepVerdict(())
    draft, emissions, largest_N = _verify(plan.sampling_rows, draft, logits_NV)
    return StepVerdict(tuple(emissions), broken=broken_rows(plan, draft, largest_N))


def _verify(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> tuple[Draft, list[Emission], Floats]:
    target = target_distributions(rows, draft, logits_NV)
    largest = largest_numbers(draft, logits_NV)
    if not any(row.fanout or row.text_drafts for row in rows):
        tokens, largest_N = to_host([_next_tokens(target, draft.noise), largest])
        return draft, [Emission((), token, 0) for token in tokens.tolist()], largest_N
    task = _verify_text_drafts(rows, draft, target)
    parts = list(_verdicts(rows, draft, task))
    draft, verdicts, largest_N = read_verdicts(draft, [verdict for *_, verdict in parts], largest)
    found = [
        one
        for (numbers, chosen, _), verdict in zip(parts, verdicts, strict=True)
        for one in zip(numbers, _emissions(rows, draft, task, verdict, chosen), strict=True)
    ]
    return draft, [emission for _, emission in sorted(found, key=itemgetter(0))], largest_N


def walk_numbers(row: Row) -> Floats:
    """Return [L] the uniform numbers that decide about text drafts at each depth."""
    return uniform(row.sampling.seed, row.end, Purpose.TEXT_DRAFT, 0, np.arange(row.longest_chain))


def emitted(
    rows: Sequence[Row], draft: Draft, chains: list[int], accepted: list[int], next_tokens: list[int]
) -> list[Emission]:
    """Return the emissions of a verdict about all chains that were drawn.

    By row: chains: index of the chosen chain in the layout; accepted: number of its tokens; next_tokens: the token
    after them.
    """
    ranks = draft.layout.rank_C[chains].tolist()
    found = zip(rows, draft.trees, ranks, accepted, next_tokens, strict=True)
    return [
        _emission(row, tree, rank, count, token, min(count, _most_kept(row))) for row, tree, rank, count, token in found
    ]


def _next_tokens(target: ProbsTable, noise: ChainNoise) -> Tensor:
    """Return the next token [C] of rows without drafts."""
    return target.kernels.draw(target.probs_NV, target.row_CX[:, 0], noise.residual_C)


def _verdicts(rows: Sequence[Row], draft: Draft, task: _Task) -> Iterator[tuple[Sequence[int], Ints, ChainVerdict]]:
    """Apply every rule to the rows that ask for it; yield (their numbers, indices of their chains in the task, the
    verdict).
    """
    probs_NV, request_C = task.target.probs_NV, draft.layout.request_C[task.origin_C]
    parts = list(verified_together(rows, task.goes_on_R, probs_NV.shape[1], task.target.kernels.by_tiles))
    for verify, numbers in parts:
        if len(parts) == 1:
            yield numbers, np.arange(len(request_C)), verify(task.chains, task.target, task.noise)
            return
        chosen = np.flatnonzero(np.isin(request_C, numbers))
        index = to_device(chosen, probs_NV.device)
        shape = len(numbers), int(np.bincount(request_C[chosen]).max())
        verdict = verify(task.chains.select(index, shape), task.target.select(index), task.noise.select(index))
        yield numbers, chosen, verdict


def verified_together(
    rows: Sequence[Row],
    goes_on_R: Bools,
    vocab_size: int,
    by_tiles: bool,
    most_bytes: int = 64 << 20,
    chain_bytes: int = 32,
) -> Iterator[tuple[Verify, list[int]]]:
    """Yield (rule, row numbers) of rows that are verified together: they share a rule, and fit into its memory.

    goes_on_R: whether chains of the row are still verified. by_tiles: whether the kernels store one sum for each tile
    of the vocabulary, where a rule allows it. most_bytes: working memory of a verification; one row is always taken.
    chain_bytes: what a rule needs of it for each chain and token of the vocabulary, about.
    """
    by_rule: dict[Verify, list[int]] = {}
    for number, row in enumerate(rows):
        by_rule.setdefault(_rule_of(row, bool(goes_on_R[number])), []).append(number)
    for verify, numbers in by_rule.items():
        part: list[int] = []
        size = 0
        token_bytes = 1 if by_tiles and verify in _BY_TILES else chain_bytes
        for number in numbers:
            chains_bytes = max(1, rows[number].num_drafts) * vocab_size * token_bytes
            if part and size + chains_bytes > most_bytes:
                yield verify, part
                part, size = [], 0
            part.append(number)
            size += chains_bytes
        yield verify, part


def _rule_of(row: Row, goes_on: bool) -> Verify:
    """Return the rule that verifies the row's sampled chains.

    If no chain is left, any rule is right. The race is usual, and rules that are alike share a verification.
    """
    speculation = row.speculation
    if not goes_on:
        return verify_race
    if speculation.over_acceptance > 0:
        return OverAcceptance(speculation.over_acceptance, speculation.over_acceptance_residual)
    if row.sampling.is_certain:
        return verify_certain
    return RULES[speculation.rule].verify


def target_distributions(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> ProbsTable:
    """Return the distribution of every node, and which node lies below the first i tokens of each chain."""
    device, table = logits_NV.device, draft.nodes
    nodes = NodePaths(
        row_N=table.rows,
        depth_N=table.depths,
        paths=lambda: _paths(draft),
        path_ND=lambda: _tokens_above(rows, draft, device),
    )
    probs_NV, _ = node_distributions(rows, nodes, logits_NV, draft.parameters.select(table.row))
    return ProbsTable(probs_NV, table.node_CX, draft.parameters.kernels)


def _paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the drafted tokens above every node; the trees have their tokens."""
    paths: list[tuple[int, ...]] = []
    for tree in draft.trees:
        of_tree: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            of_tree.append((*of_tree[parent], token))
        paths += of_tree
    return paths


def _tokens_above(rows: Sequence[Row], draft: Draft, device: torch.device) -> Tensor | None:
    """Return the drafted tokens above every node [N, D]; None if no penalty counts them."""
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


def _verify_text_drafts(rows: Sequence[Row], draft: Draft, target: ProbsTable) -> _Task:
    """Verify the text drafts; the rules continue where the walks stop.

    Trees with text drafts are always merged, so a drawn chain with the tokens of a walk has its nodes, too.
    """
    layout, noise = draft.layout, draft.noise
    goes_on_R = np.array([bool(row.fanout) for row in rows])
    if not any(row.text_drafts for row in rows):
        return _Task(draft.chains, target, noise, np.arange(layout.num_chains), {}, goes_on_R)
    starts = draft.starts.tolist()
    offset_C, lives_C = np.zeros(layout.num_chains, dtype=np.int64), goes_on_R[layout.request_C]
    root_C = draft.starts[layout.request_C]
    walks = _walks(rows, draft, target.probs_NV, starts)
    stops = [starts[number] + taken.path[-1] for number, taken in walks.items()]
    refuse(target.probs_NV, stops, [taken.refused for taken in walks.values()])
    for (number, taken), stop in zip(walks.items(), stops, strict=True):
        drawn = draft.trees[number].paths[: rows[number].first_text_draft]
        alive = [path[: taken.depth + 1] == taken.path and len(path) > taken.depth + 1 for path in drawn]
        mine = np.flatnonzero(layout.request_C == number)
        lives_C[mine], offset_C[mine], root_C[mine] = alive, taken.depth, stop
        goes_on_R[number] = any(alive)
    rest = below(draft.chains, target, noise, layout.request_C, offset_C, lives_C, root_C)
    return _Task(rest.chains, rest.target, rest.noise, rest.origin_C, walks, goes_on_R)


def _walks(rows: Sequence[Row], draft: Draft, probs_NV: Tensor, starts: Sequence[int]) -> dict[int, Walk]:
    """Return the accepted path of each row with text drafts, by row number."""
    numbers = [number for number, row in enumerate(rows) if row.text_drafts]
    nodes = {
        number: sorted(
            {node for path in draft.trees[number].paths[rows[number].first_text_draft :] for node in path[1:]}
        )
        for number in numbers
    }
    above = [starts[number] + draft.trees[number].parents[node - 1] for number in numbers for node in nodes[number]]
    tokens = [draft.trees[number].tokens[node - 1] for number in numbers for node in nodes[number]]
    row_M, token_M = to_device_at_once([np.array(one, np.int64) for one in (above, tokens)], probs_NV.device)
    found = iter(probs_NV[row_M, token_M].tolist())
    walks = {}
    for number in numbers:
        row = rows[number]
        probability = {node: next(found) for node in nodes[number]}
        walks[number] = walk(draft.trees[number], row.first_text_draft, probability, walk_numbers(row).tolist())
    return walks


def _emissions(
    rows: Sequence[Row], draft: Draft, task: _Task, verdict: HostVerdict, chosen: Ints
) -> Iterator[Emission]:
    """Yield the emissions of a rule's verdict, after the tokens of text drafts. chosen: chains that the rule saw."""
    chain_B = task.origin_C[chosen[verdict.chains]]
    numbers, ranks = draft.layout.request_C[chain_B].tolist(), draft.layout.rank_C[chain_B].tolist()
    found = zip(numbers, ranks, verdict.accepted, verdict.next_tokens, verdict.shifts, verdict.bias, strict=True)
    for number, rank, accepted, next_token, shifts, bias in found:
        row, tree, followed = rows[number], draft.trees[number], task.walks.get(number)
        if followed is None:
            emission = _emission(row, tree, rank, accepted, next_token, min(accepted, _most_kept(row)))
        else:
            accepted += followed.depth
            emission = emission_below(row, tree, followed, bool(task.goes_on_R[number]), rank, accepted, next_token)
        yield msgspec.structs.replace(emission, shifts=shifts, bias=bias)


def _most_kept(row: Row) -> int:
    """Return the most accepted tokens with draft K/V: the draft model never ran on the last token of a chain."""
    return max(0, row.draft_length - 1)


def emission_below(
    row: Row, tree: Tree, followed: Walk, goes_on: bool, rank: int, accepted: int, next_token: int
) -> Emission:
    """Return the emission of a row with text drafts.

    followed: their accepted part. goes_on: whether a chain of this rank was verified below it. accepted: number of all
    accepted tokens.
    """
    most_kept = _most_kept(row) if goes_on else 0
    emission = _emission(row, tree, rank if goes_on else followed.rank, accepted, next_token, min(accepted, most_kept))
    return msgspec.structs.replace(emission, text_draft_counts=_count_text_drafts(row, tree, followed))


def _emission(row: Row, tree: Tree, rank: int, accepted: int, next_token: int, num_draft_kept: int) -> Emission:
    """Return the emission of an accepted prefix of one of the row's chains, and the token after it."""
    if not tree.parents:
        return Emission((), next_token, 0)
    chains = map(tree.tokens_of, tree.paths if row.reports_drafts else ())
    return Emission(
        accepted=tree.tokens_of(tree.paths[rank][: accepted + 1]) if accepted else (),
        next_token=next_token,
        num_nodes=tree.num_nodes,
        num_draft_kept=num_draft_kept,
        chains=tuple(filter(None, chains)),  # a row that draws nothing has an empty chain before its text drafts
        rank=rank,
    )


def _count_text_drafts(row: Row, tree: Tree, followed: Walk) -> tuple[DrafterCount, ...]:
    """Count what each text draft contributed. A node counts for the first of them through it, not for the model."""
    seen, credited = {0}, {0}
    counts = []
    for text_draft, path in zip(row.text_drafts, tree.paths[row.first_text_draft :], strict=True):
        accepted = set(path) & set(followed.path) - credited
        counts.append(DrafterCount(text_draft.source, 1, len(set(path) - seen), len(accepted)))
        seen.update(path)
        credited |= accepted
    return tuple(counts)
