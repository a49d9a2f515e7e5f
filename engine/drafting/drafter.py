"""Interface of drafters, the sources of drafted chains.

A drafter computes logits; drawing chains from them is the same for all (`chains.py`). To add one, add a file with a
class like `ModelDrafter` (`model.py`), and an entry in `engine.step.building.kind_of`. Drafters that find chains in
texts have no distributions: `engine.scheduling.text_drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.drafting.draft import Layout
from engine.kernels.protocol import ProbsTable
from engine.models.runner import ModelRunner
from engine.plan import Emission, Plan
from engine.sampling.distribution import DistributionParameters


class DrafterKind(NamedTuple):
    """Constructor and requirements of a drafter."""

    make: Callable[[ModelRunner, ModelRunner], Drafter]
    """Arguments: the runner of the draft model, and the runner of the target."""
    taps: tuple[int, ...] = ()
    """Taps of the target whose hidden states it reads. They are stored in `storage.hidden` of the target's runner,
    by the slots of the text's tokens, for all tokens but those that the plan is still to compute.
    """
    is_head: bool = False
    """Whether it computes its K/V from these states alone. It then drafts only after a token whose predecessors the
    target has computed in earlier steps, and reads accepted tokens again (`Sequence.by_head`).
    """
    is_recorded: bool = False
    """Whether its passes are part of recorded steps; the drafts of others are copied into them
    (`engine.step.recorded`).
    """


class Drafter(Protocol):
    """Computes the logits from which chains are drawn.

    Drafts are verified against the distribution from which they were drawn, so the output has the target's distribution
    for any logits, as long as these depend only on the text, the path to the node and the past.
    """

    @property
    def runner(self) -> ModelRunner | None:
        """Return the runner of the draft model, if it is a model with K/V."""

    def begin(self, plan: Plan) -> Tensor:
        """Catch up on every row's `draft_input_ids`; return [N, V] logits below the root of each row that draws, in
        order.
        """

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the drafted nodes of `depth` (1 is below the root), in the order of their chains.

        token_N: the nodes' tokens, on the device; rows whose chains end there have no nodes among them.
        """

    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:
        """After the step: store the K/V of the accepted path as that of the text, for each sampling row the first
        `num_draft_kept` tokens of its chain `rank`.
        """


class DrawsAtOnce(Protocol):
    """A drafter's method `draw`, if it has one: draw all levels of a step in one call."""

    def __call__(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable] | None:
        """Return [C, L] the tokens that `begin` and `chains.draw_levels` would draw, and the distributions they were
        drawn from; None for plans that need these two.
        """
