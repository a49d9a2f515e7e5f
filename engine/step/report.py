"""Adds logprobs, and on a share of the steps the rule's gap to the optimum, to a verdict."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.drafting.draft import Draft, method_of
from engine.fanout import chains_through
from engine.kernels.transfer import to_device, to_device_at_once
from engine.noise import Purpose, uniform
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.request import TokenLogprob
from engine.sampling.distribution import DistributionParameters, distribution
from engine.sampling.edits import NodeContext, edit
from engine.speculation.gap import acceptance_gap, likeliest
from engine.speculation.target_shift import apply_shifts

_STEPS = 1024
"""Steps of a block, for which `_observed` decides at once."""
_ROWS_AT_ONCE = 64
"""Rows whose likeliest tokens are found at once; their keys take 8 bytes a token."""
_SIZE_BITS = 0x7FFFFFFF
"""Bits of a float32 number without its sign."""


class StepLogits(NamedTuple):
    """Logits of a target pass."""

    prompt_NV: Tensor | None
    """Logits at prompt tokens with requested logprobs, or None."""
    node_NV: Tensor
    """Logits at roots and nodes of sampling rows."""


def report(
    plan: Plan,
    draft: Draft | None,
    logits: StepLogits,
    verdict: StepVerdict,
    step: int,
    observed_share: float,
) -> StepVerdict:
    """Add requested logprobs and, on a share of the steps, a gap to a verdict.

    step, observed_share: see `observe_gap`.
    """
    if logits.prompt_NV is not None:
        wanted = [(row.prompt_next, row.num_prompt_logprobs) for row in plan.rows]
        prompt_logprobs = tuple(_logprobs(logits.prompt_NV, wanted))
        verdict = replace(verdict, prompt_logprobs=prompt_logprobs)
    if draft is None:
        return verdict
    rows = plan.sampling_rows
    emissions = with_logprobs(rows, draft, logits.node_NV, verdict.emissions)
    verdict = replace(verdict, emissions=emissions)
    if verdict.broken:
        return verdict
    return observe_gap(plan, draft, logits.node_NV, verdict, step, observed_share)


def split_prompts(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepLogits:
    """Split the logits of a target pass into logits at prompt tokens and logits at nodes."""
    if not any(row.prompt_next for row in plan.rows):
        return StepLogits(None, logits_NV)
    trees = iter(draft.trees if draft is not None else ())
    prompt_rows: list[int] = []
    node_rows: list[int] = []
    start = 0
    for row in plan.rows:
        num_known = len(row.input_ids) if row.prompt_next else int(row.emits)
        stop = start + num_known
        prompt_rows += range(start, start + len(row.prompt_next))
        if row.emits:
            root = stop - 1
            stop += next(trees).num_nodes
            node_rows += range(root, stop)
        start = stop
    indices = [np.array(prompt_rows, np.int64), np.array(node_rows, np.int64)]
    prompt_N, node_N = to_device_at_once(indices, logits_NV.device)
    return StepLogits(logits_NV[prompt_N], logits_NV[node_N])


def with_logprobs(
    rows: Sequence[Row], draft: Draft, logits_NV: Tensor, emissions: tuple[Emission, ...]
) -> tuple[Emission, ...]:
    """Return the emissions, with logprobs if their rows ask for logprobs."""
    if all(row.num_logprobs is None for row in rows):
        return emissions
    nodes: list[int] = []
    wanted: list[tuple[Sequence[int], int]] = []
    starts = draft.starts[:-1].tolist()
    for row, tree, start, emission in zip(rows, draft.trees, starts, emissions, strict=True):
        emitted: tuple[int, ...] = ()
        if row.num_logprobs is not None:
            emitted = (*emission.accepted, emission.next_token)
            nodes += [start + node for node in tree.paths[emission.rank][: len(emitted)]]
        wanted.append((emitted, row.num_logprobs or 0))
    node_N = to_device(np.array(nodes, np.int64), logits_NV.device)
    logprobs_by_row = _logprobs(logits_NV[node_N], wanted)
    return tuple(
        msgspec.structs.replace(emission, logprobs=logprobs)
        for emission, logprobs in zip(emissions, logprobs_by_row, strict=True)
    )


def _logprobs(logits_NV: Tensor, wanted: Sequence[tuple[Sequence[int], int]]) -> list[tuple[TokenLogprob, ...]]:
    """Return the logprobs of several rows' (tokens, number of likeliest tokens).

    logits_NV: of all tokens in order.
    """
    tokens: list[int] = []
    num_top: list[int] = []
    for row_tokens, count in wanted:
        tokens += row_tokens
        num_top += [count] * len(row_tokens)
    logprobs = iter(token_logprobs(logits_NV, tokens, num_top))
    return [tuple(itertools.islice(logprobs, len(row_tokens))) for row_tokens, _ in wanted]


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return each token's logprob under its row, and the `num_top` likeliest tokens of the row.

    All numbers are read in one copy.
    """
    scores_NV = logits_NV.float().log_softmax(-1)
    token_N1 = to_device(np.array(tokens, np.int64), logits_NV.device).unsqueeze(1)
    most = min(max(num_top, default=0), scores_NV.shape[1])
    top_NK = torch.cat([_likeliest(part_NV, most) for part_NV in torch.split(scores_NV, _ROWS_AT_ONCE)])
    # Token ids and float32 numbers are exact in float64.
    columns = torch.cat([scores_NV.gather(1, token_N1), scores_NV.gather(1, top_NK), top_NK.double()], 1)
    logprobs = []
    for (score, *rest), count in zip(columns.tolist(), num_top, strict=True):
        num_reported = min(count, most)
        values = rest[:num_reported]
        ids = map(int, rest[most : most + num_reported])
        logprobs.append(TokenLogprob(score, tuple(zip(ids, values, strict=True))))
    return logprobs


def _likeliest(scores_NV: Tensor, count: int) -> Tensor:
    """Return [N, count] the likeliest tokens; of equally likely tokens the lower one comes first.

    Which of equal numbers `topk` takes depends on the count, and so on other rows of the step. Its
    keys are different here: the size of a logprob, which is negative, and behind it the token.
    """
    size_NV = scores_NV.view(torch.int32) & _SIZE_BITS
    token_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
    key_NV = size_NV.long().bitwise_left_shift_(32).bitwise_or_(token_V)
    return key_NV.topk(count, dim=1, largest=False).indices


@lru_cache(maxsize=2)
def _observed(block: int, share: float) -> dict[int, float]:
    """Return the observed steps of a block, each with a number in [0, 1) that chooses its row."""
    step_S = np.arange(block * _STEPS, (block + 1) * _STEPS)
    chance_S, choice_S = uniform(0, step_S[:, None], Purpose.OBSERVE, 0, np.arange(2)).T
    return {int(step_S[i]): float(choice_S[i]) for i in np.flatnonzero(chance_S < share)}


def observe_gap(
    plan: Plan, draft: Draft, logits_NV: Tensor, verdict: StepVerdict, step: int, share: float
) -> StepVerdict:
    """On a share of the steps, measure the distance of a row's rule from the optimum.

    step: its number decides whether it is observed, and which row.
    """
    choice = _observed(step // _STEPS, share).get(step)
    if choice is None:
        return verdict
    rows = plan.sampling_rows
    number = int(choice * len(rows))
    row = rows[number]
    speculation = row.speculation
    if not row.fanout or row.sampling.is_certain or speculation.over_acceptance:
        return verdict
    p_1V = _root_distribution(row, draft, logits_NV, number)
    chain_indices = np.flatnonzero(draft.layout.request_C == number)[: row.num_drafts]
    chain_C = to_device(chain_indices, p_1V.device)
    chains = draft.chains.select(chain_C, (1, row.num_drafts))
    q_1V = chains.draft.rows_at(0)[:1].double()
    if chains.shifts is not None:
        zero_1 = torch.zeros_like(chain_C[:1])
        p_1V, _ = apply_shifts(p_1V, q_1V, chains.shifts.select(zero_1), zero_1, zero_1)
    first_token_K = chains.tokens_CL[:: chains_through(row.fanout, 1), 0]
    p_V, q_V, tokens_K = likeliest(p_1V[0], q_1V[0], first_token_K)
    gap = acceptance_gap(
        speculation.rule,
        method_of(row),
        p_V.cpu().numpy(),
        q_V.cpu().numpy(),
        tokens_K.tolist(),
    )
    emissions = list(verdict.emissions)
    emissions[number] = msgspec.structs.replace(emissions[number], gap=gap)
    return replace(verdict, emissions=tuple(emissions))


def _root_distribution(row: Row, draft: Draft, logits_NV: Tensor, number: int) -> Tensor:
    """Return [1, V] the target distribution at a row's root, in float64."""
    root = int(draft.starts[number])
    contexts = [NodeContext(row.sampling, row.text)] if row.text else []
    logits_1V = edit(logits_NV[root : root + 1], contexts)
    kernels = draft.parameters.kernels
    parameters = DistributionParameters.of([row.sampling], logits_NV.device, kernels)
    return distribution(logits_1V, parameters).double()
