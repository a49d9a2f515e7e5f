"""Work of a step: the sizes on which its duration depends, and what its requests draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.fanout import Fanout
from engine.plan import Plan

Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
NO_DRAFTS: Fanout = ()
MIXED: Fanout = (0,)
"""Placeholder for steps whose requests draft different shapes, or text drafts."""
_MOST_OF = 0.75
"""Least share of the requests that must draft the same, so that a step counts as one shape."""


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a step, in the sizes on which its duration depends."""

    rows: int
    """Requests that emit."""
    text: int = 0
    """Tokens of their texts together."""
    nodes: int = 0
    """Drafted tokens that the target verifies."""
    prompt: int = 0
    """Known tokens that the target computes, without the last one of each request that emits."""
    prompt_text: int = 0
    """Tokens before each prompt token, summed over the prompt tokens."""
    read: int = 0
    """Tokens that the draft model computes, without the last one of each request that drafts."""
    drafts: Fanout = NO_DRAFTS
    """Drafts of nearly all requests, or `MIXED`."""

    @staticmethod
    def of(plan: Plan) -> StepWork:
        """Return the work of a plan."""
        return StepWork.from_rows(plan.rows)

    @staticmethod
    def from_rows(planned: Iterable[Any]) -> StepWork:
        """Return the work of a step with these rows, or planned rows."""
        rows = text = nodes = prompt = prompt_text = read = 0
        counts: dict[Fanout, int] = {}
        for row in planned:
            first, known, emits = row.first_index, row.num_known, row.emits
            read += row.num_draft_known
            chunk = known - emits
            if chunk:
                prompt += chunk
                prompt_text += chunk * (first + chunk // 2)
            if not emits:
                continue
            rows += 1
            text += first + known
            if row.fanout or row.text_drafts:
                nodes += row.num_nodes
                read -= bool(row.fanout)
                drafts = MIXED if row.text_drafts else row.fanout
                counts[drafts] = counts.get(drafts, 0) + 1
        return StepWork(
            rows=rows,
            text=text,
            nodes=nodes,
            prompt=prompt,
            prompt_text=prompt_text,
            read=read,
            drafts=_usual_drafts(counts, rows) if counts else NO_DRAFTS,
        )


def _usual_drafts(counts: dict[Fanout, int], rows: int) -> Fanout:
    """Return what nearly all rows draft. The last tokens of answers have shorter drafts."""
    if sum(counts.values()) < _MOST_OF * rows:
        return MIXED
    return max(counts, key=counts.__getitem__)
