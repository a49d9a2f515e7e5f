"""`polydraft analyze quality`: perplexities in several number formats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from research.analysis import quality
from research.analysis.__main__ import main
from research.demo import bench_pair


def test_a_difference_is_of_all_tokens_and_its_interval_of_texts() -> None:
    """Texts of 10 and 30 tokens that lose 0.1 nats a token, and texts that lose between 0 and
    0.2.
    """
    found = quality.compared([10.0, 60.0], [11.0, 63.0], [10, 30])
    assert found["perplexity_before"] == pytest.approx(math.exp(70 / 40))
    assert found["perplexity"] == pytest.approx(math.exp(74 / 40))
    assert found["difference"] == pytest.approx(dict.fromkeys(("value", "low", "high"), math.expm1(0.1)))
    spread = quality.compared([10.0] * 40, [10.0, 12.0] * 20, [10] * 40)["difference"]
    assert spread["value"] == pytest.approx(math.expm1(0.1))
    assert 0 < spread["low"] < spread["value"] < spread["high"] < math.expm1(0.2)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain perplexity is that of transformers, and few bits change it."""
    bench_pair.write(tmp_path, "tiny", "tiny", 512, 0.6, 128)
    texts = [" ".join(f"w{(7 * start + start * place) % 512}" for place in range(20)) for start in range(1, 4)]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--device", "cpu"]
    formats = ["--weights", "int8", "--weights", "int4"]
    assert main(["quality", *words, *formats, "--texts", str(file), "--output", str(tmp_path / "q.json")]) == 0
    printed = capsys.readouterr()
    result = json.loads((tmp_path / "q.json").read_text())
    assert quality.markdown(result) in printed.err
    assert [(cell["texts"], cell["model"], cell["format"], cell["tokens"]) for cell in result["cells"]] == [
        ("own", model, name, 3 * 19) for name in ("int8", "int4") for model in ("target", "draft")
    ]
    assert len({cell["perplexity"] for cell in result["cells"]}) == 4
    assert all(cell["largest_logit_error"] > 0 for cell in result["cells"])
    assert all(0.5 < cell["equal_tokens"] <= 1 for cell in result["cells"])
    tokens = torch.tensor([[int(word[1:]) for word in text.split()] for text in texts])
    for cell in result["cells"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / cell["model"])
        with torch.inference_mode():
            loss = float(model(input_ids=tokens, labels=tokens).loss)
        assert math.log(cell["perplexity_before"]) == pytest.approx(loss, abs=1e-3)
        assert cell["perplexity"] != cell["perplexity_before"]
        assert abs(cell["difference"]["value"]) < (0.1 if cell["format"] == "int8" else 0.5)


def test_texts_without_a_token_to_predict_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text(json.dumps({"text": "a"}))
    assert main(["quality", "--texts", str(file), "--length", "1"]) == 2
    assert "no text has two tokens" in capsys.readouterr().err
