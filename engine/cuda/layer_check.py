"""Decides whether Triton's kernels compute a layer (`layer_kernels.py`).

On every device the kernels run once on synthetic rows, and are compared with the plain operations.
Not for: the operations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import rms_norm, silu

from engine.kernels.checks import close, synthetic_rows, usable


def use_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute the layers of a model of this dtype."""
    return usable("layers are computed", find_fault, device, dtype)


def use_float8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernel rounds rows to fp8."""
    return usable("rows are rounded to fp8", find_rounding_fault, device, dtype)


def find_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the fault of the kernels on a device; None if they agree with plain operations."""
    from engine.cuda import layer_kernels

    rows = partial(synthetic_rows, device, dtype)
    num_heads, num_kv_heads, head_dim = 6, 2, 80
    num_rotated = num_heads + num_kv_heads
    hidden = rows(5, 480)
    weight = rows(480)
    if not close(layer_kernels.norm(hidden, weight, 1e-5), rms_norm(hidden, (480,), weight, 1e-5)):
        return "norms differ"
    if not close(layer_kernels.gate(hidden), silu(hidden[:, :240]) * hidden[:, 240:]):
        return "gates differ"
    joined = rows(5, (num_rotated + num_kv_heads) * head_dim)
    keys = rows(9, num_kv_heads, head_dim).zero_()
    values = rows(9, num_kv_heads, head_dim).zero_()
    rotation = rows(9, head_dim), rows(9, head_dim).flip(1)
    slots = torch.tensor([4, 0, 8, 2, 5]).to(device)
    positions = slots.flip(0)
    cosines, sines = (part[positions] for part in rotation)
    query_norm = weight[:head_dim]
    key_norm = weight[head_dim : 2 * head_dim]
    query = layer_kernels.rotate_and_write(
        joined, rotation, positions, (query_norm, key_norm), 1e-5, slots, (keys, values)
    )
    heads = joined.view(5, -1, head_dim)
    for rotated, part, norm in (
        (query, heads[:, :num_heads], query_norm),
        (keys[slots], heads[:, num_heads:num_rotated], key_norm),
    ):
        normed = rms_norm(part, (head_dim,), norm, 1e-5)
        swapped = normed.roll(head_dim // 2, -1)
        if not close(rotated, normed * cosines[:, None] + swapped * sines[:, None]):
            return "rotations differ"
    if not torch.equal(values[slots], heads[:, num_rotated:]):
        return "values differ"
    return None


def find_rounding_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the fault of the kernel that rounds rows to fp8 on a device.

    None if it agrees with the plain operations, in which a quotient may be rounded once more.
    """
    from engine.cuda import layer_kernels

    rows = synthetic_rows(device, dtype, 5, 480)
    most = torch.finfo(torch.float8_e4m3fn).max
    rows[3] = 0
    rounded, scales = layer_kernels.round_rows(rows)
    expected = (rows.abs().amax(1, keepdim=True) / most).float()
    if not torch.allclose(scales, expected, atol=0, rtol=torch.finfo(dtype).eps):
        return "scales of fp8 differ"
    # Three bits after the first.
    if not torch.allclose(rounded.float() * scales, rows.float(), atol=2e-3, rtol=1 / 16):
        return "rows of fp8 differ"
    return None
