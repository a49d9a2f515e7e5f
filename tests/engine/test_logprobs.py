"""Logprobs are plain transformers', on every branch and after preemption."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from engine.attention.attention import HOOK
from engine.request import Speculation
from engine.scheduling.outcome import read_logprobs
from engine.step.report import token_logprobs
from tests.engine import tiny
from tests.grid import grid


@pytest.mark.sampled
@pytest.mark.parametrize("crowding", [{}, {"num_blocks": 19}, {"budget": 40}])
def test_logprobs_equal_transformers(crowding: dict[str, Any]) -> None:
    target = tiny.llama(seed=5)
    draft = tiny.perturbed(target, seed=6, amount=0.05)
    speculations = [
        tiny.OFF,
        Speculation(rule="bv_race", num_drafts=4, draft_length=5),
        Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 1, 2)),
    ]
    requests = [
        msgspec.structs.replace(
            tiny.request(str(i), text, speculations[i % 3], temperature=1.0, seed=i, frequency_penalty=0.5),
            num_logprobs=(2, None)[i % 4 == 3],
            num_prompt_logprobs=2 if i % 4 in (0, 1) else None,
        )
        for i, text in enumerate(tiny.prompts(101, [5 + 3 * i for i in range(8)] + [90]))
    ]
    run = tiny.run(tiny.build(target, draft, **crowding), requests)
    target.model.set_attn_implementation("eager")
    for one in requests:
        outcomes = run.outcomes[one.request_id]
        entries = [entry for outcome in outcomes for entry in outcome.logprobs]
        of_prompt = [entry for outcome in outcomes for entry in read_logprobs(outcome.prompt_logprobs)]
        if one.num_logprobs is None:
            assert not entries
            continue
        answer = run.tokens[one.request_id]
        ids = torch.tensor([[*one.prompt_token_ids, *answer]], device=tiny.DEVICE)
        with torch.inference_mode():
            scores = target.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1).cpu()
        prompt = one.prompt_token_ids
        expected = prompt[1:] if one.num_prompt_logprobs is not None else ()
        assert len(of_prompt) == len(expected)
        for entry, token, row in zip(of_prompt, expected, scores, strict=False):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [score for _, score in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        scores = scores[len(prompt) - 1 : -1]
        assert len(entries) == len(answer)
        for entry, token, row in zip(entries, answer, scores, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [score for _, score in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    target.model.set_attn_implementation(HOOK)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafts"), grid([("greedy_block", 1), ("spectr_gbv", 3)], {("spectr_gbv", 3)}))
def test_layers_of_long_unlike_chains_stay_finite(rule: str, drafts: int) -> None:
    """Ratios leave float64 at sixteen tokens that the target all but excludes."""
    engine = tiny.build(tiny.llama(0), tiny.llama(1), max_draft_length=16)
    speculation = Speculation(rule=rule, num_drafts=drafts, draft_length=16)
    one = tiny.request("a", (3, 5), speculation, max_tokens=60, temperature=0.07)
    run = tiny.run(engine, [msgspec.structs.replace(one, num_logprobs=1)])
    for outcome in run.outcomes["a"]:
        assert all((entry.top[0][1] - entry.logprob) / 0.07 < 40 for entry in outcome.logprobs)


def test_rows_without_tokens_have_no_logprobs() -> None:
    assert token_logprobs(torch.zeros(0, 7), [], []) == []
    (only,) = token_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), [1], [9])
    assert [token for token, _ in only.top] == [2, 1, 0], "no more than there are"


def test_alternatives_do_not_depend_on_other_rows() -> None:
    """Half precision makes many logits equal; the lower token comes first."""
    logits_NV = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for most in (1, 5, 20):
        alone = [token_logprobs(logits_NV[i : i + 1], [i], [most])[0] for i in range(4)]
        together = token_logprobs(logits_NV, range(4), [20, most, 0, most])
        assert [together[1], together[3]] == [alone[1], alone[3]]
        for one in alone:
            assert list(one.top) == sorted(one.top, key=lambda entry: (-entry[1], entry[0]))
    (flat,) = token_logprobs(torch.zeros(1, 9), [8], [3])
    assert [token for token, _ in flat.top] == [0, 1, 2]
