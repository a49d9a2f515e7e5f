"""Measures steps of synthetic plans, at start and for `polydraft analyze`.

The K/V pool is still empty at start, so steps may read and overwrite anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from engine.config import PROMPT_LOOKUP
from engine.control.step_time import Prices
from engine.fanout import num_nodes
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation, TextDraft
from engine.step.engine import Engine

_TEXT = 256
_ROWS, _LENGTH, _NUM_PROMPT = 16, 3, 64
"""Requests, tokens of a chain, and tokens of a prompt in the measured steps."""
_MOST_S = 1.5
"""Seconds after which no further plan is measured."""
_BUDGET_S, _LEAST_REPEATS, _MOST_TURNS = 0.06, 4, 4
"""Seconds of timed steps of each plan, least number of them, and most turns."""
_NUM_WARM, _NUM_TIMED = 4, 3
"""A turn of short steps: untimed ones, because another plan fills the caches; timed ones."""
_WARM_UP_BELOW_S = 0.03
"""Longer steps need no untimed ones before each turn (measured)."""
_ROW_SHARE, _DRAFT_SHARE = 0.05, 0.1
"""Guesses for a row and a draft pass, in plain steps, if there is no time."""
_PLAIN = Speculation()


def measure_prices(engine: Engine, speculation: Speculation) -> Prices:
    """Return the first guesses of what steps take, measured in about a second."""
    facts = engine.facts
    text = max(1, min(_TEXT, facts.max_model_len // 2))
    rows = min(_ROWS, engine.scheduler.config.max_num_seqs)
    num_prompt = min(_NUM_PROMPT, text)
    plans = {"plain": synthetic_plan(engine, 1, text), "rows": synthetic_plan(engine, rows, text)}
    length = min(_LENGTH, speculation.draft_length)
    if speculation.num_drafts:
        plans["chain"] = synthetic_plan(engine, 1, text, _chains(speculation, 1, length))
    plans["prompt"] = synthetic_plan(engine, 1, text, num_prompt=num_prompt)
    if speculation.num_drafts:
        chains = _chains(speculation, min(4, speculation.num_drafts), length)
        plans["chains"] = synthetic_plan(engine, 1, text, chains)
        plans["read"] = synthetic_plan(engine, 1, text, _chains(speculation, 1, length), num_read=num_prompt)
    seconds = _measure_in_time(engine, plans)
    step_s = seconds["plain"]
    row_s = _ROW_SHARE * step_s
    if "rows" in seconds and rows > 1:
        row_s = max(0.0, (seconds["rows"] - step_s) / (rows - 1))
    pass_s = _DRAFT_SHARE * step_s
    draw_s = read_s = 0.0
    if "chain" in seconds:
        pass_s = max(0.0, (seconds["chain"] - step_s) / length - row_s)
    if "chains" in seconds and speculation.num_drafts > 1 and length > 1:
        num_more = min(4, speculation.num_drafts) - 1
        more_s = seconds["chains"] - seconds["chain"] - num_more * length * row_s
        draw_s = max(0.0, more_s / (num_more * (length - 1)))
    if "read" in seconds:
        read_s = max(0.0, (seconds["read"] - seconds["chain"]) / (num_prompt - 1))
    prompt_s = max(row_s / 2, (seconds.get("prompt", 0.0) - step_s) / num_prompt)
    return Prices(step_s, row_s, pass_s, draw_s, prompt_s, read_s)


def _chains(speculation: Speculation, num_drafts: int, draft_length: int) -> Speculation:
    return msgspec.structs.replace(speculation, num_drafts=num_drafts, draft_length=draft_length, tree=())


def _measure_in_time(engine: Engine, plans: dict[str, Plan]) -> dict[str, float]:
    """Return the seconds of the plans that can be measured in time, at least of the first.

    Other work on the machine makes single steps longer, so the shortest step counts.
    """
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    for is_first in (True, False):
        for name, plan in plans.items():
            shortest_s = min(wall_s for wall_s, _ in _turn(engine, plan, is_first))
            seconds[name] = min(shortest_s, seconds.get(name, shortest_s))
            if _is_over(began):
                return seconds
    return seconds


def _is_over(began_s: float) -> bool:
    return time.perf_counter() - began_s > _MOST_S


def synthetic_plan(
    engine: Engine,
    num_rows: int,
    context: int,
    speculation: Speculation = _PLAIN,
    num_prompt: int = 0,
    num_read: int = 1,
    num_text: int = 0,
) -> Plan:
    """Return a decode step of `num_rows` rows after `context` tokens each.

    Blocks are numbered from 0 and not allocated; rows share some if a pool has too few. num_prompt:
    tokens of a prompt in the same step; num_read: tokens of each row that the draft model computes;
    num_text: tokens of its text draft.
    """
    fanout = speculation.fanout
    longest = context + max(num_nodes(fanout) + num_text, num_prompt)
    blocks_per_row = min(longest // engine.facts.block_size + 2, engine.facts.num_blocks)
    store = engine.scheduler.tables.draft
    rows = []
    for number in range(num_rows + bool(num_prompt)):
        is_prompt = number == num_rows
        first = number * blocks_per_row % max(1, engine.facts.num_blocks - blocks_per_row + 1)
        blocks = range(first, first + blocks_per_row)
        rows.append(
            Row(
                sequence_id=number,
                input_ids=(0,) * (num_prompt if is_prompt else 1),
                first_index=context,
                draft_input_ids=(0,) * num_read if fanout else (),
                draft_first_index=context + 1 - num_read,
                block_ids=tuple(blocks),
                draft_block_ids=None if store is None else tuple(block % store.num_blocks for block in blocks),
                emits=not is_prompt,
                sampling=Sampling(seed=number),
                speculation=speculation,
                fanout=fanout,
                text_drafts=(TextDraft(PROMPT_LOOKUP, (0,) * num_text),) * (num_text > 0 and not is_prompt),
            )
        )
    return Plan(tuple(rows))


def usual_s(engine: Engine, plan: Plan) -> float:
    """Return a plan's step duration: the mean of the middle half of several."""
    return middle_steps(engine, [plan])[0][0]


def middle_steps(engine: Engine, plans: Sequence[Plan]) -> list[tuple[float, dict[str, float]]]:
    """Return (duration, durations by phase) of each plan: the mean of the middle half.

    The plans take turns, so other load on the machine affects all of them.
    """
    runs: list[list[tuple[float, dict[str, float]]]] = [[] for _ in plans]
    for _ in range(_MOST_TURNS):
        for plan, plan_runs in zip(plans, runs, strict=True):
            if len(plan_runs) < _LEAST_REPEATS or sum(wall_s for wall_s, _ in plan_runs) < _BUDGET_S:
                plan_runs += _turn(engine, plan, is_first=not plan_runs)
    return list(map(_middle, runs))


def _turn(engine: Engine, plan: Plan, is_first: bool) -> list[tuple[float, dict[str, float]]]:
    """Run several short steps of a plan, or one; its very first step is discarded."""
    step = _timed(engine, plan)
    if step[0] >= _WARM_UP_BELOW_S:
        return [_timed(engine, plan) if is_first else step]
    for _ in range(_NUM_WARM - 1):
        engine.carry_out(plan)
    return [_timed(engine, plan) for _ in range(_NUM_TIMED)]


def _timed(engine: Engine, plan: Plan) -> tuple[float, dict[str, float]]:
    engine.telemetry.stopwatch.start()
    engine.carry_out(plan)
    return engine.telemetry.stopwatch.stop()


def _middle(runs: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Return the mean of the middle half by duration; of three runs, the middle one."""
    left_out = (len(runs) + 1) // 4
    half = sorted(runs, key=lambda run: run[0])[left_out : len(runs) - left_out]
    phases_s = {phase: sum(run_phases_s[phase] for _, run_phases_s in half) / len(half) for phase in half[0][1]}
    return sum(wall_s for wall_s, _ in half) / len(half), phases_s
