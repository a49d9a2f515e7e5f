"""A session on a device leaves what it has found, whatever happens to its sections; run dry on a CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from analysis import arms, gpu_sections, gpu_session, gpu_tests
from analysis.gpu_sections import SectionResults
from analysis.gpu_session import PARTS, Section, Setting, run_section
from analysis.load import Load
from loadtest import environment
from tests.engine import tiny
from tests.scheduling.machine import Machine
from tests.wrong import instead

DRY = Setting("cpu", "tiny", "tiny", 256, 0.01)
TINY = ["--device", "cpu", "--target", "tiny", "--draft", "tiny", "--vocabulary", "256"]
ROOT = Path(__file__).resolve().parents[2]


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
    missing = sorted(names - set(gpu_session.NEEDED) - {"huggingface_hub", "tokenizers", "regex"} | {"zmq"})
    assert {"llguidance", "fastapi", "numba"} <= set(missing)
    program = (
        "import sys\nclass Missing:\n"
        " def find_spec(self, name, *_):\n"
        "  if name.split('.')[0] in sys.argv[1:]: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import analysis.gpu_sections, analysis.gpu_tests, analysis.gpu_session"
    )
    subprocess.run([sys.executable, "-c", program, *missing], check=True, cwd=ROOT)


def test_all_missing_modules_are_named_at_once(capsys: Any) -> None:
    with instead(gpu_session, "find_spec", lambda _, name: None if name in ("msgspec", "tqdm") else True):
        assert gpu_session.main([]) == 2
    assert "has no msgspec, tqdm;" in capsys.readouterr().err


def test_the_tests_of_a_session_name_what_failed_and_what_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bad.py").write_text(
        "import os\ndef test_good(): pass\ndef test_bad(): assert False\ndef test_dies(): os._exit(3)"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    gpu_tests.run_files(["test_bad"], tmp_path / "tests.json", 500, tmp_path)
    found = json.loads((tmp_path / "tests.json").read_text())
    assert found["failures"] == [
        "test_bad ended with 3: tests/test_bad.py::test_bad, tests/test_bad.py::test_dies (running)"
    ]
    assert found["files"]["test_bad"]["passed"] == 1


def test_tests_that_are_stopped_leave_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout, b"a.py::test_one PASSED [ 3%]\na.py::test_two[x y] ")

    monkeypatch.setattr(subprocess, "run", stopped)
    found = gpu_tests.run_file("a", 7)
    assert (found["ended"], found["passed"], found["running"]) == ("stopped after 7 s", 1, ["a.py::test_two[x y]"])


def test_each_part_fits_a_call_of_ten_minutes_and_its_tests_are_there() -> None:
    for sections in PARTS.values():
        assert sum(section.limit_s for section in sections) <= 540
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in gpu_tests.FILES)
    assert "analysis.gpu_session" in (ROOT / "Makefile").read_text()


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
    found = tmp_path / "trace.json"
    script.write_text(
        f"#!{sys.executable}\n"
        f"open({str(found)!r}, 'w').write('{left_text}')\nprint('first: 1', flush=True)\n{program}\n"
    )
    script.chmod(0o755)
    found.write_text("of an earlier run")
    monkeypatch.setattr(sys, "executable", str(script))
    result = run_section(Section("trace", 2 if "sleep" in program else 60, ""), DRY, tmp_path)
    assert (result["ended"], result["found"]) == (ended, left)
    assert "first: 1" in (tmp_path / "trace.log").read_text()


def test_a_fall_back_is_a_failure(tmp_path: Path, capsys: Any) -> None:
    findings = SectionResults(tmp_path / "found.json")
    gpu_sections.require_all(findings, {"kernels for rows": True, "whole steps": False})
    findings.add("first", 1)
    left = json.loads((tmp_path / "found.json").read_text())
    assert left == {"failures": ["whole steps: not used"], "first": 1}
    assert "first: 1" in capsys.readouterr().out
    with instead(gpu_session, "run_section", lambda *_: {"ended": "ended", "seconds": 1, "found": left}):
        assert gpu_session.main([*TINY, "--part", "3", "--output", str(tmp_path)]) == 1
    assert "whole steps: not used" in capsys.readouterr().out
    document = json.loads((tmp_path / "gpu-part-3.json").read_text())
    assert document["sections"]["record"]["found"] == left
    assert document["setting"]["target"] == "tiny"


def test_recorded_steps_serve_the_arms() -> None:
    """An arm is an engine around the models of one that has recorded steps; without them it would be a slow one."""
    pytest.importorskip("triton")
    target = tiny.llama(1, layers=1)
    with tiny.with_recorded_steps([(0, 0), (1, 2)]):
        engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), max_num_seqs=2)
    made = arms.make_arms(engine, ["off", "block:1x2"], Machine().points(), Load([tuple(range(5, 20))], 8, 1.0))
    for arm in made.values():
        for _ in range(4):
            arm.step(1)
        assert arm.num_steps == 4
        assert 0 < arm.num_recorded < 4, "the prompt is read as it is"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace", "variants", "law"])
def test_sections_run_dry(name: str, tmp_path: Path) -> None:
    result = run_section(Section(name, 300, ""), DRY, tmp_path)
    assert result["ended"] == "ended", (tmp_path / f"{name}.log").read_text()[-2000:]
    found = result["found"]
    assert found["failures"] == []
    assert found["ways"].keys() >= {"whole steps", "draft: kernels for layers", "kernels for rows and verification"}
    assert found["pair"]["single_draft_acceptance"] == pytest.approx(0.75, abs=0.1)
    if name == "trace":
        assert found["step_s"]["bv_race:8x4 behind 1000"] > 0
        assert found["profile off"]["operations"][0]["us"] > 0
    if name == "law":
        assert found["bv_race:4x5, equal nodes apart"]["num_answers"] == 200
        assert found["bv_race:2x3, recorded, top_p"]["recorded_steps"] == 0, "nothing is recorded on a CPU"


@pytest.mark.slow
def test_quantised_weights_are_measured_beside_the_others(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    result = run_section(Section("weights", 300, ""), DRY, tmp_path)
    assert result["ended"] == "ended", (tmp_path / "weights.log").read_text()[-2000:]
    assert result["found"]["failures"] == []
    of = result["found"]["weights"]
    sizes = [of[name]["memory_plan"]["weights"] for name in ("auto", "fp8", "int4")]
    assert max(sizes[1:]) < sizes[0]
    assert all(0 < one["probe_distance"] < 1 and one["check"]["num_answers"] == 200 for one in of.values())


def test_a_record_is_written_cell_by_cell(tmp_path: Path) -> None:
    seen = []

    def measure(_right: Any, make: Any, load: Any, concurrency: int, *_: Any) -> dict[str, Any]:
        seen.append(json.loads(output.read_text()).get("cells", []) if output.exists() else [])
        return {"concurrency": concurrency, "arms": {"off": {"share_of_recorded_steps": 0.1}}}

    output = tmp_path / "record.json"
    with (
        instead(gpu_sections, "measure_points", lambda *_: []),
        instead(gpu_sections, "build", lambda *_: MagicMock()),
        instead(gpu_sections.arms, "check_room", lambda *_: None),
        instead(gpu_sections.arms, "measure", measure),
    ):
        assert gpu_sections.main(["record", str(output), *TINY]) == 0
    assert [len(cells) for cells in seen] == [0, 1]
    assert [cell["concurrency"] for cell in json.loads(output.read_text())["cells"]] == [1, 2]


def test_an_environment_without_git_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", missing)
    assert environment.environment()["commit"] is None
