"""One pass of a decoder like Llama in one Numba function, on any number of cores.

The caller and its helpers (`shared_work.py`) run `_work` over one table of arrays, in phases: the
rows of a norm, blocks of columns of a product, K/V heads of a sequence in attention. Weights have
the types of `block_products.py` and `stored_words.py`, all else is float32, K/V are float32 or
bfloat16. `decoder.py` owns the arrays and calls `run`.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cpu.compiled import pass_table
from engine.cpu.compiled.attention_loops import attend
from engine.cpu.compiled.floats import FAST
from engine.cpu.compiled.head_phases import convolve, normalise
from engine.cpu.compiled.layer_loops import embed, norm, store, turn_and_store
from engine.cpu.compiled.pass_table import array1, array2, array3, array4, arrays_of_piece, put1, put2, table_at
from engine.cpu.compiled.product_phase import multiply
from engine.cpu.compiled.shared_work import c_function, call, claimed
from engine.cpu.compiled.shared_work import together as share
from engine.cpu.compiler import compiled_for_cpu

_ROWS = 8
"""Rows of a part of those phases that go row by row."""
LAYER_PHASES = 14
OTHER_PHASES = 7
"""Most phases of a layer (six are convolutions of heads), and outside of layers."""


@compiled_for_cpu(inline="always")
def _num_parts_of_rows(num_rows):
    return (num_rows + _ROWS - 1) // _ROWS


@compiled_for_cpu(**FAST)
def _write_rotation(position, frequencies, factor, cosines, sines):
    """Write cosines and sines of a row's rotation."""
    for number in range(len(frequencies)):
        angle = np.float32(position) * frequencies[number]
        cosines[number] = np.cos(angle) * factor
        sines[number] = np.sin(angle) * factor


@compiled_for_cpu(**FAST)
def _begin(address, phase, word_type, scale_type):
    """Write embeddings, normed states of the rows after them, and all rotations.

    If the first layer reads states, write its inputs in place of the embeddings.
    """
    table = table_at(address)
    num_rows = table[pass_table.ROTATION, 2]
    tokens = array1(table, pass_table.TOKENS, np.int64)
    positions = array1(table, pass_table.POSITIONS, np.int64)
    embedding, scales = arrays_of_piece(array3(table, pass_table.EMBEDDING, np.int64)[0, 0], word_type, scale_type)
    frequencies = array1(table, pass_table.FREQUENCIES, np.float32)
    constants = array1(table, pass_table.CONSTANTS, np.float32)
    hidden = array2(table, pass_table.HIDDEN, np.float32)
    rotation = array3(table, pass_table.ROTATION, np.float32)
    states = array2(table, pass_table.STATES, np.float32)
    entering = array2(table, pass_table.ENTERING, np.float32)
    norms = array2(table, pass_table.NORMS, np.float32)
    state_norm = norms[len(norms) - 1]
    eps = constants[0]
    rotation_factor = constants[2]
    embedding_factor = constants[3]
    normed_all = array2(table, pass_table.NORMED_ALL, np.float32)
    reads_states = entering.shape[1] > 0
    width = hidden.shape[1]
    for part in claimed(table[pass_table.COUNTERS, 0], phase, _num_parts_of_rows(num_rows)):
        for row in range(part * _ROWS, min(num_rows, (part + 1) * _ROWS)):
            _write_rotation(positions[row], frequencies, rotation_factor, rotation[0, row], rotation[1, row])
            if row >= len(hidden):
                norm(states[row - len(hidden), :width], state_norm, eps, normed_all[row])
                continue
            embed(tokens[row], embedding, scales, hidden[row])
            for column in range(width):
                hidden[row, column] *= embedding_factor
            if reads_states:
                norm(hidden[row], norms[0], eps, entering[row, :width])
                norm(states[row, :width], state_norm, eps, entering[row, width:])
                is_residual_normed = array1(table, pass_table.NORM_FLAGS, np.int64)[0]
                residual = entering[row, width:] if is_residual_normed else states[row, :width]
                for column in range(width):
                    hidden[row, column] = residual[column]


@compiled_for_cpu(**FAST)
def _store_tap(state, tap, tapped, slot):
    """Store a state at a place of the taps; -1 is none."""
    if tap >= 0:
        width = len(state)
        store(state, tapped[slot, tap * width : (tap + 1) * width])


@compiled_for_cpu(**FAST)
def _add_and_norm(address, phase, number, has_summand, kv_type):
    """Add the rows of a product to the hidden states if there is one, and normalise them.

    number: index of the norm, of two for each layer and the last one. Also store the states of
    taps: those that enter a layer, that leave the last layer, and after the last norm.
    """
    table = table_at(address)
    num_parts = _num_parts_of_rows(table[pass_table.HIDDEN, 1])
    hidden = array2(table, pass_table.HIDDEN, np.float32)
    normed = array2(table, pass_table.NORMED, np.float32)
    summand = array2(table, pass_table.SUMMAND, np.float32)
    slots = array1(table, pass_table.SLOTS, np.int64)
    taps = array1(table, pass_table.TAPS, np.int64)
    tapped = array2(table, pass_table.TAPPED, kv_type)
    eps = array1(table, pass_table.CONSTANTS, np.float32)[0]
    weight = array2(table, pass_table.NORMS, np.float32)[number]
    width = hidden.shape[1]
    enters_layer = number % 2 == 0  # or leaves the last one
    layer = number // 2
    last_layer = len(taps) - 2
    for part in claimed(table[pass_table.COUNTERS, 0], phase, num_parts):
        for row in range(part * _ROWS, min(len(hidden), (part + 1) * _ROWS)):
            if has_summand:
                for column in range(width):
                    hidden[row, column] += summand[row, column]
            norm(hidden[row], weight, eps, normed[row])
            if enters_layer:
                _store_tap(hidden[row], taps[layer], tapped, slots[row])
                if layer == last_layer:
                    _store_tap(normed[row], taps[layer + 1], tapped, slots[row])


@compiled_for_cpu(**FAST)
def _rotate(address, phase, layer, kv_type):
    """Rotate the queries and keys of all rows, and write keys and values to their slots."""
    table = table_at(address)
    num_parts = _num_parts_of_rows(table[pass_table.JOINED, 1])
    joined = array2(table, pass_table.JOINED, np.float32)
    rotation = array3(table, pass_table.ROTATION, np.float32)
    norms = array3(table, pass_table.HEAD_NORMS, np.float32)
    eps = array1(table, pass_table.CONSTANTS, np.float32)[0]
    keys = array4(table, pass_table.KEYS, kv_type)[layer]
    values = array4(table, pass_table.VALUES, kv_type)[layer]
    slots = array1(table, pass_table.SLOTS, np.int64)
    num_heads = table[pass_table.ATTENDED, 2] // keys.shape[2]
    has_norms = len(norms) > 0
    head_norms = norms[layer : layer + 1]
    for part in claimed(table[pass_table.COUNTERS, 0], phase, num_parts):
        for row in range(part * _ROWS, min(len(joined), (part + 1) * _ROWS)):
            turns = rotation[0, row], rotation[1, row]
            places = keys[slots[row]], values[slots[row]]
            turn_and_store(joined[row], num_heads, head_norms, has_norms, eps, turns, places)


@compiled_for_cpu(**FAST)
def _attend(address, phase, layer, kv_type):
    """Write the attention of all rows; a part is rows of a sequence, and heads of one K/V head."""
    table = table_at(address)
    parts = array2(table, pass_table.PARTS, np.int64)
    keys = array4(table, pass_table.KEYS, kv_type)[layer]
    values = array4(table, pass_table.VALUES, kv_type)[layer]
    scale = array1(table, pass_table.CONSTANTS, np.float32)[1]
    window = array1(table, pass_table.WINDOWS, np.int64)[layer]
    queries = array2(table, pass_table.JOINED, np.float32)
    attended = array2(table, pass_table.ATTENDED, np.float32)
    pages = array2(table, pass_table.PAGES, np.int32)
    node_positions = array2(table, pass_table.NODE_POSITIONS, np.int32)
    first_keys = array1(table, pass_table.FIRST_KEYS, np.int32)
    ends = array1(table, pass_table.ENDS, np.int32)
    num_keys = array1(table, pass_table.NUM_KEYS, np.int32)
    limits = array1(table, pass_table.LIMITS, np.int32)
    positions = array1(table, pass_table.POSITIONS, np.int64)
    visible_fields = array1(table, pass_table.VISIBLE_FIELDS, np.int64)
    visible_bits = array2(table, visible_fields[layer], np.int64)
    sizes = array1(table, pass_table.SIZES, np.int64)
    page_size, num_heads, heads_together = sizes[0], sizes[2], sizes[3]
    num_shared = num_heads // keys.shape[1]
    value_width = attended.shape[1] // num_heads
    parts_of_rows = num_heads // heads_together
    for part in claimed(table[pass_table.COUNTERS, 0], phase, len(parts) * parts_of_rows):
        rows_of_part = parts[part // parts_of_rows]
        sequence = rows_of_part[0]
        rows = rows_of_part[1], rows_of_part[2]
        first_head = part % parts_of_rows * heads_together
        heads = first_head // num_shared, first_head, heads_together, value_width
        text = pages[sequence], first_keys[sequence], ends[sequence], num_keys[sequence], node_positions[sequence]
        attend(
            queries, keys, values, heads, rows, scale, window, page_size, text, limits, positions, visible_bits,
            attended,
        )  # fmt: skip


@compiled_for_cpu(**FAST)
def _choose(address, phase):
    """Copy the wanted rows, and the states that leave them if the model reads states."""
    table = table_at(address)
    wanted = array1(table, pass_table.WANTED, np.int64)
    normed = array2(table, pass_table.NORMED, np.float32)
    chosen = array2(table, pass_table.CHOSEN, np.float32)
    hidden = array2(table, pass_table.HIDDEN, np.float32)
    leaving = array2(table, pass_table.LEAVING, np.float32)
    for _ in claimed(table[pass_table.COUNTERS, 0], phase, 1):
        for number in range(len(wanted)):
            for column in range(normed.shape[1]):
                chosen[number, column] = normed[wanted[number], column]
            if leaving.shape[1] > 0:
                source = normed if array1(table, pass_table.NORM_FLAGS, np.int64)[1] else hidden
                for column in range(leaving.shape[1]):
                    leaving[number, column] = source[wanted[number], column]


@compiled_for_cpu()
def _work(address):
    """Take part in all phases of the pass whose table is at an address.

    `phase` is the next phase whose counters are unused.
    """
    table = table_at(address)
    functions = array1(table, pass_table.FUNCTIONS, np.int64)
    num_layers = table[pass_table.O_PROJ, 1]
    num_entries = table[pass_table.ENTRY, 1]
    begin_function = functions[0]
    norm_function = functions[1]
    rotate_function = functions[2]
    attend_function = functions[3]
    phase = 0
    if table[pass_table.TARGET_STATES, 1] > 0:
        normalise(address, 0)
        multiply(address, 1, 0, pass_table.PROJECTION, pass_table.TARGET_STATES, pass_table.STATES)
        phase = 2
    call(begin_function, address, phase, 0, 0, 0, 0)
    phase += 1
    for layer in range(num_layers):
        if layer < num_entries:
            multiply(address, phase, 0, pass_table.ENTRY, pass_table.ENTERING, pass_table.JOINED)
        else:
            call(norm_function, address, phase, 2 * layer, layer > 0, 0, 0)
            phase = _convolve_first(address, phase + 1, 2 * layer)
            multiply(address, phase, layer - num_entries, pass_table.QKV, pass_table.NORMED_ALL, pass_table.JOINED)
        call(rotate_function, address, phase + 1, layer, 0, 0, 0)
        call(attend_function, address, phase + 2, layer, 0, 0, 0)
        multiply(address, phase + 3, layer, pass_table.O_PROJ, pass_table.ATTENDED, pass_table.SUMMAND)
        phase = _convolve_last(address, phase + 4, 2 * layer)
        call(norm_function, address, phase, 2 * layer + 1, 1, 0, 0)
        phase = _convolve_first(address, phase + 1, 2 * layer + 1)
        multiply(address, phase, layer, pass_table.GATE_UP, pass_table.NORMED, pass_table.INNER)
        multiply(address, phase + 1, layer, pass_table.DOWN, pass_table.GATED, pass_table.SUMMAND)
        phase = _convolve_last(address, phase + 2, 2 * layer + 1)
    call(norm_function, address, phase, 2 * num_layers, 1, 0, 0)
    _choose(address, phase + 1)
    multiply(address, phase + 2, 0, pass_table.LM_HEAD, pass_table.CHOSEN, pass_table.LOGITS)
    if table[pass_table.AFTER_LOGITS, 0] != 0:
        call(table[pass_table.AFTER_LOGITS, 0], address, phase + 3, 0, 0, 0, 0)


@compiled_for_cpu()
def _convolve_first(address, phase, number):
    """Convolve the normed rows, if the model has convolutions; return the next phase."""
    if table_at(address)[pass_table.KERNELS, 1] == 0:
        return phase
    multiply(address, phase, number, pass_table.KERNELS, pass_table.NORMED, pass_table.ROW_KERNELS)
    convolve(address, phase + 1, number, 0, pass_table.NORMED)
    return phase + 2


@compiled_for_cpu()
def _convolve_last(address, phase, number):
    """Convolve the summands of the states, if any; return the next phase."""
    if table_at(address)[pass_table.KERNELS, 1] == 0:
        return phase
    convolve(address, phase, number, 1, pass_table.SUMMAND)
    return phase + 1


@cache
def work():
    """Return the C function of a pass, which takes the address of a table."""
    return c_function(lambda address, _1, _2, _3, _4, _5: _work(address))


@cache
def beginning(word_type, scale_type):
    """Return the C function of the first phase, by numpy types of words and scales."""

    def begin(address, phase, _1, _2, _3, _4):
        _begin(address, phase, word_type, scale_type)

    return c_function(begin)


@cache
def functions_of_kv(kv_type):
    """Return C functions of the phases that read or write K/V of a numpy type."""

    def norm(address, phase, number, has_summand, _1, _2):
        _add_and_norm(address, phase, number, has_summand, kv_type)

    def rotate(address, phase, layer, _1, _2, _3):
        _rotate(address, phase, layer, kv_type)

    def attend(address, phase, layer, _1, _2, _3):
        _attend(address, phase, layer, kv_type)

    return c_function(norm), c_function(rotate), c_function(attend)


def functions_for(embedding: tuple[Any, Any], kv_type: Any) -> npt.NDArray[np.int64]:
    """Return the addresses of the functions of a pass, as the field `FUNCTIONS` has them.

    embedding: numpy types of the words and scales of embeddings; kv_type: of K/V.
    """
    functions = beginning(*embedding), *functions_of_kv(kv_type)
    return np.array([function.address for function in functions], dtype=np.int64)


@compiled_for_cpu(nogil=True)
def run(shared, function, table, after_logits, tokens, slots, wanted, parts, seen, positions, states, logits):
    """Run a pass: fill the table, and call `function` (address of `work`) on all cores.

    seen: `StepLayout.seen`; states: see `decoder.CpuDecoder.states_of`; after_logits: address of a
    function that runs after the logits as the last phase, or 0 (`draw_loop.py` draws there).
    Raises IndexError for a token after the last block of embeddings. Tokens in the padding of that
    block have embeddings of zeros.
    """
    num_embeddings = table[pass_table.EMBEDDING + 1, 2]  # columns of whole blocks, as of the bias
    for token in tokens:
        if token < 0 or token >= num_embeddings:
            raise IndexError("a token is outside the vocabulary")
    table[pass_table.AFTER_LOGITS, 0] = after_logits
    visible_bits, pages, first_keys, ends, num_keys, node_positions, limits = seen
    target_states, read, leaving = states
    put1(table, pass_table.TOKENS, tokens)
    put1(table, pass_table.SLOTS, slots)
    put1(table, pass_table.WANTED, wanted)
    put2(table, pass_table.PARTS, parts)
    put2(table, pass_table.VISIBLE_BITS, visible_bits)
    put2(table, pass_table.PAGES, pages)
    put1(table, pass_table.FIRST_KEYS, first_keys)
    put1(table, pass_table.ENDS, ends)
    put1(table, pass_table.NUM_KEYS, num_keys)
    put2(table, pass_table.NODE_POSITIONS, node_positions)
    put1(table, pass_table.LIMITS, limits)
    put1(table, pass_table.POSITIONS, positions)
    put2(table, pass_table.TARGET_STATES, target_states)
    put2(table, pass_table.STATES, read)
    put2(table, pass_table.LEAVING, leaving)
    put2(table, pass_table.LOGITS, logits)
    for field in pass_table.FIELDS_OF_TOKENS:
        table[field, 1] = len(tokens)
    table[pass_table.NORMED_ALL, 1] = len(slots)
    table[pass_table.JOINED, 1] = len(slots)
    table[pass_table.ROTATION, 2] = len(slots)
    table[pass_table.CHOSEN, 1] = len(wanted)
    array2(table, pass_table.COUNTERS, np.int64)[:] = 0
    cores = array1(table, pass_table.SIZES, np.int64)[1]
    share(shared, function, np.int64(table.ctypes.data), cores - 1)
