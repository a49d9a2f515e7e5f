"""The CPU's kernel of latents has the plain path's numbers, and each row's bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.attention.attention import AttentionMetadata, PagedKernel
from engine.attention.groups import groups_of
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.latent import METHOD
from engine.attention.paged import upload
from engine.attention.tensors import KVShape, KVTensors, LayerShape
from engine.config import ModelConfig
from engine.cpu import attention as latents
from engine.cpu.attention import CpuAttention
from engine.cpu.compiled.attention_loops import TILE
from engine.cpu.compiled.shared_work import TEAM
from engine.cpu.products import ProductsBackend
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start import probe
from engine.start.compiling import jobs_of
from engine.start.loading import LoadedModel
from tests.attention.test_groups import passes
from tests.engine import tiny
from tests.models import families
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a kernel of CPUs")
CPU = torch.device("cpu")
PAGE, VOCABULARY, NUM_HEADS, WIDTH, ROTATED, LATENT, VALUE = 4, 50, 6, 10, 4, 36, 11
SHAPE = KVShape({0: LayerShape(1, LATENT + ROTATED, LATENT, is_latent=True)})
NUM_TEXTS = 8
PATH = [7, 8, 9, 10, 11, 12]
CHAINS = [[7, 8, 20, 21, 22, 23], [30, 31, 32, 33, 34, 35], PATH]


class Layer:
    """A layer's attention whose queries and latents are functions of the token."""

    layer_idx = 0
    qk_nope_head_dim, v_head_dim, kv_lora_rank = WIDTH, VALUE, LATENT

    def __init__(self) -> None:
        torch.manual_seed(0)
        setattr(self, METHOD, None)
        self.kv_b_proj = nn.Linear(LATENT, NUM_HEADS * (WIDTH + VALUE), bias=False)
        self.query_VHD = 2 * torch.randn(VOCABULARY, NUM_HEADS, WIDTH + ROTATED)
        self.row_V = torch.randn(VOCABULARY, 1, LATENT + ROTATED)

    @torch.inference_mode()
    def run(self, storage: KVTensors, sequences: Sequence[SequenceInput], kernel: PagedKernel | None) -> Tensor:
        """Return [T, H, D_v] attention of a pass."""
        layout = build(sequences, PAGE)
        (moved,) = upload([layout], PAGE, CPU)
        groups = () if kernel else groups_of(layout, PAGE, 4 * (LATENT + ROTATED), CPU)
        metadata = AttentionMetadata(storage, moved.slots_T, groups, moved.paged if kernel else None, kernel)
        rows = self.row_V[moved.token_ids_T]
        return metadata.attend(self, self.query_VHD[moved.token_ids_T], rows, rows[..., :LATENT], 0.2, None)


def texts_of(length: int) -> list[list[int]]:
    return np.random.default_rng(length).integers(0, VOCABULARY, (NUM_TEXTS, length)).tolist()


def blocks_of(number: int) -> list[int]:
    return np.random.default_rng(5).permutation(NUM_TEXTS * 60)[number * 60 :][:60].tolist()


def alone(layer: Layer, kernel: PagedKernel | None, number: int, text: list[int]) -> Tensor:
    """Return the attention of a text's last token, and of `PATH` after it, token by token."""
    storage = KVTensors(SHAPE, NUM_TEXTS * 60 * PAGE, torch.float32, CPU)
    tokens = [*text, *PATH]
    cuts = [0, 33, *range(len(text) - 1, len(tokens) + 1)]
    found = [
        layer.run(storage, [SequenceInput(tokens[first:last], first, blocks_of(number), NO_NODES, slice(0))], kernel)
        for first, last in itertools.pairwise(cuts)
    ]
    return torch.cat(found[-1 - len(PATH) :])


def crowded(layer: Layer, kernel: PagedKernel | None, texts: list[list[int]]) -> list[Tensor]:
    """Return the same of all texts, whose trees of `CHAINS` are verified in one pass."""
    storage = KVTensors(SHAPE, NUM_TEXTS * 60 * PAGE, torch.float32, CPU)
    tree = merge_chains(CHAINS)
    nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry())
    last = len(texts[0]) - 1
    for first, end, drafted in ((0, last - 40, NO_NODES), (last - 40, last, NO_NODES), (last, last + 1, nodes)):
        parts = [
            SequenceInput(text[first:end], first, blocks_of(number), drafted, slice(0))
            for number, text in enumerate(texts)
        ]
        found = layer.run(storage, parts, kernel)
    path = list(tree.paths[CHAINS.index(PATH)])
    return [rows[path] for rows in found.chunk(NUM_TEXTS)]


@pytest.mark.parametrize("length", [TILE - 3, 2 * TILE + 5])
def test_rows_have_the_numbers_of_the_plain_path(length: int) -> None:
    layer, texts = Layer(), texts_of(length)
    found, expected = crowded(layer, CpuAttention(), texts), crowded(layer, None, texts)
    assert torch.allclose(torch.cat(found), torch.cat(expected), atol=1e-4)


@pytest.mark.parametrize("length", [TILE - 3, TILE, 2 * TILE + 5])
def test_a_node_in_a_crowd_has_the_bits_of_its_token_alone(length: int) -> None:
    """Whatever the chunks of the prompt, the tree, and the cores."""
    layer, texts, kernel = Layer(), texts_of(length), CpuAttention()
    expected = [alone(layer, kernel, number, text) for number, text in enumerate(texts)]
    for cores in (1, 2, 3) if TEAM.grow(2) == 2 else (1,):
        with instead(torch, "get_num_threads", lambda _, cores=cores: cores):
            found = crowded(layer, kernel, texts)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("num_heads", "num_parts", "together"), [(6, 1, 1), (6, 4, 1), (6, 20, 2), (1, 12, 1)])
def test_more_cores_than_heads_have_a_head_each(num_heads: int, num_parts: int, together: int) -> None:
    with instead(torch, "get_num_threads", lambda _: 48):
        assert latents._heads_together(num_heads, num_parts) == together


def heads_exchanged(_: Any, module: Any) -> tuple[Tensor, Tensor]:
    keys, values = head_weights(module)
    return keys.flip(0), values


head_weights = latents.head_weights
WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "the key weights of other heads": ("head_weights", heads_exchanged),
    "rows are left out": ("parts_of", lambda right, *operands: right(*operands) - [0, 0, 1]),
    "heads are left out": ("_heads_together", lambda *_: 4),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_found_out(wrong: str) -> None:
    layer, texts = Layer(), texts_of(TILE)
    expected = torch.cat(crowded(layer, None, texts))
    with instead(latents, *WRONG[wrong]):
        found = torch.cat(crowded(layer, CpuAttention(), texts))
    assert not torch.allclose(found, expected, atol=1e-4)


def logits_of_paths(loaded: LoadedModel, in_a_crowd: bool) -> Tensor:
    """Return logits of the root and the last node's path of each text, verified or decoded."""
    kernel, backend = CpuAttention(), ProductsBackend(loaded.model)
    shape = probe.find_kv_shape(loaded)
    runs = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, backend, paged_kernel=kernel)
    prompts, steps = (sequences[:NUM_TEXTS] for sequences in passes())
    for prompt in prompts:
        runs.forward([prompt])
    paths = [np.flatnonzero(step.nodes.ancestry[-1]) if len(step.nodes.depths) else np.zeros(0, int) for step in steps]
    if in_a_crowd:
        logits = runs.forward(steps).split([1 + len(step.nodes.depths) for step in steps])
        return torch.cat([rows[[0, *(path + 1)]] for rows, path in zip(logits, paths, strict=True)])
    found = []
    for step, path in zip(steps, paths, strict=True):
        tokens = [*step.input_ids, *(step.nodes.tokens[node] for node in path)]
        for number, token in enumerate(tokens):
            one = replace(step, input_ids=[token], first_index=step.first_index + number, nodes=NO_NODES)
            found.append(runs.forward([one]))
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_drafts_in_a_crowd_change_no_bit_of_logits() -> None:
    # Torch computes the last numbers of an operation otherwise, unless they fill vectors.
    widths = {"hidden_size": 256, "intermediate_size": 512, "q_lora_rank": 96, "kv_lora_rank": 64}
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 32}
    dense = {"mlp_layer_types": ["dense", "dense"]}
    loaded = tiny.load_model(families.config("glm4_moe_lite", **widths, **heads, **dense), seed=3)
    assert torch.equal(logits_of_paths(loaded, True), logits_of_paths(loaded, False))


def test_a_first_start_compiles_the_kernel_ahead(tmp_path: Path) -> None:
    families.config("glm4_moe_lite", dtype=torch.float32).save_pretrained(tmp_path)
    jobs = {"kv-float32", "rows", "products-float32", "product"}
    assert set(jobs_of(ModelConfig(target=str(tmp_path), device="cpu"))) == jobs | {"heads"}
    families.config("gemma2", dtype=torch.float32).save_pretrained(tmp_path)
    assert set(jobs_of(ModelConfig(target=str(tmp_path), device="cpu"))) == jobs
    families.config("gemma2", dtype=torch.bfloat16).save_pretrained(tmp_path)
    few = ModelConfig(target=str(tmp_path), device="cpu", weights="int4")
    assert jobs_of(few).keys() >= {"products-int4", "products-int8", "products-bfloat16"}, (
        "small layers keep their type"
    )


@pytest.mark.filterwarnings("ignore")
def test_models_with_other_scores_do_without_the_kernel() -> None:
    for name, has_kernel in [("glm4_moe_lite", True), ("gemma3_text", True), ("gemma2", False), ("gpt_oss", False)]:
        loaded = families.family(name)
        choice = probe.choose_backend(loaded, probe.find_kv_shape(loaded))
        assert isinstance(choice.paged_kernel, CpuAttention) is has_kernel
