"""The kernel moves K/V as torch does: in Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

move_kernel = pytest.importorskip("engine.cuda.move_kernel")

from engine.attention.tensors import KVShape, KVTensors  # noqa: E402
from engine.cuda.kernels import TritonKernels  # noqa: E402
from engine.kernels.protocol import KVMoves  # noqa: E402
from engine.kernels.torch_kernels import TORCH  # noqa: E402
from tests.engine import tiny  # noqa: E402

NUM_SLOTS = 200


def tensors(shape: KVShape, dtype: torch.dtype, has_kernel: bool) -> KVTensors:
    """Return K/V with distinct numbers, as far as the type has enough of them."""
    storage = KVTensors(shape, NUM_SLOTS, dtype, tiny.DEVICE, TritonKernels() if has_kernel else TORCH)
    for part in (storage.keys, storage.values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(part.shape[-1])))
    return storage


def paths(chance: np.random.Generator, num_sequences: int, longest: int) -> list[KVMoves]:
    """Return moves like those of steps: nodes of trees to the first places of their row."""
    moves: list[KVMoves] = []
    for start in chance.permutation(NUM_SLOTS // 40)[:num_sequences] * 40:
        length = int(chance.integers(0, longest + 1))
        nodes = np.sort(chance.permutation(40)[:length])
        of_sequence = [(int(start + node), int(start + depth)) for depth, node in enumerate(nodes)]
        moves.append([move for move in of_sequence if move[0] != move[1]])
    return moves


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [KVShape.equal(2, 1, 8, 8), KVShape.equal(3, 2, 20, 12), KVShape.equal(1, 8, 128, 64)],
    ids=["small", "odd", "wide"],
)
def test_moves_equal_torch(shape: KVShape, dtype: torch.dtype) -> None:
    chance = np.random.default_rng(5)
    for num_sequences, longest in ((1, 1), (5, 8), (3, 30)):
        moves = paths(chance, num_sequences, longest)
        plain, kernel = tensors(shape, dtype, False), tensors(shape, dtype, True)
        plain.keep(moves)
        kernel.keep(moves)
        assert torch.equal(plain.keys, kernel.keys)
        assert torch.equal(plain.values, kernel.values)


def test_all_of_a_sequence_is_read_before_any_is_written() -> None:
    """Each move overwrites what the next one reads."""
    shape = KVShape.equal(2, 2, 8, 8)
    chain = [(slot, slot + 1) for slot in range(10)]
    before, together, in_turn = (tensors(shape, torch.float32, True) for _ in range(3))
    together.keep([chain])
    assert torch.equal(together.keys[:, 1:11], before.keys[:, :10])
    for move in chain:
        in_turn.keep([[move]])
    assert not torch.equal(in_turn.keys, together.keys)


@pytest.mark.parametrize("num_moves", [1, 31, 32, 33])
def test_moves_touch_no_other_rows(num_moves: int) -> None:
    """A sequence may have fewer moves than others; columns after the last one are not used."""
    shape = KVShape.equal(2, 3, 7, 5)
    before, after = (tensors(shape, torch.float32, True) for _ in range(2))
    after.keep([[(40 + number, 100 + number) for number in range(num_moves)], [(5, 6)]])
    touched = [6, *range(100, 100 + num_moves)]
    rest = [slot for slot in range(NUM_SLOTS) if slot not in touched]
    assert torch.equal(after.keys[:, rest], before.keys[:, rest])
    assert torch.equal(after.values[:, 6], before.values[:, 5])
    assert torch.equal(after.keys[:, touched[1:]], before.keys[:, 40 : 40 + num_moves])
