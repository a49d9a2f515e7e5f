"""Division of a device's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
import transformers

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.config_check import lookahead
from engine.cuda import lean_decoder
from engine.cuda.lean_decoder import LeanDecoder
from engine.cuda.recorded.menu import buffer_bytes, menu
from engine.errors import ConfigError
from engine.start import building
from engine.start.building import assemble, kv_shape_of
from engine.start.memory import StoredModel, plan_memory
from tests.engine import tiny
from tests.models.test_architectures import COMMON
from tests.wrong import instead

GIB = 1 << 30
CONFIG = EngineConfig(
    model=ModelConfig(target="target", draft="draft"), scheduler=SchedulerConfig(max_num_seqs=64, max_model_len=4096)
)
PAIR = [StoredModel(130_000), StoredModel(110_000)]


@pytest.fixture
def facts() -> object:
    """Facts of an engine whose vocabulary is that of a large model."""
    small = assemble(EngineConfig(model=ModelConfig(target="t")), tiny.llama(1), None).facts
    return msgspec.structs.replace(small, vocab_size=152_000, max_model_len=4096)


@pytest.mark.slow
def test_step_workspace_is_reserved(facts: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspace, and what recorded steps write."""
    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("given back"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (called.append("asked"), (60 * GIB, 80 * GIB))[1])
    device = MagicMock(type="cuda")
    token_bytes = [130_000, 110_000]
    written = buffer_bytes(menu([(0, 0), (4, 5)], 64), 152_000)
    plain, recorded = (
        plan_memory(CONFIG, facts, list(map(StoredModel, token_bytes)), size, device) for size in (0, written)
    )  # type: ignore[arg-type]
    assert called[:2] == ["given back", "asked"]
    assert recorded.kept_back["graphs"] == written > 300 << 20
    for found in (plain, recorded):
        room = (60 * GIB - sum(found.kept_back.values())) * 0.9
        assert sum(found.pool_bytes) == pytest.approx(room, rel=1e-3)
        assert found.num_blocks * 16 * sum(token_bytes) == sum(found.pool_bytes)
    assert recorded.num_blocks < plain.num_blocks


def test_states_are_named_apart_from_keys_and_values(facts: object) -> None:
    """Two states a request, and the inputs of its drafted tokens, of each model."""
    models = [StoredModel(1000, state_bytes=3000, input_bytes=7), StoredModel(500, state_bytes=200, input_bytes=3)]
    plans = [plan_memory(CONFIG, facts, part, 0, torch.device("cpu")) for part in (models, PAIR)]  # type: ignore[arg-type]
    assert [plan.kept_back.get("states") for plan in plans] == [64 * (2 * 3200 + lookahead(CONFIG) * 10), None]


def test_a_small_card_that_does_not_hold_one_request_is_refused(facts: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 24 * GIB))
    with pytest.raises(ConfigError, match="give it more memory"):
        plan_memory(CONFIG, facts, PAIR, 1 << 28, MagicMock(type="cuda"))  # type: ignore[arg-type]
    few = msgspec.structs.replace(CONFIG, cache=CacheConfig(memory_bytes=2 * GIB))
    assert plan_memory(few, facts, PAIR, 1 << 28, MagicMock(type="cuda")).num_blocks > 256  # type: ignore[arg-type]


def test_a_share_of_the_device_holds_everything(facts: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in use (weights) and the memory of steps count towards the share."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    half = msgspec.structs.replace(CONFIG, cache=CacheConfig(device_share=0.5))
    plan = plan_memory(half, facts, PAIR, 1 << 28, MagicMock(type="cuda"))  # type: ignore[arg-type]
    room = 40 * GIB - 20 * GIB - sum(plan.kept_back.values())
    assert sum(plan.pool_bytes) == pytest.approx(room, rel=1e-3)


def test_a_share_of_a_device_has_no_effect_on_a_cpu(facts: object, caplog: pytest.LogCaptureFixture) -> None:
    half, default = (msgspec.structs.replace(CONFIG, cache=CacheConfig(device_share=share)) for share in (0.5, 0.0))
    plans = [plan_memory(config, facts, PAIR, 1 << 28, torch.device("cpu")) for config in (half, default)]  # type: ignore[arg-type]
    assert plans[0] == plans[1]
    assert "--gpu-memory-utilization has no effect on a CPU" in caplog.text


def test_a_cache_of_a_named_size_also_holds_what_has_ended(facts: object) -> None:
    """Blocks beyond what the running requests can fill are of use to the prefix cache alone."""

    def num_blocks(**cache: Any) -> int:
        one = msgspec.structs.replace(
            CONFIG, cache=CacheConfig(**cache), scheduler=SchedulerConfig(max_num_seqs=1, max_model_len=4096)
        )
        return plan_memory(one, facts, [StoredModel(1000)], 0, torch.device("cpu")).num_blocks  # type: ignore[arg-type]

    assert num_blocks(memory_bytes=8 * GIB) == 8 * GIB // 16_000
    running = num_blocks(memory_bytes=8 * GIB, prefix_caching=False)
    assert num_blocks() == running < 400


def test_a_draft_window_leaves_the_target_the_memory_of_the_rest(facts: object) -> None:
    """Tokens that a card of 80 GB holds of Qwen3-8B with Qwen3-0.6B in bfloat16, at 64 requests."""
    token_bytes = [147_456, 114_688]

    def tokens(window: int, **scheduler: Any) -> list[int]:
        config = msgspec.structs.replace(
            CONFIG,
            cache=CacheConfig(memory_bytes=216_000 * sum(token_bytes)),
            scheduler=SchedulerConfig(max_num_seqs=64, max_model_len=8192, **scheduler),
            speculation=SpeculationConfig(draft_window=window),
        )
        long = msgspec.structs.replace(facts, max_model_len=8192)  # type: ignore[type-var]
        plan = plan_memory(config, long, list(map(StoredModel, token_bytes)), 0, torch.device("cpu"), window > 0)
        assert plan.max_model_len == 8192
        assert sum(plan.pool_bytes) <= config.cache.memory_bytes < sum(plan.pool_bytes) + 2 * 16 * token_bytes[0]
        return [count * 16 for count in (plan.num_blocks, plan.num_draft_blocks)]

    assert tokens(0) == [216_000, 216_000]
    assert tokens(1024) == [330_624, 64 * 1072]
    assert tokens(512) == [356_112, 64 * 560]
    # A window that is wider than the share of a request frees nothing.
    assert tokens(8000) == [216_000, 216_000]


def test_workspace_covers_default_drafts(facts: object) -> None:
    """All nodes of trees, and text drafts, also without a draft model."""

    def rows(config: EngineConfig) -> float:
        few = msgspec.structs.replace(config, cache=CacheConfig(memory_bytes=8 * GIB))
        plan = plan_memory(few, facts, [StoredModel(1000)], 0, torch.device("cpu"))  # type: ignore[arg-type]
        return plan.kept_back["workspace"] / 64 / 152_000 / 16

    drafts = msgspec.structs.replace(
        CONFIG, scheduler=SchedulerConfig(max_num_seqs=64, max_model_len=4096, max_num_batched_tokens=1 << 20)
    )
    assert rows(drafts) == 1 + 4 * 5
    tree = msgspec.structs.replace(drafts, speculation=SpeculationConfig(tree=(8, 4, 2)))
    assert rows(tree) == 1 + 8 + 32 + 64
    text_drafts = SpeculationConfig(drafters=("model", "prompt_lookup"))
    from_text = drafts.scheduler.max_copied_tokens
    assert rows(msgspec.structs.replace(drafts, speculation=text_drafts)) == 1 + 4 * 5 + from_text
    alone = msgspec.structs.replace(drafts, speculation=text_drafts, model=ModelConfig(target="target"))
    assert rows(alone) == 1 + from_text


def test_angles_of_positions_are_made_before_the_pool_is_sized() -> None:
    """For the served texts, and counted with the weights: what is then free does not hold them."""
    whole, longest = 1024, 300
    target = tiny.load_model(transformers.LlamaConfig(**{**COMMON, "max_position_embeddings": whole}), 1)
    made: list[int] = []

    def angles(rotation: Any, decoder: LeanDecoder, places: torch.Tensor, like: torch.Tensor) -> Any:
        made.append(len(places))
        return rotation(decoder, places, like)

    def planned(plan: Any, *of: Any) -> Any:
        made.append(-1)
        return plan(*of)

    def weights(chosen: int) -> int:
        config = EngineConfig(model=ModelConfig(target="t"), scheduler=SchedulerConfig(max_model_len=chosen))
        return assemble(config, target, None, is_owner=True).facts.memory_plan["weights"]

    with (
        tiny.without_cpu_decoder(),
        instead(lean_decoder, "use_kernels", lambda *_: True),
        instead(LeanDecoder, "_rotation", angles),
        instead(building, "plan_memory", planned),
    ):
        served = weights(longest)
        assert made[0] == longest
        assert made.index(-1) > 0, "the memory that is free is asked for later"
        head_dim = kv_shape_of(target).layers[0].key_dim
        assert weights(0) - served == (whole - longest) * 2 * head_dim * target.model.dtype.itemsize


def test_the_context_is_the_models_if_the_pool_holds_it(caplog: pytest.LogCaptureFixture) -> None:
    """A shorter one is logged with its reason; one of a few tokens is refused."""
    reach = 131_072
    target = replace(tiny.llama(1), max_positions=reach)
    draft = replace(tiny.llama(2), max_positions=4096)
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values of two layers with two heads of 8 in float32

    def context(size_tokens: int, with_draft: bool = False, chosen: int = 0) -> tuple[int, str]:
        caplog.clear()
        config = EngineConfig(
            model=ModelConfig(target="t", draft="d" if with_draft else None),
            cache=CacheConfig(memory_bytes=size_tokens * token_bytes * (1 + with_draft)),
            scheduler=SchedulerConfig(max_model_len=chosen),
        )
        facts = assemble(config, target, draft if with_draft else None).facts
        assert facts.max_model_len + lookahead(config) <= facts.num_blocks * facts.block_size
        return facts.max_model_len, caplog.text

    assert context(2 * reach) == (reach, "")
    length, line = context(10_016)
    assert 9900 < length < 10_016
    assert f"context {length} of the model's {reach}: the K/V cache has no room for more" in line
    assert "--max-model-len" in line
    length, line = context(2 * reach, with_draft=True)
    assert length == 4096
    assert f"context 4096 of the model's {reach}: the draft model {draft.name} reaches 4096 positions" in line
    assert context(10_016, chosen=2048) == (2048, "")
    for size_tokens, chosen in ((1000, 0), (10_016, 20_000)):
        with pytest.raises(ConfigError, match="give it more memory"):
            context(size_tokens, chosen=chosen)
