"""Copies the results of a step to the host, finds non-finite ones, and adds logprobs and the gap to the optimum.

The first half copies all results of a step at once: every copy waits until the device has done all work before it, and
the device then waits for the host's next work. It also finds the requests whose numbers are not finite. The second half
reports logprobs, and on a share of the steps how far a rule stays below the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.drafting.draft import Draft, method_of, with_tokens
from engine.errors import NON_FINITE, RequestError
from engine.fanout import chains_through
from engine.kernels.protocol import ChainVerdict
from engine.kernels.transfer import to_device, to_device_at_once, to_host
from engine.noise import Purpose, uniform
from engine.plan import Emission, Plan, Row, StepVerdict, TargetShift
from engine.request import TokenLogprob
from engine.sampling.distribution import DistributionParameters, distribution
from engine.sampling.edits import NodeContext, edit
from engine.speculation.gap import acceptance_gap, likeliest
from engine.speculation.target_shift import apply_shifts

Floats = npt.NDArray[np.float64]

_STEPS = 1024
"""Number of steps for which `_observed` decides at once."""
BROKEN = RequestError(
    "the model returned numbers for this request that are not finite (NaN or an overflow), so it was ended; float32 or "
    "bfloat16 weights overflow less easily than float16 (--dtype)",
    code=NON_FINITE,
)


@dataclass(frozen=True)
class HostVerdict:
    """A `ChainVerdict` on the host, by request."""

    chains: list[int]
    accepted: list[int]
    next_tokens: list[int]
    bias: list[float]
    shifts: list[tuple[TargetShift, ...]]


def largest_numbers(draft: Draft, logits_NV: Tensor) -> Tensor:
    """Return [N + M] the maximum of each node's target logits, then of each draft distribution; NaN if a number is.

    logits_NV: of the sampling rows' nodes. The maximum ignores minus infinity, the logit of impossible tokens.
    """
    drafted_MV = draft.chains.draft.probs_NV
    return torch.cat([logits_NV.amax(1), drafted_MV.amax(1)]) if len(drafted_MV) else logits_NV.amax(1)


def read_verdicts(
    draft: Draft, verdicts: Sequence[ChainVerdict], largest: Tensor
) -> tuple[Draft, list[HostVerdict], Floats]:
    """Return (the draft with its tokens, the verdicts, the largest numbers). A step waits for the device here."""
    tensors = [largest, *([] if draft.tokens_M is None else [draft.tokens_M])]
    for one in verdicts:
        tensors += [one.chain_B, one.accepted_B, one.next_token_B, *([] if one.bias_B is None else [one.bias_B])]
        if one.shifts is not None:
            tensors += [one.shifts.remaining_CM, one.shifts.state_CM4, one.shifts.num_chains_CM]
    found = iter(to_host(tensors))
    largest_N = next(found)
    if draft.tokens_M is not None:
        draft = with_tokens(draft, next(found).tolist())
    read = []
    for one in verdicts:
        chains, accepted, next_tokens = (next(found).tolist() for _ in range(3))
        bias = [0.0] * len(chains) if one.bias_B is None else next(found).tolist()
        shifts: list[tuple[TargetShift, ...]] = [()] * len(chains)
        if one.shifts is not None:
            shifts = list(map(_shifts, *(next(found).tolist() for _ in range(3))))
        read.append(HostVerdict(chains, accepted, next_tokens, bias, shifts))
    return draft, read, largest_N


def _shifts(
    remaining: Sequence[int], states: Sequence[Sequence[float]], counts: Sequence[int]
) -> tuple[TargetShift, ...]:
    """Return the shifts of one request that still hold."""
    return tuple(
        TargetShift(left, (a, b, c, d), count)
        for left, (a, b, c, d), count in zip(remaining, states, counts, strict=True)
        if left > 0
    )


def broken_rows(plan: Plan, draft: Draft | None, largest: Floats) -> frozenset[int]:
    """Return the sequence ids of rows for which a model computed NaN or infinity (an overflow, or wrong weights).

    Such a request ends with an error; other requests of the step continue. Its K/V is wiped before others get its
    blocks: a kernel reads masked keys too, and zero times NaN is NaN. largest: what `largest_numbers` returned.
    """
    is_finite = np.isfinite(largest)
    if draft is None or is_finite.all():
        return frozenset()
    starts = draft.starts.tolist()
    is_finite_target, is_finite_draft = is_finite[: starts[-1]], is_finite[starts[-1] :]
    rows = plan.sampling_rows
    broken = {
        number
        for number, (start, tree) in enumerate(zip(starts, draft.trees, strict=False))
        if not all(is_finite_target[start : start + 1 + tree.num_nodes])
    }
    for chain, row_L in enumerate(draft.chains.draft.row_CX.tolist()):
        number, rank = int(draft.layout.request_C[chain]), int(draft.layout.rank_C[chain])
        # A recorded step has more chains than its requests draft, and chains of no request.
        is_drafted = number < len(rows) and rank < rows[number].num_drafts
        if is_drafted and not all(is_finite_draft[row] for row in row_L[: rows[number].draft_length]):
            broken.add(number)
    return frozenset(rows[number].sequence_id for number in broken)


def report(
    plan: Plan,
    draft: Draft | None,
    prompt_NV: Tensor | None,
    logits_NV: Tensor,
    verdict: StepVerdict,
    step: int,
    observed_share: float,
) -> StepVerdict:
    """Add to a verdict what is asked for besides tokens.

    prompt_NV, logits_NV: what `split_prompts` returned; step, observed_share: see `observe_gap`.
    """
    if prompt_NV is not None:
        wanted = [(row.prompt_next, row.num_prompt_logprobs) for row in plan.rows]
        verdict = replace(verdict, prompt_logprobs=tuple(_logprobs(prompt_NV, wanted)))
    if draft is None:
        return verdict
    verdict = replace(verdict, emissions=with_logprobs(plan.sampling_rows, draft, logits_NV, verdict.emissions))
    return verdict if verdict.broken else observe_gap(plan, draft, logits_NV, verdict, step, observed_share)


def split_prompts(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return (logits at prompt tokens whose logprobs are asked for, None if there are none; logits at roots and
    nodes)."""
    if not any(row.prompt_next for row in plan.rows):
        return None, logits_NV
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
    prompt_N, node_N = to_device_at_once([np.array(one, np.int64) for one in (of_prompts, nodes)], logits_NV.device)
    return logits_NV[prompt_N], logits_NV[node_N]


def with_logprobs(
    rows: Sequence[Row], draft: Draft, logits_NV: Tensor, emissions: tuple[Emission, ...]
) -> tuple[Emission, ...]:
    """Return the emissions, with logprobs in those whose rows ask for them."""
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
    of_rows = _logprobs(logits_NV[to_device(np.array(nodes, np.int64), logits_NV.device)], wanted)
    return tuple(
        msgspec.structs.replace(emission, logprobs=logprobs)
        for emission, logprobs in zip(emissions, of_rows, strict=True)
    )


def _logprobs(logits_NV: Tensor, wanted: Sequence[tuple[Sequence[int], int]]) -> list[tuple[TokenLogprob, ...]]:
    """Return the logprobs of several rows' (tokens, number of likeliest tokens); logits_NV: of all tokens in order."""
    tokens = [token for of_row, _ in wanted for token in of_row]
    found = iter(token_logprobs(logits_NV, tokens, [count for of_row, count in wanted for _ in of_row]))
    return [tuple(itertools.islice(found, len(of_row))) for of_row, _ in wanted]


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return each token's logprob under its row, and the `num_top` likeliest tokens of the row, in one copy."""
    scores_NV = logits_NV.float().log_softmax(-1)
    token_N1 = to_device(np.array(tokens, np.int64), logits_NV.device).unsqueeze(1)
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
    """Return the observed steps of a block, with the number in [0, 1) that chooses the row of each."""
    step_S = np.arange(block * _STEPS, (block + 1) * _STEPS)
    chance_S, choice_S = uniform(0, step_S[:, None], Purpose.OBSERVE, 0, np.arange(2)).T
    return {int(step_S[i]): float(choice_S[i]) for i in np.flatnonzero(chance_S < share)}


def observe_gap(
    plan: Plan, draft: Draft, logits_NV: Tensor, verdict: StepVerdict, step: int, share: float
) -> StepVerdict:
    """On a share of the steps, measure the distance of one row's rule from the optimum. The step's number chooses
    both.
    """
    choice = _observed(step // _STEPS, share).get(step)
    if choice is None:
        return verdict
    rows = plan.sampling_rows
    number = int(choice * len(rows))
    row, speculation = rows[number], rows[number].speculation
    if not row.fanout or row.sampling.is_certain or speculation.over_acceptance:
        return verdict
    root = int(draft.starts[number])
    root_1V = edit(logits_NV[root : root + 1], [NodeContext(row.sampling, row.text)] if row.text else [])
    p_1V = distribution(
        root_1V, DistributionParameters.of([row.sampling], logits_NV.device, draft.parameters.kernels)
    ).double()
    mine = to_device(np.flatnonzero(draft.layout.request_C == number)[: row.num_drafts], p_1V.device)
    chains = draft.chains.select(mine, (1, row.num_drafts))
    q_1V = chains.draft.rows_at(0)[:1].double()
    if chains.shifts is not None:
        zero_1 = torch.zeros_like(mine[:1])
        p_1V, _ = apply_shifts(p_1V, q_1V, chains.shifts.select(zero_1), zero_1, zero_1)
    tokens_C = chains.tokens_CL[:: chains_through(row.fanout, 1), 0]
    p_V, q_V, tokens_K = likeliest(p_1V[0], q_1V[0], tokens_C)
    gap = acceptance_gap(speculation.rule, method_of(row), p_V.cpu().numpy(), q_V.cpu().numpy(), tokens_K.tolist())
    emissions = list(verdict.emissions)
    emissions[number] = msgspec.structs.replace(emissions[number], gap=gap)
    return replace(verdict, emissions=tuple(emissions))
