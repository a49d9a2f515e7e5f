"""`python -m analysis.growth`: cost of more chains for a step of one request, in time and in memory.

Times: steps of K chains of four tokens relative to one chain, and the target's pass over 32 rows relative to one row,
in turns. Memory: the peak of steps of eight chains after a long text minus that of one chain, each in a separate
process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.loading import add_pair_arguments, names_of
from engine.config import EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.request import Speculation
from engine.step.building import build_engine
from engine.step.calibration import made_up_plan, middle_steps
from engine.step.engine import Engine
from loadtest.environment import environment

_LENGTH = 4
"""Tokens of a chain."""
_CHAINS = (1, 2, 4, 8)
_ROWS = 31
"""Drafted tokens, in one chain: with the root, 32 rows of the target's pass."""
_PEAK_STEPS = 8


def shape(num_drafts: int, draft_length: int = _LENGTH) -> Speculation:
    """Return the speculation of a shape."""
    return Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=draft_length)


def load(options: argparse.Namespace) -> Engine:
    """Load an engine with room for one text of the greatest length."""
    target, draft = names_of(options)
    torch.set_num_threads(options.threads or 1)
    limits = SpeculationConfig(max_num_drafts=max(_CHAINS), max_draft_length=_ROWS, observed_share=0.0)
    return build_engine(
        EngineConfig(
            model=ModelConfig(
                target=target, draft=draft, dtype=options.dtype, device=options.device, num_threads=options.threads
            ),
            scheduler=SchedulerConfig(max_model_len=options.long_context + 2 * _ROWS, max_num_seqs=1),
            speculation=limits,
        )
    )


def measure(engine: Engine, context: int, repeats: int) -> dict[str, Any]:
    """Return seconds of steps by chains, and of the target's pass by rows, with their ratios in each repeat."""
    shapes = [Speculation(), *map(shape, _CHAINS), shape(1, _ROWS)]
    plans = [made_up_plan(engine, 1, context, one) for one in shapes]
    steps: dict[int, list[float]] = {num_drafts: [] for num_drafts in _CHAINS}
    passes: dict[int, list[float]] = {1: [], 1 + _ROWS: []}
    for _ in tqdm(range(repeats), desc="repeats"):
        plain, *chains, many = middle_steps(engine, plans)
        for num_drafts, (wall_s, _) in zip(_CHAINS, chains, strict=True):
            steps[num_drafts].append(wall_s)
        for num_rows, (_, phases_s) in zip(passes, (plain, many), strict=True):
            passes[num_rows].append(phases_s["target"])
    return {"step": _over_first(steps), "target_pass": _over_first(passes)}


def _over_first(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios to the first with their range."""
    first = next(iter(seconds.values()))
    found = {}
    for size, runs in seconds.items():
        ratios = [one / other for one, other in zip(runs, first, strict=True)]
        found[str(size)] = {
            "seconds": statistics.median(runs),
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
        }
    return found


def peak_bytes(options: argparse.Namespace, num_drafts: int, context: int) -> int:
    """Return the peak of this process's resident memory during steps of this many chains, without the memory of
    loading.
    """
    engine = load(options)
    plan = made_up_plan(engine, 1, context, shape(num_drafts))
    engine.carry_out(plan)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    with torch.inference_mode():
        for _ in range(_PEAK_STEPS):
            engine.carry_out(plan)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def peaks(options: argparse.Namespace, context: int) -> dict[str, int]:
    """Return the peaks by chains, each measured in a separate process."""
    found = {}
    for num_drafts in (_CHAINS[0], _CHAINS[-1]):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[str(num_drafts)] = pool.submit(peak_bytes, options, num_drafts, context).result()
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per number of chains and type."""
    lines = ["| weights | K | step, over one chain | target pass of 32 rows, over one |", "|" + " --- |" * 4]
    for cell in result["cells"]:
        many = cell["target_pass"][str(1 + _ROWS)]
        for size, one in cell["step"].items():
            last = _shown(many) if size == "1" else ""
            lines.append(f"| {cell['dtype']} | {size} | {_shown(one)} | {last} |")
    return "\n".join(lines)


def _shown(one: dict[str, float]) -> str:
    return f"{one['ratio']:.2f} ({one['low']:.2f}-{one['high']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m analysis.growth", description=__doc__.splitlines()[0])
    add_pair_arguments(parser)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="types of the weights (default float32,bfloat16)")
    parser.add_argument("--context", type=int, default=256, help="tokens of the text before timed steps (default 256)")
    parser.add_argument(
        "--long-context",
        type=int,
        default=1900,
        help="tokens of the text before steps whose memory is measured (default 1900)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every point (default 5)")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    cells = []
    for dtype in options.dtypes.split(","):
        options.dtype = dtype
        engine = load(options)
        with torch.inference_mode():
            cells.append({"dtype": dtype, **measure(engine, options.context, options.repeats)})
        del engine
    options.dtype = options.dtypes.split(",")[0]
    shown = ("target", "draft", "dtypes", "context", "long_context", "repeats", "threads")
    result: dict[str, Any] = {
        "what": "steps of one request by chains of four tokens, over one chain; most resident memory by chains",
        "options": {name: getattr(options, name) for name in shown},
        "environment": environment(),
        "cells": cells,
        "peak_bytes": peaks(options, options.long_context),
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    print("most memory:", {size: f"{count / 2**20:.0f} MiB" for size, count in result["peak_bytes"].items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
