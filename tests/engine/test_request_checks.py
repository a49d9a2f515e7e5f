"""Refused requests and the reasons: speculation that would be biased, or cannot be computed."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.config_check import check_settings
from engine.errors import NOTHING_LEFT, ConfigError, RequestError
from engine.request import Limits, Request, Sampling
from engine.scheduling.request_checks import check_defaults, check_requests, default_speculation, served_rules
from engine.speculation.rule_facts import RULE_FACTS
from tests.server.step_results import facts

FACTS = facts(drafter="model")


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


ENDS = msgspec.structs.replace(FACTS, eos_token_ids=[0, 9], vocab_size=10)


@pytest.mark.parametrize(
    ("sampling", "limits", "param"),
    [
        (Sampling(allowed_token_ids=(4, 5), bad_words=((4,), (5,), (6,))), Limits(), "allowed_token_ids"),
        (Sampling(allowed_token_ids=(0, 9)), Limits(min_tokens=1), "allowed_token_ids"),
        (Sampling(allowed_token_ids=(0, 3)), Limits(min_tokens=1, stop_token_ids=(3,)), "allowed_token_ids"),
        (Sampling(bad_words=tuple((token,) for token in range(10))), Limits(), "bad_words"),
        (Sampling(bad_words=tuple((token,) for token in range(1, 9))), Limits(min_tokens=2), "bad_words"),
        (Sampling(grammar="any", allowed_token_ids=(4,), bad_words=((4,),)), Limits(), "allowed_token_ids"),
    ],
)
def test_masks_that_leave_no_token_are_refused(sampling: Sampling, limits: Limits, param: str) -> None:
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=(1, 2),
            sampling=msgspec.structs.replace(sampling, seed=seed),
            limits=limits,
        )
        for seed in range(2)
    ]
    with pytest.raises(RequestError, match="leave no token; allow more") as raised:
        check_requests(requests, ENDS, SpeculationConfig())
    assert (raised.value.param, raised.value.code) == (param, NOTHING_LEFT)


@pytest.mark.parametrize(
    ("sampling", "limits"),
    [
        (Sampling(allowed_token_ids=(4, 5), bad_words=((4,), (5, 5))), Limits()),
        (Sampling(allowed_token_ids=(0, 9)), Limits(min_tokens=1, ignore_eos=True)),
        (Sampling(allowed_token_ids=(0, 9)), Limits()),
        (Sampling(allowed_token_ids=(0, 9), grammar="any"), Limits(min_tokens=1)),
        (Sampling(bad_words=tuple((token,) for token in range(9))), Limits()),
    ],
)
def test_masks_that_leave_a_token_are_served(sampling: Sampling, limits: Limits) -> None:
    request = Request(request_id="a", prompt_token_ids=(1, 2), sampling=sampling, limits=limits)
    check_requests([request], ENDS, SpeculationConfig())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("prompt", {"prompt_token_ids": (1, 1000)}),
        ("prompt", {"prompt_token_ids": (-1, 3)}),
        ("logit_bias", {"sampling": Sampling(logit_bias=((3, 1.0), (1000, 1.0)))}),
        ("allowed_token_ids", {"sampling": Sampling(allowed_token_ids=(3, 1000))}),
        ("bad_words", {"sampling": Sampling(bad_words=((3,), (4, -1)))}),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused_in_every_request_of_a_call(name: str, changes: dict) -> None:
    right = Request(request_id="a", prompt_token_ids=(1, 2))
    with pytest.raises(RequestError, match=f"^{name}: token id .* is outside the vocabulary of 1000") as raised:
        check_requests([right, msgspec.structs.replace(right, **changes)], FACTS, SpeculationConfig())
    assert raised.value.param == name
