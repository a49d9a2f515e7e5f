"""Builds an engine from a configuration: loading, probing, the memory plan, the pool.

Not for: running the engine (`process.py`), or measuring its steps (`measuring.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import torch

from engine.attention.tensors import KVShape
from engine.config import EngineConfig, EngineFacts, ModelConfig
from engine.config_check import check_settings
from engine.control.controller import menu
from engine.control.step_work import PLAIN, Shape
from engine.cuda.recorded.inputs import MOST_NODES, StepShape
from engine.cuda.recorded.menu import buffer_bytes, distributions_on
from engine.cuda.recorded.menu import menu as menu_of_steps
from engine.cuda.recorded.passes import logits_bytes
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
from engine.models.backend import TransformersBackend
from engine.models.runner import ModelRunner
from engine.needs import needs_of_drafts
from engine.request import Speculation
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.request_checks import check_defaults
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.states import StateStore
from engine.scheduling.store import BlockStore
from engine.speculation.conditions import DRAFTER_FACTS
from engine.speculation.verification import RULES
from engine.start.choosing import choose
from engine.start.host import most_cores
from engine.start.limits import (
    check_outlines,
    facts_before_loading,
    limit_drafts,
    max_model_len,
    report_context,
)
from engine.start.loading import LoadedModel, Progress, end_tokens, load_pair
from engine.start.memory import MemoryPlan, StoredModel, blocks_of, plan_memory, state_sizes
from engine.start.miniature import check_long_texts
from engine.start.number_formats import draft_model_config
from engine.start.outlines import outline_pair
from engine.start.probe import BackendChoice, attention_kernel, choose_backend, find_kv_shape, is_replayed
from engine.step.engine import Engine

log = logging.getLogger("polydraft")

_CPU_DRAFTED_NODES = 128
"""Nodes of six requests of the default shape; a CPU's step takes longer with every node."""
_CPU_PROMPT_TOKENS = 512
"""Larger chunks delay decoding requests, and do not speed up prefill on a CPU."""
_HEAD_DRAFTERS: dict[str, type[EagleDrafter | MaskDrafter]] = {
    "eagle3": EagleDrafter,
    "mtp": EagleDrafter,
    "peagle": MaskDrafter,
}
"""Drafters by type of head; other types have a `BlockDrafter`."""


def build_engine(config: EngineConfig, progress: Progress = lambda _: None) -> Engine:
    """Load the models of a configuration; raise ConfigError or LoadError with one clear line.

    Errors that can be found without the weights are raised before they are read.
    """
    check_settings(config)
    outlines = outline_pair(config.model)
    check_outlines(config, outlines)
    ends = end_tokens(config.model, progress)
    target, draft = load_pair(config.model, progress, max_model_len(config, outlines))
    target = replace(target, eos_token_ids=ends)
    return assemble(config, target, draft, progress, is_owner=True)


def assemble(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    progress: Progress = lambda _: None,
    kind: DrafterKind | None = None,
    is_owner: bool = False,
) -> Engine:
    """Return an engine of models that are already loaded with the attention hook.

    kind: how the draft model drafts, if the model does not show it; is_owner: whether the models'
    weights may be given up, because nothing else uses them.
    """
    config = limit_drafts(config, draft)
    check_settings(config)
    if target.ranks is not None:
        # Everything that may be refused has been checked.
        target.ranks.tell("probe", config.cache.block_size)
    if draft is None:
        kind = None
    models = [target] if draft is None else [target, draft]
    assembly = _choose_backends(config, models, kind, progress, is_owner)
    recordings = _plan_recordings(assembly, progress)
    memory = _plan_memory(assembly, recordings.num_bytes)
    report_context(config, models, memory.max_model_len)
    runners = assembly.runners((memory.num_blocks, memory.num_draft_blocks))
    _tune(assembly, runners, progress)
    engine = _engine(assembly, memory, runners)
    if recordings.shapes:
        recorded = RecordedSteps(recordings.graphs, assembly.kind, assembly.has_draft_pool)
        recorded.record(runners, recordings.shapes, memory.most_blocks, progress, recordings.least_free)
        engine.recorded = recorded
    return engine


class _Part(NamedTuple):
    """A model of the engine, and how it runs."""

    model: LoadedModel
    shape: KVShape
    choice: BackendChoice
    weight_bytes: int
    weight_types: str
    """Before they were laid out."""
    num_spare: int = 0
    """Blocks outside the pool, for masks of a DFlash head, which are never read again."""

    @property
    def stored(self) -> StoredModel:
        """Return the K/V that the model stores."""
        dtype = self.choice.backend.kv_dtype
        shape = self.shape
        return StoredModel(shape.token_bytes(dtype), self.num_spare, shape.state_bytes(dtype), shape.input_bytes(dtype))

    def runner(
        self, num_blocks: int, config: EngineConfig, vocab_size: int, is_recorded: bool, kernels: Kernels
    ) -> ModelRunner:
        """Return a runner with storage for a pool of `num_blocks`."""
        is_head = isinstance(self.model.model, Head)
        make = HeadRunner if is_head else ModelRunner
        return make(
            self.model.model,
            self.shape,
            num_blocks + self.num_spare,
            config.cache.block_size,
            vocab_size,
            self.choice.backend,
            self.model.ranks,
            self.choice.paged_kernel,
            is_recorded,
            kernels,
            () if is_head else self.model.placeholder_ids,
            state_sizes(config),
        )


@dataclass(frozen=True)
class _Assembly:
    """Models with their backends, before there is memory for K/V."""

    config: EngineConfig
    facts: EngineFacts
    """Known before loading."""
    kind: DrafterKind | None
    """None without a draft model."""
    parts: Sequence[_Part]
    """The target, then the draft model."""
    kernels: Kernels

    @property
    def target(self) -> LoadedModel:
        """Return the target."""
        return self.parts[0].model

    @property
    def device(self) -> torch.device:
        """Return the device of all models."""
        return torch.device(self.target.model.device)

    @property
    def is_head(self) -> bool:
        """Whether the draft model is a head."""
        return self.kind is not None and self.kind.is_head

    @property
    def has_draft_pool(self) -> bool:
        """Whether the draft model's blocks are in a separate pool, which holds its window only."""
        is_draft_model = self.kind is not None and not self.is_head
        return is_draft_model and self.config.speculation.draft_window > 0

    @property
    def is_recorded(self) -> bool:
        """Whether steps are recorded and replayed.

        Steps of recurrent layers are not: their work depends on the places of each pass.
        """
        are_replayed = all(is_replayed(part.model, part.choice) and not part.shape.calls for part in self.parts)
        return are_replayed and not self.config.model.enforce_eager

    def runners(self, num_blocks: Sequence[int]) -> list[ModelRunner]:
        """Return a runner of each model, with storage for its number of blocks."""
        vocab_size = self.facts.vocab_size
        is_recorded = self.is_recorded
        return [
            part.runner(count, self.config, vocab_size, is_recorded, self.kernels)
            for part, count in zip(self.parts, num_blocks, strict=False)
        ]


def _choose_backends(
    config: EngineConfig,
    models: Sequence[LoadedModel],
    kind: DrafterKind | None,
    progress: Progress,
    is_owner: bool,
) -> _Assembly:
    """Choose the backends of all models, and the kernels of the device, as for `assemble`."""
    target = models[0]
    shapes = [kv_shape_of(model) for model in models]
    if kind is None and len(models) > 1:
        kind = kind_of(models[1], target.model.config.get_text_config().num_hidden_layers)
    if kind is not None and kind.taps:
        width = target.model.config.get_text_config().hidden_size
        shapes[0] = replace(shapes[0], hidden_dim=width, taps=kind.taps)
    facts = facts_before_loading(config, models, None if kind is None else kind.facts)
    start = _Start(config, facts.max_model_len, progress, is_owner)
    parts = [_prepare_model(target, shapes[0], config.model, start)]
    for model, shape in zip(models[1:], shapes[1:], strict=True):
        if isinstance(model.model, Head):
            parts.append(_prepare_head(model, shape, parts[0], start))
        else:
            parts.append(_prepare_model(model, shape, draft_model_config(config.model), start))
    progress("trying the kernels of distributions and verdicts")
    kernels = choose(torch.device(target.model.device))
    return _Assembly(config, facts, kind, parts, kernels)


class _Start(NamedTuple):
    """Options of a start for all models."""

    config: EngineConfig
    longest: int
    """Tokens of the longest text."""
    progress: Progress
    is_owner: bool
    """Whether the models' weights may be given up."""


def _prepare_model(loaded: LoadedModel, shape: KVShape, wanted: ModelConfig, start: _Start) -> _Part:
    """Choose a language model's backend, and lay out its weights; wanted: number formats."""
    block_size = start.config.cache.block_size
    start.progress(f"probing {loaded.name}")
    loaded_types = loaded.weight_types
    choice = choose_backend(loaded, shape, block_size, wanted, start.longest)
    # Our own decoders read windows themselves, and have no other lengths.
    if start.is_owner and isinstance(choice.backend, TransformersBackend):
        check_long_texts(loaded, wanted.probe == "warn")
    # Our own layouts keep the loaded types, and transformers' products may need another one.
    weight_types = loaded.weight_types if type(choice.backend) is TransformersBackend else loaded_types
    laid_out_bytes = 0 if choice.paged_kernel is None else choice.paged_kernel.weight_bytes
    # A part of a split model cannot be tried on this rank alone.
    if loaded.ranks is None and start.is_owner:
        remark = choice.backend.remark
        start.progress(f"laying out the weights of {loaded.name}{remark and f' ({remark})'}")
        laid_out_bytes += choice.backend.prepare()
    return _Part(loaded, shape, choice, laid_out_bytes + loaded.weight_bytes, weight_types)


def _prepare_head(loaded: LoadedModel, shape: KVShape, target: _Part, start: _Start) -> _Part:
    """Choose the backend of a head, and lay out its weights."""
    block_size = start.config.cache.block_size
    device = torch.device(loaded.model.device)
    backend = _head_backend(loaded, shape, target, start)
    weights = start.config.model.draft_weights
    if weights != "auto" and not backend.reads_pages:
        raise ConfigError(
            f"--draft-weights {weights}: {loaded.name} runs without the CPU decoder, which alone has weights "
            "in few bits; leave the flag out"
        )
    laid_out_bytes = 0
    if start.is_owner and device.type == "cpu":
        laid_out_bytes = backend.prepare()
    num_spare = 0
    block = loaded.model.config.block
    if block is not None:
        num_spare = start.config.scheduler.max_num_seqs * -(-block.size // block_size)
    choice = BackendChoice(backend, None if backend.reads_pages else attention_kernel(device, shape))
    weight_bytes = laid_out_bytes + loaded.weight_bytes
    return _Part(loaded, shape, choice, weight_bytes, loaded.weight_types, num_spare)


def _head_backend(loaded: LoadedModel, shape: KVShape, target: _Part, start: _Start) -> HeadBackend:
    is_on_cpu = torch.device(loaded.model.device).type == "cpu"
    if not is_on_cpu or find_spec("numba") is None:
        return TorchHead(loaded.model)
    from engine.cpu.head_decoder import backend_of  # Numba is an optional package

    block_size = start.config.cache.block_size
    dtype = target.model.model.dtype
    backend = backend_of(loaded.model, shape, target.choice.backend, dtype, block_size, start.config.model)
    if backend.remark:
        start.progress(f"{loaded.name}: {backend.remark}")
    return backend


class _Recordings(NamedTuple):
    """Plan of the recorded steps."""

    graphs: Graphs | None = None
    shapes: Sequence[StepShape] = ()
    num_bytes: int = 0
    """Measured, or of their buffers if the pool has a fixed size."""
    least_free: float = 0.0
    """Share of free memory that recording leaves; 0 if its memory is set aside."""


def _plan_recordings(assembly: _Assembly, progress: Progress) -> _Recordings:
    """Return the steps to record.

    If the pool gets the memory that is left, record them next to a pool of one block first, because
    the memory of graphs is known only after recording, and graphs hold the addresses of the pool.
    """
    if not assembly.is_recorded:
        return _Recordings()
    config, kind = assembly.config, assembly.kind
    draft = assembly.parts[1].model if kind is not None and kind.is_recorded else None
    drafts = recorded_drafts(config, draft)
    distributions = distributions_on(assembly.device, assembly.kernels)
    shapes = menu_of_steps(drafts, config.scheduler.max_num_seqs, distributions)
    graphs = graphs_on(assembly.device)
    if graphs is None or config.cache.num_blocks or config.cache.memory_bytes:
        vocab_size = assembly.facts.vocab_size
        dtypes = [part.model.model.dtype for part in assembly.parts]
        num_bytes = buffer_bytes(shapes, vocab_size) + logits_bytes(dtypes, vocab_size)
        return _Recordings(graphs, shapes, num_bytes, LEAST_FREE)
    trial = RecordedSteps(graphs, kind, assembly.has_draft_pool)
    progress("measuring the memory of CUDA graphs")
    most_blocks = blocks_of(assembly.facts.max_model_len, config)
    trial.record(assembly.runners((1, 1)), shapes, most_blocks, progress)
    return _Recordings(graphs, list(trial.steps), trial.num_bytes, 0.0)


def _plan_memory(assembly: _Assembly, recorded_bytes: int) -> MemoryPlan:
    return plan_memory(
        assembly.config,
        assembly.facts,
        [part.stored for part in assembly.parts],
        recorded_bytes,
        assembly.device,
        assembly.has_draft_pool,
    )


def _tune(assembly: _Assembly, runners: Sequence[ModelRunner], progress: Progress) -> None:
    """Choose the number of cores of passes."""
    progress("choosing the cores of passes")
    for runner in runners:
        runner.tune(most_cores(assembly.config.model))
    if all(part.choice.backend.reads_pages for part in assembly.parts):
        # Torch computes little then, and its waiting threads would take cores from the passes.
        torch.set_num_threads(1)


def _engine(assembly: _Assembly, memory: MemoryPlan, runners: Sequence[ModelRunner]) -> Engine:
    """Return the engine, without recorded steps."""
    config, kind = assembly.config, assembly.kind
    facts = _complete(assembly, memory)
    check_defaults(facts, config.speculation)
    drafter = None if kind is None else kind.make(runners[1], runners[0])
    vocabulary = Vocabulary(*config.model.tokenizer_source, facts.vocab_size, facts.eos_token_ids, config.grammars)
    scheduler = _scheduler(assembly, memory)
    engine = Engine(runners[0], drafter, scheduler, facts, config.speculation, GrammarPool(vocabulary))
    if assembly.kernels.decides:
        # Numba is an optional package; it is installed if its kernels were chosen.
        from engine.cpu.step import CpuStep

        engine.unrecorded = CpuStep(runners[0], drafter)
    return engine


def _complete(assembly: _Assembly, memory: MemoryPlan) -> EngineFacts:
    """Return the facts, completed by the loaded models and the plan of memory."""
    target, *drafts = assembly.parts
    return msgspec.structs.replace(
        assembly.facts,
        num_blocks=memory.num_blocks,
        num_states=memory.num_states,
        max_model_len=memory.max_model_len,
        eos_token_ids=sorted(assembly.target.eos_token_ids),
        placeholder_ids=list(assembly.target.placeholder_ids),
        device=str(assembly.target.model.device),
        dtype=target.weight_types,
        memory_plan={
            "weights": target.weight_bytes,
            "draft_weights": sum(part.weight_bytes for part in drafts),
            "kv_cache": memory.pool_bytes[0],
            "draft_kv_cache": sum(memory.pool_bytes[1:]),
            **memory.kept_back,
        },
    )


def kind_of(draft: LoadedModel, num_layers: int) -> DrafterKind:
    """Return how a model drafts: from its own logits, or as a head from the target's states.

    num_layers: of the target.
    """
    facts = DRAFTER_FACTS[draft.drafter]
    if not isinstance(draft.model, Head):
        return DrafterKind(lambda runner, _: ModelDrafter(runner), facts=facts, is_recorded=True)
    config = draft.model.config
    return DrafterKind(
        _HEAD_DRAFTERS.get(config.kind, BlockDrafter),
        config.taps_of(num_layers),
        is_head=True,
        facts=facts,
        is_recorded=config.block is None or config.block.size <= MOST_NODES,
    )


def kv_shape_of(model: LoadedModel) -> KVShape:
    """Return the shape of one token's K and V."""
    if isinstance(model.model, Head):
        return model.model.kv_shape
    return find_kv_shape(model)


def recorded_drafts(config: EngineConfig, draft: LoadedModel | None) -> list[Shape]:
    """Return the recorded shapes: plain, and the controller's menu with the configured one."""
    wanted = config.speculation
    drafted = Speculation(rule=wanted.rule, draft_method=wanted.draft_method)
    if draft is None or needs_of_drafts(drafted, wanted.tree or (1,)):
        return [PLAIN]
    num_drafts = min(wanted.num_drafts, RULES[wanted.rule].max_drafts or wanted.num_drafts)
    return [PLAIN, *menu(num_drafts, wanted.draft_length, wanted.max_draft_length)]


def _scheduler(assembly: _Assembly, memory: MemoryPlan) -> Scheduler:
    config = assembly.config
    limits = config.scheduler
    if assembly.device.type == "cpu":
        limits = msgspec.structs.replace(
            limits,
            max_prompt_tokens=limits.max_prompt_tokens or _CPU_PROMPT_TOKENS,
            max_drafted_nodes=limits.max_drafted_nodes or _CPU_DRAFTED_NODES,
        )
    ends = assembly.target.eos_token_ids
    return Scheduler(limits, _tables(assembly, memory), ends, config.speculation.draft_window, assembly.is_head)


def _tables(assembly: _Assembly, memory: MemoryPlan) -> BlockTables:
    cache = assembly.config.cache
    blocks, draft_blocks = (
        BlockStore(count, cache.block_size, cache.prefix_caching)
        for count in (memory.num_blocks, memory.num_draft_blocks)
    )
    num_seats, num_cached, _ = state_sizes(assembly.config)
    places = range(num_seats), range(num_seats, num_seats + num_cached)
    states = [StateStore(*places) if part.shape.calls else None for part in assembly.parts]
    return BlockTables(blocks, draft_blocks if assembly.has_draft_pool else None, *states)
