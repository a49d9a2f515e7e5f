"""Faults of a daemon: its engine, clients, stops under load, memory, disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.grid import grid, slow_fixture
from tests.server.daemon_process import MODEL, ROOT, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream
from tests.server.scraped_metrics import check, scraped

CALL: dict[str, Any] = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 400, "ignore_eos": True}
FEW_BLOCKS = "--no-calibrate --max-model-len 512 --num-gpu-blocks-override 56 --max-num-seqs 8".split()


def ending(daemon: Daemon, streams: bool, **more: Any) -> str:
    """Return the end of a request: `whole`, `error`, or a fault of its end."""
    with daemon.client() as client:
        try:
            answer = client.post("/v1/completions", json={**CALL, "stream": streams, **more})
        except httpx.TransportError as error:
            return f"lost: {type(error).__name__}"
    if answer.status_code != 200:
        return "error" if "error" in answer.json() else f"no error in {answer.text}"
    if not streams:
        return "whole"
    *_, last, done = answer.text.removesuffix("\n\n").split("\n\n")
    if done != "data: [DONE]":
        return f"lost: ends with {done!r}"
    return "error" if "error" in json.loads(last.removeprefix("data: ")) else "whole"


def together(daemon: Daemon, count: int, **more: Any) -> tuple[list[threading.Thread], list[str]]:
    """Start requests at once, half of them streams; return threads and their ends."""
    ends: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: ends.append(ending(daemon, i % 2 == 0, **more)))  # type: ignore[misc]
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads, ends


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@pytest.mark.slow  # test_stopping.py has one that is killed while it decodes
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_killed_with_requests_open(daemons: Daemons, pair_arguments: list[str], phase: str) -> None:
    """Every request gets an error, as an answer or as a stream's last event; the daemon exits 1."""
    # Eight prompt tokens a step: reading prompts of two thousand takes hundreds of steps.
    caps = "--max-copied-tokens 0 --max-num-drafts 1 --max-draft-length 1 --num-drafts 1 --draft-length 1".split()
    few = [*caps, "--max-num-batched-tokens", "8"] if phase == "prefill" else []
    daemon = daemons.get(*pair_arguments, "--no-calibrate", *few)
    more = {"prompt": list(range(5, 45)) * 48, "max_tokens": 9} if phase == "prefill" else {"max_tokens": 1900, "n": 4}
    threads, ends = together(daemon, 4, **more)
    with daemon.client() as client:
        wait_until(lambda: client.get("/load").json()["running"] >= 1, "nothing runs")
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    joined(threads)
    assert Counter(ends) == {"error": 4}
    assert daemon.exit_code() == 1
    assert "the engine process ended unexpectedly" in daemon.log


@pytest.mark.slow
def test_an_engine_killed_while_it_loads(daemons: Daemons, pair_arguments: list[str]) -> None:
    daemon = daemons.start(*pair_arguments)
    with daemon.client() as client:
        wait_until(lambda: daemon.listens(client), "it does not listen")
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    assert daemon.exit_code() == 1
    assert "the engine process ended unexpectedly" in daemon.log


@pytest.mark.slow
@pytest.mark.parametrize("when_s", grid([None, 0.0, 0.5, 1.0, 3.0], [None, 1.0]))
def test_ctrl_c_at_any_moment_has_no_traceback(
    daemons: Daemons, pair_arguments: list[str], when_s: float | None
) -> None:
    """While modules are imported (None), and after the line that the engine starts."""
    daemon = daemons.start(*pair_arguments)
    if when_s is None:
        # Before it imports anything, Python itself prints a traceback.
        maps = Path(f"/proc/{daemon.process.pid}/maps")
        wait_until(lambda: "pydantic_core" in maps.read_text(), "nothing is imported")
    else:
        wait_until(lambda: "starting the engine" in daemon.log, "the engine is not started")
        threading.Event().wait(when_s)
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.exit_code() in (0, 130, -signal.SIGINT)
    assert "Traceback" not in daemon.log


@pytest.mark.slow
def test_engine_without_a_launch_exits_quietly() -> None:
    """Its parent was ended between starting it and saying what to load."""
    run = subprocess.run([sys.executable, "-m", "engine"], input=b"", capture_output=True, check=False, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_five_hundred_clients_leave_at_once(daemon: Daemon) -> None:
    """In the middle of their streams, or in the queue."""

    async def leave(client: httpx.AsyncClient) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=CALL | {"stream": True}) as answer:
                async for _ in answer.aiter_text():
                    return
        except httpx.HTTPError:
            return

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(base_url=daemon.url, limits=limits, timeout=5, verify=False) as client:
            asked = [asyncio.create_task(leave(client)) for _ in range(500)]
            await asyncio.sleep(2)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(crowd())
    with daemon.client() as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == 0, "requests of those who left stay")
        wait_until(lambda: client.get("/load").json()["running"] == 0, "the engine goes on for nobody")
        assert ending(daemon, streams=True) == "whole"
        used = [line for line in client.get("/metrics").text.splitlines() if "kv_cache_usage_ratio{" in line]
        assert used[0].endswith(" 0.0")


@pytest.fixture(scope="module")
@slow_fixture
def crowded(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon with few blocks, and hardly any time to end."""
    return daemons.get(*pair_arguments, *FEW_BLOCKS, "--shutdown-timeout", "0.01", "--calibrate")


def test_blocks_that_run_out_are_shared_in_turns(crowded: Daemon) -> None:
    """Eight requests in a cache for little more than one of the longest."""
    daemon = crowded
    threads, ends = together(daemon, 8)
    joined(threads)
    assert Counter(ends) == {"whole": 8}
    with daemon.client() as client:
        assert num_preemptions(client) > 0


def num_preemptions(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (preempted,) = [line for line in lines if line.startswith("polydraft_num_preemptions")]
    return float(preempted.split()[-1])


def test_counts_agree_if_requests_are_computed_again(crowded: Daemon) -> None:
    """Tokens, drafts and prompts of preempted requests count once."""
    with crowded.client() as client, ThreadPoolExecutor(4) as pool:
        before, preempted = scraped(client), num_preemptions(client)
        calls = [{**CALL, "max_tokens": 300, "ignore_eos": True, "seed": seed} for seed in range(4)]
        answers = list(pool.map(lambda call: client.post("/v1/completions", json=call).json(), calls))
        assert num_preemptions(client) > preempted
        check(client, before, answers)


@pytest.mark.slow
def test_sigterm_with_too_little_time_ends_streams_with_an_error(crowded: Daemon) -> None:
    threads, ends = together(crowded, 8)
    with crowded.client() as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == 8, "the load does not come")
    crowded.terminate()
    joined(threads)
    assert set(ends) <= {"whole", "error"}, Counter(ends)
    assert "error" in ends
    assert crowded.exit_code() == 0


@pytest.mark.slow  # test_stopping.py has a drain of one stream
def test_sigterm_under_load_completes_all_answers(daemons: Daemons, pair_arguments: list[str]) -> None:
    """Accepted requests are finished, later ones are refused, and the exit code is 0."""
    daemon = daemons.get(*pair_arguments, *FEW_BLOCKS)
    threads, ends = together(daemon, 24)
    with daemon.client() as client:
        wait_until(lambda: client.get("/load").json()["server_load"] >= 20, "the load does not come")
        daemon.terminate()
        wait_until(lambda: client.get("/ready").status_code == 503, "it does not drain")
        assert client.post("/v1/completions", json=CALL).status_code == 503
    joined(threads)
    assert set(ends) <= {"whole", "error"}, Counter(ends)
    assert ends.count("whole") >= 20
    assert daemon.exit_code() == 0


@pytest.mark.slow
def test_malformed_requests_do_not_disturb_a_stream(http: httpx.Client, daemon: Daemon) -> None:
    """Two thousand of them during a stream: each gets 400, the stream is complete."""
    bad = [b"", b"{", b"[]", b'{"model": 5}', b'{"model": "tiny", "prompt": {}}', b"\xff" * 100, b'{"a":' * 500]
    with open_stream(http, "/v1/completions", **CALL | {"max_tokens": 1900}) as stream, daemon.client() as other:
        next(stream)
        statuses = Counter(
            other.post(
                "/v1/completions", content=bad[i % len(bad)], headers={"content-type": "application/json"}
            ).status_code
            for i in range(2000)
        )
        assert statuses == {400: 2000}
        assert stream.read()[-1]["choices"][0]["finish_reason"] == "length"
