"""Tiny random transformers models behind the engine, and runs of the engine to its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig, Weights
from engine.cpu.levels import Levels
from engine.drafting.drafter import DrafterKind
from engine.errors import RequestError
from engine.kernels.draw import categorical
from engine.plan import Row
from engine.request import Limits, Request, Sampling, Speculation
from engine.sampling.node_distributions import NodePaths
from engine.scheduling.outcome import Outcome
from engine.start import building, probe
from engine.start.building import assemble
from engine.start.choosing import choose
from engine.start.loading import LoadedModel, adopt
from engine.step.engine import Engine
from tests.wrong import instead

# The whole suite runs on this device; `gpu` runs set it to cuda.
DEVICE = torch.device(os.environ.get("POLYDRAFT_TEST_DEVICE", "cpu"))
OFF = Speculation(rule="block", num_drafts=0, draft_length=0)


def load_model(config: Any, seed: int) -> LoadedModel:
    """A model with random weights that never emits an end token by itself."""
    import transformers

    register()
    torch.manual_seed(seed)
    config.eos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=HOOK)
    model.generation_config.eos_token_id = None
    return adopt(model.to(DEVICE), f"{config.model_type}-{seed}")


def llama(seed: int, vocabulary: int = 101, layers: int = 2, spread: float = 0.3) -> LoadedModel:
    """A random Llama."""
    import transformers

    return load_model(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=spread,
            bos_token_id=None,
            pad_token_id=None,
        ),
        seed,
    )


def perturbed(model: LoadedModel, seed: int, amount: float) -> LoadedModel:
    """A draft that agrees with `model` now and then: its weights plus noise."""
    import copy

    generator = torch.Generator().manual_seed(seed)
    draft = copy.deepcopy(model.model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator).to(DEVICE))
    return adopt(draft, f"{model.name}-draft")


@dataclass
class Run:
    """Emitted tokens of an engine, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)
    failed: dict[str, RequestError] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    num_accepted: int = 0
    num_outcomes: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


def build(
    target: LoadedModel,
    draft: LoadedModel | None,
    budget: int = 2048,
    num_blocks: int = 0,
    block_size: int = 8,
    max_num_seqs: int = 64,
    max_model_len: int = 128,
    max_num_drafts: int = 4,
    max_draft_length: int = 5,
    max_over_acceptance: float = 0.0,
    max_copied_tokens: int = 0,
    draft_window: int = 0,
    kind: DrafterKind | None = None,
    num_drafts: int = 1,
    draft_length: int = 1,
    weights: Weights = "auto",
    draft_weights: Weights = "auto",
) -> Engine:
    """An engine around loaded models."""
    return assemble(
        EngineConfig(
            model=ModelConfig(
                target=target.name,
                draft=draft.name if draft else None,
                weights=weights,
                draft_weights=draft_weights,
            ),
            cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_copied_tokens=max_copied_tokens,
            ),
            speculation=SpeculationConfig(
                num_drafts=num_drafts,
                draft_length=draft_length,
                max_num_drafts=max_num_drafts,
                max_draft_length=max_draft_length,
                max_over_acceptance=max_over_acceptance,
                draft_window=draft_window,
            ),
        ),
        target,
        draft,
        kind=kind,
    )


def draft_without_turns(engine: Engine) -> None:
    """Let all requests draft in each step, and read all prompts at once."""
    config = engine.scheduler.config
    budget = config.max_num_batched_tokens
    engine.scheduler.config = msgspec.structs.replace(config, max_drafted_nodes=budget, max_prompt_tokens=budget)


@contextlib.contextmanager
def with_drafts_of_another_distribution() -> Iterator[None]:
    """The wrong variant: drafts are not drawn from the verified distributions."""

    def flattened(
        _draw: Any, _kernels: Any, distribution: Any, row: torch.Tensor, uniform: torch.Tensor
    ) -> torch.Tensor:
        return categorical(distribution[row] ** 0.3, uniform)

    def bent(draw: Any, *operands: Any) -> Any:
        *before, task = operands
        return draw(*before, task._replace(uniform_LC=task.uniform_LC**2))

    with (
        instead(type(choose(DEVICE)), "draw", flattened),
        instead(Levels, "draw", bent),
        instead(Levels, "draw_below", bent),
    ):
        yield


@contextlib.contextmanager
def with_paged_models() -> Iterator[None]:
    """Engines built meanwhile run their passes and steps as on a device, with nothing recorded."""
    from engine.cuda import attention_kernel

    with contextlib.ExitStack() as stack:
        for module in (building, probe):
            stack.enter_context(instead(module, "is_replayed", lambda *_: True))
            stack.enter_context(instead(module, "attention_kernel", lambda *_: attention_kernel))
        stack.enter_context(without_cpu_decoder())
        stack.enter_context(instead(building, "find_spec", lambda *_: None))  # a head's, too
        yield


def without_cpu_decoder() -> contextlib.AbstractContextManager[Any]:
    """Let engines built meanwhile choose among the backends that a device has."""
    return instead(
        building, "choose_backend", lambda choose_backend, *operands: choose_backend(*operands, probe.BACKENDS[-2:])
    )


@contextlib.contextmanager
def with_recorded_steps(drafts: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Engines built meanwhile have recorded steps of these shapes, with nothing recorded."""
    with with_paged_models(), instead(building, "recorded_drafts", lambda *_: drafts):
        yield


def request(
    name: str,
    prompt: Sequence[int],
    speculation: Speculation = OFF,
    max_tokens: int = 24,
    **sampling: Any,
) -> Request:
    """A request; temperature 0 unless `sampling` says otherwise."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        limits=Limits(max_tokens=max_tokens),
        speculation=speculation,
    )


def run(engine: Engine, requests: Sequence[Request], enough: int | None = None, can_fail: bool = False) -> Run:
    """Submit everything at once and step to the end, checking the accounting after every step.

    enough: tokens of an answer after which nobody wants the rest; its request is aborted then.
    can_fail: whether requests may end with an error.
    """
    result = Run()
    for one in requests:
        engine.submit(one)
        result.tokens[one.request_id] = []
        result.outcomes[one.request_id] = []
    while engine.scheduler.has_work or engine.grammar_queue.num_waiting:
        engine.queue_followed()
        step = engine.run_step()
        result.failed.update(step.failed)
        for outcome in step.outcomes:
            result.tokens[outcome.request_id] += outcome.token_ids
            result.outcomes[outcome.request_id].append(outcome)
            result.num_accepted += outcome.num_accepted
            result.num_outcomes += 1
            if outcome.finish_reason is not None:
                result.finish_reasons[outcome.request_id] = outcome.finish_reason
            elif enough is not None and len(result.tokens[outcome.request_id]) >= enough:
                assert engine.abort(outcome.request_id)
        engine.scheduler.check_invariants()
        result.num_steps += 1
        assert result.num_steps < 10_000, "the engine makes no progress"
    assert can_fail or not result.failed, result.failed
    result.num_preemptions = engine.scheduler.num_preemptions
    assert engine.scheduler.tables.target.num_used == 0, "blocks leaked"
    return result


def prompts(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def distributions_at_the_root(right: Callable[..., Any], rows: Sequence[Row], nodes: NodePaths, *operands: Any) -> Any:
    """A wrong variant of `node_distributions`: the tokens above a node are forgotten."""
    forgetful = NodePaths(nodes.row_N, np.zeros_like(nodes.depth_N), lambda: [()] * len(nodes.row_N), lambda: None)
    return right(rows, forgetful, *operands)
