"""The results of mutation runs: docs/results/mutants.{json,md}.

Both are made of the modules that the tree has now, so they cannot name others. A module keeps what
is known of its mutants while its functions are the same, comments and docstrings aside; runs of
parts of it add up.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.mutation.changes import Module, Mutant, reason_of
from tests.mutation.runs import HARMLESS, KILLED, NO_TESTS, NOT_RUN, SURVIVED, TIMEOUT

RESULTS = Path("docs/results/mutants.json")


@dataclass(frozen=True)
class Survivor:
    """A change that no test notices."""

    function: str
    note: str
    """Reason why no test noticed it, if known."""
    before: str
    after: str


@dataclass
class Result:
    """Results of a module's mutants."""

    module: str
    fingerprint: str = ""
    """Fingerprint of its functions when it was run; empty if it never was."""
    statuses: str = ""
    """A letter for each mutant, in order."""
    survivors: list[Survivor] = field(default_factory=list)

    def count(self, *statuses: str) -> int:
        return sum(Counter(self.statuses)[status] for status in statuses)

    @property
    def num_gaps(self) -> int:
        return sum(not reason_of(self.module, one.before, one.after) for one in self.survivors)

    @property
    def score(self) -> float | None:
        """Share that is noticed of those that were run and can be."""
        noticed = self.count(KILLED, TIMEOUT)
        return noticed / (noticed + self.num_gaps) if noticed + self.num_gaps else None

    def begin(self, module: Module) -> None:
        """Forget what is known of other functions."""
        if self.fingerprint != module.fingerprint or len(self.statuses) != len(module.mutants):
            self.fingerprint, self.statuses, self.survivors = module.fingerprint, NOT_RUN * len(module.mutants), []

    def add(self, mutant: Mutant, status: str) -> None:
        """Note what became of a mutant."""
        self.statuses = self.statuses[: mutant.number] + status + self.statuses[mutant.number + 1 :]
        if status in (SURVIVED, NO_TESTS, HARMLESS):
            note = "" if status != NO_TESTS else "no test reaches it"
            self.survivors.append(Survivor(mutant.function, note, *mutant.change))


def load(paths: list[Path], file: Path = RESULTS) -> dict[str, Result]:
    """Return the results of these modules; those whose functions have changed count as never
    run.
    """
    known = {}
    for one in json.loads(file.read_text())["modules"] if file.exists() else []:
        if "statuses" in one:
            known[one["module"]] = Result(**{**one, "survivors": [Survivor(**each) for each in one["survivors"]]})
    found = {}
    for path in paths:
        result = known.get(str(path), Result(str(path)))
        is_same = result.fingerprint and result.fingerprint == Module(path).fingerprint
        found[str(path)] = result if is_same else Result(str(path))
    return found


def save(results: dict[str, Result], file: Path = RESULTS) -> None:
    """Write both files."""
    modules = [asdict(result) for result in results.values()]
    document = {"tool": f"mutmut {version('mutmut')}", "modules": modules}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    file.with_suffix(".md").write_text(table(list(results.values())))


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    lines = [
        "# Mutants",
        "",
        f"`make mutants` changes the code one place at a time (operators of mutmut {version('mutmut')}) and runs the",
        "tests that reach it. A mutant is killed if a test fails; a timeout counts as noticed, too. The score is the",
        "share that is noticed of those that were run and are not harmless. The reasons of harmless ones are in",
        "`tests/mutation/harmless.toml`. `not run`: never, or not since its functions changed.",
        "",
        "| module | mutants | run | killed | timeout | harmless | gaps | score |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        num_run = len(one.statuses) - one.count(NOT_RUN)
        score = "not run" if one.score is None else f"{one.score:.1%}"
        score += " in part" if one.score is not None and num_run < len(one.statuses) else ""
        cells = (one.module, len(one.statuses), num_run, one.count(KILLED), one.count(TIMEOUT),
                 len(one.survivors) - one.num_gaps, one.num_gaps, score)  # fmt: skip
        lines.append("| " + " | ".join(str(cell or "-") for cell in cells) + " |")
    lines += ["", "## Gaps", ""]
    for result in results:
        for one in result.survivors:
            if not reason_of(result.module, one.before, one.after):
                note = f" ({one.note})" if one.note else ""
                lines.append(f"- `{result.module}` {one.function}: `{one.before}` -> `{one.after}`{note}")
    return "\n".join(lines) + "\n"
