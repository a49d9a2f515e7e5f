"""Measures steps of many sizes at start, to which the model of step times is fitted.

Runs the engine's own step on synthetic plans. The K/V pool is still empty, so it does not matter
what the steps read and overwrite. The measurements are stored in a file. The next start of the same
engine on the same machine uses them if plain steps still take the same time, up to one common
factor and what the machine's other work explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from engine.config import PROMPT_LOOKUP, EngineConfig
from engine.control.step_time import NUM_TERMS, Point, StepTimes
from engine.control.step_work import StepWork
from engine.cuda.recorded.inputs import NUM_TEXT
from engine.fanout import num_nodes
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation, TextDraft
from engine.start.loading import Progress
from engine.start.profile_cache import profile_file, read_profile, write_profile
from engine.step.engine import Engine

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (32, 256, 1024, 4096, 16384)
"""Tokens of texts."""
_WITH_LONGER_TEXTS = (1, 4, 16)
"""Numbers of requests whose plain steps are measured after texts of the first, the second and the
longest length; other numbers are measured after the first only.
"""
_TEXT = 256
"""Tokens of the texts in all other measurements."""
_PROMPT_CHUNKS, _DEVICE_CHUNKS = (32, 128), (32, 128, 512, 2048)
"""Tokens of a prompt in a step, on a CPU and on another device, which takes as long for some
hundred tokens as for one.
"""
_LONG_PROMPT = 4096
"""Most tokens before a measured chunk of a prompt; beyond it, the cost per token is
extrapolated.
"""
_TEXT_NODES = 2, 12
"""Tokens of measured text drafts; of several requests the first."""
_MOST_NODES = 256
"""Drafted tokens of a step beyond which time grows in proportion."""
_BUDGET_S, _LEAST_REPEATS, _MOST_TURNS = 0.06, 4, 4
"""Seconds of timed steps of each plan, least number of them, and most turns."""
_NUM_WARM, _NUM_TIMED = 4, 3
"""A turn of a plan with short steps: untimed steps, because another plan's weights fill the caches;
then timed ones.
"""
_WARM_UP_BELOW_S = 0.03
"""Plans whose steps take longer than this need no untimed steps before each turn (measured)."""
_SAME, _MOST_UNEQUAL, _MOST_CHANGED = 1.15, 2.0, 3.0
"""Factors by which plain steps of an earlier start may have changed. If the changes of steps of
different sizes differ by at most the first factor, the measurements are used as they are; by at
most the second factor, with a wider uncertainty, because other work on the machine slows some steps
more. No step may have changed by more than the third.
"""
_FORMAT = 21
"""Version of the file; increased if the engine's steps, or their measurements, have changed."""
_PLAIN = Speculation()


Measured = tuple[list[Point], list[float]]
"""Content of the file: measurements, and the rates fitted to them (`StepTimes.rates`)."""
Tell = Callable[[float], None]
"""Callback with the completed share of a measurement."""


def measure(engine: Engine, config: EngineConfig, speculation: Speculation, progress: Progress) -> StepTimes:
    """Return the times of this engine's steps: from the file of an earlier start, or measured
    now.
    """
    window = engine.scheduler.draft_prefill.draft_window
    file = _file(engine, config, speculation, progress)
    stored = _stored_times(engine, file, window)
    if isinstance(stored, StepTimes):
        progress("using the measurements of an earlier start")
        return stored
    progress(f"measuring steps ({stored})")
    points = measure_points(engine, speculation, _say_every(2.0, progress))
    times = StepTimes(points, window, is_eager=engine.recorded.is_eager)
    write_profile(file, msgspec.to_builtins((points, times.rates.tolist())), progress)
    return times


def _say_every(seconds: float, progress: Progress) -> Tell:
    said_s = time.monotonic()

    def tell(share: float) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > seconds and share < 1:
            said_s = time.monotonic()
            progress(f"measuring steps: {int(100 * share)} %")

    return tell


def _file(engine: Engine, config: EngineConfig, speculation: Speculation, progress: Progress) -> Path | None:
    """Return the file for measurements of such an engine on this machine; None if there is none."""
    model = engine.target.model
    runner = engine.draft_runner
    runners = [engine.target] if runner is None else [engine.target, runner]
    described = {
        "target": model.config.to_dict(),
        "draft": runner.model.config.to_dict() if runner is not None else None,
        "engine": [engine.facts.max_model_len, engine.facts.block_size, engine.facts.dtype],
        "model": msgspec.to_builtins(config.model),
        "scheduler": msgspec.to_builtins(config.scheduler),
        "speculation": [msgspec.to_builtins(speculation), config.speculation.draft_window],
        "runs on": [torch.get_num_threads(), str(model.device), _device_name(model.device)],
        "products": [each.backend.remark for each in runners],
        "recorded": engine.recorded.num_recorded,
        "versions": [_FORMAT, torch.__version__, version("transformers")],
    }
    return profile_file(config.profile_cache, described, progress)


def _device_name(device: torch.device) -> str:
    """Return the name of a CUDA device; the file's name already depends on the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _stored_times(engine: Engine, file: Path | None, window: int) -> StepTimes | str:
    """Return the times of an earlier start, scaled to present plain steps; or why the times cannot
    be used.
    """
    if file is None:
        return "--profile-cache keeps nothing"
    if not file.exists():
        return "there are no measurements of this pair, these settings and this machine yet"
    try:
        points, rates = msgspec.convert(read_profile(file), Measured)
    except ValueError:
        return f"{file} cannot be read"
    # Of plain steps with the same number of rows, the shortest text is measured first.
    shortest_s = {work.rows: draft_s + rest_s for work, draft_s, rest_s in reversed(points) if work == work.plain}
    has_rates = len(rates) == NUM_TERMS and all(rate >= 0 for rate in rates)
    has_times = all(rest_s > 0 <= draft_s for _, draft_s, rest_s in points)
    if 1 not in shortest_s or not has_rates or not has_times:
        return f"{file} cannot be read"
    middle = sorted(shortest_s)[len(shortest_s) // 2]
    plans = {rows: synthetic_plan(engine, rows, next(_contexts(engine, rows))) for rows in (1, middle)}
    factors = {rows: usual_s(engine, plan) / shortest_s[rows] for rows, plan in plans.items()}
    shown = ", ".join(
        f"{factor:.2f} times as long with {rows} request{'s'[: rows > 1]}" for rows, factor in factors.items()
    )
    fewest, most = min(factors.values()), max(factors.values())
    if most > _MOST_UNEQUAL * fewest:
        return f"stored measurements do not fit, plain steps changed unequally: {shown}"
    if not 1 / _MOST_CHANGED <= fewest <= most <= _MOST_CHANGED:
        return f"stored measurements do not fit, plain steps changed too much: {shown}"
    times = StepTimes(points, window, rates=rates, is_eager=engine.recorded.is_eager)
    times.scale(sum(factors.values()) / len(factors))
    if most > _SAME * fewest:
        times.widen(most / fewest)
    return times


def measure_points(engine: Engine, speculation: Speculation, tell: Tell = lambda _: None) -> list[Point]:
    """Measure steps of many sizes: plain ones, with prompts, and with the drafts that requests may
    have.
    """
    plans = list(_plans(engine, speculation))
    steps = middle_steps(engine, plans, tell)
    return [
        (StepWork.of(plan), phases_s["draft"], wall_s - phases_s["draft"])
        for plan, (wall_s, phases_s) in zip(plans, steps, strict=True)
    ]


def _plans(engine: Engine, speculation: Speculation) -> Iterator[Plan]:
    """Yield the plans to measure."""
    usual = min(_TEXT, engine.facts.max_model_len // 2)
    yield from _plain_plans(engine)
    yield from _prompt_plans(engine, usual)
    if speculation.uses_text_drafts:
        yield from _text_plans(engine, usual, speculation)
    if speculation.num_drafts:
        yield from _chain_plans(engine, usual, speculation)


def _plain_plans(engine: Engine) -> Iterator[Plan]:
    """Yield plain steps, from the most requests to one.

    The fewest requests come last: after steps of another type, plain steps are slow until caches
    hold their weights.
    """
    largest = engine.scheduler.config.max_num_seqs
    numbers = [number for number in _NUM_ROWS if number < largest] + [largest]
    for num_rows in reversed(numbers):
        contexts = list(_contexts(engine, num_rows))
        texts = contexts[:1]
        if num_rows in _WITH_LONGER_TEXTS:
            texts = [*contexts[:2], contexts[-1]]
        for text in dict.fromkeys(texts):
            yield synthetic_plan(engine, num_rows, text)


def _prompt_plans(engine: Engine, usual: int) -> Iterator[Plan]:
    """Yield steps with a chunk of a prompt after `usual` tokens, and after a long text."""
    on_device = engine.target.device.type != "cpu"
    if on_device:
        chunks = _chunks_on_device(engine, usual)
    else:
        most = min(_room(engine), usual)
        chunks = [chunk for chunk in _PROMPT_CHUNKS if chunk <= most]
    for chunk in chunks:
        yield synthetic_plan(engine, 1, usual, num_prompt=chunk)
    long = max(context for context in _contexts(engine, 2) if context <= _LONG_PROMPT)
    if long > usual:
        long_chunk = _PROMPT_CHUNKS[0]
        if on_device:
            long_chunks = _chunks_on_device(engine, long)
            long_chunk = long_chunks[len(long_chunks) // 2]
        yield synthetic_plan(engine, 1, long, num_prompt=long_chunk)


def _text_plans(engine: Engine, usual: int, speculation: Speculation) -> Iterator[Plan]:
    """Yield steps that verify text drafts alone, after `usual` tokens."""
    most = engine.scheduler.config.max_copied_tokens
    for num_rows in _numbers_of_requests(engine):
        for num_text in _TEXT_NODES if num_rows == 1 else _TEXT_NODES[:1]:
            if num_rows * (1 + num_text) <= _room(engine) and num_text <= most:
                yield synthetic_plan(engine, num_rows, usual, speculation.without_drawn, num_text=num_text)


def _chain_plans(engine: Engine, usual: int, speculation: Speculation) -> Iterator[Plan]:
    """Yield steps that draft chains after `usual` tokens, and after longer texts."""
    most_drafts, most_length = speculation.num_drafts, speculation.draft_length
    length = min(3, most_length)
    shapes = dict.fromkeys([(1, length), (min(4, most_drafts), length)])
    all_shapes = dict.fromkeys([*shapes, (1, 1), (1, most_length), (most_drafts, most_length)])
    for num_rows in _numbers_of_requests(engine):
        for num_drafts, chain_length in all_shapes if num_rows == 1 else shapes:
            if num_rows > 1 and num_rows * (1 + num_drafts * chain_length) > _room(engine):
                continue
            chains = _chains(speculation, num_drafts, chain_length)
            yield synthetic_plan(engine, num_rows, usual, chains)
            longer = min(4 * usual, engine.facts.max_model_len - chain_length - 2)
            if num_rows in (1, 4) and chain_length == length and longer >= 2 * usual:
                yield synthetic_plan(engine, num_rows, longer, chains)
    one_chain = _chains(speculation, 1, length)
    yield synthetic_plan(engine, 1, usual, one_chain, num_read=usual)
    # The draft model's passes without the recording, and little else.
    if engine.recorded.num_recorded:
        yield synthetic_plan(engine, 1, usual, one_chain, num_read=NUM_TEXT + 1)


def _chains(speculation: Speculation, num_drafts: int, draft_length: int) -> Speculation:
    return msgspec.structs.replace(speculation, num_drafts=num_drafts, draft_length=draft_length, tree=())


def _room(engine: Engine) -> int:
    """Return the most drafted tokens of a measured step."""
    return min(_MOST_NODES, engine.scheduler.config.max_num_batched_tokens // 2)


def _numbers_of_requests(engine: Engine) -> Iterable[int]:
    """Return the numbers of requests whose drafting steps are measured."""
    return dict.fromkeys(min(number, engine.scheduler.config.max_num_seqs) for number in (1, 4, 16))


def _chunks_on_device(engine: Engine, context: int) -> list[int]:
    """Return the chunks of a prompt after this many tokens; the longest fits a step in which a
    request decodes.
    """
    config = engine.scheduler.config
    room = engine.facts.max_model_len - context - 1
    most = min(config.max_num_batched_tokens - 1, config.max_prompt_tokens or room, room)
    return sorted({min(chunk, most) for chunk in _DEVICE_CHUNKS})


def _contexts(engine: Engine, num_rows: int) -> Iterator[int]:
    """Return lengths of texts for this many requests that fit the pool; at least one."""
    room = engine.facts.num_blocks * engine.facts.block_size // 2
    longest = min(engine.facts.max_model_len - 2, room)
    fitting = [context for context in _CONTEXTS if context < longest and context * num_rows <= room]
    yield from fitting or [min(_CONTEXTS[0], longest)]


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
    """Return the duration of a step that carries out the plan: the mean of the middle half of
    several.
    """
    return middle_steps(engine, [plan])[0][0]


def middle_steps(
    engine: Engine, plans: Sequence[Plan], tell: Tell = lambda _: None
) -> list[tuple[float, dict[str, float]]]:
    """Return (duration, durations by phase) of each plan's steps: the mean of the middle half of
    them.

    The plans take turns, so other load on the machine affects all of them.
    """
    runs: list[list[tuple[float, dict[str, float]]]] = [[] for _ in plans]
    num_done = 0
    num_turns = _MOST_TURNS * len(plans)
    for _ in range(_MOST_TURNS):
        for plan, plan_runs in zip(plans, runs, strict=True):
            if len(plan_runs) < _LEAST_REPEATS or sum(wall_s for wall_s, _ in plan_runs) < _BUDGET_S:
                plan_runs += _turn(engine, plan, is_first=not plan_runs)
            num_done += 1
            tell(num_done / num_turns)
    return list(map(_middle, runs))


def _turn(engine: Engine, plan: Plan, is_first: bool) -> list[tuple[float, dict[str, float]]]:
    """Run several steps of a plan if they are short, else one; the very first step of a plan is
    discarded.
    """
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
