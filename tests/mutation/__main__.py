"""`python -m tests.mutation [MODULE ...] [--part 3/8] [--minutes 20] [--again] [--table] [--sample
150] [--seed 1]`.

Runs the mutants of the modules (patterns; all without any) that have no result yet, and writes the
table. With `--sample` it runs some mutants of all modules that changed since their record, and
writes one table by room.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path

from tests.mutation import sample, table
from tests.mutation.changes import Module, Mutant
from tests.mutation.runs import NO_TESTS, NOT_RUN, SURVIVED, Runner, copy_tree, modules


def main() -> None:
    """Run what was asked for; every result is saved as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("patterns", nargs="*", metavar="MODULE", help="such as engine/sampling/edits.py")
    parser.add_argument("--part", default="1/1", help="3/8: of eight parts of every module's mutants, the third")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--again", action="store_true", help="run again what no test has noticed")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, of all modules without a record")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    ends = time.monotonic() + 60 * asked.minutes
    paths = modules()
    results = table.load(paths)
    chosen = [
        path for path in paths if not asked.patterns or any(fnmatch(str(path), pattern) for pattern in asked.patterns)
    ]
    if asked.sample:
        changed = [Module(path) for path in chosen if not results[str(path)].fingerprint]
        _run_sample(sample.draw(changed, asked.sample, asked.seed), ends)
        return
    for path in [] if asked.table else chosen:
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
    runner = Runner([module])
    for mutant in left:
        if time.monotonic() > ends:
            return
        status = runner.run(mutant)
        result.add(mutant, status)
        table.save(results)
        print(f"{path}:{mutant.line} {mutant.number + 1}/{len(module.mutants)} {status}", flush=True)


def _run_sample(drawn: sample.Sample, ends: float) -> None:
    """Run the drawn mutants part by part, and write the page after each; parts whose tests fail are
    left out.
    """
    copy_tree()
    results: list[sample.Sampled] = []
    failures: list[str] = []
    for mutants in sample.by_part(drawn):
        for number, status in enumerate(_statuses(mutants, ends)):
            if len(status) > 1:
                print(status, flush=True)
                failures.append(status)
                break
            mutant = mutants[number]
            results.append(sample.Sampled(mutant, status))
            sample.PAGE.write_text(sample.page(drawn, results))
            print(f"{mutant.module.name}:{mutant.line} {len(results)}/{len(drawn.mutants)} {status}", flush=True)
    print(sample.page(drawn, results))
    if failures:
        raise SystemExit("\n".join(failures))


def _statuses(mutants: list[Mutant], ends: float) -> Iterator[str]:
    """Yield the statuses of mutants of one part, or the failure of its tests on the right code.

    A process for each part, because what one part imports may change the tests of the next.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_part, args=(mutants, ends, sender))
    process.start()
    sender.close()
    with contextlib.suppress(EOFError):
        while True:
            yield receiver.recv()
    process.join()


def _run_part(mutants: list[Mutant], ends: float, sender: Connection) -> None:
    """Send the status of each mutant of one part, until time is up."""
    if time.monotonic() > ends:
        return
    try:
        runner = Runner(list({mutant.module.name: mutant.module for mutant in mutants}.values()))
    except SystemExit as failure:
        sender.send(str(failure))
        return
    for mutant in mutants:
        if time.monotonic() > ends:
            return
        sender.send(runner.run(mutant))


if __name__ == "__main__":
    main()
