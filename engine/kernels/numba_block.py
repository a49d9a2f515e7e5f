"""Block verification and the score race on a CPU, in Numba (`torch_block.py` has the algorithm).

`race` takes distributions; `decide` computes them from logits. The plain operations are the oracle.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math

import numpy as np

from engine.kernels import compiled_for_cpu
from engine.kernels.numba_numbers import EXACT
from engine.kernels.numba_rows import draw_from, filtered_distribution, likeliest, sum_of


@compiled_for_cpu(**EXACT)
def _walk(tokens, target, target_rows, draft, draft_rows, log_ratios, log_ceilings, weights):
    """Write log R_i, log u_i and w_i of a chain, i = 0..L, to the last three arguments."""
    log_ratio, log_ceiling, is_dead = 0.0, 0.0, False
    log_ratios[0], log_ceilings[0], weights[0] = 0.0, 0.0, 1.0
    for depth in range(len(tokens)):
        p = np.float64(target[target_rows[depth], tokens[depth]])
        q = np.float64(draft[draft_rows[depth], tokens[depth]])
        # A prefix is dead after a token that the target never emits, or after a ratio of 0. The logarithm of 0 is not
        # computed.
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
        # A ratio of 0 belongs to a token that its draft distribution never draws: nothing is accepted there.
        is_impossible = is_dead or log_ratio == -math.inf
        weights[depth + 1] = 0.0 if is_impossible else math.exp(log_ceiling - log_ratio)


@compiled_for_cpu(**EXACT)
def _accepted(length, target, target_rows, draft, draft_rows, weights, uniforms):
    """Return the largest i with uniform_i < h_i; 0 if there is none."""
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
    """Return a score that is uniform between the ceilings of the accepted prefix and of the prefix extended by the
    next token.
    """
    upper = math.exp(log_ceilings[stop])
    lower = 0.0
    if stop < length and q > 0:
        lower = min(upper, math.exp(log_ratios[stop] + math.log(q) - math.log(p)))
    return lower + (upper - lower) * (1 - number)


@compiled_for_cpu(**EXACT)
def _of_chain(tokens, target, rows, draft, others, accepts, residual, number, room):
    """Return (score, accepted length, next token) of one chain alone; room: [3, L + 1] of working memory."""
    length, most = len(tokens), len(others)
    log_ratios, log_ceilings, weights = room[0], room[1], room[2]
    _walk(tokens, target, rows, draft, others, log_ratios, log_ceilings, weights)
    stop = _accepted(length, target, rows, draft, others, weights, accepts)
    distribution = target[rows[stop]]
    drafted = draft[others[min(stop, most - 1)]] if most else distribution
    token = draw_from(distribution, drafted, np.float32(weights[stop]), stop < length, residual)
    p, q = np.float64(distribution[token]), np.float64(drafted[token])
    return _score(stop, length, p, q, log_ratios, log_ceilings, number), stop, token


@compiled_for_cpu(**EXACT)
def race(
    tokens, lengths, requests, target, target_rows, draft, draft_rows, accepts, residuals, scores, verdict
):  # fmt: skip
    """Return the number of requests, and write [3, B] chain, length, token of each: its first chain with the smallest
    score.

    The chains of a request are contiguous. If there are more than B requests, nothing is written.
    """
    num_chains, most = tokens.shape
    room = np.empty((3, most + 1))
    request, smallest = -1, math.inf
    for chain in range(num_chains):
        score, stop, token = _of_chain(
            tokens[chain, : lengths[chain]], target, target_rows[chain], draft, draft_rows[chain],
            accepts[chain], residuals[chain], scores[chain], room,
        )  # fmt: skip
        is_first = chain == 0 or requests[chain] != requests[chain - 1]
        if is_first:
            request += 1
        if (is_first or score < smallest) and request < verdict.shape[1]:
            smallest = score
            verdict[0, request], verdict[1, request], verdict[2, request] = chain, stop, token
    return request + 1


@compiled_for_cpu(**EXACT)
def _match(tokens, rows, likeliest_tokens):
    """Return how many of a chain's tokens are the most likely ones."""
    count = 0
    while count < len(tokens) and tokens[count] == likeliest_tokens[rows[count]]:
        count += 1
    return count


@compiled_for_cpu(**EXACT)
def decide(
    logits, temperatures, least_logs, top_ks, top_ps, starts, tokens, lengths, requests, node_rows, draft, draft_rows,
    numbers, verdict, largest,
):  # fmt: skip
    """Compute distributions and verdicts request by request: a request's distributions are read while they are cached.

    verdict: [3, B] chain, length, token. largest: [N + M] of nodes and draft distributions, NaN for a row with NaN.
    """
    num_chains, most = tokens.shape
    widest = 0
    for request in range(len(temperatures)):
        widest = max(widest, starts[request + 1] - starts[request])
    room, rows = np.empty((3, most + 1)), np.empty(most + 1, np.int64)
    distributions, peaks = np.empty((widest, logits.shape[1]), np.float32), np.empty(widest, np.int64)
    chain = 0
    for request in range(len(temperatures)):
        first, count = starts[request], starts[request + 1] - starts[request]
        temperature = temperatures[request]
        for node in range(count):
            if temperature > 0:
                largest[first + node] = filtered_distribution(
                    logits[first + node],
                    temperature,
                    least_logs[request],
                    top_ks[request],
                    top_ps[request],
                    distributions[node],
                )
            else:
                peaks[node], largest[first + node] = likeliest(logits[first + node])
        smallest = math.inf
        while chain < num_chains and requests[chain] == request:
            for depth in range(most + 1):
                rows[depth] = node_rows[chain, depth] - first
            drafted = tokens[chain, : lengths[chain]]
            if temperature > 0:
                score, stop, token = _of_chain(
                    drafted, distributions, rows, draft, draft_rows[chain],
                    numbers[1, chain], numbers[3, chain, 0], numbers[4, chain, 0], room,
                )  # fmt: skip
            else:
                stop = _match(drafted, rows, peaks)
                score, token = -float(stop), peaks[rows[stop]]
            if chain == 0 or requests[chain - 1] != request or score < smallest:
                smallest = score
                verdict[0, request], verdict[1, request], verdict[2, request] = chain, stop, token
            chain += 1
    # If one of a row's logits is NaN, all of its probabilities are.
    for row in range(len(draft)):
        largest[len(logits) + row] = draft[row, 0]
