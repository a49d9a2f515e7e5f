"""`python -m loadtest.grammar_fuzz`: fuzzes grammars on a daemon that streams to another client.

Regular expressions, JSON schemas and Lark grammars are mutations of valid ones, sent as structured
outputs. Each must end with an answer or with 400. A neighbour reads a stream; the gaps between its
chunks are noted while grammars are sent and, for comparison, in pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from loadtest.bench import environment
from loadtest.client import key_headers, served_model
from loadtest.daemon import running_daemon
from loadtest.neighbour import Disturbance
from loadtest.results import add_output_argument, write

_PAUSE_S, _FUZZING_S = 6, 24
"""Seconds of the turns without and with grammars."""
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
_KEYWORDS = ("minimum", "maxItems", "minLength", "multipleOf", "maximum", "minItems", "pattern")
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
            keyword = chance.choice(_KEYWORDS)
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


async def fuzz(
    http: httpx.AsyncClient, model: str, turns: Disturbance, faults: list[dict[str, Any]], chance: random.Random
) -> None:
    """Send grammars in sequence until cancelled; faults: receives those that get neither an answer
    nor 400.
    """
    while True:
        if not turns.is_on:
            await asyncio.sleep(0.05)
            continue
        structure = strange_grammar(chance)
        body = {"model": model, "prompt": "a", "max_tokens": 24, "structured_outputs": structure}
        try:
            response = await http.post("/v1/completions", json=body)
            status, detail = str(response.status_code), response.text[:400]
        except (httpx.HTTPError, ValueError) as error:
            status, detail = type(error).__name__, str(error)
        turns.statuses[status] += 1
        if status not in ("200", "400"):
            faults.append({"status": status, "detail": detail, "structured_outputs": structure})


async def run(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fuzz for `minutes`, four fifths of the time; return counts, faults and the neighbour's
    gaps.
    """
    turns, model = Disturbance(), served_model(url)
    faults: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=options.concurrency + 1)
    num_rounds = max(1, round(60 * options.minutes / (_PAUSE_S + _FUZZING_S)))
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=120, limits=limits) as http:
        chances = [random.Random(options.seed + number) for number in range(options.concurrency)]
        work = [turns.watch(http, model), *(fuzz(http, model, turns, faults, chance) for chance in chances)]
        try:
            await turns.alternate(work, [_PAUSE_S, _FUZZING_S] * num_rounds)
            turns.statuses["/health " + str((await http.get("/health")).status_code)] += 1
        except (httpx.HTTPError, RuntimeError) as error:
            faults.append({"neighbour or /health": f"{type(error).__name__}: {error}"})
    counts = {"answers": dict(turns.statuses), "faults": faults, "streams": turns.num_streams}
    return {**counts, "neighbour_gaps_ms": turns.gaps_ms()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz a new daemon, print and write the result; the exit code is 1 if a grammar got neither an
    answer nor 400.
    """
    parser = argparse.ArgumentParser(prog="python -m loadtest.grammar_fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to fuzz")
    parser.add_argument("--concurrency", type=int, default=2, help="grammars that are sent at once")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    add_output_argument(parser)
    options, serve = parser.parse_known_args(arguments)
    with running_daemon([*serve]) as url:
        measured_on = environment(url)  # fuzzing might end the daemon
        found = asyncio.run(run(url, options))
    report = {"minutes": options.minutes, "concurrency": options.concurrency, "seed": options.seed}
    report |= {**found, "environment": measured_on}
    print(json.dumps(report, indent=1))
    write(report, options.output)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
