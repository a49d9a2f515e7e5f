"""Loads the weights of a GGUF file into a transformers model.

On a CPU, weights of linear layers and embeddings stay in their blocks (`blocks.py`), views of the
mapped file. Elsewhere, and if another type is asked for, they are dequantised while they are
loaded. Every tensor of the file must have a place in the model, and every weight of the
model a tensor. Not for: the configuration and the tokenizer (`folder.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.errors import LoadError
from engine.models.files import first_of
from engine.models.gguf.blocks import BLOCK_TYPES, FLOATS, BlockTensor
from engine.models.gguf.file import GgufFile, StoredTensor, open_file
from engine.models.gguf.folder import file_of
from engine.models.gguf.keys import CONVERT_AGAIN, OTHER_FORMAT
from engine.models.gguf.rope import FACTORS, LONG, SHORT
from engine.models.importing import import_transformers

IN_BLOCKS = frozenset({"llama", "qwen2", "qwen3"})
"""Architectures that our decoder computes. Files with other types of tensors are refused.

Such files of other architectures are dequantised.
"""
_OF_CONFIG = {"phi3": {LONG, SHORT}}
"""Tensors that the configuration has read, by architecture; `FACTORS` of the others."""
_GATES_AND_UPS = "mlp.experts.gate_up_proj"
"""Weight of transformers that is two tensors of a file."""
_WITH_SHIFTED_NORMS = frozenset({"gemma2", "gemma3"})
"""Architectures whose norms multiply by 1 + weight in transformers."""
_TRANSPOSED = {"gpt2": ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")}
"""Endings of the tensors whose rows are columns in transformers, by architecture."""


@cache
def file_behind(name: str) -> GgufFile | None:
    """Return the opened GGUF file that has the weights of a model's folder; None if there is none.

    Raise LoadError for a file that cannot be used.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    path = file_of(folder)
    return None if path is None else open_file(path)


def has_served_types(file: GgufFile) -> bool:
    """Whether products multiply all tensors of a file in their blocks."""
    return {tensor.type for tensor in file.tensors.values()} <= BLOCK_TYPES.keys() | FLOATS.keys()


def check_types(file: GgufFile, dtype: torch.dtype | None) -> None:
    """Raise LoadError for tensors of types that are not served.

    dtype: type to which weights are dequantised; None leaves them in their blocks.
    """
    types = {tensor.type for tensor in file.tensors.values()}
    served = BLOCK_TYPES | FLOATS
    unknown = sorted(kind.name for kind in types if kind not in served and (dtype is None or not _is_readable(kind)))
    if not unknown:
        return
    way_out = f"download the model in one of these types, for instance Q4_K_M, or {OTHER_FORMAT}"
    if dtype is None and all(map(_is_readable, types)):
        way_out += ", or dequantise the weights: --dtype bfloat16, 2 bytes a weight"
    raise LoadError(
        f"{file.path}: tensors of type {', '.join(unknown)} are not served, only "
        f"{', '.join(kind.name for kind in served)}; {way_out}"
    )


@cache
def _is_readable(kind: Type) -> bool:
    """Whether blocks of a type can be dequantised."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def types_of_matrices(file: GgufFile) -> frozenset[Type]:
    """Return the types of all weights of two dimensions."""
    return frozenset(tensor.type for tensor in file.tensors.values() if len(tensor.shape) == 2)


def type_of_embeddings(file: GgufFile) -> Type | None:
    """Return the type of the embeddings; None if the file has none."""
    stored = file.tensors.get("token_embd.weight")
    return None if stored is None else stored.type


def load_model(name: str, file: GgufFile, config: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Return the transformers model of a file; raise LoadError if it cannot be loaded.

    name: the model's folder; config: transformers' of the model; dtype: type to which weights are
    dequantised, None leaves them in their blocks.
    """
    check_types(file, dtype)
    transformers = import_transformers()
    # After transformers, whose import decides which packages are visible.
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype, attn_implementation=HOOK
        )
    for path, stored in tensors_of(file, model).items():
        module, _, field = path.rpartition(".")
        shape = tuple(model.get_parameter(path).shape)
        in_blocks = dtype is None and stays_in_blocks(model, path, stored)
        weight = _weight(file, stored, config, shape, None if in_blocks else dtype or torch.float32, device)
        setattr(model.get_submodule(module), field, nn.Parameter(weight, requires_grad=False))
    _tie(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    return model.to(device)


def stays_in_blocks(model: Any, path: str, stored: list[StoredTensor]) -> bool:
    """Whether a weight that is not to be dequantised is multiplied in its blocks.

    Embeddings read rows of their weight alone. A subclass of a linear layer may read its weight.
    """
    module, _, field = path.rpartition(".")
    parent = model.get_submodule(module)
    has_blocks = type(parent) is nn.Linear or isinstance(parent, nn.Embedding)
    return has_blocks and field == "weight" and len(stored[0].shape) == 2


def tensors_of(file: GgufFile, model: Any) -> dict[str, list[StoredTensor]]:
    """Return the tensors of each weight of a model, by path; raise LoadError if some are left."""
    places = dict(model.named_parameters(remove_duplicate=False))
    if model.config.tie_word_embeddings:
        places.pop("lm_head.weight")
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    names = {path: _names(path, known) for path in places}
    missing = sorted(path for path, parts in names.items() if not file.tensors.keys() >= set(parts))
    if missing:
        raise LoadError(
            f"{file.path}: the file lacks {len(missing)} of the model's weights ({first_of(missing)}); {CONVERT_AGAIN}"
        )
    placed = {name for parts in names.values() for name in parts}
    without_place = file.tensors.keys() - placed - _OF_CONFIG.get(file.architecture, {FACTORS})
    if without_place:
        raise LoadError(
            f"{file.path}: the model has no place for {len(without_place)} tensors of the file "
            f"({first_of(sorted(without_place))}); {OTHER_FORMAT}"
        )
    return {path: [file.tensors[name] for name in parts] for path, parts in names.items()}


def _names(path: str, known: Any) -> list[str]:
    """Return the names that a weight's tensors have in files.

    known: llama.cpp's names by those of transformers, as its converter has them.
    """
    module, dot, field = path.rpartition(".")
    if path.endswith(_GATES_AND_UPS):
        return [f"{known.get_name(f'{module}.{part}_proj')}.weight" for part in ("gate", "up")]
    name = known.get_name(path)
    if name is not None:  # experts are parameters, not modules with a weight
        return [f"{name}.weight"]
    return [f"{known.get_name(module)}{dot}{field}"]


def _weight(
    file: GgufFile,
    tensors: list[StoredTensor],
    config: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    """Return a weight of a model; raise LoadError if its tensors have another shape.

    shape: in the model.
    """
    first = tensors[0]
    is_transposed = first.name.endswith(_TRANSPOSED.get(file.architecture, ()))
    stored_shape = first.shape[::-1] if is_transposed else first.shape
    if len(tensors) > 1:
        stored_shape = (first.shape[0], sum(stored.shape[1] for stored in tensors), *first.shape[2:])
    # The tools of llama.cpp drop dimensions of size 1.
    if [size for size in stored_shape if size > 1] != [size for size in shape if size > 1]:
        raise LoadError(
            f"{file.path}: the tensor {first.name!r} has the shape {list(first.shape)}, and the file's "
            f"configuration asks for {list(shape)}; {CONVERT_AGAIN}"
        )
    parts = [_placed(_ordered(file, stored, config), dtype, device) for stored in tensors]
    if dtype is None:
        return parts[0]
    shaped = [part.view(stored.shape) for part, stored in zip(parts, tensors, strict=True)]
    weight = shaped[0] if len(shaped) == 1 else torch.cat(shaped, 1)
    if is_transposed:
        weight = weight.T.contiguous()
    return weight.view(shape)


def _ordered(file: GgufFile, stored: StoredTensor, config: Any) -> Tensor:
    """Return a tensor's rows in transformers' order, as blocks or float32.

    llama.cpp pairs neighbours when it rotates models of the architecture llama, and its files have
    the rows of queries and keys in an order for this.
    """
    with warnings.catch_warnings():
        # The mapped file cannot be written, and nothing writes.
        warnings.simplefilter("ignore", UserWarning)
        rows = torch.from_numpy(stored.data).view(-1, stored.data.shape[-1])
    is_vector = len(stored.shape) == 1
    if is_vector:
        rows = BlockTensor(rows, stored.type).dequantize().T
    if file.architecture in _WITH_SHIFTED_NORMS and stored.name.endswith("norm.weight"):
        rows = rows - 1
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    part = stored.name.split(".")[-2]
    if file.architecture == "llama" and part in num_heads:
        pairs = rows.view(num_heads[part], -1, 2, rows.shape[-1])
        rows = pairs.transpose(1, 2).reshape(rows.shape)
    return rows.squeeze(-1) if is_vector else BlockTensor(rows, stored.type)


def _placed(weight: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return a weight as the model has it."""
    if dtype is None:
        return weight
    if isinstance(weight, BlockTensor):
        # Row by row, so that a large weight is never there in float32 as a whole.
        plain = torch.empty(weight.shape, dtype=dtype, device=device)
        for part in _parts(len(weight)):
            plain[part] = weight.rows(part).dequantize().to(dtype)
        return plain
    return weight.to(device, dtype)


def _parts(count: int, size: int = 4096) -> Iterator[slice]:
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))


def dequantise(model: Any, dtype: torch.dtype) -> None:
    """Replace all weights in blocks by plain ones."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, BlockTensor):
                plain = _placed(weight, dtype, torch.device("cpu"))
                module._parameters[name] = nn.Parameter(plain, requires_grad=False)
    _tie(model)


def _tie(model: Any) -> None:
    """Give the head the embeddings' weight, if the model has one weight for both."""
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
