"""Routes of `/v1/files` and `/v1/batches`; without `--batch-folder` they name the flag."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response

from engine.api import RequestError
from server.batches.batches import Batches
from server.batches.database import ListPage
from server.batches.objects import ENDPOINTS, BatchObject, FileObject, listed
from server.batches.store import WINDOWS_S, NewBatch
from server.http.bodies import BodyRoute
from server.http.middleware import key_of
from server.state import Server
from server.wire.errors import ApiError, ErrorBody, http_error
from server.wire.fields import Closed

_PATHS = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
_LONGEST_NAME = 255
_MOST_PAIRS = 16
_FORM_FIELDS = frozenset(("file", "purpose"))

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class CreateBatch(Closed):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Key, Value], Field(max_length=_MOST_PAIRS)] | None = None


def build_router(server: Server, batches: Batches | None) -> APIRouter:
    """Build the routes; batches: None if the daemon has no folder for them."""
    router = APIRouter(route_class=BodyRoute)
    if batches is None:
        for path in _PATHS:
            router.add_api_route(path, _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
        return router
    owners = _Owners(server)
    router.include_router(_files_router(batches, owners))
    _add_batches(router, batches, owners)
    return router


async def _refuse() -> Response:
    message = "files and batches are off here; start the daemon with --batch-folder PATH"
    raise ApiError(404, ErrorBody(message, "invalid_request_error", code="batches_off"))


class _Owners:
    """Names of clients in the store: one for each API key, or a single owner without keys."""

    def __init__(self, server: Server) -> None:
        self._has_keys = bool(server.settings.api_key)

    def owner_of(self, http: Request) -> str:
        """Return the owner of the objects that a request may see."""
        if not self._has_keys:
            return ""
        key = key_of(Headers(scope=http.scope)).encode("latin-1", "replace")
        return hashlib.blake2b(key, person=b"polydraft-batch", digest_size=16).hexdigest()


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _list_of(page: tuple[Sequence[FileObject | BatchObject], bool]) -> Response:
    objects, has_more = page
    return _json(listed(objects, has_more))


def _files_router(batches: Batches, owners: _Owners) -> APIRouter:
    router = APIRouter()
    store = batches.store
    do = store.database.do

    @router.post("/v1/files")
    async def create_file(
        http: Request, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()]
    ) -> Response:
        """Store a file of requests, in JSON Lines."""
        for name in await http.form():
            if name not in _FORM_FIELDS:
                raise RequestError(
                    f"{name[:64]} is not supported by this server; leave it out", name, "unsupported_value"
                )
        if purpose != "batch":
            raise RequestError("purpose: only batch is served here", "purpose", "unsupported_value")
        if (file.size or 0) > store.limits.file_bytes:
            raise http_error(413, f"the file is larger than {store.limits.file_bytes} bytes (--batch-max-file-bytes)")
        filename = (file.filename or "file")[:_LONGEST_NAME]
        return _json(await do(store.files.add, owners.owner_of(http), filename, file.file))

    @router.get("/v1/files")
    async def list_files(
        http: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """Return files, by default newest first."""
        page = ListPage("files", owners.owner_of(http), after, limit, order, purpose)
        return _list_of(await do(store.files.list, page))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(http: Request, file_id: str) -> Response:
        """Return a file's description."""
        return _json(await do(store.files.get, owners.owner_of(http), file_id))

    @router.delete("/v1/files/{file_id}")
    async def delete_file(http: Request, file_id: str) -> Response:
        """Delete a file that no open batch reads."""
        await do(store.files.delete, owners.owner_of(http), file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    @router.get("/v1/files/{file_id}/content", response_class=FileResponse)
    async def file_content(http: Request, file_id: str) -> Response:
        """Return a file's content."""
        stored = await do(store.files.get, owners.owner_of(http), file_id)
        return FileResponse(store.files.path_of(stored.id), media_type="application/jsonl", filename=stored.filename)

    return router


def _add_batches(router: APIRouter, batches: Batches, owners: _Owners) -> None:
    store = batches.store
    do = store.database.do

    @router.post("/v1/batches")
    async def create_batch(http: Request, body: CreateBatch) -> Response:
        """Begin a batch of an uploaded file."""
        if body.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint: must be {' or '.join(ENDPOINTS)}", "endpoint", "unsupported_value")
        if body.completion_window not in WINDOWS_S:
            message = f"completion_window: must be {' or '.join(WINDOWS_S)}"
            raise RequestError(message, "completion_window", "unsupported_value")
        wanted = NewBatch(body.input_file_id, body.endpoint, body.completion_window, body.metadata)
        batch = await do(store.add_batch, owners.owner_of(http), wanted)
        batches.runner.begin(batch.id)
        return _json(batch)

    @router.get("/v1/batches")
    async def list_batches(
        http: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """Return batches, newest first."""
        return _list_of(await do(store.list_batches, owners.owner_of(http), after, limit))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(http: Request, batch_id: str) -> Response:
        """Return a batch."""
        return _json(await do(store.get_batch, owners.owner_of(http), batch_id))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(http: Request, batch_id: str) -> Response:
        """Cancel a batch; lines with an answer stay in its output."""
        batch = await do(store.cancel_batch, owners.owner_of(http), batch_id)
        batches.runner.cancel(batch.id)
        return _json(batch)
