"""API keys: what they protect, and that they are never written down."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from server.http.middleware import RequestEnvelope
from server.serving.metrics import ServerMetrics
from server.settings.settings import Serve
from server.wire.current_call import this_call
from tests.server.conftest import KEYS, PREFIX
from tests.server.daemon_process import MODEL, Daemon
from tests.server.good_bodies import error_of

PROTECTED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/nowhere"),
    ("POST", "/tokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/detokenize"),
]
OPEN = ["/health", "/ping", "/ready", "/metrics", "/version", "/load"]


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_requests_without_a_key_get_401(one_seat: Daemon, method: str, path: str, prefix: str) -> None:
    """Without one: 401 with a code, also through a proxy's path prefix."""
    wrong = ["", "Bearer", "Bearer wrong", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", KEYS[0]]
    with one_seat.client() as client:
        for value in wrong:
            response = client.request(method, prefix + path, headers={"authorization": value} if value else {})
            error = error_of(response, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_every_configured_key_is_accepted(one_seat: Daemon, prefix: str) -> None:
    """Each of several keys is accepted, the scheme in any case, with and without the prefix."""
    with one_seat.client() as client:
        for value in (f"Bearer {KEYS[0]}", f"Bearer {KEYS[1]}", f"bearer  {KEYS[1]}"):
            response = client.get(f"{prefix}/v1/models", headers={"authorization": value})
            assert response.json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("path", OPEN)
def test_operation_needs_no_key(one_seat: Daemon, path: str) -> None:
    """Probes and scrapes work without a key."""
    with one_seat.client() as client:
        assert client.get(path).status_code == 200


def test_keys_and_texts_are_never_logged(one_seat: Daemon, one_seat_http: httpx.Client) -> None:
    """The request log has one line per request, and neither keys, right or wrong, nor prompts."""
    assert one_seat_http.post("/tokenize", json={"prompt": "a secret prompt"}).status_code == 200
    with one_seat.client("a-wrong-key") as client:
        assert client.get("/v1/models").status_code == 401
    assert re.search(r"INFO POST id=\S+ path=/tokenize status=200", one_seat.log)
    assert re.search(r"INFO GET id=\S+ path=/v1/models status=401", one_seat.log)
    for secret in (*KEYS, "a-wrong-key", "a secret prompt"):
        assert secret not in one_seat.log


@pytest.mark.parametrize("keys", [(), KEYS])
def test_clients_have_opaque_names(keys: tuple[str, ...]) -> None:
    """Keys name clients, or addresses without keys; a name reveals neither."""
    names = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        names.append(this_call().client)

    async def nothing(message: Any = None) -> None:
        pass

    envelope = RequestEnvelope(app, ServerMetrics("m", compat=False), Serve(api_key=list(keys)))
    callers = [(KEYS[0], "10.0.0.1"), (KEYS[0], "10.0.0.2"), (KEYS[1], "10.0.0.2")]
    for key, address in callers:
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "raw_path": b"/v1/x", "client": (address, 1)}
        headers = [(b"authorization", f"Bearer {key}".encode())]
        asyncio.run(envelope({**scope, "headers": headers}, nothing, nothing))
    first, second, third = names
    assert (first == second, second == third) == ((True, False) if keys else (False, True))
    for name in names:
        assert re.fullmatch("[0-9a-f]{16}", name)


def test_a_path_cannot_forge_a_log_line(one_seat: Daemon) -> None:
    """A line break in a path is logged as it was sent."""
    with one_seat.client() as client:
        client.get("/nowhere%0Aforged%20line")
    assert "path=/nowhere%0Aforged%20line status=404" in one_seat.log
    assert "\nforged" not in one_seat.log
