"""`analyze arms`: speculation against plain decoding, in turns of a few steps.

Also the controller against fixed shapes.

The speed of a shared machine changes by a fifth from one second to the next; arms that take turns
run under the same conditions. In a turn each arm does the work of about a quarter of a second of
plain decoding, prompts and answers, so that all are at the same point of the same work. Every arm
is a separate engine (scheduler, controller, blocks) around the same models. It serves a closed loop
of the same requests, whose answers differ in length so that they do not all end at once. Times are
of the engine's steps, including prompts; HTTP is not included (`polydraft bench`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from engine.config import EngineFacts, SchedulerConfig, SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import Prices, StepTimes
from engine.errors import ConfigError
from engine.fanout import num_nodes
from engine.request import Request, Speculation
from engine.scheduling.outcome import Outcome, Timing
from engine.scheduling.request_checks import with_fixed_shape
from engine.start.measuring import measure_prices
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.results import document
from research.analysis.load import LOAD_NAMES, Load, SpeculationSetup, add_load_arguments
from research.analysis.loading import add_format_arguments, add_pair_arguments, config_of, load_engine, prompts_of
from research.analysis.turns import SEED_STABLE, SEEDED, Turn, beside_best, chart, price, rate, ratio, works
from research.analysis.turns import markdown as markdown

_READING = "prompts"
""""Shape" of a step in which no request drafts or gets a token."""
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
_ARM_BYTES = 1 << 29
_GREEDY_ANSWERS = 8
_LEAST_TURNS = 8
_TURN_S = 0.25
_LIMITS = SpeculationConfig()


@dataclass
class Arm:
    """An engine under its load."""

    engine: Engine
    requests: Iterator[Request]
    speculation: Speculation = field(default_factory=Speculation)
    done: Turn = field(default_factory=Turn)
    """Totals since the beginning."""
    turns: list[Turn] = field(default_factory=list)
    shapes: dict[str, float] = field(default_factory=dict)
    """Seconds by the shape that most of the drafting requests drafted."""
    num_passes: int = 0
    """Target passes over one request's drafts, or its next token."""
    num_accepted: int = 0
    num_drafting: int = 0
    """Passes of the target that verified drafts."""
    num_steps: int = 0
    num_recorded: int = 0
    """Steps that ran as recorded steps (on a device)."""
    draft_s: float = 0.0
    """Time of drafting."""
    timing: Timing = field(default_factory=Timing)
    """Times of all answers' steps, as the answers report them."""

    def take_turn(self, concurrency: int, aim: float, prompt_weight: float) -> None:
        """Run steps until the arm has done this much work since the beginning (`Turn.work`)."""
        turn = Turn()
        self.engine.telemetry.pause()
        while self.done.work(prompt_weight) < aim:
            step = self.step(concurrency)
            turn, self.done = turn.plus(step), self.done.plus(step)
        self.turns.append(turn)

    def step(self, concurrency: int) -> Turn:
        """Run one step with this number of open requests."""
        began = time.perf_counter()
        while self.engine.scheduler.num_running + self.engine.scheduler.num_waiting < concurrency:
            self.engine.submit(next(self.requests))
        return self._step(began)[0]

    def _step(self, began: float) -> tuple[Turn, Sequence[Outcome]]:
        step = self.engine.run_step()
        seconds = time.perf_counter() - began
        for outcome in step.outcomes:
            self.timing.add(step.stats, outcome)
        plan = self.engine.scheduler.last_plan
        rows = plan.sampling_rows
        self.num_steps += 1
        self.num_recorded += self.engine.recorded.find(plan) is not None
        self.num_passes += len(rows)
        self.num_drafting += sum(bool(row.fanout) for row in rows)
        self.num_accepted += sum(outcome.num_accepted for outcome in step.outcomes)
        self.draft_s += step.stats.phases_s["draft"]
        shape = _shape_of([row.fanout for row in rows if row.fanout]) if rows else _READING
        self.shapes[shape] = self.shapes.get(shape, 0.0) + seconds
        num_tokens = sum(len(outcome.token_ids) for outcome in step.outcomes)
        # Tokens of a row besides its root belong to a prompt.
        num_read = sum(len(row.input_ids) for row in plan.rows) - len(rows)
        return Turn(seconds, num_tokens, num_read), step.outcomes

    @property
    def reported_speedup(self) -> float | None:
        """Return the reported speedup of all answers together."""
        return self.timing.speedup

    def answers(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Answer some requests to their end and return the tokens by request.

        No other request may run. Steps are turns.
        """
        tokens: dict[str, list[int]] = {}
        for request in requests:
            self.engine.submit(request)
        while self.engine.scheduler.has_work:
            turn, outcomes = self._step(time.perf_counter())
            self.turns.append(turn)
            for outcome in outcomes:
                tokens.setdefault(outcome.request_id, []).extend(outcome.token_ids)
        return tokens

    def forget(self) -> None:
        """Reset all totals."""
        self.turns.clear()
        self.shapes.clear()
        self.num_passes = self.num_accepted = self.num_drafting = self.num_steps = self.num_recorded = 0
        self.draft_s = 0.0
        self.timing = Timing()


def _shape_of(drafted: Sequence[tuple[int, ...]]) -> str:
    if not drafted:
        return OFF
    fanout = statistics.mode(drafted)
    return f"{fanout[0]}x{len(fanout)}"


def speculation_of(name: str) -> Speculation:
    """Return the speculation of an arm's requests.

    name: `adaptive`, `seeded` and `seed_stable` (the same with a seed, fixed by either method),
    `off`, `again` (off once more, for the noise), or `rule:KxL`.
    """
    if name in (OFF, AGAIN):
        return Speculation()
    if name not in (ADAPTIVE, SEEDED, SEED_STABLE):
        return SpeculationSetup.parse(name).speculation
    adaptive = Speculation(num_drafts=_LIMITS.num_drafts, draft_length=_LIMITS.draft_length, adaptive=True)
    return with_fixed_shape(adaptive, _LIMITS, "cpu") if name == SEEDED else adaptive


def make_arms(engine: Engine, names: Sequence[str], prices: Prices, load: Load) -> dict[str, Arm]:
    """Return engines around the models of one engine, each with its part of the blocks."""
    arms = {}
    # Fixed shapes also report the measurements of the plain arm's steps, as they would with other
    # requests; adaptive reports its own.
    shared = StepTimes(prices)
    for number, name in enumerate(names):
        scheduler = engine.scheduler.portion(number, len(names))
        speculation = speculation_of(name)
        scheduler.times = shared
        if speculation.adaptive:
            scheduler.times = StepTimes(prices)
            scheduler.controller = Controller(scheduler.times, _LIMITS.max_draft_length)
        arm_engine = engine.with_scheduler(scheduler)
        arms[name] = Arm(arm_engine, load.requests(speculation, name == SEED_STABLE), speculation)
    return arms


class Durations(NamedTuple):
    """Seconds of plain decoding in a cell, before its measured turns, and in a turn.

    Other arms do the same work.
    """

    cell_s: float
    warm_up_s: float
    turn_s: float = _TURN_S

    @staticmethod
    def of(options: argparse.Namespace) -> Durations:
        """Return the durations of the options of `add_turn_arguments`."""
        return Durations(options.seconds, options.warm_up, options.turn)

    def longer(self, most_s: float) -> Durations:
        """Return longer turns if a step may take up to `most_s`, as far as enough turns remain."""
        return self._replace(turn_s=max(self.turn_s, min(most_s, self.cell_s / (2 * _LEAST_TURNS))))

    @property
    def num_warm_up(self) -> int:
        """Return the number of turns before the measured ones."""
        return max(1, round(self.warm_up_s / self.turn_s))

    @property
    def num_measured(self) -> int:
        """Return the number of measured turns."""
        return max(_LEAST_TURNS, round(self.cell_s / self.turn_s))


def measure(
    make: Callable[[], dict[str, Arm]],
    load: Load,
    concurrency: int,
    durations: Durations,
    progress: Any,
) -> dict[str, Any]:
    """Measure a cell: all arms at one concurrency.

    make: returns new arms, `off` among them.
    """
    # The warm-up uses other arms, because the measured ones would learn from another temperature.
    others = make()
    # A device computes in 16 bits, where equal answers prove nothing.
    if others[OFF].engine.works_meanwhile:
        others = {OFF: others[OFF]}
    equal = same_greedy_answers(others, load, concurrency)
    if not all(equal.values()):
        tqdm.write(f"greedy answers that are not plain decoding's: {equal}", file=sys.stderr)
    prompt_weight = price(others[OFF].turns)
    plain_rate = float(rate(works(others[OFF].turns, prompt_weight).sum(0)))
    # A step may do more than the work of one turn.
    most_work = max(step.work(prompt_weight) for arm in others.values() for step in arm.turns)
    durations = durations.longer(most_work / plain_rate)
    turn_s = durations.turn_s
    arms = make()
    names = list(arms)
    order = random.Random(concurrency)
    for number in range(durations.num_warm_up + durations.num_measured):
        if number == durations.num_warm_up:
            for arm in arms.values():
                arm.forget()
        aim = (number + 1) * turn_s * plain_rate
        for name in order.sample(names, len(names)):
            arms[name].take_turn(concurrency, aim, prompt_weight)
        progress.update(min(turn_s, progress.total - progress.n))
    if not all(any(turn.seconds for turn in arm.turns) for arm in arms.values()):
        raise ConfigError(f"a step takes longer than the turns of {durations.cell_s:g} seconds: raise --seconds")
    return {
        "concurrency": concurrency,
        "greedy_answers_equal_off": equal,
        "turn_seconds": turn_s,
        **compared(arms, prompt_weight),
    }


def check_room(facts: EngineFacts, names: Sequence[str], load: Load, concurrency: int) -> None:
    """Raise ConfigError if the models cannot take the longest text, or all requests of an arm.

    An arm has its part of the blocks.
    """
    if load.longest_text > facts.max_model_len:
        raise ConfigError(f"texts of up to {load.longest_text} tokens, and the models take {facts.max_model_len}")
    most_nodes = max(num_nodes(speculation_of(name).fanout) for name in names)
    needed = concurrency * -(-(load.longest_text + most_nodes) // facts.block_size)
    share = facts.num_blocks // len(names)
    if needed > share:
        raise ConfigError(
            f"{concurrency} requests of up to {load.longest_text} tokens need {needed} cache blocks and an arm has "
            f"{share}: lower --concurrency, --prompt-length or --tokens, shorten --prompts or name fewer --arms"
        )


def same_greedy_answers(arms: dict[str, Arm], load: Load, concurrency: int) -> dict[str, bool]:
    """Whether an arm answers like plain decoding at temperature 0, for at least eight requests.

    In 16 bits logits differ with the batch.
    """
    num_answers = max(_GREEDY_ANSWERS, concurrency)
    answers: dict[str, dict[str, list[int]]] = {}
    for name, arm in arms.items():
        greedy = list(itertools.islice(replace(load, temperature=0.0).requests(arm.speculation), num_answers))
        answers[name] = {}
        for start in range(0, len(greedy), concurrency):
            answers[name] |= arm.answers(greedy[start : start + concurrency])
    return {name: answer == answers[OFF] for name, answer in answers.items() if name != OFF}


def compared(arms: dict[str, Arm], prompt_weight: float) -> dict[str, Any]:
    """Compare every arm with plain decoding, and adaptive with the best fixed shape.

    prompt_weight: as in `turns.price`.
    """
    turns = {name: works(arm.turns, prompt_weight) for name, arm in arms.items()}
    result: dict[str, Any] = {
        "prompt_token_in_plain_tokens": prompt_weight,
        "arms": {
            name: {
                "tokens_per_second": _num_tokens(arm) / sum(turn.seconds for turn in arm.turns),
                "tokens_per_pass": _num_tokens(arm) / arm.num_passes,
                "ratio_to_off": ratio(turns[name], turns[OFF]),
                "accepted_per_drafting_pass": arm.num_accepted / max(1, arm.num_drafting),
                "share_of_recorded_steps": arm.num_recorded / max(1, arm.num_steps),
                "share_of_drafting": arm.draft_s / sum(turn.seconds for turn in arm.turns),
                "reported_speedup": arm.reported_speedup,
                "share_of_time": _shares(arm.shapes),
            }
            for name, arm in arms.items()
        },
    }
    if ADAPTIVE in arms:
        result["adaptive_to_best_fixed"] = beside_best(turns)
    return result


def _num_tokens(arm: Arm) -> int:
    return sum(turn.num_tokens for turn in arm.turns)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Sort by time, the largest first."""
    return {shape: seconds[shape] / sum(seconds.values()) for shape in sorted(seconds, key=seconds.__getitem__)[::-1]}


def add_turn_arguments(parser: argparse.ArgumentParser, seconds: float, warm_up_s: float) -> None:
    """Add the numbers of requests, and the durations of a cell, a turn and the warm-up."""
    parser.add_argument("--concurrency", type=integers, default=[1, 4, 16], help="requests at once (default 1,4,16)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"of plain decoding in a cell; the other arms do the same work (default {seconds:g})",
    )
    parser.add_argument(
        "--turn", type=float, default=_TURN_S, help="seconds of plain decoding in a turn (default 0.25)"
    )
    parser.add_argument(
        "--warm-up", type=float, default=warm_up_s, help=f"seconds before the measured turns (default {warm_up_s:g})"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add_format_arguments(parser)
    add_load_arguments(parser, num_tokens=48, several=True)
    parser.add_argument(
        "--arms",
        default="adaptive,again,block:1x1,block:1x3,block:1x5,bv_race:2x3",
        help="arms to compare with plain decoding: adaptive (the controller), again (plain once more: the noise), "
        "rule:KxL or a tree as rule:2.2.1, seeded (what a request with a seed gets), seed_stable (shapes that change, "
        "and sampling that no shape changes)",
    )
    add_turn_arguments(parser, seconds=20.0, warm_up_s=8.0)
    parser.add_argument("--chart", type=Path, help="also draw the result into this file (needs matplotlib)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells (prompts x concurrency)."""
    names = list(dict.fromkeys([OFF, *options.arms.split(",")]))
    for name in names:
        speculation_of(name)
    if options.seconds < _LEAST_TURNS * options.turn:
        raise ConfigError(
            f"--seconds must be at least {_LEAST_TURNS * options.turn:g}: arms take turns of {options.turn:g} seconds"
        )
    engine = load_arms_engine(options, len(names))
    kinds = options.prompts or ["dialogues"]
    loads = {kind: Load.of(prompts_of(kind, options), options) for kind in kinds}
    for load in loads.values():
        check_room(engine.facts, names, load, max(options.concurrency))
    prices = measure_prices(engine, speculation_of(ADAPTIVE))
    total = (options.seconds + options.warm_up) * len(loads) * len(options.concurrency)
    cells = []
    with tqdm(total=total, desc="arms", unit="s", bar_format=_BAR) as progress:
        for kind, load in loads.items():
            for concurrency in options.concurrency:
                make = partial(make_arms, engine, names, prices, load)
                cell = measure(make, load, concurrency, Durations.of(options), progress)
                cells.append({"prompts": kind if kind.startswith("random:") else Path(kind).stem, **cell})
    options.prompts = kinds
    result = document(
        "arms in turns of the same work, a quarter of a second or so, in one process, closed loop without HTTP",
        options,
        (*LOAD_NAMES, "arms", "seconds", "dtype", "threads", "concurrency"),
        cells=cells,
    )
    if options.chart:
        chart(result, options.chart)
    return result


def load_arms_engine(options: argparse.Namespace, num_arms: int) -> Engine:
    """Load the pair that the command line names, with room for `num_arms` arms."""
    scheduler = SchedulerConfig(max_num_seqs=max(64, *options.concurrency))
    return load_engine(config_of(options, scheduler, _LIMITS, num_arms * _ARM_BYTES))
