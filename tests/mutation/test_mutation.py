"""Lists of the mutation runs fit the tree: its modules, its tests, and the places that harmless
mutants change.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mutmut", reason="make mutants brings it")

from tests.mutation import sample, table
from tests.mutation.changes import HARMLESS, Module, is_of, statement_lines
from tests.mutation.runs import HARMLESS as IS_HARMLESS
from tests.mutation.runs import KILLED, PARTS, SURVIVED, TIMEOUT, compiled_with, modules, part_of


def test_every_part_names_modules_and_tests_that_exist() -> None:
    named = [str(path) for path in modules()]
    for part in PARTS:
        for pattern in part["modules"]:
            assert any(fnmatch(name, pattern) for name in named), pattern
        tests = [*part.get("tests", []), *part.get("daemons", [])]
        assert tests
        assert all(Path(test).exists() for test in tests), tests


def words_without_tests(part: dict[str, Any]) -> list[str]:
    """Words of a part's `-k` that no name of its files and tests has, and that is no case in
    quotes.
    """
    options = part.get("options", [])
    chosen = options[options.index("-k") + 1] if "-k" in options else ""
    files = [Path(test) for test in part.get("tests", [])]
    text = " ".join(f"{file.stem} {file.read_text()}" for file in files) if chosen else ""
    names = " ".join(re.findall(r'\btest_\w+|"\w+"', text)).lower()
    return [
        word for word in re.findall(r"\w+", chosen) if word not in {"and", "or", "not"} and word.lower() not in names
    ]


def test_every_word_that_chooses_tests_is_in_the_name_of_one() -> None:
    assert [word for part in PARTS for word in words_without_tests(part)] == []
    gone = {"tests": ["tests/step/test_verification_parts.py"], "options": ["-k", "stay_within or not race_takes"]}
    assert words_without_tests(gone) == ["race_takes"]


@pytest.mark.parametrize(
    "area",
    [
        "cuda/recorded",
        "cpu",
        "cuda",
        "models",
        "attention",
        "scheduling",
        "control",
        "sampling",
        "speculation/verification",
        "heads",
        "step",
    ],
)
def test_no_module_of_an_area_is_left_out(area: str) -> None:
    paths = [path for path in Path("engine", area).glob("*.py") if path.name != "__init__.py"]
    assert paths
    assert all(part_of(str(path)) for path in paths)


def test_parts_of_numba_modules_are_compiled() -> None:
    """Coverage sees no line of compiled code, so no test would seem to reach a mutant."""
    numba_modules = [str(path) for path in modules() if path.parent.name == "compiled"]
    assert numba_modules
    assert [name for name in numba_modules if not (part_of(name) or {}).get("kernels")] == []


def test_kernels_are_compiled_again_with_the_functions_in_them() -> None:
    assert compiled_with(Path("engine/cpu/compiled/draw_loop.py")) == {"draw_loop"}
    decoders = {"model_pass", "draw_loop"}
    assert compiled_with(Path("engine/cpu/compiled/model_pass.py")) == decoders, "imported by a package's name"
    assert compiled_with(Path("engine/cpu/compiled/layer_loops.py")) == {
        "layer_loops",
        "product_phase",
        "head_phases",
        *decoders,
    }


@pytest.mark.slow
def test_every_harmless_change_is_a_mutant_of_the_tree() -> None:
    left = list(enumerate(HARMLESS))
    for path in modules():
        mine = [(number, one) for number, one in left if fnmatch(str(path), one["module"])]
        changes = [mutant.change for mutant in Module(path).mutants] if mine else []
        found = {number for number, one in mine if any(is_of(one, *change) for change in changes)}
        left = [(number, one) for number, one in left if number not in found]
    assert [one for _, one in left] == []


def test_a_mutant_is_the_module_with_one_change(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "@cache\ndef f(x):\n    if x > 1:\n        return (\n            x + 1)\n    raise E('a long word')\n"
    )
    module = Module(path)
    sources = [mutant.source for mutant in module.mutants]
    assert module.source.replace("x + 1", "x - 1") in sources
    assert module.source.replace("x > 1", "x >= 1") in sources
    assert len(set(sources)) == len(sources)
    assert not any("WORD" in source or "XX" in source for source in sources)
    assert ("x + 1)", "x - 1)") in [mutant.change for mutant in module.mutants]
    assert list(statement_lines(module.source, 5)) == [4, 5]
    assert list(statement_lines(module.source, 3)) == [3]


def test_results_add_up_while_the_functions_are_the_same(tmp_path: Path) -> None:
    path, file = tmp_path / "one.py", tmp_path / "mutants.json"
    path.write_text("def f(x):\n    return x + 1\n")
    module = Module(path)
    results = {**table.load([path], file), "gone.py": table.Result("gone.py")}
    results[str(path)].begin(module)
    for mutant, status in zip(module.mutants, "ks", strict=False):
        results[str(path)].add(mutant, status)
    table.save(results, file)
    again = table.load([path], file)
    assert list(again) == [str(path)]
    assert again[str(path)] == results[str(path)]
    assert again[str(path)].statuses.startswith("ks")
    assert again[str(path)].score == 0.5
    path.write_text('def f(x):\n    """Words."""\n    return x + 1  # and more\n')
    assert table.load([path], file)[str(path)].statuses.startswith("ks")
    path.write_text("def f(x):\n    return x + 2\n")
    assert table.load([path], file)[str(path)].score is None


def test_the_table_is_of_the_modules_of_the_tree() -> None:
    """Else `python -m tests.mutation --table` writes it again."""
    known = {one["module"] for one in json.loads(table.RESULTS.read_text())["modules"]}
    assert known <= {str(path) for path in modules()}


def small_modules(folder: Path) -> list[Module]:
    """Modules of two rooms, with a few mutants each."""
    rooms = {"engine/cpu/one.py": 3, "engine/cpu/compiled/two.py": 5, "server/text/three.py": 4}
    modules = []
    for name, num_functions in rooms.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(num_functions)))
        module = Module(path)
        module.name = name
        modules.append(module)
    return modules


def test_sample_is_decided_by_its_seed_and_draws_every_mutant_alike(tmp_path: Path) -> None:
    modules = small_modules(tmp_path)
    num_mutants = sum(len(module.mutants) for module in modules)
    drawn = sample.draw(modules, 5, seed=1)
    assert drawn == sample.draw(modules, 5, seed=1)
    assert drawn.mutants != sample.draw(modules, 5, seed=2).mutants
    assert set(drawn.num_by_room) == {"engine/cpu", "server/text"}
    assert sum(drawn.num_by_room.values()) == num_mutants
    assert len(sample.draw(modules, 10**6, seed=1).mutants) == num_mutants
    times = Counter(
        (mutant.module.name, mutant.number) for seed in range(400) for mutant in sample.draw(modules, 5, seed).mutants
    )
    mean = 400 * 5 / num_mutants
    assert len(times) == num_mutants
    assert all(0.6 * mean < count < 1.5 * mean for count in times.values()), times
    parts = [[mutant.module.name for mutant in mutants] for mutants in sample.by_part(drawn)]
    assert [name for names in parts for name in names] == [mutant.module.name for mutant in drawn.mutants]


def test_page_of_a_sample_counts_by_room_with_intervals(tmp_path: Path) -> None:
    drawn = sample.draw(small_modules(tmp_path), 10**6, seed=3)
    statuses = [KILLED, KILLED, TIMEOUT, SURVIVED, IS_HARMLESS]
    of_cpu = [mutant for mutant in drawn.mutants if mutant.module.name.startswith("engine")]
    results = [sample.Sampled(mutant, status) for mutant, status in zip(of_cpu, statuses, strict=False)]
    page = sample.page(drawn, results)
    num_cpu, num_all = drawn.num_by_room["engine/cpu"], len(drawn.mutants)
    assert f"| engine/cpu | {num_cpu} | 5 | 3 | 1 | 1 | 75% | 30% to 95% |" in page
    assert f"| server/text | {num_all - num_cpu} | 0 | 0 | 0 | 0 | - | - |" in page
    assert f"| all | {num_all} | 5 | 3 | 1 | 1 | 75% | 30% to 95% |" in page
    before, after = of_cpu[3].change
    assert page.endswith(f"## Gaps\n\n- `{of_cpu[3].module.name}` {of_cpu[3].function}: `{before}` -> `{after}`\n")


def test_wilsons_interval_has_the_published_values() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for counts, interval in published.items():
        assert sample.wilson(*counts) == pytest.approx(interval, abs=5e-5)
    assert sample.wilson(20, 20)[1] == 1
    assert sample.wilson(0, 0) == (0, 1)
