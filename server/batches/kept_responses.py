"""Responses of `/v1/responses` that are kept, each with its own input, in the database of batches.

A request that names a previous response goes on with the inputs and outputs of the chain before it.
The oldest responses of a client make room for its new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import Request

from engine.api import RequestError
from server.batches.database import Database, not_found
from server.batches.owners import Owners
from server.openai.responses import Record, ResponsesRequest
from server.wire.errors import StorageFault
from server.wire.ids import new_id
from server.wire.limits import MOST_MESSAGES

_KEPT_S = 30 * 24 * 3600
_REFERENCE = "item_reference"
Item = dict[str, Any]
Row = tuple[str, bytes]
"""Id of an item, and the item as JSON."""


class KeptResponses:
    """Kept responses of all clients."""

    def __init__(self, database: Database, owners: Owners, most_bytes: int, most_input_bytes: int) -> None:
        """most_bytes: for each client. most_input_bytes: of a conversation."""
        self._database = database
        self._owners = owners
        self._most_bytes = most_bytes
        self._most_input_bytes = most_input_bytes

    async def open(self, http: Request, body: ResponsesRequest) -> Record:
        """Replace the body's input by the whole conversation, and return its record.

        Raises RequestError for an id of a response or item that the client does not have.
        """
        owner = self._owners.owner_of(http)
        previous = body.previous_response_id
        if not isinstance(previous, str | None):
            raise RequestError("previous_response_id: must be the id of a response", "previous_response_id")
        body.previous_response_id = None
        items, rows = await self._database.do(self._read, owner, previous, body.input)
        body.input = items
        if body.store is False:
            return Record(previous)
        return Record(previous, partial(self._save, owner, previous, rows))

    async def get(self, http: Request, response_id: str) -> bytes:
        """Return a client's response as JSON; raises a 404."""
        row = await self._database.do(self._found, self._owners.owner_of(http), response_id)
        return row[1]

    async def delete(self, http: Request, response_id: str) -> None:
        """Delete a client's response; raises a 404."""

        def delete(owner: str) -> None:
            self._found(owner, response_id)
            with self._database.transaction():
                self._remove(response_id)

        await self._database.do(delete, self._owners.owner_of(http))

    async def input_items(self, http: Request, response_id: str, order: Literal["asc", "desc"]) -> list[Row]:
        """Return the request's own input; raises a 404."""

        def read(owner: str) -> list[Row]:
            self._found(owner, response_id)
            query = "SELECT id, document FROM response_items WHERE response = ? AND is_output = 0 ORDER BY number"
            rows: list[Row] = self._database.execute(f"{query} {order}", (response_id,)).fetchall()
            return rows

        return await self._database.do(read, self._owners.owner_of(http))

    async def _save(self, owner: str, previous: str | None, rows: Sequence[Row], response: dict[str, Any]) -> None:
        """Store a response, and say in its field `store` whether that was possible."""
        outputs = [(item["id"], msgspec.json.encode(item)) for item in response["output"]]
        document = msgspec.json.encode(response)
        try:
            response["store"] = await self._database.do(
                self._insert, owner, (response["id"], previous, document), rows, outputs
            )
        except StorageFault:
            # The database has logged it. The answer is not lost.
            response["store"] = False

    # Methods of the database's thread

    def _found(self, owner: str, response_id: str) -> tuple[str | None, bytes]:
        """Return (id of the previous response, document); raises a 404."""
        query = "SELECT previous, document FROM responses WHERE id = ? AND owner = ? AND created_at >= ?"
        oldest = self._database.now() - _KEPT_S
        row: tuple[str | None, bytes] | None = self._database.execute(query, (response_id, owner, oldest)).fetchone()
        if row is None:
            raise not_found("response", response_id)
        return row

    def _read(self, owner: str, previous: str | None, given: str | Sequence[Item]) -> tuple[list[Item], list[Row]]:
        """Return (items of the whole conversation, rows of the given items)."""
        own = _listed(given)
        for number, item in enumerate(own):
            if item.get("type") == _REFERENCE:
                own[number] = self._referenced(owner, item.get("id"), number)
        rows = [_row(item) for item in own]
        documents = self._chain(owner, previous)
        size = sum(map(len, documents)) + sum(len(document) for _, document in rows)
        if size > self._most_input_bytes or len(documents) + len(rows) > MOST_MESSAGES:
            raise RequestError(
                f"the conversation has {len(documents) + len(rows)} items of {size} bytes, and at most {MOST_MESSAGES} "
                f"items of {self._most_input_bytes} bytes are read; begin a new one",
                "previous_response_id",
            )
        return [*map(msgspec.json.decode, documents), *own], rows

    def _chain(self, owner: str, previous: str | None) -> list[bytes]:
        """Return the items of a response and of all responses before it, oldest first."""
        documents: list[bytes] = []
        while previous is not None:
            query = "SELECT previous FROM responses WHERE id = ? AND owner = ?"
            row = self._database.execute(query, (previous, owner)).fetchone()
            if row is None:
                message = (
                    f"no response has the id {previous[:64]!r} here, so the conversation is not whole; send it whole"
                )
                raise RequestError(message, "previous_response_id", "previous_response_not_found")
            query = "SELECT document FROM response_items WHERE response = ? ORDER BY number DESC"
            documents += [item[0] for item in self._database.execute(query, (previous,))]
            if len(documents) > MOST_MESSAGES:
                break
            previous = row[0]
        return documents[::-1]

    def _referenced(self, owner: str, item_id: Any, number: int) -> Item:
        query = (
            "SELECT response_items.document FROM response_items JOIN responses ON responses.id = response "
            "WHERE response_items.id = ? AND owner = ? LIMIT 1"
        )
        row = self._database.execute(query, (str(item_id), owner)).fetchone()
        if row is None:
            raise RequestError("input: no item has this id here; send the item itself", f"input.{number}")
        item: Item = msgspec.json.decode(row[0])
        return item

    def _insert(
        self, owner: str, response: tuple[str, str | None, bytes], inputs: Sequence[Row], outputs: Sequence[Row]
    ) -> bool:
        """Store a response after making room for it; return whether it has room."""
        response_id, previous, document = response
        size = len(document) + sum(len(item) for _, item in (*inputs, *outputs))
        if size > self._most_bytes:
            return False
        items = [*((0, *row) for row in inputs), *((1, *row) for row in outputs)]
        with self._database.transaction():
            self._make_room(owner, size)
            self._database.execute(
                "INSERT INTO responses (id, owner, previous, created_at, size, document) VALUES (?, ?, ?, ?, ?, ?)",
                (response_id, owner, previous, self._database.now(), size, document),
            )
            for number, item in enumerate(items):
                self._database.execute(
                    "INSERT INTO response_items VALUES (?, ?, ?, ?, ?)", (response_id, number, *item)
                )
        return True

    def _make_room(self, owner: str, size: int) -> None:
        """Delete responses that are too old, and the oldest of a client that has no room."""
        oldest = self._database.now() - _KEPT_S
        oldest_first = "SELECT id, size, created_at FROM responses {} ORDER BY seq LIMIT 1"
        while row := self._database.execute(oldest_first.format("")).fetchone():
            if row[2] >= oldest:
                break
            self._remove(row[0])
        query = "SELECT coalesce(sum(size), 0) FROM responses WHERE owner = ?"
        excess = self._database.execute(query, (owner,)).fetchone()[0] + size - self._most_bytes
        while excess > 0:
            row = self._database.execute(oldest_first.format("WHERE owner = ?"), (owner,)).fetchone()
            self._remove(row[0])
            excess -= row[1]

    def _remove(self, response_id: str) -> None:
        self._database.execute("DELETE FROM response_items WHERE response = ?", (response_id,))
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def _listed(given: str | Sequence[Item]) -> list[Item]:
    """Return an input as items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given)


def _row(item: Item) -> Row:
    """Return an item as it is kept: with type and id, and a message's text in parts."""
    kept = {"type": "message", **item}
    kept["id"] = str(item.get("id") or f"msg_{new_id()}")
    if kept["type"] == "message" and isinstance(kept.get("content"), str):
        part_type = "output_text" if kept.get("role") == "assistant" else "input_text"
        kept["content"] = [{"type": part_type, "text": kept["content"]}]
    return kept["id"], msgspec.json.encode(kept)
