"""Lines of batches, and reading of output files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import openai
from openai.types import Batch

from tests.server.daemon_process import MODEL, wait_until

COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: Any, body: dict[str, Any], url: str = COMPLETIONS, method: str = "POST") -> str:
    """A line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {"model": MODEL, **body}})


def short_lines(count: int, max_tokens: int = 2) -> list[str]:
    """Lines with short answers; custom ids c-0, c-1, ..."""
    return [line(f"c-{number}", {"prompt": f"word {number}", "max_tokens": max_tokens}) for number in range(count)]


def begin(client: openai.OpenAI, lines: Iterable[str], endpoint: Any = COMPLETIONS, **more: Any) -> Batch:
    """Upload lines and begin their batch."""
    content = "\n".join(lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait_for(client: openai.OpenAI, batch: Batch, condition: Callable[[Batch], object]) -> Batch:
    """Poll a batch until a condition holds."""

    def look() -> Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if condition(now) else None

    found_batch = wait_until(look, f"batch {batch.id}")
    assert found_batch is not None
    return found_batch


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Poll a batch until it is over."""
    return wait_for(client, batch, lambda now: now.status in ENDED)


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output file; none without a file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
