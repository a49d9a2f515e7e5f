"""`python -m loadtest.costs`: effect of the largest bodies on another client's stream and on
/health.

Each body is sent alone; the costliest one of each field is sent again, twenty at once. Then follow
endless headers, silent connections under a small limit of open files, and hostile grammars. The
longest gap between the stream's chunks and the longest response time of /health are noted for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.checkpoints import lengthened
from loadtest.client import address_of, metric, raw_request
from loadtest.cost_bodies import ALLOWED, MeasuredBody, filled, limits, sweep
from loadtest.daemon import running_daemon
from loadtest.environment import environment
from loadtest.neighbour import watch
from loadtest.results import add_output_argument, table, write

_MODEL = "costs"
_AT_ONCE = 20
_ANSWER_TIMEOUT_S = 180.0
_HEADER_BYTES = 75 << 20
_OPEN_FILES, _SILENT = 256, 300
_HOSTILE = "start: /x+/ /x+/"
"""Grammar that the library does not compile within the limits."""
_EMBEDDED = Path(__file__).parents[1] / "server" / "demo" / "target"
_LONG_CONTEXT = 262_144
_PAUSE_S = 0.01
_BODIES_PER_READING = 10
"""Number of bodies between two readings of the memory, which take longer than many bodies."""
_NUM_ROWS = 16
SETTLE_S = 0.3
"""Time after a body in which the stream and /health are watched."""


@dataclass(frozen=True)
class Cost:
    """Cost of a body to its client and to others."""

    path: str
    field: str
    kind: str
    size_bytes: int
    at_once: int
    statuses: dict[str, int]
    answer_s: float
    """Time until the last response."""
    neighbour: dict[str, float]


class Neighbour:
    """Separate process that reads a stream and polls /health."""

    def __init__(self, url: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, other = context.Pipe()
        self._process = context.Process(target=watch, args=(url, model, other), daemon=True)
        self._process.start()
        self._connection.recv()
        self._since_s = time.perf_counter()

    def seen(self) -> dict[str, float]:
        """Return the longest gap of the stream, the longest time of /health, and the pace since the
        last call.
        """
        self._connection.send(None)
        gap_s, health_s, num_chunks = self._connection.recv()
        now = time.perf_counter()
        rate, self._since_s = num_chunks / (now - self._since_s), now
        return {"longest_gap_ms": 1000 * gap_s, "longest_health_ms": 1000 * health_s, "chunks_per_second": rate}

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def exchange(address: tuple[str, int], pieces: Iterable[bytes]) -> str:
    """Send a request, read the response to its end, and return its status or the name of an
    error.
    """
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


def measure_body(address: tuple[str, int], body: MeasuredBody, at_once: int, neighbour: Neighbour) -> Cost:
    """Send one body, `at_once` times at the same time."""
    data = body.build()
    request = raw_request(body.path, data, "close")
    neighbour.seen()
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        statuses = dict(Counter(pool.map(lambda _: exchange(address, [request]), range(at_once))))
    answer_s = time.perf_counter() - began
    time.sleep(SETTLE_S if at_once > 1 else _PAUSE_S)
    return Cost(body.path, body.field, body.kind, len(data), at_once, statuses, answer_s, neighbour.seen())


def notable(costs: Sequence[Cost]) -> list[Cost]:
    """Return the bodies of each field of an endpoint with the longest time, gap, or time of
    /health.
    """
    by_field: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for cost in costs:
        by_field[cost.path, cost.field].append(cost)
    wanted: list[Callable[[Cost], float]] = [
        lambda cost: cost.answer_s,
        lambda cost: cost.neighbour["longest_gap_ms"],
        lambda cost: cost.neighbour["longest_health_ms"],
    ]
    found = {id(one): one for own in by_field.values() for key in wanted for one in [max(own, key=key)]}
    return list(found.values())


memory_bytes = partial(metric, name="process_resident_memory_bytes")
"""Resident memory of the HTTP process, by URL."""


def measure_bodies(
    url: str, bodies: Sequence[MeasuredBody], neighbour: Neighbour, at_once: int = _AT_ONCE
) -> dict[str, Any]:
    """Send every body alone, then the costliest of each field, `at_once` at the same time (1: not
    again).
    """
    address, before, peak = address_of(url), memory_bytes(url), 0.0
    alone: list[Cost] = []
    costliest: dict[tuple[str, str], tuple[float, MeasuredBody]] = {}
    for body in tqdm(bodies, unit="body", disable=None):
        cost = measure_body(address, body, 1, neighbour)
        alone.append(cost)
        if len(alone) % _BODIES_PER_READING == 0:
            peak = max(peak, memory_bytes(url))
        key = (body.path, body.field)
        costliest[key] = max(costliest.get(key, (0.0, body)), (cost.answer_s, body), key=lambda pair: pair[0])
    together = []
    again = costliest.values() if at_once > 1 else ()
    for _, body in tqdm(again, unit="field", desc=f"{at_once} at once", disable=None):
        together.append(measure_body(address, body, at_once, neighbour))
        peak = max(peak, memory_bytes(url))
    return {
        "num_bodies": len(alone),
        "alone": [asdict(cost) for cost in notable(alone)],
        "together": [asdict(cost) for cost in together],
        "memory_mib": {"before": before / 2**20, "peak": peak / 2**20, "after": memory_bytes(url) / 2**20},
    }


def measure_headers(url: str, neighbour: Neighbour) -> dict[str, Any]:
    """Send endless headers, one and then twenty."""
    address, found = address_of(url), {}
    endless = [b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: ", *[b"a" * (1 << 20)] * (_HEADER_BYTES >> 20)]
    for at_once in (1, _AT_ONCE):
        neighbour.seen()
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda _: exchange(address, endless), range(at_once)))
        time.sleep(SETTLE_S)
        found[str(at_once)] = {"answers": answers, "neighbour": neighbour.seen()}
    return found


def measure_silence(arguments: Sequence[str]) -> dict[str, Any]:
    """Open more silent connections than the daemon may have files, and measure the time until
    /health answers.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    limited = running_daemon(arguments, ["prlimit", f"--nofile={_OPEN_FILES}:{_OPEN_FILES}"])
    with limited as url, contextlib.ExitStack() as stack:
        for _ in range(_SILENT):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(address_of(url), timeout=5))
        began = time.perf_counter()
        answers: list[str] = []
        while "200" not in answers and time.perf_counter() - began < _ANSWER_TIMEOUT_S:
            try:
                answers.append(str(httpx.get(f"{url}/health", timeout=5).status_code))
            except httpx.HTTPError as error:
                answers.append(type(error).__name__)
        return {"connections": _SILENT, "open_files": _OPEN_FILES, "answers": answers,
                "answered_after_s": time.perf_counter() - began}  # fmt: skip


def measure_grammars(url: str, neighbour: Neighbour) -> dict[str, Any]:
    """Send twenty hostile grammars, and then an ordinary schema."""
    body = {"model": _MODEL, "prompt": "a", "max_tokens": 24}
    honest = {**body, "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}}

    def send(asked: dict[str, Any]) -> tuple[str, float]:
        began = time.perf_counter()
        try:
            status = str(httpx.post(f"{url}/v1/completions", json=asked, timeout=_ANSWER_TIMEOUT_S).status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        return status, time.perf_counter() - began

    neighbour.seen()
    with ThreadPoolExecutor(_AT_ONCE + 1) as pool:
        hostile = [
            pool.submit(send, {**body, "structured_outputs": {"grammar": f'{_HOSTILE} "{number}"'}})
            for number in range(_AT_ONCE)
        ]
        time.sleep(SETTLE_S)
        status, waited_s = pool.submit(send, honest).result()
        answers = [one.result() for one in hostile]
    return {
        "honest": {"status": status, "answer_s": waited_s},
        "hostile": [{"status": status, "answer_s": answer_s} for status, answer_s in answers],
        "neighbour": neighbour.seen(),
    }


@contextlib.contextmanager
def neighbour_of(url: str, model: str = _MODEL) -> Iterator[Neighbour]:
    """Run a neighbour during the block."""
    neighbour = Neighbour(url, model)
    try:
        yield neighbour
    finally:
        neighbour.close()


def quiet(neighbour: Neighbour, seconds: float = 10.0) -> dict[str, float]:
    """Watch the neighbour without other requests."""
    neighbour.seen()
    time.sleep(seconds)
    return neighbour.seen()


def measure_long_prompt(arguments: Sequence[str], size_bytes: int = 1 << 20) -> dict[str, Any]:
    """Send an ordinary prompt of 1 MB during a stream; its client leaves after a while."""
    data = filled("/v1/completions", _MODEL, "prompt", json.dumps("word " * (size_bytes // 5)))
    with tempfile.TemporaryDirectory(prefix="long-model-") as place:
        folder = lengthened(_EMBEDDED, _LONG_CONTEXT, Path(place))
        words = [str(folder), *arguments, "--max-model-len", str(_LONG_CONTEXT), "--kv-cache-memory-bytes", "8G"]
        with running_daemon(words) as url, neighbour_of(url) as neighbour:
            before = quiet(neighbour)
            with socket.create_connection(address_of(url)) as connection:
                connection.sendall(raw_request("/v1/completions", data))
                arriving, reading = quiet(neighbour, 2.0), quiet(neighbour)
            return {"size_bytes": len(data), "before": before, "first_2_s": arriving, "next_10_s": reading}


def measure(arguments: Sequence[str], max_bytes: int, wanted: Callable[[MeasuredBody], bool]) -> dict[str, Any]:
    """Run all parts in sequence; wanted: filter of the bodies."""
    words = [*arguments, "--served-model-name", _MODEL]
    result: dict[str, Any] = {"environment": environment(), "max_request_bytes": max_bytes}
    with running_daemon([*words, "--max-request-bytes", str(max_bytes)]) as url, neighbour_of(url) as neighbour:
        described = httpx.get(f"{url}/openapi.json").raise_for_status().json()
        result["alone"] = quiet(neighbour)
        # Each of these requests many answers, so twenty of them would fill the queue and measure
        # the engine.
        allowed = [body for body in limits(_MODEL, max_bytes) if wanted(body)]
        result["limits"] = measure_bodies(url, allowed, neighbour, at_once=1)
        bodies = [body for body in sweep(described, _MODEL, max_bytes) if wanted(body)]
        result["bodies"] = measure_bodies(url, bodies, neighbour)
        result["headers"] = measure_headers(url, neighbour)
        result["grammars"] = measure_grammars(url, neighbour)
    result["silence"] = measure_silence(words)
    result["long_prompt"] = measure_long_prompt(words)
    return result


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: costliest fields, all other fields together, and each other
    attack.
    """
    alone: dict[str, list[dict[str, Any]]] = defaultdict(list)
    together: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for part in ("limits", "bodies"):
        for costs, found in ((alone, result[part]["alone"]), (together, result[part]["together"])):
            for cost in found:
                allowed = ", the most that is allowed" if part == "limits" else ""
                costs[f"`{cost['field']}`{allowed}"].append(cost)
    order = sorted(alone, key=lambda name: -max(cost["answer_s"] for cost in alone[name]))
    shown, others = order[:_NUM_ROWS], order[_NUM_ROWS:]
    rows = [_row(name, alone[name], together[name]) for name in shown]
    if others:
        every = [[cost for name in others for cost in costs[name]] for costs in (alone, together)]
        rows.append(_row(f"{len(others)} more", *every))
    for at_once, found in result["headers"].items():
        answers = ", ".join(sorted(set(found["answers"])))
        seen = found["neighbour"]
        name = f"a header without an end, {at_once} at once"
        rows.append([name, f"{_HEADER_BYTES >> 20} MiB", answers, "", *_worst([seen]), ""])
    grammars = result["grammars"]
    served = f"{grammars['honest']['status']} for an honest schema after {grammars['honest']['answer_s']:.1f} s"
    rows.append([f"{_AT_ONCE} hostile grammars", "", served, "", *_worst([grammars["neighbour"]]), ""])
    return rows


def _worst(seen: Sequence[dict[str, float]]) -> list[str]:
    return [f"{max(one[name] for one in seen):.0f}" for name in ("longest_gap_ms", "longest_health_ms")]


def _row(name: str, alone: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]]) -> list[str]:
    costliest = max(alone, key=lambda cost: cost["answer_s"])
    statuses = ", ".join(sorted({status for cost in (*alone, *together) for status in cost["statuses"]}))
    size = f"{max(cost['size_bytes'] for cost in alone) / 1000:,.0f} kB"
    many = " / ".join(_worst([cost["neighbour"] for cost in together])) if together else ""
    return [name, size, statuses, f"{costliest['answer_s']:.2f}", *_worst([cost["neighbour"] for cost in alone]), many]


def markdown(result: dict[str, Any]) -> str:
    """Return the table of SECURITY.md."""
    head = ["field", "largest body", "answers", "s", "longest gap, ms", "longest /health, ms"]
    return table([*head, f"{_AT_ONCE} at once, ms"], rows_of(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.costs", description=__doc__)
    parser.add_argument("--max-request-bytes", type=int, default=4 << 20, help="size of the bodies (default 4 MiB)")
    parser.add_argument("--fields", help="measure only these fields, comma-separated (default: all)")
    parser.add_argument("--kinds", help="send only these kinds of values, comma-separated (default: all)")
    parser.add_argument("--serve-args", default="--num-threads 1", help="arguments of `polydraft serve`, in one string")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    names = options.fields.split(",") if options.fields else None
    kinds = [*options.kinds.split(","), ALLOWED] if options.kinds else None

    def is_wanted(body: MeasuredBody) -> bool:
        return (names is None or body.field in names) and (kinds is None or body.kind in kinds)

    result = measure(options.serve_args.split(), options.max_request_bytes, is_wanted)
    write(result, options.output)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
