"""Latency of filling gaps in source files, with drafts from the prompt and without drafts.

`python -m loadtest.fill_in --url http://127.0.0.1:8000 server` cuts gaps into the files of a folder
and asks a daemon to fill them by `/infill`, as editors do. Each prompt is cached before, as it is
while one types, so that the time is that of the answer.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx

from loadtest.client import key_headers
from loadtest.statistics import Ratio, ratio_of_sums

ARMS: dict[str, dict[str, Any]] = {"plain": {"enabled": False}, "drafts": {"drafters": ["prompt_lookup"]}}
_NUM_LINES = 60
"""Lines before and after a gap."""
_GAP = 3
"""Lines that are taken out; the first one is cut in its middle."""


def gaps_of(folder: Path, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return the texts around gaps in a folder's Python files, as fields of `/infill`."""
    drawn = random.Random(seed)
    files = [path.read_text().splitlines(keepends=True) for path in sorted(folder.rglob("*.py"))]
    long = [lines for lines in files if len(lines) > 2 * _NUM_LINES]
    gaps: list[dict[str, str]] = []
    while len(gaps) < count:
        lines = drawn.choice(long)
        place = drawn.randrange(_NUM_LINES, len(lines) - _NUM_LINES)
        line = lines[place]
        if not line.strip():
            continue
        half = len(line) // 2
        gaps.append(
            {
                "input_prefix": "".join(lines[place - _NUM_LINES : place]),
                "prompt": line[:half],
                "input_suffix": "".join(lines[place + _GAP : place + _GAP + _NUM_LINES]),
            }
        )
    return gaps


def measured(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a request, and its answer. Raises httpx.HTTPStatusError for a refused
    one.
    """
    begun = time.perf_counter()
    response = client.post("/infill", json=body)
    took_s = time.perf_counter() - begun
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return took_s, answer


def compared(client: httpx.Client, gaps: list[dict[str, str]], num_tokens: int) -> dict[str, Any]:
    """Return times of both arms, their ratio, and the shares of gaps with equal answers."""
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    num_equal = 0
    for number, gap in enumerate(gaps):
        body = {**gap, "temperature": 0, "n_predict": num_tokens}
        measured(client, {**body, "n_predict": 1})
        texts = set()
        order = list(ARMS) if number % 2 else list(reversed(ARMS))
        for arm in order:
            took_s, answer = measured(client, {**body, "speculation": ARMS[arm]})
            times[arm].append(took_s)
            texts.add(answer["content"])
        num_equal += len(texts) == 1
    ratio: Ratio = ratio_of_sums(times["plain"], times["drafts"])
    means_ms = {arm: 1000 * sum(taken) / len(taken) for arm, taken in times.items()}
    return {"gaps": len(gaps), "mean_ms": means_ms, "times_as_fast": ratio._asdict(), "equal_answers": num_equal}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fill_in", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with Python files")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the daemon")
    parser.add_argument("--gaps", type=int, default=40, help="number of gaps")
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of tokens of an answer")
    given = parser.parse_args()
    gaps = gaps_of(given.folder, given.gaps)
    with httpx.Client(base_url=given.url, headers=key_headers(), timeout=300) as client:
        measured(client, {**gaps[0], "n_predict": 8})
        print(json.dumps(compared(client, gaps, given.tokens), indent=2))


if __name__ == "__main__":
    main()
