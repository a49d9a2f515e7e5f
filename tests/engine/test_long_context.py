"""Answers after 16k tokens are the same with drafts, chunks, windows and neighbours."""

from __future__ import annotations

import pytest
import transformers

from engine.request import Request, Speculation
from tests.engine import tiny

LENGTH = 16_000
KINDS = {
    "off": tiny.OFF,
    "block": Speculation(rule="block", num_drafts=1, draft_length=4),
    "bv_race": Speculation(rule="bv_race", num_drafts=3, draft_length=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("draft_window", [0, 300])
def test_answers_after_long_texts_are_the_same(draft_window: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH + 200,
        initializer_range=0.4,
        bos_token_id=None,
        pad_token_id=None,
    )
    target = tiny.load_model(config, 1)
    engine = tiny.build(
        target,
        tiny.perturbed(target, 2, 0.02),
        max_model_len=LENGTH + 100,
        num_blocks=2 * LENGTH // 16,
        block_size=16,
        draft_window=draft_window,
    )
    long, short = tiny.prompts(101, [LENGTH, 30])
    requests: list[Request] = []
    for name, speculation in KINDS.items():
        requests.append(tiny.request(f"long {name}", long, speculation, 24))
        requests.append(tiny.request(f"short {name}", short, speculation, 24))
    run = tiny.run(engine, requests)
    for text in ("long", "short"):
        assert run.tokens[f"{text} off"] == run.tokens[f"{text} block"] == run.tokens[f"{text} bv_race"]
    assert sum(o.num_accepted for o in run.outcomes["long bv_race"]) > 0
    # The long text was computed once, and the others found it.
    assert engine.scheduler.num_cache_hits > LENGTH
