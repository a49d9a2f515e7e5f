"""K/V takes memory only where something has been written to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.attention.tensors import KVShape, KVTensors


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_pool_on_a_cpu_takes_no_memory_before_it_is_used() -> None:
    shape = replace(KVShape.equal(4, 8, 64, 64), hidden_dim=512, taps=(0,))
    num_slots = 1 << 15
    before = resident_bytes()
    pool = KVTensors(shape, num_slots, torch.float32, torch.device("cpu"))
    slots = torch.arange(16, 32)
    assert not any(tensor.any() for tensor in (*pool.read(3, slots), pool.keys[:, -1], pool.hidden))
    pool.keys[:, slots] = 1
    assert pool.keys.sum() == 4 * 16 * 8 * 64  # reading what was never written takes none either
    assert resident_bytes() - before < 32 << 20 < pool.keys.nbytes // 4
