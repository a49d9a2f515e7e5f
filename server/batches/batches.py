"""Batches of a daemon that has a folder for them: their store, and the task that runs them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

from fastapi import Request
from starlette.datastructures import Headers

from server.batches.database import Database
from server.batches.endpoint import LineEndpoint, shape_of_lines
from server.batches.kept_responses import KeptResponses
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore, StoreLimits
from server.http.middleware import key_of
from server.state import Server

log = logging.getLogger("polydraft")


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


class Batches:
    """Store and runner of a daemon's batches."""

    def __init__(self, store: BatchStore, runner: BatchRunner, owners: Owners, responses: KeptResponses | None) -> None:
        """responses: None if none are kept."""
        self.store = store
        self.runner = runner
        self.owners = owners
        self.responses = responses
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the batches that are open, and new ones."""
        self._running = asyncio.create_task(self.runner.run())
        self._running.add_done_callback(_report)

    async def stop(self) -> None:
        """Abort the running lines, which run again after the next start; routes read on."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def close(self) -> None:
        """Close the database."""
        self.store.database.close()


def open_batches(server: Server) -> Batches | None:
    """Open the store of `--batch-folder`; None without the flag. Raises ConfigError."""
    settings = server.settings
    if not settings.batch_folder:
        return None
    limits = StoreLimits(file_bytes=settings.batch_max_file_bytes)
    database = Database(Path(settings.batch_folder).expanduser())
    store = BatchStore(database, limits)
    num_seats = settings.max_num_seqs
    at_once = settings.batch_max_num_seqs or max(1, num_seats * 3 // 4)
    at_once = min(at_once, num_seats)
    shape = shape_of_lines(server.client.config.speculation, at_once)
    runner = BatchRunner(store, LineEndpoint(server), server.client, at_once, shape)
    server.metrics.watch_batches(lambda: store.num_lines_left)
    owners = Owners(bool(settings.api_key))
    responses = None
    if settings.response_store_bytes:
        responses = KeptResponses(database, owners.owner_of, settings.response_store_bytes, settings.max_request_bytes)
    return Batches(store, runner, owners, responses)


def _report(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("batches do not run any more; restart the daemon", exc_info=error)
