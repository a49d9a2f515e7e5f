"""`analyze reports`: compare the speedup that an answer reports with the measured one, in turns.

The speed of a shared machine changes within seconds, so two plain answers to one prompt, one after
the other, differ by more than the error of interest. Here all arms answer each request together, a
few tokens at a time, two of them plainly. The reported speedup is compared with the time of the
plain answers over its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from analysis.arms import Arm, check_room, load_arms_engine, make_arms, speculation_of
from analysis.load import LOAD_NAMES, Load, add_load_arguments
from analysis.loading import add_pair_arguments, prompts_of
from engine.errors import ConfigError
from engine.start.calibration import measure_points
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.results import document, table

_TURN_TOKENS = 64
"""Tokens of a turn: few, because the machine's speed must be the same during a round of all arms;
but more than those after which the caches hold the arm's weights. Of twelve plain steps eight were
cold, and took a tenth longer.
"""
_WARM_UP = 4
"""Answers at the beginning that are discarded: the engine must have seen the sizes of steps."""
_LEAST_ANSWERS = 3


def answer_in_turns(arms: Mapping[str, Arm], order: random.Random) -> dict[str, float]:
    """Answer the next request of each arm, the same for all, and return the seconds that each
    took.
    """
    seconds, num_tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    open_arms, aim = list(arms), 0
    for arm in arms.values():
        arm.forget()
    while open_arms:
        aim += _TURN_TOKENS
        for name in order.sample(open_arms, len(open_arms)):
            arms[name].engine.telemetry.pause()
            while num_tokens[name] < aim:
                step = arms[name].step(1)
                seconds[name] += step.seconds
                num_tokens[name] += step.num_tokens
                if not arms[name].engine.scheduler.has_work:
                    open_arms.remove(name)
                    break
    return seconds


def compare(arms: Mapping[str, Arm], num_answers: int) -> dict[str, Any]:
    """Return the errors of reported speedups by arm, and the differences between plain answers."""
    order = random.Random(0)
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in arms if name not in (OFF, AGAIN)}
    noise = []
    for number in tqdm(range(_WARM_UP + num_answers), desc="answers", unit="answer"):
        seconds = answer_in_turns(arms, order)
        if number < _WARM_UP:
            continue
        noise.append(abs(seconds[OFF] / seconds[AGAIN] - 1))
        plain_s = (seconds[OFF] + seconds[AGAIN]) / 2
        for name, found in pairs.items():
            reported = arms[name].reported_speedup
            # An answer that the controller decoded plainly reports nothing.
            if reported is not None and set(arms[name].shapes) - {OFF}:
                found.append({"reported": reported, "actual": plain_s / seconds[name]})
    return {
        "noise_of_two_plain_runs": _spread(noise),
        "arms": {name: _errors(found) | {"pairs": found} for name, found in pairs.items()},
    }


def _errors(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    if len(pairs) < _LEAST_ANSWERS:
        return {}
    errors = [pair["reported"] / pair["actual"] - 1 for pair in pairs]
    return {"error": statistics.median(errors), "absolute_error": _spread([abs(error) for error in errors])}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p90": statistics.quantiles(values, n=10)[-1]}


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per arm, and one for the two plain answers."""
    rows = []
    for cell in result["cells"]:
        for arm, found in cell["arms"].items():
            error = f"{found['error']:+.1%}" if "error" in found else f"{len(found['pairs'])} answers had drafts"
            rows.append([cell["concurrency"], arm, error, *_shown(found.get("absolute_error"))])
        rows.append([cell["concurrency"], "plain and plain", "", *_shown(cell["noise_of_two_plain_runs"])])
    return table(["c", "arm", "error (median)", "absolute error, median", "90 % of answers"], rows)


def _shown(spread: dict[str, float] | None) -> tuple[str, str]:
    return (f"{spread['median']:.1%}", f"{spread['p90']:.1%}") if spread else ("-", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add_load_arguments(parser, num_tokens=192)
    parser.add_argument(
        "--arms",
        default="adaptive,block:1x5,bv_race:4x5",
        help="arms: adaptive (the controller), rule:KxL or a tree as rule:2.2.1",
    )
    parser.add_argument("--answers", type=int, default=40, help="answers of each arm (default 40)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one request at a time."""
    names = list(dict.fromkeys([OFF, AGAIN, *options.arms.split(",")]))
    for name in names:
        speculation_of(name)
    if options.answers < _LEAST_ANSWERS:
        raise ConfigError(f"--answers must be at least {_LEAST_ANSWERS}")
    options.concurrency = [1]
    engine = load_arms_engine(options, len(names))
    load = Load.of(prompts_of(options.prompts, options), options)
    check_room(engine.facts, names, load, 1)
    points = measure_points(engine, speculation_of(ADAPTIVE))
    cell = compare(make_arms(engine, names, points, load), options.answers)
    return document(
        "speedup reported by an answer against plain answers in the same turns of a few tokens, without HTTP",
        options,
        (*LOAD_NAMES, "arms", "answers", "dtype", "threads"),
        cells=[{"concurrency": 1, **cell}],
    )
