"""The drafting loop in Numba: passes over all levels, distributions below their nodes, and draws, in one call.

For draft models and heads that the CPU's decoder runs (`cpu_decoder.py`), and rows whose distributions depend on
logits, temperature and filters alone.
`chains.draw_levels`, which takes any rows, is the oracle: the same numbers give the same tokens, to the bit.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np

from engine.kernels import compiled_for_cpu
from engine.kernels.numba_numbers import EXACT
from engine.kernels.numba_rows import draw_from, filtered_distribution, likeliest
from engine.models import numba_decoder, numba_table
from engine.models.numba_decoder import c_function
from engine.models.numba_table import array1, array2, put1, put2, table_at
from engine.models.numba_work import claim, finish

_LAWS, _TEMPERATURES, _LEAST_LOGS, _TOP_KS, _TOP_PS, _UNIFORMS = range(numba_table.OWN, numba_table.OWN + 6)
_FIRST_CHAINS, _NUM_CHAINS, _LEADERS, _TOKENS, _TARGET_IDS, _SPREAD = range(numba_table.OWN + 6, numba_table.OWN + 12)
_COUNTERS, _LOGITS = numba_table.COUNTERS, numba_table.LOGITS


@compiled_for_cpu(**EXACT)
def _draw(address, phase):
    """Compute the distribution below each node of a level, and draw the tokens of the chains through it.

    A chain draws with its own random number, unless an earlier chain goes through the same child: then it takes that
    chain's token.
    """
    table = table_at(address)
    counters, logits = array2(table, _COUNTERS, np.int64), array2(table, _LOGITS, np.float32)
    distributions, temperatures = array2(table, _LAWS, np.float32), array1(table, _TEMPERATURES, np.float32)
    least_logs, top_ks = array1(table, _LEAST_LOGS, np.float32), array1(table, _TOP_KS, np.int64)
    top_ps = array1(table, _TOP_PS, np.float32)
    uniforms, leaders = array1(table, _UNIFORMS, np.float64), array1(table, _LEADERS, np.int64)
    first_chains, num_chains = array1(table, _FIRST_CHAINS, np.int64), array1(table, _NUM_CHAINS, np.int64)
    tokens, target_ids = array1(table, _TOKENS, np.int64), array1(table, _TARGET_IDS, np.int64)
    spread = array2(table, _SPREAD, np.float32)
    count, node = 0, claim(counters, phase, len(distributions))
    while node >= 0:
        distribution, of_node = distributions[node], logits[node, : distributions.shape[1]]
        if len(target_ids) > 0:
            of_node = spread[node]
            of_node[:] = -np.inf
            for number in range(len(target_ids)):
                of_node[target_ids[number]] = logits[node, number]
        is_greedy, most_likely = temperatures[node] == 0, 0
        if is_greedy:
            most_likely, _ = likeliest(of_node)
            distribution[:] = np.float32(0)
            distribution[most_likely] = np.float32(1)
        else:
            filtered_distribution(
                of_node, temperatures[node], least_logs[node], top_ks[node], top_ps[node], distribution
            )
        for chain in range(first_chains[node], first_chains[node] + num_chains[node]):
            if leaders[chain] != chain:
                tokens[chain] = tokens[leaders[chain]]
            elif is_greedy:
                tokens[chain] = most_likely
            else:
                tokens[chain] = draw_from(distribution, distribution, np.float32(1), False, uniforms[chain])
        count, node = count + 1, claim(counters, phase, len(distributions))
    finish(counters, phase, count, len(distributions))


@cache
def draw():
    """`_draw` as the C function after a pass."""

    def after_logits(address, phase, _1, _2, _3, _4):
        _draw(address, phase)

    return c_function(after_logits, 6)


@compiled_for_cpu(nogil=True)
def draw_levels(
    shared,
    function,
    table,
    after_logits,
    ends,
    known_tokens,
    slots,
    wanted,
    parts,
    words,
    pages,
    first_keys,
    text_ends,
    num_keys,
    node_positions,
    limits,
    positions,
    temperatures,
    least_logs,
    top_ks,
    top_ps,
    uniforms,
    first_chains,
    num_chains,
    leaders,
    parents,
    states,
    leaving,
    target_ids,
    spread,
    logits,
    distributions,
    tokens,
):
    """Draw all levels: fill `distributions` [N, V] and `tokens` [L, C].

    after_logits: address of `draw`, which `numba_decoder.run` calls after each pass. ends: [L, 4] ends of each level's
    rows, sequences, parts and distributions among those of all passes; wanted: rows of the first pass whose logits are
    wanted, in the later ones all are. uniforms, leaders: [L, C]. parents: [N] the node above each distribution, in its
    level. states: [T, D] input of the first pass's rows, of width 0 if the model reads none; leaving: working memory
    for the states that a pass returns, which the next one reads. target_ids: the target's id of each token in a head's
    own vocabulary, empty if the vocabularies are equal; spread: working memory for such logits over the target's.
    """
    first_row, first_sequence, first_part, first_distribution = 0, 0, 0, 0
    for level in range(len(ends)):
        end_row, end_sequence, end_part, end_distribution = (
            ends[level, 0],
            ends[level, 1],
            ends[level, 2],
            ends[level, 3],
        )
        entering = known_tokens[first_row:end_row]
        chosen = wanted
        if level > 0:
            chosen = np.arange(end_row - first_row)
            for number in range(end_row - first_row):
                entering[number] = tokens[level - 1, first_chains[first_distribution + number]]
            states = leaving[parents[first_distribution:end_distribution]]
        put2(table, _LAWS, distributions[first_distribution:end_distribution])
        put1(table, _TEMPERATURES, temperatures[first_distribution:end_distribution])
        put1(table, _LEAST_LOGS, least_logs[first_distribution:end_distribution])
        put1(table, _TOP_KS, top_ks[first_distribution:end_distribution])
        put1(table, _TOP_PS, top_ps[first_distribution:end_distribution])
        put1(table, _UNIFORMS, uniforms[level])
        put1(table, _FIRST_CHAINS, first_chains[first_distribution:end_distribution])
        put1(table, _NUM_CHAINS, num_chains[first_distribution:end_distribution])
        put1(table, _LEADERS, leaders[level])
        put1(table, _TOKENS, tokens[level])
        put1(table, _TARGET_IDS, target_ids)
        put2(table, _SPREAD, spread)
        numba_decoder.run(
            shared,
            function,
            table,
            after_logits,
            entering,
            slots[first_row:end_row],
            chosen,
            parts[first_part:end_part],
            words[first_row:end_row],
            pages[first_sequence:end_sequence],
            first_keys[first_sequence:end_sequence],
            text_ends[first_sequence:end_sequence],
            num_keys[first_sequence:end_sequence],
            node_positions[first_sequence:end_sequence],
            limits[first_row:end_row],
            positions[first_row:end_row],
            states,
            leaving[: len(chosen)],
            logits[: len(chosen)],
        )
        first_row, first_sequence, first_part, first_distribution = end_row, end_sequence, end_part, end_distribution
