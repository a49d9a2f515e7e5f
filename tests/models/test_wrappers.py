"""Text models of multimodal checkpoints: weights, tokens of images, and distributions."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import MTP, CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.cpu.decoder import CpuDecoder
from engine.errors import ConfigError, LoadError, RequestError
from engine.models.adapter import merge, read_adapter
from engine.models.quantising import has_scheme
from engine.models.wrappers import (
    KEY_MAPPING,
    WRAPPERS,
    plain_module,
    plain_name,
    text_config,
    text_object,
    wrapped_names,
)
from engine.request import Speculation
from engine.scheduling.request_checks import check_requests
from engine.start.architectures import read_config
from engine.start.building import build_engine
from engine.start.loading import LoadedModel, load
from tests.engine import test_output_distribution as oracle
from tests.engine import tiny
from tests.heads import folders
from tests.models import families
from tests.models import test_quantised as quantised_models

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
VOCABULARY = families.VOCABULARY
IMAGE = families.PLACEHOLDERS["image"]
CHAINS = Speculation(rule="bv_race", num_drafts=4, draft_length=3)


def loaded_from(folder: Path) -> LoadedModel:
    return load(str(folder), None, "float32", CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a small idefics3, whose text model is a Llama."""
    folder = tmp_path_factory.mktemp("wrapper")
    families.write_wrapper("idefics3", folder)
    return folder


def plain_copy(wrapped: LoadedModel, folder: Path) -> LoadedModel:
    """Return the same text model, from a plain checkpoint."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**wrapped.model.config.to_dict()))
    model.load_state_dict(wrapped.model.state_dict())
    model.config.placeholder_token_ids = []
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return loaded_from(folder)


def test_wrapper_gives_the_plain_models_seeded_answers_by_our_own_decoder(folder: Path, tmp_path: Path) -> None:
    wrapped = loaded_from(folder)
    draft = tiny.perturbed(wrapped, seed=4, amount=0.02)
    text = tiny.prompts(IMAGE, (12,))[0]
    runs = []
    for target in (wrapped, plain_copy(wrapped, tmp_path)):
        engine = tiny.build(target, draft)
        assert isinstance(engine.target.backend, CpuDecoder)
        request = tiny.request("a", text, CHAINS, temperature=1.0, seed=5, bad_words=((IMAGE,),))
        runs.append(tiny.run(engine, [request]))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].num_accepted == runs[1].num_accepted > 0


def test_placeholder_is_never_sampled(folder: Path) -> None:
    """The image's token is the most likely one everywhere; without the ban it is the answer."""
    target = loaded_from(folder)
    assert target.placeholder_ids == (IMAGE,)
    text = tiny.prompts(IMAGE, (12,))[0]
    wanted = tiny.run(tiny.build(target, None), [tiny.request("a", text)]).tokens["a"]
    head = target.model.get_output_embeddings().weight
    head.data[IMAGE] = 1.5 * head.data[wanted[0]]
    draft = tiny.perturbed(target, seed=4, amount=0.02)
    engine = tiny.build(target, draft)
    assert IMAGE not in tiny.run(engine, [tiny.request("a", text, CHAINS)]).tokens["a"]
    engine.target._never_written = None
    assert IMAGE in tiny.run(engine, [tiny.request("b", text, CHAINS)]).tokens["b"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {}),
        ("allowed_token_ids", {"allowed_token_ids": (3, IMAGE)}),
        ("logit_bias", {"logit_bias": ((IMAGE, 1.0),)}),
    ],
)
def test_placeholder_is_refused_in_what_a_model_reads_or_writes(folder: Path, field: str, fields: Any) -> None:
    engine = tiny.build(loaded_from(folder), None)
    prompt = (5, IMAGE) if field == "prompt" else (5, 6)
    with pytest.raises(RequestError, match="stands for an image") as refusal:
        check_requests([tiny.request("a", prompt, **fields)], engine.facts, SpeculationConfig())
    assert refusal.value.param == field
    banned = tiny.request("b", (5, 6), bad_words=((IMAGE,),))
    check_requests([banned], engine.facts, SpeculationConfig())


@pytest.mark.parametrize("begin", ["language_model.model.", "model.language_model.", "model.text_model."])
def test_names_of_every_layout_are_read_and_a_mistaken_prefix_is_refused(
    folder: Path, tmp_path: Path, begin: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = loaded_from(folder).model.state_dict()
    head = "language_model.lm_head." if begin.startswith("language_model") else "lm_head."
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = plain_name(name)
        tensors[plain.replace("model.", begin, 1) if plain != name else name.replace("lm_head.", head)] = tensor
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO", logger="polydraft"):
        found = loaded_from(tmp_path).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lines = [line for line in caplog.messages if "vision" in line or "are not loaded" in line]
    assert len(lines) == 1
    assert re.search(r"serving the text part of idefics3; its \d+ other tensors are not loaded", lines[0])
    wrong = {pattern: replacement for pattern, replacement in KEY_MAPPING.items() if "lm_head" in pattern}
    monkeypatch.setattr("engine.start.loading.KEY_MAPPING", wrong)
    with pytest.raises(LoadError, match="lacks"):
        loaded_from(tmp_path)


def test_wrappers_own_fields_hold_for_its_text_model(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "modules_to_not_convert": ["model.vision_model", "language_model.lm_head"]}
    changed = stored | {"tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": [7, 8]}
    config = transformers.AutoConfig.for_model(**changed | {"quantization_config": quantised})
    text = text_config("name", config)
    assert (text.model_type, text.tie_word_embeddings, text.dtype) == ("llama", True, torch.bfloat16)
    assert text.eos_token_id == [7, 8]
    assert text.quantization_config["modules_to_not_convert"] == ["model.vision_model", "lm_head"]
    assert text_object(changed)["model_type"] == "llama"
    named = {field.replace("text_config", "llm_config"): value for field, value in changed.items()}
    assert text_object(named) == text_object(changed)
    assert plain_module("name", "ignore", "re:model.language_model.layers.0.*") == "re:model.layers.0.*"
    with pytest.raises(ConfigError, match="a pattern of the whole wrapper's modules"):
        plain_module("name", "ignore", "re:.*language_model.*q_proj")
    assert read_config(str(folder), None).wrapper_type == "idefics3"
    assert {"qwen3_vl", "gemma3", "mistral3"} <= WRAPPERS.keys()


def test_adapters_and_modules_of_drafts_are_named_as_in_the_wrapper(folder: Path, tmp_path: Path) -> None:
    """Patterns of names, too: without the prefix, a pattern would change no scale."""
    module = "layers.0.self_attn.q_proj"
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "task_type": "CAUSAL_LM"}
    merged = []
    for place in ("model.text_model.", "model.language_model.", "model."):
        pattern = {f"{place}{module}": 8}
        (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "alpha_pattern": pattern}))
        parts = {"A": torch.ones(2, 32), "B": torch.ones(32, 2)}
        tensors = {f"base_model.model.{place}{module}.lora_{part}.weight": weight for part, weight in parts.items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        target = loaded_from(folder)
        before = target.model.get_submodule(f"model.{module}").weight.clone()
        assert merge(target.model, read_adapter(str(tmp_path))) == 1
        merged.append(target.model.get_submodule(f"model.{module}").weight - before)
    for change in merged:
        torch.testing.assert_close(change, torch.full((32, 32), 8.0))
    names = wrapped_names("model.layers.46.eh_proj.weight")
    assert len(names) == len(set(names))
    assert {plain_name(name) for name in names} == {"model.layers.46.eh_proj.weight"}


def wrapped_copy(plain: Path, wrapper: dict[str, Any], folder: Path, begin: str) -> Path:
    """Write a plain checkpoint as the text of a wrapper.

    wrapper: its config.json without the text's fields; begin: of the names of text modules.
    """
    text = json.loads((plain / "config.json").read_text())
    quantised = text.pop("quantization_config", None)
    inner = {**text, "model_type": wrapper.get("text_config", text)["model_type"]}
    document = {**wrapper, "text_config": inner, "tie_word_embeddings": False}
    if quantised:
        ignored = [name.replace("model.", begin, 1) for name in quantised["ignore"]]
        document["quantization_config"] = {**quantised, "ignore": [*ignored, "model.vision_model", "model.connector"]}
    tensors = load_file(plain / "model.safetensors")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(document))
    renamed = {re.sub(r"^model\.", begin, name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_quantised_wrapper_answers_as_its_quantised_text_model(folder: Path, tmp_path: Path) -> None:
    """A module of the text that is not converted is named with the wrapper's prefix."""
    unquantised = quantised_models.written(tmp_path / "plain")
    plain = Path(quantised_models.stored_as_compressed_tensors(tmp_path / "fp8", unquantised))
    module = "model.layers.0.mlp.down_proj"
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{module}.weight"] = load_file(Path(unquantised) / "model.safetensors")[f"{module}.weight"]
    del tensors[f"{module}.weight_scale"]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((plain / "config.json").read_text())
    document["quantization_config"]["ignore"].append(module)
    (plain / "config.json").write_text(json.dumps(document))
    wrapper = json.loads((folder / "config.json").read_text())
    wrapped = wrapped_copy(plain, wrapper, tmp_path / "wrapped", "model.text_model.")
    text = tiny.prompts(IMAGE, (12,))[0]
    request = tiny.request("a", text, CHAINS, temperature=1.0, seed=5, bad_words=((IMAGE,),))
    runs = []
    for target in (plain, wrapped):
        engine = quantised_models.served(str(target), unquantised, "auto")
        is_quantised = {name for name, one in engine.target.model.named_modules() if has_scheme(one)}
        assert len(is_quantised) == 13
        assert module not in is_quantised
        runs.append(tiny.run(engine, [request]))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].num_accepted == runs[1].num_accepted > 0


@pytest.mark.slow
def test_mtp_module_inside_a_wrapper_drafts_as_in_the_plain_model(tmp_path: Path) -> None:
    """Its tensors have the prefix of the wrapper's text."""
    plain = folders.write_mtp(tmp_path / "plain", VOCABULARY).folder
    encoder = families.wrapper_config("glm4v_moe", families.PLACEHOLDERS, {})
    wrapper = {**encoder.to_dict(), "architectures": None}
    wrapped = wrapped_copy(plain, wrapper, tmp_path / "wrapped", "model.language_model.")
    runs = []
    for target in (plain, wrapped):
        model = ModelConfig(target=str(target), draft=MTP, device="cpu")
        config = EngineConfig(model=model, cache=CacheConfig(num_blocks=60))
        engine = build_engine(config)
        placeholders = tuple((token,) for token in families.PLACEHOLDERS.values())
        request = tiny.request("a", [5, 6, 7], CHAINS, temperature=1.0, seed=5, bad_words=placeholders)
        runs.append(tiny.run(engine, [request]))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].num_accepted == runs[1].num_accepted > 0


@pytest.mark.slow
def test_sampled_answers_of_a_wrapper_have_its_distribution(tmp_path: Path) -> None:
    """A total variation of 0.03 would be seen."""
    image, others, number = 4, (0, 1, 2, 3, 5), 40_000
    families.write_wrapper("smolvlm", tmp_path, image, vocab_size=6, num_hidden_layers=1, pad_token_id=None)
    target = loaded_from(tmp_path)
    assert target.placeholder_ids == (image,)
    draft = tiny.perturbed(target, seed=4, amount=0.1)
    exact = oracle.exact_distribution(target, {"temperature": 1.0, "allowed_token_ids": others})
    counts = oracle.sample((target, draft), oracle.drafts("bv_race", 4), {"temperature": 1.0}, number)
    assert oracle.g_test(counts, exact) > oracle.ALPHA
    generator = np.random.default_rng(0)
    paths = [path for path, probability in exact.items() if probability > 0]
    law = np.array([exact[path] for path in paths])
    moved = law * np.where(np.arange(len(law)) % 2, 0.94, 1.06)
    shifted = generator.multinomial(number, moved / moved.sum())
    assert 0.025 < np.abs(moved / moved.sum() - law).sum() / 2 < 0.031
    wrong = Counter({path: int(count) for path, count in zip(paths, shifted, strict=True) if count})
    assert oracle.g_test(wrong, exact) < oracle.ALPHA
