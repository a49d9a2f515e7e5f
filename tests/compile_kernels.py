"""Compiles every Triton kernel for compute capability 9.0, without a device.

Threads compile at the same time, as they do at the first start on a device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.cuda.attention_kernel import (
    _attend,
    _divide,
    _merge,
    heads_of_program,
    tile_keys_of,
    tile_queries_of,
)
from engine.cuda.block_kernels import _decide, _race, _walk
from engine.cuda.layer_kernels import (
    _ROUNDED_TILE,
    HEAD_WARPS,
    NORM_WARPS,
    _gate,
    _norm,
    _rotate_and_write,
    _round_rows,
)
from engine.cuda.move_kernel import _keep
from engine.cuda.nucleus_kernels import _edge, _narrow
from engine.cuda.nucleus_kernels import _keep as _keep_nucleus
from engine.cuda.recurrence_kernels import _multiply_turns, _walk_turns
from engine.cuda.row_kernels import _draw, _softmax, _sum_exponentials, sum_tiles

_ATTENTION = {
    "page_size": 16,
    "has_softcap": False,
    "has_window": False,
    "in_chunks": False,
}
_SHARED_BYTES = 227 << 10
"""Memory that a program may share on an H100 or H200."""
_STACK_BYTES = 16
"""Most bytes of a thread's stack: two numbers of the prologue, stored and loaded once."""
_INTEGERS = ("shares", "node_positions", "limits", "positions", "pages")
_ALIGNED = (
    *("query", "keys", "values", "output", "lse", "query_head_stride", "query_token_stride", "num_heads"),
    *_INTEGERS,
)
"""Arguments of attention that 16 always divides; else its tiles would need more registers."""


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """Down to machine code; arguments without a type are 32-bit integers.

    aligned: arguments that 16 divides, for which wider accesses are made.
    """
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    code = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    assert code.asm["cubin"]
    assert code.metadata.shared <= _SHARED_BYTES
    usage = resources(code)
    is_held = usage["LOCAL"] == 0 and usage["STACK"] <= _STACK_BYTES
    assert is_held, f"{kernel.fn.__name__} spills registers: {usage}"
    # In one call, so that lines of several threads do not mix.
    sys.stdout.write(f"{kernel.fn.__name__}: {usage['REG']} registers, {code.metadata.shared >> 10} KiB shared\n")
    return code


def resources(code: Any) -> dict[str, int]:
    """Return a compiled kernel's resources, by the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed.stdout)}


def reads_before_it_writes(code: Any) -> bool:
    """Return whether all threads have read what they move before any writes."""
    ptx = code.asm["ptx"]
    last_read, first_write = ptx.rindex("ld.global"), ptx.index("st.global")
    return any(last_read < found.start() < first_write for found in re.finditer(r"bar(rier)?\.sync", ptx))


def reads_wide(code: Any) -> bool:
    """Whether keys and values are read by 16 bytes a thread."""
    return bool(re.search(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10", code.asm["ptx"]))


def compile_attention(
    types: dict[str, str], dtype: str, num_queries: int, groups: int = 4, head_dim: int = 128, **more: Any
) -> Any:
    """Compile attention as it is served, its arguments as aligned as those of a model are.

    num_queries: of each sequence, which choose a tile; groups: query heads of each K/V head.
    """
    served = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[dtype]
    slices = groups // heads_of_program(groups, served, head_dim)
    groups //= slices
    tile_queries = tile_queries_of(num_queries, groups, served, head_dim)
    tile = tile_keys_of(served, head_dim, tile_queries, more.get("has_window", False), interpreted=False)
    constants = _ATTENTION | {"groups": groups, "slices": slices, "tile_keys": tile[0]}
    constants |= {"rows": max(16, triton.next_power_of_2(groups * tile_queries))}
    constants |= {"upcast": dtype == "*fp32", "key_dim": head_dim, "value_dim": head_dim}
    constants |= {"value_stride": head_dim}
    block = triton.next_power_of_2(head_dim)
    constants |= {"key_block": block, "value_block": block, **more}
    types = dict.fromkeys(("query", "keys", "values"), dtype) | types
    return compiled(_attend, types, constants, _ALIGNED, tile[1])


def compile_wide_attention(types: dict[str, str], dtype: str, num_queries: int) -> None:
    """Compile attention, which reads 16 bytes a thread."""
    code = compile_attention(types, dtype, num_queries)
    assert dtype == "*fp32" or reads_wide(code)


def compile_moves(types: dict[str, str], aligned: tuple[str, ...]) -> None:
    """Compile moves, which are read before they are written."""
    assert reads_before_it_writes(compiled(_keep, types, {"most": 32, "columns": 128}, aligned))


def compile_layer(dtype: str) -> None:
    """Compile the operations between products, for heads whose size is not a power of two."""
    numbers = dict.fromkeys(("hidden", "weight", "normed", "joined", "result"), dtype)
    numbers |= dict.fromkeys(("cosines", "sines", "query_norm", "key_norm", "query", "keys", "values"), dtype)
    numbers |= {"slots": "*i64", "positions": "*i64", "eps": "fp32"}
    compiled(_norm, numbers, {"block": 4096}, num_warps=NORM_WARPS)
    for flag in (False, True):
        compiled(_rotate_and_write, numbers, {"head_dim": 80, "block": 128, "has_norm": flag}, num_warps=HEAD_WARPS)
    compiled(_gate, numbers, {"tile": 1024})
    if dtype == "*bf16":
        rounding = {"rows": dtype, "rounded": "*fp8e4nv", "scales": "*fp32"}
        compiled(_round_rows, rounding, {"tile": _ROUNDED_TILE}, ("rows", "rounded", "width"), num_warps=8)


def model_kernels() -> Iterator[Callable[[], object]]:
    """Yield compilations of kernels of layers and K/V, in the kinds that are served."""
    own = dict.fromkeys(_INTEGERS, "*i32") | {"words": "*i64", "output": "*fp32", "lse": "*fp32"}
    own |= {"scale": "fp32", "softcap": "fp32"}
    for dtype in ("*bf16", "*fp16", "*fp32"):
        # A layer of a large pool has more numbers than 32 bits count.
        moved = {"storage": dtype, "moves": "*i64", "layer_stride": "i64"}
        for aligned in ((), ("storage", "moves", "layer_stride", "width")):
            yield partial(compile_moves, moved, aligned)
        # A step's first tokens, one of its chains, and a chunk of a prompt; in float32 the last two
        # have one tile.
        for num_queries in (1, 6, 200) if dtype == "*bf16" else (1, 200):
            yield partial(compile_wide_attention, own, dtype, num_queries)
        added = {"has_softcap": True, "has_window": True}
        yield partial(compile_attention, own | {"output": dtype}, dtype, 200, head_dim=80, **added)
        yield partial(compile_attention, own, dtype, 200, head_dim=256, **added)
        merging = {"output": "*fp32", "lse": "*fp32", "sinks": dtype, "result": dtype}
        yield partial(compile_layer, dtype)
        for has_sinks in (False, True):
            constants = {"value_dim": 80, "value_block": 128, "most_parts": 16, "has_sinks": has_sinks}
            yield partial(compiled, _merge, merging, constants)
    text_arrays = dict.fromkeys(("shares", "starts", "counts", "first_keys", "ends", "num_keys", "limits"), "*i32")
    for tile_queries in (4, 16):
        for has_window in (False, True):
            constants = {"tile_queries": tile_queries, "tile_keys": 64, "has_window": has_window, "in_chunks": False}
            yield partial(compiled, _divide, text_arrays | {"positions": "*i32"}, constants, num_warps=1)
    # Wide heads of Gemma 4, and latents with the 20 query heads of GLM-4.7-Flash.
    for num_queries in (1, 200):
        yield partial(compile_attention, own, "*bf16", num_queries, 8, 512)
        yield partial(compile_attention, own, "*bf16", num_queries, 20, 576, value_dim=512, value_block=512)
    # Latents with the 128 query heads of DeepSeek-V3, which several programs share, and the chunks
    # of Llama 4.
    yield partial(compile_attention, own, "*bf16", 1, 128, 576, value_dim=512, value_block=512)
    yield partial(compile_attention, own, "*bf16", 6, 5, has_window=True, in_chunks=True)
    # Prompts in one part, and trees in parts, of models with other numbers of query heads for each
    # K/V head.
    for groups in (1, 2, 5, 7, 8):
        yield partial(compile_attention, own | {"output": "*bf16"}, "*bf16", 200, groups)
        yield partial(compile_attention, own, "*bf16", 6, groups)


def recurrence_kernels() -> Iterator[Callable[[], object]]:
    """Yield compilations of the kernels of recurrent layers, in the sizes of served models."""
    arrays = dict.fromkeys(("inputs", "query", "scales", "states", "output"), "*fp32")
    arrays |= dict.fromkeys(("tokens", "turns", "begins"), "*i64")
    for has_beta in (True, False):
        for rows in (16, 64):
            constants = {"has_beta": has_beta, "rows": rows, "lines": 16, "value_block": 32}
            yield partial(compiled, _multiply_turns, arrays, constants, num_warps=8, num_stages=1)
        for key_block in (128, 256):
            constants = {"has_beta": has_beta, "key_block": key_block, "value_block": 4096 // key_block}
            yield partial(compiled, _walk_turns, arrays, constants, num_stages=1)
    # Mamba 1: a channel is a head.
    constants = {"has_beta": False, "key_block": 16, "value_block": 1}
    yield partial(compiled, _walk_turns, arrays, constants, num_warps=1, num_stages=1)


def distribution_kernels() -> Iterator[Callable[[], object]]:
    """Yield compilations of the kernels of distributions and verdicts."""
    rows = dict.fromkeys(("logits", "temperatures", "probs", "largest", "totals", "edges"), "*fp32")
    for has_edges in (False, True):
        constants = {"tile": 4096, "tiles": 64, "has_edges": has_edges}
        for kernel in (_sum_exponentials, _softmax):
            yield partial(compiled, kernel, rows, constants)
    nucleus = dict.fromkeys(("probs", "numbers", "top_ps", "kept", "largest", "temperatures", "edges"), "*fp32")
    nucleus |= {"lowest": "*i64", "sums": "*fp64", "top_ks": "*i64"}
    for by_count in (False, True):
        wanted = {"wanted": "*i64" if by_count else "*fp32"}
        yield partial(
            compiled, _narrow, nucleus | wanted, {"tile": 2048, "tiles": 128, "parts": 64, "by_count": by_count}
        )
    yield partial(compiled, _keep_nucleus, nucleus, {"tile": 2048, "tiles": 128})
    yield partial(compiled, _edge, nucleus, {"tiles": 128})
    distributions = {
        "target": "*fp32",
        "target_rows": "*i64",
        "draft": "*fp32",
        "draft_rows": "*i64",
        "weights": "*fp64",
    }
    sums = {"surplus_sums": "*fp64", "target_sums": "*fp64"}
    draws = {"wanted": "*i8", "uniforms": "*fp64", "tokens": "*i64"}
    for has_draft in (True, False):
        yield partial(compiled, sum_tiles, distributions | sums, {"tile": 1024, "has_draft": has_draft})
        constants = {"tile": 1024, "tiles": 256, "has_draft": has_draft}
        yield partial(compiled, _draw, distributions | sums | draws, constants)
    verified = dict.fromkeys(("tokens", "target_rows", "draft_rows", "lengths"), "*i64") | sums
    verified |= dict.fromkeys(("accepted", "requests", "verdict"), "*i64")
    verified |= dict.fromkeys(("log_ratios", "log_ceilings", "weights", "scores"), "*fp64")
    verified |= dict.fromkeys(("accept_numbers", "residual_numbers", "score_numbers"), "*fp64")
    verified |= dict.fromkeys(("target", "draft"), "*fp32")
    yield partial(compiled, _walk, verified, {"block": 16})
    yield partial(compiled, _decide, verified, {"block": 16, "tile": 1024, "tiles": 256})
    yield partial(compiled, _race, verified, {"block": 1024})


def main() -> None:
    """Compile all kernels."""
    with ThreadPoolExecutor() as pool:
        compilations = [*model_kernels(), *recurrence_kernels(), *distribution_kernels()]
        for running in [pool.submit(compilation) for compilation in compilations]:
            running.result()


if __name__ == "__main__":
    main()
