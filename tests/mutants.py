"""The table of a mutation run (`make mutants`): of every module, how many changes of its code the tests notice.

`python -m tests.mutants` reads what mutmut has left under `mutants/` and writes docs/results/mutants.{json,md}; a
module that was not run again keeps its row there while its functions are the same, comments and docstrings aside.
Changes that nothing can notice are in `harmless_mutants.toml`, with the reason of each; all others that survive are
gaps. `python -m tests.mutants --skip` has mutmut leave out those of them that it has made and not run yet.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field
from difflib import unified_diff
from fnmatch import fnmatch
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from mutmut.mutation.data import MutantLineSpans, SourceFileMutationData
from mutmut.mutation.diff_apply import generated_function_names
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

_SKIPPED = 34  # mutmut's exit code
RESULTS = Path("docs/results/mutants.json")
HARMLESS = tomllib.loads(Path("tests/harmless_mutants.toml").read_text())["harmless"]


@dataclass(frozen=True)
class Survivor:
    """A change of the code that every test passed."""

    function: str
    before: str
    after: str
    reason: str
    """Why nothing can notice it; empty where something should."""


@dataclass
class Module:
    """What became of a module's mutants."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    survivors: list[Survivor] = field(default_factory=list)
    source: str = ""
    """SHA-256 of the functions that were mutated (`fingerprint`)."""

    @property
    def num_run(self) -> int:
        return sum(count for status, count in self.counts.items() if status != "not run")

    @property
    def num_noticed(self) -> int:
        """Killed by a test, or by its time."""
        return self.counts["killed"] + self.counts["timeout"]

    @property
    def num_harmless(self) -> int:
        return sum(bool(survivor.reason) for survivor in self.survivors)

    @property
    def score(self) -> float | None:
        """Share that is noticed of those that can be."""
        can_be = self.num_run - self.num_harmless
        return self.num_noticed / can_be if can_be else None


def fingerprint(source: str) -> str:
    """SHA-256 of a module's functions and methods, without their docstrings: all that mutmut changes."""
    functions = []
    for top in ast.parse(source).body:
        for one in [top, *(top.body if isinstance(top, ast.ClassDef) else [])]:
            if isinstance(one, ast.FunctionDef):
                if ast.get_docstring(one) is not None:
                    del one.body[0]
                functions.append(ast.dump(one))
    return sha256("\n".join(functions).encode()).hexdigest()


def change_of(mutant: str, path: Path) -> tuple[str, str]:
    """Its lines before and after."""
    spans = MutantLineSpans.load(path)
    assert spans is not None, f"{path} has not been mutated by this version of mutmut"
    texts = spans.read_function_sources(generated_function_names(mutant))
    before, after = (re.sub(r"__mutmut_\w+", "", text).splitlines() for text in texts)
    changes = [line for line in unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    removed, added = (" ".join(line[1:].strip() for line in changes if line[0] == sign) for sign in "-+")
    return removed, added


def reason_of(module: str, before: str, after: str) -> str:
    """Why a change is harmless; empty where it is not known to be."""
    for one in HARMLESS:
        if fnmatch(module, one["module"]) and re.search(one["change"], f"{before} -> {after}"):
            return str(one["reason"])
    return ""


def skip(path: Path) -> int:
    """Have mutmut leave out a module's harmless mutants that it has not run; how many there are."""
    known, count = SourceFileMutationData(path=path), 0
    known.load()
    for mutant, exit_code in known.exit_code_by_key.items():
        if exit_code is None and reason_of(str(path), *change_of(mutant, path)):
            known.exit_code_by_key[mutant], count = _SKIPPED, count + 1
    known.save()
    return count


def read(path: Path) -> Module:
    known = SourceFileMutationData(path=path)
    known.load()
    module = Module(str(path), source=fingerprint(path.read_text()))
    for mutant, exit_code in known.exit_code_by_key.items():
        status = "not run" if exit_code in (None, 2) else status_by_exit_code[exit_code]
        module.counts[status] += 1
        if status in ("survived", "no tests", "suspicious", "skipped"):
            before, after = change_of(mutant, path)
            function = mutant.rpartition(".")[2].partition("__mutmut")[0].removeprefix("x").lstrip("_ǁ")
            reason = reason_of(module.name, before, after)
            module.survivors.append(Survivor(function.replace("ǁ", "."), before, after, reason))
    return module


def kept() -> dict[str, Module]:
    """What the committed table says, by module; reasons are looked up again, as some may be new."""
    modules = {}
    for one in json.loads(RESULTS.read_text())["modules"]:
        module = Module(one["module"], Counter(one["mutants"]), source=one.get("source", ""))
        for survivor in one["survivors"]:
            reason = reason_of(module.name, survivor["before"], survivor["after"])
            module.survivors.append(Survivor(**{**survivor, "reason": reason}))
        modules[module.name] = module
    return modules


def latest(path: Path, before: dict[str, Module]) -> Module:
    """What is known of a module: from the table where more of the same functions was run then than now."""
    now = read(path) if Path("mutants", path).exists() else Module(str(path))
    source = fingerprint(path.read_text())
    then = before.get(str(path))
    return then if then is not None and then.source == source and then.num_run > now.num_run else now


def table(modules: list[Module]) -> str:
    """As Markdown."""
    lines = [
        "# Mutants",
        "",
        f"`make mutants` changes the code one place at a time ({tool()}) and runs the tests that reach it. A mutant is",
        "killed when a test fails, or when its tests do not end. The score is the killed share of those that were run",
        "and are not harmless; harmless ones, with the reason, are below (`--skip` counts them as run). What was not",
        "run counts in no score: where `run` is less than `mutants` a module was run in part, and one without numbers",
        "was not begun.",
        "",
        "| module | mutants | run | killed | timeout | harmless | gaps | score |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for module in modules:
        score = "not run" if module.score is None else f"{module.score:.1%}"
        score += " in part" if module.score is not None and module.num_run < module.counts.total() else ""
        gaps = module.num_run - module.num_noticed - module.num_harmless
        cells = (module.name.removeprefix("engine/"), module.counts.total(), module.num_run, module.counts["killed"],
                 module.counts["timeout"], module.num_harmless, gaps, score)  # fmt: skip
        lines.append("| " + " | ".join(str(cell or "-") for cell in cells) + " |")
    for title, harmless in (("Harmless", True), ("Gaps", False)):
        lines += ["", f"## {title}", ""]
        for module in modules:
            for one in module.survivors:
                if bool(one.reason) == harmless:
                    lines.append(
                        f"- `{module.name.removeprefix('engine/')}` {one.function}: `{one.before}` -> `{one.after}`"
                    )
                    lines += [f"  {one.reason}"] if harmless else []
    return "\n".join(lines) + "\n"


def tool() -> str:
    return f"mutmut {version('mutmut')}"


def main() -> None:
    """Write both files and print the table, or skip what is harmless."""
    if sys.argv[1:] == ["--skip"]:
        print(sum(skip(path) for path in walk_mutatable_files()), "mutants need not be run")
        return
    before = kept()
    modules = [latest(path, before) for path in sorted(walk_mutatable_files())]
    found = [
        {
            "module": module.name,
            "source": module.source,
            "mutants": dict(module.counts),
            "score": module.score,
            "survivors": [asdict(survivor) for survivor in module.survivors],
        }
        for module in modules
    ]
    RESULTS.write_text(json.dumps({"tool": tool(), "modules": found}, indent=1, ensure_ascii=False) + "\n")
    text = table(modules)
    RESULTS.with_suffix(".md").write_text(text)
    print(text.partition("## Harmless")[0])


if __name__ == "__main__":
    main()
