"""Verification of a step: each request's rule, and what it gave.

Between the parts: tensors of all rows go to the rules of `speculation`, and come back as values per row.
Not for: deciding what is verified (`scheduling`), or the models (`execution`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.drafting.draft import Draft
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, LawTable
from engine.kernels.transfer import to_device, to_host
from engine.plan import Emission, Plan, Row
from engine.request import DrafterCount
from engine.sampling.noise import Purpose, uniform
from engine.speculation.topology import Tree
from engine.speculation.verification import RULES, OverAcceptance, Verify
from engine.speculation.verification.copies import Walk, below, refuse, walk
from engine.speculation.verification.longest_match import verify_certain
from engine.step.recorded.steps import RecordedStep
from engine.step.reporting import with_logprobs
from engine.step.target_laws import target_laws
from engine.step.verdicts import HostVerdict, largest_numbers, read_verdicts

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# Working memory of a verification, and about what a rule needs of it per chain and token of the vocabulary.
_VERIFY_BYTES = 64 << 20
_CHAIN_BYTES = 32
# Rules that on CUDA keep a sum for each tile of the vocabulary, in place of arrays [chains, vocabulary].
_BY_TILES = frozenset(rule.verify for rule in RULES.values() if rule.by_tiles)
_BY_LOGITS = ("block", "bv_race")
"""Rules that `Kernels.decide` follows."""


class _Copied(NamedTuple):
    """What is accepted of copied chains, before the rules verify the drawn ones."""

    origin_C: Ints
    """Index, in the draft's layout, of each chain that the rules see."""
    walks: Mapping[int, Walk]
    """By row number: how far it follows its copied chains."""
    goes_on_R: Bools
    """Whether a rule still verifies drawn chains of the row, below the accepted copied tokens."""


@dataclass(frozen=True)
class _Task:
    """What the rules verify."""

    chains: Chains
    target: LawTable
    noise: ChainNoise
    copied: _Copied


def verify_chains(
    plan: Plan, draft: Draft | None, logits_NV: Tensor, recorded: RecordedStep | None = None
) -> tuple[list[Emission], Floats]:
    """(what each sampling row emits, by the rule it asked for; the largest numbers of the models' rows).

    recorded: the step that has verified its chains already, if there is one.
    Waits for the device once, to read the verdicts; also before that where chains are copied, and after it where
    logprobs are wanted. `traversal`, `weighted_race` and `ot_lp` also wait for the device while they verify.
    """
    if draft is None:
        return [], np.zeros(0)
    rows = plan.sampling_rows
    if recorded is None:
        draft, emissions, largest_N = _verify(rows, draft, logits_NV)
    else:
        draft, emissions, largest_N = _read(rows, draft, recorded)
    return with_logprobs(rows, draft, logits_NV, emissions), largest_N


def _verify(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> tuple[Draft, list[Emission], Floats]:
    kernels = draft.parameters.kernels
    if _are_plain(rows, draft) and kernels.takes_logits(logits_NV):
        temperature_R, nodes = draft.parameters.temperature_N, draft.nodes
        operands = nodes.starts, draft.chains, nodes.node_CX, draft.numbers
        verdict, largest_N = kernels.decide(logits_NV, temperature_R, *operands)
        return draft, _emitted(rows, draft, *verdict.tolist()), largest_N
    target = target_laws(rows, draft, logits_NV)
    largest = largest_numbers(draft, logits_NV)
    if not any(row.fanout or row.copies for row in rows):
        tokens, largest_N = to_host([_next_tokens(target, draft.noise), largest])
        return draft, [Emission((), token, 0) for token in tokens.tolist()], largest_N
    task = _follow_copies(rows, draft, target)
    parts = list(_verdicts(rows, draft, task))
    draft, verdicts, largest_N = read_verdicts(draft, [part.verdict for part in parts], largest)
    found = [
        one
        for part, verdict in zip(parts, verdicts, strict=True)
        for one in zip(part.numbers, _emissions(rows, draft, task.copied, verdict, part.chosen), strict=True)
    ]
    return draft, [emission for _, emission in sorted(found, key=itemgetter(0))], largest_N


def _are_plain(rows: Sequence[Row], draft: Draft) -> bool:
    """Whether logits and temperatures alone make the laws of all rows, and their rules are those of `decide`."""
    return (
        not draft.parameters.values
        and draft.tokens_M is None
        and all(
            row.text is None
            and not row.copies
            and not row.shifts
            and not row.sampling.seed_stable
            and not row.speculation.over_acceptance
            and (row.speculation.rule in _BY_LOGITS or not row.fanout or row.sampling.is_greedy)
            for row in rows
        )
    )


def _emitted(
    rows: Sequence[Row], draft: Draft, chains: list[int], accepted: list[int], next_tokens: list[int]
) -> list[Emission]:
    """The emissions of a verdict about all chains that were drawn, by row."""
    ranks = draft.layout.rank_C[chains].tolist()
    found = zip(rows, draft.trees, ranks, accepted, next_tokens, strict=True)
    return [
        _emission(row, tree, rank, count, token, min(count, max(0, row.draft_length - 1)))
        for row, tree, rank, count, token in found
    ]


def _next_tokens(target: LawTable, noise: ChainNoise) -> Tensor:
    """[C] the next token of rows without drafts."""
    return target.kernels.draw(target.law_NV, target.row_CX[:, 0], noise.residual_C)


def _read(rows: Sequence[Row], draft: Draft, step: RecordedStep) -> tuple[Draft, list[Emission], Floats]:
    draft, verdict, largest_N = step.read(draft)
    return draft, _emitted(rows, draft, verdict.chains, verdict.accepted, verdict.next_tokens), largest_N


@dataclass(frozen=True)
class _Part:
    """The verdict of one rule about some rows."""

    numbers: Sequence[int]
    """Of the rows."""
    chosen: Ints
    """Of the task's chains."""
    verdict: ChainVerdict


def _verdicts(rows: Sequence[Row], draft: Draft, task: _Task) -> Iterator[_Part]:
    """Every rule about the rows that asked for it."""
    law_NV, request_C = task.target.law_NV, draft.layout.request_C[task.copied.origin_C]
    parts = list(_parts(rows, task.copied.goes_on_R, law_NV.shape[1], task.target.kernels.by_tiles))
    for verify, numbers in parts:
        if len(parts) == 1:
            yield _Part(numbers, np.arange(len(request_C)), verify(task.chains, task.target, task.noise))
            return
        chosen = np.flatnonzero(np.isin(request_C, numbers))
        index = to_device(chosen, law_NV.device)
        shape = len(numbers), int(np.bincount(request_C[chosen]).max())
        verdict = verify(task.chains.select(index, shape), task.target.select(index), task.noise.select(index))
        yield _Part(numbers, chosen, verdict)


def _follow_copies(rows: Sequence[Row], draft: Draft, target: LawTable) -> _Task:
    """Decide about the copied chains; the rules go on where the walks stop."""
    layout, noise = draft.layout, draft.noise
    goes_on_R = np.array([bool(row.fanout) for row in rows])
    if not any(row.copies for row in rows):
        return _Task(draft.chains, target, noise, _Copied(np.arange(layout.num_chains), {}, goes_on_R))
    starts = draft.starts.tolist()
    offset_C, lives_C = np.zeros(layout.num_chains, dtype=np.int64), goes_on_R[layout.request_C]
    root_C = target.row_CX[:, 0].cpu().numpy().copy()  # the table is kept for later steps
    walks = _walks(rows, draft, target.law_NV, starts)
    stops = [starts[number] + taken.path[-1] for number, taken in walks.items()]
    refuse(target.law_NV, stops, [taken.refused for taken in walks.values()])
    for (number, taken), stop in zip(walks.items(), stops, strict=True):
        drawn = draft.trees[number].paths[: rows[number].first_copy]
        alive = [path[: taken.depth + 1] == taken.path and len(path) > taken.depth + 1 for path in drawn]
        mine = np.flatnonzero(layout.request_C == number)
        lives_C[mine], offset_C[mine], root_C[mine] = alive, taken.depth, stop
        goes_on_R[number] = any(alive)
    rest = below(draft.chains, target, noise, offset_C, lives_C, root_C)
    return _Task(rest.chains, rest.target, rest.noise, _Copied(rest.origin_C, walks, goes_on_R))


def _walks(rows: Sequence[Row], draft: Draft, law_NV: Tensor, starts: Sequence[int]) -> dict[int, Walk]:
    """How far each row with copied chains follows them, by row number."""
    numbers = [number for number, row in enumerate(rows) if row.copies]
    nodes = {
        number: sorted({node for path in draft.trees[number].paths[rows[number].first_copy :] for node in path[1:]})
        for number in numbers
    }
    above = [starts[number] + draft.trees[number].parents[node - 1] for number in numbers for node in nodes[number]]
    tokens = [draft.trees[number].tokens[node - 1] for number in numbers for node in nodes[number]]
    found = iter(law_NV[above, tokens].tolist())
    walks = {}
    for number in numbers:
        row = rows[number]
        probability = {node: next(found) for node in nodes[number]}
        uniform_L = uniform(row.sampling.seed, row.end, Purpose.COPY, 0, np.arange(row.longest_chain))
        walks[number] = walk(draft.trees[number], row.first_copy, probability, uniform_L.tolist())
    return walks


def _parts(
    rows: Sequence[Row], goes_on_R: Bools, vocab_size: int, by_tiles: bool
) -> Iterator[tuple[Verify, list[int]]]:
    """(rule, row numbers): the rows that are verified together, of one rule and within the memory for it."""
    by_rule: dict[Verify, list[int]] = {}
    going_on = [row for row, goes_on in zip(rows, goes_on_R, strict=True) if goes_on and not row.sampling.is_certain]
    races = any(row.num_drafts > 1 and row.speculation.rule == "bv_race" for row in going_on)
    of_one_chain = RULES["bv_race" if races else "block"].verify
    for number, row in enumerate(rows):
        by_rule.setdefault(_rule_of(row, bool(goes_on_R[number]), of_one_chain), []).append(number)
    for verify, numbers in by_rule.items():
        part: list[int] = []
        size = 0
        token_bytes = 1 if by_tiles and verify in _BY_TILES else _CHAIN_BYTES
        for number in numbers:
            chains_bytes = max(1, rows[number].num_drafts) * vocab_size * token_bytes
            if part and size + chains_bytes > _VERIFY_BYTES:
                yield verify, part
                part, size = [], 0
            part.append(number)
            size += chains_bytes
        yield verify, part


def _rule_of(row: Row, goes_on: bool, of_one_chain: Verify) -> Verify:
    """How the row's drawn chains are verified.

    A race of one chain is block verification, with the same tokens; and where no chain is left any rule will do. Such
    rows take part in the step's race, if there is one, instead of a verification of their own.
    """
    speculation = row.speculation
    if not goes_on:
        return of_one_chain
    if speculation.over_acceptance > 0:
        return OverAcceptance(speculation.over_acceptance, speculation.over_acceptance_residual)
    if row.sampling.is_certain:
        return verify_certain
    if row.num_drafts == 1 and speculation.rule in ("block", "bv_race"):
        return of_one_chain
    return RULES[speculation.rule].verify


def _emissions(
    rows: Sequence[Row], draft: Draft, copied: _Copied, verdict: HostVerdict, chosen: Ints
) -> Iterator[Emission]:
    """What a rule's verdict gives, behind the copied tokens; `chosen`: which of the chains the rule saw."""
    chain_B = copied.origin_C[chosen[verdict.chains]]
    numbers, ranks = draft.layout.request_C[chain_B].tolist(), draft.layout.rank_C[chain_B].tolist()
    found = zip(numbers, ranks, verdict.accepted, verdict.next_tokens, verdict.shifts, verdict.bias, strict=True)
    for number, rank, accepted, next_token, shifts, bias in found:
        row, tree, followed = rows[number], draft.trees[number], copied.walks.get(number)
        num_draft_kept = max(0, row.draft_length - 1)
        if followed is not None:
            accepted += followed.depth
            if not copied.goes_on_R[number]:
                rank, num_draft_kept = followed.rank, 0
        # The draft model never ran on the last token of a chain.
        found_copies = () if followed is None else _copied(row, tree, followed)
        emission = _emission(row, tree, rank, accepted, next_token, min(accepted, num_draft_kept))
        yield msgspec.structs.replace(emission, copied=found_copies, shifts=shifts, bias=bias)


def _emission(row: Row, tree: Tree, rank: int, accepted: int, next_token: int, num_draft_kept: int) -> Emission:
    """An accepted prefix of one of the row's chains, and the token behind it."""
    return Emission(
        accepted=tree.tokens_of(tree.paths[rank][: accepted + 1]) if accepted else (),
        next_token=next_token,
        num_nodes=tree.num_nodes,
        num_draft_kept=num_draft_kept,
        chains=tuple(map(tree.tokens_of, tree.paths)) if row.reports_drafts and tree.num_nodes else (),
        rank=rank,
    )


def _copied(row: Row, tree: Tree, followed: Walk) -> tuple[DrafterCount, ...]:
    """What each copied chain gave; a node counts for the first of them through it, and not for the model."""
    seen, credited = {0}, {0}
    counts = []
    for copy, path in zip(row.copies, tree.paths[row.first_copy :], strict=True):
        accepted = set(path) & set(followed.path) - credited
        counts.append(DrafterCount(copy.source, 1, len(set(path) - seen), len(accepted)))
        seen.update(path)
        credited |= accepted
    return tuple(counts)
