"""Interfaces of verification rules, and their facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.config import RuleFacts
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.speculation.rule_facts import MOST_LIKELY
from engine.speculation.theory import Law, accept_token

Verify = Callable[[Chains, ProbsTable, ChainNoise], ChainVerdict]


class NodeRule(Protocol):
    """The law of the emitted token given the drafts at N nodes."""

    def __call__(self, target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
        """Return [N, V] the law of the emitted token, float64.

        drafted_NK: tokens in the order of drawing, with duplicates, present ones first. A node
        without drafts emits from the target law.
        """


Acceptance = Callable[[Law, Law, int], float]
"""Probability that the first emitted token is a draft."""


class Rule(RuleFacts, frozen=True):
    """A verification rule: its function, its requirements, and its acceptance."""

    name: str
    verify: Verify
    acceptance: Acceptance | None
    """Closed form at one position; None if several drafts have none."""
    acceptance_of_one: Acceptance = accept_token
    closed_form_of: tuple[str, ...] | None = None
    """Draft methods for which it holds; None for all of the rule's."""
    node_rule: NodeRule | None = None
    """Acceptance given the drafts at one node, without a closed form."""
    by_tiles: bool = False
    """Whether kernels by tiles suffice, which need little memory (`Kernels.by_tiles`)."""

    def has_closed_form(self, method: str, count: int) -> bool:
        """Whether the acceptance of `count` drafts is known without drawing them."""
        if method == MOST_LIKELY:  # the drafts are known
            return False
        if count == 1:
            return True
        holds_for_method = self.closed_form_of is None or method in self.closed_form_of
        return self.acceptance is not None and holds_for_method
