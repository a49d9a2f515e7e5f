"""Grammars that crash or never end: their request alone gets an error, everybody else goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.strange_grammars import strange_grammar
from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream
from tests.server.good_bodies import CHAT, COMPLETIONS, error_of

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 20}
EMPTY = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": -1e19, "maximum": -1e19}}}
ENDLESS = {"grammar": "start: /x+/ /x+/"}


@pytest.fixture
@slow_fixture
def strict(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon whose grammars have half a second, and whose steps have one."""
    limits = ["--grammar-start-timeout", "0.5", "--stall-timeout", "1"]
    return daemons.get(*pair_arguments, "--no-calibrate", *limits)


@pytest.fixture
def http(strict: Daemon) -> Iterator[httpx.Client]:
    with strict.client() as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_bombs_are_refused_while_a_neighbour_streams(http: httpx.Client, strict: Daemon, stream: bool) -> None:
    """A schema without values and an endless grammar: 400 that names the field."""
    with open_stream(http, COMPLETIONS, **LONG) as neighbour, strict.client() as other:
        next(neighbour)
        error = error_of(other.post(COMPLETIONS, json={**SHORT, "response_format": EMPTY, "stream": stream}), 400)
        assert error["param"] == "response_format"
        assert "Unsatisfiable schema" in error["message"]
        error = error_of(other.post(COMPLETIONS, json={**SHORT, "structured_outputs": ENDLESS, "stream": stream}), 400)
        assert error["param"] == "structured_outputs"
        assert "more than 500 ms" in error["message"]
        assert not neighbour.is_done
        assert neighbour.read()[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_grammar(http: httpx.Client, stream: bool) -> None:
    body = {**SHORT, "structured_outputs": ENDLESS, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json=body, timeout=0.05)
    wait_until(lambda: http.get("/load").json()["server_load"] == 0, "the request stays")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_later_ends_its_request_alone(http: httpx.Client, strict: Daemon, stream: bool) -> None:
    """Its process is killed in the middle of the answer; the neighbour goes on."""
    endless = {**SHORT, "max_tokens": 1500, "min_tokens": 1400, "structured_outputs": {"regex": "[a-z ]+"}}
    with open_stream(http, COMPLETIONS, **LONG) as neighbour, strict.client() as other:
        next(neighbour)
        if stream:
            with open_stream(other, COMPLETIONS, **endless) as answer:
                next(answer)
                kill_grammars(strict)
                error = answer.read()[-1]["error"]
                assert answer.is_done
        else:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(other.post, COMPLETIONS, json=endless)
                wait_until(lambda: http_running(strict) == 2, "the request does not run")
                kill_grammars(strict)
                error = error_of(asked.result(), 503)
                assert asked.result().headers["retry-after"] == "1"
        assert (error["type"], error["code"]) == ("service_unavailable", "grammar_unavailable")
        assert "try again" in error["message"]
        assert neighbour.read()[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rest", "status", "code", "advice"),
    [
        ("T\nT: /[a-c]/ & /[d-f]/", 500, "grammar_dead_end", "no token of this model"),
        (
            '("c" | /x+/ /x+/ "N")',
            400,
            None,
            "more than 50 ms to compute what may follow; make it simpler",
        ),
    ],
)
def test_a_grammar_ends_an_answer(
    http: httpx.Client, stream: bool, rest: str, status: int, code: str | None, advice: str
) -> None:
    """Nothing may follow, or what may follow costs too much."""
    begin = "a good while, " * 8
    grammar = {"grammar": f'start: "{begin}" {rest}'}
    body = {**SHORT, "max_tokens": 200, "bad_words": ["c"], "structured_outputs": grammar}
    if stream:
        with open_stream(http, COMPLETIONS, **body) as answer:
            *chunks, last = answer.read()
            error = last["error"]
            assert answer.is_done
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text
        assert (begin + "x").startswith(text)
    else:
        error = error_of(http.post(COMPLETIONS, json=body), status)
    assert (error["code"], error["type"]) == (code, "server_error" if status == 500 else "invalid_request_error")
    assert advice in error["message"]


def test_clients_take_turns(strict: Daemon) -> None:
    """Another client's schema comes before twenty costly grammars."""
    schema = {**SHORT, "max_tokens": 200, "response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}}
    costly = {**SHORT, "structured_outputs": {"grammar": 'start: /x+/ /x+/ "N"'}}
    many, few = (httpx.AsyncHTTPTransport(local_address=address) for address in ("127.0.0.2", "127.0.0.3"))

    async def calls() -> None:
        url = strict.url + COMPLETIONS
        async with httpx.AsyncClient(transport=many) as much, httpx.AsyncClient(transport=few, timeout=60) as little:
            asked: list[asyncio.Task[httpx.Response]] = []
            for bodies in ([costly] * 20, [schema]):
                asked += [asyncio.create_task(much.post(url, json=body, timeout=60)) for body in bodies]
                while (await little.get(f"{strict.url}/load")).json()["server_load"] < len(asked):
                    await asyncio.sleep(0.01)
            answer = await little.post(url, json=schema)
            assert set(json.loads(answer.json()["choices"][0]["text"])) == {"n", "ok"}
            done = [one.done() for one in asked]
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert not done[-1], "the schema that was sent first is answered first"
            assert sum(done) < 10, "some may have been refused meanwhile"

    asyncio.run(calls())


def http_running(daemon: Daemon) -> int:
    """Requests that run."""
    with daemon.client() as client:
        return int(client.get("/load").json()["running"])


def kill_grammars(daemon: Daemon) -> None:
    """Kill the processes that follow grammars, not the one that starts them."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    of_engine = {child for child, parent in parents.items() if parent == daemon.engine_pid()}
    followers = [child for child, parent in parents.items() if parent in of_engine]
    assert followers
    for child in followers:
        # One whose request is over may end by itself meanwhile.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_fuzzed_grammars_get_an_answer_or_400(http: httpx.Client) -> None:
    """Some of those that `python -m loadtest.pressure grammars` sends."""
    chance = random.Random(1)
    statuses = []
    for _ in range(120):
        body = {**SHORT, "max_tokens": 4, "structured_outputs": strange_grammar(chance)}
        statuses.append(http.post(COMPLETIONS, json=body).status_code)
    assert set(statuses) == {200, 400}
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("leaves", [False, True])
def test_health_reports_a_stalled_engine(http: httpx.Client, strict: Daemon, leaves: bool) -> None:
    """The engine stands still with a request open, then goes on."""
    engine = strict.engine_pid()
    with strict.client() as other, open_stream(http, COMPLETIONS, **LONG) as stream:
        assert other.get("/health").status_code == 200
        next(stream)
        # At once: on a busy machine the answer may be done before much else is.
        os.kill(engine, signal.SIGSTOP)
        try:
            if leaves:
                # Reported steps are read first; after them the engine would seem to be idle.
                time.sleep(0.3)
                stream.response.close()
                wait_until(lambda: other.get("/load").json()["server_load"] == 0, "the request stays")
            wait_until(lambda: other.get("/health").status_code == 503, "/health stays well")
            wait_until(lambda: "no step has completed" in strict.log, "the log says nothing")
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: other.get("/health").status_code == 200, "/health stays ill")
        if not leaves:
            assert stream.read()[-1]["choices"][0]["finish_reason"] == "length"


OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("asked", "is_compact"),
    [
        ({"structured_outputs": {"json": OBJECT}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}}, True),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, True),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": False}}, False),
        ({"structured_outputs": {"json": {**OBJECT, "x-guidance": {"whitespace_flexible": True}}}}, False),
    ],
)
def test_json_has_no_white_space_unless_asked_for(http: httpx.Client, asked: dict[str, Any], is_compact: bool) -> None:
    """At temperature 1 an untrained model would fill the answer with it."""
    body = {**SHORT, "max_tokens": 200, "temperature": 1, "n": 12, "seed": 1, **asked}
    choices = http.post(COMPLETIONS, json=body).json()["choices"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    if is_compact:
        assert len(ended) == 12
        assert all(set(json.loads(text)) == {"n", "ok"} for text in ended)
    assert all(not set(text) & set(" \n\t") for text in ended) == is_compact


def test_options_of_white_space_go_with_json_only(http: httpx.Client) -> None:
    for options in ({"regex": "a", "disable_any_whitespace": True}, {"json": {}, "disable_any_whitespace": "no"}):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "structured_outputs": options}
        response = http.post(CHAT, json=chat)
        assert error_of(response, 400)["param"] == "structured_outputs"
