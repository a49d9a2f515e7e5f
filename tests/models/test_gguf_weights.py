"""Weights of GGUF files: numbers in transformers and the CPU's decoder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.config import ModelConfig
from engine.cpu.decoder import CpuDecoder
from engine.errors import ConfigError, LoadError
from engine.models.gguf import weights
from engine.models.gguf.blocks import BLOCK_TYPES, BlockTensor
from engine.models.gguf.folder import folder_of
from engine.models.importing import import_transformers
from engine.start.loading import LoadedModel, load
from engine.start.number_formats import draft_model_config
from engine.start.outlines import outline_pair
from engine.start.probe import choose_backend, find_kv_shape, probe
from tests.engine import tiny
from tests.grid import grid
from tests.models.gguf_models import DEMO, TYPES_IN_THE_GATE, head_dim_of, stored_weight, write_model

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")

transformers = import_transformers()  # before other tests import it whole

PROMPT = [5, 17, 230, 8, 99, 1]
MIXED = {"attn_v": "Q6_K", "ffn_up": "Q5_0", "token_embd": "Q6_K", "output": "Q8_0", "": "Q4_K"}
"""The types of files of Q4_K_M, and gate and up of two types. Q5_0 has the products of Q8_0."""


def loaded(file: Path, cache: Path, dtype: str = "auto") -> LoadedModel:
    """The model of a file, as the daemon loads it."""
    return load(str(folder_of(file, str(cache))), None, dtype, torch.device("cpu"))


def plain_logits(model: Any) -> Tensor:
    """Logits [T, V] of a prompt by the model's own modules."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    return found


def by_transformers(file: Path) -> Any:
    """Return the same file, dequantised by transformers."""
    config = transformers.AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    config.head_dim = head_dim_of(config.model_type, config.hidden_size)
    place = {"gguf_file": file.name, "config": config, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), **place).eval()


def share_of_tolerance(model: LoadedModel) -> float:
    """Compare the CPU's decoder with the model's modules, as every start does."""
    shape = find_kv_shape(model)
    choice = choose_backend(model, shape)
    assert isinstance(choice.backend, CpuDecoder)
    return probe(model, shape, choice.backend)


def random_blocks(kind: str) -> tuple[BlockTensor, np.ndarray]:
    """A weight in blocks, and its numbers by `gguf.quants`."""
    raw = stored_weight(np.random.default_rng(3), (40, 512), kind).reshape(40, -1)
    weight = BlockTensor(torch.from_numpy(raw), gguf.GGMLQuantizationType[kind])
    return weight, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", [kind.name for kind in BLOCK_TYPES])
def test_numbers_are_those_of_the_blocks(kind: str) -> None:
    weight, expected = random_blocks(kind)
    assert np.allclose(weight.dequantize(), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_slice_of_rows_stays_in_blocks() -> None:
    """All else that is asked of a weight is answered from its numbers."""
    weight, expected = random_blocks("Q8_0")
    rows = weight[3:5]
    assert isinstance(rows, BlockTensor)
    assert torch.equal(rows.dequantize(), torch.from_numpy(expected[3:5]))
    assert torch.equal(weight[:, 7:9], torch.from_numpy(expected[:, 7:9]))
    assert torch.equal(-weight, torch.from_numpy(-expected))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", grid([kind.name for kind in BLOCK_TYPES], TYPES_IN_THE_GATE))
def test_stored_numbers_are_those_of_the_blocks(kind: str) -> None:
    from engine.cpu.compiled.layer_loops import embed
    from engine.cpu.weights import Product, form_of_type

    weight, expected = random_blocks(kind)
    ((piece,),) = Product.of([[weight]], [[None]], lambda one: form_of_type(one.type)).layers
    stored = np.zeros((40, 512), np.float32)
    for number, row in enumerate(stored):
        embed(number, piece.words, piece.scales, row)
    assert np.allclose(stored, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.sampled
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "types", ["Q8_0", MIXED, {"attn": "F16", "": "BF16"}, "F32"], ids=["Q8_0", "mixed", "halves", "F32"]
)
def test_the_decoder_computes_what_the_file_has(architecture: str, types: Any, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", architecture, types)
    assert share_of_tolerance(loaded(file, tmp_path / "cache")) < 1


@pytest.mark.slow  # a compiled function for each type
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [kind.name for kind in BLOCK_TYPES])
def test_every_type_is_served(kind: str, architecture: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", architecture, kind, tied=False)
    model = loaded(file, tmp_path / "cache")
    assert share_of_tolerance(model) < 1


def test_the_types_of_the_file_are_named(tmp_path: Path) -> None:
    """The largest share first; they are gone if the weights are dequantised."""
    file = write_model(tmp_path / "model.gguf", "llama", MIXED)
    first, *others = loaded(file, tmp_path / "cache").weight_types.split("+")
    assert (first, set(others)) == ("Q6_K", {"Q4_K", "Q5_0", "Q8_0"})
    assert loaded(file, tmp_path / "cache", "bfloat16").weight_types == "bfloat16"


def test_a_model_in_parts_is_whole(tmp_path: Path) -> None:
    whole = loaded(write_model(tmp_path / "whole.gguf", "llama", "Q8_0"), tmp_path / "cache")
    parts = loaded(write_model(tmp_path / "parts.gguf", "llama", "Q8_0", parts=3), tmp_path / "cache")
    assert torch.equal(plain_logits(whole.model), plain_logits(parts.model))


@pytest.mark.slow
def test_weights_take_the_memory_of_the_file(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", {"token_embd": "Q6_K", "": "Q4_K"})
    decoder = CpuDecoder(loaded(file, tmp_path / "cache").model)
    stored = sum(tensor.data.nbytes for tensor in weights.file_behind(decoder_folder(file, tmp_path)).tensors.values())
    assert decoder.weight_bytes < 1.3 * stored


def decoder_folder(file: Path, place: Path) -> str:
    return str(folder_of(file, str(place / "cache")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_type_is_asked_for(dtype: str, tmp_path: Path) -> None:
    """Then the weights are dequantised, and rows are not rounded to 8 bits."""
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    model = loaded(file, tmp_path / "cache", dtype)
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    assert all(linear.weight.dtype == getattr(torch, dtype) for linear in linears)
    expected = plain_logits(by_transformers(file))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert torch.allclose(plain_logits(model.model.float()), expected, atol=tolerance * float(expected.std()), rtol=0)


def test_without_the_decoder_weights_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from engine.start.probe import BACKENDS

    file = write_model(tmp_path / "model.gguf", "qwen3", "Q8_0")
    model = loaded(file, tmp_path / "cache")
    expected = plain_logits(model.model)
    model.model.set_attn_implementation(HOOK)
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        choose_backend(model, find_kv_shape(model), backends=BACKENDS[-1:])
    assert "dequantised to float32" in caplog.text
    assert not any(isinstance(weight, BlockTensor) for weight in model.model.parameters())
    assert torch.allclose(plain_logits(model.model), expected, atol=1e-4, rtol=0)


def refused(file: Path, cache: Path, **more: Any) -> str:
    """The message of a start that does not read the weights."""
    with pytest.raises((ConfigError, LoadError)) as caught:
        outline_pair(ModelConfig(target=str(folder_of(file, str(cache))), device="cpu", **more))
    return str(caught.value)


def test_what_cannot_be_served_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", {"attn_v": "Q2_K", "": "Q4_K"})
    assert "type Q2_K are not served, only Q4_0" in refused(file, tmp_path / "cache")
    file = write_model(tmp_path / "other.gguf", "llama", "Q8_0")
    for flags in ({"weights": "int8"}, {"weights": "int4"}, {"activations": "float32"}, {"tensor_parallel_size": 2}):
        (name,) = flags
        assert f"--{name.replace('_', '-')}" in refused(file, tmp_path / "cache", **flags)


def test_a_draft_in_few_bits_does_not_inherit_the_format_of_the_target(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    draft = str(folder_of(file, str(tmp_path / "cache")))
    config = ModelConfig(target=str(DEMO), draft=draft, weights="int8", device="cpu")
    assert draft_model_config(config).weights == "auto"
    assert draft_model_config(msgspec.structs.replace(config, draft=str(DEMO))).weights == "int8"
    assert len(outline_pair(config)) == 2
    with pytest.raises(ConfigError, match=r"^--draft-weights int4: the weights of .* are quantised already"):
        outline_pair(msgspec.structs.replace(config, draft_weights="int4"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blk.1.ffn_up.weight": None}, "lacks 1 of the model's weights"),
        ({"blk.1.ffn_up.scale": np.ones(1, np.float32)}, r"no place for 1 tensors .* \(blk.1.ffn_up.scale\)"),
        (
            {"blk.7.ffn_norm.weight": np.ones(64, np.float32)},
            r"no place for 1 tensors .* \(blk.7.ffn_norm.weight\)",
        ),
        ({"rope_factors_long.weight": np.ones(8, np.float32)}, "no place for 1 tensors of the file .rope_factors_long"),
        ({"blk.1.ffn_norm.weight": np.ones(63, np.float32)}, r"'blk.1.ffn_norm.weight' has the shape \[63\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0", changes=changes)
    with pytest.raises(LoadError, match=said):
        loaded(file, tmp_path / "cache")


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    model = loaded(file, tmp_path / "cache")
    weight: Any = model.model.model.layers[0].mlp.up_proj.weight
    raw = weight.raw.clone()
    raw[3, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    model.model.model.layers[0].mlp.up_proj.weight = nn.Parameter(BlockTensor(raw, weight.type), requires_grad=False)
    with pytest.raises(LoadError, match="scales that are not finite"):
        CpuDecoder(model.model)


def permuted(real: Any) -> Any:
    """Rows as the file has them."""

    def ordered(file: Any, stored: Any, config: Any) -> Tensor:
        other = type(file)(**{**vars(file), "architecture": "qwen2"})
        found: Tensor = real(other, stored, config)
        return found

    return ordered


@pytest.mark.slow
def test_rows_in_the_order_of_the_file_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    monkeypatch.setattr(weights, "_ordered", permuted(weights._ordered))
    found, expected = plain_logits(loaded(file, tmp_path / "cache").model), plain_logits(by_transformers(file))
    assert not torch.allclose(found, expected, atol=1e-2 * float(expected.std()), rtol=0)
