"""Text drafts of adaptive requests in a step: found, weighed against the load, and compared with what followed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values

from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.control.text_choice import Numbers, TextChoice, TextOption
from engine.scheduling.rows import PlannedRow
from engine.scheduling.sequence import Sequence
from engine.scheduling.text_drafters.answers import AnswerStore
from engine.scheduling.text_drafters.tree import TextTree


class TextPlanner:
    """Adds text drafts to the rows for which they are worth their time."""

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of a request in a step."""
        self.choice = TextChoice()
        self.answers = AnswerStore()
        self._most_nodes = most_nodes

    def planned(
        self, parts: Values[PlannedRow], times: StepTimes, reached: Callable[[PlannedRow], Numbers]
    ) -> list[PlannedRow]:
        """Return the parts that get text drafts, with them; parts: of the whole step.

        reached: as in `TextOption`.
        """
        emitting = [part for part in parts if part.emits]
        wanting = [part for part in emitting if weighs_text_drafts(part.sequence)]
        if not wanting or not self.choice.is_due(len(emitting)):
            return []
        trees = [self._tree(part.sequence) for part in wanting]
        if not any(map(len, trees)):
            return []
        reached_by_id = {part.sequence.sequence_id: reached(part) for part in emitting}
        options = [
            TextOption(
                tree.parents,
                tree.probabilities,
                reached_by_id[part.sequence.sequence_id],
                tree.depths,
                bool(part.fanout),
            )
            for tree, part in zip(trees, wanting, strict=True)
        ]
        num_tokens = sum([1.0 + float(depths.sum()) for depths in reached_by_id.values()])
        chosen = self.choice.choose(times, StepWork.from_rows(parts), num_tokens, options)
        return [
            part._replace(text_drafts=tree.chains(nodes), num_nodes=part.num_nodes + len(nodes))
            for part, tree, nodes in zip(wanting, trees, chosen, strict=True)
            if nodes
        ]

    def _tree(self, sequence: Sequence) -> TextTree:
        acceptance = self.choice.acceptance(sequence.request.sampling.is_greedy)
        # One token must remain to be emitted after the drafts.
        deepest = min(sequence.num_remaining - 1, self._most_nodes)
        finder = sequence.text_draft_finder
        sequence.text_tree = finder.tree(sequence.tokens, acceptance.estimate, self._most_nodes, deepest)
        return sequence.text_tree

    def learn(self, sequence: Sequence, emitted: Values[int]) -> None:
        """Compare what was found after a text, drafted or not, with the tokens that followed."""
        tree, sequence.text_tree = sequence.text_tree, None
        if tree is None:
            return
        acceptance = self.choice.acceptance(sequence.request.sampling.is_greedy)
        for (source, num_agreeing), is_right in tree.outcomes(emitted):
            acceptance.observe(source, num_agreeing, is_right)


def weighs_text_drafts(sequence: Sequence) -> bool:
    """Whether the load decides on its text drafts; otherwise they are a function of the text."""
    return sequence.request.speculation.adaptive and bool(sequence.text_draft_finder)
