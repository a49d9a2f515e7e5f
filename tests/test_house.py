"""The measures of readable code count what they say (`tests/house.py`)."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.grid import grid
from tests.house import (
    ROOT,
    arrows_up,
    compiles_with,
    count_module,
    long_modules,
    num_parameters,
    plain_questions,
    server_order,
)

DENSE = """
def draw(self, a, b, *c, d=None, e=1, **f):
    import numba

    x, y = a, b
    x, y = y
    (x, y), z = b, 1
    return x if y else (a if b else c)


def plan(cls, a, b, c, d, e, f, g):
    class Row:
        from numba import njit
    return f"long line"
"""


def test_dense_lines_are_counted() -> None:
    counts = count_module(DENSE + "#" * 101 + "\n" + "#" * 100 + "\n")
    assert counts.num_lines == 16
    assert counts.num_long_lines == 1
    assert counts.num_ternaries == 2
    assert counts.num_multiple_assignments == 2
    assert [place.name for place in counts.local_imports] == [
        "import numba",
        "from numba import njit",
    ]
    assert [place.name for place in counts.wide_functions] == ["plan"]
    assert counts.per_thousand_lines(counts.num_ternaries) == pytest.approx(2000 / 16)


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [("@compiled_for_cpu(**FAST)", 1), ("@triton.jit", 1), ("@intrinsic", 1), ("@lru_cache(maxsize=1)", 0)],
)
def test_kernels_are_counted_apart(decorator: str, expected: int) -> None:
    counts = count_module(f"{decorator}\ndef run(a, b, c, d, e, f, g): ...\n")
    assert len(counts.wide_functions) == 1
    assert counts.num_wide_kernels == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("def f(self, a, /, b, *, c): ...", 3),
        ("def f(a, *b, **c): ...", 3),
        ("async def f(cls): ...", 0),
        ("def f(a, self): ...", 2),
    ],
)
def test_parameters_are_counted_without_the_object(head: str, expected: int) -> None:
    (function,) = ast.parse(head).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    assert num_parameters(function) == expected


@pytest.mark.parametrize(
    "source",
    [
        "def _are_plain(rows): ...",
        "class Row:\n    is_never_recorded: bool = False",
        "def f(row):\n    if row.text or row.sampling.seed_stable:\n        return 1",
        "def f(rows):\n    return all(not row.shifts and not row.text_drafts for row in rows)",
        "def f(row):\n    fast = row.text is None and not row.shifts",
        "def f(row):\n    return 1 if row.text and row.speculation.over_acceptance else 2",
    ],
)
def test_questions_for_plain_rows_are_counted(source: str) -> None:
    assert len(list(plain_questions(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def explain(row): ...",
        "def recorded_drafts(config): ...",
        "def f(row):\n    return row.draft_method or RULES[row.speculation.rule].method",
        "def f(row):\n    if row.text and row.shifts:\n        raise ValueError",
        "def f(row):\n    if row.text:\n        return row.shifts",
        "def f(row):\n    return not row.needs & (TEXT | SEED_STABLE)",
    ],
)
def test_other_conditions_are_not_counted(source: str) -> None:
    assert list(plain_questions(source)) == []


def test_compiled_code_is_found_by_imports_and_wrappers() -> None:
    sources = {
        "engine/kernels/__init__.py": (
            "def compiled():\n    from numba import njit\n    def decorate(f): ...\n    return decorate\n"
            "def folder():\n    import numba\n    return numba.config\n"
        ),
        "engine/models/layer.py": "from engine.kernels import compiled",
        "engine/models/types.py": "import numba.types",
        "engine/step/start.py": "from engine.kernels import folder",
        "engine/attention/paged.py": "import triton.language as tl",
    }
    assert compiles_with(sources, {"numba"}) == [
        "engine/kernels/__init__.py",
        "engine/models/layer.py",
        "engine/models/types.py",
    ]
    assert compiles_with(sources, {"triton"}) == ["engine/attention/paged.py"]


def test_imports_of_higher_rooms_are_counted() -> None:
    imports = [
        ("server.text.tools", "server.wire.fields"),
        ("server.wire.fields", "server.text.tools"),
        ("server.text.tools", "server.text.lanes"),
        ("server.text.tools", "server.ids"),
        ("server.text.tools", "server"),
    ]
    order = (("text",), ("wire",))
    assert arrows_up(imports, order) == ["server.wire.fields -> server.text.tools"]


def test_order_of_rooms_is_the_contracts() -> None:
    contract = '[[tool.importlinter.contracts]]\ntype = "layers"\ncontainers = ["{}"]\nlayers = {}\n'
    engine = contract.format("engine", '["step", "plan"]')
    server = contract.format("server", '["app | (cli)", "text"]')
    assert server_order(engine + server) == (("app", "cli"), ("text",))
    with pytest.raises(ValueError, match="no contract"):
        server_order(engine)


def test_long_modules_are_named() -> None:
    sources = {"engine/a.py": "\n" * 401, "engine/b.py": "\n" * 400, "tests/c.py": "\n" * 500}
    assert long_modules(sources) == ["engine/a.py has 401 lines, more than 400"]


ROOMS = ("--rooms", "| engine/step |")


# The places take half a minute on two slow cores.
@pytest.mark.slow
@pytest.mark.parametrize(("option", "row"), grid([ROOMS, ("--places", "engine/step/eager.py")], [ROOMS]))
def test_script_runs(option: str, row: str) -> None:
    command = [sys.executable, "-m", "tests.house", option]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert row in run.stdout
