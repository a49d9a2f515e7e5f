"""A session on a device leaves what it has found, whatever happens to its sections; run dry on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from analysis import gpu_sections, gpu_session
from analysis.gpu_sections import SectionResults
from analysis.gpu_session import PARTS, Section, Setting, run_section
from loadtest import environment

DRY = Setting("cpu", "tiny", "tiny", 256, 0.01)
TINY = ["--device", "cpu", "--target", "tiny", "--draft", "tiny", "--vocabulary", "256"]
ROOT = Path(__file__).resolve().parents[2]


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_session.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_each_part_fits_a_call_of_ten_minutes_and_its_tests_are_there() -> None:
    for sections in PARTS.values():
        assert sum(section.limit_s for section in sections) <= 540
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in gpu_session._TESTS)
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


def test_a_fall_back_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    findings = SectionResults(tmp_path / "found.json")
    gpu_sections.require_all(findings, {"kernels for rows": True, "whole steps": False})
    findings.add("first", 1)
    left = json.loads((tmp_path / "found.json").read_text())
    assert left == {"failures": ["whole steps: not used"], "first": 1}
    assert "first: 1" in capsys.readouterr().out
    monkeypatch.setattr(gpu_session, "run_section", lambda *_: {"ended": "ended", "seconds": 1, "found": left})
    assert gpu_session.main([*TINY, "--part", "3", "--output", str(tmp_path)]) == 1
    assert "whole steps: not used" in capsys.readouterr().out
    document = json.loads((tmp_path / "gpu-part-3.json").read_text())
    assert document["sections"]["record"]["found"] == left
    assert document["setting"]["target"] == "tiny"


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


def test_a_record_is_written_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sections, "measure_points", lambda *_: [])
    monkeypatch.setattr(gpu_sections, "build", lambda *_: MagicMock())
    monkeypatch.setattr(gpu_sections.arms, "check_room", lambda *_: None)
    seen = []

    def measure(make: Any, load: Any, concurrency: int, *_: Any) -> dict[str, Any]:
        seen.append(json.loads(output.read_text()).get("cells", []) if output.exists() else [])
        return {"concurrency": concurrency}

    monkeypatch.setattr(gpu_sections.arms, "measure", measure)
    output = tmp_path / "record.json"
    assert gpu_sections.main(["record", str(output), *TINY]) == 0
    assert [len(cells) for cells in seen] == [0, 1]
    assert [cell["concurrency"] for cell in json.loads(output.read_text())["cells"]] == [1, 2]


def test_an_environment_without_git_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", missing)
    assert environment.environment()["commit"] is None
