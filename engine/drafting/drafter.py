"""Interface of drafters, the sources of drafted chains.

A drafter computes logits; `chains.draw_by_level` draws chains from them for all drafters. To add
one, write a class like `ModelDrafter` (`model.py`), and an entry in
`engine.start.building.kind_of`. Recorded steps include a `RecordedDrafter`. Text drafters have no
distributions: `engine.scheduling.text_drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.attention.inputs import NodeInput
from engine.config import DraftFacts
from engine.drafting.draft import Layout
from engine.fanout import Fanout
from engine.kernels.protocol import ProbsTable
from engine.models.runner import ModelRunner, Pass
from engine.plan import Emission, Plan, Row
from engine.sampling.distribution import DistributionParameters
from engine.speculation.conditions import ANY_DRAFTER


class DrafterKind(NamedTuple):
    """Constructor and requirements of a drafter."""

    make: Callable[[ModelRunner, ModelRunner], Drafter]
    """Arguments: the runners of the draft model and of the target."""
    taps: tuple[int, ...] = ()
    """Taps of the target whose hidden states the drafter reads.

    The target stores them in `storage.hidden`, by slot, for all tokens of earlier plans.
    """
    is_head: bool = False
    """Whether the drafter computes its K/V from these states alone.

    A head drafts after a token whose predecessors the target computed in earlier steps, and reads
    accepted tokens again (`Sequence.by_head`).
    """
    facts: DraftFacts = ANY_DRAFTER
    is_recorded: bool = False
    """Whether it is a `RecordedDrafter`; others are launched operation by operation."""


class ChainSource(Protocol):
    """Draws the chains of a step."""

    def begin(self, plan: Plan) -> Tensor:
        """Catch up on the rows' `draft_input_ids`; a head catches up on rows that draw only.

        Returns [N, V] logits below the root of each row that draws, in order.
        """

    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable]:
        """Catch up, and draw the plan's chains.

        Returns ([C, L] the tokens, the distributions that they were drawn from).
        layout, parameters: of the sampling rows; uniform_LC: the numbers for drafting.
        """


class Drafter(ChainSource, Protocol):
    """Computes the logits from which chains are drawn.

    Drafts are verified against the distribution they were drawn from, so any logits are exact that
    depend on the text, the node's path and the past alone.
    """

    @property
    def runner(self) -> ModelRunner | None:
        """Return the runner of the draft model, if it is a model with K/V."""

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the drafted nodes of `depth`, in the order of their chains.

        Depth 1 is below the root. token_N: the nodes' tokens, on the device. Rows whose chains end
        at this depth have no nodes in it.
        """

    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:
        """After the step, make the K/V of accepted paths a part of the text's K/V.

        The accepted path of a sampling row is the first `num_draft_kept` tokens of chain `rank`.
        """


class HeadPlaces(NamedTuple):
    """Indices that follow from what texts draft, on the device."""

    lengths: tuple[int, ...]
    """Chain length of each text that drafts."""
    parents: tuple[Tensor, ...]
    """[N] Parent of each node, as an index into the level above, from depth 1 on."""
    draft_rows: tuple[Tensor, ...]
    """[N] Draft row (`one_pass.py`) of each node, from the roots on."""


class HeadInputs(NamedTuple):
    """Inputs of a head besides its passes."""

    before_T: Tensor
    """Slot of the target's state that each row of the first pass reads; -1 for none."""
    last_R: Tensor
    """Last token of each text that drafts."""
    places: HeadPlaces
    rows_N: Tensor | None
    """Rows of mask blocks with needed results; None if the head has no mask blocks."""


class DraftWork(NamedTuple):
    """Work of a step's drafting.

    All its numbers are on the device; in a recorded step, always in the same buffers.
    """

    passes: Sequence[Pass]
    """The first pass reads texts and the known nodes right after them."""
    head_inputs: HeadInputs | None = None


class RecordedDrafter(Drafter, Protocol):
    """A drafter whose drafting is part of recorded steps: `start` and `below` look at no number."""

    @property
    def pass_nodes(self) -> Callable[[Fanout, int], Sequence[NodeInput]]:
        """Return a function of a text's fanout and last token.

        The function returns the text's nodes in each pass of `DraftWork`.
        """

    def table_of(self, row: Row, number: int) -> tuple[int, ...]:
        """Return the blocks with the K/V of a row's text and nodes. number: index of the row."""

    def work_of(
        self,
        passes: Sequence[Pass],
        fanouts: tuple[Fanout, ...],
        before_T: Tensor | None,
        last_R: Tensor,
    ) -> DraftWork:
        """Return the work of passes, for texts that draft these fanouts.

        before_T, last_R: as in `HeadInputs`.
        """

    def read_before(self, plan: Plan, num_text: int) -> None:
        """Read the missing tokens before the last `num_text` tokens, for texts that draft."""

    def start(self, work: DraftWork) -> Tensor:
        """Carry out the work up to the roots; return [N, V] logits below the roots.

        `below` continues.
        """
