"""Greedy output equals `transformers.generate`, on every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.attention.masks import LayerMask, named_mask, record_mask
from engine.errors import LoadError
from engine.models.wrappers import WRAPPERS
from engine.request import Speculation
from engine.start.miniature import check_long_texts
from engine.start.probe import find_kv_shape, probe
from tests.engine import tiny
from tests.grid import grid
from tests.models import families
from tests.wrong import instead

VOCABULARY = families.VOCABULARY
COMMON = {name: size for name, size in families.SIZES.items() if name != "head_dim"} | {"initializer_range": 0.3}
WITHOUT_GROUPS = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral-window": lambda: transformers.MistralConfig(**COMMON, head_dim=8, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=8),
    "gemma2-softcap": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "phi3-window": lambda: transformers.Phi3Config(**COMMON, sliding_window=6),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**WITHOUT_GROUPS),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        bos_token_id=None,
        pad_token_id=None,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        init_std=0.3,
        bos_token_id=None,
        pad_token_id=None,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
}

SPECULATIONS = {
    "off": tiny.OFF,
    "block": Speculation(rule="block", num_drafts=1, draft_length=4),
    "bv_race": Speculation(rule="bv_race", num_drafts=4, draft_length=4),
}
_LARGE = partial(families.config, "gemma4_text", **families.GEMMA_4_LARGE)
_FEW_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
LAYOUTS: dict[str, Callable[[], Any]] = {
    "gemma4 with fewer heads for all tokens": _LARGE,
    "gemma4 with experts": partial(_LARGE, enable_moe_block=True, **_FEW_EXPERTS),
}
"""Further published layouts of a type."""
# Mixed prompt lengths; a budget of 26 tokens cuts every longer prompt into chunks, 12 blocks of 8
# force preemption.
LENGTHS = (3, 30, 1, 47, 12)
IN_THE_GATE = frozenset(
    "dots1 gemma4_text glm4_moe_lite idefics3 llama4_text qwen3 qwen3_5_text qwen3_vl stablelm".split()
)
"""Types of each group: shapes, latents, chunks, own decoders, recurrences, wrappers."""
EVERY = sorted({*families.NAMES, *WRAPPERS})
CROWDED = {"budget": 26, "num_blocks": 12, "max_model_len": 80}


@pytest.mark.sole("families of models, next to transformers")
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CONFIGS, *LAYOUTS])
def test_greedy_output_equals_transformers(name: str) -> None:
    target = tiny.load_model((CONFIGS | LAYOUTS)[name](), seed=3)
    draft = tiny.perturbed(target, seed=4, amount=0.02)
    texts = tiny.prompts(VOCABULARY, LENGTHS)
    expected = {str(i): families.generated(target, text, 24) for i, text in enumerate(texts)}
    for rule, speculation in SPECULATIONS.items():
        for crowding in ({}, CROWDED):
            engine = tiny.build(target, draft, max_num_drafts=4, max_draft_length=4, **crowding)
            requests = [tiny.request(str(i), text, speculation) for i, text in enumerate(texts)]
            run = tiny.run(engine, requests)
            assert run.tokens == expected, (rule, crowding)
            if crowding:
                assert run.num_preemptions > 0, "the pool was meant to be too small"
            else:
                assert tiny.run(engine, requests).tokens == expected, "cached prompts"
            if rule != "off":
                assert run.num_accepted > 0, "no draft was ever accepted; the comparison would prove little"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", grid(EVERY, IN_THE_GATE))
def test_every_family_is_decoded_as_by_transformers(name: str, tmp_path: Path) -> None:
    """Windows, chunks and floors are shorter than the texts; a wrapper is next to its text part."""
    family = families.family_or_wrapper(name, tmp_path)
    texts = tiny.prompts(families.FIRST_PLACEHOLDER, (*LENGTHS, 33))
    expected = {str(i): family.generated(text, 20) for i, text in enumerate(texts)}
    draft = tiny.perturbed(family.loaded, seed=4, amount=0.01)
    engine = tiny.build(family.loaded, draft, budget=26, num_blocks=12, max_model_len=72)
    chains = Speculation(rule="bv_race", num_drafts=4, draft_length=3)
    requests = [tiny.request(str(i), text, chains, 20) for i, text in enumerate(texts)]
    run = tiny.run(engine, requests)
    assert run.tokens == expected
    assert run.num_accepted > 0
    assert run.num_preemptions > 0
    for _ in range(2):  # the second time, the prompt begins in the cache
        again = tiny.run(engine, [requests[3]])
        assert again.tokens["3"] == expected["3"]
    assert engine.scheduler.num_cache_hits > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "owner", "part", "variant"),
    [
        ("llama4_text", "engine.start.probe", "record_mask", lambda *_: None),
        ("llama4_text", "engine.attention.attention", "_with_temperature", lambda _, module, query, places: query),
        ("phimoe", "engine.start.probe", "record_mask", lambda *_: None),
        ("qwen2_moe", "engine.start.probe", "record_mask", lambda *_: None),
    ],
    ids=["chunks", "rows", "phimoe's window", "qwen2_moe's window"],
)
def test_model_that_is_wrong_beyond_the_probe_is_refused(
    name: str, owner: str, part: str, variant: Callable[..., Any]
) -> None:
    """The model itself has windows and chunks that are longer than the probe's texts."""
    lengths = dict.fromkeys(("sliding_window", "attention_chunk_size", "floor_scale"), 64)
    target = families.family(name, **lengths)
    with instead(owner, part, variant):
        probe(target, find_kv_shape(target))
        with pytest.raises(LoadError, match="texts longer than its windows or chunks"):
            check_long_texts(target, only_warns=False)
    check_long_texts(target, only_warns=False)


def test_mask_without_a_name_is_refused() -> None:
    """A layer that sees every second key."""
    assert named_mask(lambda _b, _h, query, key: key <= query) == LayerMask()
    assert named_mask(lambda _b, _h, query, key: (key <= query) & (query - key < 6), 6) == LayerMask(window=6)
    odd = named_mask(lambda _b, _h, query, key: (key <= query) & ((query - key) % 2 == 0))
    with pytest.raises(LoadError, match="neither causal"):
        record_mask(object(), odd)
