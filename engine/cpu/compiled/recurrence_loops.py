"""Recurrences of recurrent layers, head by head: a head's states stay in the processor's cache."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np

from engine.cpu.compiled.floats import EXACT
from engine.cpu.compiler import compiled_for_cpu


@compiled_for_cpu(**EXACT)
def recur(inputs, query, scale, has_beta, states, steps, begins, first_states, output):
    """Fill output [T, H, V]; the arguments are described at `Kernels.recur`."""
    num_heads, key_dim, value_dim = states.shape[1:]
    group_size = num_heads // query.shape[1]
    num_nodes = np.int64(1)
    for node in steps[2]:
        num_nodes = max(num_nodes, node + 2)
    # The last state is the text's, so that -1 names it.
    scratch = np.empty((num_nodes, key_dim, value_dim), dtype=np.float32)
    added = np.empty(value_dim, dtype=np.float32)
    for number in range(len(first_states)):
        for head in range(num_heads):
            first = first_states[number]
            if first >= 0:
                scratch[num_nodes - 1] = states[first, head]
            else:
                scratch[num_nodes - 1] = 0
            for step in range(begins[number], begins[number + 1]):
                token, source, node, row, seat, cached = steps[:, step]
                state = scratch[node if node >= 0 else num_nodes - 1]
                before = scratch[source if source >= 0 else num_nodes - 1]
                _advance(inputs[token], scale[head], has_beta, head, (num_heads, group_size), before, state, added)
                if row >= 0:
                    _read(query[row, head // group_size], state, output[row, head])
                if seat >= 0:
                    states[seat, head] = state
                if cached >= 0:
                    states[cached, head] = state


@compiled_for_cpu(**EXACT)
def _advance(token, scale, has_beta, head, heads, before, state, added):
    """Compute the state after a token from the state before it; they may be the same."""
    num_heads, group_size = heads
    key_dim, value_dim = state.shape
    first_value = num_heads // group_size * key_dim
    first_rate = first_value + num_heads * value_dim
    first_beta = len(token) - num_heads
    num_rates = (len(token) - first_rate) // num_heads
    if has_beta:
        num_rates = (first_beta - first_rate) // num_heads
    key = token[head // group_size * key_dim :]
    value = token[first_value + head * value_dim :]
    rate = token[first_rate + head * num_rates :]
    num_scales = len(scale)
    for column in range(value_dim):
        added[column] = 0
    for line in range(key_dim):
        if line == 0 or num_rates > 1 or num_scales > 1:
            decay = np.float32(np.exp(scale[line if num_scales > 1 else 0] * rate[line if num_rates > 1 else 0]))
        part, old, new = key[line], before[line], state[line]
        for column in range(value_dim):
            new[column] = decay * old[column]
        if has_beta:
            for column in range(value_dim):
                added[column] += part * new[column]
    for column in range(value_dim):
        if has_beta:
            added[column] = token[first_beta + head] * (value[column] - added[column])
        else:
            added[column] = value[column]
    for line in range(key_dim):
        part, new = key[line], state[line]
        for column in range(value_dim):
            new[column] += part * added[column]


@compiled_for_cpu(**EXACT)
def _read(query, state, output):
    for column in range(state.shape[1]):
        output[column] = 0
    for line in range(state.shape[0]):
        part, row = query[line], state[line]
        for column in range(state.shape[1]):
            output[column] += part * row[column]
