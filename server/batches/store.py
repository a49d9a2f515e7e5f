"""Files and batches in a folder: an SQLite database, and one file for each stored file.

The answer of a line, and the counts of its batch, are one durable transaction. Output files are
written from the database when a batch ends, so that each line is in them exactly once whenever the
daemon was killed.

All methods but `do` and `close` run in the store's own thread: `await store.do(store.get_file,
owner, file_id)`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, ParamSpec, TypeVar

import msgspec

from engine.api import ConfigError, RequestError
from server.batches.lines import InputLine, read_lines
from server.batches.objects import (
    EXPIRED,
    OPEN,
    BatchFault,
    BatchFaults,
    BatchObject,
    FileObject,
    LineError,
    OutputLine,
    RequestCounts,
)
from server.wire.errors import ApiError, ErrorBody
from server.wire.ids import new_id

P = ParamSpec("P")
Result = TypeVar("Result")
Stored = TypeVar("Stored", FileObject, BatchObject)

WINDOWS_S = {"24h": 24 * 3600}
"""Values of `completion_window`, in seconds."""
_DATABASE = "batches.sqlite3"
_EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."
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
"""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of what is stored."""

    file_bytes: int = 200 << 20
    lines: int = 50_000
    """Lines of a batch."""
    files: int = 1000
    """Files, with output files, of one client."""
    open_batches: int = 100


@dataclass(frozen=True)
class NewBatch:
    """Fields of a batch that a client chooses."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchStore:
    """Files and batches of a daemon. An owner is an opaque name of a client; clients see their own
    objects only.
    """

    def __init__(self, folder: Path, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open or create the store. Raises ConfigError if the folder cannot be used, or if another
        daemon uses it.

        clock: returns the Unix time.
        """
        self.limits = limits or StoreLimits()
        self.clock = clock
        self.num_lines_left = 0
        """Lines of open batches that have no answer yet."""
        self._folder = folder
        self._files = folder / "files"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            self._lock = (folder / "lock").open("wb")
            _lock(self._lock, folder)
            self._database = sqlite3.connect(folder / _DATABASE, isolation_level=None, check_same_thread=False)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--batch-folder {folder}: cannot be used ({error})") from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    def _prepare(self) -> None:
        """Set up the database, and remove files that a killed daemon has left half written."""
        database = self._database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(_TABLES)
        known = {row[0] for row in database.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()
        query = "SELECT count(*) FROM lines WHERE answer IS NULL"
        self.num_lines_left = database.execute(query).fetchone()[0]

    async def do(self, method: Callable[P, Result], *operands: P.args, **named: P.kwargs) -> Result:
        """Run one of the other methods in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: method(*operands, **named))

    def close(self) -> None:
        """Wait for the running method, and close the database."""
        self._thread.shutdown(cancel_futures=True)
        self._database.close()
        self._lock.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block changes, durably, or nothing of it if the block raises."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _now(self) -> int:
        return int(self.clock())

    # Files

    def add_file(self, owner: str, filename: str, source: BinaryIO) -> FileObject:
        """Store a file for batches. Raises RequestError for an empty one, or if the client has too
        many.
        """
        query = "SELECT count(*) FROM files WHERE owner = ?"
        num_files = self._database.execute(query, (owner,)).fetchone()[0]
        if num_files >= self.limits.files:
            raise RequestError(
                f"{num_files} files are stored, the most is {self.limits.files}; delete files that are not needed",
                "file",
                "too_many_files",
            )
        file_id = _file_id()
        with self._written(file_id) as target:
            shutil.copyfileobj(source, target, 1 << 20)
            size = target.tell()
            if not size:
                raise RequestError("the file is empty", "file", "empty_file")
        stored = self._file_object(file_id, size, filename, "batch")
        with self._transaction():
            self._insert_file(owner, stored)
        return stored

    def _file_object(self, file_id: str, size: int, filename: str, purpose: str) -> FileObject:
        return FileObject(id=file_id, bytes=size, created_at=self._now(), filename=filename, purpose=purpose)

    def _insert_file(self, owner: str, stored: FileObject) -> None:
        self._database.execute(
            "INSERT INTO files (id, owner, purpose, document) VALUES (?, ?, ?, ?)",
            (stored.id, owner, stored.purpose, msgspec.json.encode(stored)),
        )

    @contextmanager
    def _written(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; it has its name, durably, after the block, and is gone if
        the block raises.
        """
        path = self._files / f"{file_id}.new"
        try:
            with open(path, "wb", opener=_private) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            path.rename(self._files / file_id)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _sync_folder(self._files)

    def get_file(self, owner: str, file_id: str) -> FileObject:
        """Return a file; raises a 404."""
        query = "SELECT document FROM files WHERE id = ? AND owner = ?"
        row = self._database.execute(query, (file_id, owner)).fetchone()
        if row is None:
            raise _not_found("file", file_id)
        return msgspec.json.decode(row[0], type=FileObject)

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file_id

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises RequestError while an open batch reads it."""
        self.get_file(owner, file_id)
        query = "SELECT id FROM batches WHERE is_open = 1 AND input_file_id = ?"
        reader = self._database.execute(query, (file_id,)).fetchone()
        if reader is not None:
            message = f"{file_id} is the input of {reader[0]}, which is not over; cancel the batch first"
            raise RequestError(message, "file_id", "file_in_use")
        with self._transaction() as database:
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    def list_files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[Sequence[FileObject], bool]:
        """Return a page of a client's files, and whether more follow."""
        page = _ListPage("files", after, limit, order)
        if purpose is None:
            return self._page(page, FileObject, "owner = ?", owner)
        return self._page(page, FileObject, "owner = ? AND purpose = ?", owner, purpose)

    def _page(self, page: _ListPage, kind: type[Stored], condition: str, *values: str) -> tuple[Sequence[Stored], bool]:
        """Return the objects of a page, and whether more follow. Raises RequestError for an unknown
        `after`.
        """
        operands: list[str | int] = list(values)
        if page.after is not None:
            query = f"SELECT seq FROM {page.table} WHERE id = ? AND owner = ?"
            row = self._database.execute(query, (page.after, values[0])).fetchone()
            if row is None:
                raise RequestError(f"after: {page.after!r} is not in the list", "after")
            condition += f" AND seq {'>' if page.order == 'asc' else '<'} ?"
            operands.append(row[0])
        query = f"SELECT document FROM {page.table} WHERE {condition} ORDER BY seq {page.order} LIMIT ?"
        rows = self._database.execute(query, (*operands, page.limit + 1)).fetchall()
        objects = [msgspec.json.decode(row[0], type=kind) for row in rows[: page.limit]]
        return objects, len(rows) > page.limit

    # Batches

    def add_batch(self, owner: str, wanted: NewBatch) -> BatchObject:
        """Store a new batch. Raises RequestError if its file does not exist, or if too many batches
        are open.
        """
        try:
            purpose = self.get_file(owner, wanted.input_file_id).purpose
        except ApiError as error:
            raise RequestError(f"input_file_id: {error.body.message}", "input_file_id", "file_not_found") from error
        if purpose != "batch":
            message = f"input_file_id: the purpose of {wanted.input_file_id} is {purpose}, not batch"
            raise RequestError(message, "input_file_id")
        num_open = len(self.open_batches())
        if num_open >= self.limits.open_batches:
            message = f"{num_open} batches are open, the most is {self.limits.open_batches}; wait until one has ended"
            raise RequestError(message, code="too_many_batches")
        now = self._now()
        batch = BatchObject(
            id=f"batch_{new_id()}",
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            created_at=now,
            expires_at=now + WINDOWS_S[wanted.completion_window],
            metadata=wanted.metadata,
        )
        with self._transaction() as database:
            database.execute(
                "INSERT INTO batches (id, owner, is_open, input_file_id, document) VALUES (?, ?, 1, ?, ?)",
                (batch.id, owner, batch.input_file_id, msgspec.json.encode(batch)),
            )
        return batch

    def get_batch(self, owner: str, batch_id: str) -> BatchObject:
        """Return a client's batch; raises a 404."""
        batch, found_owner = self._batch(batch_id)
        if found_owner != owner:
            raise _not_found("batch", batch_id)
        return batch

    def _batch(self, batch_id: str) -> tuple[BatchObject, str]:
        """Return a batch and its owner; raises a 404."""
        query = "SELECT document, owner FROM batches WHERE id = ?"
        row = self._database.execute(query, (batch_id,)).fetchone()
        if row is None:
            raise _not_found("batch", batch_id)
        return msgspec.json.decode(row[0], type=BatchObject), row[1]

    def _save(self, batch: BatchObject) -> BatchObject:
        """Replace a batch, inside a transaction."""
        self._database.execute(
            "UPDATE batches SET document = ?, is_open = ? WHERE id = ?",
            (msgspec.json.encode(batch), batch.status in OPEN, batch.id),
        )
        return batch

    def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[Sequence[BatchObject], bool]:
        """Return a page of a client's batches, newest first, and whether more follow."""
        return self._page(_ListPage("batches", after, limit, "desc"), BatchObject, "owner = ?", owner)

    def open_batches(self) -> list[str]:
        """Return the ids of batches that are not over, oldest first."""
        return [row[0] for row in self._database.execute("SELECT id FROM batches WHERE is_open = 1 ORDER BY seq")]

    def cancel_batch(self, owner: str, batch_id: str) -> BatchObject:
        """Begin to cancel a batch. Raises RequestError if it has ended, or is about to."""
        batch = self.get_batch(owner, batch_id)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"a batch with status {batch.status!r} cannot be cancelled", "batch_id")
        with self._transaction():
            return self._save(msgspec.structs.replace(batch, status="cancelling", cancelling_at=self._now()))

    # Lines

    def validate(self, batch_id: str) -> BatchObject:
        """Read the lines of a new batch, whose status becomes `in_progress` or `failed`; return a
        later one as it is.

        Lines with errors have their answers at once.
        """
        batch, _ = self._batch(batch_id)
        if batch.status != "validating":
            return batch
        path = self.path_of(batch.input_file_id)
        if not path.exists():
            return self._fail(batch, BatchFault("file_missing", "the content of the input file is gone"))
        with self._transaction(), path.open("rb") as file:
            lines = read_lines(file, (batch.endpoint,), batch_id)
            counts = self._insert_lines(batch_id, lines)
            if (fault := self._fault_of(counts)) is not None:
                self._database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                return self._fail(batch, fault)
            begun = {"status": "in_progress", "in_progress_at": self._now(), "request_counts": counts}
            batch = self._save(msgspec.structs.replace(batch, **begun))
        self.num_lines_left += counts.total - counts.failed
        return batch

    def _fail(self, batch: BatchObject, fault: BatchFault) -> BatchObject:
        faults = BatchFaults([fault])
        return self._save(msgspec.structs.replace(batch, status="failed", failed_at=self._now(), errors=faults))

    def _insert_lines(self, batch_id: str, lines: Iterable[InputLine]) -> RequestCounts:
        """Store lines up to the first one that is too many; return their counts."""
        total = failed = 0
        for line in lines:
            total += 1
            if total > self.limits.lines:
                break
            answer = None
            if line.error is not None:
                failed += 1
                answer = msgspec.json.encode(OutputLine(line.line_id, line.custom_id, error=line.error))
            is_error = None if answer is None else 1
            row = (batch_id, line.number, line.start, line.size, line.line_id, line.custom_id, is_error, answer)
            self._database.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return RequestCounts(total, 0, failed)

    def _fault_of(self, counts: RequestCounts) -> BatchFault | None:
        """Return the reason why a batch cannot run."""
        if not counts.total:
            return BatchFault("empty_file", "the input file has no lines")
        if counts.total > self.limits.lines:
            message = f"the input file has more than {self.limits.lines} lines; split it"
            return BatchFault("too_many_lines", message, self.limits.lines + 1)
        return None

    def lines_left(self, batch_id: str, after: int, limit: int) -> list[InputLine]:
        """Return the next lines without an answer; none if the batch is not in progress.

        after: number of the last line that the caller has.
        """
        batch, _ = self._batch(batch_id)
        if batch.status != "in_progress":
            return []
        query = (
            "SELECT number, start, size, id, custom_id FROM lines "
            "WHERE batch = ? AND number > ? AND answer IS NULL ORDER BY number LIMIT ?"
        )
        return [InputLine(*row) for row in self._database.execute(query, (batch_id, after, limit))]

    def read_line(self, file_id: str, line: InputLine) -> bytes:
        """Return the text of a line."""
        with self.path_of(file_id).open("rb") as file:
            file.seek(line.start)
            return file.read(line.size)

    def record(self, batch_id: str, number: int, answer: OutputLine) -> None:
        """Store the answer of a line durably; a line that has an answer, or whose batch is over,
        stays as it is.
        """
        is_error = answer.response is None or answer.response.status_code >= 400
        encoded = msgspec.json.encode(answer)
        with self._transaction() as database:
            query = "UPDATE lines SET answer = ?, is_error = ? WHERE batch = ? AND number = ? AND answer IS NULL"
            if not database.execute(query, (encoded, is_error, batch_id, number)).rowcount:
                return
            batch, _ = self._batch(batch_id)
            counts = batch.request_counts
            completed = counts.completed + (not is_error)
            counts = RequestCounts(counts.total, completed, counts.failed + is_error)
            self._save(msgspec.structs.replace(batch, request_counts=counts))
        self.num_lines_left -= 1

    # The end of a batch

    def finish(self, batch_id: str) -> BatchObject:
        """Write the output files of a batch that has ended, and return it with its last status.

        A batch with lines that are left has expired, unless it was cancelled.
        """
        batch, owner = self._batch(batch_id)
        if batch.status not in OPEN:
            return batch
        if batch.status == "in_progress":
            with self._transaction():
                batch = self._save(msgspec.structs.replace(batch, status="finalizing", finalizing_at=self._now()))
        query = "SELECT count(*) FROM lines WHERE batch = ? AND answer IS NULL"
        num_left = self._database.execute(query, (batch_id,)).fetchone()[0]
        last_status = "completed"
        if batch.cancelling_at is not None:
            last_status = "cancelled"
        elif num_left:
            last_status = "expired"
        outputs = self._write_file(f"{batch_id}_output.jsonl", self._answers(batch_id, is_error=False))
        errors = self._write_file(
            f"{batch_id}_error.jsonl", self._errors(batch_id, with_expired=last_status == "expired")
        )
        counts = batch.request_counts
        if last_status == "expired":
            counts = RequestCounts(counts.total, counts.completed, counts.failed + num_left)
        ended = {
            "status": last_status,
            f"{last_status}_at": self._now(),
            "output_file_id": outputs and outputs.id,
            "error_file_id": errors and errors.id,
            "request_counts": counts,
        }
        with self._transaction() as database:
            for stored in (outputs, errors):
                if stored is not None:
                    self._insert_file(owner, stored)
            database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            batch = self._save(msgspec.structs.replace(batch, **ended))
        self.num_lines_left -= num_left
        return batch

    def _answers(self, batch_id: str, is_error: bool) -> Iterator[bytes]:
        query = "SELECT answer FROM lines WHERE batch = ? AND is_error = ? ORDER BY number"
        for row in self._database.execute(query, (batch_id, is_error)):
            yield row[0]

    def _errors(self, batch_id: str, with_expired: bool) -> Iterator[bytes]:
        """Yield the lines of the error file."""
        yield from self._answers(batch_id, is_error=True)
        if not with_expired:
            return
        query = "SELECT id, custom_id FROM lines WHERE batch = ? AND answer IS NULL ORDER BY number"
        error = LineError(EXPIRED, _EXPIRED_MESSAGE)
        for line_id, custom_id in self._database.execute(query, (batch_id,)):
            yield msgspec.json.encode(OutputLine(line_id, custom_id, error=error))

    def _write_file(self, filename: str, lines: Iterator[bytes]) -> FileObject | None:
        """Write an output file, which is not in the database yet; None if it would be empty."""
        first = next(lines, None)
        if first is None:
            return None
        file_id = _file_id()
        with self._written(file_id) as file:
            file.write(first + b"\n")
            for line in lines:
                file.write(line + b"\n")
            size = file.tell()
        return self._file_object(file_id, size, filename, "batch_output")


@dataclass(frozen=True)
class _ListPage:
    """Page of a list."""

    table: Literal["files", "batches"]
    after: str | None
    limit: int
    order: Literal["asc", "desc"]


def _file_id() -> str:
    return f"file-{new_id()}"


def _not_found(kind: str, name: str) -> ApiError:
    message = f"No {kind} has the id {json.dumps(name)} here"
    return ApiError(404, ErrorBody(message, "invalid_request_error", f"{kind}_id", f"{kind}_not_found"))


def _lock(file: BinaryIO, folder: Path) -> None:
    """Lock the folder for this process. Raises ConfigError if another process has done so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"--batch-folder {folder}: another daemon uses it; choose another folder") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """Make the names of new files durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
