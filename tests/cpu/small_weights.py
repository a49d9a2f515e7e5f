"""Models in transformers that stand for a decoder's weights in few bits and its rounded rows."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from engine.cpu.decoder import CpuDecoder
from engine.cpu.weights import Form, Forms, rounded_rows
from engine.start.loading import LoadedModel
from engine.start.plain_passes import rows_converted
from tests.engine import tiny
from tests.engine.test_output_distribution import drafts

on_a_cpu = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="weights of a CPU's decoder")
SPECULATIONS = {
    "off": tiny.OFF,
    "token": drafts("token", 1),
    "block": drafts("block", 1),
    "bv_race 3": drafts("bv_race", 3),
    "traversal tree": drafts("traversal", 4, tree=(2, 2)),
}


def rows_rounded(model: Any, form: Form) -> AbstractContextManager[None]:
    """Let the linear layers of a model round their rows as products with weights of a form do."""
    return rows_converted(model, lambda rows, _: rounded_rows(rows, form))


def represented_by(loaded: LoadedModel, forms: Forms) -> LoadedModel:
    """A copy of a model in float32 with the numbers that weights of these forms stand for."""
    decoder = CpuDecoder(loaded.model, forms)
    model = copy.deepcopy(loaded.model)
    used = {name: decoder.weight_used(weight) for name, weight in loaded.model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data = used[name]
    return replace(loaded, model=model)


def check_any_company(target: LoadedModel, draft: LoadedModel, **options: Any) -> None:
    """Check that a seed has the same answers alone and together, greedy ones also with drafts."""
    chains = drafts("bv_race", 3, length=3)
    kinds = {
        "greedy": (tiny.OFF, 0.0),
        "greedy drafts": (chains, 0.0),
        "warm": (tiny.OFF, 1.0),
        "chains": (chains, 1.0),
    }
    requests = {
        name: tiny.request(name, range(5, 25), speculation, max_tokens=20, temperature=temperature, seed=7)
        for name, (speculation, temperature) in kinds.items()
    }
    alone = {name: tiny.run(tiny.build(target, draft, **options), [one]).tokens[name] for name, one in requests.items()}
    assert tiny.run(tiny.build(target, draft, **options), list(requests.values())).tokens == alone
    assert alone["greedy"] == alone["greedy drafts"]
