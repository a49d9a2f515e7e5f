"""Attention over paged keys in Triton: a program reads keys once for a tile of queries.

Queries of one sequence (tokens of its text, and nodes of its tree) that share a key head are the
rows of a tile: a tree reads the text once. Long texts are read in several parts at once, merged by
their log-sum-exps. What each program reads is the same in all layers, so a pass computes it once
(`_divide`). Score softcapping, sliding windows, chunks, attention sinks and grouped heads are done
here. The model rotates queries and keys, and passes the factor of the scores.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). The plain path
(`attention.py`) is its oracle.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.groups import ScoreOptions
from engine.attention.latent import absorbed as absorbed
from engine.attention.latent import expanded as expanded
from engine.attention.paged import Paged
from engine.attention.tensors import KVTensors

weight_bytes = 0
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LEAST_ROWS, _MOST_ROWS = 16, 64
_WIDE = 256
"""Width of heads above which tiles are smaller (Gemma 4, latents)."""
_PART_KEYS = 128
"""Fewest keys in a part of a text."""
_MOST_PARTS = 32
_PARTS_BYTES = 64 << 20
"""Most memory of the parts' results."""
_PROGRAMS = 6
"""Most programs that parts add for each multiprocessor, which runs about two at once."""


@triton.jit
def _load(start, rows, columns, row_stride, is_row, width):
    """Return [rows, columns] numbers at `start + row * row_stride + column`; 0 outside."""
    inside = is_row[:, None] & (columns[None, :] < width)
    return tl.load(start + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def product(left, right, upcast: tl.constexpr):
    if upcast:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left.to(right.dtype), right, input_precision="ieee")


@triton.jit
def _nearest(position, window, in_chunks: tl.constexpr):
    """Return the lowest position that a query at a position sees; window: length of chunks, too."""
    if in_chunks:
        return position // window * window
    return position - window + 1


@triton.jit
def _seen(
    index, is_key, token, is_query, position, limit, end, words, num_words, node_positions, window,
    has_window: tl.constexpr, in_chunks: tl.constexpr,
):  # fmt: skip
    """[queries, keys] Keys of a tile that each query sees; the rules are in `inputs.py`."""
    node = tl.maximum(index - end, 0)
    is_node = is_key & (index >= end)
    word = tl.load(
        words + token[:, None].to(tl.int64) * num_words + (node // 64)[None, :],
        mask=is_query[:, None] & is_node[None, :],
        other=0,
    )
    seen = (index[None, :] < limit[:, None]) & is_key[None, :]
    seen = seen | (is_node[None, :] & (((word >> (node % 64).to(tl.int64)[None, :]) & 1) != 0))
    if has_window:
        at_node = tl.load(node_positions + node, mask=is_node, other=0)
        key_position = tl.where(is_node, at_node, index)
        seen = seen & (key_position[None, :] >= _nearest(position, window, in_chunks)[:, None])
    return seen


@triton.jit
def _extent(
    sequence, part, first_keys, ends, num_keys, limit, position, is_query, window, num_parts, part_keys,
    tile_keys: tl.constexpr, has_window: tl.constexpr, in_chunks: tl.constexpr,
):  # fmt: skip
    """Return (first key, end of tiles that all queries see, end of the keys, first node).

    Of a program's part of the keys; an end is the index after the last key.
    """
    first, end, stop = tl.load(first_keys + sequence), tl.load(ends + sequence), tl.load(num_keys + sequence)
    # No query of a prompt's chunk sees keys after the tile's last query; nodes see the whole text.
    furthest = tl.max(tl.where(is_query, limit, 0), axis=0)
    stop = tl.where(furthest < end, tl.maximum(furthest, first), stop)
    if has_window:
        # No query of the tile sees keys before this one.
        nearest = _nearest(tl.min(tl.where(is_query, position, 2147483647), axis=0), window, in_chunks)
        first = tl.maximum(first, tl.minimum(nearest, end))
    part_keys = tl.maximum(part_keys, tl.cdiv(tl.cdiv(stop - first, tile_keys), num_parts) * tile_keys)
    part_first = first + part * part_keys
    part_stop = tl.minimum(stop, part_first + part_keys)
    whole_stop = part_first
    if not has_window:
        all_see = tl.min(tl.where(is_query, limit, 2147483647), axis=0)
        whole_stop += tl.maximum(tl.minimum(all_see, part_stop) - part_first, 0) // tile_keys * tile_keys
    return part_first, whole_stop, part_stop, end


@triton.jit
def _sizes(begin, counts, first_keys, num_keys, num_sequences, padded_queries, tile_queries: tl.constexpr):
    """Return (whether they exist, tiles of queries, keys) of the sequences from `begin` on."""
    sequence = begin + tl.arange(0, 64)
    exists = sequence < num_sequences
    count = tl.maximum(tl.load(counts + sequence, mask=exists, other=0), tl.where(exists, padded_queries, 0))
    keys = tl.load(num_keys + sequence, mask=exists, other=0) - tl.load(first_keys + sequence, mask=exists, other=0)
    return exists, tl.cdiv(count, tile_queries), keys


@triton.jit
def _share_of(
    program, counts, first_keys, num_keys, num_sequences, padded_queries, most_parts, most_added, least_keys,
    tile_queries: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """Return (sequence, tile, part of its keys, number of parts, least keys of a part).

    The sequence is `num_sequences` without work. A text with more than 1 / most_added of all work
    is read in parts, so that parts add at most `most_added` programs. The work of a tile is the
    keys of its text.
    """
    work = 0.0  # integers of 64 bits would take registers, and their quotient a call
    for begin in range(0, num_sequences, 64):
        _, tiles, keys = _sizes(begin, counts, first_keys, num_keys, num_sequences, padded_queries, tile_queries)
        work += tl.sum(tiles.to(tl.float32) * keys, axis=0)
    part_keys = tl.maximum((work / most_added * 1.0001).to(tl.int32) + 1, least_keys)
    part_keys = tl.cdiv(part_keys, tile_keys) * tile_keys
    sequence, first, last = 0, 0, 0
    for begin in range(0, num_sequences, 64):
        is_one, tiles, keys = _sizes(begin, counts, first_keys, num_keys, num_sequences, padded_queries, tile_queries)
        programs = tiles * tl.minimum(tl.maximum(keys // part_keys, 1), most_parts)
        is_before = is_one & (last + tl.cumsum(programs, axis=0) <= program)
        sequence += tl.sum(is_before.to(tl.int32), axis=0)
        first += tl.sum(tl.where(is_before, programs, 0), axis=0)
        last += tl.sum(programs, axis=0)
    is_one = sequence < num_sequences
    keys = tl.load(num_keys + sequence, mask=is_one, other=0) - tl.load(first_keys + sequence, mask=is_one, other=0)
    num_parts = tl.minimum(tl.maximum(keys // part_keys, 1), most_parts)
    return sequence, (program - first) // num_parts, (program - first) % num_parts, num_parts, part_keys


# These change from step to step. A kernel that is compiled for each of their variants would delay
# the first step of it.
_CHANGING = (
    *("num_sequences", "num_tokens", "num_pages", "num_nodes", "num_words", "padded_queries", "window"),
    *("most_parts", "most_added", "least_keys"),
)
_SHARE = tl.constexpr(16)
"""32-bit integers of a program's share; ten are used."""


@triton.jit(do_not_specialize=_CHANGING)
def _divide(
    shares, starts, counts, first_keys, ends, num_keys, limits, positions, window,
    num_sequences, padded_queries, most_parts, most_added, least_keys,
    tile_queries: tl.constexpr, tile_keys: tl.constexpr, has_window: tl.constexpr, in_chunks: tl.constexpr,
):  # fmt: skip
    """Write a program's share in the order in which `_attend` reads it; no rows without work."""
    share = shares + tl.program_id(0) * _SHARE
    sequence, tile, part, num_parts, part_keys = _share_of(
        tl.program_id(0), counts, first_keys, num_keys, num_sequences, padded_queries, most_parts, most_added,
        least_keys, tile_queries, tile_keys,
    )  # fmt: skip
    if sequence >= num_sequences:
        tl.store(share, 0)
        return
    count, first = tl.load(counts + sequence), tile * tile_queries
    token = tl.load(starts + sequence) + first
    query = tl.arange(0, tile_queries)
    is_query = first + query < count
    limit = tl.load(limits + token + query, mask=is_query, other=0)
    position = tl.load(positions + token + query, mask=is_query, other=0)
    part_first, whole_stop, part_stop, end = _extent(
        sequence, part, first_keys, ends, num_keys, limit, position, is_query, window, num_parts, part_keys,
        tile_keys, has_window, in_chunks,
    )  # fmt: skip
    # Padding rows see nothing; their result is 0, not the content of the memory.
    tl.store(share, tl.minimum(tl.maximum(count, padded_queries) - first, tile_queries))
    tl.store(share + 1, tl.maximum(tl.minimum(count - first, tile_queries), 0))
    tl.store(share + 2, token)
    tl.store(share + 3, sequence)
    tl.store(share + 4, part)
    tl.store(share + 5, num_parts)
    tl.store(share + 6, part_first)
    tl.store(share + 7, whole_stop)
    tl.store(share + 8, part_stop)
    tl.store(share + 9, end)


@triton.jit(do_not_specialize=_CHANGING)
def _attend(
    query, keys, values, output, lse,
    shares, pages, node_positions, limits, words, positions,
    scale, softcap, window,
    num_tokens, num_heads, num_pages, num_nodes, num_words, most_parts,
    query_head_stride, query_token_stride,
    page_size: tl.constexpr, groups: tl.constexpr, slices: tl.constexpr, rows: tl.constexpr,
    tile_keys: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, value_stride: tl.constexpr,
    key_block: tl.constexpr, value_block: tl.constexpr,
    has_softcap: tl.constexpr, has_window: tl.constexpr, in_chunks: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of queries over a part of the keys.

    Writes the result and its log-sum-exp. The first loop reads tiles of keys that all queries see,
    without a mask; the second reads the other keys. groups, slices: query heads of a program, and
    programs of a K/V head.
    """
    share = shares + tl.program_id(0) * _SHARE
    num_rows, num_queries, first_token = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    sequence, part, num_parts = tl.load(share + 3), tl.load(share + 4), tl.load(share + 5)
    part_first, whole_stop = tl.load(share + 6), tl.load(share + 7)
    part_stop, end = tl.load(share + 8), tl.load(share + 9)
    if num_rows <= 0:
        return
    kv_head, row = tl.program_id(1) // slices, tl.arange(0, rows)
    number = row // groups
    is_row, is_query = number < num_rows, number < num_queries
    token, head = first_token + number, tl.program_id(1) * groups + row % groups
    limit = tl.load(limits + token, mask=is_query, other=0)
    position = tl.load(positions + token, mask=is_query, other=0)
    if part == num_parts - 1:
        for none in range(num_parts, most_parts):
            at = (none * num_tokens + token).to(tl.int64) * num_heads + head
            tl.store(lse + at, tl.full([rows], -float("inf"), tl.float32), mask=is_row)
    if (part > 0) & (part_first >= part_stop):
        at = (part * num_tokens + token).to(tl.int64) * num_heads + head
        tl.store(lse + at, tl.full([rows], -float("inf"), tl.float32), mask=is_row)
        return
    dim, value_column = tl.arange(0, key_block), tl.arange(0, value_block)
    query_tile = _load(query + head[:, None] * query_head_stride, token, dim, query_token_stride, is_query, key_dim)
    largest, total = tl.full([rows], -1e30, tl.float32), tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, value_block], tl.float32)
    num_kv_heads = num_heads // (groups * slices)
    for masked in tl.static_range(2):
        for begin in range(whole_stop if masked else part_first, part_stop if masked else whole_stop, tile_keys):
            index = begin + tl.arange(0, tile_keys)
            is_key = index < part_stop
            page = tl.load(pages + sequence * num_pages + index // page_size, mask=is_key, other=0)
            place = (page * page_size + index % page_size).to(tl.int64) * num_kv_heads + kv_head
            key_tile = _load(keys, place, dim, key_dim, is_key, key_dim)
            value_tile = _load(values, place, value_column, value_stride, is_key, value_dim)
            scores = product(query_tile, tl.trans(key_tile), upcast) * scale
            if has_softcap:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            if masked:
                seen = _seen(
                    index, is_key, token, is_query, position, limit, end, words, num_words,
                    node_positions + sequence * num_nodes, window, has_window, in_chunks,
                )  # fmt: skip
                scores = tl.where(seen, scores, -1e30)
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_largest[:, None])
            if masked:
                weights = tl.where(seen, weights, 0.0)
            fade = tl.exp(largest - new_largest)
            total = total * fade + tl.sum(weights, axis=1)
            sums = sums * fade[:, None] + product(weights, value_tile, upcast)
            largest = new_largest
    # NaN is something: rows whose keys are broken must not get finite numbers.
    sees_any = is_query & (total != 0)
    at = (part * num_tokens + token).to(tl.int64) * num_heads + head
    inside = is_row[:, None] & (value_column[None, :] < value_dim)
    result = tl.where(sees_any[:, None], sums / tl.where(sees_any, total, 1.0)[:, None], 0.0)
    tl.store(output + at[:, None] * value_dim + value_column[None, :], result, mask=inside)
    tl.store(lse + at, tl.where(sees_any, largest + tl.log(tl.where(sees_any, total, 1.0)), -float("inf")), mask=is_row)


def attend_paged(
    paged: Paged,
    storage: KVTensors,
    layer: int,
    query: Tensor,
    scaling: float | None,
    kind: ScoreOptions,
    window: int | None,
) -> Tensor:
    """Return the attention of a flat pass, whose K/V is stored.

    query (1, H, T, D) -> (1, T, H, D_v).
    """
    _, num_heads, num_tokens, key_dim = query.shape
    keys, values = storage.layers[layer]
    num_kv_heads, value_dim = keys.shape[1], values.shape[2]
    in_chunks = kind.chunk is not None
    window = kind.chunk if in_chunks else window
    groups = heads_of_program(num_heads // num_kv_heads, query.dtype, key_dim)
    num_groups = num_heads // groups
    tile_queries = tile_queries_of(paged.most_queries, groups, query.dtype, key_dim)
    tile_keys, num_warps = tile_keys_of(query.dtype, max(key_dim, value_dim), tile_queries, window is not None)
    padded_queries = paged.most_queries if paged.is_padded else 0
    num_tiles = tiles_of(len(paged.starts), num_tokens, padded_queries, tile_queries)
    part_bytes = num_tokens * num_heads * value_dim * torch.float32.itemsize
    most_added = -(-_PROGRAMS * processors_of(query.device) // num_groups)
    work = max(paged.total_keys, paged.num_scores // tile_queries)
    num_parts = parts_of(paged.most_keys, work, part_bytes, most_added)
    is_whole = num_parts == 1 and kind.sinks is None
    dtype = query.dtype if is_whole else torch.float32
    output = torch.empty((num_parts, num_tokens, num_heads, value_dim), dtype=dtype, device=query.device)
    lse = torch.empty((num_parts, num_tokens, num_heads), dtype=torch.float32, device=query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    num_programs = num_tiles + min(most_added, num_tiles * (num_parts - 1))
    parts = Parts(num_programs, tile_queries, tile_keys, window, in_chunks, num_parts, most_added)
    _attend[(num_programs, num_groups)](
        query, keys, values, output, lse,
        shares_of(paged, parts), paged.pages, paged.node_positions, paged.limits, paged.words, paged.positions,
        key_dim**-0.5 if scaling is None else scaling, kind.softcap or 0.0, window or 0,
        num_tokens, num_heads, paged.pages.shape[1], paged.node_positions.shape[1], paged.words.shape[1], num_parts,
        query.stride(1), query.stride(2),
        page_size=paged.page_size, groups=groups, slices=num_groups // num_kv_heads,
        rows=max(16, triton.next_power_of_2(tile_queries * groups)),
        tile_keys=tile_keys, key_dim=key_dim, value_dim=value_dim,
        # The values of latents are the beginnings of their keys.
        value_stride=values.stride(1),
        key_block=max(16, triton.next_power_of_2(key_dim)), value_block=max(16, triton.next_power_of_2(value_dim)),
        has_softcap=kind.softcap is not None, has_window=window is not None, in_chunks=in_chunks,
        # The interpreter has no bfloat16 products.
        upcast=query.dtype == torch.float32 or _INTERPRETED,
        num_warps=num_warps,
    )  # fmt: skip
    return output if is_whole else merged(output, lse, kind.sinks, query.dtype).unsqueeze(0)


class Parts(NamedTuple):
    """The division of a pass into programs."""

    num_programs: int
    """For each group of query heads."""
    tile_queries: int
    tile_keys: int
    window: int | None
    in_chunks: bool
    most_parts: int
    most_added: int


def shares_of(paged: Paged, parts: Parts) -> Tensor:
    """Return [programs, 16] shares of `_attend`, computed in the first layer that asks."""
    known = None if paged.shares is None else paged.shares.get(parts)
    if known is not None:
        return known
    shares = torch.empty((parts.num_programs, _SHARE.value), dtype=torch.int32, device=paged.starts.device)
    _divide[(parts.num_programs,)](
        shares, paged.starts, paged.counts, paged.first_keys, paged.ends, paged.num_keys, paged.limits,
        paged.positions, parts.window or 0, len(paged.starts), paged.most_queries if paged.is_padded else 0,
        parts.most_parts, parts.most_added, _PART_KEYS,
        tile_queries=parts.tile_queries, tile_keys=parts.tile_keys, has_window=parts.window is not None,
        in_chunks=parts.in_chunks, num_warps=1,
    )  # fmt: skip
    if paged.shares is not None:
        paged.shares[parts] = shares
    return shares


def most_rows_of(dtype: torch.dtype, head_dim: int) -> int:
    """Return the most rows of a tile, which are queries by heads."""
    # Tiles of 64 rows in float32 need too many registers, and 38 s to compile; so do wide heads.
    return _MOST_ROWS if dtype.itemsize < 4 and head_dim <= _WIDE else _MOST_ROWS // 2


def heads_of_program(groups: int, dtype: torch.dtype, head_dim: int) -> int:
    """Return the query heads of a program, among all that share a K/V head."""
    most_rows = most_rows_of(dtype, head_dim)
    if groups <= most_rows:
        return groups
    return next((count for count in range(most_rows, _LEAST_ROWS - 1, -1) if groups % count == 0), groups)


def tile_queries_of(most_queries: int, groups: int, dtype: torch.dtype, head_dim: int = 0) -> int:
    """Return a tile's queries: a power of two (each is compiled), and enough for a product."""
    most_rows = most_rows_of(dtype, head_dim)
    fewest, most = max(1, _LEAST_ROWS // groups), 1 << (max(1, most_rows // groups).bit_length() - 1)
    return min(most, 1 << (max(most_queries, fewest) - 1).bit_length())


def tiles_of(num_sequences: int, num_tokens: int, padded_queries: int, tile_queries: int) -> int:
    """Return the most tiles of queries; padded_queries: rows of each sequence, 0 if unequal."""
    if padded_queries:
        return num_sequences * -(-padded_queries // tile_queries)
    return num_tokens // tile_queries + num_sequences


def tile_keys_of(
    dtype: torch.dtype, head_dim: int, tile_queries: int, has_window: bool, interpreted: bool = _INTERPRETED
) -> tuple[int, int]:
    """Return (keys of a tile, warps of a program) that need no more registers than there are.

    Products in float32 use no tensor cores, and many registers. The interpreter has none; few
    large tiles are faster.
    """
    if dtype.itemsize == 4 and not interpreted:
        return 16, 8
    if head_dim > _WIDE:
        return 16, 8
    # Tiles of 32 or more queries: prompts of models whose K/V heads have one or two query heads,
    # such as Qwen3-0.6B.
    return (32, 8) if head_dim > 128 else (64, 8 if has_window or tile_queries >= 32 else 4)


@triton.jit(do_not_specialize=("num_tokens", "num_parts"))
def _merge(
    output, lse, sinks, result, num_tokens, num_heads, num_parts,
    value_dim: tl.constexpr, value_block: tl.constexpr, most_parts: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    at, part, column = tl.program_id(0).to(tl.int64), tl.arange(0, most_parts), tl.arange(0, value_block)
    row = part * num_tokens.to(tl.int64) * num_heads + at
    part_lse = tl.load(lse + row, mask=part < num_parts, other=-float("inf"))
    largest = tl.maximum(tl.max(part_lse, axis=0), -1e30)
    if has_sinks:
        sink = tl.load(sinks + at % num_heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
    weight = tl.exp(part_lse - largest)
    total = tl.sum(weight, axis=0)
    if has_sinks:
        total += tl.exp(sink - largest)
    # Parts without keys have no numbers in memory.
    inside = (part_lse > -float("inf"))[:, None] & (column < value_dim)[None, :]
    values = tl.load(output + row[:, None] * value_dim + column[None, :], mask=inside, other=0.0)
    sums = tl.sum(weight[:, None] * values, axis=0)
    # Queries that see nothing are padding: any finite number is right.
    tl.store(result + at * value_dim + column, sums / tl.where(total > 0, total, 1.0), mask=column < value_dim)


def merged(output: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Merge parts [S, T, H, D_v] by log-sum-exps [S, T, H]; sinks [H] have no value."""
    num_parts, num_tokens, num_heads, value_dim = output.shape
    result = torch.empty(output.shape[1:], dtype=dtype, device=output.device)
    _merge[(num_tokens * num_heads,)](
        output, lse, lse if sinks is None else sinks, result, num_tokens, num_heads, num_parts,
        value_dim=value_dim, value_block=triton.next_power_of_2(value_dim), most_parts=_MOST_PARTS,
        has_sinks=sinks is not None,
    )  # fmt: skip
    return result


def parts_of(most_keys: int, work: int, part_bytes: int, most_added: int) -> int:
    """Return the most parts of a text.

    work: keys that all tiles of queries read, or fewer; part_bytes: of the results of a part;
    most_added: most programs for each group of query heads that parts may add.
    """
    if most_keys * most_added < 2 * work:  # every text is too short a share of the work
        return 1
    return max(1, min(_MOST_PARTS, most_keys // _PART_KEYS, _PARTS_BYTES // part_bytes))


@cache
def processors_of(device: torch.device) -> int:
    """Return the multiprocessors of a device; those of an H100 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
