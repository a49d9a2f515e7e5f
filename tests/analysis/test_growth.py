"""`analyze growth` measures a pair of models in turns, and memory in separate processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import growth
from analysis.__main__ import main
from tests.server.tiny_models import write_pair


def test_ratios_are_of_steps_that_took_turns() -> None:
    """A machine that is half as fast in the second repeat."""
    found = growth.over_first({1: [1.0, 2.0, 1.0], 8: [1.5, 3.0, 1.8]})
    assert found["1"] == {"seconds": 1.0, "ratio": 1.0, "low": 1.0, "high": 1.0}
    assert found["8"] == pytest.approx({"seconds": 1.8, "ratio": 1.5, "low": 1.5, "high": 1.8})


@pytest.mark.slow
def test_a_pair_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path)
    file = tmp_path / "not" / "there" / "growth.json"
    words = ["--target", str(pair.target), "--draft", str(pair.draft), "--dtypes", "float32", "--repeats", "1"]
    assert main(["growth", *words, "--context", "32", "--long-context", "300", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    (cell,) = result["cells"]
    assert list(cell["step"]) == ["1", "2", "4", "8"]
    assert cell["step"]["1"]["ratio"] == 1.0
    assert all(one["seconds"] > 0 for one in cell["step"].values())
    assert list(cell["target_pass"]) == ["1", "32"]
    assert all(count > 1 << 20 for count in result["peak_bytes"].values())
    assert growth.markdown(result) in capsys.readouterr().err
