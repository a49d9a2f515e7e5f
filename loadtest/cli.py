"""`polydraft bench`: measures a running daemon, or starts one.

Packages of the extra `bench` are imported only for measurements, so that `--help` works without
them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest import plots, report
from loadtest.arguments import Parser, integers
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.environment import commit_of
from loadtest.results import add_output_argument, write
from loadtest.workload import TASKS, load

_FULL: dict[str, Any] = {
    "concurrency": (1, 4, 16, 64),
    "temperatures": (0.0, 1.0),
    "contexts": (0, 1024),
    "ramp": (1, 4, 16, 64, 16, 4, 1),
    "rules": "block,bv_race,traversal:2.2.1.1,adaptive,again",
}
_SHORT: dict[str, Any] = {
    "concurrency": (1, 4, 16),
    "temperatures": (1.0,),
    "contexts": (0,),
    "ramp": (),
    "rules": "block,block:1x3,bv_race,adaptive,again",
}
"""Values of options that are not given."""


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        try:
            load(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _address(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or "://" not in url or name in (OFF, AGAIN, ADAPTIVE):
        raise argparse.ArgumentTypeError(f"{text}: must look like llama.cpp=http://localhost:8080")
    return name, url.rstrip("/")


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = Parser(
        prog="polydraft bench",
        description="Measure speculation on against off: closed loop over HTTP, arms interleaved in one run. "
        "Prints a table; the last line is one JSON document. Where the daemon wants an API key, it is read from "
        "POLYDRAFT_API_KEY.",
    )
    result.add_argument("--url", help="daemon to measure; without it one is started by --serve-args")
    result.add_argument("--short", action="store_true", help="minutes instead of hours: fewer cells and arms")
    result.add_argument(
        "--tasks",
        default=list(TASKS),
        type=_tasks,
        help="comma-separated: dialogues, gutenberg, or files of JSON lines with messages, prompt or text in each "
        "record (default both)",
    )
    result.add_argument("--concurrency", type=integers, help="requests at once (default 1,4,16,64; short: 1,4,16)")
    result.add_argument("--repeats", type=int, default=5, help="runs of every arm in a cell (default 5)")
    result.add_argument("--max-tokens", type=int, default=48, help="tokens of every answer (default 48)")
    result.add_argument("--temperatures", type=_numbers, help="sampling temperatures (default 0,1; short: 1)")
    result.add_argument(
        "--contexts",
        type=_lengths,
        help="numbers of random tokens per prompt; 0: the tasks' prompts (default 0,1024; short: 0)",
    )
    result.add_argument(
        "--ramp",
        type=lambda text: integers(text) if text else [],
        help="concurrency by stage (default 1,4,16,64,16,4,1; short: none)",
    )
    result.add_argument(
        "--rules",
        help="arms compared with plain decoding: a rule, rule:KxL, rule:2.2.1 (a tree), adaptive (the server's "
        "choice), again (plain once more: noise); default block,bv_race,traversal:2.2.1.1,adaptive,again; short: "
        "block:1x3 instead of the tree",
    )
    result.add_argument("--num-drafts", type=int, default=4, help="chains of a rule that takes several (default 4)")
    result.add_argument("--draft-length", type=int, default=5, help="tokens in a chain (default 5)")
    add_output_argument(result)
    result.add_argument("--plot", type=Path, help="also draw throughput, tokens per pass and gain into this PNG")
    result.add_argument(
        "--serve-args", default="", help="arguments of `polydraft serve` in one string (default: the embedded pair)"
    )
    result.add_argument(
        "--before",
        type=Path,
        metavar="FOLDER",
        help="checkout of another version of Polydraft: every arm also runs on a daemon of that version, in turns",
    )
    result.add_argument(
        "--address",
        action="append",
        default=[],
        type=_address,
        metavar="NAME=URL",
        help="another server with OpenAI's API (llama-server, vLLM, transformers serve, a daemon with other flags), "
        "which is an arm of this name; may be repeated",
    )
    result.add_argument(
        "--address-fields",
        type=json.loads,
        default={},
        help="further fields of requests to these servers, as JSON, for example '{\"cache_prompt\": false}'",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code: 1 if the daemon failed, 2 if a package is missing."""
    options = parser().parse_args(arguments)
    if options.url and options.before is not None:
        parser().error("--before starts the daemons itself: leave out --url")
    for package in ("httpx", "matplotlib") if options.plot else ("httpx",):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            print(f"polydraft bench: needs {package}: pip install 'polydraft[bench]'", file=sys.stderr)
            return 2
    try:
        _tasks(",".join(options.tasks))  # an installed package has no texts for the default ones
    except argparse.ArgumentTypeError as error:
        parser().error(f"argument --tasks: {error}")
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    import httpx

    from loadtest.bench import BenchOptions, arms_of, both_versions, run
    from loadtest.daemon import in_folder, running_daemon

    for name, value in (_SHORT if options.short else _FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    names = ("tasks", "concurrency", "repeats", "max_tokens", "temperatures", "contexts", "ramp")
    arms = arms_of(options.rules.split(","), options.num_drafts, options.draft_length)
    addresses = dict(options.address)
    wanted = BenchOptions(
        arms=arms | {name: {} for name in addresses},
        addresses=addresses,
        address_fields=options.address_fields,
        **{name: getattr(options, name) for name in names},
    )
    try:
        if options.url:
            result = run(options.url.rstrip("/"), wanted)
        else:
            print(f"starting a daemon: polydraft serve {options.serve_args}".rstrip(), file=sys.stderr)
            words = shlex.split(options.serve_args)
            # Versions must not read each other's measurements of steps.
            words += ["--profile-cache", "off"] if options.before else []
            with ExitStack() as daemons:
                url = daemons.enter_context(running_daemon(words))
                before_url = ""
                if options.before is not None:
                    before_url = daemons.enter_context(running_daemon(words, in_folder(options.before)))
                    own = {name: arm for name, arm in wanted.arms.items() if name not in addresses}
                    wanted = replace(wanted, arms=both_versions(own) | {name: {} for name in addresses})
                result = run(url, wanted, before_url)
                if options.before is not None:
                    result["before"] = commit_of(options.before)
    except (RuntimeError, httpx.HTTPError, httpx.InvalidURL) as error:
        place = f" ({options.url})" if options.url and not isinstance(error, RuntimeError) else ""
        print(f"polydraft bench: {error}{place}", file=sys.stderr)
        return 1
    _publish(result, options.output, options.plot)
    return 0


def _publish(result: dict[str, Any], output: Path | None, plot: Path | None) -> None:
    write(result, output)
    if plot is not None:
        plots.plot(result, plot)
    if "before" in result:
        print(report.versions_markdown(result))
    else:
        print(report.markdown(result) if len(result["options"]["arms"]) <= 6 else report.rules_markdown(result))
    exactness = result["exactness"]
    print(f"\n{exactness['equal_in_all_arms']} of {exactness['greedy_answers']} greedy answers equal in all arms\n")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
