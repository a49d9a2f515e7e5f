"""The process of one rank of a split target: loads its share, then repeats what rank 0's runner does."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import signal
import sys

import torch

from engine.cache.tensors import KVShape
from engine.config import ModelConfig
from engine.execution.host import cpu_threads, keep_freed_memory
from engine.execution.loading import choose_device, choose_dtype, load
from engine.execution.parallel import join
from engine.execution.probe import BackendChoice, find_kv_shape, probe_ways
from engine.execution.runner import ModelRunner


def end_with_parent() -> None:
    """Have Linux end this process when the engine ends, also where it waits for others and reads nothing."""
    die_with_parent = 1
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)


def main() -> int:
    """Run until the standard input ends."""
    end_with_parent()
    calls = sys.stdin.buffer
    config, store = pickle.load(calls)
    assert isinstance(config, ModelConfig)
    keep_freed_memory()
    torch.set_num_threads(cpu_threads(config))
    device = join(store, choose_device(config.device))
    loaded = load(config.target, config.revision, choose_dtype(config.dtype, device), device, split=True)
    shape: KVShape | None = None
    way: BackendChoice | None = None
    runner: ModelRunner | None = None
    while True:
        try:
            name, *arguments = pickle.load(calls)
        except EOFError:
            return 0
        if name == "probe":
            shape = find_kv_shape(loaded)
            way = probe_ways(loaded, shape, *arguments)
            continue
        assert shape is not None
        assert way is not None
        if name == "runner":
            num_blocks, block_size, vocab_size = arguments
            runner = ModelRunner(loaded.model, shape, num_blocks, block_size, vocab_size, way.backend, paged=way.paged)
            continue
        assert runner is not None
        if name == "forward":
            runner.forward(*arguments)
        else:
            assert name in ("keep", "wipe"), name
            getattr(runner, name)(*arguments)


if __name__ == "__main__":
    code = main()
    torch.distributed.destroy_process_group()
    sys.exit(code)
