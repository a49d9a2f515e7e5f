"""Counts the variants of kernels that a mixed load needs in Triton; needs no device.

A variant is compiled at its first use, and that step waits. Prints the numbers for attention and for verification.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from engine.attention import triton_attention
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paged import upload
from engine.attention.scaled import ScoreOptions
from engine.attention.tensors import KVShape, KVTensors
from engine.drafting.numbers import draw_numbers, noise_of
from engine.kernels import triton_block
from engine.kernels.protocol import Chains, ProbsTable
from engine.kernels.torch_kernels import TORCH
from engine.speculation.topology import merge_chains

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
NUM_STEPS = 400
WIDTH = 1520
CPU = torch.device("cpu")


class Counting:
    """In place of a kernel: notes under which key Triton would keep each launch's."""

    def __init__(self, kernel: Any, kinds: set[str]) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.name, self.kinds = kernel.fn.__name__, kinds

    def __getitem__(self, _grid: object) -> Counting:
        return self

    def __call__(self, *operands: Any, **constants: Any) -> None:
        _, specialization, _ = self.bind(*operands, **constants)
        self.kinds.add(f"{self.name} {specialization}")


def step(chance: np.random.Generator) -> list[SequenceInput]:
    """Plain rows; with trees of many sizes, too; with chunks of prompts, too; after short or long texts."""
    parts = []
    kinds, longest = ((1,), (1, 2, 3), (0, 1, 2, 3))[chance.integers(0, 3)], (200, 3000)[chance.integers(0, 2)]
    for _ in range(chance.integers(1, 33)):
        length = int(chance.integers(1, longest))
        blocks = chance.integers(0, 4000, 300).tolist()[: -(-(length + 600) // PAGE)]
        kind = chance.choice(kinds)
        if kind == 0:
            parts.append(SequenceInput(list(range(int(chance.integers(2, 512)))), length, blocks, NO_NODES, slice(0)))
            continue
        tree = merge_chains(chance.integers(0, 50, (int(chance.integers(1, 9)), int(chance.integers(1, 7)))).tolist())
        nodes = NO_NODES if kind == 1 else NodeInput(tree.tokens, tree.depths, (), tree.ancestry())
        parts.append(SequenceInput([1], length, blocks, nodes, slice(0, None)))
    return parts


def attention() -> int:
    """Decode steps and prompts of many sizes."""
    kinds: set[str] = set()
    for name in ("_attend", "_merge"):
        setattr(triton_attention, name, Counting(getattr(triton_attention, name), kinds))
    storage = KVTensors(KVShape(1, KV_HEADS, DIM, DIM), 2 * PAGE, torch.bfloat16, CPU)
    chance = np.random.default_rng(3)
    for _ in range(NUM_STEPS):
        batch = build(step(chance), PAGE)
        query = torch.zeros(1, HEADS, len(batch.positions_T), DIM, dtype=torch.bfloat16)
        paged = upload([batch], PAGE, CPU)[0].paged
        assert paged is not None
        triton_attention.attend_paged(paged, storage, 0, query, None, ScoreOptions(), None)
    return len(kinds)


def verification() -> int:
    """Numbers of requests and chains, and lengths, of every kind of parity."""
    kinds: set[str] = set()
    for name in ("_walk", "_sum_prefixes", "_decide", "_race"):
        setattr(triton_block, name, Counting(getattr(triton_block, name), kinds))
    probs_NV = torch.zeros((4, WIDTH))
    for num_requests, num_chains, length in product((1, 2, 3, 5), (1, 2, 3), range(1, 9)):
        count = num_requests * num_chains
        request_C = np.repeat(np.arange(num_requests), num_chains)
        numbers = torch.from_numpy(draw_numbers(request_C, request_C, request_C, length))
        _, noise = noise_of(numbers, length)
        draft, target = (
            ProbsTable(probs_NV, torch.zeros((count, n), dtype=torch.int64), TORCH) for n in (length, length + 1)
        )
        of_chain = torch.full((count,), length)
        tokens_CL = torch.zeros((count, length), dtype=torch.int64)
        shape = num_requests, num_chains
        chains = Chains(tokens_CL, of_chain, torch.from_numpy(request_C), draft, shape=shape)
        triton_block.race(chains, target, noise)
    return len(kinds)


def main() -> None:
    """Both, one line."""
    print(attention(), verification())


if __name__ == "__main__":
    main()
