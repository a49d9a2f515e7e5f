"""Chooses a device's kernels once in a process, and compares them with the specification.

An operation that fails, or returns other numbers than plain torch, is replaced by torch's, with a
warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.checks import raise_if_lost
from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, Filters, ProbsTable, RecurrentSteps
from engine.kernels.torch_kernels import TORCH, Kernels

log = logging.getLogger("polydraft")

_WIDTHS = (4096, 9005)
"""Widths of synthetic rows: a multiple of 16, which compilers treat separately, and another."""
_NUM_ROWS = 6
_NAMES = np.array([[-(2**63), -1, 2**63 - 1, 7], [0, 3, 2**40, 1]])
"""Seeds and positions of random numbers."""
_NEEDED = {
    "decides": {"decide"},
    "by_tiles": {"draw", "draw_residual", "race"},
    "reads_no_filter": {"distribution", "truncated", "nucleus"},
}
"""Operations for each property of `Kernels`, which torch's do not have."""
_ROUNDING = {"recur": 1e-5}
"""Difference that rounding explains, of operations that add signed numbers in another order."""


@cache
def choose(device: torch.device) -> Kernels:
    """Return the fastest kernels of a device; operations that are wrong there are torch's."""
    kernels = _compiled(device.type)
    if kernels is TORCH:
        return kernels
    operands = cases(device)

    def fault_of(name: str) -> str | None:
        return find_fault(kernels, name, operands[name])

    checked = (in_threads if device.type == "cuda" else map)(fault_of, operands)
    faults = {name: fault for name, fault in zip(operands, checked, strict=True) if fault is not None}
    for name, fault in faults.items():
        log.warning("%s without %s: %s", name, type(kernels).__name__, fault)
    return without(kernels, faults) if faults else kernels


def without(kernels: Kernels, names: Iterable[str]) -> Kernels:
    """Return kernels with torch's operations in place of the named ones."""
    replaced: dict[str, Any] = {name: staticmethod(getattr(TORCH, name)) for name in names}
    replaced |= {name: False for name, needed in _NEEDED.items() if needed & replaced.keys()}
    mixed: type[Any] = type(f"Some{type(kernels).__name__}", (type(kernels),), replaced)
    result: Kernels = mixed()
    return result


def in_threads(work: Callable[[str], str | None], names: Iterable[str]) -> list[str | None]:
    """Do work for all names in threads on this CUDA device; each compiles on one core."""
    device = torch.cuda.current_device()
    is_inference = torch.is_inference_mode_enabled()

    def work_there(name: str) -> str | None:
        torch.cuda.set_device(device)
        with torch.inference_mode(is_inference):
            return work(name)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(work_there, names))


def _compiled(device_type: str) -> Kernels:
    try:
        if device_type == "cpu":
            from engine.cpu.kernels import NumbaKernels  # Numba is an optional package

            return NumbaKernels()
        if device_type == "cuda":
            from engine.cuda.kernels import TritonKernels  # Triton is an optional package

            return TritonKernels()
    except Exception as error:  # a compiler that is missing or does not work here
        log.warning("plain operations instead of kernels: %s", error)
    return TORCH


def find_fault(kernels: Kernels, name: str, operands: Sequence[tuple[Any, ...]]) -> str | None:
    """Return what is wrong with an operation; None if its results are torch's."""
    try:
        for case in operands:
            results = _results(getattr(kernels, name), case)
            expected = _results(getattr(TORCH, name), case)
            if not all(map(partial(_agree, atol=_ROUNDING.get(name, 1e-7)), results, expected)):
                return "results differ from those of plain operations"
    except Exception as error:  # a kernel that cannot be compiled or run here
        for device in {tensor.device for tensor in _tensors_in(list(operands))}:
            raise_if_lost(device, error)
        return str(error) or type(error).__name__
    return None


def _results(operation: Callable[..., Any], operands: tuple[Any, ...]) -> list[Tensor]:
    """Return all tensors of a result, and of the operands after the operation."""
    operands = deepcopy(operands)
    return list(_tensors_in([operation(*operands), operands]))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor | np.ndarray):
        yield torch.as_tensor(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _agree(result: Tensor, expected: Tensor, atol: float) -> bool:
    # Random numbers, and the largest numbers of rows.
    if result.dtype == expected.dtype == torch.float64:
        return torch.equal(result, expected)
    if result.is_floating_point() and result.dtype == expected.dtype:
        return torch.allclose(result.float(), expected.float(), rtol=1e-4, atol=atol)
    return torch.equal(result, expected)


def _logits(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ([N, V] logits with masked tokens and tiles, [N] temperatures)."""
    logits_NV = 4 * torch.arange(_NUM_ROWS * width, device=device).sqrt().mul(9).sin().view(_NUM_ROWS, width)
    logits_NV[1, ::3] = -torch.inf
    logits_NV[2, : width // 2] = -torch.inf
    return logits_NV, torch.linspace(0.3, 2, _NUM_ROWS, device=device)


def _chains(device: torch.device, width: int = 2500) -> tuple[Chains, ProbsTable, ChainNoise]:
    """Return three chains of up to four tokens for eight requests; some prefixes are dead."""
    num_requests, num_chains, length = 8, 3, 4
    count = num_requests * num_chains

    def numbers(salt: int, *shape: int) -> Tensor:
        place = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64, device=device)
        return (place * (0.754877666 + salt * 0.1)).frac().view(shape)

    draft_NV = (3 * numbers(1, count * length, width)).exp().float()
    draft_NV /= draft_NV.sum(1, keepdim=True)
    draft_row_CL = torch.arange(count * length, device=device).view(count, length)
    target_row_CX = torch.arange(count * (length + 1), device=device).view(count, length + 1)
    target_NV = (3 * numbers(2, count * (length + 1), width)).exp().float()
    target_NV /= target_NV.sum(1, keepdim=True)
    target_NV[target_row_CX[:, :-1].flatten()] += 2 * draft_NV
    target_NV[:, ::7] = 0
    target_NV /= target_NV.sum(1, keepdim=True)
    tokens_CL = categorical(draft_NV, numbers(3, count * length).flatten()).view(count, length)
    request_C = torch.arange(num_requests, device=device).repeat_interleave(num_chains)
    length_C = torch.arange(count, device=device) % (length + 1)
    draft = ProbsTable(draft_NV, draft_row_CL, TORCH)
    chains = Chains(tokens_CL, length_C, request_C, draft, shape=(num_requests, num_chains))
    shapes = {"accept_CL": (count, length), "chosen_accept_CL": (count, length)}
    drawn = {
        field.name: numbers(4 + salt, *shapes.get(field.name, (count,)))
        for salt, field in enumerate(fields(ChainNoise))
    }
    return chains, ProbsTable(target_NV, target_row_CX, TORCH), ChainNoise(**drawn)


def _recurrences(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield operands of GDN, of a decay for each line of a state, and of Mamba 2 and 1.

    A text of two tokens continues from a state and stores another one twice; three nodes follow,
    two of them siblings. The second text continues from a state of the first. The third text begins
    with zeros. Another pass, with a decay for each head, has a text of twenty tokens.
    """
    text = [(4, -1, -1, -1, -1, -1), (1, -1, -1, 0, 1, 2)]
    tree = [(2, -1, 0, 1, -1, -1), (0, 0, 1, 2, -1, -1), (3, 0, 2, 3, -1, -1)]
    others = [(5, -1, -1, 4, -1, 0), (2, -1, -1, 5, -1, -1)]
    columns = np.array([*text, *tree, *others], dtype=np.int64).T.copy()
    several = RecurrentSteps(columns, np.array([0, 5, 6, 7]), np.array([0, 2, -1]))
    columns = np.full((6, 20), -1)
    columns[0], columns[3] = np.arange(20) % 6, np.maximum(np.arange(20) - 14, -1)
    columns[4, -1], columns[5, 17] = 1, 2
    prompt = RecurrentSteps(columns, np.array([0, 20]), np.array([0]))

    def numbers(*shape: int) -> Tensor:
        return torch.arange(torch.Size(shape).numel(), device=device).mul(1.7).sin().view(shape)

    for groups, heads, key_dim, value_dim, rates, scales, has_beta in (
        (2, 4, 8, 6, 1, 1, True),
        (4, 4, 8, 8, 8, 1, True),
        (1, 4, 8, 6, 1, 1, False),
        (1, 12, 4, 1, 1, 4, False),
    ):
        width = groups * key_dim + heads * (value_dim + rates + has_beta)
        inputs_SW = 0.3 * numbers(6, width)  # larger keys would amplify rounding
        query, scale, states = (
            numbers(6, groups, key_dim),
            -numbers(heads, scales).abs(),
            numbers(3, heads, key_dim, value_dim),
        )
        yield inputs_SW, query, scale, has_beta, states, several
        if rates == scales == 1:
            yield inputs_SW, query, scale, has_beta, states, prompt


def cases(device: torch.device) -> Mapping[str, Sequence[tuple[Any, ...]]]:
    """Return operands on which each operation is compared."""
    logits = [_logits(width, device) for width in _WIDTHS]
    uniform_C = torch.linspace(0.05, 0.95, _NUM_ROWS, device=device).double()
    min_p_N = torch.tensor([0.0, 0.3, 0.02, 0.0, 0.1, 1.0], device=device)
    top_k_N = torch.tensor([20, 0, 40, 1, 7, 0], device=device)
    # Every row has four tokens with the same probability at its edge.
    steps_V = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).repeat_interleave(4).div(4)
    chains, target, noise = _chains(device)
    half_C, score_C, token_C = chains.length_C // 2, noise.score_C, chains.tokens_CL[:, 0]
    starts = np.linspace(0, len(target.probs_NV), 9).astype(np.int64)
    temperature_B = torch.tensor([0.5, 0.6, 0, 0.8, 1.0, 1.2, 1.4, 1.5], device=device)
    numbers = torch.stack([noise.accept_CL.roll(salt, 0) for salt in range(6)])
    # By rows: no filter, each alone, all together, more tokens than there are.
    filters = Filters(
        torch.tensor([0, 0.02, 0, 0, 0.001, 0], device=device),
        torch.tensor([0, 0, 20, 0, 30, 10_000], device=device),
        torch.tensor([1, 1, 1, 0.8, 0.9, 1], device=device),
        10_000,
    )
    request_filters = filters.each(lambda values: values.repeat(2)[: len(temperature_B)])
    storages = [torch.arange(width * 192, device=device).sin().view(3, 64, 2, width // 2) for width in (32, 40, 1024)]
    # Each move of the first sequence overwrites what the next one reads.
    moves = [[(slot, slot + 1) for slot in range(32)], [(60, 50)]]
    return {
        "softmax": logits,
        "truncated": [
            (*rows, Filters(*edges, most_k=40))
            for rows, edges in zip(
                (*logits, logits[0]), ((min_p_N, top_k_N), (None, top_k_N), (min_p_N, None)), strict=True
            )
        ],
        "distribution": [
            (*rows, chosen) for rows in logits for chosen in (Filters(), filters, Filters(None, None, filters.top_p_N))
        ],
        "draw": [(TORCH.softmax(*rows), torch.arange(_NUM_ROWS, device=device).flip(0), uniform_C) for rows in logits],
        "nucleus": [(steps_V.repeat(6, 1), torch.tensor([0.1, 0.45, 0.5, 0.75, 0.95, 1.0], device=device))],
        "draw_residual": [(chains, target, half_C, 0.4 + 0.6 * score_C, noise.residual_C)],
        "race": [(chains, target, noise)],
        "winners": [(chains, score_C.round(decimals=1), half_C, token_C)],
        "decide": [
            (target.probs_NV.log(), temperature_B, chosen, starts, chains, target.row_CX, numbers)
            for chosen in (Filters(), request_filters)
        ],
        "uniform": [(*_NAMES, np.arange(1, 11), np.arange(4), 5)],
        "recur": list(_recurrences(device)),
        "move": [([storage.to(dtype) for storage in storages], moves) for dtype in (torch.float32, torch.bfloat16)],
    }
