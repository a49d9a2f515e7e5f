"""Compiled products in transformers' code: plain numbers, and bits that depend on no other row."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig, Weights
from engine.cpu import products
from engine.cpu.attention import CpuAttention
from engine.cpu.compiled.dot_products import HAS_PAIRS
from engine.cpu.products import BlockExperts, BlockLinear, BlockWeight, ProductsBackend, lay_out
from engine.models.backend import TransformersBackend
from engine.models.gguf.blocks import BlockTensor, Form
from engine.request import Request, Speculation
from engine.start.check import multiplied_bytes
from engine.start.loading import LoadedModel
from engine.start.probe import choose_backend, find_kv_shape, probe
from tests.engine import tiny
from tests.models import families, gguf_models
from tests.wrong import instead

SPECULATIONS = {
    "off": tiny.OFF,
    "chains": Speculation(rule="greedy", num_drafts=4, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=16, draft_length=3, tree=(4, 2, 2)),
}
LENGTHS = (17, 30, 41, 22, 35, 18, 27, 50)
WIDE = {"hidden_size": 128, "intermediate_size": 256}
# Torch computes the last numbers of an operation otherwise, unless they fill vectors: so a gated
# delta net has 32 heads, as Qwen3.5-9B.
HYBRIDS: dict[str, dict[str, int]] = {
    "lfm2": WIDE,
    "mamba2": {"hidden_size": 96, "num_heads": 12, "head_dim": 16, "state_size": 32},
    "qwen3_5_text": WIDE | {"head_dim": 32, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form", ["float32", "int8", pytest.param("pairs", marks=pytest.mark.skipif(not HAS_PAIRS, reason="no pairs"))]
)
def test_a_layer_has_the_numbers_of_its_form(form: Form, dtype: torch.dtype) -> None:
    """Widths and depths fill no blocks; rows come in any number."""
    layer = nn.Linear(40, 70).to(dtype).requires_grad_(False)
    block = BlockLinear(layer, form)
    used = block.represented(layer.weight)
    rows = torch.randn(2, 33, 40).to(dtype)
    expected = products.rounded_rows(rows.float(), form) @ used.T + layer.bias.float()
    for num_rows in (0, 1, 2, 33):
        with products.multiplying():
            found = layer(rows[:, :num_rows])
        assert found.dtype == dtype
        assert torch.allclose(found.float(), expected[:, :num_rows], atol=1e-5 if dtype == torch.float32 else 2e-2)
    block.drop()
    assert torch.equal(layer(rows[:, :num_rows]), found), "a layer without its own weight multiplies always"


def test_a_weight_of_a_gguf_file_has_the_numbers_of_its_blocks() -> None:
    raw = gguf_models.stored_weight(np.random.default_rng(0), (70, 64), "Q8_0")
    layer = nn.Linear(64, 70).requires_grad_(False)
    layer.weight = nn.Parameter(BlockTensor(torch.from_numpy(raw), GGMLQuantizationType.Q8_0), requires_grad=False)
    block = BlockLinear(layer, "q8_0")
    assert torch.equal(block.represented(layer.weight), layer.weight.dequantize())
    rows = torch.randn(3, 64)
    expected = products.rounded_rows(rows, "q8_0") @ layer.weight.dequantize().T + layer.bias
    assert torch.allclose(block.multiply(rows), expected, atol=1e-5)


def test_a_head_gives_its_own_weights_up() -> None:
    loaded = tiny.llama(1)
    rows = torch.randn(3, 32)
    layer = loaded.model.model.layers[1].mlp.gate_proj
    expected = layer(rows)
    embedding = loaded.model.get_input_embeddings().weight.clone()
    num_bytes = lay_out(loaded.model)
    assert num_bytes > loaded.weight_bytes
    assert layer.weight.numel() == 0
    assert torch.allclose(layer(rows), expected, atol=1e-5)
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["jetmoe", "gemma3n_text"])
def test_check_counts_weights_without_a_product_in_float32(name: str) -> None:
    """Experts of other layouts, and embeddings for each layer; small sizes fill no blocks."""
    widths = {"hidden_size": 128, "intermediate_size": 256, "hidden_size_per_layer_input": 32}
    config = families.config(name, **widths, vocab_size=640, vocab_size_per_layer_input=640)
    config.dtype = torch.bfloat16
    served = tiny.load_model(config, seed=1)
    served.model.to(torch.bfloat16)
    num_bytes = ProductsBackend(served.model, may_round_rows=False).prepare() + served.weight_bytes
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    assert multiplied_bytes(shapes, torch.bfloat16) == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_a_start_reports_the_type_in_which_products_have_weights() -> None:
    loaded = families.family("gemma")
    loaded.model.to(torch.bfloat16)
    assert tiny.build(loaded, None).facts.dtype == "bfloat16"


def failing(*_: Any) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.filterwarnings("ignore")
def test_products_without_the_attention_kernel_have_the_same_forms() -> None:
    loaded = families.family("gemma")
    loaded.model.to(torch.bfloat16)
    with instead(CpuAttention, "attend_paged", failing):
        choice = choose_backend(loaded, find_kv_shape(loaded))
    assert isinstance(choice.backend, ProductsBackend)
    assert choice.paged_kernel is None
    assert len({layer.form for layer in choice.backend._layers}) == 1


@pytest.mark.filterwarnings("ignore")
def test_products_that_are_wrong_leave_no_weights_in_blocks() -> None:
    """A start would keep the weights of both layouts in memory, and count one."""
    loaded = families.family("glm4_moe")
    with instead(BlockWeight, "__call__", lambda right, *operands: right(*operands) + 1):
        choice = choose_backend(loaded, find_kv_shape(loaded))
    assert type(choice.backend) is TransformersBackend
    assert not [module for module in loaded.model.modules() if "forward" in vars(module)]


def prepared(loaded: LoadedModel, weights: Weights = "auto") -> tuple[ProductsBackend, float]:
    """Return the backend of a model that has given its weights up, and the distance before."""
    choice = choose_backend(loaded, find_kv_shape(loaded), config=ModelConfig(target="", weights=weights))
    assert isinstance(choice.backend, ProductsBackend)
    distance = probe(loaded, find_kv_shape(loaded), *choice)
    choice.backend.prepare()
    return choice.backend, distance


FEW = ["gpt_oss", "qwen3_5_moe_text"]
TYPES = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in families.NAMES]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TYPES)
def test_each_type_runs_without_the_weights_that_products_have(name: str) -> None:
    loaded = families.family(name)
    if not products.multiplies(loaded.model) or name in ("llama", "mistral", "qwen2", "qwen3"):
        pytest.skip("another backend computes this type")
    shape = find_kv_shape(loaded)
    before = loaded.weight_bytes
    backend, distance = prepared(loaded)
    assert distance < 0.5
    # Layers of GPT-2 are of another class, and its output head is the embedding, too.
    assert loaded.weight_bytes < before or name == "gpt2"
    assert probe(loaded, shape, backend) < 0.5, "torch's path runs the layers that lost their weights"


def test_experts_with_other_experts_weights_are_found() -> None:
    loaded = families.family("qwen3_moe")
    right = BlockExperts._weights_of
    with instead(BlockExperts, "_weights_of", lambda _, *operands: reversed(list(right(*operands)))):
        backend = ProductsBackend(loaded.model)
    with pytest.raises(Exception, match="differ from plain transformers"):
        probe(loaded, find_kv_shape(loaded), backend)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "weights"), [("qwen3_5_text", "int4"), ("qwen3_moe", "int8")])
def test_few_bits_are_served_beyond_the_decoder(name: str, weights: Weights) -> None:
    loaded = families.family(name)
    backend, distance = prepared(loaded, weights)
    assert distance < 1
    assert {layer.form for layer in backend._layers} >= {weights, "int8"}


def logprobs(
    pair: tuple[LoadedModel, LoadedModel], name: str, which: range, **limits: int
) -> tuple[dict[str, list[Any]], tiny.Run]:
    """Return the logprobs of answers by request, which an engine computes together, and its run."""
    engine = tiny.build(*pair, max_num_drafts=16, max_model_len=80, **limits)
    texts = tiny.prompts(pair[0].vocab_size, LENGTHS, seed=4)
    requests: list[Request] = [tiny.request(str(i), texts[i], SPECULATIONS[name], 16) for i in which]
    run = tiny.Run()
    for _ in range(2):  # the second time from the prefix cache
        run = tiny.run(engine, [msgspec.structs.replace(one, num_logprobs=3) for one in requests])
    return {key: [one for part in parts for one in part.logprobs] for key, parts in run.outcomes.items()}, run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HYBRIDS)
def test_logprobs_keep_their_bits(name: str) -> None:
    """Alone and in a crowd of 8, with and without drafts, from the prefix cache and preempted."""
    target = tiny.load_model(families.config(name, **HYBRIDS[name]), seed=3)
    pair = target, tiny.perturbed(target, seed=6, amount=0.05)
    alone = {}
    for number in range(len(LENGTHS)):
        alone |= logprobs(pair, "off", range(number, number + 1))[0]
    for speculation in SPECULATIONS:
        found, run = logprobs(pair, speculation, range(len(LENGTHS)))
        assert (run.num_accepted > 5) is (speculation != "off")
        assert found == alone
    found, run = logprobs(pair, "tree", range(len(LENGTHS)), num_blocks=24)
    assert run.num_preemptions > 0
    assert found == alone


def test_a_product_over_all_rows_together_changes_bits() -> None:
    """Torch's products depend on the number of rows; the test of bits would see it."""
    weight, rows = torch.randn(256, 512), torch.randn(64, 512)
    layer = BlockLinear(nn.Linear(512, 256, bias=False).requires_grad_(False), "float32")
    layer.module.weight.data = weight
    block = BlockLinear(layer.module, "float32")
    alone = torch.cat([block.multiply(row) for row in rows.split(1)])
    assert torch.equal(block.multiply(rows), alone)
    by_torch = torch.cat([block.multiply_plainly(row) for row in rows.split(1)])
    assert not torch.equal(block.multiply_plainly(rows), by_torch)
