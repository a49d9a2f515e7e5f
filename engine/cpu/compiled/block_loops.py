"""Block verification and the score race on a CPU, in Numba (`torch_block.py` has the algorithm).

`race` takes distributions; `decide` computes them from logits. The plain operations are the oracle.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math

import numpy as np

from engine.cpu.compiled.floats import EXACT
from engine.cpu.compiled.row_loops import draw_from, filtered_distribution, likeliest, sum_of
from engine.cpu.compiler import compiled_for_cpu


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
def _read(logits, filters, distribution):
    """Compute the distribution of a node, if the temperature is above 0; return (the largest logit, or NaN if any is
    NaN; at temperature 0 the most likely token).
    """
    temperature, least_log, top_k, top_p = filters
    if temperature > 0:
        return filtered_distribution(logits, temperature, least_log, top_k, top_p, distribution), 0
    token, most = likeliest(logits)
    return most, token


@compiled_for_cpu(**EXACT)
def _followed(parents, node_tokens, node, share_of, number):
    """Return the child to which the walk continues; the node itself if the walk ends there.

    parents, node_tokens: [nodes] of a request; share_of: the distribution at the node.
    """
    mass = 0.0
    for child in range(node + 1, len(parents)):
        if parents[child] == node:
            mass += np.float64(share_of[node_tokens[child]])
            if number < mass:
                return child
    return node


@compiled_for_cpu(**EXACT)
def _begins(node_rows, length, walked, end):
    """Whether a chain goes on below the walk, which took `walked` tokens to the row `end`."""
    return walked < length and node_rows[walked] == end


@compiled_for_cpu(**EXACT)
def _refuse(parents, node_tokens, node, distribution):
    """Set the probabilities of the node's children to 0, and scale the other tokens' probabilities to the sum 1; a
    distribution without any other token is unchanged (this has probability zero).
    """
    refused, total = np.zeros(len(parents), np.float32), 0.0
    for child in range(node + 1, len(parents)):
        if parents[child] == node:
            refused[child] = distribution[node_tokens[child]]
            distribution[node_tokens[child]] = np.float32(0)
    for column in range(len(distribution)):
        total += np.float64(distribution[column])
    if total > 0:
        for column in range(len(distribution)):
            distribution[column] = np.float32(np.float64(distribution[column]) / total)
        return
    for child in range(node + 1, len(parents)):
        if parents[child] == node:
            distribution[node_tokens[child]] = refused[child]


@compiled_for_cpu(**EXACT)
def decide(
    logits, temperatures, least_logs, top_ks, top_ps, starts, tokens, lengths, requests, node_rows, draft, draft_rows,
    numbers, parents, node_tokens, walk_numbers, verdict, largest,
):  # fmt: skip
    """Compute distributions and verdicts request by request: a request's distributions are read while they are cached.

    parents: [N] of nodes of text drafts, -1 for others; walk_numbers: [B, depths], without depths if there are no text
    drafts. verdict: [4, B] chain, length, token, node at which the walk through text drafts ended. largest: [N + M] of
    nodes and draft distributions, NaN for a row with NaN.
    """
    num_chains, most = tokens.shape
    widest = 0
    for request in range(len(temperatures)):
        widest = max(widest, starts[request + 1] - starts[request])
    room, rows = np.empty((3, most + 1)), np.empty(most + 1, np.int64)
    distributions, peaks = np.empty((widest, logits.shape[1]), np.float32), np.empty(widest, np.int64)
    is_known = np.empty(widest, np.bool_)
    chain = 0
    for request in range(len(temperatures)):
        first, count = starts[request], starts[request + 1] - starts[request]
        temperature = temperatures[request]
        filters = temperature, least_logs[request], top_ks[request], top_ps[request]
        own_parents, own_tokens = parents[first : first + count], node_tokens[first : first + count]
        for node in range(count):
            # Nodes of text drafts are read if the walk or a chain comes there.
            is_known[node] = own_parents[node] < 0
            largest[first + node] = 0.0
            if is_known[node]:
                largest[first + node], peaks[node] = _read(logits[first + node], filters, distributions[node])
        end, walked = 0, 0
        while walked < walk_numbers.shape[1]:
            if temperature > 0:
                child = _followed(own_parents, own_tokens, end, distributions[end], walk_numbers[request, walked])
            else:
                child = end
                for node in range(end + 1, count):
                    if own_parents[node] == end and own_tokens[node] == peaks[end]:
                        child = node
            if child == end:
                break
            end, walked = child, walked + 1
            if not is_known[end]:
                is_known[end] = True
                largest[first + end], peaks[end] = _read(logits[first + end], filters, distributions[end])
        if temperature > 0 and walk_numbers.shape[1] > 0:
            _refuse(own_parents, own_tokens, end, distributions[end])
        # Chains that begin with the walked path are verified below it; if there are none, an empty one is.
        last, lives = chain, walked == 0
        while last < num_chains and requests[last] == request:
            lives |= _begins(node_rows[last], lengths[last], walked, first + end)
            last += 1
        smallest = math.inf
        for number in range(chain, last if lives else chain + 1):
            if lives and walked > 0 and not _begins(node_rows[number], lengths[number], walked, first + end):
                continue
            begin = walked if lives else 0
            drafted = tokens[number, begin : lengths[number] if lives else 0]
            rows[0] = node_rows[number, walked] - first if lives else end
            for depth in range(1, len(drafted) + 1):
                node = node_rows[number, walked + depth] - first
                rows[depth] = node
                if not is_known[node]:
                    is_known[node] = True
                    largest[first + node], peaks[node] = _read(logits[first + node], filters, distributions[node])
            if temperature > 0:
                score, stop, token = _of_chain(
                    drafted, distributions, rows, draft, draft_rows[number, begin:],
                    numbers[1, number], numbers[3, number, 0], numbers[4, number, 0], room,
                )  # fmt: skip
            else:
                stop = _match(drafted, rows, peaks)
                score, token = -float(stop), peaks[rows[stop]]
            if smallest == math.inf or score < smallest:
                smallest = score
                verdict[0, request], verdict[1, request], verdict[2, request] = number, walked + stop, token
        verdict[3, request] = end
        chain = last
    # If one of a row's logits is NaN, all of its probabilities are.
    for row in range(len(draft)):
        largest[len(logits) + row] = draft[row, 0]
