"""Shapes, initialisation, loading and saving of the two models of the embedded pair.

Both are plain ``transformers`` Llama models. This module has the parts that training and evaluation
share; it is not part of the serving path, which reads the saved folders like any other model.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 2048

SHAPES: dict[str, dict[str, Any]] = {
    "target": {
        "num_hidden_layers": 24,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "draft": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}


def causal_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention without a materialised mask.

    For packed training rows: no cache, no padding.
    """
    output = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("packed_causal", causal_attention)


def build_model(name: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A freshly initialised ``target`` or ``draft``."""
    config = LlamaConfig(
        **SHAPES[name],
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("packed_causal")
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for key, parameter in model.named_parameters():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=residual_std)
    return model


def load_model(folder: Path, device: torch.device, attention: str = "packed_causal") -> LlamaForCausalLM:
    """A saved model with its bf16 weights widened to float32, in evaluation mode."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return cast(LlamaForCausalLM, model.to(device).eval())


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(folder))


def save_model(model: LlamaForCausalLM, tokenizer_dir: Path, folder: Path) -> None:
    """Write the model in bf16 together with the tokenizer and the ids that generation needs."""
    weights = {key: value.detach().to("cpu", torch.bfloat16) for key, value in model.state_dict().items()}
    config = LlamaConfig.from_dict(model.config.to_dict())
    copy = LlamaForCausalLM(config).bfloat16()
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    shutil.copytree(tokenizer_dir, folder, dirs_exist_ok=True)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Residual and embedding dropout, which Llama models lack; active in training mode only."""

    def hook(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    for key, module in model.named_modules():
        if key.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(hook)


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile the decoder layers one by one: they share one graph, so this is quick to start."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def count_parameters(model: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def read_json(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
