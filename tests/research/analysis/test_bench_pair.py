"""The pair of known law has the law it is built to have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.importing import import_transformers
from research.demo import bench_pair

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 4096
transformers = import_transformers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pair."""
    path = tmp_path_factory.mktemp("pair")
    bench_pair.write(path, "draft", "tiny", VOCABULARY, 0.6, 512)
    return path


def logits(model: Any, texts: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=texts).logits[:, -1]


@pytest.mark.slow
def test_the_next_token_depends_on_the_last_one_as_the_table_says(folder: Path) -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    tokens_VS, below_VS = bench_pair.successors(VOCABULARY, seed=1)
    last = torch.arange(300, 340)
    before = torch.randint(300, 4000, (2, 40, 5), generator=torch.Generator().manual_seed(0))
    found = [logits(target, torch.cat([text, last[:, None]], 1)) for text in before]
    # What stands before the last token changes the law by a little only, and the table is met.
    assert (found[0].softmax(-1) - found[1].softmax(-1)).abs().sum(-1).max() < 0.2
    likely = found[0].gather(1, tokens_VS[last])
    assert (likely - bench_pair._LIKELIHOOD - below_VS[last]).abs().max() < 1.0
    assert found[0].softmax(-1).gather(1, tokens_VS[last]).sum(-1).mean() > 0.7


@pytest.mark.slow
def test_acceptance_is_a_dial(folder: Path) -> None:
    about = json.loads((folder / "pair.json").read_text())
    assert about["single_draft_acceptance"] == pytest.approx(0.6, abs=0.05)
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft")]
    assert bench_pair.acceptance(*models) == pytest.approx(about["single_draft_acceptance"], abs=0.02)


def test_acceptance_is_that_of_rounded_weights_too(tmp_path: Path) -> None:
    """Served in float32 arithmetic, as the engine and llama.cpp read a checkpoint in bfloat16."""
    about = bench_pair.write(tmp_path, "tiny", "tiny", 1024, 0.7, 64, torch.bfloat16)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path / "target", dtype="auto").dtype == torch.bfloat16
    models = [load(tmp_path / name, dtype=torch.float32) for name in ("target", "draft")]
    assert about["single_draft_acceptance"] == pytest.approx(0.7, abs=0.05)
    assert bench_pair.acceptance(*models) == pytest.approx(about["single_draft_acceptance"], abs=0.02)


def test_large_sizes_are_those_of_qwen3() -> None:
    """Its norms of queries and keys run in the check of a device, and its table is met."""
    assert {bench_pair.SIZES[name].model_type for name in ("8b", "0.6b")} == {"qwen3"}
    size = replace(bench_pair.SIZES["draft"], model_type="qwen3")
    tokens_VS, below_VS = bench_pair.successors(VOCABULARY, seed=1)
    model = bench_pair.build(size, VOCABULARY, tokens_VS, below_VS, 64, 2)
    assert model.config.model_type == "qwen3"
    assert model.model.layers[0].self_attn.q_norm.weight.shape == (size.head_dim,)
    last = torch.arange(300, 340)
    likely = logits(model, last[:, None]).gather(1, tokens_VS[last])
    assert (likely - bench_pair._LIKELIHOOD - below_VS[last]).abs().max() < 1.0


def test_successors_are_spread_over_the_vocabulary() -> None:
    tokens_VS, below_VS = bench_pair.successors(50, seed=3)
    assert all(sorted(column.tolist()) == list(range(50)) for column in tokens_VS.T)
    assert below_VS[:, 0].abs().max() == 0
    assert (below_VS.diff(dim=1) <= 0).all()
