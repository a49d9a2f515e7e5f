"""Loads two local replicas, kills one, and prints the result of every request as JSON.

A separate program, because Ray leaves threads and processes: python -m tests.deploy.ray_load TARGET
DRAFT
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import ray
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deploy.ray_app import build
from tests.server.daemon_process import MODEL, free_port, wait_until

NUM_CLIENTS, NUM_REQUESTS, NUM_TOKENS = 8, 4, 600
NUM_PREFIXES = 12


def replicas() -> list[str]:
    """Names of the replicas' actors."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in named if "#Replica#" in one["name"]]


def replicas_of(page: list[Metric]) -> set[str]:
    """The replicas that a page of metrics is of."""
    return {sample.labels["replica"] for family in page for sample in family.samples}


def begin(client: httpx.Client, number: int) -> tuple[str, int]:
    """(replica that answered, tokens of the prompt that it had in its cache)."""
    call = {"model": MODEL, "prompt": [1, 5 + number, *range(5, 69)], "max_tokens": 1}
    answer = client.post("/v1/completions", json=call)
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-polydraft-replica"], cached


def ask(client: httpx.Client, number: int) -> str:
    """One request; how it ended."""
    streams = number % 2 == 0
    call: dict[str, Any] = {"model": MODEL, "prompt": f"prompt {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    try:
        answer = client.post("/v1/completions", json=call | {"stream": streams})
    except httpx.TransportError as error:
        return f"lost: {type(error).__name__}"
    if answer.status_code != 200:
        return f"status {answer.status_code}" if "error" in answer.json() else "lost: no error"
    if not streams:
        return "whole" if answer.json()["usage"]["completion_tokens"] == NUM_TOKENS else "lost: too short"
    if '"error"' in answer.text:
        return "error event" if answer.text.endswith("data: [DONE]\n\n") else "lost: no last event"
    return "stream" if '"finish_reason":"length"' in answer.text else "lost: no end"


def start(target: str, draft: str, **options: Any) -> str:
    """Ray and the application on this machine; its address."""
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver="-v" in sys.argv, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": None})
    arguments = [target, "--draft-model", draft, "--served-model-name", MODEL, "--num-threads", "1", "--no-calibrate"]
    serve.run(build({"arguments": arguments, "num_cpus": 1, "drain_timeout_s": 10, **options}), blocking=False)
    return f"http://127.0.0.1:{port}"


def main() -> None:
    """Start, load, kill, count."""
    began = time.monotonic()
    base = start(*sys.argv[1:3], min_replicas=2, max_replicas=2)
    results: dict[str, Any] = {"start_s": time.monotonic() - began, "ends": Counter(), "after": Counter()}
    lock = threading.Lock()

    def load(kind: str, first: int, count: int) -> None:
        with httpx.Client(base_url=base, timeout=300, verify=False) as client:
            for number in range(first, first + count):
                end = ask(client, number)
                with lock:
                    results[kind][end] += 1

    def run(kind: str, count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=load, args=(kind, 101 * i, count)) for i in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    with httpx.Client(base_url=base, timeout=300, verify=False) as client:
        # Equal beginnings reach the same cache for all clients; different ones are spread.
        for kind in ("first", "again"):
            results[kind] = [begin(client, number) for number in range(NUM_PREFIXES)]

        def page_of_both() -> list[Metric]:
            page = list(text_string_to_metric_families(client.get("/metrics").text))
            return page if len(replicas_of(page)) == 2 else []

        # A replica that takes more than a second to answer is left out.
        page = wait_until(page_of_both, "the page never has both replicas")
        requests = [one for family in page for one in family.samples if one.name == "polydraft_request_success_total"]
        results["metrics"] = dict.fromkeys(replicas_of(page), 0.0)
        for sample in requests:
            results["metrics"][sample.labels["replica"]] += sample.value
        threads = run("ends", NUM_REQUESTS)
        wait_until(lambda: sum(results["ends"].values()) >= NUM_CLIENTS, "no request ends")
        # In the middle of the next answers, half of which are streams.
        time.sleep(1)
        before = set(replicas())
        ray.kill(ray.get_actor(sorted(before)[0], namespace="serve"))
        for thread in threads:
            thread.join()
        wait_until(lambda: len(set(replicas())) == 2 and set(replicas()) != before, "no replica takes the place")
        for thread in run("after", 3):
            thread.join()
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
