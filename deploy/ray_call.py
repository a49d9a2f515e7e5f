"""An HTTP request between the front and a replica, and the prefix that selects the replica."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

IDEMPOTENCY_KEY = "idempotency-key"
_PREFIX_CHARACTERS = 4000


@dataclass(frozen=True)
class ReplicaCall:
    """HTTP request for a replica."""

    method: str
    target: str
    """Raw path and query."""
    headers: list[tuple[str, str]]
    body: bytes
    prefix: str = field(default="")
    """Key of the prefix: requests with the same one share a replica's prefix cache; empty for any
    replica.
    """
    replica: str = ""
    """Name of the replica; empty for any."""


def repeatable(headers: list[tuple[str, str]], body: bytes) -> list[tuple[str, str]]:
    """Return the headers of a request with a key by which each replica draws the same answer.

    Otherwise other answers would replace those that a dying replica leaves, which are long in the
    mean. A stream is never sent to another replica once it has tokens.
    """
    if _is_stream(body) or any(name == IDEMPOTENCY_KEY for name, _ in headers):
        return headers
    return [*headers, (IDEMPOTENCY_KEY, uuid4().hex)]


def _is_stream(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and bool(fields.get("stream"))


def prefix_of(body: bytes) -> str:
    """Return the key of requests that should share a cache.

    It is `prompt_cache_key`, or the beginning of the prompt.

    For a conversation it covers everything up to the first user message, so that later turns reach
    the same replica.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the replica reports the error
        return ""
    if not isinstance(fields, dict):
        return ""
    if key := fields.get("prompt_cache_key"):
        return _digest(str(key))
    begin: list[Any] = [fields.get("system"), fields.get("instructions")]
    messages = fields.get("messages", fields.get("input", fields.get("prompt", "")))
    for message in messages if isinstance(messages, list) else [messages]:
        begin.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            break
    return _digest(json.dumps(begin)[:_PREFIX_CHARACTERS])


def _digest(text: str) -> str:
    """Return text in ASCII, because half a surrogate pair cannot be encoded later."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
