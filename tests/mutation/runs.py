"""Runs tests on mutants: a process that has imported torch and other libraries is forked for each.

The child imports the project from a copy of the tree in which one file is changed. Lines that a
test reaches are found once for a module, or once for the modules of a part (coverage). A mutant of
a compiled module starts with the compiled kernels of the right tree that do not depend on the
module, and compiles the others.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutation.changes import FOLDER, Module, Mutant, statement_lines

PARTS = tomllib.loads((FOLDER / "parts.toml").read_text())["part"]
PROJECT = ("polydraft", "engine", "server", "loadtest", "deploy", "tests")
WORK = Path("mutants").absolute()
TREE, REPORT, LOG, KERNELS = WORK / "tree", WORK / "report.json", WORK / "log.txt", WORK / "kernels"
# Read by a library when it is first imported, or with processes that a fork does not take along.
_NOT_IMPORTED_BEFORE = ("triton", "numba", "llvmlite", "ray", "grpc", "coverage", "_pytest", "pytest", "xdist")
_FAULT = 99  # of this program, not of a test
KILLED, TIMEOUT, SURVIVED, NO_TESTS, HARMLESS, NOT_RUN = "ktsnh."


def part_of(path: str) -> dict[str, Any] | None:
    """The first part that names a module."""
    return next((part for part in PARTS if any(fnmatch(path, pattern) for pattern in part["modules"])), None)


def modules() -> list[Path]:
    """Every module that is mutated."""
    paths = (Path(line) for line in _tracked() if line.endswith(".py") and not line.endswith("__init__.py"))
    return sorted(path for path in paths if part_of(str(path)) is not None)


def _tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()


def copy_tree() -> None:
    """Bring the copy up to date."""
    for line in _tracked():
        source, copy = Path(line), TREE / line
        if source.is_file() and not (copy.exists() and copy.stat().st_mtime == source.stat().st_mtime):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


@dataclass
class Reached:
    """Which tests reach which lines of some modules, and how long they take; a plugin of pytest."""

    names: Sequence[str]
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Lines reached, by module and by test; by file for its shared fixtures; and under "" for
    imports.
    """

    def __post_init__(self) -> None:
        paths = [str(TREE / name) for name in self.names]
        self.cover = coverage.Coverage(data_file=None, include=paths, config_file=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Shared fixtures are made here."""
        self.cover.switch_context(item.nodeid.partition("::")[0])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.cover.switch_context(item.nodeid)
        started = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - started

    def save(self) -> None:
        """Report what was found to the process that forked this one."""
        data = self.cover.get_data()
        for measured in data.measured_files():
            lines = self.lines.setdefault(str(Path(measured).relative_to(TREE)), {})
            for line, contexts in data.contexts_by_lineno(measured).items():
                for context in contexts:
                    lines.setdefault(context, []).append(line)
        names = [name for name in sys.modules if name.partition(".")[0] not in (*PROJECT, *_NOT_IMPORTED_BEFORE)]
        found = {"seconds": self.seconds, "lines": self.lines, "libraries": names, "kernels": str(_kernel_folder())}
        REPORT.write_text(json.dumps(found))


def _arguments(part: dict[str, Any], tests: Sequence[str]) -> list[str]:
    # Assertions are not rewritten: rewriting would take most of the time, and the messages are not
    # needed.
    flags = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain"]
    return [*flags, *part.get("options", []), *tests]


def _forked(work: Callable[[], int], limit_s: float) -> int | None:
    """Exit status of some work in a forked process; None if it does not end in time."""
    child = os.fork()
    if child == 0:
        status = _FAULT
        try:
            os.setsid()
            with open(LOG, "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
                del sys.modules[name]
            sys.path[:] = [str(TREE), *(path for path in sys.path if Path(path or ".").absolute() != Path.cwd())]
            os.environ |= {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1", "MUTANT_UNDER_TEST": "1"}
            sys.dont_write_bytecode = True
            os.chdir(TREE)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _kill_group(child)
    os.waitpid(child, 0)
    return None


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Runner:
    """The tests of modules of one part."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules, self.part = modules, part_of(modules[0].name) or {}
        self.is_compiled = bool(self.part.get("kernels"))
        self.kernels: Path | None = None
        os.environ["NUMBA_CACHE_DIR"] = str(KERNELS / "right")
        self.wall_s = time.monotonic()
        status = _forked(self._reach, 3600) if self.part.get("tests") else 0
        self.wall_s = time.monotonic() - self.wall_s
        names = ", ".join(module.name for module in modules)
        if status != 0:
            raise SystemExit(f"the tests of {names} do not pass on the right code: see {LOG}")
        empty: dict[str, Any] = {"seconds": {}, "lines": {}, "libraries": []}
        report = json.loads(REPORT.read_text()) if self.part.get("tests") else empty
        self.seconds: dict[str, float] = report["seconds"]
        self.lines: dict[str, dict[str, list[int]]] = report["lines"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in report["libraries"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        # With these libraries at hand everything must still pass; else each mutant would seem to be
        # noticed.
        if self._test([*self.seconds, *self.part.get("daemons", [])], 3600) != 0:
            raise SystemExit(f"the tests of {names} do not pass in a forked process: see {LOG}")
        if self.is_compiled:
            self.kernels = Path(report["kernels"])

    def _reach(self) -> int:
        reached = Reached([module.name for module in self.modules])
        with reached.cover.collect():
            status = pytest.main(_arguments(self.part, self.part.get("tests", [])), plugins=[reached])
        reached.save()
        return int(status)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach its statement, the quick ones first, then those of daemons; all of a
        compiled module.
        """
        if self.is_compiled:
            return list(self.part["tests"])
        span = set(statement_lines(mutant.module.source, mutant.line))
        reached = self.lines.get(mutant.module.name, {})
        hit = {name for name, lines in reached.items() if not span.isdisjoint(lines)}
        reaching = [test for test in self.seconds if "" in hit or test in hit or test.partition("::")[0] in hit]
        return [*sorted(reaching, key=self.seconds.__getitem__), *self.part.get("daemons", [])]

    def run(self, mutant: Mutant) -> str:
        """One of the letters above."""
        if mutant.reason:
            return HARMLESS
        tests = self.tests_of(mutant)
        if not tests:
            return NO_TESTS
        path = TREE / mutant.module.name
        limit_s = 30 + 4 * self.wall_s
        if self.kernels:
            shutil.rmtree(KERNELS / "mutant", ignore_errors=True)
            os.environ["NUMBA_CACHE_DIR"] = str(KERNELS / "mutant")
        try:
            path.write_text(mutant.source)
            status = self._test(tests, limit_s, mutant.module.name)
        finally:
            shutil.copy2(mutant.module.name, path)
        if status is None:
            return TIMEOUT
        if status == _FAULT:
            raise SystemExit(f"tests could not be run on a mutant of {mutant.module.name}: see {LOG}")
        # No test is left where a part's options deselect those that reach the line.
        return {0: SURVIVED, 5: NO_TESTS}.get(status, KILLED)

    def _test(self, tests: list[str], limit_s: float, changed: str = "") -> int | None:
        return _forked(lambda: self._tested(tests, changed), limit_s)

    def _tested(self, tests: list[str], changed: str) -> int:
        """Exit status of some tests, in a forked process; changed: the module that is changed."""
        if self.kernels:
            stale = [f"{name}.*" for name in compiled_with(Path(changed))]
            shutil.copytree(self.kernels, _kernel_folder(), ignore=shutil.ignore_patterns(*stale), dirs_exist_ok=True)
        return int(pytest.main(_arguments(self.part, tests)))


def _kernel_folder() -> Path:
    """Folder of the compiled kernels of this process's tree, below NUMBA_CACHE_DIR."""
    from engine.cpu.compiler import cache_folder

    folder = cache_folder()
    assert folder is not None, "compiled kernels cannot be stored"
    return folder


def compiled_with(module: Path) -> set[str]:
    """Names of the Numba modules whose compiled code may have code of a module inside, with its own
    name.
    """
    imported = {path.stem: _imported_by(path) for path in Path("engine/cpu/compiled").glob("*.py")}
    stale, before = {module.stem}, set[str]()
    while stale != before:
        before = set(stale)
        stale |= {name for name, names in imported.items() if names & before}
    return stale


def _imported_by(path: Path) -> set[str]:
    """Names of modules, or of what is in them, that a module imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
    return names
