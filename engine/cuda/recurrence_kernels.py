"""Recurrences of recurrent layers in Triton; a program has some columns of a head's state.

A program walks its turns (`recurrence_turns.py`): token by token with the state in registers, or
all tokens of a turn as products. In products, d_ta is the sum of the logarithms of decays after
token a up to token t, for a on t's path. It is summed along the path and not a difference of two
sums, so its exponential never exceeds the product of decays that it stands for. With G = exp(d) on
paths, c the same sums from the turn's first state S, and L = beta G (K K^T) without its diagonal:

    (I + L) U = beta (V - exp(c) K S), or U = V without beta
    outputs = exp(c) Q S + (G * Q K^T) U
    state after token t = exp(c_t) S + (G_t * K)^T U

The system is solved row by row: the powers of L that a product of inverses needs may be large.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests).
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.recurrence_turns import MOST_TOGETHER, turns_of
from engine.kernels.protocol import RecurrentSteps
from engine.kernels.transfer import to_device_at_once

_COLUMNS = 32
"""Columns of a state that a program multiplies."""
_LINES = 16
"""Lines of a state that a program multiplies at once: more would need too many registers."""
_NUMBERS = 4096
"""Numbers of a state that a program walks with."""
_FEW = 4
"""Tokens of a turn that are walked faster than they are multiplied."""
_LEAST_ROWS = 16
"""Least rows of a product in Triton."""


@triton.jit
def _part(states, place, head, num_heads, line, column, key_dim, value_dim):
    """Return (addresses of a part of a stored state, whether each exists)."""
    first = states + (place * num_heads + head) * key_dim * value_dim
    exists = (line < key_dim)[:, None] & (column < value_dim)[None, :] & (place >= 0)
    return first + line[:, None] * value_dim + column[None, :], exists


@triton.jit
def _walk_turns(
    inputs, query, scales, states, output, tokens, turns, begins,
    width, num_heads, group_size, key_dim, value_dim, num_rates, num_scales,
    has_beta: tl.constexpr, key_block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """Walk the turns of a program token by token."""
    program, head = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, key_block)
    column = tl.program_id(2) * value_block + tl.arange(0, value_block)
    is_line, is_column = line < key_dim, column < value_dim
    num_groups = num_heads // group_size
    group = head // group_size
    first_value = num_groups * key_dim
    first_rate = first_value + num_heads * value_dim
    # A decay of one number is every line's.
    scale = tl.load(scales + head * num_scales + line % num_scales)
    for number in range(tl.load(begins + program), tl.load(begins + program + 1)):
        turn = turns + number * 7
        first, count = tl.load(turn), tl.load(turn + 1)
        part, exists = _part(states, tl.load(turn + 2), head, num_heads, line, column, key_dim, value_dim)
        state = tl.load(part, mask=exists, other=0.0)
        for token in range(first, first + count):
            one = inputs + tl.load(tokens + token * 3) * width
            key = tl.load(one + group * key_dim + line, mask=is_line, other=0.0)
            added = tl.load(one + first_value + head * value_dim + column, mask=is_column, other=0.0)
            rate = tl.load(one + first_rate + head * num_rates + line % num_rates)
            state = state * tl.exp(scale * rate)[:, None]
            if has_beta:
                beta = tl.load(one + first_rate + num_heads * num_rates + head)
                added = beta * (added - tl.sum(state * key[:, None], axis=0))
            state = state + key[:, None] * added[None, :]
            row = tl.load(tokens + token * 3 + 1)
            wanted = tl.load(query + (row * num_groups + group) * key_dim + line, mask=is_line & (row >= 0), other=0.0)
            result = tl.sum(state * wanted[:, None], axis=0)
            tl.store(output + (row * num_heads + head) * value_dim + column, result, mask=is_column & (row >= 0))
        # All threads have loaded the state before it, which may lie in the same place.
        tl.debug_barrier()
        for place in tl.static_range(4, 7):
            part, exists = _part(states, tl.load(turn + place), head, num_heads, line, column, key_dim, value_dim)
            tl.store(part, state, mask=exists)
        tl.debug_barrier()


@triton.jit
def _since_tokens(tokens, first, count, place, bits, rate, rows: tl.constexpr):
    """Return [rows, rows] sums of rates after each token of a row's path, up to the row."""
    sums = tl.zeros((rows, rows), dtype=tl.float32)
    for middle in range(1, count):
        is_after = ((bits >> middle) & 1) != 0
        others = (tl.load(tokens + (first + middle) * 3 + 2) >> place.to(tl.int64)) & 1
        passed = is_after[:, None] & ((others != 0) & (place != middle))[None, :]
        sums += tl.where(passed, tl.sum(tl.where(place == middle, rate, 0.0), axis=0), 0.0)
    return sums


@triton.jit
def _solved(system, right, place, count):
    """Return U of (I + system) U = right; a row of the system has earlier tokens alone."""
    for row in range(1, count):
        weight = tl.sum(tl.where((place == row)[:, None], system, 0.0), axis=0)
        before = tl.where((place < row)[:, None], right, 0.0)
        less = tl.sum(weight[:, None] * before, axis=0)
        right = tl.where((place == row)[:, None], right - less[None, :], right)
    return right


@triton.jit
def _advance(
    states, turn, keys, place, added, share, whole, head, num_heads, column, key_dim, value_dim, lines: tl.constexpr
):
    """Store the state after the last token of a turn's text; keys: addresses of each token's."""
    source, last = tl.load(turn + 2), tl.load(turn + 3)
    # Also a number of a node that is not finite changes no state.
    is_text = (place <= last)[:, None]
    added = tl.where(is_text, added, 0.0)
    for first_line in range(0, key_dim, lines):
        line = first_line + tl.arange(0, lines)
        part, exists = _part(states, source, head, num_heads, line, column, key_dim, value_dim)
        state = tl.load(part, mask=exists, other=0.0)
        key = tl.load(keys[:, None] + line[None, :], mask=is_text & (line < key_dim)[None, :], other=0.0)
        state = whole * state + tl.dot(tl.trans(key * share[:, None]), added, input_precision="ieee")
        # All threads have loaded what may lie in the same place.
        tl.debug_barrier()
        for number in tl.static_range(4, 7):
            part, exists = _part(states, tl.load(turn + number), head, num_heads, line, column, key_dim, value_dim)
            tl.store(part, state, mask=exists)


@triton.jit
def _multiply_turns(
    inputs, query, scales, states, output, tokens, turns, begins,
    width, num_heads, group_size, key_dim, value_dim,
    has_beta: tl.constexpr, rows: tl.constexpr, lines: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """Compute all tokens of a turn together; the decay is a number of a head."""
    program, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, rows)
    column = tl.program_id(2) * value_block + tl.arange(0, value_block)
    is_column = (column < value_dim)[None, :]
    num_groups = num_heads // group_size
    group = head // group_size
    first_value = num_groups * key_dim
    first_rate = first_value + num_heads * value_dim
    for number in range(tl.load(begins + program), tl.load(begins + program + 1)):
        turn = turns + number * 7
        first, count, source, last = tl.load(turn), tl.load(turn + 1), tl.load(turn + 2), tl.load(turn + 3)
        is_token = place < count
        token = tokens + (first + place) * 3
        one = inputs + tl.load(token, mask=is_token, other=0) * width
        row = tl.load(token + 1, mask=is_token, other=-1)
        keys, queries = one + group * key_dim, query + (row * num_groups + group) * key_dim
        bits = tl.load(token + 2, mask=is_token, other=0)
        on_path = ((bits[:, None] >> place.to(tl.int64)[None, :]) & 1) != 0
        rate = tl.load(scales + head) * tl.load(one + first_rate + head, mask=is_token, other=0.0)
        since = tl.sum(tl.where(on_path, rate[None, :], 0.0), axis=1)
        decay = tl.where(on_path, tl.exp(_since_tokens(tokens, first, count, place, bits, rate, rows)), 0.0)
        similar = tl.zeros((rows, rows), dtype=tl.float32)
        scores = tl.zeros((rows, rows), dtype=tl.float32)
        known = tl.zeros((rows, value_block), dtype=tl.float32)
        result = tl.zeros((rows, value_block), dtype=tl.float32)
        for first_line in range(0, key_dim, lines):
            line = first_line + tl.arange(0, lines)
            is_line = (line < key_dim)[None, :]
            part, exists = _part(states, source, head, num_heads, line, column, key_dim, value_dim)
            state = tl.load(part, mask=exists, other=0.0)
            key = tl.load(keys[:, None] + line[None, :], mask=is_token[:, None] & is_line, other=0.0)
            wanted = tl.load(queries[:, None] + line[None, :], mask=(row >= 0)[:, None] & is_line, other=0.0)
            scores += tl.dot(wanted, tl.trans(key), input_precision="ieee")
            result += tl.dot(wanted, state, input_precision="ieee")
            if has_beta:
                similar += tl.dot(key, tl.trans(key), input_precision="ieee")
                known += tl.dot(key, state, input_precision="ieee")
        added = tl.load(
            one[:, None] + first_value + head * value_dim + column[None, :],
            mask=is_token[:, None] & is_column, other=0.0,
        )  # fmt: skip
        if has_beta:
            beta = tl.load(one + first_rate + num_heads + head, mask=is_token, other=0.0)
            added = beta[:, None] * (added - tl.exp(since)[:, None] * known)
            is_before = on_path & (place[:, None] != place[None, :])
            added = _solved(tl.where(is_before, beta[:, None] * decay * similar, 0.0), added, place, count)
        scores = tl.where(on_path, decay * scores, 0.0)
        result = tl.exp(since)[:, None] * result + tl.dot(scores, added, input_precision="ieee")
        tl.store(
            output + (row[:, None] * num_heads + head) * value_dim + column[None, :],
            result, mask=(row >= 0)[:, None] & is_column,
        )  # fmt: skip
        if last >= 0:
            share = tl.sum(tl.where((place == last)[:, None], decay, 0.0), axis=0)
            whole = tl.exp(tl.sum(tl.where(place == last, since, 0.0), axis=0))
            _advance(states, turn, keys, place, added, share, whole, head, num_heads, column, key_dim, value_dim, lines)
        tl.debug_barrier()


def recur(
    inputs_SW: Tensor, query_TGK: Tensor, scale_HX: Tensor, has_beta: bool, states_PHKV: Tensor, steps: RecurrentSteps
) -> Tensor:
    """Return [T, H, V] outputs, and store states, as `Kernels.recur`."""
    _, num_heads, key_dim, value_dim = states_PHKV.shape
    num_rows, num_groups, _ = query_TGK.shape
    num_rates = (inputs_SW.shape[1] - num_groups * key_dim) // num_heads - value_dim - has_beta
    num_scales = scale_HX.shape[1]
    turns = turns_on(steps, num_rates == num_scales == 1, inputs_SW.device)
    output_THV = states_PHKV.new_empty(num_rows, num_heads, value_dim)
    operands = (inputs_SW, query_TGK.contiguous(), scale_HX.contiguous(), states_PHKV, output_THV, *turns.arrays)
    sizes = (inputs_SW.shape[1], num_heads, num_heads // num_groups, key_dim, value_dim)
    if turns.num_rows:
        value_block = max(_LEAST_ROWS, min(_COLUMNS, triton.next_power_of_2(value_dim)))
        grid = (turns.num_programs, num_heads, triton.cdiv(value_dim, value_block))
        blocks = {"rows": turns.num_rows, "lines": _LINES, "value_block": value_block}
        _multiply_turns[grid](*operands, *sizes, has_beta=has_beta, num_warps=8, num_stages=1, **blocks)
        return output_THV
    key_block = triton.next_power_of_2(key_dim)
    value_block = min(max(1, _NUMBERS // key_block), triton.next_power_of_2(value_dim))
    grid = (turns.num_programs, num_heads, triton.cdiv(value_dim, value_block))
    num_warps = max(1, min(4, key_block * value_block // 512))
    options = {"key_block": key_block, "value_block": value_block, "num_warps": num_warps, "num_stages": 1}
    _walk_turns[grid](*operands, *sizes, num_rates, num_scales, has_beta=has_beta, **options)
    return output_THV


class DeviceTurns(NamedTuple):
    arrays: list[Tensor]
    """Tokens, turns, and begins of programs."""
    num_programs: int
    num_rows: int
    """Rows of a product; 0 if turns are walked."""


def turns_on(steps: RecurrentSteps, has_products: bool, device: torch.device) -> DeviceTurns:
    """Return the turns of a pass, which are copied to the device once."""
    found: DeviceTurns | None = steps.on_device.get(has_products)
    if found is None:
        turns = turns_of(steps, has_products)
        is_product = has_products and _FEW < turns.longest <= MOST_TOGETHER
        if has_products and not is_product:
            turns = turns_of(steps, False)
        # Two sizes, so that few kernels are compiled.
        num_rows = _LEAST_ROWS if turns.longest <= _LEAST_ROWS else MOST_TOGETHER
        arrays = to_device_at_once(turns, device)
        found = DeviceTurns(arrays, len(turns.begins) - 1, num_rows if is_product else 0)
        steps.on_device[has_products] = found
    return found
