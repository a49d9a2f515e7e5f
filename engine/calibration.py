"""Measures plain decoding at start, so that answers can report how much speculation gained; and the parts of a step.

Runs the engine's own step parts on made-up plans (one known token per row, any context); the K/V
pool holds nothing yet, so what is read and overwritten does not matter. What was measured is kept in a file for the
next start of the same engine on the same machine, which uses it when two points of it have changed by the same factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.loading import Progress
from engine.kept import NOWHERE, keep, kept_file, read_kept
from engine.metrics import PlainTimes
from engine.plan import Plan, Row, level_widths
from engine.request import Sampling, Speculation
from engine.scheduling.costs import Curve, NodeCosts, StepCosts, TextCosts

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (32, 256, 1024, 4096, 16384)
_POINT_BUDGET_S = 0.1
"""Of timed steps; before each short one lies one that is not timed."""
_SHORT_S = 0.03
"""A step that takes longer is no slower behind another plan's than behind its own (measured)."""
_LEAST_REPEATS, _MAX_REPEATS = 3, 15
_PLAIN = Speculation()
_COST_ROWS = (1, 4, 16, 64)
_CHAIN = 3
"""Tokens of the chains that are measured at every number of requests."""
_FEW_ROWS = 4
"""With so many requests a few rows more cost next to nothing, up to where they do: more points show where."""
_MOST_NODES = 256
"""Beyond this a step's time grows in proportion."""
_TEXT, _LONG_TEXT = 256, 1024
"""Tokens of the texts behind which shapes are measured; and of those that show, with few requests, what longer texts
add.
"""
_SAY_S = 2.0
"""Between lines of progress."""
_FORMAT = 10
"""Of what is kept: higher where the engine's steps, or what is measured of them, have changed."""
_SAME = 0.15
"""By how much two points' factors, what they take now over what is kept, may differ, as a share: a common one says that
the machine is faster or slower now, which a factor corrects."""
_MOST_CHANGED = 3.0
"""By how much both may have changed: further away other parts of a step would have changed otherwise."""


Tell = Callable[[float], None]
"""Told what share of a measurement is done."""


def _nobody(_: float) -> None:
    """Of a measurement that nobody waits for."""


def _said(progress: Progress, what: str) -> Tell:
    """Says every two seconds how far a measurement is."""
    said_s = time.monotonic()

    def say(share: float) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > _SAY_S:
            said_s = time.monotonic()
            progress(f"measuring {what}: {share:.0%}")

    return say


def measure(
    engine: Engine, config: EngineConfig, speculation: Speculation, progress: Progress
) -> tuple[PlainTimes, StepCosts | None]:
    """Plain decoding, and the parts of speculative steps where the shape adapts: as kept, or measured now."""
    adapts = speculation.adaptive and bool(speculation.num_drafts)
    file, why = None, "nothing is kept, as --profile-cache says"
    if config.profile_cache != NOWHERE:
        file = _file(engine, config, speculation, progress)
        found = _usable(engine, file, adapts)
        if not isinstance(found, str):
            progress("using the measurements of an earlier start")
            return found
        why = found
    progress(f"measuring plain decoding ({why})")
    plain = measure_plain(engine, _said(progress, "plain decoding"))
    costs = None
    if adapts:
        progress("measuring speculative steps")
        costs = measure_costs(engine, speculation, plain, _said(progress, "speculative steps"))
    keep(file, {"plain": [plain.num_rows, plain.contexts, plain.seconds], "costs": costs and costs.points}, progress)
    return plain, costs


def _usable(engine: Engine, file: Path | None, adapts: bool) -> tuple[PlainTimes, StepCosts | None] | str:
    """What an earlier start has measured, with today's factor; or why it cannot be used."""
    if file is None or not file.exists():
        return "there are no measurements of this pair, these settings and this machine yet"
    kept = _kept(read_kept(file), adapts)
    if kept is None:
        return f"{file} cannot be read"
    plain = kept[0]
    factors = _factors_now(engine, plain)
    said = ", ".join(f"{factor:.2f} times as long for {num_rows} at once" for num_rows, factor in factors.items())
    fewest, most = min(factors.values()), max(factors.values())
    if most > (1 + _SAME) * fewest:
        return f"by number of requests plain steps have changed differently: {said}"
    if not 1 / _MOST_CHANGED <= fewest <= most <= _MOST_CHANGED:
        return f"plain steps have changed too much: {said}"
    plain.factor = sum(factors.values()) / len(factors)
    return kept


def _file(engine: Engine, config: EngineConfig, speculation: Speculation, progress: Progress) -> Path | None:
    """Where measurements of such an engine on such a machine are kept; None where there is no such place."""
    model = engine.target.model
    runner = engine.drafter.runner
    described = {
        "target": model.config.to_dict(),
        "draft": runner.model.config.to_dict() if runner is not None else None,
        "engine": [engine.facts.max_model_len, engine.facts.block_size, engine.facts.dtype],
        "model": msgspec.to_builtins(config.model),
        "scheduler": msgspec.to_builtins(config.scheduler),
        "speculation": [msgspec.to_builtins(speculation), config.speculation.draft_window],
        "runs on": [torch.get_num_threads(), str(model.device)],
        "versions": [_FORMAT, torch.__version__, version("transformers")],
    }
    return kept_file(config.profile_cache, described, progress)


def _kept(read: Any, adapts: bool) -> tuple[PlainTimes, StepCosts | None] | None:
    """Measurements as they were written; None where the file holds something else."""
    try:
        plain = PlainTimes(*read["plain"])
        costs = StepCosts.of(read["costs"], plain) if adapts else None
        grid = len(plain.num_rows), len(plain.contexts)
        whole = min(grid) > 0 and (len(plain.seconds), *map(len, plain.seconds)) == (grid[0], *[grid[1]] * grid[0])
        return (plain, costs) if whole and min(min(row) for row in plain.seconds) > 0 else None
    except (TypeError, ValueError, KeyError, IndexError):
        return None


@torch.inference_mode()
def _factors_now(engine: Engine, plain: PlainTimes) -> dict[int, float]:
    """What plain steps of one row, and of a middle number of rows, take now over what they took, by number of rows."""
    numbers = 0, len(plain.num_rows) // 2
    plans = [made_up_plan(engine, plain.num_rows[number], plain.contexts[0] - 1) for number in numbers]
    steps = zip(numbers, middle_steps(engine, plans), strict=True)
    return {plain.num_rows[number]: now_s / plain.seconds[number][0] for number, (now_s, _) in steps}


@torch.inference_mode()
def measure_plain(engine: Engine, tell: Tell = _nobody) -> PlainTimes:
    """Usual duration of a plain step over a grid of batch sizes and contexts that fit the pool."""
    pool_tokens = engine.facts.num_blocks * engine.facts.block_size
    most_rows = engine.scheduler.config.max_num_seqs
    num_rows = [n for n in _NUM_ROWS if n < most_rows] + [most_rows]
    longest = min(engine.facts.max_model_len - 2, pool_tokens // 2)
    contexts = [c for c in _CONTEXTS if c < longest and 2 * c * num_rows[-1] <= pool_tokens] or [min(32, longest)]
    plans = [made_up_plan(engine, rows, context) for rows in num_rows for context in contexts]
    steps = middle_steps(engine, plans, tell)
    walls = [wall_s for wall_s, _ in steps]
    width = len(contexts)
    # Longer texts and more of them are never faster: only noise says so.
    seconds = np.maximum.accumulate(np.maximum.accumulate(np.reshape(walls, (-1, width)), axis=1), axis=0).tolist()
    # A row's own token is one of its text.
    return PlainTimes(num_rows, [context + 1 for context in contexts], seconds)


def made_up_plan(engine: Engine, num_rows: int, context: int, speculation: Speculation = _PLAIN) -> Plan:
    """A decode step of `num_rows` rows behind `context` tokens each; the blocks of the pool are used as they come."""
    branching = speculation.branching
    num_nodes = sum(level_widths(branching))
    blocks_per_row = min((context + num_nodes) // engine.facts.block_size + 2, engine.facts.num_blocks)
    rows = []
    for number in range(num_rows):
        first = number * blocks_per_row % max(1, engine.facts.num_blocks - blocks_per_row + 1)
        rows.append(
            Row(
                sequence_id=number,
                known=(0,),
                first_index=context,
                draft_known=(0,) if branching else (),
                draft_first_index=context,
                block_ids=tuple(range(first, first + blocks_per_row)),
                samples=True,
                sampling=Sampling(seed=number),
                speculation=speculation,
                branching=branching,
            )
        )
    return Plan(tuple(rows))


@torch.inference_mode()
def measure_costs(engine: Engine, speculation: Speculation, plain: PlainTimes, tell: Tell = _nobody) -> StepCosts:
    """Parts of a step by size, from steps of a few shapes that the configured rule verifies.

    plain: what plain steps take (`measure_plain`).
    """
    context = max(2, min(_TEXT, engine.facts.max_model_len // 2))
    points = _points(engine, speculation, context)
    plans = []
    for point in points:
        shape = msgspec.structs.replace(speculation, num_drafts=point.num_drafts, draft_length=point.of_chain, tree=())
        plans.append(made_up_plan(engine, point.num_rows, point.context, shape if point.num_drafts else _PLAIN))
    num_read = min(_MOST_NODES, context)
    plans += [_reading_plan(engine, context, num_tokens) for num_tokens in (1, num_read)]
    *steps, (_, reads_one), (_, reads_many) = middle_steps(engine, plans, tell)
    measured = {point: _Measured(*step) for point, step in zip(points, steps, strict=True)}
    nodes: dict[int, list[tuple[float, float]]] = {}
    draft_pass: list[tuple[float, float]] = []
    # What begins a draft phase is shared by as many passes everywhere.
    usual_length = min(_CHAIN, speculation.draft_length)
    for point, step in measured.items():
        num_rows, num_drafts, of_chain, _ = point
        if point.context != context:
            continue
        if num_drafts:
            of_rows = nodes.setdefault(num_rows, [(0, 0.0)])
            of_rows.append((num_rows * num_drafts * of_chain, step.nodes_s(measured[point.plain])))
        if num_drafts == 1 and of_chain == usual_length:
            draft_pass.append((num_rows, step.draft_s / of_chain))
        elif num_drafts > 1 and of_chain > 1:
            first_s = Curve(draft_pass).at(num_rows)
            draft_pass.append((num_rows * num_drafts, (step.draft_s - first_s) / (of_chain - 1)))
    reading = Curve([(0, 0.0), (num_read - 1, reads_many["draft"] - reads_one["draft"])])
    of_nodes = NodeCosts({num_rows: Curve(points) for num_rows, points in nodes.items()})
    text = _text_costs(measured, context, plain, engine.scheduler.catching_up.draft_window)
    return StepCosts(plain, of_nodes, Curve(draft_pass), reading, text)


class _Point(NamedTuple):
    """A step that is measured."""

    num_rows: int
    num_drafts: int
    of_chain: int
    context: int

    @property
    def plain(self) -> _Point:
        """The same without drafts."""
        return _Point(self.num_rows, 0, 0, self.context)


class _Measured(NamedTuple):
    """How long it took."""

    wall_s: float
    phases_s: dict[str, float]

    @property
    def draft_s(self) -> float:
        return self.phases_s["draft"]

    def nodes_s(self, plain: _Measured) -> float:
        """What its nodes took, beside a plain step."""
        return self.wall_s - self.draft_s - plain.wall_s


def _text_costs(measured: Mapping[_Point, _Measured], context: int, plain: PlainTimes, window: int) -> TextCosts:
    """From points behind longer texts, each beside the same one behind usual ones."""
    if plain.contexts[-1] <= context + 1:
        return TextCosts()  # nothing is known of what longer texts add to plain steps: drafts alone would seem dear
    added, pass_s, most_s = [], 0.0, 0.0
    for point, step in measured.items():
        if point.context == context or not point.num_drafts:
            continue
        usual, longer = point._replace(context=context), point.context - context
        num_nodes = point.num_rows * point.num_drafts * point.of_chain
        nodes_s = step.nodes_s(measured[point.plain]) - measured[usual].nodes_s(measured[usual.plain])
        added.append((longer * num_nodes, nodes_s))
        # A row reads the text alone, its nodes with it.
        plain_s = measured[point.plain].wall_s - measured[usual.plain].wall_s
        most_s = max(0.0, plain_s / (longer * point.num_rows))
        seen = min(point.context + 1, window or point.context + 1) - min(context + 1, window or context + 1)
        if point.num_drafts == 1 and seen:
            pass_s = max(0.0, (step.draft_s - measured[usual].draft_s) / (seen * point.num_rows * point.of_chain))
    # Longer texts are never faster: only noise says so. A row's own token is one of its text.
    node_s = sum(more * s for more, s in added) / sum(more * more for more, _ in added) if added else 0.0
    return TextCosts(context + 1, min(max(0.0, node_s), most_s), pass_s, window)


def _points(engine: Engine, speculation: Speculation, context: int) -> list[_Point]:
    """The steps that are measured: one chain before several of as many requests."""
    most_rows, length = engine.scheduler.config.max_num_seqs, min(_CHAIN, speculation.draft_length)
    room = engine.scheduler.config.max_num_batched_tokens
    pool_tokens = engine.facts.num_blocks * engine.facts.block_size
    longest = min(_LONG_TEXT, engine.facts.max_model_len - length - 2, pool_tokens // 2)
    points: list[_Point] = []
    for num_rows in dict.fromkeys(min(n, most_rows) for n in _COST_ROWS):
        points.append(_Point(num_rows, 0, 0, context))
        shapes = [(1, length), (min(4, speculation.num_drafts), length)]
        if num_rows <= _FEW_ROWS:
            shapes += [(1, 1), (1, speculation.draft_length)]
        for num_drafts, of_chain in dict.fromkeys(shapes):
            if num_rows == 1 or num_rows * num_drafts * of_chain <= min(_MOST_NODES, room - num_rows):
                points.append(_Point(num_rows, num_drafts, of_chain, context))
    if longest >= 2 * context:
        num_rows = min(_FEW_ROWS, most_rows)
        shapes = [(0, 0), (1, length), (min(4, speculation.num_drafts), length)]
        longer = [_Point(num_rows, *shape, longest) for shape in dict.fromkeys(shapes)]
        points += [point for point in longer if point._replace(context=context) in points]
    return points


def _reading_plan(engine: Engine, context: int, num_read: int) -> Plan:
    """A plain step of one row beside which the draft model reads so many tokens."""
    (row,) = made_up_plan(engine, 1, context).rows
    return Plan((msgspec.structs.replace(row, draft_known=(0,) * num_read, draft_first_index=row.end - num_read),))


def usual_s(engine: Engine, plan: Plan) -> float:
    """Duration of a step that carries out the plan, of the middle half of several."""
    return middle_steps(engine, [plan])[0][0]


def middle_steps(engine: Engine, plans: Sequence[Plan], tell: Tell = _nobody) -> list[tuple[float, dict[str, float]]]:
    """(duration, durations by phase) of each plan's steps: of the middle half of them, in the mean.

    In turns, so that a machine that is busy for a while is so for all of them: what counts is how they compare. One
    step a turn, as the machine is much the same in the next: few turns of several would say less in the same time.
    """
    runs: list[list[tuple[float, dict[str, float]]]] = [[] for _ in plans]
    for turn in range(_MAX_REPEATS):
        for plan, of_plan in zip(plans, runs, strict=True):
            if turn < _LEAST_REPEATS or sum(wall_s for wall_s, _ in of_plan) < _POINT_BUDGET_S:
                if not of_plan or of_plan[-1][0] < _SHORT_S:
                    engine.carry_out(plan)  # behind another plan's step, which no step of a server is for long
                engine.telemetry.stopwatch.start()
                engine.carry_out(plan)
                of_plan.append(engine.telemetry.stopwatch.stop())
        spent_s = [_POINT_BUDGET_S if turn + 1 == _MAX_REPEATS else sum(wall_s for wall_s, _ in one) for one in runs]
        tell(sum(min(1.0, one_s / _POINT_BUDGET_S) for one_s in spent_s) / len(plans))
    return [_middle(of_plan) for of_plan in runs]


def _middle(runs: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """The mean of the middle half, by duration, of three the one in the middle: less noisy than that of many."""
    left_out = (len(runs) + 1) // 4
    half = sorted(runs, key=lambda run: run[0])[left_out : len(runs) - left_out]
    phases_s = {phase: sum(of_run[phase] for _, of_run in half) / len(half) for phase in half[0][1]}
    return sum(wall_s for wall_s, _ in half) / len(half), phases_s
