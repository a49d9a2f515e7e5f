"""What is refused, and why: speculation that would be biased, or cannot be computed."""

from __future__ import annotations

import msgspec
import pytest

from engine.admission import check_defaults, default_speculation, served_rules
from engine.config import EngineConfig, EngineFacts, ModelConfig, SpeculationConfig
from engine.config_check import check_settings
from engine.errors import ConfigError
from engine.rule_facts import RULE_FACTS

FACTS = EngineFacts(
    vocab_size=1000,
    max_model_len=100,
    num_blocks=10,
    block_size=16,
    eos_token_ids=[],
    device="cpu",
    dtype="float32",
    architecture="llama",
    has_draft=True,
    max_copied_tokens=32,
    rules=dict(RULE_FACTS),
    memory_plan={},
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rule": "bv_race", "tree": (2, 2)}, "would be biased with chains that share drafted tokens"),
        ({"rule": "greedy", "draft_method": "iid"}, "would be biased with drafts drawn by 'iid'"),
        ({"rule": "ot_lp"}, "vocabularies up to 12"),
        ({"rule": "nss", "tree": (4, 4, 4)}, "num_drafts must be between 1 and 16, not 64"),
        ({"rule": "block", "tree": (2, 1)}, "takes at most 1 drafts below one position"),
        ({"rule": "nss", "draft_method": "spechub", "tree": (3,)}, "takes at most 2 drafts below one position"),
    ],
)
def test_default_speculation_that_would_be_biased_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_defaults(FACTS, SpeculationConfig(**changes))


def test_an_unknown_draft_method_is_refused() -> None:
    config = EngineConfig(model=ModelConfig(target="any"), speculation=SpeculationConfig(draft_method="nonsense"))
    with pytest.raises(ConfigError, match="--draft-method nonsense: unknown; choose one of iid"):
        check_settings(config)


@pytest.mark.parametrize("rule", [rule for rule in RULE_FACTS if rule != "ot_lp"])
def test_every_rule_may_be_the_default(rule: str) -> None:
    limits = SpeculationConfig(rule=rule)
    check_defaults(FACTS, limits)
    assert default_speculation(limits, FACTS).num_drafts == {"token": 1, "block": 1, "greedy_block": 1}.get(
        rule, 2 if rule == "spechub" else 4
    )


def test_the_linear_program_is_offered_to_small_vocabularies_only() -> None:
    assert "ot_lp" not in served_rules(FACTS)
    assert "ot_lp" in served_rules(msgspec.structs.replace(FACTS, vocab_size=12))
