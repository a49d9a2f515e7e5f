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
from tests.cpu.small_weights import SPECULATIONS, check_any_company, on_a_cpu, represented_by, rows_rounded
from tests.engine import tiny
from tests.engine.test_output_distribution import (
    ALPHA,
    NUM_TOKENS,
    PROMPT,
    SAMPLINGS,
    VOCABULARY,
    exact_distribution,
    g_test,
)
from tests.grid import grid

pytestmark = on_a_cpu

NUM_ANSWERS = 2000
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


def counted(speculation: Speculation, sampling: dict[str, Any], **formats: Any) -> Counter[tuple[int, ...]]:
    """First tokens of answers of a target and a draft model in these formats."""
    target = tiny.llama(1, vocabulary=VOCABULARY, spread=0.5)
    draft = tiny.perturbed(target, 2, 0.2)
    engine = tiny.build(target, draft, max_model_len=32, max_draft_length=3, max_num_seqs=400, budget=8192, **formats)
    backends = [runner.backend for runner in (engine.target, engine.draft_runner) if isinstance(runner, ModelRunner)]
    weights = formats.get("weights", "auto")
    wanted = [forms_of(torch.float32, name) for name in (weights, formats.get("draft_weights", weights))]
    assert [one.forms for one in backends if isinstance(one, CpuDecoder)] == wanted
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
    assert g_test(counted(SPECULATIONS[name], SAMPLINGS[sampling], weights=weights), expected) > ALPHA


@pytest.mark.slow
def test_a_draft_model_has_its_own_format() -> None:
    """And answers keep the distribution of the plain target."""
    sampling = SAMPLINGS["plain"]
    expected = exact_distribution(tiny.llama(1, vocabulary=VOCABULARY, spread=0.5), sampling)
    assert g_test(counted(SPECULATIONS["bv_race 3"], sampling, draft_weights="int4"), expected) > ALPHA


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
    counts = counted(SPECULATIONS["bv_race 3"], sampling, weights="int4")
    assert g_test(counts, right) > ALPHA
    plain = exact_distribution(tiny.llama(1, vocabulary=VOCABULARY, spread=0.5), sampling)
    assert g_test(counts, plain) < ALPHA
    with tiny.with_drafts_of_another_distribution():
        assert g_test(counted(SPECULATIONS["bv_race 3"], sampling, weights="int4"), right) < ALPHA


@pytest.mark.parametrize("weights", grid(["int8", "int4"], ["int8"]))
def test_answers_of_a_seed_are_the_same_in_any_company(weights: Any) -> None:
    target = tiny.llama(1)
    check_any_company(target, tiny.perturbed(target, 2, 0.02), weights=weights)
