"""The parts of a step, and the step that carries out every plan operation by operation.

`Step` is the interface that an engine needs. `EagerStep` calls the runners' kernels and backends
(`kernels/`, `models/backend.py`), which are compiled where a device has compiled ones. It is the
specification of the steps of devices: `CpuStep` (`cpu/step.py`) also carries out every plan, in
fewer calls, and recorded steps (`cuda/recorded/steps.py`) carry out usual plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.drafting.chains import draw_chains
from engine.drafting.draft import MOST_UNMERGED, Draft
from engine.drafting.drafter import ChainSource
from engine.models.runner import ModelRunner
from engine.plan import Plan, StepVerdict
from engine.step.verify import verify_chains


class Step(Protocol):
    """Carries out a plan."""

    def draw(self, plan: Plan) -> Draft | None:
        """Draft the plan's chains; None if no row emits."""

    def forward(self, plan: Plan, draft: Draft | None) -> Tensor:
        """Return the target's logits [N, V], row by row.

        They are logits at the root and the nodes of every sampling row, and at prompt tokens if
        their logprobs are requested.
        """

    def verify(self, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
        """Return the emission of every sampling row; waits for the device.

        logits_NV: at roots and nodes.
        """


class RecordedMenu:
    """Steps that a device has recorded; this menu is empty."""

    serves = True
    num_bytes = 0
    """Device memory of the recorded steps."""
    steps: Mapping[Any, Step] = MappingProxyType({})

    @property
    def num_recorded(self) -> int:
        """Return the number of recorded shapes."""
        return len(self.steps)

    def find(self, plan: Plan) -> Step | None:  # noqa: ARG002
        """Return the step that carries out a plan; None if no recorded shape has room for it."""
        return None


class EagerStep:
    """Carries out any plan, operation by operation."""

    def __init__(self, target: ModelRunner, drafter: ChainSource | None) -> None:
        self._target = target
        self._drafter = drafter
        self.most_unmerged = 0
        """Largest target pass (roots plus nodes) whose trees are not merged; 0 always merges.

        Without merging the host does not wait for the drafted tokens (`draft.trees_of`).
        """
        if target.device.type != "cpu" and not target.is_split:
            self.most_unmerged = MOST_UNMERGED

    def draw(self, plan: Plan) -> Draft | None:
        """Draft the plan's chains."""
        target = self._target
        return draw_chains(
            plan,
            self._drafter,
            target.vocab_size,
            target.device,
            target.kernels,
            self.most_unmerged,
        )

    def forward(self, plan: Plan, draft: Draft | None) -> Tensor:
        """Run one pass over all known tokens and all drafted nodes."""
        tokens_M = None if draft is None else draft.tokens_M
        return self._target.forward(target_inputs(plan, draft), tokens_M)

    def verify(self, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
        """Compute the distributions of all nodes, and apply the rules."""
        return verify_chains(plan, draft, logits_NV)


def target_inputs(plan: Plan, draft: Draft | None) -> list[SequenceInput]:
    """Return the inputs of the target's pass, sequence by sequence."""
    trees = iter(draft.trees if draft is not None else ())
    inputs = []
    for row in plan.rows:
        nodes = NO_NODES
        wanted = slice(0, 0)
        if row.emits:
            tree = next(trees)
            if tree.num_nodes:
                nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry())
            wanted = slice(len(row.input_ids) - 1, None)  # the root and its nodes
        if row.prompt_next:
            wanted = slice(0, None)
        inputs.append(SequenceInput(row.input_ids, row.first_index, row.block_ids, nodes, wanted, state=row.state))
    return inputs
