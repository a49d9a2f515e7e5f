"""Plain steps of an idle engine, on synthetic texts: how long plain decoding takes now.

Requests of a fixed shape have no plain steps. If they alone run, answers would report a speedup
over plain steps that ran long ago, or none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.control.arms import COLD_STEPS, LEAST_BLOCK_STEPS, LONGEST_GAP_S, MOST_BLOCK_STEPS, Bucket
from engine.control.step_time import StepTimes
from engine.control.step_work import NO_DRAFTS
from engine.request import Limits, Request, Sampling
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.step.engine import Engine

_MOST_STEPS = 2 + COLD_STEPS + MOST_BLOCK_STEPS
_LONGEST_TEXT = 1024
_PAUSE_S, _ENOUGH = (0.5, 10.0), 0.05
"""Seconds between blocks of plain steps, before and after their time is known to this accuracy."""
_MOST_S = 0.05
"""Seconds of plain steps between two looks at waiting messages."""


def lacking_plain(times: StepTimes, now_s: float) -> Bucket | None:
    """Return the bucket in which plain steps should be measured; None if no drafts came since."""
    bucket = times.drafting
    if bucket is None or bucket.num_in_block < LEAST_BLOCK_STEPS or not bucket.current:
        return None
    pause_s = _PAUSE_S[bucket.variances(bucket.current, now_s)[NO_DRAFTS] < _ENOUGH**2]
    has_ended = now_s - bucket.arms[bucket.current].ended_s > LONGEST_GAP_S
    return None if has_ended or now_s - bucket.idle_s < pause_s else bucket


class _TextsInPlace(Scheduler):
    """A scheduler for which all texts seem to be computed."""

    def _take_cached(self, sequence: Sequence) -> None:
        sequence.num_target_computed = len(sequence.tokens) - 1


@dataclass
class _Block:
    """A block of plain steps that has begun."""

    engine: Engine
    times: StepTimes
    bucket: Bucket
    block_ids: list[int]


class IdleSteps:
    """Plain steps that an engine takes while it is idle, on blocks that it borrows meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block: _Block | None = None

    @property
    def are_due(self) -> bool:
        """Whether there is a plain step to measure."""
        return self._block is not None or self._due() is not None

    def take(self) -> None:
        """Measure some plain steps if they are due; a block of steps may take several calls."""
        if self._block is None:
            self._begin()
        began = time.perf_counter()
        while self._block is not None:
            self._step(self._block)
            bucket = self._block.bucket
            is_measured = not bucket.current and bucket.num_in_block >= bucket.num_compared
            if is_measured or not self._block.engine.scheduler.has_work:
                self.end()
            if time.perf_counter() - began > _MOST_S:
                break

    def end(self) -> None:
        """Return the borrowed blocks. Must be called before the engine's next step."""
        if self._block is not None:
            self._engine.scheduler.tables.target.release(self._block.block_ids)
            self._block = None

    def _due(self) -> tuple[StepTimes, Bucket] | None:
        scheduler = self._engine.scheduler
        if scheduler.times is None or scheduler.has_work:
            return None
        bucket = lacking_plain(scheduler.times, time.perf_counter())
        return None if bucket is None else (scheduler.times, bucket)

    def _begin(self) -> None:
        due = self._due()
        if due is None:
            return
        times, bucket = due
        bucket.idle_s = time.perf_counter()
        engine = self._engine
        scheduler = engine.scheduler
        rows = min(round(bucket.rows), scheduler.config.max_num_seqs)
        num_text = min(round(bucket.text), _LONGEST_TEXT, engine.facts.max_model_len - _MOST_STEPS)
        store = scheduler.tables.target
        num_blocks = rows * -(-(num_text + _MOST_STEPS) // scheduler.block_size)
        # Cached texts are worth more than a measurement.
        if num_text < 1 or num_blocks > store.num_empty:
            return
        block_ids = store.allocate(num_blocks)
        borrowed = store.with_blocks(block_ids)
        texts = _TextsInPlace(scheduler.config, borrowed, frozenset())
        self._block = _Block(engine.with_scheduler(texts), times, bucket, block_ids)
        for number in range(rows):
            request = Request(
                request_id=str(number),
                prompt_token_ids=(0,) * num_text,
                sampling=Sampling(seed=number),
                limits=Limits(max_tokens=_MOST_STEPS, ignore_eos=True),
            )
            self._block.engine.submit(request)

    def _step(self, block: _Block) -> None:
        measured = block.engine.run_step().measured
        if measured.between_s is not None:
            step_s = measured.stats.wall_s - measured.between_s
            block.times.observe_idle(block.bucket, step_s, measured.ended_s)
