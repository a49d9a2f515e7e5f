"""What a step reports beyond its tokens: logprobs that were asked for, and how far a rule stays below the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.drafting.draft import Draft, method_of
from engine.kernels.transfer import to_device
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.request import TokenLogprob
from engine.sampling.edits import NodeContext, edit
from engine.sampling.law import LawParameters, law
from engine.sampling.noise import Purpose, uniform
from engine.speculation.gap import acceptance_gap, likeliest
from engine.speculation.target_shift import apply_shifts

# Whether steps are observed is decided for so many at once.
_STEPS = 1024


def split_prompts(
    plan: Plan, draft: Draft | None, logits_NV: Tensor
) -> tuple[tuple[tuple[TokenLogprob, ...], ...], Tensor]:
    """(logprobs of prompt tokens by row, logits at roots and nodes alone), where rows have logits of their prompts."""
    if not any(row.prompt_next for row in plan.rows):
        return (), logits_NV
    trees = iter(draft.trees if draft is not None else ())
    of_prompts: list[int] = []
    nodes: list[int] = []
    start = 0
    for row in plan.rows:
        num_known = len(row.input_ids) if row.prompt_next else int(row.emits)
        of_prompts += range(start, start + len(row.prompt_next))
        if row.emits:
            stop = start + num_known + next(trees).num_nodes
            nodes += range(start + num_known - 1, stop)
            start = stop
        else:
            start += num_known
    wanted = [(row.prompt_next, row.num_prompt_logprobs) for row in plan.rows]
    return tuple(_logprobs(logits_NV[of_prompts], wanted)), logits_NV[nodes]


def with_logprobs(rows: Sequence[Row], draft: Draft, logits_NV: Tensor, emissions: list[Emission]) -> list[Emission]:
    """The emissions with their logprobs, where their rows ask for them."""
    if all(row.num_logprobs is None for row in rows):
        return emissions
    nodes: list[int] = []
    wanted: list[tuple[Sequence[int], int]] = []
    for row, tree, start, emission in zip(rows, draft.trees, draft.starts[:-1].tolist(), emissions, strict=True):
        emitted: tuple[int, ...] = ()
        if row.num_logprobs is not None:
            emitted = (*emission.accepted, emission.next_token)
            nodes += [start + node for node in tree.paths[emission.rank][: len(emitted)]]
        wanted.append((emitted, row.num_logprobs or 0))
    of_rows = _logprobs(logits_NV[nodes], wanted)
    return [
        msgspec.structs.replace(emission, logprobs=logprobs)
        for emission, logprobs in zip(emissions, of_rows, strict=True)
    ]


def _logprobs(logits_NV: Tensor, wanted: Sequence[tuple[Sequence[int], int]]) -> list[tuple[TokenLogprob, ...]]:
    """The logprobs of several rows' (tokens, number of likeliest tokens); logits_NV: of all their tokens in order."""
    tokens = [token for of_row, _ in wanted for token in of_row]
    found = iter(token_logprobs(logits_NV, tokens, [count for of_row, count in wanted for _ in of_row]))
    return [tuple(itertools.islice(found, len(of_row))) for of_row, _ in wanted]


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Each token's logprob under its row, and the likeliest tokens of the row, so many as its `num_top`.

    All of it comes to the host in one copy.
    """
    scores_NV = logits_NV.float().log_softmax(-1)
    token_N1 = torch.tensor(tokens, dtype=torch.int64).to(logits_NV.device, non_blocking=True).unsqueeze(1)
    most = min(max(num_top, default=0), scores_NV.shape[1])
    top = scores_NV.topk(most, dim=1)
    # Token ids and float32 numbers are exact in float64.
    found = torch.cat([scores_NV.gather(1, token_N1).double(), top.values.double(), top.indices.double()], 1).tolist()
    result = []
    for (score, *rest), count in zip(found, num_top, strict=True):
        values, ids = rest[:most], rest[most:]
        result.append(TokenLogprob(score, tuple(zip(map(int, ids[:count]), values[:count], strict=True))))
    return result


@lru_cache(maxsize=2)
def _observed(block: int, share: float) -> dict[int, float]:
    """The steps of a block that are observed, and the number in [0, 1) that chooses the row of each."""
    step_S = np.arange(block * _STEPS, (block + 1) * _STEPS)
    chance_S, choice_S = uniform(0, step_S[:, None], Purpose.OBSERVE, 0, np.arange(2)).T
    return {int(step_S[i]): float(choice_S[i]) for i in np.flatnonzero(chance_S < share)}


def observe_gap(
    plan: Plan, draft: Draft | None, logits_NV: Tensor, verdict: StepVerdict, step: int, share: float
) -> StepVerdict:
    """On a share of the steps, note how far one row's rule stays below the optimum; which, the step number says."""
    choice = _observed(step // _STEPS, share).get(step)
    if draft is None or choice is None:
        return verdict
    rows = plan.sampling_rows
    number = int(choice * len(rows))
    row, speculation = rows[number], rows[number].speculation
    if not row.fanout or row.sampling.is_certain or speculation.over_acceptance:
        return verdict
    root = int(draft.starts[number])
    root_1V = edit(logits_NV[root : root + 1], [NodeContext(row.sampling, row.text)] if row.text else [])
    p_1V = law(root_1V, LawParameters.of([row.sampling], logits_NV.device, draft.parameters.kernels)).double()
    mine = to_device(np.flatnonzero(draft.layout.request_C == number)[: row.num_drafts], p_1V.device)
    chains = draft.chains.select(mine)
    q_1V = chains.draft.rows_at(0)[:1].double()
    if chains.shifts is not None:
        nowhere = torch.zeros_like(mine[:1])
        p_1V, _ = apply_shifts(p_1V, q_1V, chains.shifts.select(nowhere), nowhere, nowhere)
    apart = row.num_drafts // row.fanout[0]
    p_V, q_V, tokens_K = likeliest(p_1V[0], q_1V[0], chains.tokens_CL[::apart, 0])
    gap = acceptance_gap(speculation.rule, method_of(row), p_V.cpu().numpy(), q_V.cpu().numpy(), tokens_K.tolist())
    emissions = list(verdict.emissions)
    emissions[number] = msgspec.structs.replace(emissions[number], gap=gap)
    return replace(verdict, emissions=tuple(emissions))
