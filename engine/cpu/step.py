"""The step of a CPU: one compiled call drafts and another one decides, for rows that allow it.

`EagerStep` computes the same operation by operation for any rows, and is the oracle.
"""

from __future__ import annotations

from torch import Tensor

from engine.cpu.drafting import compiled
from engine.cpu.verdict import verify_at_once
from engine.drafting.draft import Draft
from engine.drafting.drafter import Drafter
from engine.models.runner import ModelRunner
from engine.plan import Plan, StepVerdict
from engine.step.eager import EagerStep


class CpuStep(EagerStep):
    """Carries out any plan, and returns the same as `EagerStep` if all numbers are finite.

    A non-finite number ends a request. The compiled call does not read the nodes of text drafts
    that no walk and no chain reaches, so it does not notice such numbers there.
    """

    def __init__(self, target: ModelRunner, drafter: Drafter | None) -> None:
        super().__init__(target, None if drafter is None else compiled(drafter))

    def verify(self, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
        """Compute the distributions of all nodes, and apply the rules."""
        return verify_at_once(plan, draft, logits_NV) or super().verify(plan, draft, logits_NV)
