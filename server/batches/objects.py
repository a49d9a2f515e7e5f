"""Objects of `/v1/files` and `/v1/batches`, and lines of output files, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints that lines of a batch may call."""
OPEN = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
"""Statuses of batches that are not over."""
EXPIRED = "batch_expired"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None
    """Always None: files are stored until they are deleted."""


class RequestCounts(msgspec.Struct, frozen=True):
    """Numbers of lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(msgspec.Struct, frozen=True):
    """Reason why a whole batch has failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct, frozen=True):
    """Reasons why a whole batch has failed."""

    data: Sequence[BatchFault]
    object: str = "list"


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix times in seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class LineError(msgspec.Struct, frozen=True):
    """Reason why a line was not sent to its endpoint."""

    code: str
    message: str


class LineResponse(msgspec.Struct, frozen=True):
    """Response of the endpoint to a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct, frozen=True):
    """Line of an output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None


def listed(objects: Sequence[Any], has_more: bool) -> dict[str, Any]:
    """Return a page of a list of objects with ids."""
    first_id = last_id = None
    if objects:
        first_id = objects[0].id
        last_id = objects[-1].id
    return {"object": "list", "data": objects, "first_id": first_id, "last_id": last_id, "has_more": has_more}
