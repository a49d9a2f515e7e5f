"""Measures of how readable the code is, as one Markdown table of values and aims (`make house`).

`--rooms` prints counts of modules by room, a folder of a package: modules of deeper folders
count for it, and modules directly in a package count for the package. `--places` lists what is
counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.entered_files import step_files
from tests.prose import room_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("polydraft", "engine", "server", "loadtest", "research", "deploy", "tests")
MEASURED = ("engine", "server")
"""Packages of the table; the rooms of all packages are listed."""

MOST_COLUMNS = 100
MOST_LINES = 400
MANY_PARAMETERS = 7

NEEDS_MODULE = "engine/needs.py"
_FACTS = "text shifts seed_stable over_acceptance draft_method rule text_drafts"
PLAIN_FACTS = frozenset(_FACTS.split())
"""Fields of a row and its request from which `engine.needs` works out what the row needs."""
PLAIN_NAMES = re.compile(r"_*(is|are|be|never|was)_(\w+_)?(plain|usual|recorded)$")
"""Names of functions and fields that are the question itself."""
NO_ROWS = "engine/models/"
"""Modules here know no rows: `is_plain` of a linear layer is another question."""
DEFINITIONS = """
- Places that ask "is it plain?": `engine/needs.py`, each function or field of engine/ (models
  apart) whose name is the question (`is_plain`, `are_recorded`, `_is_usual`), and each function
  of which one condition tests two or more of the fields from which needs follow.
- Rooms are the folders directly in engine/. A room has a compiler's code if a module of it imports
  the compiler or the decorator that wraps it.
- Imports that go up: imports of modules, by the order of rooms in pyproject.toml.
- Files of a step: all files of engine/ that one step enters, which decodes two adaptive requests
  with torch's operations.
- Parameters are counted without `self` and `cls`. Kernels are functions that Numba or Triton
  compiles: their parameters are arrays and sizes. `--places` lists what is counted."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

COMPILING_DECORATORS = {"compiled_for_cpu", "intrinsic", "overload", "jit"}
COMPILERS = {"Numba": {"numba", "llvmlite"}, "Triton": {"triton"}}


class Place(NamedTuple):
    """A place that is counted."""

    line: int
    name: str


@dataclass
class ModuleCounts:
    """Counts of one module, or sums of several."""

    num_lines: int = 0
    num_long_lines: int = 0
    num_ternaries: int = 0
    num_multiple_assignments: int = 0
    local_imports: list[Place] = field(default_factory=list)
    wide_functions: list[Place] = field(default_factory=list)
    num_wide_kernels: int = 0
    """Wide functions that a compiler compiles: their parameters are arrays and sizes."""

    def add(self, other: ModuleCounts) -> None:
        """Add the counts of another module."""
        self.num_lines += other.num_lines
        self.num_long_lines += other.num_long_lines
        self.num_ternaries += other.num_ternaries
        self.num_multiple_assignments += other.num_multiple_assignments
        self.local_imports += other.local_imports
        self.wide_functions += other.wide_functions
        self.num_wide_kernels += other.num_wide_kernels

    def per_thousand_lines(self, count: int) -> float:
        """Return a count per 1,000 lines."""
        return 1000 * count / max(1, self.num_lines)

    @property
    def long_share(self) -> float:
        """Return the share of long lines, in percent."""
        return 100 * self.num_long_lines / max(1, self.num_lines)


def count_module(source: str) -> ModuleCounts:
    """Return the counts of a module."""
    lines = source.splitlines()
    tree = ast.parse(source)
    counts = ModuleCounts(num_lines=len(lines))
    counts.num_long_lines = sum(len(line) > MOST_COLUMNS for line in lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            counts.num_ternaries += 1
        elif isinstance(node, ast.Assign) and assigns_several(node):
            counts.num_multiple_assignments += 1
        elif isinstance(node, FUNCTIONS) and num_parameters(node) >= MANY_PARAMETERS:
            counts.wide_functions.append(Place(node.lineno, node.name))
            counts.num_wide_kernels += is_compiled(node)
    counts.local_imports = list(imports_in_functions(tree))
    return counts


def assigns_several(node: ast.Assign) -> bool:
    """Return whether a statement assigns several values at once: `a, b = x, y`."""
    if not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def is_compiled(function: Function) -> bool:
    """Return whether a decorator gives a function to Numba or Triton."""
    decorators = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(ast.unparse(each).split(".")[-1] in COMPILING_DECORATORS for each in decorators)


def num_parameters(function: Function) -> int:
    """Return the number of parameters of a function, `self` and `cls` apart."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    starred = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return len(positional) + len(arguments.kwonlyargs) + len(starred)


def imports_in_functions(tree: ast.AST, is_inside: bool = False) -> Iterator[Place]:
    """Yield the import statements in functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and is_inside:
            yield Place(node.lineno, ast.unparse(node))
        yield from imports_in_functions(node, is_inside or isinstance(node, FUNCTIONS))


def plain_questions(source: str) -> Iterator[Place]:
    """Yield the functions and fields that ask by themselves whether a row is plain.

    They are named as the question (`PLAIN_NAMES`), or a condition in them tests two or more of
    `PLAIN_FACTS`. Conditions that only raise an error check a request, and do not count.
    """
    for name, node in definitions(ast.parse(source)):
        is_question = PLAIN_NAMES.match(name) is not None
        if is_question or any(len(facts_in(test)) >= 2 for test in conditions(node)):
            yield Place(node.lineno, name)


def definitions(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions and the annotated fields of a module, with their names."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def conditions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the conditions in a function: tests of `if`, `while`, `and`, `or`, `any`, filters."""
    for node in ast.walk(statement):
        if isinstance(node, ast.If):
            if not all(isinstance(each, ast.Raise) for each in node.body):
                yield node.test
        elif isinstance(node, ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.BoolOp):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("any", "all", "bool"):
                yield from node.args
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BoolOp):
            yield node.value


def facts_in(node: ast.AST) -> set[str]:
    """Return the `PLAIN_FACTS` that a condition tests; indices of a look-up are not tested."""
    facts = {node.attr} & PLAIN_FACTS if isinstance(node, ast.Attribute) else set()
    children = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return facts.union(*map(facts_in, children))


def reads_of_needs(source: str) -> Iterator[Place]:
    """Yield the functions that read `needs` of a row or a part of a step."""
    for name, node in definitions(ast.parse(source)):
        for child in ast.walk(node):
            is_read = isinstance(child, ast.Attribute) and child.attr == "needs"
            if is_read and ast.unparse(child.value) in ("row", "part", "self.sequence", "sequence"):
                yield Place(node.lineno, name)
                break


class Import(NamedTuple):
    """An import of a module, or of a name in it."""

    module: str
    names: tuple[str, ...]


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Yield all imports below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield Import(node.module, tuple(alias.name for alias in node.names))


def compiles_with(sources: dict[str, str], packages: set[str]) -> list[str]:
    """Return the modules with code of a compiler: they import it, or a wrapper of its decorator.

    sources: by path; packages: names of the compiler's packages. A wrapper is a function at the
    top of a module that imports the compiler and defines the decorator inside.
    """
    trees = {path: ast.parse(source) for path, source in sources.items()}
    wrappers = {
        (module_name(path), node.name)
        for path, tree in trees.items()
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.FunctionDef) and wraps_compiler(node, packages)
    }
    modules = []
    for path, tree in trees.items():
        for each in imports_of(tree):
            uses_wrapper = any((each.module, name) in wrappers for name in each.names)
            if uses_wrapper or each.module.split(".")[0] in packages:
                modules.append(path)
                break
    return modules


def wraps_compiler(function: ast.FunctionDef, packages: set[str]) -> bool:
    """Return whether a function returns a decorator of a compiler."""
    defines_decorator = any(isinstance(node, ast.FunctionDef) for node in function.body)
    imported = {each.module.split(".")[0] for each in imports_of(function)}
    return defines_decorator and bool(imported & packages)


def module_name(path: str) -> str:
    """Return the dotted name of a module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def server_order(pyproject: str) -> tuple[tuple[str, ...], ...]:
    """Return the layers of the server in the contracts, highest first."""
    importlinter = tomllib.loads(pyproject)["tool"]["importlinter"]
    for contract in importlinter["contracts"]:
        if contract["type"] == "layers" and contract.get("containers") == ["server"]:
            layers = [re.split(r"[|:]", layer) for layer in contract["layers"]]
            return tuple(tuple(name.strip(" ()") for name in layer) for layer in layers)
    raise ValueError("no contract has the layers of the server")


def arrows_up(imports: Sequence[tuple[str, str]], order: Sequence[Sequence[str]]) -> list[str]:
    """Return the imports of modules of the server that lead to a higher room.

    imports: (importing module, imported module) with dotted names; order: rooms, highest first.
    Imports of a room that the order does not name are left out.
    """
    levels = {name: level for level, names in enumerate(order) for name in names}
    arrows = []
    for importer, imported in imports:
        source, target = (module.split(".")[1:2] for module in (importer, imported))
        if not source or not target or source[0] not in levels or target[0] not in levels:
            continue
        if levels[target[0]] < levels[source[0]]:
            arrows.append(f"{importer} -> {imported}")
    return sorted(arrows)


def server_imports() -> list[tuple[str, str]]:
    """Return the imports between modules of the server."""
    import grimp

    graph = grimp.build_graph("server", cache_dir=None)
    return [
        (importer, imported)
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
    ]


class Measure(NamedTuple):
    """A row of the table."""

    title: str
    value: str
    aim: str = ""
    places: Sequence[str] = ()


def main() -> int:
    """Print the table, and a warning for every long module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="counts of single modules by room")
    parser.add_argument("--places", action="store_true", help="list the places that are counted")
    options = parser.parse_args()
    sources = read_sources()
    if options.rooms:
        print_rooms(sources)
    else:
        print_measures(measures(sources), options.places)
    for module in long_modules(sources):
        print(f"warning: {module}", file=sys.stderr)
    return 0


def read_sources() -> dict[str, str]:
    """Return the modules that git knows, by path."""
    command = ["git", "ls-files", *(f"{package}/*.py" for package in PACKAGES)]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.split() if (ROOT / path).exists()]
    return {path: (ROOT / path).read_text() for path in paths}


def measures(sources: dict[str, str]) -> list[Measure]:
    """Return the rows of the table."""
    by_package = {
        package: {path: text for path, text in sources.items() if path.startswith(f"{package}/")}
        for package in MEASURED
    }
    engine = by_package["engine"]
    counts = {package: sum_of(modules) for package, modules in by_package.items()}
    arrows = arrows_up(server_imports(), server_order((ROOT / "pyproject.toml").read_text()))
    files = step_files()
    return [
        *plainness_measures(engine),
        compiler_measure(engine),
        local_import_measure(engine),
        Measure("imports that go up, server", str(len(arrows)), "0", arrows),
        Measure(
            "files that a default step with `EagerStep` enters, without compiled paths",
            f"{len(files.step)} ({len(files.launched)} below `EagerStep`)",
            "<= 24",
            [*files.step, *(f"below EagerStep: {name}" for name in files.launched)],
        ),
        *density_measures(counts),
        wide_function_measure(engine),
        long_module_measure(sources),
    ]


def plainness_measures(engine: dict[str, str]) -> Iterator[Measure]:
    """Yield the places that ask whether a row is plain, and those that read the answer."""
    asking, reading = [], []
    for path, source in engine.items():
        if path != NEEDS_MODULE and not path.startswith(NO_ROWS):
            asking += [f"{path}:{place.line}: {place.name}" for place in plain_questions(source)]
            reading += [f"{path}:{place.line}: {place.name}" for place in reads_of_needs(source)]
    in_needs = [NEEDS_MODULE] if NEEDS_MODULE in engine else []
    asking = [*in_needs, *asking]
    yield Measure('places that ask "is it plain?"', str(len(asking)), "1", asking)
    yield Measure("functions that read a row's `needs`", str(len(reading)), "", reading)


def compiler_measure(engine: dict[str, str]) -> Measure:
    """Return the rooms with code of each compiler."""
    modules = {name: compiles_with(engine, packages) for name, packages in COMPILERS.items()}
    rooms = {name: sorted({room_of(path) for path in paths}) for name, paths in modules.items()}
    # A folder of a room belongs to it; modules directly in engine/ are a room, too.
    places = [f"{name}: {', '.join(names)}" for name, names in rooms.items()]
    value = " / ".join(str(len(names)) for names in rooms.values())
    return Measure("rooms with Numba / Triton code", value, "1 / 1", places)


def local_import_measure(engine: dict[str, str]) -> Measure:
    """Return the imports inside functions."""
    places = [
        f"{path}:{place.line}: {place.name}"
        for path, source in engine.items()
        for place in imports_in_functions(ast.parse(source))
    ]
    num_within = sum(re.search(r": (from|import) engine\b", place) is not None for place in places)
    value = f"{len(places)} ({num_within} of engine modules)"
    return Measure("imports inside functions, engine", value, "< 25", places)


def density_measures(counts: dict[str, ModuleCounts]) -> Iterator[Measure]:
    """Yield what makes pages dense, by package."""
    for package, total in counts.items():
        ternaries = total.per_thousand_lines(total.num_ternaries)
        assignments = total.per_thousand_lines(total.num_multiple_assignments)
        title = f"ternaries, assignments of several values at once, per 1,000 lines, {package}"
        yield Measure(title, f"{ternaries:.1f}, {assignments:.1f}", "<= 12, <= 8")
    for package, total in counts.items():
        title = f"lines over {MOST_COLUMNS} columns, {package}"
        yield Measure(title, f"{total.long_share:.1f} %", "<= 4 %")


def wide_function_measure(engine: dict[str, str]) -> Measure:
    """Return the functions with many parameters."""
    places = [
        f"{path}:{place.line}: {place.name}"
        for path, source in engine.items()
        for place in count_module(source).wide_functions
    ]
    num_kernels = sum_of(engine).num_wide_kernels
    title = f"functions with {MANY_PARAMETERS} or more parameters (`self` apart), engine"
    value = f"{len(places) - num_kernels}, and {num_kernels} compiled kernels"
    return Measure(title, value, "<= 20 without kernels", places)


def long_module_measure(sources: dict[str, str]) -> Measure:
    """Return the modules with many lines; each is a warning."""
    places = long_modules(sources)
    title = f"modules over {MOST_LINES} lines, tests apart"
    return Measure(title, str(len(places)), "", places)


def long_modules(sources: dict[str, str]) -> list[str]:
    """Return the modules with many lines, tests apart, and the number of their lines."""
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    return [
        f"{path} has {length} lines, more than {MOST_LINES}"
        for path, length in lengths.items()
        if length > MOST_LINES and not path.startswith("tests/")
    ]


def sum_of(modules: dict[str, str]) -> ModuleCounts:
    """Return the sums of the counts of modules."""
    total = ModuleCounts()
    for source in modules.values():
        total.add(count_module(source))
    return total


def print_measures(table: Sequence[Measure], lists_places: bool) -> None:
    """Print the table, and below it the places of each measure if they are asked for."""
    print("| measure | value | aim |\n| --- | --- | --- |")
    for measure in table:
        print(f"| {measure.title} | {measure.value} | {measure.aim} |")
    print(DEFINITIONS)
    if not lists_places:
        return
    for measure in table:
        if measure.places:
            print("", f"{measure.title}:", *measure.places, sep="\n")


def print_rooms(sources: dict[str, str]) -> None:
    """Print the counts by room."""
    rooms: dict[str, ModuleCounts] = {}
    num_long: Counter[str] = Counter()
    for path, source in sources.items():
        counts = count_module(source)
        rooms.setdefault(room_of(path), ModuleCounts()).add(counts)
        num_long[room_of(path)] += counts.num_lines > MOST_LINES
    heads = (
        "room",
        "lines",
        "ternaries per 1,000",
        "several values at once per 1,000",
        f"functions with {MANY_PARAMETERS}+ parameters",
        f"% of lines over {MOST_COLUMNS} columns",
        "imports inside functions",
        f"modules over {MOST_LINES} lines",
    )
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for room in sorted(rooms):
        total = rooms[room]
        cells = (
            room,
            f"{total.num_lines:,}",
            f"{total.per_thousand_lines(total.num_ternaries):.1f}",
            f"{total.per_thousand_lines(total.num_multiple_assignments):.1f}",
            len(total.wide_functions),
            f"{total.long_share:.1f}",
            len(total.local_imports),
            num_long[room],
        )
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    sys.exit(main())
