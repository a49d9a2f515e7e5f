"""The embedded pair: it loads, talks, and the race's block efficiency equals its closed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.request import Limits, Request, Sampling, Speculation
from engine.start.building import build_engine
from engine.step.engine import Engine
from tests.engine import tiny
from tests.grid import grid

DEMO = Path(__file__).parents[2] / "server" / "demo"
PROMPTS = Path(__file__).parents[2] / "loadtest" / "prompts"
LENGTH = 4
NUM_PROMPTS, NUM_SEEDS = 16, 12


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        model=ModelConfig(target=str(DEMO / "target"), draft=str(DEMO / "draft"), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )
    return build_engine(config)


@pytest.fixture(scope="module")
def dialogue_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = []
    for line in (PROMPTS / "heldout_dialogues.jsonl").read_text().splitlines():
        text = "".join(f"<|{m['role']}|>{m['content'].strip()}<|end|>" for m in json.loads(line)["messages"])
        prompts.append(tokenizer.encode(f"<|bos|>{text}<|assistant|>", add_special_tokens=False).ids)
    return [prompt for prompt in prompts if len(prompt) < 45][:NUM_PROMPTS]


def first_steps(engine: Engine, prompts: list[list[int]], speculation: Speculation) -> dict[str, tuple[int, list[int]]]:
    """(accepted drafts of the first step, tokens) for every prompt and seed."""
    results: dict[str, tuple[int, list[int]]] = {}
    for number, prompt in enumerate(prompts):
        for seed in range(NUM_SEEDS):
            engine.submit(
                Request(
                    request_id=f"{number}-{seed}",
                    prompt_token_ids=tuple(prompt),
                    sampling=Sampling(seed=seed + 1000 * (speculation.num_drafts > 0)),
                    limits=Limits(max_tokens=LENGTH + 1, ignore_eos=True),
                    speculation=speculation,
                )
            )
    while engine.scheduler.has_work:
        for outcome in engine.run_step().outcomes:
            accepted, tokens = results.get(outcome.request_id, (outcome.num_accepted, []))
            results[outcome.request_id] = (accepted, tokens + outcome.token_ids)
    return results


@pytest.fixture(scope="module")
def plain(engine: Engine, dialogue_prompts: list[list[int]]) -> dict[str, tuple[int, list[int]]]:
    """The target's own answers."""
    return first_steps(engine, dialogue_prompts, tiny.OFF)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Target and draft model as transformers runs them."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return [
        load(DEMO / name, dtype=torch.float32, attn_implementation="eager").to(tiny.DEVICE)
        for name in ("target", "draft")
    ]


def ceilings(models: list[Any], prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Return [answers, LENGTH] ceilings u_i of each answer, by transformers."""
    ids = torch.tensor([[*prompt, *answer[:LENGTH]] for answer in answers], device=tiny.DEVICE)
    logs = []
    for model in models:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].double()
        logs.append(logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None]).squeeze(-1))
    log_ratio = (logs[1] - logs[0]).cumsum(-1)
    return log_ratio.clamp(max=0).cummin(-1).values.exp().cpu()


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", grid([1, 4], {4}))
def test_block_efficiency_equals_the_closed_form(
    engine: Engine,
    models: list[Any],
    dialogue_prompts: list[list[int]],
    plain: dict[str, tuple[int, list[int]]],
    num_drafts: int,
) -> None:
    """E[tau] = E_{Y~p} sum_i 1 - (1 - u_i(Y))^K, both sides measured on held-out dialogues."""
    speculation = Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=LENGTH)
    measured = first_steps(engine, dialogue_prompts, speculation)
    accepted = torch.tensor([float(tau) for tau, _ in measured.values()])
    expected = []
    for number, prompt in enumerate(dialogue_prompts):
        answers = [plain[f"{number}-{seed}"][1] for seed in range(NUM_SEEDS)]
        expected.append((1 - (1 - ceilings(models, prompt, answers)) ** num_drafts).sum(-1))
    closed_form = torch.cat(expected)

    # Both sides see the same prompts: the error is that of the difference within prompts.
    def within(values: torch.Tensor) -> float:
        return float(values.reshape(-1, NUM_SEEDS).var(1).mean() / len(values))

    error = (within(accepted) + within(closed_form)) ** 0.5
    assert error < 0.15
    assert float(accepted.mean()) == pytest.approx(float(closed_form.mean()), abs=4 * error)


@pytest.mark.slow
def test_single_draft_acceptance_matches_the_card(engine: Engine, dialogue_prompts: list[list[int]]) -> None:
    card = json.loads((DEMO / "evaluation.json").read_text())
    assert card["parameters"]["draft"] <= 1_000_000
    speculation = Speculation(rule="token", num_drafts=1, draft_length=1)
    accepted = [tau for tau, _ in first_steps(engine, dialogue_prompts, speculation).values()]
    assert sum(accepted) / len(accepted) > 0.6


def test_weights_are_small() -> None:
    size = sum(file.stat().st_size for folder in ("target", "draft") for file in (DEMO / folder).iterdir())
    assert size < 40 * 2**20
