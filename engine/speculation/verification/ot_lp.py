"""The optimal-transport linear program at one position, for small vocabularies.

Couple Y ~ p with the drafts so that P(Y is a draft) is largest (SpecTr; Hu et al.): with D the set
of distinct tokens among n i.i.d. drafts, maximise sum S[D, x], x in D, subject to sum_D S[D, x] <=
p(x) and sum_x S[D, x] <= P(D). Given D the emitted token is x with probability S[D, x]/P(D), else
it is drawn from norm (p - sum_D S[D, .]). Solved exactly by HiGHS, one program per node: a
reference, not a way to serve.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.speculation.rule_facts import RULE_FACTS

_MAX_VOCABULARY = RULE_FACTS["ot_lp"].max_vocabulary or 0

_TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}

Numbers = npt.NDArray[np.float64]
DraftSet = tuple[int, ...]


def set_probabilities(q: Numbers, count: int) -> dict[DraftSet, float]:
    """Return P(D) of each set that `count` i.i.d. drafts can have, by inclusion and exclusion."""
    support = np.flatnonzero(q > 0).tolist()
    result: dict[DraftSet, float] = {}
    for size in range(1, min(count, len(support)) + 1):
        for tokens in itertools.combinations(support, size):
            subsets = (
                (-1) ** (size - k) * q[list(subset)].sum() ** count
                for k in range(1, size + 1)
                for subset in itertools.combinations(tokens, k)
            )
            result[tokens] = max(0.0, float(sum(subsets)))
    return result


@lru_cache(maxsize=256)
def transport_plan(
    target: tuple[float, ...], draft: tuple[float, ...], count: int
) -> tuple[dict[DraftSet, float], dict[tuple[DraftSet, int], float]]:
    """Return (P(D), S[D, x]), reduced by the solver's tolerance to be feasible."""
    # Imported here because it takes a third of a second, and most servers never use this rule.
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    p, q = np.array(target), np.array(draft)
    sets = set_probabilities(q, count)
    pairs = [(drafts, x) for drafts in sets for x in drafts]
    number = {drafts: len(p) + i for i, drafts in enumerate(sets)}
    rows = [x for _, x in pairs] + [number[drafts] for drafts, _ in pairs]
    columns = list(range(len(pairs))) * 2
    matrix = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(p) + len(sets), len(pairs)))
    bounds = np.concatenate([p, np.array(list(sets.values()))])
    solved = linprog(-np.ones(len(pairs)), A_ub=matrix.tocsr(), b_ub=bounds, bounds=(0, None), options=_TIGHT)
    assert solved.status == 0, solved.message
    mass = np.maximum(solved.x, 0.0)
    for side in (rows[: len(pairs)], rows[len(pairs) :]):
        used = np.bincount(side, weights=mass, minlength=len(bounds))
        scale = np.divide(bounds, used, out=np.ones_like(bounds), where=used > bounds)
        mass = mass * scale[side]
    return sets, dict(zip(pairs, mass.tolist(), strict=True))


def ot_lp(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Return the law of the emitted token given the set of drafts."""
    assert target_NV.shape[1] <= _MAX_VOCABULARY, "the program grows as V^n; request_checks refuses larger vocabularies"
    probs_NV = target_NV.clone()
    for node, count in enumerate(present_NK.sum(1).tolist()):
        if not count:
            continue
        p, q = (rows[node].cpu().numpy() / float(rows[node].sum()) for rows in (target_NV, draft_NV))
        drafts = tuple(sorted(set(drafted_NK[node][present_NK[node]].tolist())))
        sets, plan = transport_plan(tuple(p.tolist()), tuple(q.tolist()), count)
        probability = sets.get(drafts, 0.0)
        if probability <= 0:
            continue
        law = np.zeros_like(p)
        for x in drafts:
            law[x] = plan[drafts, x] / probability
        rest = p.copy()
        for (_, x), mass in plan.items():
            rest[x] = max(0.0, rest[x] - mass)
        rest = rest / rest.sum() if rest.sum() > 0 else p
        probs_NV[node] = torch.from_numpy(law + max(0.0, 1 - law.sum()) * rest)
    return probs_NV
