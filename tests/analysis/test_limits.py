"""`analyze limits` measures passes and steps after texts, and computes what they take at least."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from analysis import limits
from analysis.__main__ import main
from loadtest.checkpoints import lengthened
from tests.engine import tiny
from tests.server.tiny_models import write_pair


def test_the_least_time_counts_weights_texts_and_products() -> None:
    """Two layers of a product 4 x 6; 2 query heads and 1 K/V head of 8 numbers."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 6) for _ in range(2))
    model.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)  # type: ignore[assignment]
    keys = torch.zeros(2, 100, 1, 8)
    runner: Any = SimpleNamespace(
        model=model, backend=SimpleNamespace(weight_bytes=96), storage=SimpleNamespace(keys=keys)
    )
    found = limits.least_s(runner, 3, 10, {"bytes": 2.0, "operations": 4.0})
    assert found["bytes"] == (96 + 10 * 2 * 2 * 8 * 4) / 2
    assert found["arithmetic"] == 3 * (2 * 2 * 4 * 6 + 4 * 2 * 2 * 8 * (10 + 1.5)) / 4


def test_more_cores_are_compared_with_the_fewest_in_the_same_turns() -> None:
    """A machine that is half as fast in the second turn."""

    def cell(cores: int, seconds: list[float]) -> dict[str, Any]:
        return {
            "context": 32,
            "cores": cores,
            "passes": {"1": seconds},
            "steps": {"plain": [{"step": 2 * one} for one in seconds]},
        }

    (found,) = limits.speedups([cell(2, [1.0, 2.0, 1.1]), cell(1, [1.5, 3.0, 1.65])])
    assert (found["cores"], found["over"]) == (2, 1)
    for name in ("plain step", "pass of one row"):
        assert found[name] == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})


def test_a_longer_checkpoint_is_a_copy_with_other_positions(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "model_type": "llama"}))
    (folder / "weights").write_text("numbers")
    assert lengthened(folder, 64, tmp_path / "not there") == folder
    copied = lengthened(folder, 65, tmp_path / "copy")
    assert json.loads((copied / "config.json").read_text()) == {"max_position_embeddings": 65, "model_type": "llama"}
    assert (copied / "weights").read_text() == "numbers"
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64


@pytest.mark.slow
@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
def test_a_pair_is_measured_behind_texts_longer_than_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_pair(tmp_path)
    reach = json.loads((Path(pair.target) / "config.json").read_text())["max_position_embeddings"]
    file = tmp_path / "limits.json"
    words = ["--target", str(pair.target), "--draft", str(pair.draft), "--repeats", "1", "--cores", "1,2"]
    assert main(["limits", *words, "--contexts", f"8,{reach}", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(cell["context"], cell["cores"]) for cell in result["cells"]] == [(8, 1), (8, 2), (reach, 1), (reach, 2)]
    for cell in result["cells"]:
        assert all(seconds > 0 for seconds in cell["median"]["passes"].values())
        assert all(step["step"] >= step["target"] > 0 for step in cell["median"]["steps"].values())
    assert limits.markdown(result) in capsys.readouterr().err
