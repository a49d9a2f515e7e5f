"""One pass of a decoder like Llama in one Numba function: from tokens to logits, on any number of cores.

The caller and its helpers (`shared_work.py`) run `_work` over one table of arrays, in phases: the rows of a norm,
blocks of columns of a product, K/V heads of a sequence in attention. Weights have the types of `block_products.py` and
`stored_words.py`, all else is float32, K/V are float32 or bfloat16. `decoder.py` owns the arrays and calls `run`.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cpu.compiled import pass_table as nt
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
LAYER_PHASES, OTHER_PHASES = 14, 7
"""Most phases of a layer, of which six are convolutions of heads, and of the rest of a pass."""


@compiled_for_cpu(inline="always")
def _num_parts_of_rows(num_rows):
    return (num_rows + _ROWS - 1) // _ROWS


@compiled_for_cpu(**FAST)
def _begin(address, phase, word_type, scale_type):
    """Write the embeddings of the tokens (for a layer that reads states: its inputs), the normed states of the rows
    after them, and cosines and sines of the rotation of all rows.
    """
    table = table_at(address)
    counters, num_rows = array2(table, nt.COUNTERS, np.int64), table[nt.ROTATION, 2]
    tokens, positions = array1(table, nt.TOKENS, np.int64), array1(table, nt.POSITIONS, np.int64)
    embedding, scales = arrays_of_piece(array3(table, nt.EMBEDDING, np.int64)[0, 0], word_type, scale_type)
    frequencies, constants = array1(table, nt.FREQUENCIES, np.float32), array1(table, nt.CONSTANTS, np.float32)
    hidden, rotation = array2(table, nt.HIDDEN, np.float32), array3(table, nt.ROTATION, np.float32)
    states, entering = array2(table, nt.STATES, np.float32), array2(table, nt.ENTERING, np.float32)
    norms, eps, factor = array2(table, nt.NORMS, np.float32), constants[0], constants[2]
    normed_all, width = array2(table, nt.NORMED_ALL, np.float32), hidden.shape[1]
    for part in claimed(counters, phase, _num_parts_of_rows(num_rows)):
        for row in range(part * _ROWS, min(num_rows, (part + 1) * _ROWS)):
            for number in range(len(frequencies)):
                angle = np.float32(positions[row]) * frequencies[number]
                rotation[0, row, number], rotation[1, row, number] = np.cos(angle) * factor, np.sin(angle) * factor
            if row >= len(hidden):
                norm(states[row - len(hidden), :width], norms[len(norms) - 1], eps, normed_all[row])
                continue
            embed(tokens[row], embedding, scales, hidden[row])
            for column in range(width):
                hidden[row, column] *= constants[3]
            if entering.shape[1] > 0:
                norm(hidden[row], norms[0], eps, entering[row, :width])
                norm(states[row, :width], norms[len(norms) - 1], eps, entering[row, width:])
                reads_normed = array1(table, nt.NORM_FLAGS, np.int64)[0]
                for column in range(width):
                    hidden[row, column] = entering[row, width + column] if reads_normed else states[row, column]


@compiled_for_cpu(**FAST)
def _add_and_norm(address, phase, number, has_summand, kv_type):
    """Add the rows of a product to the hidden states if there is one, and normalise them.

    number: index of the norm, of two for each layer and the last one. Also store the states of taps: those that enter a
    layer, that leave the last layer, and after the last norm.
    """
    table = table_at(address)
    counters, num_parts = array2(table, nt.COUNTERS, np.int64), _num_parts_of_rows(table[nt.HIDDEN, 1])
    hidden, normed = array2(table, nt.HIDDEN, np.float32), array2(table, nt.NORMED, np.float32)
    summand, slots = array2(table, nt.SUMMAND, np.float32), array1(table, nt.SLOTS, np.int64)
    taps, tapped = array1(table, nt.TAPS, np.int64), array2(table, nt.TAPPED, kv_type)
    eps, weight = array1(table, nt.CONSTANTS, np.float32)[0], array2(table, nt.NORMS, np.float32)[number]
    width, layer = hidden.shape[1], number // 2 if number % 2 == 0 else -1
    for part in claimed(counters, phase, num_parts):
        for row in range(part * _ROWS, min(len(hidden), (part + 1) * _ROWS)):
            if has_summand:
                for column in range(width):
                    hidden[row, column] += summand[row, column]
            norm(hidden[row], weight, eps, normed[row])
            if layer >= 0 and taps[layer] >= 0:
                store(hidden[row], tapped[slots[row], taps[layer] * width : (taps[layer] + 1) * width])
            if layer == len(taps) - 2 and taps[layer + 1] >= 0:
                store(normed[row], tapped[slots[row], taps[layer + 1] * width : (taps[layer + 1] + 1) * width])


@compiled_for_cpu(**FAST)
def _rotate(address, phase, layer, kv_type):
    """Rotate the queries and keys of all rows, and write keys and values to their slots."""
    table = table_at(address)
    counters, num_parts = array2(table, nt.COUNTERS, np.int64), _num_parts_of_rows(table[nt.JOINED, 1])
    joined, rotation = array2(table, nt.JOINED, np.float32), array3(table, nt.ROTATION, np.float32)
    norms, eps = array3(table, nt.HEAD_NORMS, np.float32), array1(table, nt.CONSTANTS, np.float32)[0]
    keys, values = array4(table, nt.KEYS, kv_type)[layer], array4(table, nt.VALUES, kv_type)[layer]
    slots, num_heads = array1(table, nt.SLOTS, np.int64), table[nt.ATTENDED, 2] // keys.shape[2]
    has_norms = len(norms) > 0
    head_norms = norms[layer : layer + 1]
    for part in claimed(counters, phase, num_parts):
        for row in range(part * _ROWS, min(len(joined), (part + 1) * _ROWS)):
            slot, cosines, sines = slots[row], rotation[0, row], rotation[1, row]
            turn_and_store(joined[row], num_heads, head_norms, has_norms, eps, cosines, sines, keys[slot], values[slot])


@compiled_for_cpu(**FAST)
def _attend(address, phase, layer, kv_type):
    """Write the attention of all rows, in parts of some rows of a sequence and one K/V head."""
    table = table_at(address)
    counters, parts = array2(table, nt.COUNTERS, np.int64), array2(table, nt.PARTS, np.int64)
    keys, values = array4(table, nt.KEYS, kv_type)[layer], array4(table, nt.VALUES, kv_type)[layer]
    scale, window = array1(table, nt.CONSTANTS, np.float32)[1], array1(table, nt.WINDOWS, np.int64)[layer]
    queries, attended = array2(table, nt.JOINED, np.float32), array2(table, nt.ATTENDED, np.float32)
    pages, node_positions = array2(table, nt.PAGES, np.int32), array2(table, nt.NODE_POSITIONS, np.int32)
    first_keys, ends = array1(table, nt.FIRST_KEYS, np.int32), array1(table, nt.ENDS, np.int32)
    num_keys, limits = array1(table, nt.NUM_KEYS, np.int32), array1(table, nt.LIMITS, np.int32)
    positions, words_of = array1(table, nt.POSITIONS, np.int64), array1(table, nt.WORDS_OF, np.int64)
    words = array2(table, words_of[layer], np.int64)
    page_size = array1(table, nt.SIZES, np.int64)[0]
    num_parts = len(parts) * keys.shape[1]
    for part in claimed(counters, phase, num_parts):
        of_part = part // keys.shape[1]
        sequence = parts[of_part, 0]
        rows, head = (parts[of_part, 1], parts[of_part, 2]), part % keys.shape[1]
        text = pages[sequence], first_keys[sequence], ends[sequence], num_keys[sequence], node_positions[sequence]
        attend(queries, keys, values, head, rows, scale, window, page_size, text, limits, positions, words, attended)


@compiled_for_cpu(**FAST)
def _choose(address, phase):
    """Copy the wanted rows, and the states that leave them if the model reads states."""
    table = table_at(address)
    counters, wanted = array2(table, nt.COUNTERS, np.int64), array1(table, nt.WANTED, np.int64)
    normed, chosen = array2(table, nt.NORMED, np.float32), array2(table, nt.CHOSEN, np.float32)
    hidden, leaving = array2(table, nt.HIDDEN, np.float32), array2(table, nt.LEAVING, np.float32)
    for _ in claimed(counters, phase, 1):
        for number in range(len(wanted)):
            for column in range(normed.shape[1]):
                chosen[number, column] = normed[wanted[number], column]
            if leaving.shape[1] > 0:
                source = normed if array1(table, nt.NORM_FLAGS, np.int64)[1] else hidden
                for column in range(leaving.shape[1]):
                    leaving[number, column] = source[wanted[number], column]


@compiled_for_cpu()
def _work(address):
    """Take part in all phases of the pass whose table is at an address."""
    table = table_at(address)
    functions, num_layers = array1(table, nt.FUNCTIONS, np.int64), table[nt.O_PROJ, 1]
    num_entries, convolves = table[nt.ENTRY, 1], table[nt.KERNELS, 1] > 0
    begin, norm, rotate, attend = functions[0], functions[1], functions[2], functions[3]
    phase = 0
    if table[nt.TARGET_STATES, 1] > 0:
        normalise(address, 0)
        multiply(address, 1, 0, nt.PROJECTION, nt.TARGET_STATES, nt.STATES)
        phase = 2
    call(begin, address, phase, 0, 0, 0, 0)
    phase += 1
    for layer in range(num_layers):
        if layer < num_entries:
            multiply(address, phase + 1, 0, nt.ENTRY, nt.ENTERING, nt.JOINED)
        else:
            call(norm, address, phase, 2 * layer, layer > 0, 0, 0)
            phase = _convolve_first(address, phase, 2 * layer) if convolves else phase
            multiply(address, phase + 1, layer - num_entries, nt.QKV, nt.NORMED_ALL, nt.JOINED)
        call(rotate, address, phase + 2, layer, 0, 0, 0)
        call(attend, address, phase + 3, layer, 0, 0, 0)
        multiply(address, phase + 4, layer, nt.O_PROJ, nt.ATTENDED, nt.SUMMAND)
        phase = _convolve_last(address, phase + 5, 2 * layer) if convolves else phase + 5
        call(norm, address, phase, 2 * layer + 1, 1, 0, 0)
        phase = _convolve_first(address, phase, 2 * layer + 1) if convolves else phase
        multiply(address, phase + 1, layer, nt.GATE_UP, nt.NORMED, nt.INNER)
        multiply(address, phase + 2, layer, nt.DOWN, nt.GATED, nt.SUMMAND)
        phase = _convolve_last(address, phase + 3, 2 * layer + 1) if convolves else phase + 3
    call(norm, address, phase, 2 * num_layers, 1, 0, 0)
    _choose(address, phase + 1)
    multiply(address, phase + 2, 0, nt.LM_HEAD, nt.CHOSEN, nt.LOGITS)
    if table[nt.AFTER_LOGITS, 0] != 0:
        call(table[nt.AFTER_LOGITS, 0], address, phase + 3, 0, 0, 0, 0)


@compiled_for_cpu()
def _convolve_first(address, phase, number):
    """Compute the kernels of a convolution and convolve the normed rows; return the last phase."""
    multiply(address, phase + 1, number, nt.KERNELS, nt.NORMED, nt.OWN_KERNELS)
    convolve(address, phase + 2, number, 0, nt.NORMED)
    return phase + 2


@compiled_for_cpu()
def _convolve_last(address, phase, number):
    """Convolve what a part of a layer adds to the hidden states; return the next phase."""
    convolve(address, phase, number, 1, nt.SUMMAND)
    return phase + 1


@cache
def work():
    """Return the C function of a pass, which takes the address of a table."""
    return c_function(lambda address, _1, _2, _3, _4, _5: _work(address))


@cache
def beginning(word_type, scale_type):
    """Return the C function of the first phase, for embeddings of numpy types of words and scales."""

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
    return np.array([one.address for one in (beginning(*embedding), *functions_of_kv(kv_type))], dtype=np.int64)


@compiled_for_cpu(nogil=True)
def run(shared, function, table, after_logits, tokens, slots, wanted, parts, seen, positions, states, logits):
    """Run a pass: write its arrays into the table and call `function`, the address of `work`, with all cores.

    seen: `StepLayout.seen`; states: see `decoder.CpuDecoder.states_of`; after_logits: address of a function that
    runs after the logits as the last phase, or 0 (`cpu/compiled/draw_loop.py` draws there). Raises IndexError for a
    token without an embedding.
    """
    for token in tokens:
        if token < 0 or token >= table[nt.EMBEDDING + 1, 2]:
            raise IndexError("a token is outside the vocabulary")
    table[nt.AFTER_LOGITS, 0] = after_logits
    words, pages, first_keys, ends, num_keys, node_positions, limits = seen
    target_states, read, leaving = states
    put1(table, nt.TOKENS, tokens)
    put1(table, nt.SLOTS, slots)
    put1(table, nt.WANTED, wanted)
    put2(table, nt.PARTS, parts)
    put2(table, nt.WORDS, words)
    put2(table, nt.PAGES, pages)
    put1(table, nt.FIRST_KEYS, first_keys)
    put1(table, nt.ENDS, ends)
    put1(table, nt.NUM_KEYS, num_keys)
    put2(table, nt.NODE_POSITIONS, node_positions)
    put1(table, nt.LIMITS, limits)
    put1(table, nt.POSITIONS, positions)
    put2(table, nt.TARGET_STATES, target_states)
    put2(table, nt.STATES, read)
    put2(table, nt.LEAVING, leaving)
    put2(table, nt.LOGITS, logits)
    for field in (nt.HIDDEN, nt.NORMED, nt.ATTENDED, nt.SUMMAND, nt.INNER, nt.GATED, nt.ENTERING, nt.OWN_KERNELS):
        table[field, 1] = len(tokens)
    table[nt.NORMED_ALL, 1] = table[nt.JOINED, 1] = table[nt.ROTATION, 2] = len(slots)
    table[nt.CHOSEN, 1] = len(wanted)
    array2(table, nt.COUNTERS, np.int64)[:] = 0
    cores = array1(table, nt.SIZES, np.int64)[1]
    share(shared, function, np.int64(table.ctypes.data), cores - 1)
