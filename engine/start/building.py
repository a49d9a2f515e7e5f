"""Builds an engine from a configuration: loading, probing, the memory plan, the pool.

Not for: running it (`process.py`), or measuring it (`calibration.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import torch

from engine.attention.tensors import KVShape
from engine.config import DraftFacts, EngineConfig, EngineFacts
from engine.config_check import check_settings, early_facts
from engine.control.controller import menu
from engine.control.step_work import PLAIN, Shape
from engine.cuda.recorded.inputs import MOST_NODES, StepShape
from engine.cuda.recorded.menu import buffer_bytes, distributions_on
from engine.cuda.recorded.menu import menu as menu_of_steps
from engine.cuda.recorded.recorder import Graphs, graphs_on
from engine.cuda.recorded.steps import LEAST_FREE, RecordedSteps
from engine.drafting.drafter import DrafterKind
from engine.drafting.eagle import EagleDrafter
from engine.drafting.model import ModelDrafter
from engine.drafting.one_pass import BlockDrafter, MaskDrafter
from engine.errors import ConfigError
from engine.grammar.grammar import GrammarPool
from engine.grammar.grammar_tokens import Vocabulary
from engine.heads.head import Head
from engine.heads.runner import HeadBackend, HeadRunner, TorchHead
from engine.kernels.torch_kernels import Kernels
from engine.models.runner import ModelRunner
from engine.needs import needs_of_drafts
from engine.request import Speculation
from engine.scheduling.request_checks import check_defaults
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.store import BlockStore
from engine.speculation.conditions import DRAFTER_FACTS
from engine.speculation.verification import RULES
from engine.start.choosing import choose
from engine.start.host import most_cores
from engine.start.loading import LoadedModel, Progress, end_tokens, load_pair
from engine.start.memory import MemoryPlan, blocks_of, plan_memory
from engine.start.number_formats import draft_model_config
from engine.start.outlines import Outline, outline_pair
from engine.start.probe import BackendChoice, attention_kernel, choose_backend, find_kv_shape, is_replayed, runs
from engine.step.engine import Engine

log = logging.getLogger("polydraft")

_CPU_DRAFTED_NODES = 128
"""Nodes of six requests of the default shape. A CPU's step takes longer with every node."""
_CPU_PROMPT_TOKENS = 512
"""Larger prompt chunks delay decoding requests, and do not speed up prefill on a CPU."""
_HEAD_DRAFTERS: dict[str, type[EagleDrafter | MaskDrafter]] = {
    "eagle3": EagleDrafter,
    "mtp": EagleDrafter,
    "peagle": MaskDrafter,
}
"""Drafters of heads, by type; `BlockDrafter` drafts with the others."""


def build_engine(config: EngineConfig, progress: Progress = lambda _: None) -> Engine:
    """Load the models of a configuration; raise ConfigError or LoadError with one clear line.

    Errors that can be found without the weights are raised before they are read.
    """
    check_settings(config)
    outlines = outline_pair(config.model)
    check_outlines(config, outlines)
    ends = end_tokens(config.model, progress)
    target, draft = load_pair(config.model, progress, _max_model_len(config, outlines))
    return assemble(config, replace(target, eos_token_ids=ends), draft, progress, is_owner=True)


def assemble(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    progress: Progress = lambda _: None,
    kind: DrafterKind | None = None,
    is_owner: bool = False,
) -> Engine:
    """Return an engine of models that are already loaded with the attention hook.

    kind: how the draft model drafts, if the model does not show it; is_owner: whether the models' weights may be given
    up, because nothing else uses them.
    """
    check_settings(config := _limited(config, draft))
    if target.ranks is not None:
        target.ranks.tell("probe", config.cache.block_size)  # everything that may be refused has been checked
    models = [target] if draft is None else [target, draft]
    shapes = [kv_shape_of(model) for model in models]
    kind = None if draft is None else kind or kind_of(draft, shapes[0].num_layers)
    if kind is not None and kind.taps:
        width = target.model.config.get_text_config().hidden_size
        shapes[0] = replace(shapes[0], hidden_dim=width, taps=kind.taps)
    facts = _facts(config, models, None if kind is None else kind.facts)
    parts: list[_Part] = []
    for model, shape in zip(models, shapes, strict=True):
        parts.append(_prepare(model, shape, config, facts.max_model_len, progress, is_owner, parts))
    device = torch.device(target.model.device)
    progress("trying the kernels of distributions and verdicts")
    kernels = choose(device)
    is_head = kind is not None and kind.is_head
    has_draft_pool = draft is not None and not is_head and config.speculation.draft_window > 0
    is_recorded = not config.model.enforce_eager and all(is_replayed(part.model, part.choice) for part in parts)

    def make(num_blocks: Sequence[int]) -> list[ModelRunner]:
        return [
            part.runner(count, config.cache.block_size, target.vocab_size, is_recorded, kernels)
            for part, count in zip(parts, num_blocks, strict=False)
        ]

    recordings = _Recordings()
    if is_recorded:
        drafts = recorded_drafts(config, draft if kind is not None and kind.is_recorded else None)
        steps = menu_of_steps(drafts, config.scheduler.max_num_seqs, distributions_on(device, kernels))
        recordings = _plan_recordings(config, facts, steps, kind, make, graphs_on(device), progress, has_draft_pool)
    token_bytes = [part.shape.token_bytes(part.choice.backend.kv_dtype) for part in parts]
    spare_blocks = [part.num_spare for part in parts]
    memory = plan_memory(config, facts, token_bytes, spare_blocks, recordings.num_bytes, device, has_draft_pool)
    _report_context(config, models, memory.max_model_len)
    runners = make((memory.num_blocks, memory.num_draft_blocks))
    progress("choosing the cores of passes")
    for runner in runners:
        runner.tune(most_cores(config.model))
    if all(part.choice.backend.reads_pages for part in parts):
        # Torch computes little then, and its waiting threads would take cores from the passes.
        torch.set_num_threads(1)
    facts = _completed(facts, target, memory, parts)
    check_defaults(facts, config.speculation)
    drafter = kind.make(runners[1], runners[0]) if kind is not None else None
    tokens = target.vocab_size, facts.eos_token_ids
    grammars = GrammarPool(Vocabulary(*config.model.tokenizer_source, *tokens, config.grammars))
    scheduler = _scheduler(config, target, memory, is_head, has_draft_pool)
    engine = Engine(runners[0], drafter, scheduler, facts, config.speculation, grammars)
    if kernels.decides:
        from engine.cpu.step import CpuStep  # Numba is installed if its kernels were chosen

        engine.eager = CpuStep(runners[0], drafter)
    if recordings.shapes:
        recorded = RecordedSteps(recordings.graphs, kind, has_draft_pool)
        recorded.record(runners, recordings.shapes, memory.most_blocks, progress, recordings.least_free)
        engine.recorded = recorded
    return engine


def _completed(facts: EngineFacts, target: LoadedModel, memory: MemoryPlan, parts: Sequence[_Part]) -> EngineFacts:
    """Return the facts with those that follow from the loaded models and the plan of memory."""
    return msgspec.structs.replace(
        facts,
        num_blocks=memory.num_blocks,
        max_model_len=memory.max_model_len,
        eos_token_ids=sorted(target.eos_token_ids),
        device=str(target.model.device),
        dtype=parts[0].weight_types,
        memory_plan={
            "weights": parts[0].weight_bytes,
            "draft_weights": sum(part.weight_bytes for part in parts[1:]),
            "kv_cache": memory.pool_bytes[0],
            "draft_kv_cache": sum(memory.pool_bytes[1:]),
            **memory.kept_back,
        },
    )


class _Recordings(NamedTuple):
    """Plan of the recorded steps."""

    graphs: Graphs | None = None
    shapes: Sequence[StepShape] = ()
    num_bytes: int = 0
    """Memory that they take: measured, or that of their buffers if the pool has a fixed size."""
    least_free: float = 0.0
    """Share of the free memory that recording leaves; 0 if the memory has been set aside."""


def _plan_recordings(
    config: EngineConfig,
    facts: EngineFacts,
    shapes: Sequence[StepShape],
    kind: DrafterKind | None,
    make: Callable[[Sequence[int]], list[ModelRunner]],
    graphs: Graphs | None,
    progress: Progress,
    has_draft_pool: bool,
) -> _Recordings:
    """Return the steps to record. If the pool gets the memory that is left, record them next to a pool of one block
    first, because the memory of graphs is known only after recording, and graphs hold the addresses of the pool.
    """
    if graphs is None or config.cache.num_blocks or config.cache.memory_bytes:
        return _Recordings(graphs, shapes, buffer_bytes(shapes, facts.vocab_size), LEAST_FREE)
    trial = RecordedSteps(graphs, kind, has_draft_pool)
    progress("measuring the memory of CUDA graphs")
    trial.record(make((1, 1)), shapes, blocks_of(facts.max_model_len, config), progress)
    return _Recordings(graphs, list(trial.steps), trial.num_bytes, 0.0)


class _Part(NamedTuple):
    """One of the models, and how it runs."""

    model: LoadedModel
    shape: KVShape
    choice: BackendChoice
    weight_bytes: int
    weight_types: str
    num_spare: int = 0
    """Blocks outside the pool, for the masks that a head of the DFlash types computes after texts and never reads
    again.
    """

    def runner(
        self, num_blocks: int, block_size: int, vocab_size: int, is_recorded: bool, kernels: Kernels
    ) -> ModelRunner:
        """Return a runner with storage for a pool of `num_blocks`."""
        return (HeadRunner if isinstance(self.model.model, Head) else ModelRunner)(
            self.model.model,
            self.shape,
            num_blocks + self.num_spare,
            block_size,
            vocab_size,
            self.choice.backend,
            self.model.ranks,
            self.choice.paged_kernel,
            is_recorded,
            kernels,
        )


def kind_of(draft: LoadedModel, num_layers: int) -> DrafterKind:
    """Return the drafter of a draft model: a language model drafts from its own logits, a head from the target's
    states.

    num_layers: of the target.
    """
    if isinstance(draft.model, Head):
        config = draft.model.config
        make = _HEAD_DRAFTERS.get(config.kind, BlockDrafter)
        return DrafterKind(
            make,
            config.taps_of(num_layers),
            is_head=True,
            facts=DRAFTER_FACTS[draft.drafter],
            is_recorded=config.block is None or config.block.size <= MOST_NODES,
        )
    return DrafterKind(lambda runner, _: ModelDrafter(runner), facts=DRAFTER_FACTS[draft.drafter], is_recorded=True)


def kv_shape_of(model: LoadedModel) -> KVShape:
    """Return the shape of one token's K and V."""
    return model.model.kv_shape if isinstance(model.model, Head) else find_kv_shape(model)


def recorded_drafts(config: EngineConfig, draft: LoadedModel | None) -> list[Shape]:
    """Return the shapes for which steps are recorded: plain decoding, the configured one, and the controller's menu."""
    wanted = config.speculation
    drafted = Speculation(rule=wanted.rule, draft_method=wanted.draft_method)
    if draft is None or needs_of_drafts(drafted, wanted.tree or (1,)):
        return [PLAIN]
    num_drafts = min(wanted.num_drafts, RULES[wanted.rule].max_drafts or wanted.num_drafts)
    return [PLAIN, *menu(num_drafts, wanted.draft_length, wanted.max_draft_length)]


def _scheduler(
    config: EngineConfig, target: LoadedModel, memory: MemoryPlan, by_head: bool, has_draft_pool: bool
) -> Scheduler:
    blocks, draft_blocks = (
        BlockStore(count, config.cache.block_size, config.cache.prefix_caching)
        for count in (memory.num_blocks, memory.num_draft_blocks)
    )
    limits = config.scheduler
    if target.model.device.type == "cpu":
        limits = msgspec.structs.replace(
            limits,
            max_prompt_tokens=limits.max_prompt_tokens or _CPU_PROMPT_TOKENS,
            max_drafted_nodes=limits.max_drafted_nodes or _CPU_DRAFTED_NODES,
        )
    window, own = config.speculation.draft_window, draft_blocks if has_draft_pool else None
    return Scheduler(limits, blocks, target.eos_token_ids, window, by_head, own)


def _prepare(
    loaded: LoadedModel,
    shape: KVShape,
    config: EngineConfig,
    longest: int,
    progress: Progress,
    is_owner: bool,
    earlier: Sequence[_Part],
) -> _Part:
    """Return how a model is run, and the memory that its weights then take. longest: tokens of the longest text;
    earlier: the target, for a head.
    """
    block_size = config.cache.block_size
    if isinstance(loaded.model, Head):
        device = torch.device(loaded.model.device)
        backend: HeadBackend = TorchHead(loaded.model)
        if device.type == "cpu" and find_spec("numba") is not None:
            from engine.cpu.head_decoder import backend_of

            target = earlier[0]
            dtype = target.model.model.dtype
            backend = backend_of(loaded.model, shape, target.choice.backend, dtype, block_size, config.model)
            if backend.remark:
                progress(f"{loaded.name}: {backend.remark}")
        laid_out_bytes = backend.prepare(lambda: True) if is_owner and device.type == "cpu" else 0
        block = loaded.model.config.block
        num_spare = 0 if block is None else config.scheduler.max_num_seqs * -(-block.size // block_size)
        choice = BackendChoice(backend, attention_kernel(device))
        return _Part(loaded, shape, choice, laid_out_bytes + loaded.weight_bytes, loaded.weight_types, num_spare)
    progress(f"probing {loaded.name}")
    wanted = draft_model_config(config.model) if earlier else config.model
    choice = choose_backend(loaded, shape, block_size, wanted, longest)
    laid_out_bytes, weight_types = 0, loaded.weight_types
    if loaded.ranks is None and is_owner:  # a part of a split model cannot be tried on this rank alone
        remark = choice.backend.remark
        progress(f"laying out the weights of {loaded.name}{remark and f' ({remark})'}")
        laid_out_bytes = choice.backend.prepare(partial(runs, loaded, shape, choice, block_size))
    return _Part(loaded, shape, choice, laid_out_bytes + loaded.weight_bytes, weight_types)


def check_outlines(config: EngineConfig, outlines: Sequence[Outline]) -> None:
    """Raise ConfigError for lengths and speculation that do not fit the models, as far as their configurations
    determine it.
    """
    drafts = [DRAFTER_FACTS[outline.drafter] for outline in outlines[1:]]
    check_defaults(_facts(config, outlines, drafts[0] if drafts else None), config.speculation)
    length = len(config.speculation.tree) or config.speculation.draft_length
    for outline in outlines[1:]:
        if length > (outline.max_draft_length or length):
            raise ConfigError(
                f"--draft-length {length}: {outline.name} drafts at most {outline.max_draft_length} tokens; lower it"
            )


def _limited(config: EngineConfig, draft: LoadedModel | None) -> EngineConfig:
    """Return a configuration whose requests ask for no longer chains than a head drafts."""
    most, wanted = None if draft is None else draft.max_draft_length, config.speculation
    if most is None or wanted.max_draft_length <= most:
        return config
    return msgspec.structs.replace(config, speculation=msgspec.structs.replace(wanted, max_draft_length=most))


def _facts(config: EngineConfig, models: Sequence[Outline], draft: DraftFacts | None) -> EngineFacts:
    """Return the facts about an engine that are known before its weights are read. draft: of the draft model."""
    target = models[0]
    return early_facts(config, draft, target.vocab_size, _max_model_len(config, models), target.model_type)


def _max_model_len(config: EngineConfig, models: Sequence[Outline]) -> int:
    shortest = min(models, key=lambda model: model.max_positions)
    longest = shortest.max_positions
    wanted = config.scheduler.max_model_len
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted}: {shortest.name} reaches {longest} positions{shortest.limit_reason}; lower it "
            f"to {longest}"
        )
    return wanted or longest


def _report_context(config: EngineConfig, models: Sequence[Outline], context: int) -> None:
    """Log a context that is shorter than the target's, if the operator has not chosen it."""
    reach, shortest = models[0].max_positions, min(models, key=lambda model: model.max_positions)
    if config.scheduler.max_model_len or context == reach:
        return
    reason = f"the draft model {shortest.name} reaches {context} positions; choose another"
    if context < shortest.max_positions:
        reason = "the K/V cache has no room for more; give it memory (--kv-cache-memory-bytes)"
    log.warning("context %d of the model's %d: %s, or set --max-model-len", context, reach, reason)
    for model in models:
        if context <= (model.short_context or 0) < shortest.max_positions:
            log.warning(
                "%s: the long factors of its rotary embedding were chosen before the context was shortened to %d; its "
                "short factors suit this context: set --max-model-len %d",
                model.name,
                context,
                context,
            )
