"""Names of clients in the store."""

from __future__ import annotations

import hashlib

from fastapi import Request
from starlette.datastructures import Headers

from server.http.middleware import key_of


class Owners:
    """Names of clients in the store: one for each API key, or a single owner without keys."""

    def __init__(self, has_keys: bool) -> None:
        self._has_keys = has_keys

    def owner_of(self, http: Request) -> str:
        """Return the owner of the objects that a request may see."""
        if not self._has_keys:
            return ""
        key = key_of(Headers(scope=http.scope)).encode("latin-1", "replace")
        return hashlib.blake2b(key, person=b"polydraft-batch", digest_size=16).hexdigest()
