"""Small models as llama.cpp's converter writes them.

The keys are not computed here. `python -m tests.models.converted LLAMA_CPP` converts the variants
with the converter in a checkout of llama.cpp, compares its tensors with `write_converted`, and
writes its keys into `converted_keys.json`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.models.importing import import_transformers
from tests.models.converted_variants import FILE_TYPES, VARIANTS, Variant
from tests.models.gguf_models import DEMO, stored_weight, tokenizer_keys, write_file

transformers = import_transformers()

RECORDED = Path(__file__).with_name("converted_keys.json")


def config_of(variant: Variant) -> Any:
    """Return transformers' configuration of a variant."""
    return transformers.AutoConfig.for_model(variant.model_type, **variant.fields)


def random_model(variant: Variant, seed: int = 0) -> Any:
    """Return transformers' model of a variant with random weights, also of norms and biases."""
    torch.manual_seed(seed)
    config = config_of(variant)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
    return model


def converted_tensors(variant: Variant, model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the converter writes for a model, in float32."""
    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == variant.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for path, weight in _named_weights(model).items():
        name = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert name is not None, path
        if not path.endswith((".weight", ".bias")):
            name += ".weight"
        tensors[name] = _converted(variant.architecture, path, weight, config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _divisors(rope, 16)
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            tensors[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return tensors


def _named_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return weights by the names that published checkpoints have."""
    weights = {}
    for path, weight in model.named_parameters():
        if path.endswith("experts.gate_up_proj"):
            gate, up = weight.detach().chunk(2, dim=1)
            weights |= {path.replace("gate_up", "gate"): gate, path.replace("gate_up", "up"): up}
        else:
            weights[path] = weight.detach()
    return weights


def _converted(architecture: str, path: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    if architecture.startswith("gemma") and path.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and path.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return weight.T.contiguous()
    if path.endswith("conv.conv.weight"):
        return weight.squeeze(1)
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    part = path.split(".")[-2]
    if architecture == "llama" and part in num_heads:
        return weight.view(num_heads[part], 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    return weight


def _divisors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Return the factors of Llama 3.1's frequencies, as transformers has them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def frequencies(parameters: dict[str, Any]) -> torch.Tensor:
        config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
        found: torch.Tensor = LlamaRotaryEmbedding(config).inv_freq.double()
        return found

    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return (frequencies(plain) / frequencies(dict(rope))).float()


def converted_keys(name: str) -> dict[str, Any]:
    """Return the key-values of a variant's file."""
    left_out = VARIANTS[name].left_out
    recorded = json.loads(RECORDED.read_text())[name]
    return {key: value for key, value in recorded.items() if key.partition(".")[2] not in left_out} | tokenizer_keys()


def write_converted(path: Path, name: str, file_type: str = "F32", changes: Mapping[str, Any] | None = None) -> Any:
    """Write the file of a variant, and return transformers' model of which it has the weights.

    file_type: of `FILE_TYPES`. The model's weights are not rounded to it, and weights of types that
    cannot be written are other random ones. changes: of keys; None leaves one out.
    """
    variant = VARIANTS[name]
    model = random_model(variant)
    random = np.random.default_rng(0)
    tensors = {}
    for tensor, weight in converted_tensors(variant, model).items():
        kind = next(kind for part, kind in FILE_TYPES[file_type].items() if part in tensor)
        numbers = weight.numpy()
        if numbers.shape[0] == 1 and kind != "F32":
            numbers = numbers[0]  # llama.cpp's tool that makes these types drops dimensions of size 1
        if numbers.ndim == 1 or "position_embd" in tensor or "_inp" in tensor:
            tensors[tensor] = numbers, "F32"
        else:
            tensors[tensor] = stored_weight(random, numbers.shape, kind, numbers), kind
    write_file(path, variant.architecture, {**converted_keys(name), **(changes or {})}, tensors)
    return model


def main(llama_cpp: str) -> None:
    """Record the keys of the converter in a checkout of llama.cpp."""
    sys.path[:0] = [f"{llama_cpp}/gguf-py", llama_cpp]
    for loaded in [module for module in sys.modules if module.split(".")[0] == "gguf"]:
        del sys.modules[loaded]
    from conversion import get_model_class
    from gguf import GGUFReader, LlamaFileType

    recorded = {}
    for name, variant in VARIANTS.items():
        model = random_model(variant)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            shutil.copy(DEMO / "tokenizer.json", folder)
            file = Path(folder) / "model.gguf"
            converter = get_model_class(type(model).__name__)(Path(folder), LlamaFileType.ALL_F32, file)
            converter.set_vocab = lambda: None
            with torch.inference_mode():
                converter.write()
            read = GGUFReader(file)
            prefix = f"{variant.architecture}."
            keys = [key for key in read.fields if key.startswith(prefix)]
            recorded[name] = {key: read.fields[key].contents() for key in keys}
            written = {tensor.name: np.array(tensor.data) for tensor in read.tensors}
        expected = converted_tensors(variant, model)
        assert written.keys() == expected.keys(), (name, written.keys() ^ expected.keys())
        for tensor, numbers in expected.items():
            assert np.allclose(written[tensor], numbers.numpy(), rtol=1e-6), (name, tensor)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
