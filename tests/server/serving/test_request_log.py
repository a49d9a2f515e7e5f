"""One line a request in the log, when its answer ends: what it counted, never what it said."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream

CALL: dict[str, Any] = {"model": MODEL, "prompt": "hello secret words", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
@slow_fixture
def json_daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon that logs requests, as JSON."""
    return daemons.get(*pair_arguments, "--no-calibrate", "--enable-log-requests", "--log-format", "json")


@pytest.fixture
def client(json_daemon: Daemon) -> Iterator[httpx.Client]:
    """A client of it."""
    with json_daemon.client() as client:
        yield client


def lines_of(daemon: Daemon, request_id: str) -> list[dict[str, Any]]:
    """The lines about a request; at least one must come."""

    def found() -> list[dict[str, Any]]:
        every = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
        return [line for line in every if line.get("id") == request_id]

    return wait_until(found, f"no line about {request_id}:\n{daemon.log}")


def test_lines_of_the_http_server_are_objects_too(json_daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", json_daemon.port)) as connection:
        connection.sendall(b"x\r\n\r\n")
        assert b"400" in connection.recv(100)
    wait_until(lambda: "Invalid HTTP request" in json_daemon.log, "nothing is logged")
    (line,) = [line for line in json_daemon.log.splitlines() if "Invalid HTTP request" in line]
    assert json.loads(line)["level"] == "warning"


def test_every_line_is_an_object(json_daemon: Daemon) -> None:
    """From the start on; libraries draw no progress bars between the lines."""
    lines = [json.loads(line) for line in re.split(r"[\r\n]+", json_daemon.log.strip())]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    assert any("loading target" in line["message"] for line in lines)


def test_a_whole_answer_has_one_line(json_daemon: Daemon, client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=CALL, headers={"x-request-id": "whole"}).json()
    (line,) = lines_of(json_daemon, "whole")
    counted = answer["metrics"]["speculative_decoding"]
    assert line["message"] == "request"
    assert line["path"] == "/v1/completions"
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (line["answer_tokens"], line["finish_reason"]) == (20, "length")
    assert line["acceptance_length"] == pytest.approx(counted["mean_acceptance_length"])
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["rule"] == counted["rule"]


def test_a_stream_has_one_line_when_it_ends(json_daemon: Daemon, client: httpx.Client) -> None:
    client.headers["x-request-id"] = "stream"
    with open_stream(client, "/v1/chat/completions", model=MODEL, messages=[{"role": "user", "content": "hi"}]) as sent:
        sent.read()
    (line,) = lines_of(json_daemon, "stream")
    assert line["path"] == "/v1/chat/completions"
    assert line["answer_tokens"] >= 1


def test_a_client_that_leaves_has_its_line(json_daemon: Daemon, client: httpx.Client) -> None:
    client.headers["x-request-id"] = "left"
    with open_stream(client, "/v1/completions", **CALL | {"max_tokens": 2000}) as sent:
        next(sent)
    (line,) = lines_of(json_daemon, "left")
    assert line["finish_reason"] == "abort"
    assert line["answer_tokens"] < 2000


def test_requests_that_never_ran_are_logged(json_daemon: Daemon, client: httpx.Client) -> None:
    client.post("/v1/completions", json=CALL | {"top_p": 7}, headers={"x-request-id": "refused"})
    (line,) = lines_of(json_daemon, "refused")
    assert (line["message"], line["status"]) == ("POST", 400)


@pytest.mark.parametrize(
    ("path", "more", "param", "code"),
    [
        ("/v1/completions", {"top_p": 7}, "top_p", "invalid_request_error"),
        ("/v1/completions", {"temprature": 7}, "temprature", "unknown_parameter"),
        ("/v1/completions", {"model": "other"}, "model", "model_not_found"),
        ("/v1/completions", {"prompt": [5] * 99_999}, "prompt", "context_length_exceeded"),
        ("/v1/messages", {"prompt": None, "messages": "secret"}, "messages", "invalid_request_error"),
        ("/v1/secrets", {}, None, "not_found"),
    ],
)
def test_a_refusal_has_its_reason(
    json_daemon: Daemon, client: httpx.Client, path: str, more: dict[str, Any], param: str | None, code: str
) -> None:
    """The field and the code, never the message, which may quote the client."""
    number = f"reason-{param}-{code}"
    answer = client.post(path, json=CALL | more, headers={"x-request-id": number})
    (line,) = lines_of(json_daemon, number)
    assert (line["status"], line.get("param"), line["code"]) == (answer.status_code, param, code)
    assert "secret" not in json.dumps({name: line[name] for name in line if name != "path"})


def test_probes_have_no_lines(json_daemon: Daemon, client: httpx.Client) -> None:
    """Operation routes are at debug, also with a wrong method."""
    for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/load", "/dashboard", "/dashboard/state", "/"):
        client.get(path, headers={"x-request-id": "probe"})
        client.post(path, headers={"x-request-id": "probe"})
    client.get("/v1/models", headers={"x-request-id": "asked"})
    assert [line["path"] for line in lines_of(json_daemon, "asked")] == ["/v1/models"]
    assert "probe" not in json_daemon.log


def test_no_line_holds_text(json_daemon: Daemon, client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=CALL, headers={"x-request-id": "quiet"}).json()
    lines_of(json_daemon, "quiet")
    for text in ("secret words", answer["choices"][0]["text"]):
        assert text not in json_daemon.log


def test_a_line_as_text_can_be_split_at_its_spaces(measured_seat: Daemon, one_seat_http: httpx.Client) -> None:
    """Values with spaces or quotes, which come from clients, are quoted."""
    # A requested shape always drafts.
    call = CALL | {"speculation": {"num_drafts": 2, "draft_length": 3}}
    one_seat_http.post("/v1/completions", json=call, headers={"x-request-id": 'a b" finish_reason=stop'})
    quoted = re.escape(r'id="a b\" finish_reason=stop" path=')
    line = wait_until(lambda: re.search(rf"INFO request {quoted}.*", measured_seat.log), "no line about the request")[0]
    assert re.search(r" answer_tokens=20 finish_reason=length .*speedup=[0-9.]+ rule=bv_race$", line)
