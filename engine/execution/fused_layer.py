"""Whether and how kernels compute a layer (`triton_layer.py`, `triton_product.py`): on CUDA, where they are right.

On every device they are tried once on made-up rows, beside the plain operations. Whether norms and gate are part of a
product of few rows, and in which tiles, is measured on the model's own weights at start: reading weights fast is what
matters there, and the device's library may do that better. Not for: the operations themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from engine.execution.graphs import recorder
from engine.kernels import usable

_ROWS = (1, 16, 32, 64)
"""Numbers of rows up to which a tile is chosen; kernels are compiled for 16, 32 and 64."""
_TILES = (16, 32, 64)
"""Columns of a program."""
_CLEAR_GAIN = 1.02
"""By how much a kernel must be faster than the operations that it stands for."""
_MEASURED_BYTES = 256 << 20
"""Weights that a measurement goes through, if there are so many: more than a device's cache holds."""
_NUM_TURNS = 5

Tiles = Mapping[tuple[bool, int], int]
"""Columns of a program by (whether the product is gated, one of `_ROWS`); without an entry, or at 0, the norm, the
product and the gate are apart."""
Timer = Callable[[], float]
"""Does some work once more, and says how many seconds it took."""


class NormedProduct(NamedTuple):
    """The product of a norm with a weight; of a gated one silu(first half) * second half."""

    norm_D: Tensor
    weight_ND: Tensor
    bias_N: Tensor | None
    gated: bool

    def __call__(self, hidden_TD: Tensor, eps: float, tile: int) -> Tensor:
        """Of rows that follow each other in memory: in one kernel, or with tile 0 in two, gated in three."""
        from engine.execution import triton_layer, triton_product  # Triton is there where kernels are used

        if tile:
            return triton_product.norm_product(
                hidden_TD, self.norm_D, eps, self.weight_ND, self.bias_N, self.gated, tile
            )
        joined = linear(triton_layer.norm(hidden_TD, self.norm_D, eps), self.weight_ND, self.bias_N)
        return triton_layer.gate(joined) if self.gated else joined


def tile_of(tiles: Tiles, gated: bool, num_rows: int) -> int:
    """The tile for a product of so many rows; 0 for norm, product and gate apart."""
    rows = next((rows for rows in _ROWS if num_rows <= rows), None)
    return 0 if rows is None else tiles.get((gated, rows), 0)


def tiles_for(num_rows: int) -> list[int]:
    """The tiles that are tried for so many rows: smaller ones would need more registers than there are."""
    return [tile for tile in _TILES if 2 * tile >= num_rows]


def fastest_tiles(
    products: Sequence[NormedProduct], eps: float, timer_of: Callable[[Callable[[], None]], Timer] | None = None
) -> Tiles:
    """The fastest tile for few rows of each kind of these products, which are alike but for being gated.

    timer_of: makes a timer of some work; None records it as a CUDA graph. Raises RuntimeError where the kernel gives
    other numbers.
    """
    device, dtype = products[0].weight_ND.device, products[0].weight_ND.dtype
    if dtype == torch.float16:  # a row before its division may exceed the range
        return {}
    if timer_of is None:
        with recorder() as record:
            return fastest_tiles(products, eps, lambda work: _timer(record(work)))
    if (fault := find_product_fault(device, dtype)) is not None:
        raise RuntimeError(fault)
    tiles = {}
    for gated in (False, True):
        alike = [product for product in products if product.gated is gated]
        measured = alike[: max(1, _MEASURED_BYTES // alike[0].weight_ND.nbytes)]
        for rows in _ROWS:
            hidden_TD = made_up_rows(device, dtype, rows, measured[0].weight_ND.shape[1])
            timers = {
                tile: timer_of(partial(_run_all, measured, hidden_TD, eps, tile)) for tile in (0, *tiles_for(rows))
            }
            turns = [{tile: timer() for tile, timer in timers.items()} for _ in range(_NUM_TURNS)]
            taken_s = {tile: statistics.median(turn[tile] for turn in turns) for tile in timers}
            best = min(taken_s, key=taken_s.__getitem__)
            if best and taken_s[best] * _CLEAR_GAIN < taken_s[0]:
                tiles[gated, rows] = best
    return tiles


def _run_all(products: Sequence[NormedProduct], hidden_TD: Tensor, eps: float, tile: int) -> None:
    for product in products:
        product(hidden_TD, eps, tile)


def _timer(graph: torch.cuda.CUDAGraph) -> Timer:
    """Times recorded work on the device alone."""

    def timer() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()  # finds the device busy, as a step does
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    return timer


def use_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute the layers of a model of this dtype."""
    return usable("layers are computed", find_fault, device, dtype)


def use_cpu_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels that Numba compiles (`cpu_layers.py`) compute the layers on a CPU."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    return usable("layers are computed", _find_cpu_fault, device, dtype, compiler="Numba")


def _find_cpu_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    from engine.execution import cpu_layers  # Numba is there where kernels are used

    return cpu_layers.find_fault(device, dtype)


def made_up_rows(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers to try kernels on: no two alike, the same every time."""
    return torch.arange(prod(shape), device=device).sqrt().mul(7).sin().view(shape).to(dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers of about 1 differ by no more than some roundings."""
    return torch.allclose(found.float(), expected.float(), atol=16 * torch.finfo(found.dtype).eps, rtol=0)


def find_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with its kernels on a device; None where they give the plain operations' numbers."""
    from engine.execution import triton_layer

    made_up = partial(made_up_rows, device, dtype)
    num_heads, num_kv_heads, head_dim = 6, 2, 80
    hidden, weight = made_up(5, 480), made_up(480)
    if not close(triton_layer.norm(hidden, weight, 1e-5), rms_norm(hidden, (480,), weight, 1e-5)):
        return "norms differ"
    if not close(triton_layer.gate(hidden), silu(hidden[:, :240]) * hidden[:, 240:]):
        return "gates differ"
    joined = made_up(5, (num_heads + 2 * num_kv_heads) * head_dim)
    keys, values = made_up(9, num_kv_heads, head_dim).zero_(), made_up(9, num_kv_heads, head_dim).zero_()
    cosines, sines, slots = made_up(5, head_dim), made_up(5, head_dim).flip(1), torch.tensor([4, 0, 8, 2, 5]).to(device)
    norms = weight[:head_dim], weight[head_dim : 2 * head_dim]
    query = triton_layer.rotate_and_write(joined, (cosines, sines), norms, 1e-5, slots, (keys, values))
    heads = joined.view(5, -1, head_dim)
    for found, start, stop, norm in (
        (query, 0, num_heads, norms[0]),
        (keys[slots], num_heads, num_heads + num_kv_heads, norms[1]),
    ):
        own = rms_norm(heads[:, start:stop], (head_dim,), norm, 1e-5)
        if not close(found, own * cosines[:, None] + own.roll(head_dim // 2, -1) * sines[:, None]):
            return "rotations differ"
    if not torch.equal(values[slots], heads[:, num_heads + num_kv_heads :]):
        return "values differ"
    return None


def find_product_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """The same of the kernel of products: for all its numbers of rows, widths that 16 divides and others."""
    made_up = partial(made_up_rows, device, dtype)
    for num_rows, width, num_columns in ((5, 480, 144), (21, 200, 70), (40, 512, 160)):
        hidden, norm, weight = made_up(num_rows, width), made_up(width).flip(0), made_up(num_columns, width) / 8
        bias = made_up(num_columns)
        expected = linear(rms_norm(hidden.float(), (width,), norm.float(), 1e-5), weight.float())
        half = num_columns // 2
        gated = silu(expected[:, :half]) * expected[:, half:]
        for tile in tiles_for(num_rows):
            plain = NormedProduct(norm, weight, bias, gated=False)(hidden, 1e-5, tile)
            both = NormedProduct(norm, weight, None, gated=True)(hidden, 1e-5, tile)
            for found, right in ((plain, expected + bias.float()), (both, gated)):
                # Sums of many products: their rounding grows with the largest of them.
                allowed = max(4 * torch.finfo(dtype).eps, 4e-6) * float(right.abs().max())
                if not torch.allclose(found.float(), right, atol=allowed, rtol=0):
                    return "products differ"
    return None
