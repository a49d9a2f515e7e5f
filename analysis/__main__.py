"""Command line of `polydraft analyze`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis.arms import add_arguments as add_arms_arguments
from analysis.arms import analyze_arms
from analysis.around import add_arguments as add_around_arguments
from analysis.around import analyze_around
from analysis.device_model import add_arguments as add_plan_arguments
from analysis.device_model import analyze_plan
from analysis.laws import analyze_blocks, analyze_laws
from analysis.loading import add_pair_arguments, integers
from analysis.pair import analyze_pair
from analysis.papers.run import add_arguments as add_papers_arguments
from analysis.papers.run import analyze_papers
from analysis.reports import add_arguments as add_reports_arguments
from analysis.reports import analyze_reports
from analysis.selfcheck import selfcheck
from analysis.times import analyze_times
from engine.errors import ConfigError, LoadError
from loadtest.arguments import Parser


def _temperatures(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return values


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = Parser(
        prog="polydraft analyze",
        description="Value of drafts: optimal acceptance, acceptance of each rule, exactness, recommended settings.",
    )
    commands = result.add_subparsers(dest="command", required=True)
    _add_pair(commands.add_parser("pair", help="how good a draft model is for a target, and which flags to run"))
    _add_arms(
        commands.add_parser("arms", help="speculation and plain decoding, measured in alternating turns of a few steps")
    )
    around = commands.add_parser("around", help="milliseconds of a step by part: model passes and overhead")
    add_around_arguments(around)
    around.add_argument("--concurrency", type=integers, default=[1, 16, 64], help="requests at once (default 1,16,64)")
    reports = commands.add_parser("reports", help="compare the speedup that answers report with the measured one")
    add_pair_arguments(reports)
    add_reports_arguments(reports)
    plan = commands.add_parser("plan", help="estimate a pair's speed on a device that you do not have")
    add_plan_arguments(plan)
    papers = commands.add_parser("papers", help="tables of the three papers for a pair (half an hour on two cores)")
    add_papers_arguments(papers)
    laws = commands.add_parser("laws", help="optimum and acceptance of every rule at one position")
    laws.add_argument("file", type=Path, help='JSON: [{"p": [...], "q": [...], "n": k}, ...]')
    blocks = commands.add_parser(
        "blocks", help="expected length and output distribution of a step of every rule, by enumeration"
    )
    blocks.add_argument("file", type=Path, help='JSON: [{"V": v, "L": l, "K": k, "rows": {"0,1": {"p", "q"}}}, ...]')
    _add_selfcheck(
        commands.add_parser("selfcheck", help="test every rule on a pair's own distributions; exit 1 on failure")
    )
    times = commands.add_parser("times", help="time of a verification step of every rule on this machine")
    times.add_argument("--num-drafts", type=integers, default=[1, 2, 4], help="chains, e.g. 1,2,4")
    times.add_argument("--vocabulary", type=integers, default=[4096, 32000, 152000], help="sizes, e.g. 4096,152000")
    times.add_argument("--draft-length", type=int, default=5, help="tokens in a chain (default 5)")
    times.add_argument("--requests", type=int, default=1, help="requests verified together (default 1)")
    times.add_argument("--repeats", type=int, default=5, help="timed runs; the median is printed (default 5)")
    times.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    return result


def _add_pair(pair: argparse.ArgumentParser) -> None:
    add_pair_arguments(pair)
    pair.add_argument(
        "--prompts", type=Path, help="JSON lines with prompt, text or messages (default: held-out dialogues)"
    )
    pair.add_argument("--most-prompts", type=int, default=16, help="prompts used (default 16)")
    pair.add_argument(
        "--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)"
    )
    pair.add_argument("--tokens", type=int, default=48, help="tokens of an answer (default 48)")
    pair.add_argument(
        "--positions", type=int, default=128, help="positions whose distributions are analysed (default 128)"
    )
    pair.add_argument(
        "--shapes", help="shapes to measure instead of a grid, e.g. block:1x8,bv_race:4x4,traversal:2.2.1"
    )
    pair.add_argument("--rules", help="comma-separated rules (default: all)")
    pair.add_argument(
        "--draft-methods",
        choices=["own", "all"],
        default="own",
        help="the rule's default draft method, or all it supports",
    )
    pair.add_argument("--num-drafts", type=integers, default=[1, 2, 4], help="chains (default 1,2,4)")
    pair.add_argument("--draft-length", type=integers, default=[4], help="tokens in a chain (default 4)")
    pair.add_argument("--temperature", type=_temperatures, default=[1.0], help="temperatures (default 1)")
    pair.add_argument(
        "--concurrency", type=integers, default=[1, 4, 16, 64], help="requests at once (default 1,4,16,64)"
    )
    pair.add_argument("--output", type=Path, default=Path("pair"), help="folder for pair.json and plots (default pair)")
    pair.add_argument("--fresh", action="store_true", help="discard the measurements of an interrupted run")


def _add_arms(arms: argparse.ArgumentParser) -> None:
    add_pair_arguments(arms)
    add_arms_arguments(arms)
    arms.add_argument("--concurrency", type=integers, default=[1, 4, 16], help="requests at once (default 1,4,16)")


def _add_selfcheck(check: argparse.ArgumentParser) -> None:
    add_pair_arguments(check)
    check.add_argument("--rules", help="comma-separated rules (default: all)")
    check.add_argument("--num-drafts", type=int, default=4, help="chains (default 4)")
    check.add_argument("--draft-length", type=int, default=3, help="tokens in a chain (default 3)")
    check.add_argument("--answers", type=int, default=1000, help="answers per rule and prompt (default 1000)")
    check.add_argument("--prompts", type=int, default=1, help="prompts, generated by the target (default 1)")
    check.add_argument("--temperature", type=float, default=1.0, help="temperature (default 1)")
    check.add_argument("--concurrency", type=int, default=64, help="requests at once (default 64)")


_LONGEST_AT_A_TERMINAL = 2000

_COMMANDS: dict[str, Callable[[argparse.Namespace], tuple[Any, bool]]] = {
    "laws": lambda options: (analyze_laws(options.file), True),
    "blocks": lambda options: (analyze_blocks(options.file), True),
    "times": lambda options: (analyze_times(options), True),
    "arms": lambda options: (analyze_arms(options), True),
    "around": lambda options: (analyze_around(options), True),
    "plan": lambda options: (analyze_plan(options), True),
    "reports": lambda options: (analyze_reports(options), True),
    "pair": lambda options: (analyze_pair(options), True),
    "papers": lambda options: (analyze_papers(options), True),
    "selfcheck": selfcheck,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one analysis; return 0, 1 if a self-check failed or a model cannot be loaded, 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        result, passed = _COMMANDS[options.command](options)
    except (ConfigError, LoadError) as error:
        print(f"polydraft analyze: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    text = json.dumps(result)
    if sys.stdout.isatty() and len(text) > _LONGEST_AT_A_TERMINAL:
        text = f"({len(text)} characters of JSON: redirect the output to see them)"
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
