"""`polydraft check` describes a model from its configuration or a GGUF file's header alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from polydraft.check import main
from tests.models import families, gguf_models


def text_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([str(folder), "--device", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize(("name", "token_bytes"), [("gemma4_text", 512), ("glm4_moe_lite", 160), ("gpt2", 512)])
def test_bytes_of_a_token_count_what_layers_store(
    name: str, token_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that read the K/V of others store none, latents are stored once."""
    config = families.config(name)
    config.save_pretrained(tmp_path)
    _, text = text_of(tmp_path, capsys)
    assert f"K/V: {token_bytes:,} bytes a token" in text


def test_states_of_recurrent_layers_are_named_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer attends. Two have a window of a convolution, and k, v and gates of 4 heads."""
    families.config("qwen3_5_text").save_pretrained(tmp_path)
    _, text = text_of(tmp_path, capsys)
    assert "K/V: 128 bytes a token" in text
    assert "recurrent layers: a state of 3,584 bytes a request, and 960 bytes a drafted token" in text
    families.config("mamba2").save_pretrained(tmp_path)
    _, text = text_of(tmp_path, capsys)
    assert "K/V: 0 bytes a token" in text
    assert "requests fit next to the weights, of any length" in text


def test_configuration_alone_shows_how_a_model_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrapper's text has our own decoder; a refused type names what is missing."""
    families.wrapper_config("qwen3_vl", families.PLACEHOLDERS, {}).save_pretrained(tmp_path)
    code, text = text_of(tmp_path, capsys)
    assert code == 0
    assert "served: qwen3, the text part of qwen3_vl; images are refused" in text
    assert "decoder: our own (cpu)" in text
    assert "K/V: 256 bytes a token" in text  # 2 layers of 2 heads of 8 numbers, K and V, float32
    assert "fit next to the weights" in text
    assert "drafts: Qwen3-0.6B" in text
    transformers.RwkvConfig().save_pretrained(tmp_path)
    code, text = text_of(tmp_path, capsys)
    assert code == 2
    assert "not served" in text
    assert "recurrent layers" in text


def test_a_gguf_file_is_described_by_its_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are counted in their blocks; a file that lacks a weight is refused, as by a start."""
    path = gguf_models.write_model(tmp_path / "model.gguf", types="Q8_0")
    code, text = text_of(path, capsys)
    assert code == 0
    assert "served: llama" in text
    assert "decoder: our own (cpu)" in text
    # 2 layers of 2 heads of 16 numbers, K and V, float32
    assert f"K/V: {gguf_models.NUM_LAYERS * gguf_models.NUM_KV_HEADS * 16 * 2 * 4:,} bytes a token" in text
    path = gguf_models.write_model(tmp_path / "cut.gguf", changes={"blk.0.ffn_up.weight": None})
    code, text = text_of(path, capsys)
    assert code == 2
    assert "not served" in text
    assert "lacks 1 of the model's weights" in text
    path = gguf_models.write_model(tmp_path / "other.gguf", changes={"general.architecture": "rwkv7"})
    assert text_of(path, capsys)[0] == 2
