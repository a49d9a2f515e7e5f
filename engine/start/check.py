"""Describes from a configuration, or a GGUF file's header, whether and how a model is served.

Not for: faults of weight files, which `polydraft serve` finds before it reads them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from engine.attention.attention import HOOK, register
from engine.models.checkpoint import context_length
from engine.models.gguf.file import GgufFile
from engine.models.gguf.folder import folder_of
from engine.models.gguf.names import local_file
from engine.models.gguf.weights import file_behind, stays_in_blocks, tensors_of
from engine.models.importing import import_transformers
from engine.models.kinds import may_decode
from engine.models.wrappers import wrapper_of
from engine.start.architectures import check_config, read_config
from engine.start.loading import adopt
from engine.start.number_formats import arithmetic_dtype, choose_device, file_dtype, is_compiled
from engine.start.probe import find_kv_shape

_GIB = 1 << 30
_DRAFTS = {
    "gemma3_text": "gemma-3-270m, gemma-3-1b",
    "glm4_moe": "its own MTP module (--draft-model mtp)",
    "gpt_oss": "an EAGLE-3 head",
    "granite": "a smaller granite",
    "llama": "Llama-3.2-1B for Llama 3, SmolLM2-135M for SmolLM2, or an EAGLE-3 head",
    "llama4_text": "an EAGLE-3 head",
    "nemotron_h": "its own MTP module, if it has one (--draft-model mtp)",
    "qwen2": "Qwen2.5-0.5B",
    "qwen3": "Qwen3-0.6B, or an EAGLE-3 or DFlash head",
    "qwen3_5_moe_text": "its own MTP module (--draft-model mtp)",
    "qwen3_5_text": "its own MTP module (--draft-model mtp)",
    "qwen3_moe": "Qwen3-0.6B, or an EAGLE-3 or DFlash head",
    "qwen3_next": "its own MTP module (--draft-model mtp)",
}
"""Draft models that usually have the tokens of a type; the start compares the tokens."""


def describe(name: str, revision: str | None, wanted_device: str) -> Iterator[str]:
    """Yield lines about a model that is served; raise ConfigError for another one."""
    path = local_file(name)
    folder = name if path is None else str(folder_of(path, "off"))
    config = read_config(folder, revision)
    check_config(name, config)
    device = choose_device(wanted_device)
    wrapper = wrapper_of(config)
    part = f", the text part of {wrapper}; images are refused" if wrapper else ""
    yield f"served: {config.model_type}{part}"
    is_own = may_decode(config) and (device.type != "cpu" or find_spec("numba") is not None)
    is_multiplied = is_compiled(config, device) and not is_own
    with_products = ", with our own products (cpu)" if is_multiplied else ""
    yield f"decoder: {f'our own ({device.type})' if is_own else f'transformers{with_products}'}"
    reach = context_length(config)
    yield f"context: {reach:,} tokens"
    model = _without_weights(config)
    file = file_behind(folder)
    file_type = None
    if file is not None:
        file_type = file_dtype(file, "auto", device)
        tensors_of(file, model)
    if file is not None and file_type is None:
        weights = block_bytes(file, model, is_own)
    elif is_multiplied:
        weights = multiplied_bytes(model, file_type or getattr(config, "dtype", None) or torch.float32)
    else:
        weights = weight_bytes(model, config, device, is_own)
    token, inputs, state = stored_bytes(model, config, device)
    yield f"weights: {weights / _GIB:.1f} GiB, K/V: {token:,} bytes a token"
    if state:
        yield f"recurrent layers: a state of {state:,} bytes a request, and {inputs:,} bytes a drafted token"
    free = _free_bytes(device) - weights - state
    if not token and free > 0:
        yield f"this machine: {free // state:,} requests fit next to the weights, of any length"
    elif free > token:
        yield f"this machine: {min(reach, free // token):,} tokens fit next to the weights"
    else:
        yield "this machine: the weights do not fit; serve a checkpoint with fewer bits, or a smaller model"
    drafts = _DRAFTS.get(config.model_type, "a smaller model of its family with the same tokens")
    yield f"drafts: {drafts}; or text drafts (--spec-drafters prompt_lookup)"


def block_bytes(file: GgufFile, model: Any, is_own: bool) -> int:
    """Return the bytes of the weights of a file that stay in their blocks, if they can.

    is_own: whether our own decoder, which has one weight for tied embeddings and output head,
    computes the model. Other models read embeddings as the file has them.
    """
    from engine.cpu.weights import bytes_of_number  # Numba is an optional package

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    num_bytes = 0.0
    for path, stored in tensors_of(file, model).items():
        weight = model.get_parameter(path)
        if not stays_in_blocks(model, path, stored):
            num_bytes += 4 * weight.numel()
            continue
        is_read_alone = weight is embedding and not is_own
        if is_read_alone:
            num_bytes += sum(tensor.data.nbytes for tensor in stored)
        if weight is head or not is_read_alone:
            num_bytes += sum(bytes_of_number(tensor.type) * math.prod(tensor.shape) for tensor in stored)
    return round(num_bytes)


def multiplied_bytes(model: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a model with compiled products, whose weights have the loaded type.

    Weights without a product are float32, and so are embeddings, also if the output head has the
    same numbers.
    """
    from engine.cpu.products import multiplied_weights  # Numba is an optional package

    multiplied = {id(weight): dtype.itemsize * weight.numel() for weight in multiplied_weights(model)}
    embedding = model.get_input_embeddings().weight
    others = [weight for weight in model.parameters() if id(weight) not in multiplied or weight is embedding]
    num_others = sum(int(weight.numel()) for weight in others)
    return sum(multiplied.values()) + 4 * num_others


def weight_bytes(model: Any, config: Any, device: torch.device, keeps_type: bool) -> int:
    """Return the bytes of a model's weights in the type in which they would be served.

    keeps_type: whether that is the checkpoint's type.
    """
    stored = getattr(config, "dtype", None) or torch.float32
    dtype = stored if keeps_type else arithmetic_dtype("auto", device) or stored
    dtype_bytes = int(dtype.itemsize)
    return dtype_bytes * sum(int(parameter.numel()) for parameter in model.parameters())


def stored_bytes(model: Any, config: Any, device: torch.device) -> tuple[int, int, int]:
    """Return (bytes of a token's K and V, of a node's inputs of recurrent layers, of a state)."""
    stored = getattr(config, "dtype", None) or torch.float32
    dtype = torch.float32 if device.type == "cpu" else stored
    try:
        shape = find_kv_shape(adopt(model, config.model_type))
        return shape.token_bytes(dtype), shape.input_bytes(dtype), shape.state_bytes(dtype)
    except (RuntimeError, NotImplementedError):  # code that reads numbers, which such a model lacks
        return int(_kv_numbers(config)) * int(dtype.itemsize), 0, 0


def _kv_numbers(config: Any) -> int:
    """Return the stored numbers of a token in a model whose layers are alike."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))
    num_heads = config.num_attention_heads
    in_attention = getattr(getattr(config, "attn_config", None), "kv_n_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or in_attention or num_heads
    if config.model_type == "jetmoe":
        heads *= config.num_experts_per_tok  # each chosen expert of its attention has a copy
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(config.num_hidden_layers * heads * width * 2)


def _without_weights(config: Any) -> Any:
    """Return a model whose tensors have shapes alone."""
    register()
    with torch.device("meta"):
        models = import_transformers().AutoModelForCausalLM
        return models.from_config(config, attn_implementation=HOOK, dtype=torch.bfloat16)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
