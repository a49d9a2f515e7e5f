"""Quantised models give transformers' numbers.

The layouts of a device are tested as far as a CPU computes them: fp8 with a scale for each row of a
pass is, by torch's own product; torchao only has to believe that the device can. Its int4 layout
for devices is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from engine.attention.attention import HOOK
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.cuda.lean_decoder import LeanDecoder
from engine.errors import ConfigError, LoadError
from engine.models import quantising
from engine.models.importing import import_torchao
from engine.models.kinds import is_lean
from engine.start import number_formats, plain_passes, probe
from engine.start.building import build_engine
from engine.start.loading import LoadedModel, load
from engine.step.engine import Engine
from tests.engine import tiny
from tests.engine.test_output_distribution import ALPHA, SAMPLINGS, SPECULATIONS, exact_distribution, g_test, sample
from tests.grid import grid
from tests.heads import folders
from tests.models.families import generated
from tests.models.test_architectures import COMMON
from tests.start.test_probe import WITHOUT_COMPACTION
from tests.wrong import instead

CPU = torch.device("cpu")
BLOCK = tiny.Speculation(rule="block", num_drafts=1, draft_length=3)
PROMPT = list(range(5, 20))
SIZES = {**COMMON, "hidden_size": 64, "intermediate_size": 128}

pytestmark = pytest.mark.filterwarnings("ignore")


def written(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> str:
    """The folder of a random Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **more}, eos_token_id=None)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return str(folder)


def stored_by_torchao(folder: Path, plain: str, dtype: torch.dtype, config: Any) -> str:
    """The folder of a checkpoint of torchao."""
    import_torchao()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=transformers.TorchAoConfig(config), dtype=dtype
    )
    model.save_pretrained(folder)
    return str(folder)


def stored_as_compressed_tensors(folder: Path, plain: str) -> str:
    """Return a checkpoint as llm-compressor writes it: fp8 by columns and tokens."""
    numbers = load_file(Path(plain) / "model.safetensors")
    for name in [name for name in numbers if name.endswith("_proj.weight")]:
        scale_N1 = numbers[name].abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        numbers[f"{name}_scale"] = scale_N1.to(torch.bfloat16)
        numbers[name] = (numbers[name] / scale_N1).to(torch.float8_e4m3fn)
    folder.mkdir()
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((Path(plain) / "config.json").read_text())
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    document["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(document))
    return str(folder)


def layouts_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantise as for a CUDA device, in bfloat16."""
    of = quantising._torchao_config
    monkeypatch.setattr(quantising, "_torchao_config", lambda weights, on_cuda: of(weights, on_cuda=not on_cuda))
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda *_: None)
    monkeypatch.setattr(number_formats, "arithmetic_dtype", lambda *_: torch.bfloat16)


def served(target: str, draft: str, weights: str) -> Engine:
    """The engine that `polydraft serve --weights` builds."""
    model = ModelConfig(target=target, draft=draft, weights=weights)  # type: ignore[arg-type]
    return build_engine(EngineConfig(model=model, cache=CacheConfig(num_blocks=100, block_size=8)))


def quantised(folder: str, weights: str) -> Any:
    """The model that transformers quantises, without our attention."""
    options = quantising.load_options(weights, None, CPU)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def answer(model: Any, count: int) -> list[int]:
    """The greedy answer by transformers."""
    whole = torch.tensor([PROMPT])
    text = model.generate(whole, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return text[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def greedy_requests(count: int) -> list[Any]:
    return [tiny.request("off", PROMPT, max_tokens=count), tiny.request("block", PROMPT, BLOCK, max_tokens=count)]


@pytest.mark.slow
def test_weights_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    """Greedy answers are the quantised model's; a plain model has others."""
    weights = "fp8"
    target, draft = written(tmp_path / "target", initializer_range=0.2), written(tmp_path / "draft")
    plain, engine = load(target, None, "float32", CPU), served(target, draft, weights)
    for one in (engine.target, engine.draft_runner):
        layers = one.model.model.layers  # type: ignore[union-attr]
        assert all(quantising.is_quantised(layer.mlp.up_proj.weight) for layer in layers)
    assert quantising.is_plain(engine.target.model.lm_head) or engine.target.model.lm_head.weight.numel() == 0
    run = tiny.run(engine, greedy_requests(40))
    assert run.tokens["off"] == run.tokens["block"] == answer(quantised(target, weights), 40)
    assert run.tokens["off"] != generated(plain, PROMPT, 40)
    assert run.num_accepted > 0
    assert engine.facts.memory_plan["weights"] < 0.6 * plain.weight_bytes


@pytest.mark.sole("sampled answers of quantised weights")
@pytest.mark.parametrize("weights", grid(["fp8", "int4"], {"int4"}))
def test_answers_have_the_distribution_of_the_quantised_model(weights: str, tmp_path: Path) -> None:
    """Its continuations are enumerated in transformers."""
    sizes = {"vocab_size": 4, "num_hidden_layers": 1, "initializer_range": 0.25}
    pair = [
        load(written(tmp_path / name, **sizes, rms_norm_eps=eps), None, "float32", CPU, weights=weights)
        for name, eps in (("target", 1e-6), ("draft", 0.5))
    ]
    plain = load(str(tmp_path / "target"), None, "float32", CPU)
    expected = exact_distribution(pair[0], SAMPLINGS["plain"])
    counts = sample((pair[0], pair[1]), SPECULATIONS["bv_race 2"], SAMPLINGS["plain"])
    assert g_test(counts, expected) > ALPHA
    with tiny.with_drafts_of_another_distribution():
        wrong = sample((pair[0], pair[1]), SPECULATIONS["bv_race 2"], SAMPLINGS["plain"])
    assert g_test(wrong, expected) < ALPHA
    if weights == "int4":  # 8 bits are too close to the plain model for so few answers
        assert g_test(counts, exact_distribution(plain, SAMPLINGS["plain"])) < ALPHA


@pytest.mark.slow
def test_a_devices_fp8_passes_the_probe_and_faults_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right implementations round rows differently; faults are compared unrounded."""
    layouts_of_a_device(monkeypatch)
    folder = written(tmp_path / "model", torch.bfloat16, num_hidden_layers=6, initializer_range=0.05)
    loaded = load(folder, None, "bfloat16", CPU, weights="fp8")
    shape = probe.find_kv_shape(loaded)
    assert quantising.quantises_rows(loaded.model)
    right = probe.probe(loaded, shape)
    assert 0 < right < 0.9
    # Leaves such a weight quantised.
    with instead(plain_passes, "in_float32", lambda _, weight: weight.float()):
        assert probe.probe(loaded, shape, only_warns=True) > 1.5 * right
    with instead(*WITHOUT_COMPACTION), pytest.raises(LoadError, match="differ from plain transformers"):
        probe.probe(loaded, shape)
    with instead(*WITHOUT_COMPACTION), instead(probe, "quantises_rows", lambda *_: False):
        assert probe.probe(loaded, shape, only_warns=True) < 1, "the rounded rows alone do not show it"
    assert all(quantising.is_quantised(layer.mlp.up_proj.weight) for layer in loaded.model.model.layers)


def logits_of_first(loaded: LoadedModel, others: list[int]) -> torch.Tensor:
    """Logits of a text's tokens, computed in one pass with another text."""
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([PROMPT, others]), use_cache=False).logits[0]
    loaded.model.set_attn_implementation(HOOK)
    return logits  # type: ignore[no-any-return]


def test_rows_do_not_change_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one scale for all rows they would, and such a checkpoint is refused."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from torchao.quantization.granularity import PerTensor

    layouts_of_a_device(monkeypatch)
    plain = written(tmp_path / "model", torch.bfloat16)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(plain)
        model.model.norm.weight *= 1
        model.model.embed_tokens.weight[7] *= 100
        model.save_pretrained(plain)
    one, other = [6] * len(PROMPT), [7] * len(PROMPT)
    by_row = load(plain, None, "bfloat16", CPU, weights="fp8")
    assert torch.equal(logits_of_first(by_row, one), logits_of_first(by_row, other))
    by_tensor = Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())
    folder = stored_by_torchao(tmp_path / "tensor", plain, torch.bfloat16, by_tensor)
    wrong = load(folder, None, "auto", CPU)
    assert not torch.equal(logits_of_first(wrong, one), logits_of_first(wrong, other))
    with pytest.raises(ConfigError, match="with one scale for all tokens of a pass"):
        served(folder, plain, "auto")


def test_shares_of_a_split_model_are_not_quantised() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        share = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Replicate()])
        assert not quantising.is_quantised(torch.nn.Parameter(share))
        assert torch.equal(quantising.in_float32(share.bfloat16()).to_local(), torch.ones(2, 2))
    finally:
        distributed.destroy_process_group()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_torchao_is_served(dtype: torch.dtype, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    plain = written(tmp_path / "plain", dtype)
    folder = stored_by_torchao(tmp_path / "int8", plain, dtype, Int8WeightOnlyConfig())
    loaded = load(folder, None, "auto", CPU)
    assert "Int8" in type(loaded.model.model.layers[0].mlp.up_proj.weight).__name__
    assert loaded.model.dtype == dtype
    assert is_lean(loaded.model)
    unquantised = load(plain, None, str(dtype).removeprefix("torch."), CPU)
    plain_layers = [module for module in loaded.model.modules() if quantising.is_plain(module)]
    assert len(plain_layers) <= 1, "only the head is plain"
    run = tiny.run(served(folder, plain, "auto"), greedy_requests(16))
    assert run.tokens["off"] == run.tokens["block"]
    if dtype == torch.float32:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert run.tokens["off"] == answer(model, 16)
        assert loaded.weight_bytes < 0.75 * unquantised.weight_bytes
    assert run.num_accepted > 0
    with pytest.raises(ConfigError, match=f"are of {dtype}; leave --dtype out"):
        build_engine(EngineConfig(model=ModelConfig(target=folder, dtype="float16")))


def test_a_checkpoint_of_compressed_tensors_is_served(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain")
    folder = stored_as_compressed_tensors(tmp_path / "fp8", plain)
    engine = served(folder, plain, "auto")
    assert isinstance(engine.target.backend, LeanDecoder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Roundings of rows to 8 bits fall differently in two right implementations, and random models
    # notice.
    with quantising.rounding_off(engine.target.model), quantising.rounding_off(model):
        run = tiny.run(engine, greedy_requests(16))
        assert run.tokens["off"] == run.tokens["block"] == answer(model, 16)
    assert run.num_accepted > 0
    layer = engine.target.model.model.layers[0].mlp.up_proj
    assert quantising.quantises_rows(engine.target.model)
    rounded, row = layer(torch.linspace(-1, 1, 64)), torch.linspace(-1, 1, 64)
    with quantising.rounding_off(engine.target.model):
        assert not torch.equal(layer(row), rounded)
        assert torch.equal(layer(row), torch.nn.functional.linear(row, layer.weight))
    assert torch.equal(layer(row), rounded)


STORED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BY_TENSOR = {"config_groups": {"a": {"input_activations": {"dynamic": True, "strategy": "tensor"}}}}


@pytest.mark.parametrize(
    ("stored", "missing", "wanted", "message"),
    [
        (STORED, "compressed_tensors", {}, r"quantised by compressed-tensors, which is missing; pip install"),
        ({"quant_method": "torchao"}, "torchao", {}, r"quantised by torchao, which is missing; pip install"),
        ({**STORED, **BY_TENSOR}, "", {}, "with one scale for all tokens of a pass"),
        (STORED, "", {"weights": "fp8"}, "is already quantised, by compressed-tensors; leave --weights out"),
        ({}, "torchao", {"weights": "fp8"}, r"--weights fp8: torchao is missing; pip install 'polydraft\[quantised"),
        ({}, "", {"weights": "fp8", "tensor_parallel_size": 2}, "leave out --tensor-parallel-size"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_weights_are_read(
    stored: dict[str, Any], missing: str, wanted: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**COMMON)
    document = {**config.to_dict(), **({"quantization_config": stored} if stored else {})}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with (
        instead(quantising, "find_spec", lambda find_spec, name: None if name == missing else find_spec(name)),
        instead("engine.start.building", "load_pair", folders.refused),
        pytest.raises(ConfigError, match=message),
    ):
        build_engine(EngineConfig(model=ModelConfig(target=str(tmp_path), **wanted)))


@pytest.mark.parametrize(
    ("weights", "dtype", "capability", "message"),
    [
        ("fp8", "float16", (9, 0), "products are of bfloat16; leave out --dtype float16"),
        ("fp8", "auto", (8, 6), r"needs a device of compute capability 8.9, this one has 8.6"),
        ("int4", "auto", (7, 5), r"needs a device of compute capability 8.0, this one has 7.5"),
        ("int4", "bfloat16", (8, 0), ""),
    ],
)
def test_devices_without_such_products_are_refused(
    weights: str, dtype: str, capability: tuple[int, int], message: str
) -> None:
    if not message:
        quantising._check_device(weights, dtype, capability)
        return
    with pytest.raises(ConfigError, match=message):
        quantising._check_device(weights, dtype, capability)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=False)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no linear layers that torchao quantises"):
        load(str(tmp_path), None, "float32", CPU, weights="fp8")
