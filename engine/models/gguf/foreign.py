"""`python -m engine.models.gguf.foreign FILE FOLDER`: writes the config.json of an architecture for
which there is no table here, as transformers reads it from a GGUF file.

Transformers ignores keys that it does not know. Here they are read by a second table or refused,
because they may change what the model computes. It is a separate process, because it loads torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from engine.errors import LoadError, first_line
from engine.models.gguf.config import ARCHITECTURES, vocab_size
from engine.models.gguf.file import GgufFile, open_file
from engine.models.gguf.keys import Keys
from engine.models.importing import import_transformers

NAMES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt2": "gpt2",
}
"""Architectures that transformers reads, with its names for them."""
_NARROW = {("gemma2", 46), ("gemma3", 62)}
"""The models of 27 B parameters, whose attention is scaled by another width: architecture and
number of layers, by which llama.cpp knows them, too.
"""
_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Fields of a configuration by the keys that transformers does not read."""
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_TRANSFORMERS = "serve the same model in transformers format"


def foreign_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json; raise LoadError for a model that transformers does not
    read, or not whole.
    """
    transformers = import_transformers()
    name = NAMES.get(file.architecture)
    if name is None:
        served = ", ".join((*ARCHITECTURES, *NAMES))
        raise LoadError(
            f"GGUF files of the architecture {file.architecture!r} are not served, only those of {served}; "
            f"{_TRANSFORMERS}"
        )
    try:
        read = transformers.AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # the library raises exceptions of many types
        raise LoadError(f"transformers does not read this file ({first_line(error)}); {_TRANSFORMERS}") from error
    config: dict[str, Any] = json.loads(read.to_json_string(use_diff=False))
    keys = Keys(file)
    mapping = transformers.integrations.ggml.GGUF_CONFIG_MAPPING
    for key, field in mapping[name].items():
        if field is not None:  # else transformers knows the key and ignores it
            keys.skip(key)
    for key, field in _FIELDS.items():
        if keys.has(key) and field in config:
            config[field] = _plain(keys.number(key))
    if "query_pre_attn_scalar" in config:
        width = config["hidden_size"] // config["num_attention_heads"]
        is_narrow = (file.architecture, config["num_hidden_layers"]) in _NARROW
        config["query_pre_attn_scalar"] = width if is_narrow else config["head_dim"]
    _check_rope(file, keys, config)
    keys.expect("attention.causal", (True,), "only models that generate are")
    keys.end()
    known = {"tie_word_embeddings": "output.weight" not in file.tensors, "vocab_size": vocab_size(file)}
    return config | known | {"dtype": "bfloat16", "architectures": [_class_of(transformers, read)]}


def _check_rope(file: GgufFile, keys: Keys, config: dict[str, Any]) -> None:
    """Raise LoadError for rotary embeddings that transformers does not read from such files."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        keys.expect(key, (width,), _TRANSFORMERS)
    keys.expect("rope.scaling.type", ("none",), _TRANSFORMERS)
    for name in _FACTORS:
        tensor = file.tensors.get(name)
        if tensor is not None and not np.all(dequantize(tensor.data, tensor.type) == 1):
            raise LoadError(f"the factors of its rotary embedding ({name}) are not read; {_TRANSFORMERS}")


def _class_of(transformers: Any, config: Any) -> str:
    """Return the name of the class that generates."""
    try:
        return str(transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__)
    except KeyError as error:
        raise LoadError(f"{config.model_type} models do not generate; only models that generate are served") from error


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def main(path: str, folder: str) -> int:
    """Write the file and return 0; print why not, in one line, and return 1."""
    try:
        config = foreign_config(open_file(Path(path)))
    except LoadError as error:
        print(str(error).removeprefix(f"{path}: "), file=sys.stderr)
        return 1
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
