"""Which requests a model gave numbers for that are none: NaN or infinity, after an overflow or in broken weights.

Such a request ends with an error; the others of its step go on. Its K/V is wiped before others get its blocks, because
what an attention kernel reads and weighs with zero would still make NaN of NaN. Blocks that others hold are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.drafters.draft import Draft
from engine.errors import NON_FINITE, RequestError
from engine.plan import Plan

ERROR = RequestError(
    "the model gave numbers for this request that are not finite (NaN or an overflow), so it was ended; float32 or "
    "bfloat16 weights overflow less easily than float16 (--dtype)",
    code=NON_FINITE,
)


def broken_rows(plan: Plan, draft: Draft | None, logits_NV: Tensor) -> frozenset[int]:
    """Sequence ids of the sampling rows with such target logits or draft laws.

    logits_NV: of the sampling rows' nodes. One copy to the host, of a number a row, behind that of the verdict.
    """
    if draft is None:
        return frozenset()
    drafted_MV = draft.chains.draft.law_NV
    # The largest number of a row is NaN where any of them is; a token that cannot come has minus infinity.
    largest = [logits_NV.amax(1), *([drafted_MV.amax(1)] if len(drafted_MV) else [])]
    is_finite = torch.isfinite(torch.cat(largest)).tolist()
    if all(is_finite):
        return frozenset()
    of_target, of_draft = is_finite[: len(logits_NV)], is_finite[len(logits_NV) :]
    starts = draft.starts.tolist()
    rows = plan.sampling_rows
    broken = {number for number in range(len(rows)) if not all(of_target[starts[number] : starts[number + 1]])}
    for chain, row_L in enumerate(draft.chains.draft.row_CX.tolist()):
        number = int(draft.layout.request_C[chain])
        if not all(of_draft[row] for row in row_L[: rows[number].draft_length]):
            broken.add(number)
    return frozenset(rows[number].sequence_id for number in broken)
