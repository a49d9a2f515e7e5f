"""`python -m loadtest.grammar_fuzz`: fuzzes grammars on a daemon that streams to another client.

Regular expressions, JSON schemas and Lark grammars are mutations of valid ones, sent as structured outputs. Each must
end with an answer or with 400. A neighbour reads a stream; the gaps between its chunks are noted while grammars are
sent and, for comparison, in pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.bench import environment
from loadtest.client import key_headers
from loadtest.daemon import running_daemon
from loadtest.results import add_output_argument, write

_STALL_S = 0.1
_REGEXES = [
    "(yes|no), [a-z]+", "[0-9]{3}-[a-f]{2}", "(a+)+b", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}", "a{1,100}", "(?i:x|y)*z",
    r"[^\n]{0,80}\.", "((a|b)*c){2,9}", r"\p{L}+", "(.*a.{12}){3}",
]  # fmt: skip
_LARKS = [
    "start: /x+/ /x+/",
    'start: "a" "b"+ "c"',
    'start: expression\nexpression: NUMBER | expression "+" expression\nNUMBER: /[0-9]+/',
    'start: item ("," item)*\nitem: WORD | "(" start ")"\nWORD: /[a-z]+/',
    'start: s\ns: s s | "a" | ""',
    "start: A & ~B\nA: /[a-z]*/\nB: /.*e.*/",
    'start: %json {"type": "object"}',
    "start[max_tokens=5]: /(?s:.*)/ tail\ntail[lazy]: /.*end/",
]
_SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -1e19, "maximum": -1e19},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]},
    {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[a-z]{2,6}$", "minLength": 1, "maxLength": 9},
    {"anyOf": [{"type": "number", "multipleOf": 0.1}, {"type": "null"}, {"const": {"x": [1, 2]}}]},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    {"type": "string", "format": "date-time"},
    {"type": "object", "patternProperties": {"^k": {"type": "boolean"}}, "additionalProperties": False},
]
_PIECES = ["{0,100000}", "{999}", *'*+()|[]\\/"~&.^$\né\0']
_KEYWORDS = ("minimum", "maximum", "multipleOf", "minItems", "maxItems", "minLength", "pattern")
_NUMBERS: list[Any] = [0, -1, 1e19, -1e19, 1e308, 5e-324, 2**63, -(2**63), 100_000_000, 0.1, True, None, "x", [], {}]


def mutated_text(text: str, chance: random.Random) -> str:
    """Return a text with pieces inserted, removed, doubled or moved."""
    for _ in range(chance.randrange(1, 6)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        text = chance.choice(
            [
                text[:at] + chance.choice(_PIECES) + text[at:],
                text[:at] + text[to:],
                text[:to] + text[at:to] * chance.choice([1, 2, 40]) + text[to:],
                text[to:] + text[:to],
            ]
        )[:4000]
    return text or "a"


def mutated_schema(value: Any, chance: random.Random) -> Any:
    """Return a schema with values, keywords or parts replaced."""
    if isinstance(value, dict):
        changed = {key: mutated_schema(part, chance) for key, part in value.items()}
        if chance.random() < 0.4:
            keyword = chance.choice(
                ["minimum", "maxItems", "minLength", "multipleOf", "maximum", "minItems", "pattern"]
            )
            changed[keyword] = chance.choice(_NUMBERS)
        if changed and chance.random() < 0.1:
            del changed[chance.choice(list(changed))]
        if chance.random() < 0.15:
            changed[chance.choice(["items", "not", "anyOf", "allOf", "properties"])] = chance.choice(_SCHEMAS)
        return changed
    if isinstance(value, list):
        return [mutated_schema(part, chance) for part in value] * chance.choice([1, 1, 1, 3])
    if isinstance(value, str):
        return mutated_text(value, chance) if chance.random() < 0.1 else value
    return chance.choice(_NUMBERS) if chance.random() < 0.3 else value


def strange_grammar(chance: random.Random) -> dict[str, Any]:
    """Return random `structured_outputs`; a few are valid."""
    kind = chance.choice(["regex", "grammar", "json"])
    if kind == "json":
        return {kind: mutated_schema(chance.choice(_SCHEMAS), chance)}
    text = chance.choice(_REGEXES if kind == "regex" else _LARKS)
    return {kind: mutated_text(text, chance) if chance.random() < 0.95 else text}


@dataclass
class Findings:
    """Observations so far."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Grammars that got neither an answer nor 400."""
    gaps_s: dict[str, list[float]] = field(default_factory=lambda: {"fuzzing": [], "pause": []})
    is_fuzzing: bool = False
    num_streams: int = 0

    def summary(self) -> dict[str, Any]:
        """Return counts, and quantiles of the neighbour's gaps in milliseconds."""
        gaps = {}
        for phase, found in self.gaps_s.items():
            ordered = sorted(found) or [0.0]
            at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in _QUANTILES}
            stalls = sum(gap > _STALL_S for gap in found)
            quantiles = {name: round(1000 * gap, 2) for name, gap in at.items()}
            gaps[phase] = {"chunks": len(found), "over_100_ms": stalls, **quantiles}
        return {
            "answers": dict(self.answers), "faults": self.faults, "streams": self.num_streams, "neighbour_gaps_ms": gaps
        }  # fmt: skip


_QUANTILES = (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("longest", 1.0))


async def neighbour(http: httpx.AsyncClient, model: str, findings: Findings) -> None:
    """Read streams until cancelled, and note the gaps between their chunks."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            findings.num_streams += 1
            last_s, phase = time.perf_counter(), findings.is_fuzzing
            first = True
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if '"error"' in line:
                    findings.faults.append({"neighbour": line[:400]})
                now_s, before = time.perf_counter(), phase
                phase = findings.is_fuzzing
                if not first and phase == before:
                    findings.gaps_s["fuzzing" if phase else "pause"].append(now_s - last_s)
                last_s, first = now_s, False


async def fuzz(http: httpx.AsyncClient, model: str, findings: Findings, chance: random.Random) -> None:
    """Send grammars in sequence until cancelled."""
    while True:
        if not findings.is_fuzzing:
            await asyncio.sleep(0.05)
            continue
        structure = strange_grammar(chance)
        body = {"model": model, "prompt": "a", "max_tokens": 24, "structured_outputs": structure}
        try:
            response = await http.post("/v1/completions", json=body)
            status, detail = str(response.status_code), response.text[:400]
        except (httpx.HTTPError, ValueError) as error:
            status, detail = type(error).__name__, str(error)
        findings.answers[status] += 1
        if status not in ("200", "400"):
            findings.faults.append({"status": status, "detail": detail, "structured_outputs": structure})


async def run(url: str, options: argparse.Namespace) -> Findings:
    """Fuzz for `minutes`, four fifths of the time."""
    findings = Findings()
    limits = httpx.Limits(max_connections=options.concurrency + 1)
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=120, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        tasks = [asyncio.create_task(neighbour(http, model, findings))]
        tasks += [
            asyncio.create_task(fuzz(http, model, findings, random.Random(options.seed + number)))
            for number in range(options.concurrency)
        ]
        seconds = int(60 * options.minutes)
        for second in tqdm(range(seconds), unit="s", disable=None):
            findings.is_fuzzing = second % 30 < 24
            await asyncio.sleep(1)
            if ended := [task for task in tasks if task.done()]:
                findings.faults.append({"task": repr(ended[0].exception())})
                break
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        try:
            findings.answers["/health " + str((await http.get("/health")).status_code)] += 1
        except httpx.HTTPError as error:
            findings.faults.append({"/health": f"{type(error).__name__}: {error}"})
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz a new daemon, print and write the result; the exit code is 1 if a grammar got neither an answer nor 400."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.grammar_fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to fuzz")
    parser.add_argument("--concurrency", type=int, default=2, help="grammars that are sent at once")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    add_output_argument(parser)
    options, serve = parser.parse_known_args(arguments)
    with running_daemon([*serve]) as url:
        measured_on = environment(url)  # fuzzing might end the daemon
        findings = asyncio.run(run(url, options))
    report = {"minutes": options.minutes, "concurrency": options.concurrency, "seed": options.seed}
    report |= {**findings.summary(), "environment": measured_on}
    print(json.dumps(report, indent=1))
    write(report, options.output)
    return 1 if findings.faults else 0


if __name__ == "__main__":
    sys.exit(main())
