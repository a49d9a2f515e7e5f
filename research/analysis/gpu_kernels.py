"""`kernels`: every Triton kernel at the shapes of Qwen3-8B and Qwen3-0.6B, compared with plain
operations and timed.

A time is that of a replayed CUDA graph, whose runs rotate over more data than the device's cache
holds. `error` is the norm of the difference over the norm of the plain result. On a CPU small
shapes are a dry run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, Filters, ProbsTable
from engine.kernels.torch_kernels import TORCH
from research.analysis import gpu_attention
from research.analysis.gpu_groups import KernelGroup, error_of, rotations, run_group
from research.analysis.gpu_results import SectionResults, add_setting, ceilings, write_stacks

_VOCABULARY = 151_936
_ROWS = (1, 4, 21, 64, 336)
"""Rows of distributions: those of plain steps, a tree of 4x5 and sixteen of them."""
_SAMPLING = (0.6, 20, 0.95)
"""Temperature, top-k and top-p of Qwen3's generation_config."""
_ROUNDING = 1e-3
"""Largest error of distributions: rounding may decide about a token at the edge of top-p."""


def add_ceilings(group: KernelGroup) -> None:
    """Measure copies and products."""
    group.add("ceilings", ceilings(group.device, 0.5 if group.on_cuda else 0.01))


def layers(group: KernelGroup) -> None:
    """Measure norms, rotations with writes, gates, and merges of parts."""
    from engine.cuda import attention_kernel, layer_kernels

    size = group.dtype.itemsize
    widths = ((4096, 12_288, 32), (1024, 3072, 16)) if group.on_cuda else ((48, 40, 4),)
    for width, inner, num_heads in widths:
        num_kv_heads, dim = (8, 128) if group.on_cuda else (2, 16)
        for count in (1, 21, 64, 256) if group.on_cuda else (3,):
            hidden, weight = group.randn(count, width), group.randn(width)
            expected = rms_norm(hidden.float(), (width,), weight.float(), 1e-6)
            run = partial(layer_kernels.norm, hidden, weight, 1e-6)
            group.kernel(f"norm, {count} x {width}", [run], 2 * count * width * size, error_of(run(), expected))
            joined = group.randn(count, 2 * inner)
            expected = silu(joined[:, :inner].float()) * joined[:, inner:].float()
            run = partial(layer_kernels.gate, joined)
            group.kernel(f"gate, {count} x {inner}", [run], 3 * count * inner * size, error_of(run(), expected))
            if group.on_cuda:  # the interpreter has no fp8
                _rounding(group, joined)
            group.case("rotation", partial(_rotation, group, count, num_heads, num_kv_heads, dim))
        for count, parts in ((1, 16), (21, 16), (64, 2)) if group.on_cuda else ((3, 4),):
            output = group.randn(parts, count, num_heads, dim, dtype=torch.float32)
            lse = group.randn(parts, count, num_heads, dtype=torch.float32)
            run = partial(attention_kernel.merged, output, lse, None, group.dtype)
            expected = (output * lse.softmax(0).unsqueeze(-1)).sum(0)
            name = f"merge, {count} x {num_heads} of {parts} parts"
            group.kernel(name, [run], output.numel() * 4, error_of(run(), expected))


def _rounding(group: KernelGroup, rows: Tensor) -> None:
    """Measure the rounding of rows to fp8."""
    from engine.cuda import layer_kernels

    count, width = rows.shape
    rounded, scales = layer_kernels.round_rows(rows)
    expected = (rows.abs().amax(1, keepdim=True) / torch.finfo(rounded.dtype).max).float()
    group.require(error_of(scales, expected) <= group.bound, f"scales of {count} x {width} in fp8 differ")
    # With three bits after the first, rounding moves a number by 2.6 % in the mean.
    error, run = error_of(rounded.float() * scales, rows), partial(layer_kernels.round_rows, rows)
    group.kernel(f"rows in fp8, {count} x {width}", [run], 3 * rows.numel(), error, 0.04)


def _rotation(group: KernelGroup, count: int, num_heads: int, num_kv_heads: int, dim: int) -> None:
    """Measure rotations and writes of K/V."""
    from engine.cuda import layer_kernels

    joined, norms = group.randn(count, (num_heads + 2 * num_kv_heads) * dim), (group.randn(dim), group.randn(dim))
    keys, values = (torch.zeros(4 * count, num_kv_heads, dim, device=group.device, dtype=group.dtype) for _ in range(2))
    slots, positions = (torch.randperm(4 * count, device=group.device)[:count] for _ in range(2))
    rotation = group.randn(4 * count, dim), group.randn(4 * count, dim)
    run = partial(layer_kernels.rotate_and_write, joined, rotation, positions, norms, 1e-6, slots, (keys, values))
    query = run()
    heads = joined.view(count, -1, dim)
    cosines, sines = (part[positions].float()[:, None] for part in rotation)
    errors = [error_of(values[slots], heads[:, num_heads + num_kv_heads :])]
    for found, start, stop, norm in (
        (query, 0, num_heads, norms[0]),
        (keys[slots], num_heads, num_heads + num_kv_heads, norms[1]),
    ):
        own = rms_norm(heads[:, start:stop], (dim,), norm, 1e-6).float()
        errors.append(error_of(found, own * cosines + own.roll(dim // 2, -1) * sines))
    num_bytes = 2 * joined.numel() * group.dtype.itemsize
    group.kernel(f"rotation, {count} x {num_heads} heads", [run], num_bytes, max(errors))


def products(group: KernelGroup) -> None:
    """Measure torch's largest product of each model, which reads its weights, for the share of the
    bandwidth.
    """
    for width, depth in ((24_576, 4096), (6144, 1024)) if group.on_cuda else ((48, 40),):
        num_bytes = width * depth * group.dtype.itemsize
        weights = [group.randn(width, depth) for _ in range(rotations(num_bytes))]
        rows = group.randn(1, depth)
        runs = [partial(linear, rows, weight) for weight in weights]
        error = error_of(runs[0](), rows.float() @ weights[0].float().t())
        group.kernel(f"product, 1 x {width} x {depth}", runs, num_bytes, error)


def distributions(group: KernelGroup) -> None:
    """Measure distributions, with Qwen3's own sampling as recorded steps make it."""
    from engine.cuda.kernels import TritonKernels

    kernels, width = TritonKernels(), _VOCABULARY if group.on_cuda else 9005
    for count in _ROWS if group.on_cuda else (2,):
        logits = 3 * group.randn(count, width, dtype=torch.float32)
        temperature, top_k, top_p = (torch.full((count,), value, device=group.device) for value in _SAMPLING)
        all_filters = Filters(torch.zeros_like(top_p), top_k, top_p, width)
        for name, filters in (("", Filters()), (", all filters", all_filters), (", top-p", Filters(top_p_N=top_p))):
            run = partial(kernels.distribution, logits, temperature, filters)
            known = filters._replace(most_k=_SAMPLING[1])
            error = error_of(run(), TORCH.distribution(logits, temperature, known))
            num_bytes = 2 * logits.numel() * 4
            group.kernel(f"distribution, {count} rows{name}", [run], num_bytes, error, _ROUNDING)


def draws(group: KernelGroup) -> None:
    """Measure draws."""
    from engine.cuda.kernels import TritonKernels

    for count in _ROWS if group.on_cuda else (2,):
        width = _VOCABULARY if group.on_cuda else 9005
        probs = (3 * group.randn(count, width, dtype=torch.float32)).softmax(1)
        rows = torch.arange(count, device=group.device)
        uniform = torch.rand(count, device=group.device, dtype=torch.float64)
        draw = partial(TritonKernels().draw, probs, rows, uniform)
        group.kernel(f"draw, {count} rows", [draw], probs.numel() * 4, _distance(probs, uniform, draw()), 1e-9)


def _distance(probs: Tensor, uniform: Tensor, tokens: Tensor) -> float:
    """Return the largest distance of a number from the piece of the cumulative sum of its token."""
    ends = probs.cumsum(1, dtype=torch.float64)
    end, mass = (one.gather(1, tokens[:, None])[:, 0] for one in (ends, probs.double()))
    wanted = uniform * ends[:, -1]
    return float(torch.maximum(end - mass - wanted, wanted - end).clamp(min=0).max())


def verdicts(group: KernelGroup) -> None:
    """Measure the race of four chains of five tokens, for several requests."""
    from engine.cuda.kernels import TritonKernels

    width = _VOCABULARY if group.on_cuda else 2500
    for count in (1, 4, 12) if group.on_cuda else (2,):
        chains, target, noise = chains_of(group.device, count, 4, 5, width)
        run = partial(TritonKernels().race, chains, target, noise)
        found, expected = (
            torch.stack([one.chain_B, one.accepted_B, one.next_token_B])
            for one in (run(), TORCH.race(chains, target, noise))
        )
        num_bytes = (chains.draft.probs_NV.numel() + target.probs_NV.numel()) * 4
        group.kernel(f"verdict, {count} x 4x5", [run], num_bytes, float((found != expected).any()), 0)


def chains_of(
    device: torch.device, num_requests: int, num_chains: int, length: int, width: int
) -> tuple[Chains, ProbsTable, ChainNoise]:
    """Return random chains whose first tokens are often accepted."""
    count = num_requests * num_chains
    draft_NV = (2 * torch.randn(count * length, width, device=device)).softmax(1)
    target_NV = (2 * torch.randn(count * (length + 1), width, device=device)).softmax(1)
    row_CX = torch.arange(count * (length + 1), device=device).view(count, length + 1)
    target_NV[row_CX[:, :-1].flatten()] = 0.2 * target_NV[row_CX[:, :-1].flatten()] + 0.8 * draft_NV
    uniform_N = torch.rand(count * length, device=device, dtype=torch.float64)
    tokens_CL = categorical(draft_NV, uniform_N).view(count, length)
    draft = ProbsTable(draft_NV, torch.arange(count * length, device=device).view(count, length), TORCH)
    chains = Chains(
        tokens_CL,
        torch.full((count,), length, device=device),
        torch.arange(num_requests, device=device).repeat_interleave(num_chains),
        draft,
        shape=(num_requests, num_chains),
    )
    numbers = torch.rand(2 * length + 3, count, device=device, dtype=torch.float64).unbind()
    accept_CL, chosen_CL = (torch.stack(numbers[at : at + length], 1) for at in (0, length))
    noise = ChainNoise(accept_CL, numbers[-1], numbers[-2], chosen_CL, numbers[-3])
    return chains, ProbsTable(target_NV, row_CX, TORCH), noise


def moves(group: KernelGroup) -> None:
    """Measure moves of accepted K/V in all layers."""
    from engine.cuda import move_kernel
    from engine.cuda.kernels import TritonKernels

    shape = (72, 64 * 64, 8, 128) if group.on_cuda else (2, 64, 2, 16)
    for count in (1, 16, 64) if group.on_cuda else (1,):
        storage = torch.randn(shape, device=group.device).to(group.dtype)
        expected = storage.clone()
        # Each move of a sequence overwrites what the next one reads.
        moves = [[(64 * number + slot + 1, 64 * number + slot) for slot in range(5)] for number in range(count)]
        TritonKernels().move([storage], moves)
        TORCH.move([expected], moves)
        error = error_of(storage, expected)
        operands = torch.tensor(moves, device=group.device).repeat(1, 7, 1)[:, :32].contiguous()
        operands[:, 5:] = -1
        num_bytes = 2 * 5 * count * shape[0] * shape[2] * shape[3] * storage.itemsize
        group.kernel(f"moves, {count} x 5", [partial(move_kernel.keep, storage, operands)], num_bytes, error, 0)


GROUPS: Sequence[tuple[Callable[[KernelGroup], None], float]] = (
    (add_ceilings, 25),
    (gpu_attention.tokens, 30),
    (gpu_attention.trees, 20),
    (distributions, 25),
    (draws, 20),
    (verdicts, 20),
    (layers, 20),
    (moves, 15),
    (gpu_attention.prompts, 25),
    (products, 25),
)
"""Groups and their time limits in seconds, most telling first; together they take less than their
limits.
"""
_DRY_LIMIT_S = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all groups."""
    parser = argparse.ArgumentParser(
        prog="python -m research.analysis.gpu_kernels", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("output", type=Path, help="the JSON document")
    add_setting(parser)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # What is imported before a fork need not be imported after it. No module uses the device when
    # it is imported.
    for name in ("cuda.attention_kernel", "cuda.layer_kernels", "cuda.kernels"):
        importlib.import_module(f"engine.{name}")
    gc.collect()
    gc.freeze()  # recording collects garbage every time
    findings = SectionResults(options.output)
    for work, limit_s in GROUPS:
        name = work.__name__.replace("_", " ")
        limit_s = _DRY_LIMIT_S if options.device == "cpu" else limit_s
        run_group(name, work, torch.device(options.device), findings, limit_s)
    return 0


if __name__ == "__main__":
    write_stacks()  # of this process alone, not of one that calls `main`
    sys.exit(main())
