"""Replicas on Ray Serve: their choice, and requests of a killed one."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from ray.exceptions import ActorDiedError
from starlette.requests import Request
from starlette.responses import StreamingResponse

from deploy.ray_app import SUPERVISED, Front, Options, Replica, daemon_arguments, rest_of
from deploy.ray_call import ReplicaCall, prefix_of, repeatable
from deploy.ray_metrics import merged
from deploy.ray_router import PrefixRouter
from server.settings.flags import parse_flags
from tests.deploy.ray_load import NUM_PREFIXES
from tests.server.daemon_process import ROOT
from tests.server.tiny_models import write_pair

pytestmark = pytest.mark.slow


def chat(*turns: tuple[str, str], **more: Any) -> bytes:
    """A body with these messages."""
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **more}).encode()


def test_turns_of_a_conversation_have_one_prefix() -> None:
    first = [("system", "be kind"), ("user", "hello")]
    assert prefix_of(chat(*first)) == prefix_of(chat(*first, ("assistant", "hi"), ("user", "and?"), temperature=0))
    assert prefix_of(chat(*first)) != prefix_of(chat(("system", "be kind"), ("user", "good day")))
    assert prefix_of(chat(*first, prompt_cache_key="mine")) == prefix_of(b'{"prompt_cache_key": "mine"}')
    assert prefix_of(chat(*first, prompt_cache_key="mine")) != prefix_of(chat(*first, prompt_cache_key="yours"))
    assert prefix_of(b'{"prompt": "a"}') != prefix_of(b'{"prompt": "b"}')


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"not json", b'{"messages": 5}', b'{"prompt": [[1, 2], [3]]}', b"\xff"),
        *(b'{"a":' * 5000, b'{"prompt_cache_key": "\\ud800"}', b'{"prompt": "\\ud800"}', b'{"prompt_cache_key": [{}]}'),
    ],
)
def test_every_body_is_routed(body: bytes) -> None:
    """An error of the router would leave the request waiting indefinitely."""
    assert sorted(order(*router(2), prefix_of(body))) == ["r0", "r1"]


def test_a_request_that_may_be_sent_again_has_a_key() -> None:
    """A stream is never sent again, and a client's key stays."""
    headers = [("accept", "*/*")]
    keys = {repeatable(headers, body)[-1] for body in (b"", b"{}", b'{"stream": false}', b'"stream"', b'{"stream"')}
    assert {name for name, _ in keys} == {"idempotency-key"}
    assert len(keys) == 5
    assert repeatable(headers, chat(stream=True)) == headers
    assert repeatable([("idempotency-key", "mine")], b"{}") == [("idempotency-key", "mine")]


def router(count: int, **open_requests: int) -> tuple[Any, list[Any]]:
    """Return a router with `count` replicas, some of which have open requests."""
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state(most_ahead=2)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"r{i}")) for i in range(count)]
    for replica in replicas:
        for _ in range(open_requests.get(replica.replica_id.unique_id, 0)):
            made.on_request_routed(None, replica.replica_id, None)
    return made, replicas


def order(made: Any, replicas: list[Any], prefix: str) -> list[str]:
    """The replicas in the order in which they are tried."""
    pending = SimpleNamespace(args=[ReplicaCall("POST", "/", [], b"", prefix)])
    ranks = asyncio.run(made.choose_replicas(replicas, pending))
    return [replica.replica_id.unique_id for rank in ranks for replica in rank]


def test_a_prefix_stays_with_its_replica() -> None:
    """Prefixes are spread; one keeps its replica when others come, unless the new one is its."""
    made, replicas = router(4)
    preferred = {str(i): order(made, replicas, str(i))[0] for i in range(200)}
    counts = [list(preferred.values()).count(name) for name in ("r0", "r1", "r2", "r3")]
    assert min(counts) > 25
    more, five = router(5)
    moved = [
        order(more, five, prefix)[0] for prefix, before in preferred.items() if order(more, five, prefix)[0] != before
    ]
    assert set(moved) == {"r4"}
    assert len(moved) < 80


def test_busy_replica_is_relieved() -> None:
    """Two requests ahead of the idlest it gets no more; afterwards it is preferred again."""
    made, replicas = router(3)
    favourite = order(made, replicas, "x")[0]
    busy, replicas = router(3, **{favourite: 2})
    assert order(busy, replicas, "x")[0] == favourite
    busy, replicas = router(3, **{favourite: 3})
    assert order(busy, replicas, "x")[-1] == favourite
    busy.on_request_completed(SimpleNamespace(unique_id=favourite), "")
    assert order(busy, replicas, "x")[0] == favourite
    idle, replicas = router(3, r0=1, r1=2)
    assert order(idle, replicas, "") == ["r2", "r0", "r1"]
    assert asyncio.run(idle.choose_replicas([], None)) == []


def test_a_daemon_that_cannot_start_is_noticed_at_once() -> None:
    """With its exit code, however long a start may take."""

    class Outside(Replica):
        """Ray waits for the end of a replica; nothing does so here."""

        def __del__(self) -> None:  # type: ignore[override]
            assert self._process.stdin is not None
            self._process.stdin.close()

    with pytest.raises(RuntimeError, match="ended with 2"):
        Outside(["--no-such-flag"], 600)


def test_a_daemon_ends_when_its_replica_is_gone() -> None:
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    command = [*SUPERVISED, sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 7


def test_a_large_body_is_not_read_to_its_end() -> None:
    """It is refused before a replica is asked, in the words of its endpoint."""
    num_read = 0

    async def receive() -> Any:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"", "headers": []}
    front = Front(SimpleNamespace(options=lambda **_: None), 2500)  # type: ignore[arg-type]
    answer = asyncio.run(front(Request(scope, receive)))
    assert (answer.status_code, num_read) == (413, 3)
    assert json.loads(bytes(answer.body))["error"]["type"] == "request_too_large"


def end_of_broken(path: str, *chunks: bytes) -> str:
    """The last chunk of a stream whose replica ends after some chunks."""

    class Broken:
        async def __aiter__(self) -> Any:
            for chunk in chunks[1:]:
                yield chunk
            raise ActorDiedError

        def cancel(self) -> None:
            pass

    async def read() -> list[bytes]:
        return [chunk async for chunk in rest_of(ReplicaCall("POST", path, [], b""), chunks[0], Broken())]

    return asyncio.run(read())[-1].decode()


def test_a_broken_stream_of_responses_goes_on_counting() -> None:
    created = b'event: response.created\ndata: {"sequence_number": 0}\n\n'
    in_progress = b'event: response.in_progress\ndata: {"sequence_number": 1}\n\n'
    last = end_of_broken("/v1/responses", created, in_progress).splitlines()
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["sequence_number"] == 2


def test_a_stream_of_lines_is_passed_on_in_pieces_and_ends_with_an_error_line() -> None:
    assert "the replica ended" in json.loads(end_of_broken("/api/chat", b'{"done":false}\n'))["error"]

    async def lines() -> Any:
        yield 200, [("content-type", "application/x-ndjson")]
        yield b'{"done":false}\n'

    front = Front(SimpleNamespace(options=lambda **_: None), 2500)  # type: ignore[arg-type]
    answer = asyncio.run(front._respond(ReplicaCall("POST", "/api/chat", [], b""), lines()))
    assert isinstance(answer, StreamingResponse)


def test_options_come_from_a_shell_or_from_yaml() -> None:
    assert Options.model_validate({"arguments": "m --draft-model 'a b'", "max_replicas": "3"}).arguments[-1] == "a b"
    assert Options.model_validate({"arguments": ["m"]}).arguments == ["m"]
    with pytest.raises(ValidationError, match="no_such"):
        Options.model_validate({"no_such": 1})


def test_the_metrics_of_replicas_stay_apart() -> None:
    """One page for Prometheus: families once, samples by replica."""
    registry = CollectorRegistry()
    Counter("requests", 'of a "kind"\nor two', ["name"], registry=registry).labels('a "b"\n').inc(3)
    Histogram("wait", "how long", buckets=(1, 2), registry=registry).observe(1.5)
    page = generate_latest(registry).decode()
    both = merged({"r1": page, "r2": page}).decode()
    assert both.count("# TYPE requests_total counter") == both.count("# TYPE wait histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(both)}
    for replica in ("r1", "r2"):
        samples = [one for one in families["requests"].samples if one.labels["replica"] == replica]
        assert [(one.labels["name"], one.value) for one in samples] == [('a "b"\n', 3)]
        buckets = [one for one in families["wait"].samples if one.labels["replica"] == replica]
        assert {one.labels.get("le"): one.value for one in buckets if one.name == "wait_bucket"} == {
            "1.0": 0,
            "2.0": 1,
            "+Inf": 1,
        }
    assert merged({}) == b""


def run_program(name: str, folder: Path) -> dict[str, Any]:
    """Return the output of a program of this folder with a tiny pair.

    On a busy machine replicas get longer than 0.1 s to report their calls, after which Ray would
    send a call elsewhere, and Ray's proxy gets longer than three times 5 s to start. The load is
    reported every second instead of every ten.
    """
    pair = write_pair(folder)
    command = [sys.executable, "-m", f"tests.deploy.{name}", str(pair.target), str(pair.draft)]
    seconds = {
        "QUEUE_LENGTH_RESPONSE_DEADLINE": "10",
        "HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL": "1",
        "PROXY_READY_CHECK_TIMEOUT": "60",
        "PROXY_HEALTH_CHECK_TIMEOUT": "60",
    }
    environment = os.environ | {f"RAY_SERVE_{name}_S": value for name, value in seconds.items()}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return results


def test_a_replica_is_added_under_load_and_taken_away_after_it(tmp_path: Path) -> None:
    """Every request of the time ends whole, also those that the replica had which is taken away."""
    results = run_program("ray_scaling", tmp_path)
    assert results["replicas"] == [1, 2, 1]
    assert set(results["ends"]) == {"whole", "stream"}, results


def test_a_killed_replica_loses_nothing_without_an_error(tmp_path: Path) -> None:
    """Eight clients, two replicas, one killed: every request ends or says why."""
    results = run_program("ray_load", tmp_path)
    assert not [end for end in results["ends"] if end.startswith("lost")], results
    assert sum(results["ends"].values()) == 32
    assert results["ends"]["whole"] + results["ends"]["stream"] >= 24
    assert set(results["after"]) == {"whole", "stream"}
    # A beginning that was read once is in the cache of the replica that gets it again; beginnings
    # go to both replicas.
    assert [cached > 0 for _, cached in results["first"]] == [False] * NUM_PREFIXES
    assert [cached > 0 for _, cached in results["again"]] == [True] * NUM_PREFIXES
    by_replica = collections.Counter(replica for replica, _ in [*results["first"], *results["again"]])
    assert [replica for replica, _ in results["first"]] == [replica for replica, _ in results["again"]]
    assert len(by_replica) == 2
    # The page of metrics has the number of answers of each replica.
    assert results["metrics"] == by_replica


def test_a_replica_uses_the_cores_that_ray_assigns() -> None:
    """One core stays for HTTP; a configured number of threads is used."""
    for options, expected in (({"num_cpus": 4}, 3), ({"num_cpus": 0.5}, 1), ({"arguments": "--num-threads 7"}, 7)):
        words = daemon_arguments(Options.model_validate(options))
        assert parse_flags(words).num_threads == expected
