"""Routes of files, batches and kept responses; without `--batch-folder` they name the flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from pydantic import Field
from starlette.responses import FileResponse, Response

from engine.api import RequestError
from server.batches.batches import Batches, Owners
from server.batches.database import ListPage
from server.batches.kept_responses import KeptResponses
from server.batches.objects import ENDPOINTS, BatchObject, FileObject, listed
from server.batches.store import WINDOWS_S, NewBatch
from server.http.bodies import BodyRoute
from server.wire.errors import ApiError, ErrorBody, http_error
from server.wire.fields import Closed

_RESPONSES = "/v1/responses/{rest:path}"
_PATHS = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}", _RESPONSES)
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


def build_router(batches: Batches | None) -> APIRouter:
    """Build the routes; batches: None if the daemon has no folder for them."""
    router = APIRouter(route_class=BodyRoute)
    if batches is None:
        for path in _PATHS:
            router.add_api_route(path, _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
        return router
    router.include_router(_files_router(batches, batches.owners))
    _add_batches(router, batches, batches.owners)
    if batches.responses is None:
        router.add_api_route(_RESPONSES, _refuse_responses, methods=["GET", "DELETE"], include_in_schema=False)
    else:
        _add_responses(router, batches, batches.responses)
    return router


async def _refuse() -> Response:
    message = "files, batches and kept responses are off here; start the daemon with --batch-folder PATH"
    raise ApiError(404, ErrorBody(message, "invalid_request_error", code="batches_off"))


async def _refuse_responses() -> Response:
    raise http_error(404, "no responses are kept here (--response-store-bytes 0)")


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _list_of(page: tuple[Sequence[FileObject | BatchObject], bool]) -> Response:
    objects, has_more = page
    return _json(listed(objects, has_more))


def _files_router(batches: Batches, owners: Owners) -> APIRouter:
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


def _add_batches(router: APIRouter, batches: Batches, owners: Owners) -> None:
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


def _add_responses(router: APIRouter, batches: Batches, responses: KeptResponses) -> None:
    do = batches.store.database.do
    owner_of = batches.owners.owner_of

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(http: Request, response_id: str, stream: bool = False) -> Response:
        """Return a kept response."""
        if stream:
            raise RequestError("stream: events are not kept; leave it out", "stream", "unsupported_value")
        return Response(await do(responses.get, owner_of(http), response_id), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(http: Request, response_id: str) -> Response:
        """Delete a kept response; conversations that go on from it are not whole any more."""
        await do(responses.delete, owner_of(http), response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        http: Request,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """Return the input of a kept response's own request, without the turns before it."""
        items = await do(responses.input_items, owner_of(http), response_id)
        if order == "desc":
            items.reverse()
        begin = next((number for number, item in enumerate(items, 1) if item.id == after), 0)
        if after is not None and not begin:
            raise RequestError(f"after: {after[:64]!r} is not in the list", "after")
        page = items[begin : begin + limit]
        documents = [msgspec.Raw(item.document) for item in page]
        return _json(listed(page, begin + limit < len(items)) | {"data": documents})
