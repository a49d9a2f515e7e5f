"""`python -m analysis.contexts`: duration of plain and speculative steps by length of the text.

Runs the engine's own steps after texts that were never computed (the content of the cache does not change how long
reading it takes), one request at a time, alternating plain and speculative. The number of tokens of a step depends on
the pair and not on the length, so the ratio of step times at two lengths is the ratio of the speedups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.config import EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.models.host import keep_freed_memory
from engine.request import Speculation
from engine.step.building import build_engine
from engine.step.calibration import made_up_plan, usual_s
from engine.step.engine import Engine
from loadtest.environment import environment

_SHAPES = {
    "off": Speculation(),
    "block 1x5": Speculation(rule="block", num_drafts=1, draft_length=5),
    "bv_race 4x3": Speculation(rule="bv_race", num_drafts=4, draft_length=3),
}


def build(options: argparse.Namespace, draft_window: int) -> Engine:
    """Build an engine with room for one text of the greatest length."""
    longest = max(options.contexts) + 64
    return build_engine(
        EngineConfig(
            model=ModelConfig(target=options.target, draft=options.draft, device="cpu", num_threads=options.threads),
            scheduler=SchedulerConfig(max_model_len=longest, max_num_seqs=1),
            speculation=SpeculationConfig(draft_window=draft_window),
        )
    )


@torch.inference_mode()
def measure(engine: Engine, contexts: Sequence[int], repeats: int, progress: Any) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step by context and shape; shapes take turns."""
    seconds: dict[str, dict[str, list[float]]] = {
        str(context): {shape: [] for shape in _SHAPES} for context in contexts
    }
    for _ in range(repeats):
        for context in contexts:
            for shape, speculation in _SHAPES.items():
                seconds[str(context)][shape].append(usual_s(engine, made_up_plan(engine, 1, context, speculation)))
                progress.update()
    return seconds


def kept_gain(seconds: dict[str, dict[str, list[float]]], contexts: Sequence[int]) -> dict[str, float]:
    """Return the speedup at the longest text over the speedup at the shortest, by shape."""
    short, long = (
        {shape: statistics.median(runs) for shape, runs in seconds[str(context)].items()}
        for context in (contexts[0], contexts[-1])
    )
    return {shape: long["off"] / long[shape] / (short["off"] / short[shape]) for shape in _SHAPES if shape != "off"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure without and with a draft window."""
    parser = argparse.ArgumentParser(prog="python -m analysis.contexts", description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder of the target (demo.bench_pair writes one)")
    parser.add_argument("draft", help="folder of the draft model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="lengths, ascending")
    parser.add_argument("--draft-window", type=int, default=1024, help="draft window of the second measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every point")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    windows = (0, options.draft_window)
    found: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(windows) * options.repeats * len(options.contexts) * len(_SHAPES), unit="point") as progress:
        for window in windows:
            seconds = measure(build(options, window), options.contexts, options.repeats, progress)
            found[f"draft window {window or 'off'}"] = {
                "seconds": seconds,
                "gain_at_longest_over_shortest": kept_gain(seconds, options.contexts),
            }
    result = {
        "what": "step times by length of the text, one request; speedup at the longest text over that at the shortest",
        "options": {"contexts": options.contexts, "threads": options.threads, "repeats": options.repeats},
        "environment": environment(),
        "found": found,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, one in found.items():
        print(name, {shape: round(gain, 3) for shape, gain in one["gain_at_longest_over_shortest"].items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
