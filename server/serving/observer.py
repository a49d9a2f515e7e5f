"""Reports every generation at its begin and at its end: metrics, live page, log line, trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import Outcome, StepStats, log_fields
from server.serving.live import Live
from server.serving.metrics import ServerMetrics
from server.serving.statistics import GenerationState
from server.serving.tracing import Tracing
from server.wire.answers import SpeculativeDecoding
from server.wire.current_call import HttpCall

log = logging.getLogger("polydraft")

ReadState = Callable[[], GenerationState]


class Observer:
    """Sees every generation once at its begin and once at its end, however it ends."""

    def __init__(self, metrics: ServerMetrics, logs_requests: bool, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self.live = Live()
        self._logs_requests = logs_requests
        self._tracing = tracing

    def begin(self, call: HttpCall, num_prompt_tokens: Sequence[int], read_state: ReadState) -> None:
        """Note that a generation has been admitted; num_prompt_tokens: of each prompt."""
        call.is_generation = True
        self.metrics.start(num_prompt_tokens)
        self.live.begin(call, read_state)

    def take(self, outcome: Outcome, stats: StepStats) -> None:
        """Count the part of a step's outcome that an answer has taken."""
        self.metrics.take(outcome)
        self.live.take(outcome, stats)

    def end(self, call: HttpCall, read_state: ReadState, early_end: str) -> None:
        """Report an ended generation.

        Early_end: `abort` or `error`, for choices without a reason.
        """
        self.live.end(call)
        state = read_state()
        self.metrics.abort(state.reasons.count(None), early_end)
        if not self._logs_requests and self._tracing is None:
            return
        facts = facts_of(state, early_end)
        if self._logs_requests:
            log.info("request", extra=log_fields(id=call.request_id, path=call.path, **facts))
        if self._tracing is not None:
            self._tracing.record(state, call, facts)

    def close(self) -> None:
        """Send the traces that have not been sent yet."""
        if self._tracing is not None:
            self._tracing.close()


def facts_of(state: GenerationState, early_end: str) -> dict[str, Any]:
    """Return what logs and traces may hold of a generation: counts and times, never text."""
    metrics = state.clock.report(state.speculation)
    reasons = [reason or early_end for reason in state.reasons]
    return {
        "prompt_tokens": state.num_prompt_tokens,
        "cached_tokens": state.num_cached_tokens,
        "answer_tokens": state.num_answer_tokens,
        "finish_reason": ",".join(reasons),
        "queue_ms": metrics.queue_time_ms,
        "ttft_ms": metrics.time_to_first_token_ms,
        "total_ms": metrics.generation_time_ms,
        **_speculation_facts(metrics.speculative_decoding),
    }


def _speculation_facts(counted: SpeculativeDecoding | None) -> dict[str, Any]:
    if counted is None:
        return {"tokens_per_pass": None, "acceptance_length": None, "speedup": None, "rule": "off"}
    return {
        "tokens_per_pass": counted.tokens_per_pass,
        "acceptance_length": counted.mean_acceptance_length,
        "speedup": counted.speedup,
        "rule": counted.rule,
    }
