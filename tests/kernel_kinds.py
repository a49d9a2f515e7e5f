"""Counts the variants of kernels that a mixed load needs in Triton; needs no device.

A variant is compiled at its first use, and that step waits. Prints the numbers for
attention, verification and distributions.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from engine.attention.groups import ScoreOptions
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paged import upload
from engine.attention.tensors import KVShape, KVTensors
from engine.cuda import attention_kernel, block_kernels, nucleus_kernels, row_kernels
from engine.cuda.kernels import TritonKernels
from engine.drafting.numbers import draw_numbers
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.kernels.torch_kernels import TORCH
from engine.request import Sampling
from engine.sampling.distribution import DistributionParameters, distribution
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
    """Plain rows, trees of many sizes, chunks of prompts, short and long texts."""
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
    for name in ("_divide", "_attend", "_merge"):
        setattr(attention_kernel, name, Counting(getattr(attention_kernel, name), kinds))
    storage = KVTensors(KVShape.equal(1, KV_HEADS, DIM, DIM), 2 * PAGE, torch.bfloat16, CPU)
    chance = np.random.default_rng(3)
    for _ in range(NUM_STEPS):
        batch = build(step(chance), PAGE)
        query = torch.zeros(1, HEADS, len(batch.positions_T), DIM, dtype=torch.bfloat16)
        paged = upload([batch], PAGE, CPU)[0].paged
        assert paged is not None
        attention_kernel.attend_paged(paged, storage, 0, query, None, ScoreOptions(), None)
    return len(kinds)


def verification() -> int:
    """Numbers of requests and chains, and lengths, of every kind of parity."""
    kinds: set[str] = set()
    for name in ("_walk", "sum_tiles", "_decide", "_race"):
        setattr(block_kernels, name, Counting(getattr(block_kernels, name), kinds))
    probs_NV = torch.zeros((4, WIDTH))
    for num_requests, num_chains, length in product((1, 2, 3, 5), (1, 2, 3), range(1, 9)):
        count = num_requests * num_chains
        request_C = np.repeat(np.arange(num_requests), num_chains)
        numbers = torch.from_numpy(draw_numbers(TORCH, request_C, request_C, request_C, length))
        noise = ChainNoise.of(numbers, length)
        draft, target = (
            ProbsTable(probs_NV, torch.zeros((count, n), dtype=torch.int64), TORCH) for n in (length, length + 1)
        )
        length_C = torch.full((count,), length)
        tokens_CL = torch.zeros((count, length), dtype=torch.int64)
        shape = num_requests, num_chains
        chains = Chains(tokens_CL, length_C, torch.from_numpy(request_C), draft, shape=shape)
        block_kernels.race(chains, target, noise)
    return len(kinds)


def distributions() -> int:
    """Distributions with all filters and without, and draws from them by parts."""
    kinds: set[str] = set()
    names = {
        row_kernels: ("_sum_exponentials", "_softmax", "sum_tiles", "_draw"),
        nucleus_kernels: ("_narrow", "_keep", "_edge"),
    }
    for module, kernel_names in names.items():
        for name in kernel_names:
            setattr(module, name, Counting(getattr(module, name), kinds))
    kernels = TritonKernels()
    filters = {"top_k": 20, "top_p": 0.95, "min_p": 0.05}
    for num_rows, more in product(range(1, 9), ({}, filters)):
        asked = [Sampling(temperature=0.6, **more) for _ in range(num_rows)]
        parameters = DistributionParameters.of(asked, CPU, kernels).select(torch.arange(num_rows).repeat(3))
        probs_NV = torch.zeros((3 * num_rows, WIDTH))
        uniform_LC = torch.zeros((3, num_rows), dtype=torch.float64)
        for level in range(3):
            part = slice(level * num_rows, (level + 1) * num_rows)
            drawn_NV = distribution(torch.zeros((num_rows, WIDTH)), parameters.select(part), probs_NV[part])
            kernels.draw(drawn_NV, torch.arange(num_rows), uniform_LC[level])
    return len(kinds)


def main() -> None:
    """All, one line."""
    print(attention(), verification(), distributions())


if __name__ == "__main__":
    main()
