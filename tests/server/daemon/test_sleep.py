"""A daemon whose idle engine sleeps (`--sleep-idle-seconds`).

Orders of events that need a slower engine are in `serving/test_idle_sleep.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.grid import grid, slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream, texts
from tests.server.scraped_metrics import samples_of
from tests.server.tiny_models import TinyModels

PATH = "/v1/completions"
CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 30, "seed": 4, "ignore_eos": True}
Start = Callable[[], Daemon]


@pytest.fixture(scope="module")
@slow_fixture
def start(daemons: Daemons, models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts the daemon, or returns the one that runs. Its engine sleeps after a second."""
    folder = tmp_path_factory.mktemp("sleeping")
    shutil.copytree(models.target, folder / "target")
    words = [str(folder / "target"), "--draft-model", str(models.draft), "--served-model-name", MODEL]
    words += ["--num-threads", "1", "--sleep-idle-seconds", "1", "--sse-keep-alive-interval", "0.05"]
    words += ["--no-calibrate"]
    return lambda: daemons.get(*words)


@pytest.fixture
def sleeping(start: Start) -> Daemon:
    """The daemon, asleep."""
    daemon = start()
    with daemon.client() as client:
        wait_until(lambda: is_asleep(client), "the engine does not sleep")
    return daemon


@pytest.fixture
def http(sleeping: Daemon) -> Iterator[httpx.Client]:
    with sleeping.client() as client:
        yield client


def is_asleep(client: httpx.Client) -> bool:
    return client.get("/health").json().get("engine") == "asleep"


def value(client: httpx.Client, name: str) -> float:
    """The sum of the samples of a metric."""
    return sum(s.value for s in samples_of(client.get("/metrics").text) if s.name == f"polydraft_{name}")


def counts(client: httpx.Client) -> dict[str, float]:
    """All samples that may only grow."""
    return {
        f"{s.name} {s.labels}": s.value
        for s in samples_of(client.get("/metrics").text)
        if s.name.endswith(("_total", "_sum", "_count", "_bucket")) and "optimal_acceptance_gap_sum" not in s.name
    }


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, and of theirs."""
    below: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            below += [child, *descendants(child)]
    return below


def memory_mib(daemon: Daemon) -> float:
    """Resident memory of the daemon and all its processes."""
    total_kib = 0
    for pid in [daemon.process.pid, *descendants(daemon.process.pid)]:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


def whole_text(client: httpx.Client, **more: Any) -> str:
    answer = client.post(PATH, json={**CALL, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_request_after_a_sleep_has_the_answer_from_before(start: Start) -> None:
    """Nothing of the engine is left; the stream that ends the sleep gets comments."""
    daemon = start()
    with daemon.client() as client:
        before = whole_text(client)
        assert whole_text(client, ignore_eos=False, structured_outputs={"choice": ["left"]}) == "left", (
            "a grammar process is started"
        )
        awake_mib = memory_mib(daemon)
        counted = counts(client)
        wait_until(lambda: is_asleep(client), "the engine does not sleep")
        assert descendants(daemon.process.pid) == []
        asleep_mib = memory_mib(daemon)
        assert asleep_mib < awake_mib / 2
        with open_stream(client, PATH, **CALL) as stream:
            stream.wait_for_comment()
            assert client.get("/load").json() == {"server_load": 1, "running": 0, "waiting": 1}
            assert stream.read()[-1]["choices"][0]["finish_reason"] == "length"
            assert stream.is_done
        assert texts(stream.chunks) == {0: before}
        assert memory_mib(daemon) > 2 * asleep_mib
        assert client.get("/health").json() == {"status": "ok"}
        later = counts(client)
        assert not [name for name, count in counted.items() if later[name] < count]
        assert value(client, "engine_wakes_total") == 1
    assert "engine asleep after 1 s without a request" in daemon.log
    assert "engine awake after" in daemon.log
    assert daemon.log.count("serving tiny") == 1
    assert daemon.log.count("starting the engine") == 1


def test_all_but_answers_is_served_during_a_sleep(http: httpx.Client) -> None:
    """Probes, models, tokens, metrics, pages and refusals, none of which wakes the engine."""
    num_wakes = value(http, "engine_wakes_total")
    assert http.get("/health").json() == {"status": "ok", "engine": "asleep"}
    assert http.get("/ready").json() == {"status": "ready", "engine": "asleep"}
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert http.post("/tokenize", json={"model": MODEL, "prompt": "Once"}).json()["count"] > 0
    assert http.get("/dashboard").status_code == 200
    assert http.get("/dashboard/state").json()["status"] == "asleep"
    assert http.post(PATH, json={**CALL, "temperature": -1}).status_code == 400
    assert http.post(PATH, json={**CALL, "prompt": list(range(5, 50)) * 100}).status_code == 400
    assert http.post(PATH, json={**CALL, "model": "another"}).status_code == 404
    assert value(http, "engine_sleeping") == value(http, "engine_up") == 1
    assert value(http, "engine_process_resident_memory_bytes") == 0
    assert value(http, "engine_wakes_total") == num_wakes
    assert is_asleep(http)


@pytest.mark.slow  # serving/test_idle_sleep.py has it with a process that stands in for the engine
def test_clients_together_wake_the_engine_once(sleeping: Daemon, http: httpx.Client) -> None:
    """A client that leaves changes no other answer."""
    num_wakes = value(http, "engine_wakes_total")
    with ThreadPoolExecutor(6) as pool, sleeping.client() as other:
        asked = [pool.submit(whole_text, http) for _ in range(4)]
        by_grammar = pool.submit(whole_text, http, ignore_eos=False, structured_outputs={"choice": ["left"]})
        with open_stream(other, PATH, **CALL) as stream:
            stream.wait_for_comment()
        assert len({future.result() for future in asked}) == 1
        assert by_grammar.result() == "left"
    wait_until(lambda: http.get("/load").json()["server_load"] == 0, "a request stays")
    assert value(http, "engine_wakes_total") == num_wakes + 1
    assert value(http, "request_queue_time_seconds_sum") > 1, "waiting for the engine is time in the queue"


@pytest.mark.slow  # serving/test_idle_sleep.py has it with a process that stands in for the engine
def test_removed_model_is_an_error_for_all_waiting_requests(sleeping: Daemon, http: httpx.Client) -> None:
    """503, an error as a stream's last event, and exit code 1."""
    folder = Path(next(word for word in sleeping.process.args if str(word).endswith("/target")))  # type: ignore[union-attr]
    (folder / "model.safetensors").rename(folder / "elsewhere")
    try:
        with ThreadPoolExecutor(2) as pool, sleeping.client() as other:
            whole = pool.submit(http.post, PATH, json=CALL)
            with open_stream(other, PATH, **CALL) as stream:
                error = stream.read()[-1]["error"]
                assert stream.is_done
            assert whole.result().status_code == 503
            assert whole.result().json()["error"] == error
            assert "could not be loaded again" in error["message"]
        assert sleeping.exit_code() == 1
        assert "safetensors" in sleeping.log
    finally:
        (folder / "elsewhere").rename(folder / "model.safetensors")


@pytest.mark.parametrize("state", grid(["asleep", "waking"], ["waking"]))
def test_sigterm_ends_a_daemon_that_is_not_awake_at_once(sleeping: Daemon, http: httpx.Client, state: str) -> None:
    """A stream that waits for the engine ends with an error."""
    before = len(sleeping.log)
    if state == "asleep":
        sleeping.terminate()
    else:
        with open_stream(http, PATH, **CALL) as stream:
            stream.wait_for_comment()
            wait_until(lambda: len(descendants(sleeping.process.pid)) > 0, "no engine is started")
            sleeping.terminate()
            assert "shutting down" in stream.read()[-1]["error"]["message"]
            assert stream.is_done
    assert sleeping.exit_code() == 0
    assert "engine awake" not in sleeping.log[before:], "it waited until the engine was loaded"
