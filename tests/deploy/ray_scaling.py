"""Adds a replica under load, removes it afterwards, and prints the result of every request as JSON.

A separate program like `ray_load`: python -m tests.deploy.ray_scaling TARGET DRAFT
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from itertools import count
from typing import Any

import httpx
import ray
from ray import serve

from tests.deploy.ray_load import NUM_CLIENTS, NUM_PREFIXES, ask, begin, replicas, start
from tests.server.daemon_process import wait_until
from tests.wrong import instead

PATIENCE_S = 240
LOOK_BACK_S = 11
"""Time over which Ray averages the load; its default is 30 s."""


def looking_back(config: Any, **options: Any) -> Any:
    return config(**options, look_back_period_s=LOOK_BACK_S)


def main() -> None:
    """Ask with eight clients until there are two replicas; stop, and wait until there is one."""
    scaling = {"target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 5}
    with instead("deploy.ray_app", "AutoscalingConfig", looking_back):
        base = start(*sys.argv[1:3], min_replicas=1, max_replicas=2, **scaling)
    results: dict[str, Any] = {"replicas": [len(replicas())], "ends": Counter(), "by_replica": Counter()}
    is_over = threading.Event()
    numbers = count()
    lock = threading.Lock()

    def load() -> None:
        with httpx.Client(base_url=base, timeout=300, verify=False) as client:
            while not is_over.is_set():
                end = ask(client, next(numbers))
                with lock:
                    results["ends"][end] += 1

    threads = [threading.Thread(target=load, daemon=True) for _ in range(NUM_CLIENTS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    wait_until(lambda: len(replicas()) == 2, "no replica is added", PATIENCE_S)
    results["added_s"] = time.monotonic() - began
    with httpx.Client(base_url=base, timeout=300, verify=False) as client:
        beginnings = count()

        def both_answer() -> bool:
            replica, _ = begin(client, next(beginnings) % NUM_PREFIXES)
            results["by_replica"][replica] += 1
            return len(results["by_replica"]) == 2

        wait_until(both_answer, "the new replica answers nothing", PATIENCE_S)
    results["serves_s"] = time.monotonic() - began
    results["replicas"].append(len(replicas()))
    is_over.set()
    for thread in threads:
        thread.join()
    began = time.monotonic()
    wait_until(lambda: len(replicas()) == 1, "no replica is taken away", PATIENCE_S)
    results["taken_s"] = time.monotonic() - began
    results["replicas"].append(len(replicas()))
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
