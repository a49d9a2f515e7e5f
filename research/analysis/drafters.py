"""`analyze drafters`: several drafters of one target in turns of the same work: small models and
heads.

Every drafter has its own engine and target, because a target that a head reads stores its states.
`off` is plain decoding without any drafter, and `NAME off` plain decoding of the engine that the
drafter NAME needs.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.config import SchedulerConfig, SpeculationConfig
from engine.control.step_time import Prices
from engine.errors import ConfigError
from engine.start.measuring import measure_prices
from engine.step.engine import Engine
from loadtest.arms import ADAPTIVE, OFF
from loadtest.results import document, shown_ratio, table
from research.analysis.arms import Arm, Durations, add_turn_arguments, make_arms, measure, speculation_of
from research.analysis.load import LOAD_NAMES, Load, add_load_arguments
from research.analysis.loading import add_device_arguments, config_of, load_engine, names_of, prompts_of

_ARM_BYTES = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="target model: folder or hub name (default: the embedded pair's)")
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a draft model or a head; may be repeated (default: small, the embedded pair's draft model)",
    )
    add_device_arguments(parser)
    parser.add_argument("--shapes", default="block:1x3,bv_race:4x3", help="drafts, as of `arms`")
    add_load_arguments(parser, num_tokens=48)
    add_turn_arguments(parser, seconds=10.0, warm_up_s=1.0)


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells."""
    drafts = dict(text.partition("=")[::2] for text in options.drafter)
    if not all(drafts.values()):
        raise ConfigError("--drafter must look like NAME=FOLDER")
    shapes = options.shapes.split(",")
    embedded_target, embedded_draft = names_of(argparse.Namespace(target=None, draft=None))
    options.target = options.target or embedded_target
    engines = {}
    for name, draft in (drafts or {"small": embedded_draft}).items():
        named = argparse.Namespace(**{**vars(options), "draft": draft})
        memory = (len(shapes) + 2) * _ARM_BYTES
        scheduler = SchedulerConfig(max_num_seqs=max(64, *options.concurrency))
        engines[name] = load_engine(config_of(named, scheduler, SpeculationConfig(), memory))
        options.threads, options.draft = named.threads, draft
    load = Load.of(prompts_of(options.prompts, options), options)
    # Only reports of speedups depend on them, and these are left out.
    prices = measure_prices(next(iter(engines.values())), speculation_of(ADAPTIVE))
    cells = []
    total = (options.seconds + options.warm_up) * len(options.concurrency)
    with tqdm(total=total, desc="drafters", unit="s") as progress:
        for concurrency in options.concurrency:
            make = partial(arms_of, engines, prices, shapes, load)
            cell = measure(make, load, concurrency, Durations.of(options), progress)
            for arm in cell["arms"].values():
                del arm["reported_speedup"]
            cells.append({"prompts": Path(options.prompts).stem, **cell})
    options.drafter = {name: Path(draft).name for name, draft in drafts.items()}
    names = ("drafter", "shapes", *LOAD_NAMES, "seconds", "dtype", "threads", "concurrency")
    what = "drafters in turns of the same work, in one process, closed loop without HTTP"
    return document(what, options, names, cells=cells)


def arms_of(engines: dict[str, Engine], prices: Prices, shapes: list[str], load: Load) -> dict[str, Arm]:
    """Return the arms of all engines, `off` first: plain decoding of the first engine."""
    arms: dict[str, Arm] = {}
    for name, engine in engines.items():
        own = make_arms(engine, [OFF, *shapes], prices, load)
        arms |= {OFF if shape == OFF and not arms else f"{name} {shape}": arm for shape, arm in own.items()}
    return arms


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per arm and number of requests."""
    head = ["requests", "drafts", "accepted a pass", "tokens a pass", "drafting", "tokens/s over plain (95 % interval)"]
    rows = []
    for cell in result["cells"]:
        for name, arm in cell["arms"].items():
            if name != OFF:
                accepted, per_pass = arm["accepted_per_drafting_pass"], arm["tokens_per_pass"]
                share = f"{100 * arm['share_of_drafting']:.0f} %"
                over_plain = shown_ratio(arm["ratio_to_off"])
                rows.append([cell["concurrency"], name, f"{accepted:.2f}", f"{per_pass:.2f}", share, over_plain])
    return table(head, rows)
