"""Serves synthetic requests before the engine is announced.

Not for: measuring single steps (`measuring.py`).
"""

from __future__ import annotations

import time

from engine.api import StepResults, encode
from engine.control.step_time import StepTimes
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.request_checks import with_fixed_shape
from engine.step.engine import Engine

_NUM_PROMPT, _WARM_TOKENS, _NUM_TOKENS = 24, 24, 96
"""Tokens of a synthetic prompt, of first answers, and of measured ones."""
_NUM_TURNS, _MOST_S = 3, 1.0
"""Turns of measured answers, and seconds after which none begins."""
_ANSWER_S = 0.25
"""Seconds after which an answer is ended."""


def rehearse(engine: Engine, speculation: Speculation) -> None:
    """Serve synthetic requests, with drafts and without, and discard their answers.

    The first real request then finds its code and the caches warm. Plain answers take turns with
    the drafts of requests with a seed, so that the first answers can report a speedup. The prefix
    cache forgets what the engine computed earlier, such as texts of the self-check. Blocks, counts
    and what the controller learns are discarded.
    """
    fixed = with_fixed_shape(speculation, engine.limits, engine.facts.device)
    _serve(engine, None, [fixed, speculation], _WARM_TOKENS, time.perf_counter() + 3 * _ANSWER_S)
    times = engine.scheduler.times
    if times is not None and fixed.num_drafts:
        _serve(engine, times, [Speculation(), fixed] * _NUM_TURNS, _NUM_TOKENS, time.perf_counter() + _MOST_S)
    engine.scheduler.tables.forget_all()  # the answers were written over them


def _serve(engine: Engine, times: StepTimes | None, served: list[Speculation], num_tokens: int, ends_s: float) -> None:
    """Serve one request after the other until this time."""
    scheduler = engine.scheduler.portion()
    scheduler.times = times
    rehearsed = engine.with_scheduler(scheduler)
    most_tokens = max(1, engine.facts.max_model_len // 4)
    for number, speculation in enumerate(served):
        began = time.perf_counter()
        if began > ends_s:
            return
        request = Request(
            request_id=str(number),
            prompt_token_ids=(0,) * min(_NUM_PROMPT, most_tokens),
            sampling=Sampling(seed=number),
            limits=Limits(max_tokens=min(num_tokens, 2 * most_tokens), ignore_eos=True),
            speculation=speculation,
        )
        rehearsed.submit(request)
        while rehearsed.scheduler.has_work and time.perf_counter() - began < _ANSWER_S:
            result = rehearsed.run_step()
            encode(StepResults(result.outcomes, result.stats))
        rehearsed.abort(request.request_id)
