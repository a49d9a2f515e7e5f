"""Verification of a step: target distributions at all nodes, each request's rule, and emissions.

Tensors of all rows go to the rules of `speculation`, and come back as values for each row. Not for:
choosing what is verified (`scheduling`), or running the models.

Words: a *distribution* has the probabilities of all next tokens. *Chains* are drawn below a row's
last token, *text drafts* are found in texts. A *walk* is the accepted path through a row's text
drafts. Rules continue below the walk with the chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from engine.step.results import HostVerdict, broken_rows, largest_numbers, read_verdicts

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_BY_TILES = frozenset(rule.verify for rule in RULES.values() if rule.by_tiles)
"""Rules that on CUDA store a sum for each tile of the vocabulary, not [chains, vocabulary]."""


@dataclass(frozen=True)
class _RuleInputs:
    """Operands of the rules, and the accepted prefixes of text drafts, which come first."""

    chains: Chains
    target: ProbsTable
    noise: ChainNoise
    origin_C: Ints
    """Index of each chain of the rules in the draft's layout."""
    walks: Mapping[int, Walk]
    """Accepted path through a row's text drafts, by row."""
    goes_on_R: Bools
    """Whether a rule verifies sampled chains of the row below its walk."""


class _VerifiedPart(NamedTuple):
    """Rows that are verified together."""

    numbers: Sequence[int]
    chain_indices: Ints
    """Indices of the rows' chains in the inputs."""
    verdict: ChainVerdict


def verify_chains(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
    """Return the emission of each sampling row, by the rule that its request asks for.

    logits_NV: at all roots and nodes. Waits for the device once, to read the verdicts, and once
    more before that if there are text drafts. The rules `traversal` and `ot_lp` also wait for the
    device while they verify.
    """
    if draft is None:
        return StepVerdict(())
    draft, emissions, largest_N = _verify(plan.sampling_rows, draft, logits_NV)
    return StepVerdict(tuple(emissions), broken=broken_rows(plan, draft, largest_N))


def _verify(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> tuple[Draft, list[Emission], Floats]:
    """Return (the draft with its tokens, the rows' emissions, the largest numbers)."""
    target = target_distributions(rows, draft, logits_NV)
    largest = largest_numbers(draft, logits_NV)
    if not any(row.fanout or row.text_drafts for row in rows):
        tokens, largest_N = to_host([_next_tokens(target, draft.noise), largest])
        return draft, [Emission((), token, 0) for token in tokens.tolist()], largest_N
    inputs = _verify_text_drafts(rows, draft, target)
    parts = list(_verdicts(rows, draft, inputs))
    verdicts_on_device = [part.verdict for part in parts]
    draft, verdicts, largest_N = read_verdicts(draft, verdicts_on_device, largest)
    emission_by_row: dict[int, Emission] = {}
    for part, verdict in zip(parts, verdicts, strict=True):
        emissions = _emissions(rows, draft, inputs, verdict, part.chain_indices)
        emission_by_row.update(zip(part.numbers, emissions, strict=True))
    return draft, [emission_by_row[number] for number in range(len(rows))], largest_N


def walk_numbers(row: Row) -> Floats:
    """Return [L] the uniform numbers that decide about text drafts at each depth."""
    depths = np.arange(row.longest_chain)
    return uniform(row.sampling.seed, row.end, Purpose.TEXT_DRAFT, 0, depths)


def emitted(
    rows: Sequence[Row],
    draft: Draft,
    chains: list[int],
    accepted: list[int],
    next_tokens: list[int],
) -> list[Emission]:
    """Return the emissions of a verdict about all chains that were drawn.

    By row: chains: index of the chosen chain in the layout; accepted: number of its accepted
    tokens; next_tokens: the token after the accepted ones.
    """
    ranks = draft.layout.rank_C[chains].tolist()
    decided = zip(rows, draft.trees, ranks, accepted, next_tokens, strict=True)
    return [
        _emission(row, tree, rank, count, token, min(count, _most_draft_kept(row)))
        for row, tree, rank, count, token in decided
    ]


def _next_tokens(target: ProbsTable, noise: ChainNoise) -> Tensor:
    """Return the next token [C] of rows without drafts."""
    return target.kernels.draw(target.probs_NV, target.row_CX[:, 0], noise.residual_C)


def _verdicts(rows: Sequence[Row], draft: Draft, inputs: _RuleInputs) -> Iterator[_VerifiedPart]:
    """Apply every rule to the rows that ask for it."""
    probs_NV = inputs.target.probs_NV
    request_C = draft.layout.request_C[inputs.origin_C]
    by_tiles = inputs.target.kernels.by_tiles
    rules = list(verified_together(rows, inputs.goes_on_R, probs_NV.shape[1], by_tiles))
    if len(rules) == 1:
        verify, numbers = rules[0]
        verdict = verify(inputs.chains, inputs.target, inputs.noise)
        yield _VerifiedPart(numbers, np.arange(len(request_C)), verdict)
        return
    for verify, numbers in rules:
        chain_indices = np.flatnonzero(np.isin(request_C, numbers))
        index = to_device(chain_indices, probs_NV.device)
        most_chains = int(np.bincount(request_C[chain_indices]).max())
        chains = inputs.chains.select(index, (len(numbers), most_chains))
        verdict = verify(chains, inputs.target.select(index), inputs.noise.select(index))
        yield _VerifiedPart(numbers, chain_indices, verdict)


def verified_together(
    rows: Sequence[Row],
    goes_on_R: Bools,
    vocab_size: int,
    by_tiles: bool,
    most_bytes: int = 64 << 20,
    chain_bytes: int = 32,
) -> Iterator[tuple[Verify, list[int]]]:
    """Yield (rule, row numbers) of rows that share a rule and fit into its memory together.

    goes_on_R: whether chains of the row are still verified. by_tiles: whether the kernels store one
    sum for each tile of the vocabulary, if a rule allows it. most_bytes: working memory of a
    verification, exceeded only by a row alone. chain_bytes: approximate memory of a rule for each
    chain and token of the vocabulary.
    """
    numbers_by_rule: dict[Verify, list[int]] = {}
    for number, row in enumerate(rows):
        rule = _rule_of(row, bool(goes_on_R[number]))
        numbers_by_rule.setdefault(rule, []).append(number)
    for verify, numbers in numbers_by_rule.items():
        token_bytes = 1 if by_tiles and verify in _BY_TILES else chain_bytes
        part: list[int] = []
        part_bytes = 0
        for number in numbers:
            row_bytes = max(1, rows[number].num_drafts) * vocab_size * token_bytes
            if part and part_bytes + row_bytes > most_bytes:
                yield verify, part
                part = []
                part_bytes = 0
            part.append(number)
            part_bytes += row_bytes
        yield verify, part


def _rule_of(row: Row, goes_on: bool) -> Verify:
    """Return the rule that verifies the row's sampled chains.

    If no chain is left, any rule is right. The race is usual, so its rows share a verification.
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
    """Return the distribution of every node, and the node below every prefix of each chain."""
    table = draft.nodes
    nodes = NodePaths(
        row_N=table.rows,
        depth_N=table.depths,
        paths=lambda: _paths(draft),
        path_ND=lambda: _tokens_above(rows, draft, logits_NV.device),
    )
    parameters = draft.parameters.select(table.row)
    probs_NV, _ = node_distributions(rows, nodes, logits_NV, parameters)
    return ProbsTable(probs_NV, table.node_CX, draft.parameters.kernels)


def _paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the drafted tokens above every node; the trees have their tokens."""
    paths: list[tuple[int, ...]] = []
    for tree in draft.trees:
        tree_paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            tree_paths.append((*tree_paths[parent], token))
        paths += tree_paths
    return paths


def _tokens_above(rows: Sequence[Row], draft: Draft, device: torch.device) -> Tensor | None:
    """Return the drafted tokens above every node [N, D]; None if no penalty counts them."""
    deepest = max(max(tree.depths, default=0) for tree in draft.trees)
    if deepest == 0 or not any(row.sampling.has_penalties for row in rows):
        return None
    above_ND = np.zeros((draft.starts[-1], deepest), dtype=np.int64)
    first = 0
    for tree, start in zip(draft.trees, draft.starts[:-1].tolist(), strict=True):
        parents_and_depths = zip(tree.parents, tree.depths, strict=True)
        for node, (parent, depth) in enumerate(parents_and_depths, start=1):
            above_ND[start + node] = above_ND[start + parent]
            above_ND[start + node, depth - 1] = first + node - 1
        first += tree.num_nodes
    tokens_M = draft.tokens_M
    if tokens_M is None:
        tokens = [token for tree in draft.trees for token in tree.tokens]
        tokens_M = to_device(np.array(tokens, np.int64), device)
    return tokens_M[to_device(above_ND, device)]


def _verify_text_drafts(rows: Sequence[Row], draft: Draft, target: ProbsTable) -> _RuleInputs:
    """Verify the text drafts; the rules continue below the walks.

    Trees with text drafts are always merged, so a drawn chain with the tokens of a walk contains
    the nodes of the walk.
    """
    layout = draft.layout
    noise = draft.noise
    goes_on_R = np.array([bool(row.fanout) for row in rows])
    if not any(row.text_drafts for row in rows):
        origin_C = np.arange(layout.num_chains)
        return _RuleInputs(draft.chains, target, noise, origin_C, {}, goes_on_R)
    starts = draft.starts.tolist()
    walks = _walks(rows, draft, target.probs_NV)
    stops = {number: starts[number] + walked.path[-1] for number, walked in walks.items()}
    refused = [walked.refused for walked in walks.values()]
    refuse(target.probs_NV, list(stops.values()), refused)
    offset_C = np.zeros(layout.num_chains, dtype=np.int64)
    goes_on_C = goes_on_R[layout.request_C]
    root_C = draft.starts[layout.request_C]
    for number, walked in walks.items():
        drawn = draft.trees[number].paths[: rows[number].first_text_draft]
        num_walked = walked.depth + 1  # with the root
        # A drawn chain is verified further if it has the walk's nodes and more.
        goes_on = [path[:num_walked] == walked.path and len(path) > num_walked for path in drawn]
        row_chains = np.flatnonzero(layout.request_C == number)
        goes_on_C[row_chains] = goes_on
        offset_C[row_chains] = walked.depth
        root_C[row_chains] = stops[number]
        goes_on_R[number] = any(goes_on)
    rest = below(draft.chains, target, noise, layout.request_C, offset_C, goes_on_C, root_C)
    return _RuleInputs(rest.chains, rest.target, rest.noise, rest.origin_C, walks, goes_on_R)


def _walks(rows: Sequence[Row], draft: Draft, probs_NV: Tensor) -> dict[int, Walk]:
    """Return the accepted path of each row with text drafts, by row number."""
    starts = draft.starts.tolist()
    numbers = [number for number, row in enumerate(rows) if row.text_drafts]
    nodes_by_row: dict[int, list[int]] = {}
    parents: list[int] = []
    tokens: list[int] = []
    for number in numbers:
        tree = draft.trees[number]
        text_paths = tree.paths[rows[number].first_text_draft :]
        nodes = sorted({node for path in text_paths for node in path[1:]})
        nodes_by_row[number] = nodes
        parents += [starts[number] + tree.parents[node - 1] for node in nodes]
        tokens += [tree.tokens[node - 1] for node in nodes]
    indices = [np.array(parents, np.int64), np.array(tokens, np.int64)]
    parent_M, token_M = to_device_at_once(indices, probs_NV.device)
    probabilities = iter(probs_NV[parent_M, token_M].tolist())
    walks = {}
    for number in numbers:
        row = rows[number]
        probability = {node: next(probabilities) for node in nodes_by_row[number]}
        numbers_L = walk_numbers(row).tolist()
        walks[number] = walk(draft.trees[number], row.first_text_draft, probability, numbers_L)
    return walks


def _emissions(
    rows: Sequence[Row], draft: Draft, inputs: _RuleInputs, verdict: HostVerdict, chain_indices: Ints
) -> Iterator[Emission]:
    """Yield the emissions of a rule's verdict, after the tokens of text drafts.

    chain_indices: see `_VerifiedPart`.
    """
    chain_B = inputs.origin_C[chain_indices[verdict.chains]]
    numbers = draft.layout.request_C[chain_B].tolist()
    ranks = draft.layout.rank_C[chain_B].tolist()
    for index, (number, rank) in enumerate(zip(numbers, ranks, strict=True)):
        row = rows[number]
        tree = draft.trees[number]
        accepted = verdict.accepted[index]
        next_token = verdict.next_tokens[index]
        walked = inputs.walks.get(number)
        if walked is None:
            num_draft_kept = min(accepted, _most_draft_kept(row))
            emission = _emission(row, tree, rank, accepted, next_token, num_draft_kept)
        else:
            accepted += walked.depth
            goes_on = bool(inputs.goes_on_R[number])
            emission = emission_below(row, tree, walked, goes_on, rank, accepted, next_token)
        shifts = verdict.shifts[index]
        yield msgspec.structs.replace(emission, shifts=shifts, bias=verdict.bias[index])


def _most_draft_kept(row: Row) -> int:
    """Return the largest number of accepted tokens with draft K/V.

    The draft model never ran on the last token of a chain.
    """
    return max(0, row.draft_length - 1)


def emission_below(
    row: Row,
    tree: Tree,
    walked: Walk,
    goes_on: bool,
    rank: int,
    accepted: int,
    next_token: int,
) -> Emission:
    """Return the emission of a row with text drafts.

    walked: the accepted part of the text drafts. goes_on: whether a chain of this rank was verified
    below the walk. accepted: number of all accepted tokens.
    """
    num_draft_kept = 0
    if goes_on:
        num_draft_kept = min(accepted, _most_draft_kept(row))
    else:
        rank = walked.rank
    emission = _emission(row, tree, rank, accepted, next_token, num_draft_kept)
    counts = _count_text_drafts(row, tree, walked)
    return msgspec.structs.replace(emission, text_draft_counts=counts)


def _emission(row: Row, tree: Tree, rank: int, accepted: int, next_token: int, num_draft_kept: int) -> Emission:
    """Return the emission of an accepted prefix of a chain, and the token after it."""
    if not tree.parents:
        return Emission((), next_token, 0)
    accepted_tokens: tuple[int, ...] = ()
    if accepted:
        accepted_tokens = tree.tokens_of(tree.paths[rank][: accepted + 1])
    reported_paths = tree.paths if row.reports_drafts else ()
    # A row that draws nothing has an empty chain before its text drafts.
    chains = tuple(filter(None, map(tree.tokens_of, reported_paths)))
    return Emission(
        accepted=accepted_tokens,
        next_token=next_token,
        num_nodes=tree.num_nodes,
        num_draft_kept=num_draft_kept,
        chains=chains,
        rank=rank,
    )


def _count_text_drafts(row: Row, tree: Tree, walked: Walk) -> tuple[DrafterCount, ...]:
    """Count the nodes and accepted tokens of each text draft.

    A node counts for the first text draft through it, even if a drawn chain has it, too.
    """
    counted = {0}
    credited = {0}
    counts = []
    text_paths = tree.paths[row.first_text_draft :]
    for text_draft, path in zip(row.text_drafts, text_paths, strict=True):
        accepted = set(path) & set(walked.path) - credited
        num_nodes = len(set(path) - counted)
        counts.append(DrafterCount(text_draft.source, 1, num_nodes, len(accepted)))
        counted.update(path)
        credited |= accepted
    return tuple(counts)
