"""Heads are recognised by their config.json, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.cpu import head_decoder
from engine.cpu.head_decoder import HeadDecoder
from engine.drafting.eagle import EagleDrafter
from engine.drafting.one_pass import BlockDrafter
from engine.errors import ConfigError, LoadError, RequestError
from engine.heads.config import read_head
from engine.heads.head import TargetWeights
from engine.request import Speculation
from engine.start.building import build_engine
from engine.start.measuring import measure_prices
from tests.engine import tiny
from tests.heads import folders
from tests.scheduling.machine import Machine
from tests.wrong import instead

Edit = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    folders.target().model.save_pretrained(folder)
    return folder


def config_of(target: Path, head: Path, **parts: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target=str(target), draft=str(head), device="cpu", **parts.pop("model", {})),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=4),
        **parts,
    )


def edit(folder: Path, **changed: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    stored = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))


@pytest.mark.slow
def test_a_head_without_weights_in_few_bits_is_refused(target: Path, tmp_path: Path) -> None:
    """The flag would change nothing."""
    config = config_of(target, folders.write_eagle(tmp_path / "head").folder, model={"draft_weights": "int8"})
    with (
        instead(head_decoder, "may_decode", lambda *_: False),
        pytest.raises(ConfigError, match=r"^--draft-weights int8: .* leave the flag out"),
    ):
        build_engine(config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_a_folder_is_served(target: Path, tmp_path: Path, layout: str) -> None:
    """Its steps are measured, and its shape chosen, like those of a draft model."""
    written = folders.write_eagle(tmp_path / "head", layout=layout)
    config = config_of(
        target, written.folder, speculation=SpeculationConfig(adaptive=True), profile_cache=str(tmp_path)
    )
    engine = build_engine(config)
    assert isinstance(engine.drafter, EagleDrafter)
    decoded = tuple("t2d fc attn.q_proj k_proj v_proj o_proj gate_proj up_proj down_proj embed_tokens lm_head".split())
    others = sum(
        one.nbytes for name, one in written.tensors.items() if not name.removesuffix(".weight").endswith(decoded)
    )
    of_rotation = 2 * 4 * folders.HEAD_DIM // 2
    assert engine.draft_runner is not None
    backend = engine.draft_runner.backend
    assert isinstance(backend, HeadDecoder)
    assert engine.facts.memory_plan["draft_weights"] == others + of_rotation + backend.weight_bytes
    speculation = Speculation(rule="bv_race", num_drafts=4, draft_length=5, adaptive=True)
    assert measure_prices(engine, speculation).step_s > 0
    engine.scheduler.controller = controller = Controller(StepTimes(Machine().prices()), 16)
    with instead(controller, "fanout", lambda *_: (4, 1, 1)):
        run = tiny.run(engine, [tiny.request("a", [1, 2, 3], speculation, temperature=1.0)])
    assert any(outcome.draft_length == 3 for outcome in run.outcomes["a"])
    assert run.outcomes["a"][0].draft_length == 0


def test_layers_are_chosen_by_the_target_s_depth(target: Path, tmp_path: Path) -> None:
    written = folders.write_eagle(tmp_path / "head", taps=(2, 2, 1))
    edit(written.folder, eagle_aux_hidden_state_layer_ids=None)
    assert build_engine(config_of(target, written.folder)).target.storage.taps == (2, 2, 1)


def test_flags_are_found_in_both_places() -> None:
    flat = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"norm_before_fc": True}}
    found = read_head("head", flat)
    assert found is not None
    assert found.norm_before_fc
    # The default of a missing norm_before_residual differs between the layouts.
    assert not found.norm_before_residual
    found = read_head("head", {"speculators_model_type": "eagle3", "transformer_layer_config": {}})
    assert found is not None
    assert found.norm_before_residual


def test_language_models_are_no_heads() -> None:
    for raw in ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, {"model_type": "qwen3"}, {}):
        assert read_head("model", raw) is None


@pytest.mark.parametrize(
    ("layout", "edits", "reason"),
    [
        ("eagle", {"target_hidden_size": 48}, "trained for a target of hidden size 48, and .* has 32"),
        ("eagle", {"vocab_size": 98}, "trained for a target of vocabulary 98, and .* has 97"),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "reads the state at layer 5, and .* has 4 layers"),
        ("eagle", {"num_aux_hidden_states": 4}, "names 3 layers to read .* of 4"),
        ("eagle", {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ("eagle", {"norm_output": "yes"}, "must be true or false"),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "without states of inner layers"),
        ("eagle", {"model_type": "mistral"}, "layers of type 'mistral' are not served in heads"),
        ("eagle", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not served in heads"),
        ("eagle", {"hidden_act": "gelu"}, "layers with gelu"),
        (
            "eagle",
            {"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None},
            "of type EagleLlama.* not served",
        ),
        ("speculators", {"speculators_model_type": "medusa"}, "heads of type medusa are not served"),
        (
            "speculators",
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            "trained for Qwen3ForCausalLM, and .* is LlamaForCausalLM",
        ),
    ],
)
def test_wrong_pairs_are_refused_before_weights_are_read(
    target: Path, tmp_path: Path, layout: str, edits: Edit, reason: str
) -> None:
    written = folders.write_eagle(tmp_path / "head", layout=layout)
    with instead("engine.start.building", "load_pair", folders.refused):
        with pytest.raises(AssertionError, match="weights are read"):
            build_engine(config_of(target, written.folder))
        edit(written.folder, **edits)
        with pytest.raises(ConfigError, match=reason) as refusal:
            build_engine(config_of(target, written.folder))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "layout", "edits", "reason"),
    [
        ("dflash", "z-lab", {"num_target_layers": 5}, "trained for a target of layers 5, and .* has 4"),
        ("dflash", "z-lab", {"is_causal": None, "dflash_config": {"block_size": 4}}, "names no layers to read"),
        ("dflash", "speculators", {"aux_hidden_state_layer_ids": [1, 2, 5]}, "reads the state at layer 5"),
        ("dflash", "speculators", {"mask_token_id": None}, "mask_token_id must be a token of the vocabulary, not None"),
        ("dflash", "speculators", {"mask_token_id": 97}, "mask_token_id must be a token of the vocabulary, not 97"),
        ("dflash", "speculators", {"block_size": 1}, "block_size must be at least 2, not 1"),
        ("dflash", "speculators", {"projector_type": "domino"}, "projector_type 'domino' is not served"),
        ("dspark", "speculators", {"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not served"),
        ("dflash2", "speculators", {"shift_label": True}, "shift_label True is not served"),
    ],
)
def test_wrong_block_heads_are_refused_before_weights_are_read(
    target: Path, tmp_path: Path, kind: str, layout: str, edits: Edit, reason: str
) -> None:
    written = folders.write_block(tmp_path / "head", kind=kind, layout=layout)
    config = config_of(target, written.folder, speculation=SpeculationConfig(draft_length=3))
    with instead("engine.start.building", "load_pair", folders.refused):
        with pytest.raises(AssertionError, match="weights are read"):
            build_engine(config)
        edit(written.folder, **edits)
        with pytest.raises(ConfigError, match=reason) as refusal:
            build_engine(config)
    assert "\n" not in str(refusal.value)


def test_layer_ids_of_block_heads_count_differently_in_the_two_layouts() -> None:
    """One counts what leaves a layer, the other what enters it."""
    layers = folders.sizes("qwen3", 97, 24, 2)
    flat = {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 0},
    }
    nested = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [1, 4],
        "mask_token_id": 0,
    }
    for raw, size in ((flat, 16), (nested, 8)):
        found = read_head("head", raw)
        assert found is not None
        assert found.taps == (1, 4)
        assert found.block is not None
        assert found.block.size == size


def test_chains_are_no_longer_than_a_block(target: Path, tmp_path: Path) -> None:
    """The default, what requests ask for, and what the controller chooses."""
    written = folders.write_block(tmp_path / "head", size=5)
    with pytest.raises(ConfigError, match=r"--draft-length 5: .* drafts at most 4 tokens; lower it"):
        build_engine(config_of(target, written.folder))
    engine = build_engine(config_of(target, written.folder, speculation=SpeculationConfig(draft_length=4)))
    assert isinstance(engine.drafter, BlockDrafter)
    assert engine.limits.max_draft_length == 4
    with pytest.raises(RequestError, match="draft_length must be between 1 and 4, not 5"):
        engine.submit(tiny.request("a", [1, 2], Speculation(rule="block", num_drafts=1, draft_length=5)))


def test_what_is_not_served_with_heads_is_refused(target: Path, tmp_path: Path) -> None:
    written = folders.write_eagle(tmp_path / "head")
    with pytest.raises(ConfigError, match="not served with --tensor-parallel-size"):
        build_engine(config_of(target, written.folder, model={"tensor_parallel_size": 2}))
    with instead("engine.start.building", "load_pair", folders.refused):
        rule = SpeculationConfig(rule="greedy_block")
        with pytest.raises(
            ConfigError, match=r"^--spec-rule greedy_block: .* would be biased with an EAGLE-3 head: it"
        ):
            build_engine(config_of(target, written.folder, speculation=rule))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fc.weight": torch.zeros(24, 64)}, r"fc.weight is \[24, 64\], and by config.json it would be \[24, 96\]"),
        ({"norm.weight": None}, "lacks tensors .norm.weight"),
        ({"mask_hidden": torch.zeros(1, 1, 96)}, "has unknown tensors .mask_hidden"),
        ({"d2t": None}, "lacks d2t"),
        ({"d2t": torch.full((41,), 60)}, "d2t maps tokens outside"),
        ({"d2t": -torch.arange(41)}, "or two to the same"),
        ({"lm_head.weight": None}, "needs the target's output head"),
        ({"embed_tokens.weight": None}, "needs the target's embeddings"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    folder = folders.write_eagle(tmp_path / "head").folder
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=reason) as refusal:
        build_engine(config_of(target, folder))
    assert "\n" not in str(refusal.value)


def test_weights_in_shards_are_read(target: Path, tmp_path: Path) -> None:
    folder = folders.write_eagle(tmp_path / "head").folder
    whole = folder / "model.safetensors"
    tensors = sorted(load_file(whole).items())
    whole.unlink()
    parts = {"a.safetensors": dict(tensors[:5]), "b.safetensors": dict(tensors[5:])}
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert isinstance(build_engine(config_of(target, folder)).drafter, EagleDrafter)


def test_memory_for_spare_blocks_is_planned(target: Path, tmp_path: Path) -> None:
    """Blocks after texts are within the memory that the operator gives, and reported."""
    written = folders.write_block(tmp_path / "head", size=5)
    given = 600_000
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(target=str(target), draft=str(written.folder), device="cpu"),
            cache=CacheConfig(memory_bytes=given),
            scheduler=SchedulerConfig(max_num_seqs=40),
            speculation=SpeculationConfig(draft_length=4),
        )
    )
    assert engine.draft_runner is not None
    target_bytes, head_bytes = (
        sum(tensor.nbytes for tensor in (storage.keys, storage.values, storage.hidden) if tensor is not None)
        for storage in (engine.target.storage, engine.draft_runner.storage)
    )
    plan, block_bytes = engine.facts.memory_plan, engine.facts.block_size * 4 * 2 * folders.KV_HEADS * folders.HEAD_DIM
    assert (plan["kv_cache"], plan["draft_kv_cache"]) == (target_bytes, head_bytes)
    assert head_bytes == 2 * block_bytes * (engine.facts.num_blocks + 40)
    assert given - block_bytes * 32 < target_bytes + head_bytes <= given


def test_tied_weights_are_converted_once() -> None:
    embedding, head = torch.nn.Embedding(7, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 7, dtype=torch.bfloat16)
    model = SimpleNamespace(get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: head)
    apart = TargetWeights.of(model, torch.float32)
    assert torch.equal(apart.embedding_VD, embedding.weight.float())
    assert torch.equal(apart.head_VD, head.weight.float())
    head.weight = embedding.weight
    tied = TargetWeights.of(model, torch.float32)
    assert tied.head_VD is tied.embedding_VD
    assert torch.equal(tied.head_VD, embedding.weight.float())
