"""The database and the folder of a daemon's files, batches and kept responses.

All methods but `do` and `close`, and all methods of `StoredFiles` and `BatchStore`, run in the
database's own thread: `await database.do(store.get_batch, owner, batch_id)`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, ParamSpec, TypeVar

import msgspec

from engine.api import ConfigError, RequestError
from server.batches.objects import BatchObject, FileObject
from server.wire.errors import ApiError, ErrorBody, StorageFault

log = logging.getLogger("polydraft.batches")

P = ParamSpec("P")
Result = TypeVar("Result")
Stored = TypeVar("Stored", FileObject, BatchObject)

_DATABASE = "batches.sqlite3"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    document BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    is_open INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    document BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    start INTEGER NOT NULL,
    size INTEGER NOT NULL,
    id TEXT NOT NULL,
    custom_id TEXT,
    is_error INTEGER,
    answer BLOB,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shapes (
    batch TEXT PRIMARY KEY,
    num_drafts INTEGER NOT NULL,
    draft_length INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    previous TEXT,
    created_at INTEGER NOT NULL,
    size INTEGER NOT NULL,
    document BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_of ON responses (owner, seq, size);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_at);
CREATE TABLE IF NOT EXISTS response_items (
    response TEXT NOT NULL,
    number INTEGER NOT NULL,
    is_output INTEGER NOT NULL,
    id TEXT NOT NULL,
    document BLOB NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_id ON response_items (id);
"""


@dataclass(frozen=True)
class ListPage:
    """Page of a client's list. An owner is an opaque name of a client."""

    table: Literal["files", "batches"]
    owner: str
    after: str | None
    limit: int
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None
    """Purpose of the listed files; None for all."""


class Database:
    """SQLite database in a folder that one daemon uses."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the database; raise ConfigError if another daemon uses it.

        Also if the folder cannot be used. clock: returns the Unix time.
        """
        self.clock = clock
        self.files_folder = folder / "files"
        """Folder with the contents of stored files."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.files_folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = (folder / "lock").open("wb")
            _lock(self._lock, folder)
            self._connection = sqlite3.connect(folder / _DATABASE, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--batch-folder {folder}: cannot be used ({error})") from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    async def do(self, method: Callable[P, Result], *operands: P.args, **named: P.kwargs) -> Result:
        """Run a method in the database's thread. Raises StorageFault if the disk is full."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: method(*operands, **named))
        except (OSError, sqlite3.OperationalError) as error:
            log.warning("the folder of --batch-folder cannot be used (%s); see whether its disk is full", error)
            raise StorageFault(error) from error

    def close(self) -> None:
        """Wait for the running method, and close the database."""
        self._thread.shutdown(cancel_futures=True)
        self._connection.close()
        self._lock.close()

    def execute(self, query: str, operands: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self._connection.execute(query, operands)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block changes, durably, or nothing of it if the block raises."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself if the disk is full.
            if self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise

    def now(self) -> int:
        """Return the Unix time in seconds."""
        return int(self.clock())

    def objects_of(self, page: ListPage, kind: type[Stored]) -> tuple[Sequence[Stored], bool]:
        """Return (a page's objects, whether more follow); raise for an unknown `after`."""
        condition = "owner = ?"
        operands: list[str | int] = [page.owner]
        if page.purpose is not None:
            condition += " AND purpose = ?"
            operands.append(page.purpose)
        if page.after is not None:
            query = f"SELECT seq FROM {page.table} WHERE id = ? AND owner = ?"
            row = self.execute(query, (page.after, page.owner)).fetchone()
            if row is None:
                raise RequestError(f"after: {page.after!r} is not in the list", "after")
            condition += f" AND seq {'>' if page.order == 'asc' else '<'} ?"
            operands.append(row[0])
        query = f"SELECT document FROM {page.table} WHERE {condition} ORDER BY seq {page.order} LIMIT ?"
        rows = self.execute(query, (*operands, page.limit + 1)).fetchall()
        objects = [msgspec.json.decode(row[0], type=kind) for row in rows[: page.limit]]
        return objects, len(rows) > page.limit


def not_found(kind: str, name: str) -> ApiError:
    """Return the error for an id that a client has no object of."""
    message = f"No {kind} has the id {json.dumps(name)} here"
    return ApiError(404, ErrorBody(message, "invalid_request_error", f"{kind}_id", f"{kind}_not_found"))


def _lock(file: BinaryIO, folder: Path) -> None:
    """Lock the folder for this process. Raises ConfigError if another process has done so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"--batch-folder {folder}: another daemon uses it; choose another folder") from error
