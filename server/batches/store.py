"""Batches and their lines in the database; files are in `stored_files.py`.

The answer of a line, and the counts of its batch, are one durable transaction. Output files are
written from the database when a batch ends, so that each line is in them exactly once whenever
the daemon was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from engine.api import RequestError
from server.batches.database import Database, ListPage, not_found
from server.batches.lines import InputLine, read_lines
from server.batches.objects import (
    EXPIRED,
    OPEN,
    BatchFault,
    BatchFaults,
    BatchObject,
    LineError,
    OutputLine,
    RequestCounts,
)
from server.batches.stored_files import StoredFiles
from server.wire.errors import ApiError
from server.wire.ids import new_id

WINDOWS_S = {"24h": 24 * 3600}
"""Values of `completion_window`, in seconds."""
_EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."


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
    """Batches of all clients, and the files that they read and write."""

    def __init__(self, database: Database, limits: StoreLimits | None = None) -> None:
        """Go on with the batches of the database."""
        self.limits = limits or StoreLimits()
        self.database = database
        self.files = StoredFiles(database, self.limits.files)
        query = "SELECT count(*) FROM lines WHERE answer IS NULL"
        self.num_lines_left: int = database.execute(query).fetchone()[0]
        """Lines of open batches that have no answer yet."""

    def add_batch(self, owner: str, wanted: NewBatch) -> BatchObject:
        """Store a new batch; raise RequestError for a missing file or too many open batches."""
        try:
            purpose = self.files.get(owner, wanted.input_file_id).purpose
        except ApiError as error:
            raise RequestError(f"input_file_id: {error.body.message}", "input_file_id", "file_not_found") from error
        if purpose != "batch":
            message = f"input_file_id: the purpose of {wanted.input_file_id} is {purpose}, not batch"
            raise RequestError(message, "input_file_id")
        num_open = len(self.open_batches())
        if num_open >= self.limits.open_batches:
            message = f"{num_open} batches are open, the most is {self.limits.open_batches}; wait until one has ended"
            raise RequestError(message, code="too_many_batches")
        now = self.database.now()
        batch = BatchObject(
            id=f"batch_{new_id()}",
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            created_at=now,
            expires_at=now + WINDOWS_S[wanted.completion_window],
            metadata=wanted.metadata,
        )
        with self.database.transaction():
            self.database.execute(
                "INSERT INTO batches (id, owner, is_open, input_file_id, document) VALUES (?, ?, 1, ?, ?)",
                (batch.id, owner, batch.input_file_id, msgspec.json.encode(batch)),
            )
        return batch

    def get_batch(self, owner: str, batch_id: str) -> BatchObject:
        """Return a client's batch; raises a 404."""
        batch, found_owner = self._batch(batch_id)
        if found_owner != owner:
            raise not_found("batch", batch_id)
        return batch

    def _batch(self, batch_id: str) -> tuple[BatchObject, str]:
        """Return a batch and its owner; raises a 404."""
        query = "SELECT document, owner FROM batches WHERE id = ?"
        row = self.database.execute(query, (batch_id,)).fetchone()
        if row is None:
            raise not_found("batch", batch_id)
        return msgspec.json.decode(row[0], type=BatchObject), row[1]

    def _save(self, batch: BatchObject) -> BatchObject:
        """Replace a batch, inside a transaction."""
        self.database.execute(
            "UPDATE batches SET document = ?, is_open = ? WHERE id = ?",
            (msgspec.json.encode(batch), batch.status in OPEN, batch.id),
        )
        return batch

    def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[Sequence[BatchObject], bool]:
        """Return a page of a client's batches, newest first, and whether more follow."""
        return self.database.objects_of(ListPage("batches", owner, after, limit), BatchObject)

    def open_batches(self) -> list[str]:
        """Return the ids of batches that are not over, oldest first."""
        return [row[0] for row in self.database.execute("SELECT id FROM batches WHERE is_open = 1 ORDER BY seq")]

    def cancel_batch(self, owner: str, batch_id: str) -> BatchObject:
        """Begin to cancel a batch. Raises RequestError if it has ended, or is about to."""
        batch = self.get_batch(owner, batch_id)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"a batch with status {batch.status!r} cannot be cancelled", "batch_id")
        with self.database.transaction():
            return self._save(msgspec.structs.replace(batch, status="cancelling", cancelling_at=self.database.now()))

    # Lines

    def validate(self, batch_id: str) -> BatchObject:
        """Read a new batch's lines: its status becomes `in_progress` or `failed`.

        Lines with errors have their answers at once. A later batch is returned as it is.
        """
        batch, _ = self._batch(batch_id)
        if batch.status != "validating":
            return batch
        path = self.files.path_of(batch.input_file_id)
        if not path.exists():
            return self._fail(batch, BatchFault("file_missing", "the content of the input file is gone"))
        with self.database.transaction(), path.open("rb") as file:
            lines = read_lines(file, (batch.endpoint,), batch_id)
            counts = self._insert_lines(batch_id, lines)
            if (fault := self._fault_of(counts)) is not None:
                self.database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                return self._fail(batch, fault)
            begun = {"status": "in_progress", "in_progress_at": self.database.now(), "request_counts": counts}
            batch = self._save(msgspec.structs.replace(batch, **begun))
        self.num_lines_left += counts.total - counts.failed
        return batch

    def _fail(self, batch: BatchObject, fault: BatchFault) -> BatchObject:
        faults = BatchFaults([fault])
        return self._save(msgspec.structs.replace(batch, status="failed", failed_at=self.database.now(), errors=faults))

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
            self.database.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
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
        return [InputLine(*row) for row in self.database.execute(query, (batch_id, after, limit))]

    def first_shape(self, batch_id: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of drafts that a batch began with, the given one if it begins now."""
        self.database.execute("INSERT OR IGNORE INTO shapes VALUES (?, ?, ?)", (batch_id, *shape))
        query = "SELECT num_drafts, draft_length FROM shapes WHERE batch = ?"
        num_drafts, draft_length = self.database.execute(query, (batch_id,)).fetchone()
        return num_drafts, draft_length

    def read_line(self, file_id: str, line: InputLine) -> bytes:
        """Return the text of a line."""
        with self.files.path_of(file_id).open("rb") as file:
            file.seek(line.start)
            return file.read(line.size)

    def record(self, batch_id: str, number: int, answer: OutputLine) -> None:
        """Store a line's answer durably, unless it has one or its batch is over."""
        is_error = answer.response is None or answer.response.status_code >= 400
        encoded = msgspec.json.encode(answer)
        with self.database.transaction():
            query = "UPDATE lines SET answer = ?, is_error = ? WHERE batch = ? AND number = ? AND answer IS NULL"
            if not self.database.execute(query, (encoded, is_error, batch_id, number)).rowcount:
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
            with self.database.transaction():
                batch = self._save(
                    msgspec.structs.replace(batch, status="finalizing", finalizing_at=self.database.now())
                )
        query = "SELECT count(*) FROM lines WHERE batch = ? AND answer IS NULL"
        num_left = self.database.execute(query, (batch_id,)).fetchone()[0]
        last_status = "completed"
        if batch.cancelling_at is not None:
            last_status = "cancelled"
        elif num_left:
            last_status = "expired"
        counts = batch.request_counts
        if last_status == "expired":
            counts = RequestCounts(counts.total, counts.completed, counts.failed + num_left)
        with self.files.gone_after_an_error() as contents:
            answers = self._answers(batch_id, is_error=False)
            contents.append(self.files.write_output(f"{batch_id}_output.jsonl", answers))
            errors = self._errors(batch_id, with_expired=last_status == "expired")
            contents.append(self.files.write_output(f"{batch_id}_error.jsonl", errors))
            with self.database.transaction():
                for stored in contents:
                    if stored is not None:
                        self.files.insert(owner, stored)
                self.database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                self.database.execute("DELETE FROM shapes WHERE batch = ?", (batch_id,))
                output_file_id, error_file_id = (stored and stored.id for stored in contents)
                ended = {
                    "status": last_status,
                    f"{last_status}_at": self.database.now(),
                    "output_file_id": output_file_id,
                    "error_file_id": error_file_id,
                    "request_counts": counts,
                }
                batch = self._save(msgspec.structs.replace(batch, **ended))
        self.num_lines_left -= num_left
        return batch

    def _answers(self, batch_id: str, is_error: bool) -> Iterator[bytes]:
        query = "SELECT answer FROM lines WHERE batch = ? AND is_error = ? ORDER BY number"
        for row in self.database.execute(query, (batch_id, is_error)):
            yield row[0]

    def _errors(self, batch_id: str, with_expired: bool) -> Iterator[bytes]:
        """Yield the lines of the error file."""
        yield from self._answers(batch_id, is_error=True)
        if not with_expired:
            return
        query = "SELECT id, custom_id FROM lines WHERE batch = ? AND answer IS NULL ORDER BY number"
        error = LineError(EXPIRED, _EXPIRED_MESSAGE)
        for line_id, custom_id in self.database.execute(query, (batch_id,)):
            yield msgspec.json.encode(OutputLine(line_id, custom_id, error=error))
