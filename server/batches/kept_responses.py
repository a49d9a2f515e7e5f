"""Responses of `/v1/responses` that are kept, each with its own input, in the database of batches.

A request that names a previous response goes on with the inputs and outputs of the chain before it.
The oldest responses of a client make room for its new ones. All methods but `open` run in the
database's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import Request

from engine.api import RequestError
from server.batches.database import Database, not_found
from server.openai.responses import Record, ResponsesRequest
from server.wire.errors import StorageFault
from server.wire.ids import new_id
from server.wire.limits import MOST_MESSAGES

_KEPT_S = 30 * 24 * 3600


class KeptItem(NamedTuple):
    """Item of a conversation, as JSON."""

    id: str
    document: bytes


class KeptResponses:
    """Kept responses of all clients."""

    def __init__(
        self, database: Database, owner_of: Callable[[Request], str], most_bytes: int, most_input_bytes: int
    ) -> None:
        """most_bytes: for each client. most_input_bytes: of a conversation."""
        self._database = database
        self._owner_of = owner_of
        self._most_bytes = most_bytes
        self._most_input_bytes = most_input_bytes

    async def open(self, http: Request, body: ResponsesRequest) -> Record:
        """Replace the body's input by the whole conversation, and return its record.

        Raises RequestError for an id of a response or item that the client does not have.
        """
        owner = self._owner_of(http)
        previous = body.previous_response_id
        if not isinstance(previous, str | None):
            raise RequestError("previous_response_id: must be the id of a response", "previous_response_id")
        body.previous_response_id = None
        body.input, own = await self._database.do(self._conversation, owner, previous, body.input)
        if body.store is False:
            return Record(previous)
        return Record(previous, partial(self._save, owner, previous, own))

    async def _save(self, owner: str, previous: str | None, own: list[KeptItem], response: dict[str, Any]) -> None:
        """Store a response, and say in its field `store` whether that was possible."""
        try:
            response["store"] = await self._database.do(self._insert, owner, previous, own, response)
        except StorageFault:
            # The database has logged it. The answer is not lost.
            response["store"] = False

    def get(self, owner: str, response_id: str) -> bytes:
        """Return a client's response as JSON; raises a 404."""
        query = "SELECT document FROM responses WHERE id = ? AND owner = ? AND created_at >= ?"
        oldest = self._database.now() - _KEPT_S
        row = self._database.execute(query, (response_id, owner, oldest)).fetchone()
        if row is None:
            raise not_found("response", response_id)
        return bytes(row[0])

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a client's response; raises a 404."""
        self.get(owner, response_id)
        with self._database.transaction():
            self._remove(response_id)

    def input_items(self, owner: str, response_id: str) -> list[KeptItem]:
        """Return the items of the request's own input; raises a 404."""
        self.get(owner, response_id)
        query = "SELECT id, document FROM response_items WHERE response = ? AND is_output = 0 ORDER BY number"
        return [KeptItem(*row) for row in self._database.execute(query, (response_id,))]

    def _conversation(self, owner: str, previous: str | None, given: Any) -> tuple[list[Any], list[KeptItem]]:
        """Return (items of the whole conversation, the given items as they are kept)."""
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        for number, item in enumerate(items):
            if item.get("type") == "item_reference":
                items[number] = self._referenced(owner, str(item.get("id")), f"input.{number}")
        own = [_kept(item) for item in items]
        documents = self._chain(owner, previous)
        size = sum(map(len, documents)) + sum(len(item.document) for item in own)
        if size > self._most_input_bytes or len(documents) + len(own) > MOST_MESSAGES:
            most = f"{MOST_MESSAGES} items and {self._most_input_bytes} bytes"
            raise RequestError(f"the conversation has more than {most}; begin a new one", "previous_response_id")
        return [*map(msgspec.json.decode, documents), *items], own

    def _chain(self, owner: str, previous: str | None) -> list[bytes]:
        """Return the items of a response and of all responses before it, oldest first."""
        documents: list[bytes] = []
        while previous is not None and len(documents) <= MOST_MESSAGES:
            query = "SELECT previous FROM responses WHERE id = ? AND owner = ?"
            row = self._database.execute(query, (previous, owner)).fetchone()
            if row is None:
                message = f"no response has the id {previous[:64]!r} here; send the conversation whole"
                raise RequestError(message, "previous_response_id", "previous_response_not_found")
            query = "SELECT document FROM response_items WHERE response = ? ORDER BY number DESC"
            documents += [item[0] for item in self._database.execute(query, (previous,))]
            previous = row[0]
        return documents[::-1]

    def _referenced(self, owner: str, item_id: str, place: str) -> Any:
        query = (
            "SELECT response_items.document FROM response_items JOIN responses ON responses.id = response "
            "WHERE response_items.id = ? AND owner = ? LIMIT 1"
        )
        row = self._database.execute(query, (item_id, owner)).fetchone()
        if row is None:
            raise RequestError("input: no item has this id here; send the item itself", place)
        return msgspec.json.decode(row[0])

    def _insert(self, owner: str, previous: str | None, own: Sequence[KeptItem], response: dict[str, Any]) -> bool:
        """Store a response after making room for it; return whether it has room."""
        items = [(0, *item) for item in own]
        items += [(1, item["id"], msgspec.json.encode(item)) for item in response["output"]]
        document = msgspec.json.encode(response)
        size = len(document) + sum(len(item[-1]) for item in items)
        if size > self._most_bytes:
            return False
        row = (response["id"], owner, previous, self._database.now(), size, document)
        with self._database.transaction():
            self._make_room(owner, size)
            query = "INSERT INTO responses (id, owner, previous, created_at, size, document) VALUES (?, ?, ?, ?, ?, ?)"
            self._database.execute(query, row)
            for number, item in enumerate(items):
                self._database.execute("INSERT INTO response_items VALUES (?, ?, ?, ?, ?)", (row[0], number, *item))
        return True

    def _make_room(self, owner: str, size: int) -> None:
        """Delete responses that are too old, and the oldest of a client that has no room."""
        query = "SELECT id FROM responses WHERE created_at < ?"
        for (response_id,) in self._database.execute(query, (self._database.now() - _KEPT_S,)).fetchall():
            self._remove(response_id)
        query = "SELECT coalesce(sum(size), 0) FROM responses WHERE owner = ?"
        excess = self._database.execute(query, (owner,)).fetchone()[0] + size - self._most_bytes
        while excess > 0:
            query = "SELECT id, size FROM responses WHERE owner = ? ORDER BY seq LIMIT 1"
            response_id, freed = self._database.execute(query, (owner,)).fetchone()
            self._remove(response_id)
            excess -= freed

    def _remove(self, response_id: str) -> None:
        self._database.execute("DELETE FROM response_items WHERE response = ?", (response_id,))
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def _kept(item: dict[str, Any]) -> KeptItem:
    """Return an item as it is kept: with type and id, and a message's text in parts."""
    kept = {"type": "message", **item, "id": str(item.get("id") or f"msg_{new_id()}")}
    if kept["type"] == "message" and isinstance(kept.get("content"), str):
        part_type = "output_text" if kept.get("role") == "assistant" else "input_text"
        kept["content"] = [{"type": part_type, "text": kept["content"]}]
    return KeptItem(kept["id"], msgspec.json.encode(kept))
