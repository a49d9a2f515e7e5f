"""Serves synthetic requests at start, before the engine is announced. Not for: measuring steps
(`calibration.py`).
"""

from __future__ import annotations

import time

from engine.api import StepResults, encode
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.request_checks import with_fixed_shape
from engine.step.engine import Engine

_REHEARSED_TOKENS, _REHEARSAL_S = 24, 0.25
"""Tokens of a synthetic prompt and of its answer, and the time after which it is ended."""
_PLAIN_TOKENS = 64
"""Tokens of an answer without drafts: more than the steps in which the caches hold other
weights.
"""


def rehearse(engine: Engine, speculation: Speculation) -> None:
    """Serve synthetic requests, one with a seed and one without, and discard their answers.

    The first real request then finds its code and the caches warm. Its speedup is computed from
    times of served steps, which take longer than measured ones; a request without drafts shows how
    long plain ones take. The prefix cache forgets what the engine computed earlier, such as texts
    of the self-check. Blocks, counts and what the controller learns are discarded.
    """
    drafting = with_fixed_shape(speculation, engine.limits, engine.facts.device), speculation
    # Cold steps are not informative for the model of step times.
    for times, served in ((None, drafting), (engine.scheduler.times, (Speculation(), *drafting))):
        rehearsed = _engine_around(engine, times)
        for number, wanted in enumerate(served):
            began = time.perf_counter()
            rehearsed.submit(_rehearsal(str(number), wanted, engine.facts.max_model_len // 4))
            while rehearsed.scheduler.has_work and time.perf_counter() - began < _REHEARSAL_S:
                result = rehearsed.run_step()
                encode(StepResults(result.outcomes, result.stats))
            rehearsed.abort(str(number))
    engine.scheduler.tables.forget_all()  # the answers were written over them


def _engine_around(engine: Engine, times: StepTimes | None) -> Engine:
    """Return another engine of the same models."""
    scheduler = engine.scheduler.portion()
    scheduler.times = times
    if times is not None and engine.scheduler.controller is not None:
        scheduler.controller = Controller(times, engine.limits.max_draft_length)
    return engine.with_scheduler(scheduler)


def _rehearsal(request_id: str, speculation: Speculation, most_tokens: int) -> Request:
    num_prompt = min(_REHEARSED_TOKENS, most_tokens)
    num_tokens = num_prompt if speculation.num_drafts else min(_PLAIN_TOKENS, 2 * most_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=(0,) * num_prompt,
        sampling=Sampling(seed=0),
        limits=Limits(max_tokens=num_tokens, ignore_eos=True),
        speculation=speculation,
    )
