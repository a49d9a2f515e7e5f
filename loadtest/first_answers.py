"""`python -m loadtest.first_answers`: is the speedup that answers report true in ordinary use, from
the first answer on?

Each start of a daemon on the embedded pair serves default answers alone, then plain ones, then
default ones again; a second start serves the same with seeds. The median of the reports is compared
with the speed of the default answers over that of the plain ones. `--busy N` adds N processes that
compute. `--turns` then serves default, seeded and plain answers in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from loadtest.daemon import in_folder, running_daemon
from loadtest.results import add_output_argument, document, table, write

_TEXTS = (
    "I would like to book a table for two tonight.",
    "Hi! What do you do on weekends?",
    "I want a large latte with oat milk please.",
    "Can you find me a cheap hotel in London?",
    "Do you like music?",
)
_NUM_FIRST = 4
"""Answers at the beginning whose reports are not compared."""
_BUSY = "while True: pass"


class TimedChat(NamedTuple):
    """An answer's figures."""

    tokens: int
    milliseconds: float
    speedup: float | None
    has_drafts: bool


class Client:
    """Asks for one chat after another."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self._number = 0

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
        return TimedChat(
            answer["usage"]["completion_tokens"], metrics["generation_time_ms"], speedup, counted is not None
        )


def rate(answers: Sequence[TimedChat]) -> float:
    """Return tokens per millisecond."""
    return sum(answer.tokens for answer in answers) / sum(answer.milliseconds for answer in answers)


def start(arguments: Sequence[str], prefix: Sequence[str], arm: str, count: int) -> dict[str, Any]:
    """Return the reports of a fresh daemon, and the true ratio."""
    with running_daemon(arguments, prefix) as url:
        client = Client(url)
        first, plain, again = ([client.ask(one) for _ in range(count)] for one in (arm, "plain", arm))
    found: dict[str, Any] = {"arm": arm, "first_reports": [answer.speedup for answer in first[:10]]}
    found["with_drafts"] = sum(answer.has_drafts for answer in first)
    for name, answers in (("before", first[_NUM_FIRST:]), ("after", again)):
        reports = [answer.speedup for answer in answers if answer.speedup is not None]
        true = rate(answers) / rate(plain[_NUM_FIRST:])
        reported = statistics.median(reports) if reports else None
        found[name] = {
            "reported": reported,
            "true": round(true, 3),
            "reported_over_true": None if reported is None else round(reported / true, 3),
        }
    return found


def turns(arguments: Sequence[str], prefix: Sequence[str], count: int) -> dict[str, float]:
    """Return ratios of speeds of answers that take turns on a fresh daemon."""
    order = random.Random(0)
    answers: dict[str, list[TimedChat]] = {"default": [], "seeded": [], "plain": []}
    with running_daemon(arguments, prefix) as url:
        client = Client(url)
        for _ in range(count):
            for arm in order.sample(list(answers), len(answers)):
                answers[arm].append(client.ask(arm))
    speeds = {arm: rate(found) for arm, found in answers.items()}
    ratios = {f"{arm} over plain": speeds[arm] / speeds["plain"] for arm in ("default", "seeded")}
    ratios["default over seeded"] = speeds["default"] / speeds["seeded"]
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row for each start."""
    rows = []
    for found in result["starts"]:
        cells = [
            [found[name][key] for key in ("reported", "true", "reported_over_true")] for name in ("before", "after")
        ]
        rows.append([found["version"], found["arm"], found["with_drafts"], *cells[0], *cells[1]])
    head = ["version", "arm", "with drafts", "reported", "true", "ratio", "reported after", "true", "ratio"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.first_answers", description=__doc__)
    parser.add_argument("--starts", type=int, default=2, help="starts of each arm (default 2)")
    parser.add_argument("--answers", type=int, default=40, help="answers of each kind (default 40)")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile (default 0)")
    parser.add_argument("--turns", type=int, default=0, help="rounds of default, seeded and plain answers")
    parser.add_argument("--other", type=Path, help="checkout of another version, to alternate with")
    parser.add_argument("--serve-args", default="", help="further flags of the daemon")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    versions: dict[str, list[str]] = {"this": []} | ({"other": in_folder(options.other)} if options.other else {})
    words = options.serve_args.split()
    starts: list[dict[str, Any]] = []
    in_turns: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for _ in range(options.busy):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(busy.kill)
        for _ in tqdm(range(options.starts), unit="start"):
            for version, prefix in versions.items():
                for arm in ("default", "seeded"):
                    starts.append({"version": version, **start(words, prefix, arm, options.answers)})
                if options.turns:
                    in_turns.append({"version": version, **turns(words, prefix, options.turns)})
    names = ["starts", "answers", "busy", "turns"]
    what = "speedups reported by the first answers of a daemon, and measured"
    result = document(what, options, names, starts=starts, in_turns=in_turns)
    print(markdown(result), json.dumps(in_turns), sep="\n\n")
    write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
