"""`polydraft analyze gguf-numbers` and `quality` on a small GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.analysis import gguf_numbers
from research.analysis.__main__ import main
from tests.models.gguf_models import write_model
from tests.wrong import instead

TYPES = {"token_embd": "Q8_0", "": "Q4_1"}
"""Those of the published SmolLM2 file."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file, and texts for it."""
    folder = tmp_path_factory.mktemp("gguf")
    lines = [{"text": "Once upon a time there was a fox."}, {"text": "The old man said nothing at all."}]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file = write_model(folder / "model.gguf", "llama", TYPES)
    return [str(file), "--texts", str(folder / "texts.jsonl"), "--device", "cpu", "--threads", "1"]


def numbers(words: list[str], expected_code: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["gguf-numbers", *words, "--tokens", "6", "--allowed", "0.1"]) == expected_code
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)
    assert gguf_numbers.markdown(result) in printed.err
    return result


@pytest.mark.slow
def test_a_files_numbers_are_those_of_transformers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    result = numbers(words, 0, capsys)
    assert result["greedy"] == {"prompts": 2, "tokens": 6, "differences": []}
    served = next(cell for cell in result["cells"] if cell["format"] == "as served")
    assert served["tokens"] > 10
    assert served["largest_logit_error"] > 0
    assert abs(served["difference"]["value"]) < 0.05


@pytest.mark.slow
def test_other_weights_are_noticed(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = gguf_numbers.by_transformers(write_model(tmp_path / "other.gguf", "llama", TYPES, seed=1))
    with instead(gguf_numbers, "by_transformers", lambda _, file: other):
        result = numbers(words, 1, capsys)
    assert {one["prompt"] for one in result["greedy"]["differences"]} == {0, 1}
    assert all(one["margin"] > gguf_numbers._TIE for one in result["greedy"]["differences"])


@pytest.mark.slow
def test_quality_of_a_file_is_compared_with_its_numbers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a draft model, and with rows in float32 and the weights dequantised."""
    assert main(["quality", "--target", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["options"]["formats"] == ["auto"]
    (cell,) = result["cells"]
    assert (cell["model"], cell["format"]) == ("target", "auto")
    assert 0 < abs(cell["difference"]["value"]) < 0.05


def test_only_gguf_files_have_these_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gguf-numbers", str(Path(__file__).parents[3] / "server" / "demo" / "target")]) == 2
    assert "not a GGUF file" in capsys.readouterr().err
