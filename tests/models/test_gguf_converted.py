"""Converted files have the configuration and logits of their models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.attention import HOOK
from engine.cpu.products import ProductsBackend
from engine.errors import LoadError
from engine.models.gguf.blocks import BlockTensor
from engine.models.gguf.config import config_of as config_of_file
from engine.models.gguf.file import GgufFile, StoredTensor, open_file
from engine.models.gguf.folder import folder_of
from engine.models.gguf.weights import check_types
from engine.request import Speculation
from engine.start.check import block_bytes
from engine.start.loading import LoadedModel, load
from engine.start.probe import choose_backend, find_kv_shape
from tests.engine import tiny
from tests.grid import grid
from tests.models.converted import (
    config_of,
    converted_keys,
    converted_tensors,
    transformers,
    write_converted,
)
from tests.models.converted_variants import CONTEXT, FILE_TYPES, ORIGINAL, SERVED_IN_BLOCKS, VARIANTS

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="weights of a CPU's decoder")

UNKNOWN_TO_FILES = {"architectures", "dtype", "initializer_range", "model_type", "n_ctx", "transformers_version"} | {
    f"{role}_token_id" for role in ("bos", "eos", "pad")
}
OF_TYPES = {variant.architecture: name for name, variant in VARIANTS.items() if variant.hidden == 256}
"""The variant of each architecture whose rows are whole blocks of all types."""


def described(name: str, file_type: str = "F32", changes: dict[str, Any] | None = None) -> GgufFile:
    """A variant's file without weights, except for the factors of rotary embeddings."""
    variant, kinds = VARIANTS[name], FILE_TYPES[file_type]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(variant))
    tensors = {}
    for tensor, weight in converted_tensors(variant, model).items():
        kind = next((kind for part, kind in kinds.items() if part in tensor and weight.dim() > 1), "F32")
        data = np.zeros(0, np.uint8) if weight.is_meta else weight.numpy().view(np.uint8)
        tensors[tensor] = StoredTensor(
            name=tensor, type=gguf.GGMLQuantizationType[kind], shape=tuple(weight.shape), data=data
        )
    keys = {key: value for key, value in (converted_keys(name) | (changes or {})).items() if value is not None}
    path = Path("model.gguf")
    return GgufFile(path=path, paths=(path,), metadata=keys, architecture=variant.architecture, tensors=tensors)


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration without nested ones."""
    found = {}
    for name, value in fields.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, dict):
            found |= {f"{name}.{key}": below for key, below in flat(inner).items()}
        else:
            found[str(name)] = value
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_configuration_is_that_of_the_converted_model(name: str) -> None:
    """Transformers checks the types of all fields."""
    derived = config_of_file(described(name))
    found = flat(transformers.AutoConfig.for_model(**derived).to_dict())
    expected = flat(config_of(VARIANTS[name]).to_dict())
    wanted = {field: value for field, value in expected.items() if field not in UNKNOWN_TO_FILES}
    # A size of zero may be left out.
    assert {field: found.get(field, value and None) for field, value in wanted.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("file_type", FILE_TYPES)
@pytest.mark.parametrize("name", OF_TYPES.values())
def test_types_that_are_not_served_are_named(name: str, file_type: str) -> None:
    file = described(name, file_type)
    check_types(file, torch.bfloat16)
    if file_type in SERVED_IN_BLOCKS:
        check_types(file, None)
        return
    with pytest.raises(LoadError, match=r"^model.gguf: tensors of type .*--dtype bfloat16"):
        check_types(file, None)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("gemma2", {"gemma2.secret": 1}, "may change what the model computes (gemma2.secret); serve the"),
    "no experts": ("qwen3moe", {"qwen3moe.expert_count": None}, "qwen3moe.expert_count is missing; choose another"),
    "rotated": ("phi4", {"phi3.rope.dimension_count": 17}, "phi3.rope.dimension_count is 17 of 16 numbers of a head"),
    "no factors": ("phi4", {"phi3.rope.scaling.original_context_length": 128}, "no factors of its rotary embedding "),
    "scaling": ("phi4", {"phi3.rope.scaling.type": "yarn"}, "phi3.rope.scaling.type is 'yarn', which is not served"),
    "convolutions": ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 0, 4]}, "is [0, 2, 0, 4], which no decoder has"),
    "values": ("gemma3", {"gemma3.attention.value_length": 8}, "value_length is 8, which is not served; values must"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_values_that_would_be_served_wrongly_are_refused(fault: str) -> None:
    name, changes, words = REFUSED[fault]
    with pytest.raises(LoadError) as refused:
        config_of_file(described(name, changes=changes))
    assert words in str(refused.value)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"^model.gguf: GGUF files of the architecture 'mamba' are not served, only"):
        config_of_file(replace(described("gpt2"), architecture="mamba"))


MEANT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no window": ("llama-3", {"llama.attention.sliding_window": 0}, {}),
    "no scaling": ("llama-3", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, {}),
    "no windows": ("gemma3", {"gemma3.attention.sliding_window": None},
                   {"layer_types": ["full_attention"] * 6, "sliding_window": CONTEXT}),
    "cap": ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
}  # fmt: skip
"""Values that other models have, with the fields that change."""


@pytest.mark.parametrize("meaning", MEANT)
def test_values_have_the_meaning_that_llama_cpp_gives_them(meaning: str) -> None:
    name, changes, fields = MEANT[meaning]
    found = config_of_file(described(name, changes=changes))
    assert found == config_of_file(described(name)) | fields


SHORT, LONG = [[5, 17, 230, 8, 99, 1], [3]], [[*range(100, 340)]]
"""Texts that are shorter and longer than windows and original contexts."""


def served_texts(name: str) -> list[tuple[int, list[list[int]]]]:
    """Contexts, and the texts whose logits are transformers' in this context."""
    has_two_embeddings = "long_factor" in VARIANTS[name].changes.get("rope_parameters", {})
    return [(ORIGINAL, SHORT), (CONTEXT, LONG)] if has_two_embeddings else [(CONTEXT, SHORT + LONG)]


def logits(model: Any, prompt: list[int]) -> Tensor:
    """Logits [T, V] by the model's own modules."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    model.set_attn_implementation(HOOK)
    return found


def are_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=2e-4 * float(expected.std()), rtol=0)


def loaded(path: Path, context: int = 0, dtype: str = "float32") -> LoadedModel:
    return load(str(folder_of(path, "off")), None, dtype, tiny.DEVICE, context=context)


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(list(VARIANTS), {name for name in VARIANTS if "27b" not in name}))
def test_logits_are_those_of_the_converted_model(name: str, tmp_path: Path) -> None:
    model = write_converted(tmp_path / "model.gguf", name)
    for context, texts in served_texts(name):
        served = loaded(tmp_path / "model.gguf", context).model
        for text in texts:
            assert are_close(logits(served, text), logits(model, text)), (context, len(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_the_converted_model(name: str, tmp_path: Path) -> None:
    """With drafts, and by the backend that serves the model."""
    model = write_converted(tmp_path / "model.gguf", name)
    model.generation_config.eos_token_id = None
    for context, texts in served_texts(name):
        target = replace(loaded(tmp_path / "model.gguf", context, "auto"), eos_token_ids=frozenset())
        expected = {}
        for number, text in enumerate(texts):
            answer = model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            expected[str(number)] = answer[0, len(text) :].tolist()
        engine = tiny.build(target, target, max_model_len=context)
        chains = Speculation(rule="bv_race", num_drafts=2, draft_length=3)
        requests = [tiny.request(str(number), text, chains, 12) for number, text in enumerate(texts)]
        assert tiny.run(engine, requests).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("file_type", sorted(FILE_TYPES.keys() - {"F32"}))
@pytest.mark.parametrize("name", OF_TYPES.values())
def test_numbers_of_every_type_are_those_that_transformers_reads(name: str, file_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_converted(path, name, file_type)
    place = {"gguf_file": path.name, "config": config_of(VARIANTS[name]), "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), **place).eval()
    stays_in_blocks = file_type in SERVED_IN_BLOCKS
    for dtype in ("float32", "auto") if stays_in_blocks else ("float32",):
        assert are_close(logits(loaded(path, dtype=dtype).model, SHORT[0]), logits(theirs, SHORT[0])), dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file_type", "form"),
    [("gemma3", "Q5_1", "q5_1"), ("gpt2", "Q8_0", "q8_0"), ("qwen3moe", "Q8_0", "q8_0")],
)
def test_weights_of_other_architectures_are_served_in_their_blocks(
    name: str, file_type: str, form: str, tmp_path: Path
) -> None:
    """Embeddings, too. `polydraft check` counts experts and the layers of GPT-2 in float32."""
    path = tmp_path / "model.gguf"
    write_converted(path, name, file_type)
    served = loaded(path, dtype="auto")
    assert isinstance(served.model.get_input_embeddings().weight, BlockTensor)
    choice = choose_backend(served, find_kv_shape(served))
    assert isinstance(choice.backend, ProductsBackend)
    assert form in {layer.form for layer in choice.backend._layers}
    num_bytes = choice.backend.prepare() + served.weight_bytes
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(served.model.config)
    assert block_bytes(open_file(path), shapes, is_own=False) == pytest.approx(num_bytes, rel=0.03)
