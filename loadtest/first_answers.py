"""`python -m loadtest.first_answers`: the speedups that answers report, next to measured ones.

Are they true in ordinary use, from the first answer on?

Three fresh daemons on the embedded pair take turns, and only one runs at a time: one serves default
answers alone, one answers with seeds, one plain answers. The mean of the reports, weighted by the
answers' times, is compared with the true ratio: the speed of answers over the speed of plain
answers. `--busy N` adds N processes that compute; `--cold` gives each daemon an empty cache of
compiled kernels.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from loadtest.daemon import Daemon, in_folder, pausable_daemon
from loadtest.results import add_output_argument, document, table, write

_TEXTS = (
    "I would like to book a table for two tonight.",
    "Hi! What do you do on weekends?",
    "I want a large latte with oat milk please.",
    "Can you find me a cheap hotel in London?",
    "Do you like music?",
)
_ARMS = ("default", "seeded", "plain")
_NUM_FIRST = 4
"""Answers at the beginning whose reports are not compared."""
_BUSY = "while True: pass"
_IDLE_S = 0.2
"""Seconds between an answer and the next turn."""


class TimedChat(NamedTuple):
    """An answer's figures."""

    tokens: int
    milliseconds: float
    speedup: float | None
    has_drafts: bool


class Client:
    """Asks for one chat after another."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._http = httpx.Client(base_url=daemon.url, timeout=600, trust_env=False)
        self._number = 0

    def ask_alone(self, arm: str) -> TimedChat:
        """Let the paused daemon answer and be idle for a moment, and pause it again.

        Daemons measure plain steps while they are idle, not beside the answers of other daemons.
        """
        self._daemon.resume()
        answer = self.ask(arm)
        time.sleep(_IDLE_S)
        self._daemon.pause()
        return answer

    def ask(self, arm: str) -> TimedChat:
        """Return an answer of an arm: `default`, `seeded` or `plain`."""
        text = _TEXTS[self._number % len(_TEXTS)] + " " * (self._number // len(_TEXTS) % 8)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 60}
        if arm == "seeded":
            body["seed"] = self._number
        if arm == "plain":
            body["speculation"] = {"enabled": False}
        self._number += 1
        answer = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        metrics = answer["metrics"]
        counted = metrics["speculative_decoding"]
        speedup = None if counted is None else counted["speedup"]
        has_drafts = counted is not None and counted["num_spec_steps"] > 0
        return TimedChat(answer["usage"]["completion_tokens"], metrics["generation_time_ms"], speedup, has_drafts)


def rate(answers: Sequence[TimedChat]) -> float:
    """Return tokens per millisecond."""
    return sum(answer.tokens for answer in answers) / sum(answer.milliseconds for answer in answers)


def start(arguments: Sequence[str], prefix: Sequence[str], count: int, is_cold: bool) -> dict[str, list[TimedChat]]:
    """Return answers of fresh daemons, each of which serves one arm."""
    answers: dict[str, list[TimedChat]] = {arm: [] for arm in _ARMS}
    order = random.Random(0)
    with ExitStack() as stack:
        clients = {}
        for arm in _ARMS:
            command = prefix
            if is_cold:
                folder = stack.enter_context(TemporaryDirectory())
                command = ["env", *prefix[1:], f"NUMBA_CACHE_DIR={folder}"]
            daemon = stack.enter_context(pausable_daemon(arguments, command))
            daemon.pause()
            clients[arm] = Client(daemon)
        for _ in range(count):
            for arm in order.sample(_ARMS, len(_ARMS)):
                answers[arm].append(clients[arm].ask_alone(arm))
    return answers


def compared(starts: Sequence[dict[str, list[TimedChat]]], arm: str) -> dict[str, Any]:
    """Return the reports of an arm's answers and the true ratio, over all starts."""
    answers: list[TimedChat] = []
    plain: list[TimedChat] = []
    for found in starts:
        answers += found[arm][_NUM_FIRST:]
        plain += found["plain"][_NUM_FIRST:]
    reporting = [answer for answer in answers if answer.speedup is not None]
    reports = [answer.speedup or 0.0 for answer in reporting]
    weights = [answer.milliseconds for answer in reporting]
    true = rate(answers) / rate(plain)
    return {
        "arm": arm,
        "with_drafts": sum(answer.has_drafts for answer in answers) / len(answers),
        "median": round(statistics.median(reports), 3) if reports else None,
        "mean": round(statistics.fmean(reports, weights), 3) if reports else None,
        "true": round(true, 3),
        "mean_over_true": round(statistics.fmean(reports, weights) / true, 3) if reports else None,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each version and arm."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.first_answers", description=__doc__)
    parser.add_argument("--starts", type=int, default=4, help="starts of the three daemons (default 4)")
    parser.add_argument("--answers", type=int, default=40, help="answers of each daemon (default 40)")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile (default 0)")
    parser.add_argument("--cold", action="store_true", help="start with an empty cache of compiled kernels")
    parser.add_argument("--other", type=Path, help="checkout of another version, to alternate with")
    parser.add_argument("--serve-args", default="", help="further flags of the daemons")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    if options.answers <= _NUM_FIRST:
        parser.error(f"--answers must be more than {_NUM_FIRST}")
    versions: dict[str, list[str]] = {"this": []} | ({"other": in_folder(options.other)} if options.other else {})
    starts: dict[str, list[dict[str, list[TimedChat]]]] = {version: [] for version in versions}
    with ExitStack() as stack:
        for _ in range(options.busy):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(busy.kill)
        for _ in tqdm(range(options.starts), unit="start"):
            for version, prefix in versions.items():
                starts[version].append(start(options.serve_args.split(), prefix, options.answers, options.cold))
    rows = [
        {"version": version, **compared(found, arm)}
        for version, found in starts.items()
        for arm in _ARMS
        if arm != "plain"
    ]
    first = {
        version: {arm: [[chat.speedup for chat in one[arm][:10]] for one in found] for arm in _ARMS}
        for version, found in starts.items()
    }
    names = ["starts", "answers", "busy", "cold"]
    what = "speedups reported by the first answers of a daemon, and measured"
    result = document(what, options, names, rows=rows, first_reports=first)
    print(markdown(rows))
    write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
