"""The Host of requests to a daemon on loopback without a key."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from server.http.hosts import HostCheck
from server.settings.settings import Serve
from tests.server.daemon_process import Daemon


def test_a_name_of_another_machine_is_refused(daemon: Daemon) -> None:
    """A web page that points its own domain at this machine reads and generates nothing."""
    with daemon.client() as client:
        for name in ("evil.example", "127.0.0.1.evil.example:8000"):
            for call in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                refused = client.request(*call, headers={"host": name})
                assert refused.status_code == 403
                assert "--allowed-hosts" in refused.json()["error"]["message"]
        for name in ("localhost", f"LOCALHOST.:{daemon.port}", "127.0.0.1", f"[::1]:{daemon.port}", "127.9.9.9:1"):
            assert client.get("/v1/models", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        Serve(host="0.0.0.0"),
        Serve(host="localhost", api_key=["key"]),
        Serve(uds="/somewhere"),
        Serve(allowed_hosts=["Chat.example"]),
        Serve(host="::1", allowed_hosts=["*"]),
    ],
    ids=["all addresses", "a key", "a socket file", "a configured name", "every name"],
)
def test_other_daemons_and_configured_names_are_served(settings: Serve) -> None:
    assert HostCheck(settings).refusal(Headers({"host": "chat.example:443"})) is None


def test_a_request_without_a_host_is_served() -> None:
    assert HostCheck(Serve()).refusal(Headers({})) is None
