"""The start of an engine: compile, load, measure, check, rehearse.

Not for: serving requests (`process.py`).
"""

from __future__ import annotations

import gc

import torch

from engine.config import EngineConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.request import Speculation
from engine.scheduling.request_checks import default_speculation
from engine.start.building import build_engine
from engine.start.host import cpu_threads, keep_freed_memory, return_freed_memory
from engine.start.loading import Progress
from engine.start.measuring import measure_prices
from engine.start.rehearsal import rehearse
from engine.step.engine import Engine


def start_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Return an engine that is ready to serve; raise ConfigError or LoadError.

    As configured, its steps are measured, its rule is checked, and it is warmed up.
    """
    keep_freed_memory()
    torch.set_num_threads(cpu_threads(config.model))
    _compile_kernels(config, progress)
    engine = build_engine(config, progress)
    speculation = default_speculation(config.speculation, engine.facts)
    if config.calibrate:
        _measure(engine, speculation, progress)
    if config.self_check and engine.facts.has_draft and speculation.num_drafts:
        # scipy.stats takes a while to import.
        from engine.start.distribution_check import short_check

        short_check(engine, speculation, progress)
    _restart_garbage_collection()
    return_freed_memory()
    if config.calibrate:
        progress("rehearsing")
        rehearse(engine, speculation)
    return engine


def _compile_kernels(config: EngineConfig, progress: Progress) -> None:
    """Compile the kernels of a CPU, if Numba is installed."""
    try:
        from engine.start.compiling import compile_kernels  # Numba is an optional package
    except ImportError:
        return
    compile_kernels(config.model, progress)


def _measure(engine: Engine, speculation: Speculation, progress: Progress) -> None:
    """Give the scheduler the times of steps, and the controller that chooses adaptive shapes."""
    progress("measuring steps")
    times = StepTimes(measure_prices(engine, speculation))
    engine.scheduler.times = times
    if speculation.adapts_shape:
        engine.scheduler.controller = Controller(times, engine.limits.max_draft_length)


def _restart_garbage_collection() -> None:
    """Collect once, and exempt all loaded objects from later collections.

    Each would otherwise scan them, and stop the steps for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
