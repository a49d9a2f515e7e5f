"""The check of exactness on a device finds wrong attention, pages and moves.

The damped pair hides them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.attention import register
from engine.cuda import attention_kernel
from engine.drafting.model import ModelDrafter
from engine.models.runner import ModelRunner
from engine.step.engine import Engine
from research.analysis import gpu_exactness
from research.analysis.gpu_results import SectionResults
from tests.cuda.in_torch import attention_in_torch
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, Any]]:
    """An engine with recorded steps, and the model whose copies it serves."""
    register()
    with torch.inference_mode(), attention_in_torch():
        model = gpu_exactness.make_model("tiny", 2, 256, str(tiny.DEVICE))
        with tiny.with_recorded_steps([(0, 0), (1, 5), (4, 5)]):
            yield gpu_exactness.engine_of(model, 1 << 26), model


def failures(served: tuple[Engine, Any], folder: Path) -> list[str]:
    findings = SectionResults(folder / "found.json")
    gpu_exactness.check_engine(findings, "tiny", *served)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert sum(isinstance(one, dict) and one["recorded_steps"] > 0 for one in found.values()) == 3
    return list(found["failures"])


def no_attention(attend: Any, *operands: Any) -> Any:
    return torch.zeros_like(attend(*operands))


def attention_of_another_token(attend: Any, *operands: Any) -> Any:
    return attend(*operands).roll(1, 1)


def a_key_left_out(attend: Any, paged: Any, *rest: Any) -> Any:
    return attend(paged._replace(limits=paged.limits - 1), *rest)


def another_page(attend: Any, paged: Any, *rest: Any) -> Any:
    """Steps of single tokens and trees read the first page in place of the second."""
    pages = paged.pages.clone()
    if paged.is_padded:
        pages[:, 1] = pages[:, 0]
    return attend(paged._replace(pages=pages), *rest)


def no_move(_right: Any, *_: Any) -> None:
    """K/V of accepted nodes stay where they are."""


WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "no attention": (attention_kernel, "attend_paged", no_attention, "logprobs differ"),
    "another token": (attention_kernel, "attend_paged", attention_of_another_token, "logprobs differ"),
    "a key": (attention_kernel, "attend_paged", a_key_left_out, "logprobs differ"),
    "a page": (attention_kernel, "attend_paged", another_page, "logprobs differ"),
    "moves": (ModelRunner, "keep", no_move, "4x5, recorded: logprobs differ"),
    "moves of the draft model": (ModelDrafter, "keep", no_move, "accepted"),
}


@pytest.mark.slow
def test_a_right_engine_has_the_logprobs_of_transformers(served: tuple[Engine, Any], tmp_path: Path) -> None:
    assert failures(served, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", grid(WRONG, {"no attention", "a key", "moves"}))
def test_a_wrong_engine_is_found(fault: str, served: tuple[Engine, Any], tmp_path: Path) -> None:
    owner, name, variant, expected = WRONG[fault]
    with instead(owner, name, variant):
        found = failures(served, tmp_path)
    assert any(expected in failure for failure in found)
