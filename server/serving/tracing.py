"""Sends one OpenTelemetry span per generation, with the GenAI conventions' names, over OTLP (HTTP).

Needs the extra `otel`. Spans have counts, times and settings, never text.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from engine.api import ConfigError
from server.serving.statistics import GenerationState
from server.version import VERSION
from server.wire.current_call import HttpCall

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
}
# The attribute of each fact of `observer.facts_of`; the conventions have no names for facts about
# speculation.
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "answer_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "queue_ms": "polydraft.queue_ms",
    "ttft_ms": "polydraft.time_to_first_token_ms",
    "tokens_per_pass": "polydraft.tokens_per_pass",
    "acceptance_length": "polydraft.acceptance_length",
    "speedup": "polydraft.speedup",
    "rule": "polydraft.rule",
}


class Tracing:
    """Sends spans in the background; a collector that does not answer delays no request."""

    def __init__(self, endpoint: str, model: str, most_closing_s: float = 2.0) -> None:
        """endpoint: the collector's address for traces, such as http://localhost:4318/v1/traces.

        most_closing_s: time to send the remaining spans when it closes.
        """
        self._most_closing_s = most_closing_s
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'polydraft[otel]'") from error
        resource = Resource.create({"service.name": "polydraft", "service.version": VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("polydraft", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._model = model

    def record(self, state: GenerationState, call: HttpCall, facts: dict[str, Any]) -> None:
        """Send an ended generation's span, a child of the client's span if there is one."""
        # The path may have a proxy's prefix.
        operation = next((name for path, name in _OPERATIONS.items() if call.path.endswith(path)), "chat")
        parent = None
        if call.trace_parent:
            parent = self._propagator.extract({"traceparent": call.trace_parent})
        end_ns = time.time_ns()
        duration_s = time.perf_counter() - state.clock.started
        started_ns = end_ns - int(1e9 * duration_s)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "polydraft",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.temperature": state.temperature,
            "gen_ai.request.top_p": state.top_p,
            "gen_ai.request.max_tokens": state.max_tokens,
            "gen_ai.request.choice.count": state.num_choices,
            "gen_ai.response.finish_reasons": facts["finish_reason"].split(","),
            "polydraft.request_id": call.request_id,
        }
        for fact, name in _ATTRIBUTES.items():
            if facts[fact] is not None:
                attributes[name] = facts[fact]
        span = self._tracer.start_span(
            f"{operation} {self._model}", parent, self._kind, attributes, start_time=started_ns
        )
        span.end(end_ns)

    def close(self) -> None:
        """Send the remaining spans, for a limited time."""
        # The provider's time limits do not stop an export that is being retried.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(self._most_closing_s)
