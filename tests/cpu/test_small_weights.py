"""Answers of targets in few bits have their distribution, on every path.

The exact distribution is that of transformers with the numbers that the bits stand for, whose
layers round their rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.cpu.decoder import CpuDecoder
from engine.cpu.weights import Forms, forms_of
from engine.errors import ConfigError
from engine.models.runner import ModelRunner
from engine.request import Speculation
from engine.start.outlines import outline_pair
from tests.cpu.small_weights import represented_by, rows_rounded
from tests.engine import tiny
from tests.engine.test_output_distribution import (
    ALPHA,
    NUM_TOKENS,
    PROMPT,
    SAMPLINGS,
    VOCABULARY,
    drafts,
    exact_distribution,
    g_test,
)
from tests.grid import grid

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="weights of a CPU's decoder")

NUM_ANSWERS = 2000
SPECULATIONS = {
    "off": tiny.OFF,
    "block": drafts("block", 1),
    "bv_race 3": drafts("bv_race", 3),
    "traversal tree": drafts("traversal", 4, tree=(2, 2)),
    "token": drafts("token", 1),
}
CASES = {
    f"{weights}, {name}, {sampling}": (weights, name, sampling)
    for weights in ("int8", "int4")
    for name, sampling in (
        ("off", "plain"),
        ("token", "filtered"),
        ("block", "plain"),
        ("bv_race 3", "filtered"),
        ("traversal tree", "plain"),
    )
}


def counted(weights: Any, speculation: Speculation, sampling: dict[str, Any]) -> Counter[tuple[int, ...]]:
    """First tokens of answers of a target in few bits, with a draft model of the same format."""
    target = tiny.llama(1, vocabulary=VOCABULARY, spread=0.5)
    draft = tiny.perturbed(target, 2, 0.2)
    engine = tiny.build(
        target, draft, max_model_len=32, max_draft_length=3, max_num_seqs=400, budget=8192, weights=weights
    )
    requests = [
        tiny.request(str(seed), PROMPT, speculation, max_tokens=NUM_TOKENS + 3, **{**sampling, "seed": seed})
        for seed in range(NUM_ANSWERS)
    ]
    answers = tiny.run(engine, requests, enough=NUM_TOKENS).tokens.values()
    return Counter(tuple(tokens[:NUM_TOKENS]) for tokens in answers)


def exact(forms: Forms, sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    target = represented_by(tiny.llama(1, vocabulary=VOCABULARY, spread=0.5), forms)
    with rows_rounded(target.model, forms.layers):
        return exact_distribution(target, sampling)


@pytest.mark.sole("sampled answers of few bits on a CPU")
@pytest.mark.parametrize("case", grid(list(CASES), {"int8, block, plain"}))
def test_answers_have_the_distribution_of_the_target_in_few_bits(case: str) -> None:
    weights, name, sampling = CASES[case]
    expected = exact(forms_of(torch.float32, weights), SAMPLINGS[sampling])
    assert g_test(counted(weights, SPECULATIONS[name], SAMPLINGS[sampling]), expected) > ALPHA


@pytest.mark.slow
def test_a_draft_model_has_its_own_format() -> None:
    """And answers keep the distribution of the plain target."""
    target = tiny.llama(1, vocabulary=VOCABULARY, spread=0.5)
    draft = tiny.perturbed(target, 2, 0.2)
    engine = tiny.build(
        target, draft, max_model_len=32, max_draft_length=3, max_num_seqs=400, budget=8192, draft_weights="int4"
    )
    backends = [runner.backend for runner in (engine.target, engine.draft_runner) if isinstance(runner, ModelRunner)]
    assert [one.forms for one in backends if isinstance(one, CpuDecoder)] == [
        forms_of(torch.float32),
        forms_of(torch.float32, "int4"),
    ]
    requests = [
        tiny.request(str(seed), PROMPT, SPECULATIONS["bv_race 3"], max_tokens=6, temperature=1.0, seed=seed)
        for seed in range(NUM_ANSWERS)
    ]
    answers = tiny.run(engine, requests, enough=NUM_TOKENS).tokens.values()
    counts = Counter(tuple(tokens[:NUM_TOKENS]) for tokens in answers)
    assert g_test(counts, exact_distribution(target, SAMPLINGS["plain"])) > ALPHA


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"draft_weights": "int8"}, "--draft-weights int8: there is no draft model"),
        ({"weights": "int4", "activations": "float32"}, "rows are rounded to 8 bits for weights in int4"),
        ({"draft_weights": "int8", "draft": "d", "activations": "float32"}, "for weights in int8; leave one out"),
    ],
)
def test_formats_that_would_change_nothing_are_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outline_pair(ModelConfig(target="t", device="cpu", **wanted))


@pytest.mark.slow
def test_wrong_targets_and_drafts_are_noticed() -> None:
    """Answers in 4 bits are not the plain target's, and other drafts are found."""
    forms, sampling = forms_of(torch.float32, "int4"), SAMPLINGS["plain"]
    right = exact(forms, sampling)
    counts = counted("int4", SPECULATIONS["bv_race 3"], sampling)
    assert g_test(counts, right) > ALPHA
    plain = exact_distribution(tiny.llama(1, vocabulary=VOCABULARY, spread=0.5), sampling)
    assert g_test(counts, plain) < ALPHA
    with tiny.with_drafts_of_another_distribution():
        assert g_test(counted("int4", SPECULATIONS["bv_race 3"], sampling), right) < ALPHA


@pytest.mark.parametrize("weights", grid(["int8", "int4"], ["int8"]))
def test_answers_of_a_seed_are_the_same_in_any_company(weights: Any) -> None:
    """At temperature 0 also with drafts and without."""
    target = tiny.llama(1)
    draft = tiny.perturbed(target, 2, 0.02)
    chains = drafts("bv_race", 3, length=3)
    kinds = {
        "greedy": (tiny.OFF, 0.0),
        "greedy drafts": (chains, 0.0),
        "warm": (tiny.OFF, 1.0),
        "chains": (chains, 1.0),
    }
    requests = {
        name: tiny.request(name, range(5, 25), speculation, max_tokens=30, temperature=temperature, seed=7)
        for name, (speculation, temperature) in kinds.items()
    }
    alone = {
        name: tiny.run(tiny.build(target, draft, weights=weights), [one]).tokens[name] for name, one in requests.items()
    }
    together = tiny.run(tiny.build(target, draft, weights=weights), list(requests.values())).tokens
    assert together == alone
    assert alone["greedy"] == alone["greedy drafts"]
