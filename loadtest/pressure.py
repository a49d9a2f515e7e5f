"""`python -m loadtest.pressure NAME ...`: disturbances, and a neighbour that is measured.

The neighbour reads a stream and asks /health.

A neighbour in a separate process reads a stream and asks /health on new connections, first alone
and then during each disturbance:

  bodies     every field of every endpoint with 4 MiB, alone; the costliest of each field 20 at once
  limits     bodies with the largest values that are served
  crowds     small bodies of many objects, 20, 60 and 200 at once
  malformed  a thousand malformed bodies a second
  grammars   random grammars; each must end with an answer or 400
  headers    headers without an end, one and 20 at once
  prompt     an ordinary prompt of 1 MB
  silence    more silent connections than the daemon may have open files
  soak       many short requests, a tenth of which are left; the memory at idle
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from loadtest import bodies
from loadtest.bodies import MeasuredBody
from loadtest.client import address_of, key_headers, metric, raw_request, resident_mib, served_model
from loadtest.daemon import in_folder, running_daemon
from loadtest.environment import environment
from loadtest.neighbour import watch
from loadtest.results import add_output_argument, table, write
from loadtest.strange_grammars import strange_grammar
from loadtest.workload import load

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_AT_ONCE = 20
_CROWDS = (20, 60, 200)
_ANSWER_TIMEOUT_S = 180.0
_SETTLE_S = 0.3
"""Time after a disturbance in which the neighbour is watched."""
_PAUSE_S = 0.01
"""The same after a single body."""
_HEADER_BYTES = 75 << 20
_OPEN_FILES, _SILENT = 256, 300
_PROMPT_BYTES = 1 << 20
_LEAVING = 0.1
"""Share of the requests of a soak whose client leaves."""
_EXTRAS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"temperature": 0},
    {"prediction": {"type": "content", "content": "I think that would be nice."}},
    {"structured_outputs": {"regex": "(yes|no), [a-z]+"}},
    {"logprobs": 2},
    {"speculation": {"rule": "traversal", "tree": [2, 2, 1]}},
]
"""Fields of requests of a soak."""
Row = dict[str, Any]


class Neighbour:
    """Separate process that reads a stream and asks /health."""

    def __init__(self, url: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, other = context.Pipe()
        self._process = context.Process(target=watch, args=(url, model, other), daemon=True)
        self._process.start()
        self._connection.recv()
        self._since_s = time.perf_counter()

    def seen(self) -> dict[str, float]:
        """Return quantiles of gaps, longest time of /health, and the pace since the last call."""
        self._connection.send(None)
        found: dict[str, float] = self._connection.recv()
        now = time.perf_counter()
        elapsed_s, self._since_s = now - self._since_s, now
        return {**found, "chunks_per_second": found["chunks"] / elapsed_s}

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


@contextlib.contextmanager
def neighbour_of(url: str, model: str) -> Iterator[Neighbour]:
    """Run a neighbour during the block."""
    neighbour = Neighbour(url, model)
    try:
        yield neighbour
    finally:
        neighbour.close()


@dataclass(frozen=True)
class Target:
    """Disturbed daemon."""

    url: str
    model: str
    neighbour: Neighbour
    options: argparse.Namespace

    def row(self, name: str, send: Callable[[], Iterable[str]], settle_s: float = _SETTLE_S, **facts: Any) -> Row:
        """Disturb the neighbour and return the observations.

        send: sends requests and returns the statuses of the responses; settle_s: the time after
        them in which the neighbour is watched.
        """
        self.neighbour.seen()
        began = time.perf_counter()
        statuses = dict(Counter(send()))
        answer_s = time.perf_counter() - began
        time.sleep(settle_s)
        return {"name": name, **facts, "statuses": statuses, "answer_s": answer_s, "neighbour": self.neighbour.seen()}

    def body_row(self, body: MeasuredBody, at_once: int) -> Row:
        """Send a body a number of times at once."""
        data = body.build()
        request = raw_request(body.path, data, "close")
        facts = {"path": body.path, "size_bytes": len(data), "at_once": at_once}
        send = partial(together, self.url, [request], at_once)
        # A sweep has thousands of single bodies.
        settle_s = _SETTLE_S if at_once > 1 else _PAUSE_S
        return self.row(f"{body.field}: {body.kind}", send, settle_s, **facts)


def exchange(address: tuple[str, int], pieces: Iterable[bytes]) -> str:
    """Send a request, read the response, and return its status or the name of an error."""
    try:
        with socket.create_connection(address, timeout=_ANSWER_TIMEOUT_S) as connection:
            # Refused before all of it was sent; the response may be there.
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    connection.sendall(piece)
            status = connection.recv(1 << 16).split(b" ", 2)[1].decode()
            while connection.recv(1 << 20):
                pass
    except (OSError, IndexError) as error:
        return type(error).__name__
    return status


def together(url: str, pieces: Sequence[bytes], at_once: int) -> list[str]:
    """Return the statuses of a request that is sent a number of times at once."""
    address = address_of(url)
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda _: exchange(address, pieces), range(at_once)))


def disturb_with_bodies(target: Target) -> Iterator[Row]:
    """Send every field of every endpoint with every value.

    Then the costliest body of each field, 20 at once.
    """
    described = httpx.get(f"{target.url}/openapi.json").raise_for_status().json()
    costliest: dict[tuple[str, str], tuple[float, MeasuredBody]] = {}
    for body in bodies.sweep(described, target.model, target.options.max_request_bytes):
        if target.options.fields and body.field not in target.options.fields.split(","):
            continue
        row = target.body_row(body, 1)
        yield row
        key = (body.path, body.field)
        costliest[key] = max(costliest.get(key, (0.0, body)), (row["answer_s"], body), key=lambda pair: pair[0])
    for _, body in costliest.values():
        yield target.body_row(body, _AT_ONCE)


def disturb_with_limits(target: Target) -> Iterator[Row]:
    """Send each valid body of the largest size."""
    for body in bodies.limits(target.model, target.options.max_request_bytes):
        yield target.body_row(body, 1)


def disturb_with_crowds(target: Target, sizes: Sequence[int] = _CROWDS) -> Iterator[Row]:
    """Send each small body of many objects in crowds of each size."""
    for body, at_once in itertools.product(bodies.crowds(target.model), sizes):
        yield target.body_row(body, at_once)


def disturb_with_malformed_bodies(target: Target) -> Iterator[Row]:
    """Send malformed bodies at a constant rate on eight connections."""
    seconds, num_connections = target.options.seconds, 8
    headers = {"content-type": "application/json"}

    def send(first: int) -> list[str]:
        statuses: list[str] = []
        with httpx.Client(base_url=target.url, headers=key_headers() | headers, timeout=60) as client:
            began = time.monotonic()
            while (passed_s := time.monotonic() - began) < seconds:
                number = len(statuses)
                time.sleep(max(0.0, number * num_connections / target.options.rate - passed_s))
                body = bodies.MALFORMED[(first + number) % len(bodies.MALFORMED)]
                statuses.append(str(client.post(_CHAT, content=body).status_code))
        return statuses

    def send_all() -> Iterable[str]:
        with ThreadPoolExecutor(num_connections) as pool:
            return itertools.chain.from_iterable(pool.map(send, range(num_connections)))

    yield target.row("malformed bodies", send_all, seconds=seconds)


def disturb_with_grammars(target: Target) -> Iterator[Row]:
    """Send random grammars on two connections, and list those without an answer or 400."""
    faults: list[dict[str, Any]] = []

    def send(seed: int) -> list[str]:
        chance = random.Random(seed)
        statuses: list[str] = []
        with httpx.Client(base_url=target.url, headers=key_headers(), timeout=_ANSWER_TIMEOUT_S) as client:
            ends_s = time.monotonic() + target.options.seconds
            while time.monotonic() < ends_s:
                asked = strange_grammar(chance)
                body = {"model": target.model, "prompt": "a", "max_tokens": 24, "structured_outputs": asked}
                try:
                    status = str(client.post(_COMPLETIONS, json=body).status_code)
                except (httpx.HTTPError, ValueError) as error:
                    status = type(error).__name__
                statuses.append(status)
                if status not in ("200", "400"):
                    faults.append({"status": status, "structured_outputs": asked})
        return statuses

    def send_all() -> Iterable[str]:
        with ThreadPoolExecutor(2) as pool:
            return itertools.chain.from_iterable(pool.map(send, range(2)))

    yield target.row("random grammars", send_all, faults=faults)


def disturb_with_headers(target: Target) -> Iterator[Row]:
    """Send headers without an end, one and then twenty at once."""
    endless = [b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: ", *[b"a" * (1 << 20)] * (_HEADER_BYTES >> 20)]
    for at_once in (1, _AT_ONCE):
        send = partial(together, target.url, endless, at_once)
        yield target.row("a header without an end", send, at_once=at_once)


def disturb_with_a_prompt(target: Target) -> Iterator[Row]:
    """Send an ordinary prompt of 1 MB; 400 unless the model has a context for it."""
    data = bodies.filled(_COMPLETIONS, target.model, "prompt", json.dumps("word " * (_PROMPT_BYTES // 5)))
    request = raw_request(_COMPLETIONS, data, "close")
    yield target.row("a prompt of 1 MB", lambda: together(target.url, [request], 1), size_bytes=len(data))


def disturb_with_silence(target: Target) -> Iterator[Row]:
    """Open more silent connections than a second daemon may have files, and ask its /health."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    limit = ["prlimit", f"--nofile={_OPEN_FILES}:{_OPEN_FILES}"]
    with running_daemon(target.options.serve_args.split(), limit) as url, contextlib.ExitStack() as stack:
        for _ in range(_SILENT):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(address_of(url), timeout=5))

        def ask() -> Iterator[str]:
            status, began = "", time.perf_counter()
            while status != "200" and time.perf_counter() - began < _ANSWER_TIMEOUT_S:
                try:
                    status = str(httpx.get(f"{url}/health", timeout=5).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                yield status

        yield target.row("silent connections", ask, connections=_SILENT, open_files=_OPEN_FILES)


def disturb_with_short_requests(target: Target) -> Iterator[Row]:
    """Send short requests in twenty parts, and read the memory after each."""
    chance = random.Random(1)
    prompts = [str(prompt.body["prompt"]) for prompt in load("gutenberg")]

    def send(_: int) -> str:
        prompt = chance.choice(prompts)
        body = {"model": target.model, "prompt": prompt[:80], "max_tokens": chance.randint(1, 8), "stream": True}
        try:
            return short_request(target.url, body | chance.choice(_EXTRAS), chance.random() < _LEAVING)
        except (RuntimeError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"[:400]

    def send_part() -> list[str]:
        with ThreadPoolExecutor(32) as pool:
            return list(pool.map(send, range(max(1, target.options.requests // 20))))

    for _ in range(20):
        yield {**target.row("short requests", send_part), **resident_mib(target.url)}


def short_request(url: str, body: dict[str, Any], leaves: bool) -> str:
    """Read a stream to its end, or leave after its first line.

    Raise RuntimeError if it is refused or breaks off.
    """
    with httpx.stream("POST", f"{url}{_COMPLETIONS}", json=body, headers=key_headers(), timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(f"a stream broke off: {line}")
            if leaves and line:
                return "left"
    return "200"


DISTURBANCES: dict[str, Callable[[Target], Iterator[Row]]] = {
    "bodies": disturb_with_bodies,
    "limits": disturb_with_limits,
    "crowds": disturb_with_crowds,
    "malformed": disturb_with_malformed_bodies,
    "grammars": disturb_with_grammars,
    "headers": disturb_with_headers,
    "prompt": disturb_with_a_prompt,
    "silence": disturb_with_silence,
    "soak": disturb_with_short_requests,
}


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of the observations."""
    head = ["disturbance", "size", "at once", "answers", "s", "longest gap, ms", "longest /health, ms"]
    shown = []
    for row in rows:
        answers = ", ".join(f"{count} {status}" for status, count in sorted(row["statuses"].items()))
        size = f"{row['size_bytes'] / 1000:,.0f} kB" if "size_bytes" in row else ""
        gap, health = (f"{row['neighbour'][name]:.0f}" for name in ("longest_gap_ms", "longest_health_ms"))
        shown.append([row["name"], size, str(row.get("at_once", "")), answers, f"{row['answer_s']:.1f}", gap, health])
    return table(head, shown)


def measure(url: str, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Disturb a daemon in every named way and return the observations."""
    model = served_model(url)
    with neighbour_of(url, model) as neighbour:
        target = Target(url, model, neighbour, options)
        time.sleep(options.seconds)
        rows = [{"name": "alone", "statuses": {}, "answer_s": 0.0, "neighbour": neighbour.seen()}]
        for name in names:
            rows += DISTURBANCES[name](target)
    return {"rows": rows, "memory_mib": resident_mib(url)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Disturb a new daemon, and print and write what was seen.

    1 if a grammar or a short request failed, or cache blocks are held at idle.
    """
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.pressure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=DISTURBANCES, metavar="NAME", help=", ".join(DISTURBANCES))
    parser.add_argument("--max-request-bytes", type=int, default=4 << 20, help="size of the bodies (default 4 MiB)")
    parser.add_argument("--fields", help="bodies: only these fields, comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, default=10.0, help="malformed, grammars: time (default 10)")
    parser.add_argument("--rate", type=float, default=1000.0, help="malformed: bodies a second (default 1000)")
    parser.add_argument("--requests", type=int, default=20_000, help="soak: requests in all (default 20,000)")
    parser.add_argument("--before", type=Path, help="checkout of another version, which is measured instead")
    parser.add_argument("--serve-args", default="--num-threads 1", help="arguments of `polydraft serve`, in one string")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    words = [*options.serve_args.split(), "--max-request-bytes", str(options.max_request_bytes)]
    with running_daemon(words, in_folder(options.before) if options.before else ()) as url:
        result = {"environment": environment(), **measure(url, options.names, options)}
        time.sleep(_SETTLE_S)
        result["blocks_held_at_idle"] = metric(url, "polydraft_kv_cache_usage_ratio")
    print(markdown(result["rows"]))
    write(result, options.output)
    failed = [row for row in result["rows"] if row.get("faults") or any(": " in status for status in row["statuses"])]
    return int(bool(failed) or result["blocks_held_at_idle"] != 0)


if __name__ == "__main__":
    sys.exit(main())
