"""Durations of an engine's steps that take turns, after texts that were never computed.

The content of the cache does not change how long reading it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from engine.config import SchedulerConfig, SpeculationConfig
from engine.plan import Plan
from engine.start.measuring import middle_steps
from engine.step.engine import Engine
from research.analysis.loading import config_of, load_engine

PAIR_DEFAULTS: dict[str, Any] = {
    "target": None,
    "draft": None,
    "dtype": "auto",
    "device": "auto",
    "threads": 0,
}

Seconds = dict[str, float]
"""Seconds of a step (`step`), of its phases `draft`, `target` and `verify`, and of all but the
models (`around`).
"""


def load_single(options: argparse.Namespace, longest_text: int, speculation: SpeculationConfig) -> Engine:
    """Return an engine of the pair for one request."""
    scheduler = SchedulerConfig(max_model_len=longest_text, max_num_seqs=1)
    return load_engine(config_of(options, scheduler, speculation))


def most_drafts(num_drafts: int, draft_length: int) -> SpeculationConfig:
    """Return the settings of an engine that takes up to this many chains and tokens of a chain."""
    return SpeculationConfig(
        num_drafts=1,
        draft_length=1,
        max_num_drafts=num_drafts,
        max_draft_length=draft_length,
        observed_share=0.0,
    )


@torch.inference_mode()
def measure_turn(engine: Engine, plans: Mapping[str, Plan]) -> dict[str, Seconds]:
    """Return the durations of a step of each plan, by the plan's name."""
    measured = {}
    for name, (step_s, phases_s) in zip(plans, middle_steps(engine, list(plans.values())), strict=True):
        draft_s, target_s = phases_s["draft"], phases_s["target"]
        measured[name] = {
            "step": step_s,
            "draft": draft_s,
            "target": target_s,
            "verify": phases_s["verify"],
            "around": step_s - draft_s - target_s,
        }
    return measured


def measure_turns(engine: Engine, plans: Mapping[str, Plan], repeats: int) -> dict[str, list[Seconds]]:
    """Return the durations of all turns, by the plan's name."""
    turns = [measure_turn(engine, plans) for _ in tqdm(range(repeats), desc="turns", unit="turn", leave=False)]
    return {name: [turn[name] for turn in turns] for name in plans}


def part(turns: list[Seconds], name: str) -> list[float]:
    """Return one duration of every turn."""
    return [seconds[name] for seconds in turns]
