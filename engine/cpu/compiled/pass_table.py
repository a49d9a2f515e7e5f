"""Table of a pass: addresses and sizes of the arrays that the decoder uses.

The C functions of a pass take the address of a table, so helper threads find all data there.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import carray

from engine.cpu.compiled.shared_work import pointer_to
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.compiler import compiled_for_cpu

# Fields of the table (its rows), for a model with L layers. A product has two fields: its pieces
# [L, P, `PIECE`], then the bias [L, N]. The products of the embedding and `lm_head` have L = 1, and
# the embedding has one piece. If the first layer reads states, `ENTRY` has q, k and v of
# [embedding, state] (L = 1, K = 2 D), and `QKV` those of the other layers. Heads alone have
# `PROJECTION` of the target's states (L = 1), `KERNELS` of convolutions (2 L), and `TERM`, from the
# token before to what it adds to logits (L = 1, `draw_loop.py`).
EMBEDDING, QKV, O_PROJ, GATE_UP, DOWN, LM_HEAD, ENTRY, PROJECTION, KERNELS, TERM = range(0, 20, 2)
NORMS = 20  # [2 L + 1, D], and after them the norm of the states that are read
HEAD_NORMS = 21  # [L, 2, head] norms of queries and keys, or [0, 2, head]
FREQUENCIES = 22  # [head / 2] radians by which a position rotates
CONSTANTS = 23  # epsilon, scale of scores, factor of cosines and sines, factor of embeddings
WINDOWS = 24  # [L] in positions, 0 for none
KEYS = 25  # [L, slots, H_kv, head]
VALUES = 26
# Working arrays of T rows (see `model_pass._work`), and [phases, `PHASE_SIZE`] counters.
HIDDEN, ROTATION, NORMED, JOINED, ATTENDED, SUMMAND, INNER, GATED, CHOSEN, ENTERING = range(27, 37)
COUNTERS = 37
# Arrays of a pass over T tokens of B sequences: see `inputs.StepLayout`. `VISIBLE_BITS` are its
# `words`.
TOKENS, SLOTS, WANTED = range(38, 41)
PARTS = 41  # [P, 3] sequence, first row and end of rows that attend together
VISIBLE_BITS, PAGES, FIRST_KEYS, ENDS, NUM_KEYS, NODE_POSITIONS, LIMITS, POSITIONS = range(42, 50)
LOGITS = 50
SIZES = 51  # tokens of a page, cores, query heads, query heads that attend together
# Stored hidden states: the place of the state that enters each layer, of the state that leaves the
# last one, and of that state after the norm; -1 for none.
TAPS = 52  # [L + 2]
TAPPED = 53  # [slots, places * D] output
STATES = 54  # [T, D] states that the rows read; of width 0 in decoders that read none
LEAVING = 55  # [N, D] states that leave the wanted rows; of width 0 in decoders that read none
# Of heads: whether the first layer's residual is the normed state, and whether leaving states are
# normed.
NORM_FLAGS = 56
TARGET_STATES = 57  # [C, X] the target's states, from which the pass projects `STATES`, or none
TARGET_NORMS = 58  # [parts, X / parts] norms of their parts
# A head that drafts a block reads C rows of a text after its T rows. Each layer computes only K and
# V of them, from their normed states. Slots and positions have T + C rows, and so has this field,
# at the address of `NORMED`.
NORMED_ALL = 59
# [L] the field of each layer's visible bits: `VISIBLE_BITS`, or `OTHER_VISIBLE_BITS` if its rows
# see other nodes.
VISIBLE_FIELDS = 60
OTHER_VISIBLE_BITS = 61
CONVOLUTIONS = 62  # [2 L, 2, taps, D] kernels of a head's convolutions
ROW_KERNELS = 63  # [T, 2 * taps * D / group] what a row adds to the kernels
BLOCK_SIZES = 64  # rows of a block, columns of a group
FUNCTIONS = 65  # addresses of the phases that depend on types: beginning, norms, rotation, attention
AFTER_LOGITS = 66  # address of a function that runs after the logits, or 0
MEMORY = 67  # [N, r] rows of the product `TERM`
DRAW_FIELDS = 68  # the first field of `draw_loop.py`
NUM_FIELDS = 82
COLUMNS = 5
"""Address of an array, and up to four sizes."""
FIELDS_OF_TOKENS = HIDDEN, NORMED, ATTENDED, SUMMAND, INNER, GATED, ENTERING, ROW_KERNELS
"""Working arrays with a row for each token."""
# Numbers of a piece of a product: blocks of its weight that have one layout. First the addresses of
# its function, of the words [N / B, words, B], of the scales [N / B, rows, width] and of the
# layer's bias.
FUNCTION, WORDS_AT, SCALES_AT, BIAS_AT, NUM_BLOCKS, NUM_WORDS, SCALE_ROWS, SCALE_WIDTH = range(8)
FIRST = 8  # the block of the result that the piece's first block has
STEP = 9  # blocks of the result from one block of the piece to the next
PIECE = 10


@compiled_for_cpu(inline="always")
def array1(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1],), dtype)


@compiled_for_cpu(inline="always")
def array2(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1], table[field, 2]), dtype)


@compiled_for_cpu(inline="always")
def array3(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1], table[field, 2], table[field, 3]), dtype)


@compiled_for_cpu(inline="always")
def array4(table, field, dtype):
    sizes = table[field, 1], table[field, 2], table[field, 3], table[field, 4]
    return carray(pointer_to(table[field, 0]), sizes, dtype)


@compiled_for_cpu(inline="always")
def arrays_of_piece(piece, word_type, scale_type):
    """Return the words and scales of a piece of a product."""
    words = piece[NUM_BLOCKS], piece[NUM_WORDS], BLOCK
    scales = piece[NUM_BLOCKS], piece[SCALE_ROWS], piece[SCALE_WIDTH]
    return (
        carray(pointer_to(piece[WORDS_AT]), words, word_type),
        carray(pointer_to(piece[SCALES_AT]), scales, scale_type),
    )


@compiled_for_cpu(inline="always")
def table_at(address):
    return carray(pointer_to(address), (NUM_FIELDS, COLUMNS), np.int64)


@compiled_for_cpu(inline="always")
def put1(table, field, array):
    table[field, 0] = np.int64(array.ctypes.data)
    table[field, 1] = array.shape[0]


@compiled_for_cpu(inline="always")
def put2(table, field, array):
    table[field, 0] = np.int64(array.ctypes.data)
    table[field, 1] = array.shape[0]
    table[field, 2] = array.shape[1]
