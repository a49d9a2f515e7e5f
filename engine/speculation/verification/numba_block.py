"""Block verification and the score race on a CPU, in one Numba kernel: `block.py` and `race.py` say what they compute.

The plain operations are the oracle; `fused_block.py` decides where this is used.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.kernels import compiled_for_cpu
from engine.numba_numbers import EXACT
from engine.sampling.numba_rows import draw_from, sum_of
from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification.rule import ChainVerdict


@compiled_for_cpu(**EXACT)
def _walk(tokens, target, target_rows, draft, draft_rows, log_ratios, log_ceilings, weights):
    """log R_i, log u_i and w_i of a chain, i = 0..L."""
    log_ratio, log_ceiling, is_dead = 0.0, 0.0, False
    log_ratios[0], log_ceilings[0], weights[0] = 0.0, 0.0, 1.0
    for depth in range(len(tokens)):
        p = np.float64(target[target_rows[depth], tokens[depth]])
        q = np.float64(draft[draft_rows[depth], tokens[depth]])
        # Dead behind a token that the target never emits, or a ratio of 0; logarithms of 0 are not taken.
        if p <= 0 or log_ratio == -math.inf:
            is_dead = True
        if is_dead:
            log_ratio = math.inf
        elif q <= 0:
            log_ratio = -math.inf
        else:
            log_ratio += math.log(q) - math.log(p)
        log_ceiling = min(log_ceiling, log_ratio)
        log_ratios[depth + 1], log_ceilings[depth + 1] = log_ratio, log_ceiling
        # A ratio of 0 is of a token that its draft law never gives: nothing is accepted there.
        is_impossible = is_dead or log_ratio == -math.inf
        weights[depth + 1] = 0.0 if is_impossible else math.exp(log_ceiling - log_ratio)


@compiled_for_cpu(**EXACT)
def _accepted(length, target, target_rows, draft, draft_rows, weights, uniforms):
    """The largest i with uniform_i < h_i; 0 where there is none."""
    width = target.shape[1]
    for depth in range(length, 0, -1):
        weight = weights[depth]
        accept = weight
        if depth < length:
            accept = 1.0
            if not weight >= 1:
                rows = target[target_rows[depth]], draft[draft_rows[depth]]
                surplus = sum_of(*rows, np.float32(weight), True, 0, width)
                accept = surplus / (surplus + 1 - weight)
        if uniforms[depth - 1] < accept:
            return depth
    return 0


@compiled_for_cpu(**EXACT)
def _score(stop, length, p, q, log_ratios, log_ceilings, number):
    """Uniform between the ceilings of the accepted prefix, and of the prefix with the next token appended."""
    upper = math.exp(log_ceilings[stop])
    lower = 0.0
    if stop < length and q > 0:
        lower = min(upper, math.exp(log_ratios[stop] + math.log(q) - math.log(p)))
    return lower + (upper - lower) * (1 - number)


@compiled_for_cpu(**EXACT)
def _race(
    tokens, lengths, requests, target, target_rows, draft, draft_rows, accepts, residuals, scores, verdict
):  # fmt: skip
    """Of a request's chains, which lie side by side, the first with the smallest score: [3, B] chain, length, token.

    Returns how many requests there are; of more than B, which the arrays have no room for, nothing is written.
    """
    num_chains, most = tokens.shape
    log_ratios, log_ceilings, weights = np.empty(most + 1), np.empty(most + 1), np.empty(most + 1)
    request, smallest = -1, math.inf
    for chain in range(num_chains):
        length = lengths[chain]
        rows, others = target_rows[chain], draft_rows[chain]
        _walk(tokens[chain, :length], target, rows, draft, others, log_ratios, log_ceilings, weights)
        stop = _accepted(length, target, rows, draft, others, weights, accepts[chain])
        law, drafted = target[rows[stop]], draft[others[min(stop, most - 1)]]
        token = draw_from(law, drafted, np.float32(weights[stop]), stop < length, residuals[chain])
        p, q = np.float64(law[token]), np.float64(drafted[token])
        score = _score(stop, length, p, q, log_ratios, log_ceilings, scores[chain])
        is_first = chain == 0 or requests[chain] != requests[chain - 1]
        if is_first:
            request += 1
        if (is_first or score < smallest) and request < verdict.shape[1]:
            smallest = score
            verdict[0, request], verdict[1, request], verdict[2, request] = chain, stop, token
    return request + 1


def race(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """`verify_bv_race`; of one chain a request, `verify_block`."""
    assert chains.shape is not None
    verdict_3B = torch.empty((3, chains.shape[0]), dtype=torch.int64, device=target.law_NV.device)
    operands: list[Tensor] = [
        *(chains.tokens_CL, chains.length_C, chains.request_C),
        *(target.law_NV, target.row_CX, chains.draft.law_NV, chains.draft.row_CX),
        *(noise.accept_CL, noise.residual_C, noise.score_C),
    ]
    count = _race(*(operand.contiguous().numpy() for operand in operands), verdict_3B.numpy())
    assert count == chains.shape[0], "the chains are not of as many requests as their shape says"
    return ChainVerdict(*verdict_3B)
