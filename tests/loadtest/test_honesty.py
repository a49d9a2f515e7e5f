"""Whether reported speedups are compared with what plain reruns show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from loadtest import honesty
from loadtest.client import RunResult, Sample
from loadtest.workload import Prompt

Speedup = Callable[[dict[str, Any]], "dict[str, Any] | None"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(prompts, requests at once) of every run; a daemon whose plain answers take 2 s, the others 1 s."""
    made: list[tuple[int, int]] = []
    serve(monkeypatch, made, lambda _: {"speedup": 2.2})
    return made


def serve(monkeypatch: pytest.MonkeyPatch, made: list[tuple[int, int]], told: Speedup) -> None:
    salts: set[str] = set()

    async def closed_loop(
        url: str, model: str, prompts: Sequence[Prompt], concurrency: int, options: dict[str, Any]
    ) -> RunResult:
        del url, model
        made.append((len(prompts), concurrency))
        assert options["cache_salt"] not in salts, "a run may find in the cache what another has read"
        salts.add(options["cache_salt"])
        plain = options["speculation"] == {"enabled": False}
        sample = Sample(5, 0.1, 2.0 if plain else 1.0, None if plain else told(options["speculation"]))
        # Who is answered last meets another load.
        last = Sample(5, 0.1, 99.0, sample.speculation)
        samples = [sample] * (len(prompts) - concurrency) + [last] * concurrency if concurrency > 1 else [sample]
        return RunResult(1.0, 5, tuple(samples))

    def answer(url: str) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "m"}]}, request=httpx.Request("GET", url))

    monkeypatch.setattr(honesty, "closed_loop", closed_loop)
    monkeypatch.setattr(honesty, "environment", lambda _: {})
    monkeypatch.setattr(httpx, "get", answer)


def test_errors_are_of_what_plain_reruns_show(runs: list[tuple[int, int]]) -> None:
    result = honesty.measure("http://nowhere", [1, 4], 6, 5)
    alone, four = result["cells"]
    assert (alone["concurrency"], four["concurrency"]) == (1, 4)
    for cell in result["cells"]:
        for arm in cell["arms"].values():
            assert arm["error"] == pytest.approx(0.1)
            assert arm["absolute_error"] == pytest.approx({"median": 0.1, "p90": 0.1})
        assert cell["noise_of_two_plain_runs"] == {"median": 0.0, "p90": 0.0}
    assert len(alone["arms"]["adaptive"]["pairs"]) == 6
    assert len(four["arms"]["adaptive"]["pairs"]) == 16, "the last four are not compared"
    assert {run for run in runs if run[1] == 4} == {(20, 4), (1, 4)}


def test_answers_without_drafts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, [], lambda speculation: {"speedup": 2.0} if speculation.get("rule") else None)
    arms = honesty.measure("http://nowhere", [1], 6, 5)["cells"][0]["arms"]
    assert arms["adaptive"] == {"pairs": []}
    assert arms["block 1x5"]["error"] == pytest.approx(0.0)
    spread = {"median": 0.01, "p90": 0.025}
    rows = honesty.markdown(
        {"cells": [{"concurrency": 1, "arms": arms, "noise_of_two_plain_runs": spread}]}
    ).splitlines()
    assert rows[2] == "| 1 | adaptive | 0 answers had drafts | - | - |"
    assert rows[4] == "| 1 | block 1x5 | +0.0% | 0.0% | 0.0% |"
    assert rows[5] == "| 1 | plain beside plain | | 1.0% | 2.5% |"


def test_a_daemon_without_calibration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, [], lambda _: {"speedup": None})
    with pytest.raises(RuntimeError, match="--calibrate"):
        honesty.measure("http://nowhere", [1], 6, 5)
