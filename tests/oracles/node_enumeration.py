"""Exact laws at one node by enumeration.

Of the drafts of its children, and of the token that a rule emits given them.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from engine.speculation.rule_facts import MOST_LIKELY
from engine.speculation.theory import Law, top_tokens
from engine.speculation.verification.rule import NodeRule

Tuples = dict[tuple[int, ...], float]

_MOST_TUPLES, _TUPLES_AT_ONCE = 200_000, 4096


def draft_tuples(method: str, q: Law, count: int) -> Tuples:
    """Return the joint law of `count` children of one node.

    Shorter tuples if the support is smaller.
    """
    support = np.flatnonzero(q > 0).tolist()
    if method == MOST_LIKELY:
        return {tuple(top_tokens(q, count).tolist()): 1.0}
    if method == "iid" or count == 1:
        return {drawn: float(np.prod(q[list(drawn)])) for drawn in itertools.product(support, repeat=count)}
    if method == "without_replacement":
        result: Tuples = {}
        for drawn in itertools.permutations(support, min(count, len(support))):
            left = [q[[x for x in support if x not in drawn[:i]]].sum() for i in range(len(drawn))]
            result[drawn] = float(np.prod(q[list(drawn)] / np.array(left)))
        return result
    if method == "greedy":
        top = top_tokens(q, count - 1).tolist()
        rest = q.copy()
        rest[top] = 0
        if rest.sum() <= 0:
            return {tuple(top): 1.0}
        return {(*top, x): float(rest[x] / rest.sum()) for x in np.flatnonzero(rest > 0).tolist()}
    assert method == "spechub", method
    hub = int(q.argmax())
    others = [x for x in support if x != hub]
    if not others:
        return {(hub,): 1.0}
    pairs: Tuples = {(x, hub): float(q[x]) for x in others}
    pairs.update({(hub, x): float(q[hub] * q[x] / (1 - q[hub])) for x in others})
    return pairs


def conditional_laws(rule: NodeRule, p: npt.ArrayLike, q: npt.ArrayLike, drafts: Tuples, width: int) -> Law:
    """Return [tuples, V] the rule's law of the emitted token for every tuple of drafts.

    In one batch.
    """
    drafted = torch.zeros((len(drafts), width), dtype=torch.int64)
    present = torch.zeros((len(drafts), width), dtype=torch.bool)
    for i, tokens in enumerate(drafts):
        drafted[i, : len(tokens)] = torch.tensor(tokens)
        present[i, : len(tokens)] = True
    target, draft = (torch.from_numpy(np.asarray(law, dtype=np.float64)).expand(len(drafts), -1) for law in (p, q))
    laws: Law = rule(target, draft, drafted, present).numpy()
    return laws
