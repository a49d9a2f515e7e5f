"""Table of a pass: the arrays that the decoder (`model_pass.py`) reads and writes, by their addresses and sizes.

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

# Rows of the table of a pass. Products of a model with L layers: their pieces [L, P, `PIECE`], then the bias [L, N].
# The products of the embedding and `lm_head` have L = 1, and that of the embedding one piece. If the first layer reads
# states, `ENTRY` has its q, k and v of [embedding, state], with L = 1 and K = 2 D, and `QKV` has them of the other
# layers.
# Heads alone have `PROJECTION`, with L = 1, of the target's states, `KERNELS`, with 2 L, of convolutions, and `TERM`,
# with L = 1, from the token before to what it adds to logits (`cpu/compiled/draw_loop.py`).
EMBEDDING, QKV, O_PROJ, GATE_UP, DOWN, LM_HEAD, ENTRY, PROJECTION, KERNELS, TERM = PRODUCTS = range(0, 20, 2)
# Norms [2 L + 1, D], and after them that of the states that are read; those of queries and keys [L, 2, head], or
# [0, 2, head]; radians [head / 2] by which a position rotates; epsilon, scale of scores, factor of cosines and sines,
# factor of embeddings; windows [L] in positions, 0 for none.
NORMS, HEAD_NORMS, FREQUENCIES, CONSTANTS, WINDOWS = range(20, 25)
# K/V [L, slots, H_kv, head].
KEYS, VALUES = 25, 26
# Working arrays of T rows (see `_work`), and [phases, `ROW`] counters.
HIDDEN, ROTATION, NORMED, JOINED, ATTENDED, SUMMAND, INNER, GATED, CHOSEN, ENTERING, COUNTERS = range(27, 38)
# Of a pass over T tokens of R sequences: see `inputs.StepLayout`. Parts [P, 3]: sequence, first row and end of rows
# that attend together; sizes: tokens of a page, cores.
TOKENS, SLOTS, WANTED, PARTS, WORDS, PAGES, FIRST_KEYS, ENDS, NUM_KEYS = range(38, 47)
NODE_POSITIONS, LIMITS, POSITIONS, LOGITS, SIZES = range(47, 52)
# Stored hidden states: places [L + 2] of the state that enters each layer, that leaves the last, and after the norm, -1
# for none; the output, [slots, places * D].
TAPS, TAPPED = 52, 53
# States [T, D] that the rows read, and those [N, D] that leave the wanted rows: of width 0 in decoders that read none.
# Set for heads (`head_decoder.py`): whether the normed state is the residual of the first layer, and whether the
# states that leave are normed.
STATES, LEAVING, NORM_FLAGS = 54, 55, 56
# The target's states [C, X], from which the pass projects `STATES`, or none; norms [parts, X / parts] of their parts.
TARGET_STATES, TARGET_NORMS = 57, 58
# A head that drafts a block reads C rows of a text after its T rows: their states, normed, are what every layer makes
# its K and V of, and nothing else is computed of them. Slots and positions have T + C rows, and so has this field, at
# the address of `NORMED`.
NORMED_ALL = 59
# [L] the field of the words of each layer: `WORDS`, or `OTHER_WORDS` for layers whose rows see other nodes.
WORDS_OF, OTHER_WORDS = 60, 61
# Convolutions of a head: their kernels [2 L, 2, taps, D]; what a row adds to them, [T, 2 * taps * D / group]; rows of a
# block, columns of a group.
CONVOLUTIONS, OWN_KERNELS, BLOCK_SIZES = 62, 63, 64
# Addresses of the functions of phases that depend on types: of the beginning, norms, rotation and attention.
FUNCTIONS = 65
# Address of a function that runs after the logits, with its phase; or 0.
AFTER_LOGITS = 66
# Rows [N, r] of the product `TERM`. Fields from `OWN` on belong to functions after a pass.
MEMORY, OWN = 67, 68
NUM_FIELDS = 82
COLUMNS = 5
"""Columns of a table: the address of an array, and up to four sizes."""
# Numbers of a piece of a product: blocks of its weight that have one layout. Addresses of its function, of the words
# [N / B, words, B], of the scales [N / B, rows, width] and of the layer's bias; these sizes; the block of the result
# that its first block has, and how many blocks apart the others are.
FUNCTION, WORDS_AT, SCALES_AT, BIAS_AT, NUM_BLOCKS, NUM_WORDS, SCALE_ROWS, SCALE_WIDTH, FIRST, STEP = range(10)
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
    table[field, 0], table[field, 1] = np.int64(array.ctypes.data), array.shape[0]


@compiled_for_cpu(inline="always")
def put2(table, field, array):
    table[field, 0], table[field, 1], table[field, 2] = np.int64(array.ctypes.data), array.shape[0], array.shape[1]
