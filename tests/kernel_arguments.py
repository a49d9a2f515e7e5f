"""Checks of what Triton kernels assume of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Pointers of kernels by the type of their numbers.
_TYPES: dict[torch.dtype, str] = {
    torch.int32: "shares pages starts counts first_keys ends num_keys node_positions limits",
    torch.int64: (
        "words slots moves lowest top_ks target_rows draft_rows lengths requests accepted tokens verdict turns begins"
    ),
    torch.float32: "lse largest totals edges temperatures probs top_ps kept target draft scales inputs states",
    torch.float8_e4m3fn: "rounded",
    torch.float64: (
        "surplus_sums target_sums uniforms log_ratios log_ceilings accept_numbers residual_numbers score_numbers scores"
    ),
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TYPES_OF = {name: (dtype,) for dtype, names in _TYPES.items() for name in names.split()} | dict.fromkeys(
    "query keys values output result sinks storage joined cosines sines query_norm key_norm hidden weight normed rows "
    "logits numbers".split(),
    _FLOATS,  # a model's numbers
)
_TYPES_IN = {
    ("_attend", "positions"): (torch.int32,),
    ("_divide", "positions"): (torch.int32,),
    ("_rotate_and_write", "positions"): (torch.int64,),
    ("_keep", "sums"): (torch.float64,),
    ("_edge", "sums"): (torch.float64,),
    ("_narrow", "sums"): (torch.float64,),
    ("_narrow", "wanted"): (torch.float32, torch.int64),  # a share or a count
    ("_walk", "weights"): (torch.float64,),
    ("_decide", "weights"): (torch.float64,),
    # Numbers of rows stand in their place, unused, without drafts, and if all are wanted.
    ("sum_tiles", "weights"): (torch.float64, torch.int64),
    ("_draw", "weights"): (torch.float64, torch.int64),
    ("_draw", "wanted"): (torch.int8, torch.int64),
}
_OWN_STRIDES = {
    ("_attend", "query"),
    ("_attend", "values"),
    ("_sum_exponentials", "logits"),
    ("_softmax", "logits"),
    ("_narrow", "numbers"),
}
"""Arguments whose rows may lie apart, because their strides are arguments, too."""
_POWERS = (
    *("block", "tile", "tiles", "parts", "columns", "most", "rows", "lines"),
    *("key_block", "value_block", "tile_keys"),
)
"""Constants that size tiles: powers of two."""
_OPTIONS = ("num_warps", "num_stages")
_MOST_NUMBERS = 1 << 20
"""Most numbers of a tile in Triton."""
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Most programs of a launch along each axis."""


def check_launch(
    kernel: Any, grid: Sequence[int], operands: Sequence[Any], constants: Mapping[str, Any], device: torch.device
) -> str | None:
    """Return what is wrong with a launch on a device, or None; kernel: its function."""
    if any(not 0 <= count <= most for count, most in zip(grid, _MOST_PROGRAMS, strict=False)):
        return f"{tuple(grid)} programs"
    named = {name: value for name, value in constants.items() if name not in _OPTIONS}
    for name, value in inspect.signature(kernel).bind(*operands, **named).arguments.items():
        fault = (
            _fault_of_pointer(kernel.__name__, name, value, device)
            if isinstance(value, Tensor)
            else _fault_of_number(name, value)
        )
        if fault:
            return f"{name} {fault}"
    return None


def _fault_of_number(name: str, value: Any) -> str | None:
    if not isinstance(value, bool | int | float):
        return f"is {value!r}"
    if name in _POWERS and (value < 1 or int(value) & (int(value) - 1) or value > _MOST_NUMBERS):
        return f"is {value}, not the size of a tile"
    return None if abs(value) < 2**63 else f"is {value}, more than 64 bits"


def _fault_of_pointer(kernel: str, name: str, value: Tensor, device: torch.device) -> str | None:
    if value.device != device:
        return f"is on {value.device}"
    wanted = _TYPES_IN.get((kernel, name)) or _TYPES_OF.get(name)
    if wanted is None:
        return "is in no table of tests/kernel_arguments.py"
    if value.dtype not in wanted:
        return f"has numbers of {value.dtype}, not {' or '.join(map(str, wanted))}"
    if (kernel, name) in _OWN_STRIDES:
        return None if value.stride(-1) == 1 else "has rows that are not contiguous"
    return None if value.is_contiguous() else "is not contiguous"
