"""Work of a step: the sizes on which its duration depends, and the shapes of drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Protocol

import msgspec

from engine.fanout import Fanout, level_widths
from engine.plan import Plan
from engine.request import TextDraft

Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
MIXED: Shape = (0, 1)
"""Placeholder for steps whose requests draft different shapes, trees or text drafts."""


class WorkRow(Protocol):
    """Facts of a row, or of a planned row, on which the work of a step depends (`plan.Row`)."""

    @property
    def emits(self) -> bool: ...
    @property
    def first_index(self) -> int: ...
    @property
    def num_known(self) -> int:
        """Return the number of known tokens that the target computes."""

    @property
    def num_draft_known(self) -> int:
        """Return the number of known tokens that the draft model computes."""

    @property
    def fanout(self) -> Fanout: ...
    @property
    def text_drafts(self) -> tuple[TextDraft, ...]: ...
    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def num_nodes(self) -> int: ...


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a step, in the sizes on which its duration depends."""

    rows: int
    """Requests that emit."""
    text: int
    """Tokens of their texts together."""
    nodes: int = 0
    """Drafted tokens that the target verifies."""
    num_drafting: int = 0
    """Requests that have drafted tokens, drawn tokens or text drafts."""
    passes: tuple[int, ...] = ()
    """Rows of each pass of the draft model, as if one-pass heads ran level by level, too."""
    prompt: int = 0
    """Known tokens that the target computes, without the last one of each request that emits."""
    prompt_text: int = 0
    """Tokens before each prompt token, summed over the prompt tokens."""
    read: int = 0
    """Tokens that the draft model computes, without the last one of each request that drafts."""
    shape: Shape = PLAIN
    is_eager: bool | None = None
    """Whether its operations are launched one by one; None: `StepTimes` predicts it."""

    @staticmethod
    def of(plan: Plan) -> StepWork:
        """Return the work of a plan."""
        return StepWork.from_rows(plan.rows)

    @staticmethod
    def from_rows(planned: Iterable[WorkRow]) -> StepWork:
        """Return the work of a step with these rows."""
        emitting = []
        prompt = prompt_text = read = 0
        for row in planned:
            if row.emits:
                emitting.append(row)
            read += row.num_draft_known
            chunk = row.num_known - row.emits
            if chunk:
                prompt += chunk
                prompt_text += chunk * (row.first_index + chunk // 2)
        drafting = [row for row in emitting if row.fanout or row.text_drafts]
        fanouts = {() if row.text_drafts else row.fanout for row in drafting}
        if len(fanouts) == 1 and all(fanouts):
            (fanout,) = fanouts
            widths: tuple[tuple[int, ...], ...] = (level_widths(fanout),) * len(drafting)
            nodes = sum(widths[0]) * len(drafting)
        else:
            widths = tuple([row.widths for row in drafting if row.fanout])
            nodes = sum([row.num_nodes for row in drafting])
        return StepWork(
            rows=len(emitting),
            text=sum([row.first_index + row.num_known for row in emitting]),
            nodes=nodes,
            num_drafting=len(drafting),
            passes=draft_passes(widths),
            prompt=prompt,
            prompt_text=prompt_text,
            read=read - len(widths),
            shape=shape_of_step(fanouts),
        )

    @property
    def plain(self) -> StepWork:
        """Return the work of the same requests decoded plainly, without prompts."""
        return StepWork(rows=self.rows, text=self.text)

    @property
    def without_prompts(self) -> StepWork:
        """Return the same work without prompts; the draft model does not read them either."""
        # Its K/V lacks one more token of a request whose whole chain was accepted.
        read = min(self.read, self.num_drafting)
        return msgspec.structs.replace(self, prompt=0, prompt_text=0, read=read, is_eager=None)

    @property
    def without_drafts(self) -> StepWork:
        """Return the work of the same requests decoded plainly, with the same prompts."""
        prompt, prompt_text = self.prompt, self.prompt_text
        return StepWork(rows=self.rows, text=self.text, prompt=prompt, prompt_text=prompt_text)


def shape_of_step(fanouts: Collection[Fanout]) -> Shape:
    """Return the shape of a step. fanouts: the distinct fanouts of the requests that draft; () of a
    request with text drafts.
    """
    if not fanouts:
        return PLAIN
    fanout = next(iter(fanouts))
    are_equal_chains = len(fanouts) == 1 and fanout and set(fanout[1:]) <= {1}
    return (fanout[0], len(fanout)) if are_equal_chains else MIXED


@lru_cache(maxsize=1024)
def draft_passes(widths: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the rows of each pass of the draft model. widths: nodes by depth, of each request.

    The first pass has a row per request. The later passes have the nodes of each depth but the
    last, from which nothing is drawn.
    """
    if not widths:
        return ()
    passes = [len(widths)]
    for depth in range(max(map(len, widths)) - 1):
        passes.append(sum(levels[depth] for levels in widths if depth + 1 < len(levels)))
    return tuple(passes)
