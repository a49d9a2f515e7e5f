"""Block verification and the score race on a CPU, in Numba (`torch_block.py` has the algorithm).

`race` takes distributions; `decide` computes them from logits. The plain operations are the oracle.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from engine.cpu.compiled.floats import EXACT
from engine.cpu.compiled.row_loops import draw_from, filtered_distribution, likeliest, sum_of
from engine.cpu.compiler import compiled_for_cpu

_ACCEPT, _RESIDUAL, _SCORE = 1, 3, 4
"""Indices, on the first axis of `drafting.numbers.draw_numbers`, of the numbers for a race."""


@compiled_for_cpu(**EXACT)
def _weigh(tokens, target, target_rows, draft, draft_rows, log_ratios, log_ceilings, weights):
    """Write log R_i, log u_i and w_i of a chain, i = 0..L, to the last three arguments."""
    log_ratio, log_ceiling = 0.0, 0.0
    is_dead = False
    log_ratios[0] = 0.0
    log_ceilings[0] = 0.0
    weights[0] = 1.0
    for depth in range(len(tokens)):
        p = np.float64(target[target_rows[depth], tokens[depth]])
        q = np.float64(draft[draft_rows[depth], tokens[depth]])
        # A prefix is dead after a token that the target never emits, or after a ratio of 0. The
        # logarithm of 0 is not computed.
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
        # A ratio of 0 belongs to a token that its draft distribution never draws: nothing is
        # accepted there.
        is_impossible = is_dead or log_ratio == -math.inf
        weights[depth + 1] = 0.0 if is_impossible else math.exp(log_ceiling - log_ratio)


@compiled_for_cpu(**EXACT)
def _accepted(length, target, target_rows, draft, draft_rows, weights, accept_uniforms):
    """Return the largest i whose number is below h_i; 0 if there is none."""
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
        if accept_uniforms[depth - 1] < accept:
            return depth
    return 0


@compiled_for_cpu(**EXACT)
def _score(stop, length, p, q, log_ratios, log_ceilings, uniform):
    """Return a score, uniform from the ceiling with the next token to that without it."""
    upper = math.exp(log_ceilings[stop])
    lower = 0.0
    if stop < length and q > 0:
        lower = min(upper, math.exp(log_ratios[stop] + math.log(q) - math.log(p)))
    return lower + (upper - lower) * (1 - uniform)


@compiled_for_cpu(**EXACT)
def _verify_chain(tokens, target, rows, draft, draft_rows, uniforms, room):
    """Return (score, accepted length, next token) of a chain.

    rows, draft_rows: of the distributions along the chain; uniforms: the chain's random numbers for
    acceptance (one for each depth), residual and score; room: [3, L + 1] of working memory.
    """
    accept_uniforms, residual_uniform, score_uniform = uniforms
    length = len(tokens)
    most = len(draft_rows)
    log_ratios = room[0]
    log_ceilings = room[1]
    weights = room[2]
    _weigh(tokens, target, rows, draft, draft_rows, log_ratios, log_ceilings, weights)
    stop = _accepted(length, target, rows, draft, draft_rows, weights, accept_uniforms)
    distribution = target[rows[stop]]
    drafted = draft[draft_rows[min(stop, most - 1)]] if most else distribution
    token = draw_from(distribution, drafted, np.float32(weights[stop]), stop < length, residual_uniform)
    p, q = np.float64(distribution[token]), np.float64(drafted[token])
    return _score(stop, length, p, q, log_ratios, log_ceilings, score_uniform), stop, token


@compiled_for_cpu(**EXACT)
def race(
    tokens, lengths, requests, target, target_rows, draft, draft_rows, accepts, residuals, scores, verdict
):  # fmt: skip
    """Return the number of requests, and write [3, B] chain, length, token of each request.

    The chain is the first with the smallest score. The chains of a request are contiguous. Requests
    after the first B are counted and not written.
    """
    num_chains, most = tokens.shape
    room = np.empty((3, most + 1))
    request = -1
    smallest = math.inf
    for chain in range(num_chains):
        drafted = tokens[chain, : lengths[chain]]
        score, stop, token = _verify_chain(
            drafted, target, target_rows[chain], draft, draft_rows[chain],
            (accepts[chain], residuals[chain], scores[chain]), room,
        )  # fmt: skip
        is_first = chain == 0 or requests[chain] != requests[chain - 1]
        if is_first:
            request += 1
        if (is_first or score < smallest) and request < verdict.shape[1]:
            smallest = score
            verdict[0, request] = chain
            verdict[1, request] = stop
            verdict[2, request] = token
    return request + 1


@compiled_for_cpu(**EXACT)
def _match(tokens, rows, likeliest_tokens):
    """Return the number of a chain's tokens, from the first on, that are the most likely tokens."""
    count = 0
    while count < len(tokens) and tokens[count] == likeliest_tokens[rows[count]]:
        count += 1
    return count


class _Nodes(NamedTuple):
    """Nodes of a request, and results of reading their logits."""

    logits: Any  # [nodes, V]
    parents: Any  # [nodes] for nodes of text drafts, -1 for other nodes
    tokens: Any
    # [nodes] output: largest logit, NaN if any logit is NaN, 0 if the logits were not read.
    largest: Any
    distributions: Any
    peaks: Any  # [nodes] most likely token, at temperature 0
    is_known: Any  # [nodes] whether the logits were read


@compiled_for_cpu(**EXACT)
def _read_node(nodes, filters, node):
    """Compute a node's distribution, or at temperature 0 its most likely token, once."""
    if nodes.is_known[node]:
        return
    nodes.is_known[node] = True
    logits = nodes.logits[node]
    distribution = nodes.distributions[node]
    temperature, least_log, top_k, top_p = filters
    if temperature > 0:
        nodes.largest[node] = filtered_distribution(logits, temperature, least_log, top_k, top_p, distribution)
    else:
        nodes.peaks[node], nodes.largest[node] = likeliest(logits)


@compiled_for_cpu(**EXACT)
def _read_all(nodes, filters):
    """Read the logits of all nodes but those of text drafts, which are read on demand."""
    for node in range(len(nodes.logits)):
        nodes.is_known[node] = False
        nodes.largest[node] = 0.0
        if nodes.parents[node] < 0:
            _read_node(nodes, filters, node)


@compiled_for_cpu(**EXACT)
def _likeliest_child(nodes, node):
    """Return the child with the most likely token; the node itself if there is none."""
    likeliest_child = node
    for child in range(node + 1, len(nodes.parents)):
        if nodes.parents[child] == node and nodes.tokens[child] == nodes.peaks[node]:
            likeliest_child = child
    return likeliest_child


@compiled_for_cpu(**EXACT)
def _next_child(nodes, node, temperature, uniform):
    """Return the child to which the walk continues; the node itself if the walk ends there."""
    if temperature == 0:
        return _likeliest_child(nodes, node)
    mass = 0.0
    for child in range(node + 1, len(nodes.parents)):
        if nodes.parents[child] == node:
            mass += np.float64(nodes.distributions[node, nodes.tokens[child]])
            if uniform < mass:
                return child
    return node


@compiled_for_cpu(**EXACT)
def _walk(nodes, filters, uniforms):
    """Walk down the text drafts of a request; return (the node at which the walk ends, its depth).

    uniforms: [depths] random numbers.
    """
    end, walked = 0, 0
    while walked < len(uniforms):
        child = _next_child(nodes, end, filters[0], uniforms[walked])
        if child == end:
            break
        end = child
        walked += 1
        _read_node(nodes, filters, end)
    return end, walked


@compiled_for_cpu(**EXACT)
def _begins(node_rows, length, walked, end):
    """Whether a chain goes on below the walk, which took `walked` tokens to the row `end`."""
    return walked < length and node_rows[walked] == end


@compiled_for_cpu(**EXACT)
def _has_children(parents, node):
    """Whether a text draft continues at the node."""
    child = node + 1
    while child < len(parents) and parents[child] != node:
        child += 1
    return child < len(parents)


@compiled_for_cpu(**EXACT)
def _refuse(parents, node_tokens, node, distribution):
    """Set the children's probabilities to 0, and scale the others to the sum 1.

    A distribution without any other token is unchanged (this has probability zero), and so is that
    of a node without children, in every bit.
    """
    if not _has_children(parents, node):
        return
    refused = np.zeros(len(parents), np.float32)
    total = 0.0
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
def _verified(drafted, nodes, rows, draft, draft_rows, uniforms, chain, temperature, room):
    """Return (score, accepted length, next token) of a chain below the walk.

    uniforms: as in `decide`; chain: its index in them; see `_verify_chain` for the other arguments.
    """
    if temperature > 0:
        return _verify_chain(
            drafted, nodes.distributions, rows, draft, draft_rows,
            (uniforms[_ACCEPT, chain], uniforms[_RESIDUAL, chain, 0], uniforms[_SCORE, chain, 0]), room,
        )  # fmt: skip
    stop = _match(drafted, rows, nodes.peaks)
    return -float(stop), stop, nodes.peaks[rows[stop]]


@compiled_for_cpu(**EXACT)
def decide(
    logits, temperatures, least_logs, top_ks, top_ps, starts, tokens, lengths, requests, node_rows, draft, draft_rows,
    uniforms, parents, node_tokens, walk_uniforms, verdict, largest,
):  # fmt: skip
    """Compute distributions and verdicts by request, so that distributions stay in caches.

    A request first walks through its text drafts; then its chains that begin with the walked path
    are verified below it. uniforms: [purposes, C, L] random numbers; parents: [N] for nodes of text
    drafts, -1 for other nodes; walk_uniforms: [B, depths], without depths if there are no text
    drafts. verdict: output, [4, B] chain, length, token, node at which the walk ended. largest:
    output, [N + M] of nodes and draft distributions, NaN for a row with NaN, 0 for a node of a text
    draft that was not read.
    """
    widest = 0
    for request in range(len(temperatures)):
        widest = max(widest, starts[request + 1] - starts[request])
    most = tokens.shape[1]
    room = np.empty((3, most + 1))
    rows = np.empty(most + 1, np.int64)
    distributions = np.empty((widest, logits.shape[1]), np.float32)
    peaks = np.empty(widest, np.int64)
    is_known = np.empty(widest, np.bool_)
    first_chain = 0
    for request in range(len(temperatures)):
        first = starts[request]
        last = starts[request + 1]
        temperature = temperatures[request]
        filters = temperature, least_logs[request], top_ks[request], top_ps[request]
        nodes = _Nodes(
            logits[first:last], parents[first:last], node_tokens[first:last], largest[first:last],
            distributions, peaks, is_known,
        )  # fmt: skip
        _read_all(nodes, filters)
        end, walked = _walk(nodes, filters, walk_uniforms[request])
        if temperature > 0:
            _refuse(nodes.parents, nodes.tokens, end, distributions[end])
        verdict[3, request] = end
        end_chain = first_chain
        while end_chain < len(requests) and requests[end_chain] == request:
            end_chain += 1
        has_winner = False
        smallest = math.inf
        for chain in range(first_chain, end_chain):
            if walked > 0 and not _begins(node_rows[chain], lengths[chain], walked, first + end):
                continue
            drafted = tokens[chain, walked : lengths[chain]]  # the walk accepted the tokens before
            for depth in range(len(drafted) + 1):
                node = node_rows[chain, walked + depth] - first
                rows[depth] = node
                _read_node(nodes, filters, node)
            score, stop, token = _verified(
                drafted, nodes, rows, draft, draft_rows[chain, walked:], uniforms, chain, temperature, room
            )
            if not has_winner or score < smallest:
                has_winner = True
                smallest = score
                verdict[0, request] = chain
                verdict[1, request] = walked + stop
                verdict[2, request] = token
        if not has_winner:  # no chain goes on below the walk: an empty chain is verified
            rows[0] = end
            _, _, token = _verified(
                tokens[first_chain, :0], nodes, rows, draft, draft_rows[first_chain], uniforms, first_chain,
                temperature, room,
            )  # fmt: skip
            verdict[0, request] = first_chain
            verdict[1, request] = walked
            verdict[2, request] = token
        first_chain = end_chain
    # If one of a row's logits is NaN, all of its probabilities are.
    for row in range(len(draft)):
        largest[len(logits) + row] = draft[row, 0]
