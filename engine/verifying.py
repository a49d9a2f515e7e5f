"""Verification of a step: target laws, noise, each request's rule, and what it gave.

Between the parts: tensors of all rows go to the rules of `speculation`, and come back as values per row.
Not for: deciding what is verified (`scheduling`), or the models (`execution`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.drafters.draft import Draft
from engine.drafters.model import method_of
from engine.plan import Emission, Plan, Row, TargetLayer, Verdict
from engine.request import TokenLogprob
from engine.sampling.edits import Place, edit
from engine.sampling.law import LawParameters, law
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import Purpose, uniform
from engine.speculation.drafting import ChainNoise, LawTable
from engine.speculation.gap import acceptance_gap
from engine.speculation.layers import apply_layers
from engine.speculation.verification import RULES, ChainVerdict, OverAcceptance, Verify

# Working memory of a verification, and about what a rule needs of it per chain and token of the vocabulary.
_VERIFY_BYTES = 64 << 20
_CHAIN_BYTES = 32


@dataclass(frozen=True)
class Winner:
    """The chain (by rank within its request) that a row follows, and what the row emits."""

    rank: int
    emission: Emission


def verify_chains(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> list[Winner]:
    """What each sampling row emits, by the rule it asked for."""
    if draft is None:
        return []
    rows = plan.sampling_rows
    target = _target_laws(rows, draft, logits_NV)
    noise = _noise(draft, logits_NV.device)
    winners: list[Winner | None] = [None] * len(rows)
    parts = list(_parts(rows, logits_NV.shape[1]))
    for verify, numbers in parts:
        if len(parts) == 1:
            verdict = verify(draft.chains, target, noise)
            chosen = np.arange(draft.layout.num_chains)
        else:
            chosen = np.flatnonzero(np.isin(draft.layout.request_C, numbers))
            index = torch.from_numpy(chosen).to(logits_NV.device)
            verdict = verify(draft.chains.select(index), target.select(index), noise.select(index))
        for number, winner in zip(numbers, _winners(draft, verdict, chosen), strict=True):
            winners[number] = winner
    return _with_logprobs(rows, draft, logits_NV, [winner for winner in winners if winner is not None])


def split_prompts(
    plan: Plan, draft: Draft | None, logits_NV: Tensor
) -> tuple[tuple[tuple[TokenLogprob, ...], ...], Tensor]:
    """(logprobs of prompt tokens by row, logits at roots and nodes alone), where rows have logits of their prompts."""
    if not any(row.prompt_next for row in plan.rows):
        return (), logits_NV
    trees = iter(draft.trees if draft is not None else ())
    found: list[tuple[TokenLogprob, ...]] = []
    nodes: list[int] = []
    start = 0
    for row in plan.rows:
        num_known = len(row.known) if row.prompt_next else int(row.samples)
        rows_NV = logits_NV[start : start + len(row.prompt_next)]
        found.append(token_logprobs(rows_NV, row.prompt_next, row.num_logprobs or 0) if row.prompt_next else ())
        if row.samples:
            stop = start + num_known + next(trees).num_nodes
            nodes += range(start + num_known - 1, stop)
            start = stop
        else:
            start += num_known
    return tuple(found), logits_NV[nodes]


def _with_logprobs(rows: Sequence[Row], draft: Draft, logits_NV: Tensor, winners: list[Winner]) -> list[Winner]:
    """The winners, with the logprobs of what they emit where their rows ask for them."""
    if all(row.num_logprobs is None for row in rows):
        return winners
    result, start = [], 0
    for row, tree, winner in zip(rows, draft.trees, winners, strict=True):
        if row.num_logprobs is not None:
            emitted = (*winner.emission.accepted, winner.emission.next_token)
            nodes = [start + node for node in tree.paths[winner.rank][: len(emitted)]]
            logprobs = token_logprobs(logits_NV[nodes], emitted, row.num_logprobs)
            winner = replace(winner, emission=replace(winner.emission, logprobs=logprobs))
        result.append(winner)
        start += 1 + tree.num_nodes
    return result


def observe_gap(
    plan: Plan, draft: Draft | None, logits_NV: Tensor, verdict: Verdict, step: int, share: float
) -> Verdict:
    """On a share of the steps, note how far one row's rule stays below the optimum; which, the step number says."""
    chance, choice = uniform(0, step, Purpose.OBSERVE, 0, np.arange(2)).tolist()
    rows = plan.sampling_rows
    if draft is None or chance >= share:
        return verdict
    number = int(choice * len(rows))
    row, speculation = rows[number], rows[number].speculation
    if not row.branching or row.sampling.is_greedy or speculation.over_acceptance:
        return verdict
    root = sum(1 + tree.num_nodes for tree in draft.trees[:number])
    root_1V = edit(logits_NV[root : root + 1], [Place(row.sampling, row.text)] if row.text else [])
    p_1V = law(root_1V, LawParameters.of([row.sampling], logits_NV.device)).double()
    mine = torch.from_numpy(np.flatnonzero(draft.layout.request_C == number)).to(p_1V.device)
    chains = draft.chains.select(mine)
    q_1V = chains.draft.rows_at(0)[:1].double()
    if chains.layers is not None:
        nowhere = torch.zeros_like(mine[:1])
        p_1V, _ = apply_layers(p_1V, q_1V, chains.layers.select(nowhere), nowhere, nowhere)
    apart = row.num_drafts // row.branching[0]
    gap = acceptance_gap(
        speculation.rule,
        method_of(row),
        (p_1V[0] / p_1V.sum()).cpu().numpy(),
        (q_1V[0] / q_1V.sum()).cpu().numpy(),
        chains.tokens_CL[::apart, 0].tolist(),
    )
    emissions = list(verdict.emissions)
    emissions[number] = replace(emissions[number], gap=gap)
    return replace(verdict, emissions=tuple(emissions))


def _target_laws(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> LawTable:
    """The law of every node, and which node lies below the first i tokens of each chain."""
    counts = [1 + tree.num_nodes for tree in draft.trees]
    starts = np.cumsum([0, *counts[:-1]])
    node_CX = np.zeros((draft.layout.num_chains, draft.layout.max_length + 1), dtype=np.int64)
    chain = 0
    for start, tree in zip(starts, draft.trees, strict=True):
        for path in tree.paths:
            node_CX[chain, : len(path)] = path
            node_CX[chain] += start
            chain += 1
    row_N = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(logits_NV.device)
    parameters = LawParameters.of([row.sampling for row in rows], logits_NV.device)
    edited_NV = edit(logits_NV, _places(rows, draft))
    return LawTable(law(edited_NV, parameters.select(row_N)), torch.from_numpy(node_CX).to(logits_NV.device))


def _places(rows: Sequence[Row], draft: Draft) -> list[Place | None]:
    """Where the law of every node is, for the rows that edit their logits."""
    if not any(row.text for row in rows):
        return []
    places: list[Place | None] = []
    for row, tree in zip(rows, draft.trees, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*paths[parent], token))
        places += [None if row.text is None else Place(row.sampling, row.text, path) for path in paths]
    return places


def _parts(rows: Sequence[Row], vocab_size: int) -> Iterator[tuple[Verify, list[int]]]:
    """(rule, row numbers): the rows that are verified together, of one rule and within the memory for it."""
    by_rule: dict[Verify, list[int]] = {}
    for number, row in enumerate(rows):
        by_rule.setdefault(_rule_of(row), []).append(number)
    for verify, numbers in by_rule.items():
        part: list[int] = []
        size = 0
        for number in numbers:
            chains_bytes = max(1, rows[number].num_drafts) * vocab_size * _CHAIN_BYTES
            if part and size + chains_bytes > _VERIFY_BYTES:
                yield verify, part
                part, size = [], 0
            part.append(number)
            size += chains_bytes
        yield verify, part


def _rule_of(row: Row) -> Verify:
    """How the row's chains are verified."""
    speculation = row.speculation
    if not row.branching:
        return RULES["block"].verify
    if speculation.over_acceptance > 0:
        return OverAcceptance(speculation.over_acceptance, speculation.over_acceptance_residual)
    # At temperature 0 every rule accepts the longest exact match; this one takes any set of drafts.
    return RULES["nss" if row.sampling.is_greedy and row.num_drafts > 1 else speculation.rule].verify


def _noise(draft: Draft, device: torch.device) -> ChainNoise:
    layout = draft.layout
    seed, position, rank = layout.seed_C, layout.position_C, layout.rank_C
    depth_L = np.arange(layout.max_length)

    def each(purpose: Purpose) -> Tensor:
        return torch.from_numpy(uniform(seed, position, purpose, rank)).to(device)

    def each_depth(purpose: Purpose) -> Tensor:
        numbers = uniform(seed[:, None], position[:, None], purpose, rank[:, None], depth_L)
        return torch.from_numpy(numbers.reshape(layout.num_chains, layout.max_length)).to(device)

    return ChainNoise(
        each_depth(Purpose.ACCEPT),
        each(Purpose.RESIDUAL),
        each(Purpose.SCORE),
        each_depth(Purpose.CHOSEN_ACCEPT),
        each(Purpose.CHOSEN_RESIDUAL),
    )


def _winners(draft: Draft, verdict: ChainVerdict, chosen: np.ndarray) -> list[Winner]:
    """The verdict of one rule on the host; `chosen` are the chains the rule saw."""
    winners = []
    tokens_B = zip(verdict.chain_B.tolist(), verdict.accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
    layers = _layers(verdict)
    bias = [0.0] * len(layers) if verdict.bias_B is None else verdict.bias_B.tolist()
    for i, (local_chain, accepted, next_token) in enumerate(tokens_B):
        chain = int(chosen[local_chain])
        tree = draft.trees[int(draft.layout.request_C[chain])]
        rank = int(draft.layout.rank_C[chain])
        tokens = tuple(tree.tokens[node - 1] for node in tree.paths[rank][1 : accepted + 1])
        winners.append(Winner(rank, Emission(tokens, next_token, tree.num_nodes, layers=layers[i], bias=bias[i])))
    return winners


def _layers(verdict: ChainVerdict) -> list[tuple[TargetLayer, ...]]:
    """The layers that still hold, by request."""
    if verdict.layers is None:
        return [()] * len(verdict.chain_B)
    remaining, states, counts = (
        tensor.tolist()
        for tensor in (verdict.layers.remaining_CM, verdict.layers.state_CM4, verdict.layers.num_chains_CM)
    )
    return [
        tuple(TargetLayer(left, tuple(state), count) for left, state, count in zip(*of_row, strict=True) if left > 0)
        for of_row in zip(remaining, states, counts, strict=True)
    ]
