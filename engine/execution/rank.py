"""The process of one rank of a split target: loads its share, then repeats what rank 0's runner does."""

from __future__ import annotations

import pickle
import sys

import torch

from engine.config import ModelConfig
from engine.execution.loading import choose_device, choose_dtype, load
from engine.execution.parallel import cpu_threads, join
from engine.execution.probe import find_kv_shape, probe_either
from engine.execution.runner import ModelRunner


def main() -> int:
    """Run until the standard input ends."""
    calls = sys.stdin.buffer
    config, store = pickle.load(calls)
    assert isinstance(config, ModelConfig)
    torch.set_num_threads(cpu_threads(config))
    device = join(store, choose_device(config.device))
    loaded = load(config.target, config.revision, choose_dtype(config.dtype, device), device, split=True)
    shape = find_kv_shape(loaded)
    probe_either(loaded, shape)
    runner: ModelRunner | None = None
    while True:
        try:
            name, *arguments = pickle.load(calls)
        except EOFError:
            return 0
        if name == "runner":
            runner = ModelRunner(loaded.model, shape, *arguments)
            continue
        assert runner is not None
        getattr(runner, {"forward": "forward", "keep": "keep"}[name])(*arguments)


if __name__ == "__main__":
    code = main()
    torch.distributed.destroy_process_group()
    sys.exit(code)
