"""`analyze around`: CPU time of a served step by part: passes of the models, and the overhead.

Requests are adaptive. The functions of `PARTS` are replaced by timed ones while an engine serves a closed loop of
requests. The time of a part excludes the parts that it calls. Two versions of the project are compared in turns, by one
process each. Not for: HTTP (`python -m loadtest.overhead`).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from analysis.arms import Arm, make_arms, speculation_of
from analysis.load import Load
from analysis.loading import add_pair_arguments, config_of, load_engine, prompts_of, say
from engine.api import StepResults, decode_from_engine, encode
from engine.start.calibration import measure
from loadtest import results
from loadtest.arguments import integers
from loadtest.arms import ADAPTIVE

_INSIDE = ("pass inputs", "passes", "draft loop")
"""Parts that are no overhead: the passes' arguments, the models, and drawing drafted tokens level by level."""
_CACHE_BYTES = 1 << 30
_WARM_UP = 2
"""Turns at the beginning of a cell that are discarded."""
PARTS = {
    "plan": ("engine.scheduling.scheduler:Scheduler.plan", "engine.scheduling.scheduler:Scheduler.submit"),
    "admission": ("engine.scheduling.scheduler:Scheduler._admit", "engine.step.engine:check_requests"),
    "controller": ("engine.control.controller:Controller.choose",),
    "layout and noise": ("engine.step.eager:draw_chains",),
    "pass inputs": (
        "engine.step.eager:target_inputs",
        "engine.models.runner:ModelRunner.forward",
        "engine.drafting.model:ModelDrafter.begin",
    ),
    "passes": ("engine.models.runner:ModelRunner.run",),
    "draft loop": ("engine.drafting.chains:draw_levels", "engine.drafting.model:ModelDrafter.draw"),
    "target laws": ("engine.step.verify:target_distributions",),
    "finite numbers": ("engine.step.verify:largest_numbers", "engine.step.verify:broken_rows"),
    "rules": (
        "engine.step.verify:_next_tokens",
        "engine.step.verify:_verdicts",
        "engine.cpu.kernels:NumbaKernels.decide",
    ),
    "verdicts": ("engine.step.verify:read_verdicts", "engine.step.eager:verify_chains"),
    "keep": (
        "engine.step.engine:target_moves",
        "engine.models.runner:ModelRunner.keep",
        "engine.drafting.model:ModelDrafter.keep",
    ),
    "reporting": ("engine.step.engine:report", "engine.step.engine:split_prompts"),
    "commit": ("engine.scheduling.scheduler:Scheduler.commit",),
    "telemetry": (
        "engine.step.telemetry:Stopwatch.start",
        "engine.step.telemetry:Telemetry.end_step",
        "engine.step.telemetry:Telemetry._learn",
    ),
    "the rest": ("engine.step.engine:Engine.run_step",),
    "messages": ("analysis.around:encode", "analysis.around:decode_from_engine"),
}
"""Functions whose time counts for each part, as module:name."""


class Shares:
    """Seconds of CPU time of the engine's thread, by part. CPU time excludes other processes on a shared machine."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    def _switch(self) -> None:
        now_s = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted for a part."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                found = function(*arguments, **named)
                # The body of a generator runs here.
                return list(found) if isinstance(found, Iterator) else found
            finally:
                self._switch()
                self._open.pop()

        return call

    def install(self) -> None:
        """Replace the functions of all parts, for the rest of the process."""
        for part, places in PARTS.items():
            for place in places:
                module, _, path = place.partition(":")
                owner: Any = importlib.import_module(module)
                *names, name = path.split(".")
                for outer in names:
                    owner = getattr(owner, outer)
                setattr(owner, name, self.timed(part, getattr(owner, name)))


class TurnSums(NamedTuple):
    """Sums over the steps of a turn."""

    num_steps: int
    seconds: dict[str, float]
    num_nodes: int
    num_tokens: int


def _served(options: argparse.Namespace, shares: Shares) -> Callable[[int, float, float], TurnSums]:
    """Return a function that serves requests at a temperature for some seconds."""
    config = config_of(options, cache_bytes=_CACHE_BYTES)
    engine = load_engine(config)
    # Measured once, so that all versions choose shapes by the same numbers.
    points = measure(engine, config, speculation_of(ADAPTIVE), say).points
    prompts = prompts_of("dialogues", options)
    gc.collect()
    gc.freeze()  # as the engine's process does
    served: dict[tuple[int, float], Arm] = {}

    def turn(concurrency: int, temperature: float, seconds: float) -> TurnSums:
        key = (concurrency, temperature)
        if key not in served:
            served.clear()  # the next arm overwrites the K/V of this one
            served[key] = make_arms(engine, [ADAPTIVE], points, Load(prompts, 96, temperature))[ADAPTIVE]
        arm = served[key]
        arm.engine.telemetry.pause()
        shares.seconds.clear()
        num_steps = num_nodes = num_tokens = 0
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            while arm.engine.scheduler.num_running + arm.engine.scheduler.num_waiting < concurrency:
                arm.engine.submit(next(arm.requests))
            result = arm.engine.run_step()
            decode_from_engine(encode(StepResults(result.outcomes, result.stats)))
            num_steps += 1
            num_nodes += sum(outcome.num_nodes for outcome in result.outcomes)
            num_tokens += sum(len(outcome.token_ids) for outcome in result.outcomes)
        return TurnSums(num_steps, dict(shares.seconds), num_nodes, num_tokens)

    return turn


class Version:
    """Process that serves with one version of the project on request."""

    def __init__(self, tree: Path | None, flags: Sequence[str]) -> None:
        """tree: folder of the project, None is this one; flags: of the pair and its prompts, as older versions have."""
        environ = os.environ if tree is None else {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-P", "-m", "analysis.around", *flags]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environ, cwd=tree, stdin=pipe, stdout=pipe, text=True)

    def turn(self, concurrency: int, temperature: float, seconds: float) -> TurnSums:
        """Serve for some seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([concurrency, temperature, seconds]), file=self._process.stdin, flush=True)
        return TurnSums(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def table(turns: Sequence[TurnSums]) -> dict[str, Any]:
    """Return milliseconds of a step by part: median over turns."""
    parts = {
        part: statistics.median(1e3 * turn.seconds.get(part, 0.0) / turn.num_steps for turn in turns) for part in PARTS
    }
    num_steps = sum(turn.num_steps for turn in turns)
    return {
        "around_ms": sum(ms for part, ms in parts.items() if part not in _INSIDE),
        "parts_ms": parts,
        "nodes_a_step": sum(turn.num_nodes for turn in turns) / num_steps,
        "tokens_a_step": sum(turn.num_tokens for turn in turns) / num_steps,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a column per cell and version."""
    columns = [(cell, name) for cell in result["cells"] for name in cell["versions"]]
    heads = [f"{cell['concurrency']} at {cell['temperature']:g}, {name}" for cell, name in columns]
    found = [cell["versions"][name] for cell, name in columns]
    rows = {"**around**": [one["around_ms"] for one in found]}
    rows |= {part: [one["parts_ms"][part] for one in found] for part in PARTS}
    rows |= {"(drafted nodes)": [one["nodes_a_step"] for one in found]}
    shown = [[part, *(f"{value:.3f}" for value in values)] for part, values in rows.items()]
    return results.table(["ms a step", *heads], shown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument(
        "--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)"
    )
    parser.add_argument("--temperatures", default="1,0", help="temperatures (default 1,0)")
    parser.add_argument("--turns", type=int, default=5, help="turns of every cell (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a turn (default 1)")
    parser.add_argument("--beside", type=Path, help="folder of another version of the project, measured in turns")
    parser.add_argument("--concurrency", type=integers, default=[1, 16, 64], help="requests at once (default 1,16,64)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells."""
    names = ("target", "draft", "dtype", "device", "threads", "prompt_length")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    trees = {"before": options.beside, "now": None} if options.beside else {"now": None}
    versions = {name: Version(tree, flags) for name, tree in trees.items()}
    cells = [(count, float(text)) for text in options.temperatures.split(",") for count in options.concurrency]
    turns: dict[tuple[int, float, str], list[TurnSums]] = defaultdict(list)
    order = random.Random(0)
    for cell in tqdm(cells, unit="cell"):
        for number in range(_WARM_UP + options.turns):
            for name in order.sample(list(versions), len(versions)):
                turn = versions[name].turn(*cell, options.seconds)
                if number >= _WARM_UP:
                    turns[*cell, name].append(turn)
    for version in versions.values():
        version.close()
    return results.document(
        "milliseconds of CPU time of a served step by part, adaptive drafts, closed loop without HTTP",
        options,
        ("turns", "seconds", "dtype", "threads"),
        cells=[
            {
                "concurrency": cell[0],
                "temperature": cell[1],
                "versions": {name: table(turns[*cell, name]) for name in versions},
            }
            for cell in cells
        ],
    )


def main() -> None:
    """Serve turns as requested on standard input, with the flags of `Version`."""
    parser = argparse.ArgumentParser()
    add_pair_arguments(parser)
    parser.add_argument("--prompt-length", type=int)
    # As a script this module has two names; its parts are looked up under the other one.
    module = importlib.import_module("analysis.around")
    shares = module.Shares()
    turn = module._served(parser.parse_args(), shares)
    shares.install()
    for line in sys.stdin:
        print(json.dumps(turn(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
