"""The lean decoder gives transformers' numbers, for models that it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from engine.config import ModelConfig
from engine.cuda.lean_decoder import LeanDecoder
from engine.models.backend import Backend, TransformersBackend
from engine.models.kinds import is_lean
from engine.start.probe import BACKENDS, BackendOption, choose_backend, find_kv_shape, probe
from tests.engine import tiny
from tests.models.test_architectures import COMMON

SIZES: dict[str, Any] = {**COMMON, "num_hidden_layers": 3}
LEAN: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, biases": transformers.LlamaConfig(**SIZES, attention_bias=True),
    "llama, tied, wide heads": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=16),
    "llama3 rope": transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
}
OTHERS: dict[str, Any] = {
    "gemma2": transformers.Gemma2Config(**SIZES),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=16),
    "llama, mlp biases": transformers.LlamaConfig(**SIZES, mlp_bias=True),
    "llama, gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
}


WITHOUT_CPU = BACKENDS[-2:]
"""Backends of other devices."""


class TurnedDecoder(LeanDecoder):
    """The wrong variant: halves rotated the other way, in plain operations."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._sign = -self._sign


def failing(model: Any, config: ModelConfig, longest: int) -> Backend:
    raise RuntimeError("biases of another shape")


def randomised(config: Any, seed: int) -> Any:
    """A model whose norms and biases are no neutral numbers either."""
    loaded = tiny.load_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in loaded.model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return loaded


@pytest.mark.parametrize("name", LEAN)
def test_lean_decoder_equals_transformers(name: str) -> None:
    """Prompt in two chunks, a tree, an acceptance; then through transformers."""
    loaded = randomised(LEAN[name], seed=3)
    assert is_lean(loaded.model)
    assert probe(loaded, find_kv_shape(loaded), LeanDecoder(loaded.model)) < 0.05
    assert probe(loaded, find_kv_shape(loaded)) < 0.05
    assert isinstance(choose_backend(loaded, find_kv_shape(loaded), backends=WITHOUT_CPU).backend, LeanDecoder)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_through_transformers(name: str) -> None:
    assert not is_lean(randomised(OTHERS[name], seed=3).model)


@pytest.mark.parametrize("make", [lambda model, *_: TurnedDecoder(model), failing], ids=["wrong numbers", "an error"])
def test_a_model_that_it_does_not_reproduce_runs_through_transformers(
    make: Callable[[Any, ModelConfig, int], Backend],
) -> None:
    loaded = randomised(LEAN["llama"], seed=3)
    backends = (BackendOption("lean decoder", is_lean, make), WITHOUT_CPU[-1])
    assert isinstance(choose_backend(loaded, find_kv_shape(loaded), backends=backends).backend, TransformersBackend)


def test_joining_weights_stores_nothing_twice() -> None:
    loaded = randomised(LEAN["llama"], seed=3)
    before = loaded.weight_bytes
    LeanDecoder(loaded.model)
    assert loaded.weight_bytes == before
    attention = loaded.model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
