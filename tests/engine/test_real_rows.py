"""On 10,000 real pairs of distributions the optimal rules reach their optimum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.config import EngineConfig, ModelConfig
from engine.kernels.torch_kernels import TORCH
from engine.speculation import theory
from engine.speculation.drafting import children
from engine.speculation.verification.greedy import greedy
from engine.speculation.verification.weighted_race import race_table
from engine.start.building import build_engine

DEMO = Path(__file__).parents[2] / "server" / "demo"
PROMPTS = Path(__file__).parents[2] / "loadtest" / "prompts"
NUM_ROWS = 10_000


def real_distributions() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield [N, V] both models' distributions along held-out texts, float64."""
    engine = build_engine(EngineConfig(model=ModelConfig(target=str(DEMO / "target"), draft=str(DEMO / "draft"))))
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    texts = [
        " ".join(m["content"] for m in record["messages"]) if "messages" in record else record["text"]
        for name in ("dialogues", "gutenberg")
        for record in map(json.loads, (PROMPTS / f"heldout_{name}.jsonl").read_text().splitlines())
    ]
    left = NUM_ROWS
    for number, text in enumerate(texts):
        tokens = tuple(tokenizer.encode(f"<|bos|>{text}", add_special_tokens=False).ids[:250])
        blocks = tuple(range(-(-len(tokens) // engine.facts.block_size)))
        part = SequenceInput(tokens, 0, blocks, NO_NODES, slice(0, None))
        temperature = (1.0, 0.6)[number % 2]
        assert engine.draft_runner is not None
        p, q = (
            (runner.forward([part])[:left].double() / temperature).softmax(-1)
            for runner in (engine.target, engine.draft_runner)
        )
        yield p, q
        left -= len(p)
        if not left:
            return
    raise AssertionError(f"the held-out texts lack {left} rows")


@pytest.mark.slow
def test_the_optimal_rules_reach_their_optimum_on_real_rows() -> None:
    generator = np.random.default_rng(1)
    seen = 0
    for p_NV, q_NV in real_distributions():
        count = 2 + seen % 7
        seen += len(p_NV)
        uniform_NK = torch.from_numpy(generator.random((len(p_NV), count)))
        drafted_NK = children(TORCH, "greedy", q_NV, uniform_NK)
        present_NK = torch.ones_like(drafted_NK, dtype=torch.bool)
        raced_N = race_table(p_NV, q_NV, present_NK.sum(1)).alpha
        probs_NV = greedy(p_NV, q_NV, drafted_NK, present_NK)
        top_mass_N = p_NV.gather(1, drafted_NK[:, :-1]).sum(1)
        for row, (p, q) in enumerate(zip(p_NV.numpy(), q_NV.numpy(), strict=True)):
            assert float(raced_N[row]) == pytest.approx(theory.alpha_star_iid(p, q, count), abs=1e-9)
            # Given x ~ qt: accepted with min(1, p/qt), else a top token by the residual; its mean
            # is the optimum.
            rest = q.copy()
            rest[drafted_NK[row, :-1].numpy()] = 0
            rest = rest / rest.sum()
            missing = (p - rest).clip(min=0)
            again = missing / missing.sum()
            top = drafted_NK[row, :-1].numpy()
            x = int(drafted_NK[row, -1])
            accept = min(1.0, p[x] / rest[x])
            given = accept + (1 - accept) * (again[top].sum() + again[x])
            found = float(probs_NV[row, drafted_NK[row]].sum())
            assert found == pytest.approx(given, abs=1e-9)
            mean = np.minimum(p, rest).sum() + (1 - np.minimum(p, rest).sum()) * again[top].sum()
            assert mean == pytest.approx(theory.alpha_star_greedy(p, q, count), abs=1e-9)
            assert mean >= float(top_mass_N[row]) - 1e-9
    assert seen == NUM_ROWS
