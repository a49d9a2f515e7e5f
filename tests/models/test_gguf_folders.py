"""A GGUF file becomes a folder; what would be served wrongly is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, LoadError
from engine.models.gguf import folder as folders
from engine.models.gguf.folder import file_of, folder_of
from engine.models.gguf.names import with_folders
from engine.models.gguf.rope import llama3_scaling
from engine.models.importing import import_transformers
from engine.models.weight_files import check_weight_files
from tests.models.gguf_models import DEMO, tokenizer_keys, write_model
from tests.wrong import calls_of

# Before other tests import parts of it with packages that it is to be imported without.
transformers = import_transformers()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models."""
    folder = tmp_path_factory.mktemp("gguf")
    for architecture in ("llama", "qwen2", "qwen3"):
        write_model(folder / f"{architecture}.gguf", architecture)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def changed(folder: Path, architecture: str = "llama", **options: Any) -> dict[str, Any]:
    """The config.json of a model with other key-values or tensors."""
    path = write_model(folder / "changed.gguf", architecture, **options)
    found: dict[str, Any] = json.loads((folder_of(path, "off") / "config.json").read_text())
    return found


def test_files_of_the_tokenizer(models: Path, cache: str) -> None:
    derived = folder_of(models / "llama.gguf", cache)
    made, embedded = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (derived, DEMO))
    assert made.get_vocab() == embedded.get_vocab()
    assert (derived / "chat_template.jinja").read_text() == (DEMO / "chat_template.jinja").read_text()
    generation = json.loads((derived / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2]}


def generation_of(folder: Path, **sampling: Any) -> dict[str, Any]:
    """The generation_config.json of a file with sampling defaults."""
    changes = {f"general.sampling.{name}": value for name, value in sampling.items()}
    derived = folder_of(write_model(folder / "m.gguf", changes=changes), "off")
    found: dict[str, Any] = json.loads((derived / "generation_config.json").read_text())
    return found


def test_all_sampling_defaults_of_a_file_are_stored(tmp_path: Path) -> None:
    """The daemon names those that it does not apply, as with every model."""
    sampling = {"temp": 0.5, "top_k": 7, "penalty_repeat": 1.5, "xtc_probability": 0.25, "sequence": "kpt"}
    stored = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "xtc_probability": 0.25, "sequence": "kpt"}
    roles = {"bos_token_id": 1, "eos_token_id": [2]}
    assert generation_of(tmp_path, **sampling, eos_token_id=9) == stored | roles


def test_penalty_counts_as_its_number_of_tokens_says(tmp_path: Path) -> None:
    penalty = {"repetition_penalty": 1.5}
    for last_n, expected in {64: {"penalty_last_n": 64, **penalty}, -1: penalty, 0: {"penalty_last_n": 0}}.items():
        found = generation_of(tmp_path, penalty_last_n=last_n, penalty_repeat=1.5)
        assert {name: value for name, value in found.items() if "penalty" in name} == expected


OUTPUT_BIASES = {f"blk.{layer}.attn_output.bias": np.zeros(64, np.float32) for layer in (0, 1)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("architecture", "biases", "changes", "fields"),
    [
        ("llama", False, {}, {"model_type": "llama", "attention_bias": False, "mlp_bias": False}),
        ("llama", True, {}, {"model_type": "qwen2"}),
        ("llama", True, OUTPUT_BIASES, {"model_type": "llama", "attention_bias": True}),
        ("qwen2", False, {}, {"model_type": "llama", "attention_bias": False}),
        ("llama", False, {"llama.attention.sliding_window": 32}, {"model_type": "mistral", "sliding_window": 32}),
        ("llama", False, {"llama.attention.layer_norm_rms_epsilon": 1e-6}, {"rms_norm_eps": 1e-6}),
        ("llama", False, {"llama.attention.head_count": [4, 4]}, {"num_attention_heads": 4}),
    ],
)
def test_biases_and_windows_decide_the_type(
    architecture: str, biases: bool, changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    """`Qwen2` is a Llama with biases of q, k and v; `Llama` has the output's, too."""
    found = changed(tmp_path, architecture, biases=biases, changes=changes)
    assert fields.items() <= found.items()


def test_a_head_of_its_own_is_no_tied_one(tmp_path: Path) -> None:
    assert changed(tmp_path, tied=True)["tie_word_embeddings"] is True
    assert changed(tmp_path, tied=False)["tie_word_embeddings"] is False


def frequencies(rope: dict[str, Any], head_dim: int = 16) -> tuple[Any, float]:
    """Frequencies and factor of transformers' rotary embedding."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    config.max_position_embeddings = 1 << 17
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.double().numpy(), float(embedding.attention_scaling)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3 | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        LLAMA3 | {"factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 7.0, "original_max_position_embeddings": 4096},
        LLAMA3 | {"high_freq_factor": 40.0, "original_max_position_embeddings": 16384},
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_factors_of_llama_3_are_recognised(scaling: dict[str, Any], head_dim: int) -> None:
    """Those of the published models, and others from which the same frequencies follow."""
    wanted, _ = frequencies(scaling, head_dim)
    plain, _ = frequencies(PLAIN, head_dim)
    found = llama3_scaling((plain / wanted).astype(np.float32), 500000.0, head_dim)
    assert found is not None
    again, _ = frequencies(PLAIN | {"rope_type": "llama3", **found}, head_dim)
    np.testing.assert_allclose(again, wanted, rtol=1e-5)


def test_a_file_with_factors(tmp_path: Path) -> None:
    """They are those of a Llama 3 or refused: they never count as the plain embedding."""
    wanted = {**LLAMA3, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = (frequencies(PLAIN)[0] / frequencies(wanted)[0]).astype(np.float32)
    base = {"llama.rope.freq_base": 500000.0}
    assert changed(tmp_path, changes={**base, "rope_freqs.weight": factors})["rope_parameters"] == wanted
    ones = np.ones_like(factors)
    assert changed(tmp_path, changes={**base, "rope_freqs.weight": ones})["rope_parameters"] == PLAIN
    with pytest.raises(LoadError, match=r"\(rope_freqs.weight\) are not those of a Llama 3.1 model; serve the same"):
        changed(tmp_path, changes={**base, "rope_freqs.weight": factors[::-1].copy()})


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 1.0},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0},
        ),
    ],
)
def test_scaled_positions(keys: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    found = changed(tmp_path, changes={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    parameters = found["rope_parameters"]
    assert rope.items() <= parameters.items()
    if keys.get("type") != "yarn":
        assert parameters == {"rope_theta": 10000.0, **rope}
        return
    *_, attention = frequencies({"original_max_position_embeddings": 128, **parameters})
    assert attention == pytest.approx(rope.get("attention_factor", 1 + 0.1 * math.log(4.0)))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not served; mixtures of experts of"),
    "unknown key": ({"llama.residual_scale": 0.5}, "1 keys of this file are not known here and may change what the "
                    "model computes (llama.residual_scale); serve the same model in transformers format"),
    "no key": ({"llama.block_count": None}, "llama.block_count is missing; choose another file of the model"),
    "text": ({"llama.block_count": "two"}, "llama.block_count is 'two', not a number from 1"),
    "zero": ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, not a number from 1"),
    "no number": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "rms_epsilon is nan, not a number above 0"),
    "layers": ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers, which is not served"),
    "some rotated": ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, which is not served; all numbers"),
    "values": ({"llama.attention.value_length": 8}, "value_length is 8, which is not served; values must be as wide"),
    "not causal": ({"llama.attention.causal": False}, "attention.causal is False, which is not served; only models"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; linear and yarn are served"),
    "attention factor": ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5, which is not served"),
    "extrapolation": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
                       "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5, which is not served"),
    "some biases": ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "only some layers have biases"),
    "tokens": ({"tokenizer.ggml.tokens": None}, "the file has no tokens (tokenizer.ggml.tokens)"),
    "rows": ({"tokenizer.ggml.tokens": tokenizer_keys()["tokenizer.ggml.tokens"][:-1]}, "token_embd.weight has 4096 "
             "rows for 4095 tokens"),
    "merges": ({"tokenizer.ggml.merges": ["no such"]}, "merges has 'no such'"),
    "tokenizer": ({"tokenizer.ggml.model": "plamo2"}, "the tokenizer model 'plamo2' is not served"),
    "adapter": ({"general.type": "adapter"}, "an adapter (LoRA), not a model; adapters are not served"),
    "projector": ({"general.type": "mmproj"}, "a projector of images or sounds (mmproj), not a model"),
    "other kind": ({"general.type": "imatrix"}, "a GGUF file of type 'imatrix', not a model"),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("fault", REFUSED)
def test_a_model_that_would_be_served_wrongly_is_refused(fault: str, tmp_path: Path) -> None:
    changes, words = REFUSED[fault]
    with pytest.raises((LoadError, ConfigError)) as refused:
        changed(tmp_path, changes=changes)
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'changed.gguf'}: ")
    assert list(folders._temporary().glob(".*")) == [], "nothing half written stays"


def test_a_folder_is_derived_once(models: Path, cache: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(models / "llama.gguf", path)
    first = folder_of(path, cache)
    assert file_of(first) == path
    with calls_of(folders, "open_file") as opened:
        assert folder_of(path, cache) == first
        assert not opened
        (first / "tokenizer.json").unlink()
        assert folder_of(path, cache) == first
        assert len(opened) == 1
        os.utime(path, (1, 1))
        assert folder_of(path, cache) != first
    assert (first / "tokenizer.json").exists()
    assert all(one.name.startswith("m-") for one in first.parent.iterdir()), "nothing half written stays"


def test_a_cache_that_cannot_be_written(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    derived = folder_of(models / "llama.gguf", str(tmp_path / "file"))
    assert (derived / "config.json").exists()
    assert "cannot be stored" in caplog.text
    assert "--profile-cache" in caplog.text


def test_weights_are_checked_in_the_file(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(models / "llama.gguf", path)
    derived = folder_of(path, "off")
    check_weight_files(derived)
    path.write_bytes(path.read_bytes()[:-50_000])
    with pytest.raises(LoadError, match=r"m\.gguf: the file is cut off"):
        check_weight_files(derived)


def test_an_unknown_tokenizer_needs_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal asks for it, and with it the model is served."""
    name = str(write_model(tmp_path / "m.gguf", changes={"tokenizer.ggml.pre": "new"}))
    with pytest.raises(ConfigError, match=r"; or serve the tokenizer of a folder by --tokenizer$"):
        with_folders(EngineConfig(model=ModelConfig(target=name, tokenizer=name)))
    config = with_folders(EngineConfig(model=ModelConfig(target=name, tokenizer=str(DEMO)))).model
    assert (config.tokenizer, (Path(config.target) / "tokenizer.json").exists()) == (str(DEMO), False)
    assert "its tokenizer is left out, because --tokenizer names another" in caplog.text
    stored = json.loads((Path(config.target) / "generation_config.json").read_text())
    assert stored == {"bos_token_id": 1, "eos_token_id": 2}
