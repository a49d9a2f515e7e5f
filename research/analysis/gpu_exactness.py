"""Exactness of an engine's steps: logprobs of its answers.

They are compared with transformers' logprobs for the same texts.

The models have four random layers of full strength, because the pair for speeds damps its layers:
there wrong attention changes logits by less than rounding does. A copy of the target drafts, so
that nearly all drafts of all chains are accepted. The compared tokens then come from nodes of every
depth, every step moves K/V, and a draft model that reads wrong K/V shows in the share of accepted
drafts.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.cuda.lean_decoder import LeanDecoder
from engine.plan import Plan
from engine.request import Limits, Request, Sampling
from engine.start.building import assemble
from engine.start.distribution_check import run_to_end
from engine.start.loading import adopt
from engine.step.eager import Step
from engine.step.engine import Engine
from research.analysis import arms
from research.analysis.gpu_results import SectionResults, require_all
from research.demo import bench_pair

_NUM_LAYERS = 4
_PROMPTS, _NUM_TOKENS = (33, 20, 75, 48), 40
"""Tokens of the prompts, which end within blocks and at their ends, and of each answer."""
_NUM_LOGPROBS = 20
_CASES = (("off", True), ("block:1x5", True), ("bv_race:4x5", True), ("bv_race:4x5", False))
"""Drafts of the requests, and whether their steps are recorded."""
_MOST_ERROR, _MOST_PLAIN_ERRORS = 1e-3, 2.0
"""Largest error in float32; in 16 bits, in errors of transformers in the same type."""
_LEAST_ACCEPTED = {torch.float32: 0.95, torch.bfloat16: 0.8}
"""Least share of accepted drafts: both models have the same weights, but not the same rounding."""
_SPREAD = 3.0
"""Standard deviation of the logits of a position."""


def check_exactness(options: argparse.Namespace, findings: SectionResults) -> None:
    """Compare engines around models of the target's size in float32.

    On a device also of both sizes in bfloat16.
    """
    register()
    on_cuda = options.device == "cuda"
    cases = [(options.target, torch.float32)]
    if on_cuda:
        cases += [(options.target, torch.bfloat16), (options.draft, torch.bfloat16)]
    for size, dtype in cases:
        gc.collect()  # the engine before
        model = make_model(size, _NUM_LAYERS, options.vocabulary, options.device).to(dtype)
        name = f"{size} in {str(dtype).removeprefix('torch.')}"
        findings.attempt(f"exactness of {name}", partial(_check, findings, name, model, on_cuda))


def make_model(size: str, num_layers: int, vocabulary: int, device: str) -> Any:
    """Return a random model whose logits have the spread of a trained model's.

    So it is rarely sure, and its drafts are seldom right by chance.
    """
    shape = replace(bench_pair.SIZES[size], num_hidden_layers=num_layers)
    model = bench_pair.random_model(shape, vocabulary, 512, 7, device)
    model.lm_head.weight *= _SPREAD / (model.config.initializer_range * shape.hidden_size**0.5)
    return model


def _check(findings: SectionResults, name: str, model: Any, on_cuda: bool) -> None:
    engine = engine_of(model, 4 << 30 if on_cuda else 1 << 26)
    if on_cuda:
        require_all(findings, fast_paths(engine))
    check_engine(findings, name, engine, model)


def engine_of(model: Any, cache_bytes: int) -> Engine:
    """Return an engine around a copy of a model that drafts for another copy."""
    config = EngineConfig(
        model=ModelConfig(target="target", draft="draft", device=model.device.type),
        cache=CacheConfig(memory_bytes=cache_bytes),
        scheduler=SchedulerConfig(max_num_seqs=2),
        speculation=SpeculationConfig(
            num_drafts=4, draft_length=5, max_num_drafts=4, max_draft_length=5, observed_share=0.0
        ),
    )
    target, draft = deepcopy(model), deepcopy(model)
    for one in (target, draft):
        one.set_attn_implementation(HOOK)
    return assemble(config, adopt(target, "target"), adopt(draft, "draft"))


def check_engine(findings: SectionResults, name: str, engine: Engine, model: Any) -> None:
    """Compare the logprobs of an engine's answers with a model's logprobs.

    The engine serves copies of the model.
    """
    model.set_attn_implementation("eager")
    exact = model if model.dtype == torch.float32 else deepcopy(model).float()
    for shape, is_recorded in _CASES:
        requests = list(_requests(shape, model.config.vocab_size))
        with steps_of(engine, is_recorded) as served:
            answers = run_to_end(engine, requests)
        steps = [outcome for answer in answers.values() for _, outcome in answer.steps]
        texts = [(one.prompt_token_ids, answers[one.request_id].tokens) for one in requests]
        tops = [one.top for outcome in steps for one in outcome.logprobs]
        tokens_NK, found_NK = (torch.tensor([[pair[at] for pair in top] for top in tops]) for at in (0, 1))
        exact_NV, plain_NV = _logprobs(exact, texts), _logprobs(model, texts)
        exact_NK, plain_NK = exact_NV.gather(1, tokens_NK), plain_NV.gather(1, tokens_NK)
        spread = exact_NV.std(-1).mean()
        error, plain_error = (float((one - exact_NK).square().mean().sqrt() / spread) for one in (found_NK, plain_NK))
        num_drafted = sum(outcome.draft_length for outcome in steps)
        accepted = sum(outcome.num_accepted for outcome in steps) / num_drafted if num_drafted else 1.0
        bound = max(_MOST_ERROR, _MOST_PLAIN_ERRORS * plain_error)
        case = f"exactness of {name}, {shape}{', recorded' * is_recorded}"
        findings.add(case, {"error": error, "bound": bound, "accepted": accepted, "recorded_steps": sum(served)})
        findings.require(error <= bound, f"{case}: logprobs differ by {error:.2g} (at most {bound:.2g})")
        is_enough = accepted >= _LEAST_ACCEPTED[model.dtype]
        findings.require(is_enough, f"{case}: {accepted:.0%} of the drafts of the target's copy are accepted")
        is_replayed = sum(served) > len(served) / 2 or not (is_recorded and engine.recorded.num_recorded)
        findings.require(is_replayed, f"{case}: most steps were not recorded")


def _requests(shape: str, vocabulary: int) -> Sequence[Request]:
    chance = random.Random(1)
    return [
        Request(
            request_id=str(length),
            prompt_token_ids=tuple(chance.randrange(3, vocabulary) for _ in range(length)),
            sampling=Sampling(seed=length),
            limits=Limits(max_tokens=_NUM_TOKENS, ignore_eos=True),
            speculation=arms.speculation_of(shape),
            num_logprobs=_NUM_LOGPROBS,
        )
        for length in _PROMPTS
    ]


def _logprobs(model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Return [N, V] logprobs of the tokens of all answers, one after the other.

    texts: prompts and answers.
    """
    found = []
    for prompt, answer in texts:
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        logits_NV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits_NV.float().log_softmax(-1).cpu())
    return torch.cat(found)


def fast_paths(engine: Engine) -> dict[str, bool]:
    """Return by name whether each fast path is used."""
    assert engine.draft_runner is not None
    found = {
        "whole steps": engine.recorded.num_recorded > 0,
        "kernels for verification": engine.target.kernels.by_tiles,
        "kernels for filters": engine.target.kernels.reads_no_filter,
    }
    for name, runner in (("target", engine.target), ("draft", engine.draft_runner)):
        found |= {f"{name}: {path}": used for path, used in runner.fast_paths.items()}
        found[f"{name}: kernels for layers"] = isinstance(runner.backend, LeanDecoder) and runner.backend.use_kernels
    return found


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute temporarily."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def steps_of(engine: Engine, is_recorded: bool = True) -> Iterator[list[bool]]:
    """Let steps be recorded ones or not; yield whether each was.

    They have two requests at most, which leaves room for 4x5.
    """
    limits, find = engine.scheduler.config, engine.recorded.find
    served: list[bool] = []

    def noting(plan: Plan) -> Step | None:
        found = find(plan)
        served.append(found is not None)
        return found

    with (
        _changed(engine.recorded, "serves", is_recorded),
        _changed(engine.recorded, "find", noting),
        _changed(engine.scheduler, "config", msgspec.structs.replace(limits, max_num_seqs=2)),
    ):
        yield served
