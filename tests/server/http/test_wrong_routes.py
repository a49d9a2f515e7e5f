"""Paths, methods and encodings that no route takes: what is wrong is said, and what was meant."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from server.http.error_responses import API_PATHS
from tests.server.daemon_process import MODEL
from tests.server.good_bodies import CHAT, COMPLETIONS, error_of

CURL_TYPE = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/embeddings", "/v1/chat", "//v1/models"])
def test_an_unknown_route_is_not_found(http: httpx.Client, method: str, path: str) -> None:
    """404 with a code."""
    assert error_of(http.request(method, f"{http.base_url}{path}"), 404)["code"] == "not_found"


@pytest.mark.parametrize("path", API_PATHS)
def test_a_wrong_base_url_is_recognised(http: httpx.Client, path: str) -> None:
    """The error names the path that the client meant, and that path exists."""
    assert path in http.get("/openapi.json").json()["paths"]
    bare = path.removeprefix("/v1")
    for wrong in {f"/v1/v1{bare}", f"/api{path}", f"/v1/{path}", bare} - {path}:
        response = http.post(f"{http.base_url}{wrong}", json={})
        assert response.status_code == 404
        assert f"(did you mean {path}? check the base URL)" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/threads/x/messages", "/v1/conversations/responses", "/v1/engines/a/completions"])
def test_a_path_below_another_resource_gets_no_hint(http: httpx.Client, path: str) -> None:
    message = error_of(http.post(f"{http.base_url}{path}", json={}), 404)["message"]
    assert message == f"{path} does not exist here; /docs lists the paths"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_compressed_bodies_are_refused_by_their_coding(http: httpx.Client, coding: str) -> None:
    """415 that names the header, and not a fault of the JSON."""
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = http.post(COMPLETIONS, content=gzip.compress(b"{}"), headers=headers)
    error = error_of(response, 415)
    assert error["code"] == "unsupported_encoding"
    assert coding in error["message"]
    assert response.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
def test_uncompressed_bodies_may_say_so(http: httpx.Client, coding: str) -> None:
    plain = {"content-type": "application/json", "content-encoding": coding}
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1})
    assert http.post(COMPLETIONS, content=body, headers=plain).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": CURL_TYPE}, 200),
        ({"content-type": CURL_TYPE, "origin": "http://elsewhere.example"}, 400),
        ({"origin": "http://elsewhere.example"}, 400),
        ({"content-type": "text/plain"}, 400),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/api/generate"])
def test_curl_may_leave_out_the_type_of_json(
    http: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    """A page of another site may not: its browser asks nobody before it sends such a body."""
    length = {"max_tokens": 1} if path == COMPLETIONS else {"options": {"num_predict": 1}}
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": False, **length})
    response = http.post(path, content=body, headers=headers)
    assert response.status_code == status, response.text
    assert status == 200 or "Content-Type: application/json" in response.text


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", COMPLETIONS), ("POST", "/health"), ("DELETE", "/v1/models")]
)
def test_a_wrong_method_is_refused(http: httpx.Client, method: str, path: str) -> None:
    """405 with a code, and the methods that are allowed."""
    response = http.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"]


def test_batches_without_a_folder_name_the_flag(http: httpx.Client) -> None:
    calls = [("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/batches/b/cancel")]
    for method, path in [*calls, ("DELETE", "/v1/files/f"), ("GET", "/v1/files/f/content")]:
        error = error_of(http.request(method, path), 404)
        assert error["code"] == "batches_off"
        assert "--batch-folder" in error["message"]
