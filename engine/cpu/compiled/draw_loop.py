"""The drafting loop in Numba: passes over all levels, distributions and draws.

It serves draft models and heads that the CPU's decoder runs (`decoder.py`), and rows whose
distributions depend on logits, temperature and filters alone. The oracle of `draw_levels` is
`chains.draw_by_level`, which takes any rows: the same random numbers give the same tokens, to
the bit. `draw_below` draws after the pass of a head with a term. Its oracle is `OnePassDrafter`
with the head's sampler.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np

from engine.cpu.compiled import model_pass, pass_table
from engine.cpu.compiled.floats import EXACT
from engine.cpu.compiled.head_phases import multiply_term
from engine.cpu.compiled.pass_table import array1, array2, put1, put2, table_at
from engine.cpu.compiled.row_loops import draw_from, filtered_distribution, likeliest
from engine.cpu.compiled.shared_work import c_function, claimed
from engine.cpu.compiled.shared_work import together as share
from engine.cpu.compiler import compiled_for_cpu

_FIRST = pass_table.DRAW_FIELDS
_PROBS, _TEMPERATURES, _LEAST_LOGS, _TOP_KS, _TOP_PS, _UNIFORMS = range(_FIRST, _FIRST + 6)
_FIRST_CHAINS, _NUM_CHAINS, _LEADERS, _TOKENS, _TARGET_IDS, _SPREAD = range(_FIRST + 6, _FIRST + 12)
_BASE, _DRAFT_ROWS = range(_FIRST + 12, _FIRST + 14)
_LOGITS = pass_table.LOGITS
_TOKENS_OF_DRAWS, _FIRST_CHAINS_OF_DRAWS = 1, 7
"""Indices of these fields of `levels.Draws`."""


@compiled_for_cpu(**EXACT)
def _spread_logits(logits, target_ids, spread):
    """Write the logits of a head's vocabulary to the target's ids; others have none."""
    spread[:] = -np.inf
    for number in range(len(target_ids)):
        spread[target_ids[number]] = logits[number]


@compiled_for_cpu(**EXACT)
def _draw(address, phase):
    """Compute the distributions below a level's nodes, and draw the chains' tokens.

    A chain draws with its own number, unless an earlier one goes through the same child.
    """
    table = table_at(address)
    logits = array2(table, _LOGITS, np.float32)
    distributions = array2(table, _PROBS, np.float32)
    temperatures = array1(table, _TEMPERATURES, np.float32)
    least_logs = array1(table, _LEAST_LOGS, np.float32)
    top_ks = array1(table, _TOP_KS, np.int64)
    top_ps = array1(table, _TOP_PS, np.float32)
    uniforms = array1(table, _UNIFORMS, np.float64)
    leaders = array1(table, _LEADERS, np.int64)
    first_chains = array1(table, _FIRST_CHAINS, np.int64)
    num_chains = array1(table, _NUM_CHAINS, np.int64)
    tokens = array1(table, _TOKENS, np.int64)
    target_ids = array1(table, _TARGET_IDS, np.int64)
    spread = array2(table, _SPREAD, np.float32)
    for node in claimed(table[pass_table.COUNTERS, 0], phase, len(distributions)):
        distribution = distributions[node]
        node_logits = logits[node, : distributions.shape[1]]
        if len(target_ids) > 0:
            node_logits = spread[node]
            _spread_logits(logits[node], target_ids, node_logits)
        temperature = temperatures[node]
        is_greedy = temperature == 0
        most_likely = 0
        if is_greedy:
            most_likely, _ = likeliest(node_logits)
            distribution[:] = np.float32(0)
            distribution[most_likely] = np.float32(1)
        else:
            filtered_distribution(node_logits, temperature, least_logs[node], top_ks[node], top_ps[node], distribution)
        for chain in range(first_chains[node], first_chains[node] + num_chains[node]):
            if leaders[chain] != chain:
                tokens[chain] = tokens[leaders[chain]]
            elif is_greedy:
                tokens[chain] = most_likely
            else:
                tokens[chain] = draw_from(distribution, distribution, np.float32(1), False, uniforms[chain])


@cache
def draw():
    """`_draw` as the C function after a pass."""

    def after_logits(address, phase, _1, _2, _3, _4):
        _draw(address, phase)

    return c_function(after_logits)


@compiled_for_cpu()
def _put_draws(table, draws, level, drawn):
    """Write what `_draw` reads of a level into the table; drawn: slice of distributions."""
    distributions, tokens, temperatures, least_logs, top_ks, top_ps = draws[:6]
    uniforms, first_chains, num_chains, leaders, target_ids, spread = draws[6:]
    put2(table, _PROBS, distributions[drawn])
    put1(table, _TEMPERATURES, temperatures[drawn])
    put1(table, _LEAST_LOGS, least_logs[drawn])
    put1(table, _TOP_KS, top_ks[drawn])
    put1(table, _TOP_PS, top_ps[drawn])
    put1(table, _UNIFORMS, uniforms[level])
    put1(table, _FIRST_CHAINS, first_chains[drawn])
    put1(table, _NUM_CHAINS, num_chains[drawn])
    put1(table, _LEADERS, leaders[level])
    put1(table, _TOKENS, tokens[level])
    put1(table, _TARGET_IDS, target_ids)
    put2(table, _SPREAD, spread)


@compiled_for_cpu()
def _token_above(draws, level, distribution):
    """Return the token of the node above a distribution, which the level before has drawn."""
    tokens = draws[_TOKENS_OF_DRAWS]
    first_chains = draws[_FIRST_CHAINS_OF_DRAWS]
    return tokens[level - 1, first_chains[distribution]]


@compiled_for_cpu()
def _level_slice(ends, level):
    """Return the slice of a level, from the ends of all levels."""
    start = ends[level - 1] if level > 0 else 0
    return slice(start, ends[level])


@compiled_for_cpu()
def _seen_by(seen, rows, sequences):
    """Return `StepLayout.seen` of one pass; rows, sequences: slices of all passes."""
    visible_bits, pages, first_keys, text_ends, num_keys, node_positions, limits = seen
    texts = pages[sequences], first_keys[sequences], text_ends[sequences], num_keys[sequences]
    return visible_bits[rows], *texts, node_positions[sequences], limits[rows]


@compiled_for_cpu(nogil=True)
def draw_levels(
    shared, function, table, after_logits, ends, token_ids, slots, wanted, parts, seen, positions, draws, parents,
    entering_states, logits,
):  # fmt: skip
    """Draw all levels: fill distributions and tokens of `draws` (`levels.Draws`).

    after_logits: address of `draw`, which `model_pass.run` calls after each pass. ends: [L, 4] ends
    of each level's rows, sequences, parts and distributions in the arrays of all passes;
    token_ids: of all passes, input of the first pass and output for later passes; wanted: rows of
    the first pass whose logits are wanted (later passes want the logits of all rows).
    parents: [N] the node above each distribution, in its level. entering_states: of the first pass
    (`CpuDecoder.states_of`); each pass reads the states that left the pass before.
    """
    target_states, read, leaving = entering_states
    for level in range(len(ends)):
        rows = _level_slice(ends[:, 0], level)
        sequences = _level_slice(ends[:, 1], level)
        parts_of_pass = parts[_level_slice(ends[:, 2], level)]
        drawn = _level_slice(ends[:, 3], level)
        token_ids_of_pass = token_ids[rows]  # a view
        if level == 0:
            wanted_of_pass = wanted
        else:
            wanted_of_pass = np.arange(len(token_ids_of_pass))
            for row in range(len(token_ids_of_pass)):
                token_ids_of_pass[row] = _token_above(draws, level, drawn.start + row)
            read = leaving[parents[drawn]]
            target_states = target_states[:0]
        _put_draws(table, draws, level, drawn)
        visible = _seen_by(seen, rows, sequences)
        states = target_states, read, leaving[: len(wanted_of_pass)]
        model_pass.run(
            shared, function, table, after_logits, token_ids_of_pass, slots[rows], wanted_of_pass, parts_of_pass,
            visible, positions[rows], states, logits[: len(wanted_of_pass)],
        )  # fmt: skip


@compiled_for_cpu(**EXACT)
def _add_base(address, phase):
    """Add the logits of draft rows to the terms below nodes."""
    table = table_at(address)
    logits = array2(table, _LOGITS, np.float32)
    base = array2(table, _BASE, np.float32)
    draft_rows = array1(table, _DRAFT_ROWS, np.int64)
    for node in claimed(table[pass_table.COUNTERS, 0], phase, len(draft_rows)):
        for token in range(base.shape[1]):
            logits[node, token] += base[draft_rows[node], token]


@compiled_for_cpu()
def _below(address):
    """Take part in computing the logits of a level from terms and draft rows, and in drawing."""
    multiply_term(address)
    _add_base(address, 1)
    _draw(address, 2)


@cache
def below():
    """`_below` as a C function, which takes the address of a table."""
    return c_function(lambda address, _1, _2, _3, _4, _5: _below(address))


@compiled_for_cpu(nogil=True)
def draw_below(shared, function, table, ends, last_tokens, embedded, base, draft_rows, draws, logits):
    """Draw all levels from the logits of draft rows and terms of the tokens before: fill `draws`.

    function: address of `below`. ends: [L] end of each level's distributions; last_tokens: above
    the roots; embedded: [V, r] embeddings of tokens before; base: [S, draft vocabulary] logits of
    draft rows; draft_rows: [N] of each distribution. Other arguments are those of `draw_levels`.
    Raises IndexError for a token without an embedding.
    """
    counters = array2(table, pass_table.COUNTERS, np.int64)
    cores = array1(table, pass_table.SIZES, np.int64)[1]
    memory = np.empty((len(logits), embedded.shape[1]), np.float32)
    for level in range(len(ends)):
        drawn = _level_slice(ends, level)
        count = drawn.stop - drawn.start
        for number in range(count):
            previous = last_tokens[number] if level == 0 else _token_above(draws, level, drawn.start + number)
            if previous < 0 or previous >= len(embedded):
                raise IndexError("a token is outside the vocabulary")
            for column in range(embedded.shape[1]):
                memory[number, column] = embedded[previous, column]
        _put_draws(table, draws, level, drawn)
        put2(table, pass_table.MEMORY, memory[:count])
        put2(table, _LOGITS, logits[:count])
        put2(table, _BASE, base)
        put1(table, _DRAFT_ROWS, draft_rows[drawn])
        counters[:] = 0
        share(shared, function, np.int64(table.ctypes.data), cores - 1)
