"""`polydraft bench`: measure a running daemon, or one that is started for it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import report
from loadtest.bench import BenchOptions, arms_of, run
from loadtest.daemon import running_daemon
from loadtest.workload import TASKS


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="polydraft bench",
        description="Measure speculation on against off: closed loop over HTTP, arms interleaved in one run. "
        "Prints a table; the last line is one JSON document.",
    )
    result.add_argument("--url", help="daemon to measure; without it one is started on the embedded pair")
    result.add_argument("--tasks", default=",".join(TASKS), help="comma-separated: dialogues, gutenberg")
    result.add_argument("--concurrency", type=_integers, default=[1, 4, 16], help="requests at once, e.g. 1,4,16")
    result.add_argument("--repeats", type=int, default=5, help="runs of every arm in a cell (default 5)")
    result.add_argument("--max-tokens", type=int, default=48, help="tokens of every answer (default 48)")
    result.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default 1)")
    result.add_argument(
        "--rules",
        default="block,bv_race,adaptive",
        help="compared with plain decoding: rules, adaptive (the server's choice), again (plain once more: noise)",
    )
    result.add_argument("--num-drafts", type=int, default=4, help="chains of a rule that takes several (default 4)")
    result.add_argument("--draft-length", type=int, default=5, help="tokens in a chain (default 5)")
    result.add_argument("--output", type=Path, help="also write the JSON document to this file")
    result.add_argument("--plot", type=Path, help="also draw throughput by concurrency into this PNG")
    result.add_argument("--serve-args", default="", help="flags of the daemon that is started, in one string")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0, or 1 when the daemon failed."""
    options = parser().parse_args(arguments)
    wanted = BenchOptions(
        tasks=options.tasks.split(","),
        concurrency=options.concurrency,
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        arms=arms_of(options.rules.split(","), options.num_drafts, options.draft_length),
    )
    try:
        if options.url:
            result = run(options.url.rstrip("/"), wanted)
        else:
            print("starting a daemon on the embedded pair", file=sys.stderr)
            with running_daemon(options.serve_args.split()) as url:
                result = run(url, wanted)
    except RuntimeError as error:
        print(f"polydraft bench: {error}", file=sys.stderr)
        return 1
    _publish(result, options.output, options.plot)
    return 0


def _publish(result: dict[str, Any], output: Path | None, plot: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        report.plot(result, plot)
    print(report.markdown(result) if len(result["options"]["arms"]) <= 5 else report.rules_markdown(result))
    exactness = result["exactness"]
    print(f"\n{exactness['equal_in_all_arms']} of {exactness['greedy_answers']} greedy answers equal in all arms\n")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
