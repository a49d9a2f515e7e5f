"""`python -m tests.mutation [MODULE ...] [--part 3/8] [--minutes 20] [--again] [--table]`.

Runs the mutants of the modules (patterns; all without any) that have no result yet, and writes the table.
"""

from __future__ import annotations

import argparse
import time
from fnmatch import fnmatch
from pathlib import Path

from tests.mutation import table
from tests.mutation.changes import Module
from tests.mutation.runs import NO_TESTS, NOT_RUN, SURVIVED, Runner, copy_tree, modules


def main() -> None:
    """Run what was asked for; every result is saved as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("patterns", nargs="*", metavar="MODULE", help="such as engine/sampling/edits.py")
    parser.add_argument("--part", default="1/1", help="3/8: of eight parts of every module's mutants, the third")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--again", action="store_true", help="run again what no test has noticed")
    parser.add_argument("--table", action="store_true", help="only write the table")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    ends = time.monotonic() + 60 * asked.minutes
    paths = modules()
    results = table.load(paths)
    for path in [] if asked.table else paths:
        if not asked.patterns or any(fnmatch(str(path), pattern) for pattern in asked.patterns):
            _run(path, results, part, parts, ends, asked.again)
    table.save(results)
    print(table.RESULTS.with_suffix(".md").read_text().partition("## Gaps")[0])


def _run(path: Path, results: dict[str, table.Result], part: int, parts: int, ends: float, again: bool) -> None:
    module, result = Module(path), results[str(path)]
    result.begin(module)
    if again:
        result.statuses = result.statuses.replace(SURVIVED, NOT_RUN).replace(NO_TESTS, NOT_RUN)
        changes = [one.change for one in module.mutants if result.statuses[one.number] == NOT_RUN]
        result.survivors = [one for one in result.survivors if (one.before, one.after) not in changes]
    left = [one for one in module.mutants if one.number % parts == part - 1 and result.statuses[one.number] == NOT_RUN]
    if not left or time.monotonic() > ends:
        return
    copy_tree()
    runner = Runner(module)
    for mutant in left:
        if time.monotonic() > ends:
            return
        status = runner.run(mutant)
        result.add(mutant, status)
        table.save(results)
        print(f"{path}:{mutant.line} {mutant.number + 1}/{len(module.mutants)} {status}", flush=True)


if __name__ == "__main__":
    main()
