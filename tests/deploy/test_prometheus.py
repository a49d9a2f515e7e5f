"""The dashboard and the alerts on a real Prometheus that scrapes a real daemon under traffic."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.prometheus_process import DEPLOY, Prometheus, program, prometheus
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.tiny_models import write_pair

DASHBOARD = json.loads((DEPLOY.parent / "grafana/dashboards/polydraft.json").read_text())
# Prometheus may have to be fetched, and takes seconds to gather samples.
pytestmark = pytest.mark.slow
WINDOW = "15s"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# What the dashboard that vLLM publishes asks for.
VLLM = [
    *(
        f"histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket[{WINDOW}])))"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ),
    *(f"rate(vllm:{name}_total[{WINDOW}])" for name in ("prompt_tokens", "generation_tokens", "request_success")),
    *(f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    *(
        f"rate(vllm:request_{name}_sum[{WINDOW}])"
        for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds")
    ),
    *(
        f"sum by (le) (increase(vllm:request_{name}_bucket[{WINDOW}]))"
        for name in ("prompt_tokens", "generation_tokens", "max_num_generation_tokens")
    ),
]


class Traffic:
    """Requests of several types in several threads, until it is stopped."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(5)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        kinds: list[dict[str, Any]] = [
            {"speculation": {"drafters": ["model", "prompt_lookup"]}},
            {"speculation": {"enabled": False}},
            {"temperature": 7},
            {"prediction": {"type": "content", "content": "abc def"}},
            {"n": 4},
        ]
        with self._daemon.client() as client:
            while not self._is_over.is_set():
                for kind in kinds[number:] + kinds[:number]:
                    call = {"model": MODEL, "prompt": [1, *range(5, 45)], "max_tokens": 24, "ignore_eos": True}
                    client.post("/v1/completions", json=call | kind)

    def stop(self) -> None:
        """End it."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two seats and one place to wait."""
    folder = tmp_path_factory.mktemp("prometheus-daemon")
    models = write_pair(folder)
    pool = Daemons(folder)
    limits = ["--max-num-seqs", "2", "--max-num-queued-reqs", "4", "--spec-observed-share", "1"]
    limits += ["--spec-shape", "fixed:2,3"]
    names = ["--draft-model", str(models.draft), "--served-model-name", MODEL, "--num-threads", "1"]
    yield pool.get(str(models.target), *names, *limits)
    pool.stop()


@pytest.fixture(scope="module")
def watching(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, which has scraped the daemon under traffic that goes on."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), daemon.port, "500ms") as server:
        traffic = Traffic(daemon)
        try:
            scrapes = f"count_over_time(up[{WINDOW}])"
            wait_until(lambda: server.values(scrapes) and server.values(scrapes)[0] > 10, "nothing is scraped")
            yield server
        finally:
            traffic.stop()


def expressions(panel: dict[str, Any]) -> list[str]:
    """A panel's expressions with Grafana's variables filled in."""
    asked = [target["expr"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", WINDOW).replace("$model", ".*") for text in asked]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_no_panel_is_empty(watching: Prometheus, panel: dict[str, Any]) -> None:
    """Every expression gives at least one number."""
    for expression in expressions(panel):
        wait_until(
            lambda expression=expression: any(map(math.isfinite, watching.values(expression))),  # type: ignore[misc]
            f"{expression} gives nothing",
        )


@pytest.mark.parametrize("expression", VLLM)
def test_a_dashboard_made_for_vllm_is_not_empty(watching: Prometheus, expression: str) -> None:
    """The same traffic under vLLM's names."""
    wait_until(lambda: any(map(math.isfinite, watching.values(expression))), f"{expression} gives nothing")


def test_shares_are_shares(watching: Prometheus) -> None:
    """Shapes add up to one, and no position accepts more than came to it."""
    by_title = {panel["title"]: panel for panel in PANELS}
    shapes = watching.values(expressions(by_title["Share of steps by shape"])[0])
    assert sum(shapes) == pytest.approx(1)
    (plain,) = watching.values(expressions(by_title["Share of plain steps"])[0])
    assert 0 < plain < 1
    assert all(0 <= share <= 1 for share in watching.values(expressions(by_title["Acceptance by position"])[0]))


def test_no_quantile_of_acceptance_length_is_below_one(watching: Prometheus) -> None:
    """One is the least possible; the traffic has answers at that end."""
    (panel,) = [panel for panel in PANELS if panel["title"].startswith("Acceptance length")]
    values = [value for expression in expressions(panel) for value in watching.values(expression)]
    assert len(values) == 3
    assert min(values) >= 0.999


def test_the_alerts_can_be_evaluated(watching: Prometheus) -> None:
    """Prometheus has loaded them all and finds no fault in any."""

    def rules() -> list[dict[str, Any]]:
        return list(watching.get("rules")["groups"][0]["rules"])

    wait_until(lambda: all(rule["lastEvaluation"] > "0002" for rule in rules()), "the alerts are not evaluated")
    assert len(rules()) == 13
    assert {rule["health"] for rule in rules()} == {"ok"}, rules()


def test_alerts_fire_on_trouble_and_only_then() -> None:
    """promtool's own unit tests of the rules."""
    command = [program("promtool"), "test", "rules", "alerts_test.yml"]
    run = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_names_are_as_prometheus_wants_them(daemon: Daemon, watching: Prometheus) -> None:
    """promtool's lint of the exposition under traffic; vLLM's names are vLLM's."""
    exposition = httpx.get(f"{daemon.url}/metrics").text
    own = "".join(line + "\n" for line in exposition.splitlines() if "vllm:" not in line)
    command = [program("promtool"), "check", "metrics"]
    run = subprocess.run(command, input=own, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_deleted_metric_would_be_noticed(watching: Prometheus) -> None:
    """The question that every panel is asked has another answer for a metric that is not there."""
    assert watching.values(f"sum(rate(polydraft_no_such_metric_total[{WINDOW}]))") == []
