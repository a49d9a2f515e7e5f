"""Table of errors: status, type, code, retry-after, reason for the metrics, Anthropic's type."""

from __future__ import annotations

import errno

import pytest

from engine.api import GRAMMAR_UNAVAILABLE, SERVER_FAULTS, DeadlineExceeded, EngineBusy, EngineStopped, RequestError
from server.wire.errors import anthropic_error, model_not_found, to_api_error

UNAVAILABLE = (503, "service_unavailable")
TABLE = [
    (RequestError("no", "stop"), (400, "invalid_request_error"), None, None, None, "invalid_request_error"),
    (model_not_found("a", "b"), (404, "invalid_request_error"), "model_not_found", None, None, "not_found_error"),
    (RequestError("no", "a", GRAMMAR_UNAVAILABLE), UNAVAILABLE, GRAMMAR_UNAVAILABLE, "1", None, "overloaded_error"),
    *[
        (RequestError("no", None, code), (500, "server_error"), code, None, None, "api_error")
        for code in sorted(SERVER_FAULTS)
        if code != GRAMMAR_UNAVAILABLE
    ],
    (EngineBusy("full"), (429, "rate_limit_error"), "queue_full", "1", "queue_full", "rate_limit_error"),
    (MemoryError(), UNAVAILABLE, "out_of_memory", "5", None, "overloaded_error"),
    (OSError(errno.ENOSPC, "full"), (507, "server_error"), "storage_unavailable", "30", None, "api_error"),
    (DeadlineExceeded("late"), (504, "server_error"), "deadline_exceeded", None, None, "timeout_error"),
    (EngineStopped("gone"), UNAVAILABLE, "engine_unavailable", "5", None, "overloaded_error"),
    (EngineStopped("soon", "loading"), UNAVAILABLE, "engine_unavailable", "5", "loading", "overloaded_error"),
    (OSError(errno.EPIPE, "broken"), (500, "server_error"), None, None, None, "api_error"),
]


@pytest.mark.parametrize(("error", "answer", "code", "retry_after", "rejection", "anthropic"), TABLE, ids=repr)
def test_each_error_has_its_status_and_codes(
    error: Exception,
    answer: tuple[int, str],
    code: str | None,
    retry_after: str | None,
    rejection: str | None,
    anthropic: str,
) -> None:
    made = to_api_error(error)
    assert (made.status, made.body.type) == answer
    assert (made.body.code, made.headers.get("retry-after"), made.rejection) == (code, retry_after, rejection)
    assert anthropic_error(made) == {"type": "error", "error": {"type": anthropic, "message": made.body.message}}
