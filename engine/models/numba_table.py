"""Table of a pass: the arrays that the decoder (`numba_decoder.py`) reads and writes, by their addresses and sizes.

The C functions of a pass take the address of a table, so helper threads find all data there.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import carray

from engine.kernels import compiled_for_cpu
from engine.models.numba_work import pointer_to

# Rows of the table of a pass. Products of a model with L layers: a weight [L, N / B, K, B], then its scales [L, N / B,
# groups, B] and its bias [L, N]; those of the embedding and `lm_head` with L = 1. If the first layer reads states,
# `ENTRY` has its q, k and v of [embedding, state], with L = 1 and K = 2 D, and `QKV` has those of the other layers.
EMBEDDING, QKV, O_PROJ, GATE_UP, DOWN, LM_HEAD, ENTRY = range(0, 21, 3)
# Norms [2 L + 1, D], and after them that of the states that are read; those of queries and keys [L, 2, head], or
# [0, 2, head]; radians [head / 2] by which a position rotates; epsilon, scale of scores, factor of cosines and sines;
# windows [L] in positions, 0 for none.
NORMS, HEAD_NORMS, FREQUENCIES, CONSTANTS, WINDOWS = range(21, 26)
# K/V [L, slots, H_kv, head].
KEYS, VALUES = 26, 27
# Working arrays of T rows (see `_work`), and [phases, `ROW`] counters.
HIDDEN, ROTATION, NORMED, JOINED, ATTENDED, SUMMAND, INNER, GATED, CHOSEN, ENTERING, COUNTERS = range(28, 39)
# Of a pass over T tokens of R sequences: see `inputs.StepLayout`. Parts [P, 3]: sequence, first row and end of rows
# that attend together; sizes: tokens of a page, cores.
TOKENS, SLOTS, WANTED, PARTS, WORDS, PAGES, FIRST_KEYS, ENDS, NUM_KEYS = range(39, 48)
NODE_POSITIONS, LIMITS, POSITIONS, LOGITS, SIZES = range(48, 53)
# Stored hidden states: places [L + 2] of the state that enters each layer, that leaves the last, and after the norm, -1
# for none; the output, [slots, places * D].
TAPS, TAPPED = 53, 54
# States [T, D] that the rows read, and those [N, D] that leave the wanted rows: of width 0 in decoders that read none.
# Set for heads (`heads/decoder.py`): whether the normed state is the residual of the first layer, and whether the
# states that leave are normed.
STATES, LEAVING, NORM_FLAGS = 55, 56, 57
# Addresses of the functions of phases that depend on types.
FUNCTIONS = 58
# Address of a function that runs after the logits, with its phase; or 0. Rows from `OWN` on belong to that function.
AFTER_LOGITS, OWN = 59, 60
NUM_FIELDS = 72
COLUMNS = 5
"""Columns of a table: the address of an array, and up to four sizes."""


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
def table_at(address):
    return carray(pointer_to(address), (NUM_FIELDS, COLUMNS), np.int64)


@compiled_for_cpu(inline="always")
def put1(table, field, array):
    table[field, 0], table[field, 1] = np.int64(array.ctypes.data), array.shape[0]


@compiled_for_cpu(inline="always")
def put2(table, field, array):
    table[field, 0], table[field, 1], table[field, 2] = np.int64(array.ctypes.data), array.shape[0], array.shape[1]
