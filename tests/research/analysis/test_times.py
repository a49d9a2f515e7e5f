"""`polydraft analyze times` measures rules, steps and passes in turns, and refuses flags of another
measurement.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.speculation.verification import RULES
from loadtest.checkpoints import lengthened
from research.analysis.__main__ import main
from research.analysis.times import MEASUREMENTS, chains, heads, limits
from tests.engine import tiny
from tests.grid import grid
from tests.server.tiny_models import write_pair


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document of a measurement, whose table is on standard error."""
    assert main(["times", "--of", *words]) == 0
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)
    assert result["options"]["of"] == words[0]
    assert MEASUREMENTS[words[0]].markdown(result) in printed.err
    return result


def pair_flags(folder: Path) -> list[str]:
    pair = write_pair(folder)
    return ["--target", str(pair.target), "--draft", str(pair.draft), "--repeats", "1"]


@pytest.mark.parametrize("words", [["rules", "--cores", "1"], ["heads", "--draft", "x"], ["heads", "--kinds", "x"]])
def test_flags_of_other_measurements_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["times", "--of", *words]) == 2
    assert words[1] in capsys.readouterr().err


@pytest.mark.slow
def test_rules_are_measured_in_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-drafts", "1,3", "--draft-length", "2", "--context", "32", "--repeats", "1"]
    cells = measured(capsys, "rules", *sizes)["cells"]
    assert {cell["rule"] for cell in cells} == set(RULES) - {"ot_lp"}, "it takes only small vocabularies"
    assert all(0 < cell["verify_ms"] < cell["step_ms"] for cell in cells)
    assert {cell["num_drafts"] for cell in cells if cell["rule"] == "block"} == {1}


def test_ratios_are_of_steps_in_the_same_turn() -> None:
    """A machine that is half as fast in the second turn."""
    compared = chains.over_first({"1": [1.0, 2.0, 1.0], "8": [1.5, 3.0, 1.8]})
    assert compared["1"] == {"seconds": 1.0, "ratio": 1.0, "low": 1.0, "high": 1.0}
    assert compared["8"] == pytest.approx({"seconds": 1.8, "ratio": 1.5, "low": 1.5, "high": 1.8})


@pytest.mark.slow
def test_chains_of_a_pair_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "not" / "there" / "chains.json"
    words = [*pair_flags(tmp_path), "--dtypes", "float32", "--context", "32", "--output", str(file)]
    result = measured(capsys, "chains", *words)
    assert json.loads(file.read_text()) == result
    (cell,) = result["cells"]
    assert list(cell["step"]) == ["1", "2", "4", "8"]
    assert cell["step"]["1"]["ratio"] == 1.0
    assert all(ratio["seconds"] > 0 for ratio in cell["step"].values())
    assert list(cell["target_pass"]) == ["1", "32"]


def test_kept_gain_compares_speedups_of_the_longest_and_the_shortest_text() -> None:
    """Plain steps take three times as long after the long text, steps with drafts twice as long."""

    def cell(context: int, plain_s: float, drafted_s: float) -> dict[str, Any]:
        return {
            "context": context,
            "cores": 1,
            "steps": {"plain": [{"step": plain_s}], "1x5": [{"step": drafted_s}]},
        }

    (gain,) = limits.kept_gains([cell(90, 3.0, 4.0), cell(8, 1.0, 2.0)])
    assert gain == {"cores": 1, "contexts": [8, 90], "ratio": 1.5, "low": 1.5, "high": 1.5}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", grid(["dspark", ",".join(heads.KINDS)], ["dspark"]))
def test_heads_of_every_type_are_measured(capsys: pytest.CaptureFixture[str], kinds: str) -> None:
    words = ["heads", "--kinds", kinds, "--targets", "embedded", "--num-drafts", "1,2", "--repeats", "1"]
    cells = measured(capsys, *words)["cells"]
    assert [cell["kind"] for cell in cells] == kinds.split(",")
    for cell in cells:
        assert set(cell["shapes"]) == {"off", "1", "2"}
        assert cell["shapes"]["1"]["draft_over_one"] == 1.0
        assert all(0 < cell["shapes"][name]["share_of_step"] < 1 for name in ("1", "2"))


def test_table_of_heads_has_a_row_per_head() -> None:
    def shape(draft_ms: float, over: float, share: float) -> dict[str, float]:
        return {"draft_ms": draft_ms, "draft_over_one": over, "share_of_step": share}

    shapes = {"off": {}, "1": shape(1.8869, 1.0, 0.4302), "4": shape(2.033, 1.0774, 0.225)}
    cell = {"target": "embedded", "kind": "dflash", "shapes": shapes}
    assert heads.markdown({"options": {"num_drafts": [1, 4]}, "cells": [cell]}).splitlines() == [
        "| target | head | 1 chain, ms | 4 chains |",
        "| --- | --- | --- | --- |",
        "| embedded | dflash | 1.9 (43%) | 1.08x (22%) |",
    ]


def test_least_time_counts_weights_texts_and_products() -> None:
    """Two layers of a product 4 x 6; 2 query heads and 1 K/V head of 8 numbers."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 6) for _ in range(2))
    model.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)  # type: ignore[assignment]
    runner: Any = SimpleNamespace(
        model=model,
        backend=SimpleNamespace(weight_bytes=96),
        storage=SimpleNamespace(keys=torch.zeros(2, 100, 1, 8)),
    )
    least = limits.least_s(runner, 3, 10, {"bytes": 2.0, "operations": 4.0})
    assert least["bytes"] == (96 + 10 * 2 * 2 * 8 * 4) / 2
    assert least["arithmetic"] == 3 * (2 * 2 * 4 * 6 + 4 * 2 * 2 * 8 * (10 + 1.5)) / 4


def test_more_cores_are_compared_with_the_fewest_in_the_same_turns() -> None:
    """A machine that is half as fast in the second turn."""

    def cell(cores: int, seconds: list[float]) -> dict[str, Any]:
        steps = {"plain": [{"step": 2 * pass_s} for pass_s in seconds]}
        return {"context": 32, "cores": cores, "passes": {"1": seconds}, "steps": steps}

    (compared,) = limits.speedups([cell(2, [1.0, 2.0, 1.1]), cell(1, [1.5, 3.0, 1.65])])
    assert (compared["cores"], compared["over"]) == (2, 1)
    for name in ("plain step", "pass of one row"):
        assert compared[name] == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})


def test_longer_checkpoint_is_a_copy_with_other_positions(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "model_type": "llama"}))
    (folder / "weights").write_text("numbers")
    assert lengthened(folder, 64, tmp_path / "not there") == folder
    copied = lengthened(folder, 65, tmp_path / "copy")
    assert json.loads((copied / "config.json").read_text()) == {
        "max_position_embeddings": 65,
        "model_type": "llama",
    }
    assert (copied / "weights").read_text() == "numbers"
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64


@pytest.mark.slow
@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
def test_limits_are_measured_after_texts_longer_than_the_pair_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = pair_flags(tmp_path)
    reach = json.loads((tmp_path / "target" / "config.json").read_text())["max_position_embeddings"]
    result = measured(capsys, "limits", *words, "--cores", "1,2", "--contexts", f"8,{reach}")
    assert [(cell["context"], cell["cores"]) for cell in result["cells"]] == [
        (8, 1),
        (8, 2),
        (reach, 1),
        (reach, 2),
    ]
    for cell in result["cells"]:
        assert all(seconds > 0 for seconds in cell["median"]["passes"].values())
        assert all(step["step"] >= step["target"] > 0 for step in cell["median"]["steps"].values())
