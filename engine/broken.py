"""Which requests a model gave numbers for that are none: NaN or infinity, after an overflow or in broken weights.

Such a request ends with an error; the others of its step go on. Its K/V is wiped before others get its blocks, because
what an attention kernel reads and weighs with zero would still make NaN of NaN. Blocks that others hold are left alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.drafters.draft import Draft
from engine.errors import NON_FINITE, RequestError
from engine.plan import Plan

ERROR = RequestError(
    "the model gave numbers for this request that are not finite (NaN or an overflow), so it was ended; float32 or "
    "bfloat16 weights overflow less easily than float16 (--dtype)",
    code=NON_FINITE,
)


def broken_rows(plan: Plan, draft: Draft | None, largest: npt.NDArray[np.float64]) -> frozenset[int]:
    """Sequence ids of the sampling rows with such target logits or draft laws; largest: `verdicts.largest_numbers`."""
    is_finite = np.isfinite(largest)
    if draft is None or is_finite.all():
        return frozenset()
    starts = draft.starts.tolist()
    of_target, of_draft = is_finite[: starts[-1]], is_finite[starts[-1] :]
    rows = plan.sampling_rows
    broken = {
        number
        for number, (start, tree) in enumerate(zip(starts, draft.trees, strict=False))
        if not all(of_target[start : start + 1 + tree.num_nodes])
    }
    for chain, row_L in enumerate(draft.chains.draft.row_CX.tolist()):
        number, rank = int(draft.layout.request_C[chain]), int(draft.layout.rank_C[chain])
        # A recorded step has chains that its requests do not draft, and such of no request.
        is_drafted = number < len(rows) and rank < rows[number].num_drafts
        if is_drafted and not all(of_draft[row] for row in row_L[: rows[number].draft_length]):
            broken.add(number)
    return frozenset(rows[number].sequence_id for number in broken)
