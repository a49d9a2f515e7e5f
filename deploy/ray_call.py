"""One HTTP request between the front and a replica, and which requests should meet in one replica."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

_PREFIX_CHARACTERS = 4000


@dataclass(frozen=True)
class Call:
    """One HTTP request on its way to a replica."""

    method: str
    target: str
    """Path and query, as they were sent."""
    headers: list[tuple[str, str]]
    body: bytes
    prefix: str = field(default="")
    """Requests of the same one should meet in the same replica's prefix cache; empty: any replica."""
    replica: str = ""
    """The replica it is for; empty: any."""


def prefix_of(body: bytes) -> str:
    """What requests have in common that gain by sharing a cache: `prompt_cache_key`, else how the prompt begins.

    Of a conversation everything up to the first user's message, so that later turns find the earlier ones' replica.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
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
    """Text of any kind in plain letters: half a pair of surrogates could not be encoded by whoever comes next."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
