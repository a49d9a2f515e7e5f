"""A target split over processes (tensor parallelism), as transformers does.

The engine process is rank 0. Every other rank loads its share of the weights, runs the same probes,
and then repeats what rank 0's runner does: calls arrive through its standard input, and layers
exchange data through torch.distributed. A rank ends with its standard input, that is, with the
engine; if one ends by itself, the next pass of the engine fails.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelConfig
from engine.errors import ConfigError

log = logging.getLogger("polydraft")

# Ranks load shares of one size, so none waits long for another.
_TIMEOUT = timedelta(minutes=10)
# Time limit for the failure of a pass after a rank has ended.
_NOTICED_S = 10.0


@dataclass
class Ranks:
    """Processes of the other ranks, as rank 0 sees them."""

    folder: tempfile.TemporaryDirectory[str]
    """Folder of their rendezvous."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def tell(self, *call: Any) -> None:
        """Have every rank make the call that this one is about to make."""
        message = pickle.dumps(call)
        for rank, process in enumerate(self.processes, start=1):
            assert process.stdin is not None
            try:
                process.stdin.write(message)
                process.stdin.flush()
            except OSError as error:
                raise RuntimeError(f"rank {rank} of the target has ended: see its message above") from error


def check_split(name: str, config: Any, size: int) -> None:
    """Raise ConfigError if a model cannot be split over this number of ranks."""
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, heads, None)
        if count is not None and count % size:
            raise ConfigError(
                f"{name}: {count} {heads} cannot be split over {size} ranks; lower --tensor-parallel-size"
            )
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"{name}: transformers has no plan to split {config.model_type!r}; serve it with --tensor-parallel-size 1"
        )


def start_ranks(config: ModelConfig, device: torch.device, context: int) -> Ranks:
    """Start ranks 1 and on, and join them as rank 0; context: longest text."""
    size = config.tensor_parallel_size
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"--tensor-parallel-size {size}: this machine has {torch.cuda.device_count()} CUDA devices; lower it"
        )
    folder = tempfile.TemporaryDirectory(prefix="polydraft-ranks-")
    store = str(Path(folder.name) / "store")
    ranks = Ranks(folder)
    for rank in range(1, size):
        command = [sys.executable, "-P", "-m", "engine.start.rank"]
        ranks.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(rank, size)))
    ranks.tell(config, store, context)
    os.environ.update(_environment(0, size))
    joined = threading.Event()
    threading.Thread(target=_watch, args=(ranks, joined), daemon=True).start()
    join(store, device)
    joined.set()
    return ranks


def _watch(ranks: Ranks, joined: threading.Event) -> None:
    """End the engine when a rank has ended, for which it would wait.

    If a pass fails at once, the engine ends by itself, with an error that says more.
    """
    while True:
        time.sleep(0.5)
        for rank, process in enumerate(ranks.processes, start=1):
            if process.poll() is not None:
                if joined.is_set():
                    time.sleep(_NOTICED_S)
                log.error("rank %d of the target has ended: see its message above", rank)
                os._exit(1)


def join(store: str, device: torch.device) -> torch.device:
    """Become the rank that the environment names; return its device."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, f"file://{store}", _TIMEOUT, size, rank)
    return device


def _environment(rank: int, size: int) -> dict[str, str]:
    """Return the environment from which transformers reads its rank."""
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
