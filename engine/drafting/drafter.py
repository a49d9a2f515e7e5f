"""What a source of drafted chains must do.

A drafter gives logits; how chains are drawn from them is the same for all (`chains.py`). To add one: a file with a
class like `ModelDrafter` (`model.py`), and a line in `engine.step.building.kind_of`. Drafters that find chains in texts
have no laws: `engine.scheduling.text_drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.drafting.draft import Layout
from engine.models.runner import ModelRunner
from engine.plan import Emission, Plan
from engine.sampling.law import LawParameters


class DrafterKind(NamedTuple):
    """How a drafter is made."""

    make: Callable[[ModelRunner, ModelRunner], Drafter]
    """From what runs the draft model, and what runs the target."""
    taps: tuple[int, ...] = ()
    """Taps of the target whose hidden states it reads: they are stored in `storage.hidden` of the target's runner, by
    the slots of the text's tokens, for all but those that the plan is still to compute."""
    is_head: bool = False
    """Whether it computes its own K/V from these states alone. It then drafts only behind a token whose predecessors
    the target has computed in earlier steps, and reads accepted tokens again (`Sequence.by_head`)."""


class Drafter(Protocol):
    """Gives the logits that chains are drawn from.

    Drafts are checked against the law they were drawn from, so the output stays the target's whatever the logits are,
    as long as they depend on nothing but the text, the path to the node and the past.
    """

    @property
    def runner(self) -> ModelRunner | None:
        """Runs the draft model, where it is one with K/V."""

    def begin(self, plan: Plan) -> Tensor:
        """Catch up on every row's `draft_input_ids`; [N, V] logits below the root of each row that draws, in order."""

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """[N, V] logits below the drafted nodes of `depth` (1 is below the root), in the order of their chains.

        token_N: the nodes' tokens, on the device; rows whose chains end there have no nodes among them.
        """

    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:
        """After the step: make the K/V of what each sampling row has kept the K/V of its text: of its chain `rank` the
        first `num_draft_kept` tokens."""


class DrawsAtOnce(Protocol):
    """A drafter's method `draw`, if it has one: draw all levels of a step in one call."""

    def __call__(
        self, plan: Plan, layout: Layout, parameters: LawParameters, uniform_LC: Tensor, law_NV: Tensor
    ) -> Tensor | None:
        """[C, L] the tokens that `begin` and `chains.draw_levels` would give; None where those must be called.

        law_NV: filled with the laws of the draws.
        """
