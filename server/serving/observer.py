"""What the daemon tells of a generation when it begins and when it ends: metrics, live page, log line, trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from engine.api import Outcome, StepStats, log_fields
from server.http.calls import Call
from server.serving.live import Live
from server.serving.metrics import ServerMetrics
from server.serving.tracing import Tracing

if TYPE_CHECKING:
    from server.serving.generation import Generation

log = logging.getLogger("polydraft")


class Observer:
    """Sees every generation once at its begin and once at its end, however it ends."""

    def __init__(self, metrics: ServerMetrics, logs_requests: bool, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self.live = Live()
        self._logs_requests = logs_requests
        self._tracing = tracing

    def begin(self, generation: Generation, call: Call) -> None:
        """A generation has been admitted."""
        call.is_generation = True
        prompts = generation.choices[:: generation.num_choices]
        self.metrics.start([len(choice.request.prompt_token_ids) for choice in prompts])
        self.live.begin(generation)

    def take(self, outcome: Outcome, stats: StepStats) -> None:
        """An answer has taken a step's tokens; outcome: what it took of them."""
        self.metrics.take(outcome)
        self.live.take(outcome, stats)

    def end(self, generation: Generation, call: Call, early_end: str) -> None:
        """A generation is over; early_end: the reason of choices that have none: `abort` or `error`."""
        self.live.end(generation)
        reasons = [choice.finish_reason or early_end for choice in generation.choices]
        self.metrics.abort(sum(choice.finish_reason is None for choice in generation.choices), early_end)
        if self._logs_requests or self._tracing:
            facts = facts_of(generation, reasons)
            if self._logs_requests:
                log.info("request", extra=log_fields(id=call.request_id, path=call.path, **facts))
            if self._tracing:
                self._tracing.record(generation, call, facts)

    def close(self) -> None:
        """Send what is still to be sent."""
        if self._tracing:
            self._tracing.close()


def facts_of(generation: Generation, reasons: list[str]) -> dict[str, Any]:
    """What may be told of a generation: counts, times and settings, never text."""
    metrics = generation.clock.report(generation.speculation().report())
    counted = metrics.speculative_decoding
    return {
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "answer_tokens": generation.num_answer_tokens,
        "finish_reason": ",".join(reasons),
        "queue_ms": metrics.queue_time_ms,
        "ttft_ms": metrics.time_to_first_token_ms,
        "total_ms": metrics.generation_time_ms,
        "acceptance_length": counted.mean_acceptance_length if counted else None,
        "speedup": counted.speedup if counted else None,
        "rule": counted.rule if counted else "off",
    }
