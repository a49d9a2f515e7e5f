"""Text drafts of adaptive requests: found, weighed against the load, and learned from."""

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
        """most_nodes: most drafted tokens of a request in a step."""
        self.choice = TextChoice()
        self.answers = AnswerStore()
        self._most_nodes = most_nodes

    def planned(
        self, rows: Values[PlannedRow], times: StepTimes, reached: Callable[[PlannedRow], Numbers]
    ) -> list[PlannedRow]:
        """Return the rows that get text drafts, with these drafts. reached: see `TextOption`."""
        emitting = [row for row in rows if row.emits]
        weighing = [row for row in emitting if text_drafts_depend_on_load(row.sequence)]
        if not weighing or not self.choice.is_due(len(emitting)):
            return []
        trees = [self._tree(row.sequence) for row in weighing]
        if not any(map(len, trees)):
            return []
        reached_by_id = {row.sequence.sequence_id: reached(row) for row in emitting}
        options = []
        for row, tree in zip(weighing, trees, strict=True):
            depths = reached_by_id[row.sequence.sequence_id]
            options.append(TextOption(tree.parents, tree.probabilities, depths, tree.depths))
        num_tokens = sum([1.0 + float(depths.sum()) for depths in reached_by_id.values()])
        chosen = self.choice.choose(times, StepWork.from_rows(rows), num_tokens, options)
        return [
            row._replace(text_drafts=tree.chains(nodes), num_nodes=row.num_nodes + len(nodes))
            for row, tree, nodes in zip(weighing, trees, chosen, strict=True)
            if nodes
        ]

    def _tree(self, sequence: Sequence) -> TextTree:
        acceptance = self.choice.acceptance(sequence.request.sampling.is_greedy)
        # One token must remain to be emitted after the drafts.
        deepest = min(sequence.num_remaining - 1, self._most_nodes)
        finder = sequence.text_draft_finder
        tree = finder.tree(sequence.tokens, acceptance.estimate, self._most_nodes, deepest)
        sequence.text_tree = tree
        return tree

    def learn(self, sequence: Sequence, emitted: Values[int]) -> None:
        """Compare the continuations of a text, drafted or not, with the tokens that followed."""
        tree = sequence.text_tree
        sequence.text_tree = None
        if tree is None:
            return
        acceptance = self.choice.acceptance(sequence.request.sampling.is_greedy)
        for (source, num_agreeing), is_right in tree.outcomes(emitted):
            acceptance.observe(source, num_agreeing, is_right)


def text_drafts_depend_on_load(sequence: Sequence) -> bool:
    """Whether its text drafts depend on the load; otherwise they are a function of the text."""
    return sequence.request.speculation.adaptive and bool(sequence.text_draft_finder)
