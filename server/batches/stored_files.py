"""Stored files of clients: input files of batches, and their output files.

A file has a row in the database and its content in the folder. The row is written last, so that a
file which a killed daemon has left half written is not in any list.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.api import ConfigError, RequestError
from server.batches.database import Database, ListPage, not_found
from server.batches.objects import FileObject
from server.wire.ids import new_id


class StoredFiles:
    """Files of all clients; a client sees its own files only."""

    def __init__(self, database: Database, most_files: int) -> None:
        """Remove contents that no row has. Raises ConfigError if the folder cannot be read.

        most_files: files of one client, with output files.
        """
        self._database = database
        self._folder = database.files_folder
        self._most_files = most_files
        known = {row[0] for row in database.execute("SELECT id FROM files")}
        try:
            for path in self._folder.iterdir():
                if path.name not in known:
                    path.unlink()
        except OSError as error:
            raise ConfigError(f"--batch-folder {self._folder.parent}: cannot be used ({error})") from error

    def add(self, owner: str, filename: str, source: BinaryIO) -> FileObject:
        """Store a file for batches; raise RequestError for an empty one, or too many."""
        query = "SELECT count(*) FROM files WHERE owner = ?"
        num_files = self._database.execute(query, (owner,)).fetchone()[0]
        if num_files >= self._most_files:
            raise RequestError(
                f"{num_files} files are stored, the most is {self._most_files}; delete files that are not needed",
                "file",
                "too_many_files",
            )
        file_id = _new_id()
        with self._written(file_id) as target:
            shutil.copyfileobj(source, target, 1 << 20)
            size = target.tell()
            if not size:
                raise RequestError("the file is empty", "file", "empty_file")
        stored = self._described(file_id, size, filename, "batch")
        with self.gone_after_an_error() as contents, self._database.transaction():
            contents.append(stored)
            self.insert(owner, stored)
        return stored

    @contextmanager
    def gone_after_an_error(self) -> Iterator[list[FileObject | None]]:
        """Delete the contents of the listed files if the block raises: they have no rows."""
        contents: list[FileObject | None] = []
        try:
            yield contents
        except BaseException:
            for stored in contents:
                if stored is not None:
                    self.path_of(stored.id).unlink(missing_ok=True)
            raise

    def _described(self, file_id: str, size: int, filename: str, purpose: str) -> FileObject:
        return FileObject(id=file_id, bytes=size, created_at=self._database.now(), filename=filename, purpose=purpose)

    def insert(self, owner: str, stored: FileObject) -> None:
        """Give a file its row, inside a transaction."""
        self._database.execute(
            "INSERT INTO files (id, owner, purpose, document) VALUES (?, ?, ?, ?)",
            (stored.id, owner, stored.purpose, msgspec.json.encode(stored)),
        )

    @contextmanager
    def _written(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file, which has its name durably after the block, and is gone if it raises."""
        path = self._folder / f"{file_id}.new"
        try:
            with open(path, "wb", opener=_private) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            path.rename(self._folder / file_id)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)

    def get(self, owner: str, file_id: str) -> FileObject:
        """Return a file; raises a 404."""
        query = "SELECT document FROM files WHERE id = ? AND owner = ?"
        row = self._database.execute(query, (file_id, owner)).fetchone()
        if row is None:
            raise not_found("file", file_id)
        return msgspec.json.decode(row[0], type=FileObject)

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._folder / file_id

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises RequestError while an open batch reads it."""
        self.get(owner, file_id)
        query = "SELECT id FROM batches WHERE is_open = 1 AND input_file_id = ?"
        reader = self._database.execute(query, (file_id,)).fetchone()
        if reader is not None:
            message = f"{file_id} is the input of {reader[0]}, which is not over; cancel the batch first"
            raise RequestError(message, "file_id", "file_in_use")
        with self._database.transaction():
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    def list(self, page: ListPage) -> tuple[Sequence[FileObject], bool]:
        """Return a page of a client's files, and whether more follow."""
        return self._database.objects_of(page, FileObject)

    def write_output(self, filename: str, lines: Iterator[bytes]) -> FileObject | None:
        """Write an output file, which is not in the database yet; None if it would be empty."""
        first = next(lines, None)
        if first is None:
            return None
        file_id = _new_id()
        with self._written(file_id) as file:
            file.write(first + b"\n")
            for line in lines:
                file.write(line + b"\n")
            size = file.tell()
        return self._described(file_id, size, filename, "batch_output")


def _new_id() -> str:
    return f"file-{new_id()}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """Make the names of new files durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
