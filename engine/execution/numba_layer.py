"""What a decoder layer does between its products, in one Numba kernel each: for passes of few tokens on a CPU.

Kernels take arrays of numpy: float32, or the 16 bits of bfloat16 numbers, which are rounded no more often than
transformers rounds them. They run on one core and are compiled once for a machine: Numba keeps them beside this file,
or in the folder NUMBA_CACHE_DIR. `cpu_layers.py` calls them.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np

from engine.kernels import compiled_for_cpu
from engine.kernels.numba_numbers import FAST, exponential, from_order, order, rounded, widened


@compiled_for_cpu(**FAST)
def embed(token_ids, positions, embedding, frequencies, factor, hidden, cosines, sines):
    """Hidden states [T, D] of tokens, and cosines and sines [T, head] of their rotation, times a factor.

    The sines of the first half are negated: see `rotate_and_write`.
    """
    half = len(frequencies)
    for token in range(len(token_ids)):
        hidden[token] = embedding[token_ids[token]]
        for number in range(half):
            angle = np.float32(positions[token]) * frequencies[number]
            # In the precision that transformers has them in.
            cosine = widened(rounded(np.cos(angle) * np.float32(factor), embedding[0, 0]))
            sine = widened(rounded(np.sin(angle) * np.float32(factor), embedding[0, 0]))
            cosines[token, number] = cosines[token, half + number] = cosine
            sines[token, number], sines[token, half + number] = -sine, sine


@compiled_for_cpu(**FAST)
def _norm(row, weight, eps, normed):
    """The RMS norm of a row, which may be written over it."""
    width = len(row)
    squares = np.float32(0)
    for column in range(width):
        value = widened(row[column])
        squares += value * value
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    for column in range(width):
        normed[column] = rounded(widened(row[column]) * scale * widened(weight[column]), weight[column])


@compiled_for_cpu(**FAST)
def add_and_norm(hidden, product, has_product, weight, eps, normed):
    """Add a product to hidden states [T, D] if there is one, and write their RMS norm."""
    num_rows, width = hidden.shape
    for row in range(num_rows):
        if has_product:
            for column in range(width):
                value = widened(hidden[row, column]) + widened(product[row, column])
                hidden[row, column] = rounded(value, weight[column])
        _norm(hidden[row], weight, eps, normed[row])


@compiled_for_cpu(**FAST)
def _rotate(head, cosines, sines, result):
    """By halves: each number meets the one at its place in the other half."""
    half = len(head) // 2
    for column in range(half):
        first, second = widened(head[column]), widened(head[half + column])
        turned = first * cosines[column] + second * sines[column]
        other = second * cosines[half + column] + first * sines[half + column]
        result[column] = rounded(turned, head[column])
        result[half + column] = rounded(other, head[column])


@compiled_for_cpu(**FAST)
def rotate_and_write(joined, cosines, sines, has_norms, query_norm, key_norm, eps, slots, keys, values, query):
    """Rotate queries and keys, and write them, and the values.

    joined: [T, heads of q, k and v], which are normed in place if there are norms. query: [H_kv, T, G, D], the G heads
    of a K/V head together. keys, values: [slots, H_kv, D], of which those in `slots` [T] are written.
    """
    num_kv_heads, num_tokens, num_shared, width = query.shape
    num_heads = num_kv_heads * num_shared
    for token in range(num_tokens):
        slot = slots[token]
        for number in range(num_heads + num_kv_heads):
            is_query = number < num_heads
            head = joined[token, number * width : (number + 1) * width]
            if has_norms:
                _norm(head, query_norm if is_query else key_norm, eps, head)
            if is_query:
                result = query[number // num_shared, token, number % num_shared]
            else:
                result = keys[slot, number - num_heads]
            _rotate(head, cosines[token], sines[token], result)
        for number in range(num_kv_heads):
            start = (num_heads + num_kv_heads + number) * width
            values[slot, number] = joined[token, start : start + width]


@compiled_for_cpu(**FAST)
def softmax(scores, scale, is_masked, visible):
    """Attention weights of scores [H_kv, Q * G, K] times `scale`, in place; visible: [Q, K] which keys a query sees."""
    num_kv_heads, num_rows, num_keys = scores.shape
    num_shared = num_rows // len(visible) if is_masked else 1
    for head in range(num_kv_heads):
        for number in range(num_rows):
            row = scores[head, number]
            seen = visible[number // num_shared if is_masked else 0]
            largest = np.int32(-0x80000000)
            for key in range(num_keys):
                place = order(row[key])
                if is_masked:
                    place = place if seen[key] else np.int32(-0x80000000)
                largest = max(largest, place)
            most = from_order(largest)
            total = np.float32(0)
            for key in range(num_keys):
                weight = exponential((row[key] - most) * np.float32(scale))
                if is_masked:
                    weight = weight if seen[key] else np.float32(0)
                row[key] = weight
                total += weight
            for key in range(num_keys):
                row[key] /= total


@compiled_for_cpu(**FAST)
def merge(attended, first, result):
    """Write what Q queries give, [H_kv, Q * G, D], to the rows from `first` on of `result` [T, H * D]."""
    num_kv_heads, num_rows, width = attended.shape
    num_shared = result.shape[1] // (num_kv_heads * width)
    for head in range(num_kv_heads):
        for number in range(num_rows):
            start = (head * num_shared + number % num_shared) * width
            result[first + number // num_shared, start : start + width] = attended[head, number]


@compiled_for_cpu(**FAST)
def gate(joined, result):
    """[T, M] silu(gate) * up of [T, 2 M]."""
    num_rows, width = result.shape
    for row in range(num_rows):
        for column in range(width):
            number = widened(joined[row, column])
            share = np.float32(1) / (np.float32(1) + exponential(-number))
            gated = number * share * widened(joined[row, width + column])
            result[row, column] = rounded(gated, joined[row, column])
