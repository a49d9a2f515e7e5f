"""Loads the weights of a GGUF file into a transformers model.

On a CPU, weights of the architectures that our decoder computes stay in their blocks (`blocks.py`),
views of the mapped file. Elsewhere, and if another type is asked for, they are dequantised while
they are loaded. Not for: the configuration and the tokenizer (`folder.py`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.errors import LoadError, first_line
from engine.models.files import first_of
from engine.models.gguf.blocks import BLOCK_TYPES, FLOATS, BlockTensor
from engine.models.gguf.config import ARCHITECTURES
from engine.models.gguf.file import GgufFile, StoredTensor, open_file
from engine.models.gguf.folder import file_of
from engine.models.importing import import_transformers

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_MODULES_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_CONFIG = frozenset({"rope_freqs.weight"})
"""Tensors that the configuration has read."""


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


def is_by_name(file: GgufFile) -> bool:
    """Whether a file's tensors are read by their names here; transformers reads files of other
    architectures.
    """
    return file.architecture in ARCHITECTURES


def check_types(file: GgufFile) -> None:
    """Raise LoadError for tensors of types that are not served."""
    if not is_by_name(file):
        return
    types = {tensor.type for tensor in file.tensors.values()}
    unknown = sorted(kind.name for kind in types if kind not in BLOCK_TYPES | FLOATS)
    if unknown:
        served = ", ".join(kind.name for kind in BLOCK_TYPES | FLOATS)
        raise LoadError(
            f"{file.path}: tensors of type {', '.join(unknown)} are not served, only {served}; download the model in "
            "one of these types, for instance Q4_K_M"
        )


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
    if not is_by_name(file):
        return _by_transformers(name, file, config, dtype or torch.float32, device)
    check_types(file)
    transformers = import_transformers()
    # After transformers, whose import decides which packages are visible.
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=HOOK)
    places = dict(model.named_parameters(remove_duplicate=False))
    filled = set()
    for stored in file.tensors.values():
        if stored.name in _OF_CONFIG:
            continue
        path = _path_of(file, stored.name)
        if path not in places:
            raise LoadError(f"{file.path}: the model has no place for the tensor {stored.name!r}; {_WRONG_FILE}")
        if stored.shape != tuple(places[path].shape):
            raise LoadError(
                f"{file.path}: the tensor {stored.name!r} has the shape {list(stored.shape)}, and the file's "
                f"configuration asks for {list(places[path].shape)}; {_WRONG_FILE}"
            )
        module, _, field = path.rpartition(".")
        weight = _placed(_ordered(file, stored, config), dtype, device)
        setattr(model.get_submodule(module), field, nn.Parameter(weight, requires_grad=False))
        filled.add(path)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
        filled.add("lm_head.weight")
    missing = sorted(places.keys() - filled)
    if missing:
        shown = first_of(missing)
        raise LoadError(f"{file.path}: the file lacks {len(missing)} of the model's weights ({shown}); {_WRONG_FILE}")
    model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    return model.to(device)


_WRONG_FILE = "download it again, or convert the model again"


def _path_of(file: GgufFile, name: str) -> str:
    """Return the name that a tensor has in transformers; raise LoadError for a name that no model
    has.
    """
    layer = _OF_LAYER.fullmatch(name)
    module, _, field = name.rpartition(".")
    if layer is not None and layer[2] in _MODULES_OF_LAYERS:
        return f"model.layers.{layer[1]}.{_MODULES_OF_LAYERS[layer[2]]}.{layer[3]}"
    if module in _MODULES and field in ("weight", "bias"):
        return f"{_MODULES[module]}.{field}"
    raise LoadError(
        f"{file.path}: the tensor {name!r} belongs to no model of the architecture {file.architecture!r} that is "
        "served; serve the model in transformers format"
    )


def _ordered(file: GgufFile, stored: StoredTensor, config: Any) -> Tensor:
    """Return a tensor with its rows in transformers' order: as blocks, or in its own type of
    floats.

    llama.cpp pairs neighbours when it rotates models of the architecture llama, and its files have
    the rows of queries and keys in an order for this.
    """
    with warnings.catch_warnings():
        # The mapped file cannot be written, and nothing writes.
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.from_numpy(stored.data)
    rows = raw
    if len(stored.shape) != 2:
        rows = raw.view(FLOATS[stored.type]).unsqueeze(-1)
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = stored.name.split(".")[-2]
    if file.architecture == "llama" and part in num_heads:
        pairs = rows.view(num_heads[part], -1, 2, rows.shape[-1])
        rows = pairs.transpose(1, 2).reshape(rows.shape)
    if len(stored.shape) == 1:
        return rows.squeeze(-1)
    return BlockTensor(rows, stored.type)


def _placed(weight: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return a weight as the model has it."""
    if dtype is None:
        return weight.float() if weight.dim() == 1 else weight
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
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _by_transformers(name: str, file: GgufFile, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model of an architecture whose tensors transformers names, dequantised."""
    transformers = import_transformers()
    if len(file.paths) > 1:
        raise LoadError(
            f"{file.path}: files of the architecture {file.architecture!r} are served in one part only; merge the "
            "parts (llama-gguf-split --merge of llama.cpp)"
        )
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, config=config, dtype=dtype, attn_implementation=HOOK
        )
    except Exception as error:  # transformers raises exceptions of many types
        raise LoadError(f"{file.path}: the weights cannot be loaded: {first_line(error)}") from error
    model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    return model.to(device)
