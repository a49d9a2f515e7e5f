"""Decode steps replayed as three CUDA graphs, after one copy of their numbers.

The first graph drafts: all passes of the draft model or head, with the distribution and the draw of
every level. The second graph is the target's pass. The third graph makes the distributions of all
nodes and the verdict. A step runs as the smallest recorded shape that has room for its requests and
for the drafts of each request. `EagerStep` carries out other steps: with prompts, text drafts,
edited logits, other rules, or more rows than any shape has.

Passes, distributions, draws and the rule are the functions of eager steps. Without CUDA nothing is
recorded, and the same work is computed on the same padded arrays; the tests use this.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.paged import DevicePass, Paged
from engine.cuda.recorded.buffers import Buffers
from engine.cuda.recorded.inputs import PAGES, StepInputs, StepShape
from engine.cuda.recorded.menu import shape_of, work
from engine.cuda.recorded.obstacles import HOST_WAITS, find_wait, first_error, operation_of
from engine.cuda.recorded.passes import RecordedPasses
from engine.cuda.recorded.recorder import Graphs, graphs_on
from engine.drafting.chains import draw_levels
from engine.drafting.draft import ChainShape, Draft, layout_of, with_tokens
from engine.drafting.drafter import DrafterKind
from engine.drafting.numbers import drafting_numbers
from engine.errors import LoadError
from engine.kernels.protocol import ChainNoise, Chains, Filters, ProbsTable
from engine.kernels.transfer import bits, fill, to_device, views
from engine.models.runner import ModelRunner, Pass
from engine.plan import Plan, StepVerdict
from engine.sampling.distribution import FILTERS, DistributionParameters, distribution
from engine.speculation.topology import drawn_tree
from engine.speculation.verification import RULES
from engine.step.eager import RecordedMenu
from engine.step.results import broken_rows
from engine.step.verify import emitted

log = logging.getLogger("polydraft")

_MEMORY_SHORT = "recorded %d of %d shapes of steps: memory is short; the others are launched operation by operation"
_REPORT_EVERY = 16
"""Recordings between two reports of progress."""
LEAST_FREE = 0.6
"""Least share of the memory that was free before, at which recording stops."""


class VerifiedStep(NamedTuple):
    draft: Draft
    """With its tokens."""
    chains: list[int]
    """Chosen chains by request, with their accepted tokens and the tokens after them."""
    accepted: list[int]
    next_tokens: list[int]
    largest_N: npt.NDArray[np.float64]


class RecordedStep:
    """A step of one shape: its buffers, and the graphs over them."""

    def __init__(self, shape: StepShape, shared: Buffers) -> None:
        self.shape = shape
        self._shared = shared
        self._drafter = shared.drafter if shape.num_drafts else None
        target = shared.target
        chain_shape = ChainShape(shape.fanout, "iid", "iid")
        self._layout = layout_of((chain_shape,) * shape.sequences, target.device)
        self._inputs = StepInputs(
            shape,
            self._layout,
            target.block_size,
            shared.most_pages,
            shared.spare_blocks,
            self._drafter,
            shared.is_head,
            target.kernels,
        )
        self._numbers = torch.from_numpy(self._inputs.of([])).to(target.device, copy=True)
        self._views = views(self._numbers, self._inputs.fields)
        *draft_passes, self._target_pass = map(self._pass, range(len(self._inputs.sizes)))
        self._parameters = self._distribution_parameters()
        numbers = self._views["noise"]
        self._uniform_LC = drafting_numbers(numbers, self._layout.max_length)
        self._noise = ChainNoise.of(numbers, self._layout.max_length)
        self._probs_NV = shared.draft_probs_NV[: self._layout.num_probs]
        self._logits_NV = shared.logits_NV[: shape.num_rows]
        sequence_N = np.arange(shape.sequences).repeat(1 + shape.num_nodes)
        self._sequence_N = to_device(sequence_N, target.device)
        """Sequence of each row of the target's pass."""
        size = self._layout.num_chains, self._layout.max_length
        self._chains = Chains(
            torch.zeros(size, dtype=torch.int64, device=target.device),
            self._views["lengths"].view(-1),
            self._layout.request,
            ProbsTable(self._probs_NV, self._layout.probs_row_CL, target.kernels),
            self._layout.shape,
            self._layout.leads_CL,
        )
        num_results = 3 * shape.sequences + prod(size) + shape.num_rows + self._layout.num_probs
        self._result = torch.zeros(num_results, dtype=torch.int64, device=target.device)
        if self._drafter is not None:
            before_T = None
            if "before" in self._views:
                before_T = self._views["before"].view(-1)
            fanouts = (shape.fanout,) * shape.sequences
            self._work = self._drafter.work_of(draft_passes, fanouts, before_T, self._views["root"])
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def record(self, record: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]) -> None:
        self._graphs = {name: record(work) for name, work in self.parts().items()}

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the work that is recorded, in order."""
        parts = {"target": self._target, "verify": self._verify}
        if self._drafter is None:
            return parts
        return {"draft": self._draft, **parts}

    # -- a step ---------------------------------------------------------------------------------

    def draw(self, plan: Plan) -> Draft:
        fill(self._numbers, self._inputs.of(plan.sampling_rows))
        if self._drafter is not None:
            self._drafter.read_before(plan, self._inputs.draft_passes.num_text)
            self._replay("draft", self._draft)
        return self._draft_of(plan)

    def forward(self, plan: Plan, draft: Draft | None) -> Tensor:  # noqa: ARG002
        """Return the target's logits [N, V] at all roots and nodes, and at padding rows."""
        self._replay("target", self._target)
        return self._logits_NV

    def verify(self, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:  # noqa: ARG002
        assert draft is not None
        self._replay("verify", self._verify)
        step = self._read(draft)
        emissions = emitted(plan.sampling_rows, step.draft, step.chains, step.accepted, step.next_tokens)
        broken = broken_rows(plan, step.draft, step.largest_N)
        return StepVerdict(tuple(emissions), broken=broken)

    def _read(self, draft: Draft) -> VerifiedStep:
        """Copy the results of the step to the host; waits for the device."""
        shape = self.shape
        result = self._result.cpu().numpy()
        num_verdicts = 3 * shape.sequences
        tokens_end = num_verdicts + self._chains.tokens_CL.numel()
        verdict_3S = result[:num_verdicts].reshape(3, -1)
        chain_R, accepted_R, token_R = verdict_3S[:, : len(draft.trees)]
        if shape.num_drafts:
            # With non-finite numbers any chain may win, even a chain that the request does not
            # have. The verdict of such a request is not used.
            rank_R = chain_R % self._layout.shape[1]
            is_drafted_R = rank_R < [len(tree.paths) for tree in draft.trees]
            chain_R = chain_R - np.where(is_drafted_R, 0, rank_R)
            tokens_SKL = result[num_verdicts:tokens_end].reshape(shape.sequences, shape.num_drafts, shape.draft_length)
            node_tokens: list[int] = []
            for tree, token_KL in zip(draft.trees, tokens_SKL, strict=False):
                drafted_KL = token_KL[: len(tree.paths), : len(tree.paths[0]) - 1]
                node_tokens += drafted_KL.ravel().tolist()
            draft = with_tokens(draft, node_tokens)
        largest = result[tokens_end:].view(np.float64)
        largest_N = np.concatenate([largest[: draft.starts[-1]], largest[shape.num_rows :]])
        return VerifiedStep(draft, chain_R.tolist(), accepted_R.tolist(), token_R.tolist(), largest_N)

    def _replay(self, name: str, work: Callable[[], None]) -> None:
        graph = self._graphs.get(name)
        if graph is None:
            work()
        else:
            graph.replay()

    def _draft_of(self, plan: Plan) -> Draft:
        """Return the draft with the trees of the plan's rows.

        The tokens of the trees come with the results of the step.
        """
        return Draft(
            self._layout,
            self._chains,
            trees=tuple(drawn_tree(row.fanout) for row in plan.sampling_rows),
            tokens_M=None,
            parameters=self._parameters,
            numbers=self._views["noise"],
            rows_apart=1 + self.shape.num_nodes,
        )

    # -- recorded work --------------------------------------------------------------------------

    def _draft(self) -> None:
        """Draw all levels, with the functions of eager steps."""
        assert self._drafter is not None
        root_NV = self._drafter.start(self._work)
        tokens_CL = draw_levels(
            (),
            self._layout,
            self._parameters,
            self._uniform_LC,
            root_NV,
            self._drafter.below,
            self._probs_NV,
        )
        self._chains.tokens_CL.copy_(tokens_CL)

    def _target(self) -> None:
        token_ids = self._views["root"].unsqueeze(1)
        if self.shape.num_drafts:
            drafted = self._chains.tokens_CL.take(self._views["tokens"])
            token_ids = torch.cat([token_ids, drafted], 1)
        metadata, tensors, _ = self._target_pass
        logits_NV = self._shared.target.run_on_device(
            token_ids.view(-1), tensors.positions_T, metadata, tensors.wanted_N
        )
        self._logits_NV.copy_(logits_NV)

    def _verify(self) -> None:
        """Compute the distribution of every node, and apply the rule."""
        tokens_CL = self._chains.tokens_CL
        parameters = self._parameters.select(self._sequence_N)
        probs_NV = distribution(self._logits_NV, parameters)
        node_CX = self._views["nodes"].view(len(tokens_CL), -1)
        target = ProbsTable(probs_NV, node_CX, self._parameters.kernels)
        results = [*self._decide(target), tokens_CL.view(-1), bits(self._logits_NV.amax(1))]
        if len(self._probs_NV):
            results.append(bits(self._probs_NV.amax(1)))
        self._result.copy_(torch.cat(results))

    def _decide(self, target: ProbsTable) -> tuple[Tensor, Tensor, Tensor]:
        """Return chain, number of accepted tokens, and the next token, each [S]."""
        if not self.shape.num_drafts:
            root_S = target.row_CX[:, 0]
            token_S = target.kernels.draw(target.probs_NV, root_S, self._noise.residual_C)
            return self._layout.request, torch.zeros_like(token_S), token_S
        # The race serves greedy rows, too: their chains are alike, and right or wrong as a whole.
        verdict = RULES["bv_race"].verify(self._chains, target, self._noise)
        return verdict.chain_B, verdict.accepted_B, verdict.next_token_B

    def _pass(self, number: int) -> Pass:
        """Return a pass over the buffers."""
        v = self._views
        device = self._numbers.device
        count = self.shape.sequences
        queries = self._inputs.sizes[number]
        is_target = number == len(self._inputs.sizes) - 1
        runner = self._shared.draft
        pages = v[self._inputs.draft_pages]
        first_keys = v["first keys"]
        if is_target:
            runner = self._shared.target
            pages = v[PAGES]
            first_keys = to_device(np.zeros(count, dtype=np.int32), device)
        assert runner is not None
        positions_T = v[f"positions {number}"].view(-1)
        slots_T = v[f"slots {number}"].view(-1)
        paged = Paged(
            pages=pages,
            starts=to_device(np.arange(count, dtype=np.int32) * np.int32(queries), device),
            counts=v[f"counts {number}"],
            first_keys=first_keys,
            ends=v["ends"],
            num_keys=v[f"num keys {number}"],
            node_positions=v["node positions"][int(is_target)],
            limits=v[f"limits {number}"].view(-1),
            words=v[f"words {number}"].view(-1, 1),
            positions=v[f"short positions {number}"].view(-1),
            page_size=runner.block_size,
            most_queries=queries,
            most_keys=self._shared.most_pages * runner.block_size,
            is_padded=True,
        )
        wanted_N = token_ids_T = drawn_M = to_device(np.arange(count * queries), device)
        if number == 0 and not is_target:
            wanted_N = v["wanted"].view(-1)
        known = "text" if number == 0 else "block"
        if known in v and not is_target:
            token_ids_T = v[known].view(-1)
            drawn_M = drawn_M[:0]
        metadata = runner.paged_metadata(slots_T, paged)
        device_pass = DevicePass(token_ids_T, drawn_M, positions_T, slots_T, wanted_N, paged, self._numbers)
        return Pass(metadata, device_pass)

    def _distribution_parameters(self) -> DistributionParameters:
        """Return the parameters of the S requests; they lie in the buffer."""
        target = self._shared.target
        any_greedy = self.shape.distributions.any_greedy
        min_p_N, top_k_N, top_p_N = map(self._views.get, FILTERS)
        filters = Filters(min_p_N, top_k_N, top_p_N, most_k=target.vocab_size)
        temperature_N = self._views["temperature"]
        return DistributionParameters(temperature_N, any_greedy, False, filters, target.kernels)


class RecordedSteps(RecordedMenu):
    """The recorded steps of an engine."""

    def __init__(
        self,
        graphs: Graphs | None = None,
        kind: DrafterKind | None = None,
        has_draft_pool: bool = False,
    ) -> None:
        """Create a menu without steps.

        graphs: the recorder; if None, CUDA graphs on a CUDA device, and no recorder elsewhere.
        kind: of the drafter; None if nothing is drafted. has_draft_pool: whether the draft model
        has other blocks than the target.
        """
        self._graphs = graphs
        self._kind = kind
        self._has_draft_pool = has_draft_pool
        self._is_head = kind is not None and kind.is_head
        self.steps: dict[StepShape, RecordedStep] = {}
        self._chosen: dict[StepShape, RecordedStep | None] = {}
        """Recorded step of a plan's smallest shape; None without room."""
        self._most_pages = 0

    def find(self, plan: Plan) -> RecordedStep | None:
        """Return the step that carries out a plan; None if no recorded shape has room for it."""
        if not self.steps or not self.serves:
            return None
        wanted = shape_of(plan, self._is_head)
        if wanted is None or max(len(row.block_ids) for row in plan.rows) > self._most_pages:
            return None
        if wanted not in self._chosen:
            fitting = [shape for shape in self.steps if shape.has_room(wanted)]
            self._chosen[wanted] = self.steps[min(fitting, key=work)] if fitting else None
        return self._chosen[wanted]

    @torch.inference_mode()
    def record(
        self,
        runners: Sequence[ModelRunner],
        shapes: Sequence[StepShape],
        most_pages: int,
        progress: Callable[[str], None],
        least_free: float = LEAST_FREE,
    ) -> None:
        """Record steps of these shapes (`menu`) until memory is short.

        No step is recorded if the host waits for the device in a step; a warning then names the
        line. Raises LoadError if a step cannot be recorded. runners: of the target, and of the
        draft model if there is one; least_free: share of the free memory that recording leaves.
        """
        self._most_pages = most_pages
        graphs = self._graphs or graphs_on(runners[0].device)
        if graphs is None:
            shared = Buffers.of(runners, self._kind, shapes, most_pages, self._has_draft_pool)
            self.steps = {shape: RecordedStep(shape, shared) for shape in shapes}
            for passes in self._passes_of(runners, shapes):
                deque(passes.record(None), maxlen=0)
            return
        with graphs.recorder() as record:
            free_bytes = graphs.free_bytes()
            try:
                shared = Buffers.of(runners, self._kind, shapes, most_pages, self._has_draft_pool)
                models = self._passes_of(runners, shapes)
                widest = (passes.widest() for passes in models)
                wait = find_wait(graphs, chain(_widest_steps(shapes, shared), widest))
                if wait is not None:
                    log.warning(HOST_WAITS, wait)
                    return
                progress("recording passes as CUDA graphs")
                for _ in chain(*(passes.record(record) for passes in models)):
                    if graphs.free_bytes() < least_free * free_bytes:
                        break
                for number, shape in enumerate(shapes):
                    if number % _REPORT_EVERY == 0:
                        progress(f"recording steps as CUDA graphs: {number} of {len(shapes)}")
                    if graphs.free_bytes() < least_free * free_bytes:
                        log.warning(_MEMORY_SHORT, number, len(shapes))
                        break
                    step = RecordedStep(shape, shared)
                    step.record(record)
                    self.steps[shape] = step
            except Exception as error:
                first = first_error(error)
                if not isinstance(first, torch.cuda.OutOfMemoryError):
                    raise LoadError(
                        f"decode steps cannot be recorded as CUDA graphs: {operation_of(first)}: "
                        f"{first}; start with --enforce-eager, which launches their operations one "
                        "by one"
                    ) from error
                log.warning(_MEMORY_SHORT, len(self.steps), len(shapes))
        self.num_bytes = free_bytes - graphs.free_bytes()

    def _passes_of(self, runners: Sequence[ModelRunner], shapes: Sequence[StepShape]) -> list[RecordedPasses]:
        """Return the passes of the target and a draft model; runners use the recorded ones."""
        most_sequences = max(shape.sequences for shape in shapes)
        models = []
        for runner in runners[:1] if self._is_head else runners:
            spare_block = runner.storage.num_slots // runner.block_size - 1
            models.append(RecordedPasses(runner, most_sequences, self._most_pages, spare_block))
            runner.recorded_passes = models[-1]
        return models


def _widest_steps(shapes: Sequence[StepShape], shared: Buffers) -> Iterator[Callable[[], None]]:
    """Yield the work of one step for each step kind, the step with the most nodes a request.

    Among steps with equally many nodes it is the step with the fewest requests. Smaller steps of
    the kind have no further operations.
    """

    def size(shape: StepShape) -> tuple[int, int, int]:
        return min(shape.num_drafts, 2), shape.num_nodes, -shape.sequences

    ordered = sorted(shapes, key=size)
    kinds = {(min(shape.num_drafts, 2), shape.distributions): shape for shape in ordered}
    for shape in kinds.values():
        yield from RecordedStep(shape, shared).parts().values()
