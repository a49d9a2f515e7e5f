"""One rank of a split target: it loads its share, then repeats rank 0's calls."""

from __future__ import annotations

import pickle
import signal
import sys
from typing import Any, BinaryIO, NoReturn

import torch

from engine.config import ModelConfig
from engine.models.parallel import join
from engine.models.runner import ModelRunner
from engine.start.choosing import choose
from engine.start.host import call_glibc, cpu_threads, keep_freed_memory
from engine.start.loading import load_share
from engine.start.number_formats import choose_device
from engine.start.probe import choose_backend, find_kv_shape


def end_with_parent() -> None:
    """Have Linux end this process with the engine, even while it waits for other ranks."""
    die_with_parent = 1
    call_glibc("prctl", die_with_parent, signal.SIGKILL)


def main() -> NoReturn:
    """Run until the standard input ends: "probe", "runner", then calls of the runner."""
    end_with_parent()
    calls = sys.stdin.buffer
    config, store, context = pickle.load(calls)
    assert isinstance(config, ModelConfig)
    keep_freed_memory()
    torch.set_num_threads(cpu_threads(config))
    device = join(store, choose_device(config.device))
    loaded = load_share(config, device, context)
    _probe, block_size = next_call(calls)
    shape = find_kv_shape(loaded)
    choice = choose_backend(loaded, shape, block_size, config)
    _runner, num_blocks, block_size, vocab_size = next_call(calls)
    runner = ModelRunner(
        loaded.model,
        shape,
        num_blocks,
        block_size,
        vocab_size,
        choice.backend,
        paged_kernel=choice.paged_kernel,
        kernels=choose(device),
    )
    while True:
        name, *arguments = next_call(calls)  # forward, keep or wipe
        getattr(runner, name)(*arguments)


def next_call(calls: BinaryIO) -> tuple[Any, ...]:
    """Return the next call of rank 0; end this process if the engine has ended."""
    try:
        call: tuple[Any, ...] = pickle.load(calls)
    except EOFError:
        torch.distributed.destroy_process_group()
        sys.exit(0)
    return call


if __name__ == "__main__":
    main()
