"""Spans reach a real OTLP collector over HTTP, with the GenAI conventions' names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from server.serving import tracing
from tests.server.daemon_process import MODEL, Daemons

pytestmark = pytest.mark.slow

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes spans."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    """Reads what an exporter posts."""

    server: Collector

    def do_POST(self) -> None:
        # `make test-all` installs it.
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope_spans in resource_spans.scope_spans:
                self.server.spans += scope_spans.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on a free port."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_becomes_a_span(daemons: Daemons, pair_arguments: list[str], collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    daemon = daemons.start(*pair_arguments, "--no-calibrate", "--otlp-traces-endpoint", endpoint)
    daemon.wait_ready()
    call = {"model": MODEL, "messages": [{"role": "user", "content": "hidden words"}], "max_tokens": 9}
    with daemon.client() as client:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "traced"}
        answer = client.post("/v1/chat/completions", json=call | {"temperature": 0.5}, headers=headers).json()
    # What has not been sent yet is sent before the daemon exits.
    daemon.terminate()
    assert daemon.exit_code() == 0
    (span,) = collector.spans
    values = {one.key: one.value for one in span.attributes}
    assert span.name == f"chat {MODEL}"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert values["gen_ai.operation.name"].string_value == "chat"
    assert values["gen_ai.request.temperature"].double_value == 0.5
    assert values["gen_ai.usage.output_tokens"].int_value == answer["usage"]["completion_tokens"]
    assert values["gen_ai.usage.input_tokens"].int_value == answer["usage"]["prompt_tokens"]
    reasons = [one.string_value for one in values["gen_ai.response.finish_reasons"].array_value.values]
    assert reasons == [answer["choices"][0]["finish_reason"]]
    assert values["polydraft.request_id"].string_value == "traced"
    assert span.end_time_unix_nano - span.start_time_unix_nano > 1e6
    assert "hidden" not in str(span)


def test_a_collector_that_never_answers_does_not_hold_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exporter would wait, and repeat the export."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "900")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = tracing.Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", MODEL, 0.2)
        sender._tracer.start_span("one").end()
        closing = threading.Thread(target=sender.close, daemon=True)
        closing.start()
        closing.join(20)  # the exporter gives up after 30 seconds
        assert not closing.is_alive()
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"POST", "nothing has been sent"
