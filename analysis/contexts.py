"""`analyze contexts`: duration of plain and speculative steps by length of the text.

Runs the engine's own steps after texts that were never computed (the content of the cache does not change how long
reading it takes), one request at a time, alternating plain and speculative. The number of tokens of a step depends on
the pair and not on the length, so the ratio of step times at two lengths is the ratio of the speedups.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from analysis.loading import add_pair_arguments, config_of, load_engine
from engine.config import SchedulerConfig, SpeculationConfig
from engine.request import Speculation
from engine.start.calibration import synthetic_plan, usual_s
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.results import document, table

_SHAPES = {
    "off": Speculation(),
    "block 1x5": Speculation(rule="block", num_drafts=1, draft_length=5),
    "bv_race 4x3": Speculation(rule="bv_race", num_drafts=4, draft_length=3),
}


def build(options: argparse.Namespace, draft_window: int) -> Engine:
    """Build an engine with room for one text of the greatest length."""
    scheduler = SchedulerConfig(max_model_len=max(options.contexts) + 64, max_num_seqs=1)
    return load_engine(config_of(options, scheduler, SpeculationConfig(draft_window=draft_window)))


@torch.inference_mode()
def measure(engine: Engine, contexts: Sequence[int], repeats: int, progress: Any) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step by context and shape; shapes take turns."""
    seconds: dict[str, dict[str, list[float]]] = {
        str(context): {shape: [] for shape in _SHAPES} for context in contexts
    }
    for _ in range(repeats):
        for context in contexts:
            for shape, speculation in _SHAPES.items():
                seconds[str(context)][shape].append(usual_s(engine, synthetic_plan(engine, 1, context, speculation)))
                progress.update()
    return seconds


def kept_gain(seconds: dict[str, dict[str, list[float]]], contexts: Sequence[int]) -> dict[str, float]:
    """Return the speedup at the longest text over the speedup at the shortest, by shape."""
    short, long = (
        {shape: statistics.median(runs) for shape, runs in seconds[str(context)].items()}
        for context in (contexts[0], contexts[-1])
    )
    return {shape: long["off"] / long[shape] / (short["off"] / short[shape]) for shape in _SHAPES if shape != "off"}


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per draft window and shape."""
    rows = [
        [window, shape, f"{gain:.2f}x"]
        for window, one in result["found"].items()
        for shape, gain in one["gain_at_longest_over_shortest"].items()
    ]
    return table(["target and draft", "shape", "speedup at the longest text over that at the shortest"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument(
        "--contexts", type=integers, default=[1024, 4096, 16384], help="lengths, ascending (default 1024,4096,16384)"
    )
    parser.add_argument(
        "--draft-window", type=int, default=1024, help="draft window of the second measurement (default 1024)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every point (default 5)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure without and with a draft window."""
    windows = (0, options.draft_window)
    found: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(windows) * options.repeats * len(options.contexts) * len(_SHAPES), unit="point") as progress:
        for window in windows:
            seconds = measure(build(options, window), options.contexts, options.repeats, progress)
            found[f"draft window {window or 'off'}"] = {
                "seconds": seconds,
                "gain_at_longest_over_shortest": kept_gain(seconds, options.contexts),
            }
    return document(
        "step times by length of the text, one request; speedup at the longest text over that at the shortest",
        options,
        ("contexts", "threads", "repeats"),
        found=found,
    )
