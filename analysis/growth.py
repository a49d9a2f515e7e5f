"""`analyze growth`: cost of more chains for a step of one request, in time and in memory.

Times: steps of K chains of four tokens relative to one chain, and the target's pass over 32 rows relative to one row,
in turns. Memory: the peak of steps of eight chains after a long text minus that of one chain, each in a separate
process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.loading import add_pair_arguments, config_of, load_engine
from engine.config import SchedulerConfig, SpeculationConfig
from engine.request import Speculation
from engine.start.calibration import middle_steps, synthetic_plan
from engine.step.engine import Engine
from loadtest.results import document, table

_LENGTH = 4
"""Tokens of a chain."""
_CHAINS = (1, 2, 4, 8)
_ROWS = 31
"""Drafted tokens, in one chain: with the root, 32 rows of the target's pass."""
_PEAK_STEPS = 8


def shape(num_drafts: int, draft_length: int = _LENGTH) -> Speculation:
    """Return the speculation of a shape."""
    return Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=draft_length)


def load(options: argparse.Namespace, dtype: str) -> Engine:
    """Load an engine with weights of this type, and room for one text of the greatest length."""
    scheduler = SchedulerConfig(max_model_len=options.long_context + 2 * _ROWS, max_num_seqs=1)
    limits = SpeculationConfig(max_num_drafts=max(_CHAINS), max_draft_length=_ROWS, observed_share=0.0)
    options.dtype = dtype
    return load_engine(config_of(options, scheduler, limits))


def measure(engine: Engine, context: int, repeats: int) -> dict[str, Any]:
    """Return seconds of steps by chains, and of the target's pass by rows, with their ratios in each repeat."""
    shapes = [Speculation(), *map(shape, _CHAINS), shape(1, _ROWS)]
    plans = [synthetic_plan(engine, 1, context, one) for one in shapes]
    steps: dict[int, list[float]] = {num_drafts: [] for num_drafts in _CHAINS}
    passes: dict[int, list[float]] = {1: [], 1 + _ROWS: []}
    for _ in tqdm(range(repeats), desc="repeats"):
        plain, *chains, many = middle_steps(engine, plans)
        for num_drafts, (wall_s, _) in zip(_CHAINS, chains, strict=True):
            steps[num_drafts].append(wall_s)
        for num_rows, (_, phases_s) in zip(passes, (plain, many), strict=True):
            passes[num_rows].append(phases_s["target"])
    return {"step": over_first(steps), "target_pass": over_first(passes)}


def over_first(seconds: dict[int, list[float]]) -> dict[str, Any]:
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


def peak_bytes(options: argparse.Namespace, dtype: str, num_drafts: int) -> int:
    """Return the peak of this process's resident memory during steps of this many chains, without loading."""
    engine = load(options, dtype)
    plan = synthetic_plan(engine, 1, options.long_context, shape(num_drafts))
    engine.carry_out(plan)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    with torch.inference_mode():
        for _ in range(_PEAK_STEPS):
            engine.carry_out(plan)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def peaks(options: argparse.Namespace, dtype: str) -> dict[str, int]:
    """Return the peaks by chains, each measured in a separate process."""
    found = {}
    for num_drafts in (_CHAINS[0], _CHAINS[-1]):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[str(num_drafts)] = pool.submit(peak_bytes, options, dtype, num_drafts).result()
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per number of chains and type."""
    rows = []
    for cell in result["cells"]:
        many = cell["target_pass"][str(1 + _ROWS)]
        for size, one in cell["step"].items():
            rows.append([cell["dtype"], size, _shown(one), _shown(many) if size == "1" else ""])
    return table(["weights", "K", "step, over one chain", "target pass of 32 rows, over one"], rows)


def _shown(one: dict[str, float]) -> str:
    return f"{one['ratio']:.2f} ({one['low']:.2f}-{one['high']:.2f})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with all types of weights in turn, and memory with the first of them."""
    cells = []
    dtypes = options.dtypes.split(",")
    for dtype in dtypes:
        engine = load(options, dtype)
        with torch.inference_mode():
            cells.append({"dtype": dtype, **measure(engine, options.context, options.repeats)})
        del engine
    return document(
        "steps of one request by chains of four tokens, over one chain; most resident memory by chains",
        options,
        ("target", "draft", "dtypes", "context", "long_context", "repeats", "threads"),
        cells=cells,
        peak_bytes=peaks(options, dtypes[0]),
    )
