"""`polydraft analyze limits` measures passes and steps in turns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.checkpoints import lengthened
from research.analysis import limits
from research.analysis.__main__ import main
from tests.engine import tiny
from tests.server.tiny_models import write_pair


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document of a measurement, whose table is on standard error."""
    assert main(["limits", *words]) == 0
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)
    assert limits.markdown(result) in printed.err
    return result


def pair_flags(folder: Path) -> list[str]:
    pair = write_pair(folder)
    return ["--target", str(pair.target), "--draft", str(pair.draft), "--repeats", "1"]


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
    result = measured(capsys, *words, "--cores", "1,2", "--contexts", f"8,{reach}")
    assert [(cell["context"], cell["cores"]) for cell in result["cells"]] == [
        (8, 1),
        (8, 2),
        (reach, 1),
        (reach, 2),
    ]
    for cell in result["cells"]:
        assert all(seconds > 0 for seconds in cell["median"]["passes"].values())
        assert all(step["step"] >= step["target"] > 0 for step in cell["median"]["steps"].values())
