"""A session on a device leaves what it has found, whatever happens to its sections.

Run dry on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from loadtest import environment
from research.analysis import arms, gpu_engine, gpu_kernels, gpu_results, gpu_sections, gpu_session, gpu_tests
from research.analysis.gpu_results import SectionResults
from research.analysis.gpu_session import PARTS, Section, run_section
from research.analysis.load import Load
from tests.engine import tiny
from tests.scheduling.machine import Machine
from tests.wrong import instead

DRY = {"device": "cpu", "target": "tiny", "draft": "tiny", "vocabulary": 256, "acceptance": 0.75, "scale": 0.01}
TINY = ["--device", "cpu", "--target", "tiny", "--draft", "tiny", "--vocabulary", "256"]


def run(section: Section, folder: Path) -> dict[str, Any]:
    """Run a section dry."""
    return run_section(section, DRY, folder, folder / "log")


ROOT = Path(__file__).resolve().parents[3]


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_session.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_session_imports_only_what_it_names() -> None:
    """The other dependencies cannot be imported in this process; those that this one needs can."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {re.split(r"[>=<\[]", one)[0].replace("-", "_") for one in document["project"]["dependencies"]}
    brought = {"huggingface_hub", "tokenizers", "regex", "pyyaml"}  # by those that are needed
    missing = sorted(names - set(gpu_session.NEEDED) - brought | {"zmq"})
    assert {"llguidance", "fastapi", "numba"} <= set(missing)
    program = (
        "import importlib, sys\nclass Missing:\n"
        " def find_spec(self, name, *_):\n"
        "  if name.split('.')[0] in sys.argv[1:]: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    sections = "from research.analysis import gpu_sections, gpu_session, gpu_tests"
    subprocess.run([sys.executable, "-c", program + sections, *missing], check=True, cwd=ROOT)
    tests = (
        "from research.analysis.gpu_tests import FILES\n"
        "for name in FILES: importlib.import_module('tests.' + name.replace('/', '.'))"
    )
    # What kernels are compared with needs these.
    without = [name for name in missing if name not in ("accelerate", "jinja2", "numba")]
    subprocess.run([sys.executable, "-c", program + tests, *without], check=True, cwd=ROOT)


def test_all_missing_modules_are_named_at_once(capsys: Any) -> None:
    with instead(gpu_session, "find_spec", lambda _, name: None if name in ("msgspec", "tqdm") else True):
        assert gpu_session.main([]) == 2
    assert "has no msgspec, tqdm;" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tests_of_a_session_name_what_failed_and_what_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bad.py").write_text(
        "import os\ndef test_good(): pass\ndef test_bad(): assert False\ndef test_dies(): os._exit(3)"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "tests" / "test_none.py").write_text("import pytest\n@pytest.mark.skip\ndef test_one(): pass")
    (tmp_path / "tests" / "test_usage.py").write_text("def test_one(): pass")
    findings = SectionResults(tmp_path / "tests.json")
    gpu_tests.run_files(["test_bad", "test_none"], findings, 500, tmp_path)
    found = json.loads((tmp_path / "tests.json").read_text())
    assert found["files"]["test_bad"]["passed"] == 1
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-config\ntimeout = 600\n")
    gpu_tests.run_files(["test_usage"], findings, 500, tmp_path)
    failures = sorted(json.loads((tmp_path / "tests.json").read_text())["failures"])
    assert failures[0] == "test_bad ended with 3: tests/test_bad.py::test_bad, tests/test_bad.py::test_dies (running)"
    assert failures[1].startswith("test_none ended with 0: ")
    assert "1 skipped" in failures[1]
    assert failures[2] == "test_usage ended with 4: ERROR: Unknown config option: timeout"


def test_tests_that_are_stopped_leave_what_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a test has started holds its output open for longer."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable} -IS\nimport os, time\n"
        "print('a.py::test_one PASSED [ 3%]\\na.py::test_two[x y] ', end='', flush=True)\n"
        f"os.fork()\ntime.sleep(20)\nopen({str(tmp_path / 'late')!r}, 'w')\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    found = gpu_tests.run_file("a", 4, tmp_path)
    assert not (tmp_path / "late").exists()
    assert (found["ended"], found["passed"], found["running"]) == ("stopped after 4 s", 1, ["a.py::test_two[x y]"])


def test_each_part_fits_a_call_of_ten_minutes_and_its_tests_are_there() -> None:
    limits = {number: sum(section.limit_s for section in sections) for number, sections in PARTS.items()}
    assert max(limits.values()) <= 590, "a command has ten minutes"
    assert limits[2] <= 300
    pages = [ROOT / "Makefile", ROOT / "docs" / "tuning.md", ROOT / "research" / "analysis" / "gpu_session.py"]
    assert all(f"{sum(limits.values()) / 60:g} minutes" in page.read_text() for page in pages)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"| {section.name} | {section.limit_s:g} |" in page for section in PARTS[1])
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in gpu_tests.FILES)
    assert "research.analysis.gpu_session" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("program", "ended", "left"),
    [
        ("", "ended", {"failures": [], "first": 1}),
        ("raise SystemExit(3)", "failed with 3", {"failures": [], "first": 1}),
        ("import time; time.sleep(60)", "stopped after 2 s", {"failures": [], "first": 1}),
    ],
)
def test_a_section_that_ends_badly_leaves_what_it_had(
    program: str, ended: str, left: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate process writes one item and some output, and then ends as `program` does."""
    script, left_text = tmp_path / "python", json.dumps(left)
    found = tmp_path / "engine.json"
    script.write_text(
        f"#!{sys.executable}\n"
        f"import sys\nopen({str(found)!r}, 'w').write('{left_text}')\n"
        f"print('first: 1', file=sys.stderr, flush=True)\n{program}\n"
    )
    script.chmod(0o755)
    found.write_text("of an earlier run")
    monkeypatch.setattr(sys, "executable", str(script))
    result = run(Section("engine", 2 if "sleep" in program else 60, ""), tmp_path)
    assert (result["ended"], result["found"]) == (ended, left)
    assert "first: 1" in (tmp_path / "log").read_text()
    assert (ended == "ended") or "first: 1" in result["last_lines"]


def test_a_fall_back_is_a_failure(tmp_path: Path, capsys: Any) -> None:
    findings = SectionResults(tmp_path / "found.json")
    gpu_results.require_all(findings, {"kernels for rows": True, "whole steps": False})
    findings.add("first", 1)
    left = json.loads((tmp_path / "found.json").read_text())
    assert left == {"failures": ["whole steps: not used"], "first": 1}
    assert "first: 1" in capsys.readouterr().out
    with instead(gpu_session, "run_section", lambda *_: {"ended": "ended", "seconds": 1, "found": left}):
        assert gpu_session.main([*TINY, "--part", "2", "--output", str(tmp_path)]) == 1
    assert "whole steps: not used" in capsys.readouterr().out
    document = json.loads((tmp_path / "gpu-part-2.json").read_text())
    assert document["sections"]["record"]["found"] == left
    assert document["setting"]["target"] == "tiny"


@pytest.mark.slow
def test_recorded_steps_serve_the_arms() -> None:
    """An arm is an engine around the models of one that has recorded steps.

    Without them it would be a slow one.
    """
    pytest.importorskip("triton")
    target = tiny.llama(1, layers=1)
    with tiny.with_recorded_steps([(0, 0), (1, 2)]):
        engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), max_num_seqs=2)
    made = arms.make_arms(engine, ["off", "block:1x2"], Machine().prices(), Load([tuple(range(5, 20))], 8, 1.0))
    for arm in made.values():
        for _ in range(4):
            arm.step(1)
        assert arm.num_steps == 4
        assert 0 < arm.num_recorded < 4, "the prompt is read as it is"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "kernels", "generate"])
def test_sections_run_dry(name: str, tmp_path: Path) -> None:
    result = run(Section(name, 300, ""), tmp_path)
    assert result["ended"] == "ended", (tmp_path / "log").read_text()[-2000:]
    found = result["found"]
    assert found["failures"] == []
    if name == "kernels":
        names = {key.partition(",")[0] for key, item in found.items() if isinstance(item, dict) and "us" in item}
        layers = {"attention", "norm", "gate", "rotation", "merge", "product", "recurrence"}
        assert names == layers | {"distribution", "draw"}
        return
    assert found["pair"]["single_draft_acceptance"] == pytest.approx(0.75, abs=0.1)
    if name == "generate":
        assert found["generate, assisted, 1 requests, tokens per second"] > 0
        return
    assert found["ways"].keys() >= {"whole steps", "draft: kernels for layers", "kernels for filters"}
    assert found["exactness of tiny in float32, bv_race:4x5, recorded"]["error"] < 1e-5
    assert found["step_s"]["bv_race:8x4 after 1000"] > 0
    assert 0 < found["plain_share_of_roofline"]["1"] < 1
    assert found["bv_race:4x5, temperature, top_k, top_p"]["num_answers"] == 375
    assert found["seconds_until"]["the engine is built"] >= found["seconds_until"]["the pair"]
    assert [cell["concurrency"] for cell in found["cells"]] == [1, 2]
    assert "several drafts over the best chain, one request" in found["goals"]
    assert found["profile off"]["operations"][0]["us"] > 0


@pytest.mark.slow
def test_quantised_weights_are_measured_beside_the_others(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    result = run(Section("weights", 300, ""), tmp_path)
    assert result["ended"] == "ended", (tmp_path / "log").read_text()[-2000:]
    assert result["found"]["failures"] == []
    of = result["found"]["weights"]
    # On a CPU the decoder has its own int4, laid out when it first runs; torchao's are those of
    # fp8.
    assert of["fp8"]["memory_plan"]["weights"] < of["auto"]["memory_plan"]["weights"]
    assert all(0 < one["probe_distance"] < 1 and one["check"]["num_answers"] == 200 for one in of.values())


def test_an_engine_of_a_format_ends_before_the_next_is_built(tmp_path: Path) -> None:
    """Also if its measurement fails."""
    built: list[weakref.ref[Any]] = []

    def assembled(*_: Any) -> Any:
        assert all(engine() is None for engine in built), "two engines at once"
        engine = argparse.Namespace()
        engine.itself = engine  # only a collection ends it
        built.append(weakref.ref(engine))
        return engine

    def measured(_: Any, *__: Any) -> dict[str, Any]:
        if len(built) == 2:
            raise ValueError("of the test")
        return {"check": {"rejected": False}, "recorded_shapes": 0}

    pair = SimpleNamespace(save_pretrained=lambda _: None)
    options = argparse.Namespace(device="cpu", target="t", draft="d", vocabulary=9, acceptance=0.75, scale=0.1)
    with (
        instead(gpu_sections, "assemble", assembled),
        instead(gpu_sections, "load_pair", lambda *_: ()),
        instead(gpu_sections, "_of_weights", measured),
        instead(gpu_sections, "make_pair", lambda *_: (pair, pair)),
    ):
        gpu_sections.weights(options, SectionResults(tmp_path / "weights.json"))
    found = json.loads((tmp_path / "weights.json").read_text())
    assert len(built) == 3
    assert len(found["weights"]) == 2
    assert [failure.split(" (")[0] for failure in found["failures"]] == ["fp8: ValueError: of the test"]


def test_a_record_is_written_cell_by_cell(tmp_path: Path) -> None:
    seen = []

    def measure(_right: Any, make: Any, load: Any, concurrency: int, *_: Any) -> dict[str, Any]:
        seen.append(json.loads(output.read_text()).get("cells", []) if output.exists() else [])
        if len(seen) > 1:
            raise ValueError("of the test")
        return {
            "concurrency": concurrency,
            "arms": {"off": {"share_of_recorded_steps": 0.1, "tokens_per_second": 9, "ratio_to_off": {"ratio": 1}}},
        }

    output = tmp_path / "record.json"
    with (
        instead(gpu_engine, "measure_prices", lambda *_: []),
        instead(gpu_sections, "build", lambda *_: MagicMock()),
        instead(gpu_engine.arms, "check_room", lambda *_: None),
        instead(gpu_engine.arms, "measure", measure),
    ):
        assert gpu_sections.main(["record", str(output), *TINY]) == 0
    assert [len(cells) for cells in seen] == [0, 1]
    found = json.loads(output.read_text())
    assert [cell["concurrency"] for cell in found["cells"]] == [1]
    assert found["failures"][0].startswith("speeds: ValueError: of the test (test_gpu_session.py, line")


def test_goals_say_what_is_met() -> None:
    def cell(concurrency: int, **ratios: float) -> dict[str, Any]:
        arms = {name: {"ratio_to_off": {"ratio": ratio}} for name, ratio in ratios.items()}
        return {"concurrency": concurrency, "arms": arms}

    found = gpu_engine.goals(
        [
            cell(1, **{"off": 1.0, "block:1x3": 1.8, "block:1x5": 2.0, "bv_race:4x5": 2.2, "adaptive": 2.1}),
            cell(16, off=1.0, adaptive=1.1),
            cell(1, **{"off": 1.0, "block:1x5": 9.0, "adaptive": 9.0}),
        ]
    )
    assert found == {
        "adaptive over plain, 1 requests": (2.1, 2.0, True),
        "adaptive over plain, 16 requests": (1.1, 1.2, False),
        "several drafts over the best chain, one request": (pytest.approx(1.1), 1.15, False),
    }


@pytest.mark.slow
def test_a_step_that_silently_is_not_recorded_fails_its_section(tmp_path: Path) -> None:
    """A device replays every step that is timed, and most of those whose output is checked."""
    output = tmp_path / "found.json"
    findings = SectionResults(output)
    engine = tiny.build(tiny.llama(1, layers=1), tiny.llama(2, layers=1), max_num_seqs=2)
    plan = gpu_engine.plan_of(engine, "block:1x2", context=20)
    gpu_engine._step_s(findings, engine, plan, 0.001, must_record=True)
    options = MagicMock(device="cuda", vocabulary=101)
    gpu_engine.check_output(options, findings, engine, [("off", {})], 200)
    assert json.loads(output.read_text())["failures"] == [
        "a step of 1 requests that draft (1, 1) is not a recorded one",
        "off: most steps were not recorded",
    ]


@pytest.mark.slow
def test_a_shape_that_is_not_recorded_fails_its_section(tmp_path: Path) -> None:
    """Recording ends early where memory is short, and says so to the log alone."""
    pytest.importorskip("triton")
    target = tiny.llama(1, layers=1)
    with tiny.with_recorded_steps([(0, 0), (1, 2)]):
        engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), max_num_seqs=2)
    findings, config = (
        SectionResults(tmp_path / "found.json"),
        EngineConfig(model=ModelConfig(target="target"), scheduler=SchedulerConfig(max_num_seqs=2)),
    )
    with instead(gpu_engine, "recorded_drafts", lambda *_: [(0, 0), (1, 2)]):
        gpu_engine.require_recorded(findings, engine, config)
        del engine.recorded.steps[max(engine.recorded.steps, key=lambda one: one.num_rows)]
        gpu_engine.require_recorded(findings, engine, config)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["recorded_shapes"] == "7 of 8"
    assert found["failures"] == ["1 of 8 shapes are not recorded: 2 requests of 1x2"]


@pytest.mark.slow
def test_an_engine_that_cannot_record_is_a_failure_and_another_process_measures_without(tmp_path: Path) -> None:
    """A failed recording may leave the allocator of its process unusable."""
    output, begun = tmp_path / "engine.json", []

    def assemble(right: Any, config: Any, *rest: Any) -> Any:
        if not config.model.enforce_eager:
            raise ValueError("an operation of the test cannot be recorded")
        return right(config, *rest)

    def begin(_right: Any, _program: str, arguments: list[str]) -> None:
        begun.append(arguments[3:])

    with (
        instead(gpu_engine, "assemble", assemble),
        instead(gpu_sections.os, "execv", begin),
        instead(gpu_sections, "check_exactness", lambda *_: None),
        instead(gpu_sections, "check_output", lambda *_: None),
        instead(gpu_sections, "cells", lambda *_: None),
    ):
        gpu_sections.main(["engine", str(output), *TINY, "--scale", "0.01"])
        (failure,) = json.loads(output.read_text())["failures"]
        assert "cannot be built: ValueError: an operation of the test" in failure
        assert begun == [["engine", str(output), *TINY, "--scale", "0.01", "--eager"]]
        gpu_sections.main(begun[0])
    found = json.loads(output.read_text())
    assert found["failures"] == [failure]
    assert found["step_s"]["off after 300"] > 0


def test_a_roofline_is_that_of_the_data_sheet() -> None:
    assert gpu_engine.bytes_per_s("NVIDIA H100 80GB HBM3", 1.0) == 3.35e12
    assert gpu_engine.bytes_per_s("NVIDIA H200", 1.0) == 4.8e12
    assert gpu_engine.bytes_per_s("", 7.0) == 7.0


def test_an_environment_without_git_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", missing)
    assert environment.environment()["commit"] is None


def test_timed_runs_rotate_over_more_than_a_cache() -> None:
    assert [gpu_kernels.rotations(size << 20) for size in (1, 50, 1024)] == [16, 3, 1]
